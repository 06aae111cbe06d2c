"""Serves ulak.metrics_text() to Prometheus. psql finds the database by PGHOST, PGUSER and so on."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

QUERY = ["psql", "--no-psqlrc", "--no-align", "--tuples-only", "--quiet", "--command", "select ulak.metrics_text()"]


class Exporter(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.answer(404, b"the metrics are at /metrics\n")
            return
        try:
            done = subprocess.run(QUERY, capture_output=True, timeout=10, check=True)
        except subprocess.CalledProcessError as error:
            self.answer(503, error.stderr)
        except subprocess.TimeoutExpired:
            self.answer(503, b"the database did not answer within 10 seconds\n")
        else:
            self.answer(200, done.stdout)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1]) if len(sys.argv) > 1 else 9188), Exporter).serve_forever()
