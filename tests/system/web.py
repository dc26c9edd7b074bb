"""Web servers as processes of their own: how each is started, and what its clients see."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2

from tests.servers import free_port, until

COMMANDS = {
    "uvicorn": ["uvicorn", "--host", "127.0.0.1", "--port", "{port}"],
    "uvicorn --workers 3": ["uvicorn", "--host", "127.0.0.1", "--port", "{port}", "--workers", "3"],
    "hypercorn": ["hypercorn", "--bind", "127.0.0.1:{port}", "--graceful-timeout", "3"],
    "granian": ["granian", "--interface", "asgi", "--host", "127.0.0.1", "--port", "{port}"],
    "gunicorn -k asgi": ["gunicorn", "-k", "asgi", "-b", "127.0.0.1:{port}"],
}
"""How to start each server, but for the app."""


@dataclass
class Web:
    """One server process with its workers. What it prints goes to a file beside its log."""

    server: str
    where: str
    directory: Path
    arguments: list[str] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What its workers wrote down."""
        return self.directory / "log"

    def start(self, app: str = "tests.system.service:app") -> Self:
        """Run it, without waiting."""
        command = [part.format(port=self.port) for part in COMMANDS[self.server]]
        environment = os.environ | {"GREL_WHERE": self.where, "GREL_LOG": str(self.log), "PYTHONUNBUFFERED": "1"}
        with (self.directory / f"{self.port}.out").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *self.arguments, app], env=environment, stdout=out, stderr=out
            )
        return self

    def ready(self) -> Self:
        """Wait until it answers that it is ready."""
        until(lambda: self.ended or self.status("/readyz") == 200, 30, f"{self.server} is ready")
        assert not self.ended, self.output
        return self

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process is None or self.process.poll() is not None

    @property
    def output(self) -> str:
        """What it printed."""
        return (self.directory / f"{self.port}.out").read_text(encoding="utf-8")

    def status(self, path: str) -> int:
        """What a GET is answered; 0 when nobody answers."""
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(self.url + path, timeout=5).status_code
        return 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def connect(self, method: str, path: str) -> socket.socket:
        """Send a request, and leave its answer to the caller."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n".encode())
        return connection

    @contextlib.contextmanager
    def events(self, pid: int | None = None) -> Iterator[int]:
        """Keep an event stream of the worker `pid` open, of any one for None; gives its pid."""
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stream = stack.enter_context(self.connect("GET", "/events"))
                answer = b""
                while b"data: " not in answer or not answer.rpartition(b"data: ")[2].partition(b"\n")[1]:
                    answer += stream.recv(4096)
                serving = int(answer.rpartition(b"data: ")[2].split()[0])
                if pid in {None, serving}:
                    yield serving
                    return
            raise AssertionError(f"no stream came from worker {pid}")

    def workers(self) -> set[int]:
        """The pids of the server and of all its children."""
        assert self.process is not None
        found, pending = set(), [self.process.pid]
        while pending:
            pid = pending.pop()
            found.add(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pending += map(int, children.read_text(encoding="utf-8").split())
        return found

    def stop(self) -> int:
        """Ask it to end; its exit status. It is killed, by its pid, when it does not."""
        assert self.process is not None
        if not self.ended:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(15)


def entries(log: Path, what: str) -> list[dict[str, Any]]:
    """The lines of that kind in a log."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["what"] == what]
