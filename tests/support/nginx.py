"""nginx as a receiver that is never the bottleneck: one process, answers 200 and nothing else."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.debian import unpacked
from support.ports import start_on_free_port
from support.sessions import wait_until

CONFIG = """\
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_body_buffer_size 64k;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{ return 200; }}
    }}
}}
"""


def program() -> Path:
    """The system's, else Debian's."""
    found = shutil.which("nginx")
    if found:
        return Path(found)
    return unpacked("nginx") / "usr/sbin/nginx"


@contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Its URL."""
    folder.mkdir(parents=True, exist_ok=True)

    def start(port: int) -> tuple[subprocess.Popen[bytes], int]:
        config = folder / "nginx.conf"
        config.write_text(CONFIG.format(folder=folder, port=port))
        command: list[str | Path] = [program(), "-p", folder, "-e", folder / "error.log", "-c", config]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

        def is_up() -> bool:
            assert process.poll() is None, (folder / "error.log").read_text()
            return (folder / "pid").exists()

        wait_until(is_up, "nginx")
        return process, port

    process, port = start_on_free_port(start)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait()
