"""Serves ulak.metrics_text() to Prometheus. psql finds the database by PGHOST, PGUSER and so on.

    python3 exporter.py [[host:]port]        # 127.0.0.1:9188

It exports every endpoint. With thousands, ULAK_EXPORTER_ENDPOINTS=200 bounds them to those with the most messages, and
ULAK_EXPORTER_ACTIVE_WITHIN='1 hour' to those that were used lately; totals count all.

On an address that others reach it wants a token, ULAK_EXPORTER_TOKEN, which Prometheus sends as
`authorization: {credentials: ...}`. What psql says of a failure goes to standard error, not to whoever asks.
"""

import argparse
import hmac
import ipaddress
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PSQL = ["psql", "--no-psqlrc", "--no-align", "--tuples-only", "--quiet"]
# psql quotes variables in what it reads, not in --command.
QUERY = b"""select ulak.metrics_text(
    p_active_within => nullif(:'within', '')::interval, p_limit => nullif(:'most', '')::integer
);"""
BOUNDS = {"within": "ULAK_EXPORTER_ACTIVE_WITHIN", "most": "ULAK_EXPORTER_ENDPOINTS"}
SECONDS = 10
TOKEN = os.environ.get("ULAK_EXPORTER_TOKEN", "")
# However many ask, the database is asked by one.
ASKING = threading.Lock()


class Exporter(BaseHTTPRequestHandler):
    # A connection that says nothing ends.
    timeout = SECONDS

    def do_GET(self) -> None:
        given = self.headers.get("authorization", "").encode("latin-1", "replace")
        if TOKEN and not hmac.compare_digest(given, f"Bearer {TOKEN}".encode()):
            self.answer(401, b"a token is needed\n")
        elif self.path != "/metrics":
            self.answer(404, b"the metrics are at /metrics\n")
        elif not ASKING.acquire(timeout=SECONDS):
            self.answer(503, b"too many ask at once\n")
        else:
            try:
                self.answer(*metrics())
            finally:
                ASKING.release()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def metrics() -> tuple[int, bytes]:
    try:
        bounds = [f"--set={name}={os.environ.get(variable, '')}" for name, variable in BOUNDS.items()]
        command = [*PSQL, "--set=ON_ERROR_STOP=1", *bounds]
        return 200, subprocess.run(command, input=QUERY, capture_output=True, timeout=SECONDS, check=True).stdout
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr.decode(errors="replace"))
        return 503, b"the database can't be asked: the exporter's log says why\n"
    except subprocess.TimeoutExpired:
        return 503, f"the database did not answer within {SECONDS} seconds\n".encode()


def place(given: str) -> tuple[str, int]:
    host, _, port = given.rpartition(":")
    return host or "127.0.0.1", int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", nargs="?", default="9188", metavar="[host:]port", type=place)
    host, port = parser.parse_args().place
    if not TOKEN and not (host == "localhost" or ipaddress.ip_address(host).is_loopback):
        sys.exit(f"others reach {host}: set ULAK_EXPORTER_TOKEN")
    ThreadingHTTPServer((host, port), Exporter).serve_forever()


if __name__ == "__main__":
    main()
