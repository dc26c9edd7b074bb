"""A TCP proxy that makes a server slow, silent, rude or absent, and speaks TLS for one that cannot.

    async with Proxy(port=server.port) as proxy:
        proxy.replies.delay = 0.2            # each chunk arrives this much later
        proxy.requests.lost = True           # read and thrown away: the other side waits for ever
        proxy.reset()                        # every open connection ends with RST
        await proxy.refuse()                 # new connections are refused ...
        await proxy.listen()                 # ... until it listens again, on the same port

It runs on the loop of whoever opens it, so that loop must not be a virtual one.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from dataclasses import dataclass, field
from typing import Self

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds. Closing sends RST.


@dataclass
class Direction:
    """What happens to bytes on their way: read at each chunk, so a change holds at once."""

    delay: float = 0.0
    lost: bool = False
    bytes: int = 0

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Pass everything on until `source` ends, then end `target`."""
        with contextlib.suppress(OSError):
            while chunk := await source.read(65536):
                self.bytes += len(chunk)
                if self.delay:
                    await asyncio.sleep(self.delay)
                if not self.lost:
                    target.write(chunk)
                    await target.drain()
        target.close()


@dataclass
class Proxy:
    """Forwards `127.0.0.1:listening` to `host:port`; `listening` is chosen when it opens. Use as an async context."""

    port: int
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    """A server's context: clients speak TLS to the proxy, the proxy speaks plainly to the server."""
    listening: int = 0
    connections: int = 0
    """Connections accepted so far."""
    requests: Direction = field(default_factory=Direction)
    replies: Direction = field(default_factory=Direction)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self.reset()
        while self._open:
            await asyncio.sleep(0.001)

    async def listen(self) -> None:
        """Accept connections, on the same port as before."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.listening, ssl=self.tls)
            self.listening = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Refuse new connections; the open ones go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def reset(self) -> None:
        """End every open connection the hard way, in both directions."""
        for writer in self._open:
            plain: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            upstream_reader, upstream = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        self._open.add(upstream)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self.requests.carry(reader, upstream))
                both.create_task(self.replies.carry(upstream_reader, writer))
        finally:
            writer.close()
            upstream.close()
            self._open -= {writer, upstream}
