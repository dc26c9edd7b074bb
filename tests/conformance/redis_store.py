"""A share of a real Redis: reached through a proxy that can delay, on a clock that tests can move or stop."""

import secrets
from typing import Any

from redis.asyncio import Redis

from grel_core.providers.redis import SCRIPT, RedisProvider
from tests.harness import Delay, Harness
from tests.proxy import Direction, Proxy
from tests.servers import Valkey

TIME = "redis.call('TIME')"
# In the place of TIME: where a test stopped the clock, or the server's own time plus what the test skipped.
MOVABLE = """(function()
  local stopped, skipped = unpack(redis.call('HMGET', '{clock}', 'stopped', 'skipped'))
  local time = redis.call('TIME')
  local now = tonumber(stopped) or (time[1] * 1000000 + time[2] + tonumber(skipped or 0))
  return {{math.floor(now / 1000000), now % 1000000}}
end)()"""


class Slow(Direction):
    """Each chunk takes a random time."""

    def __init__(self, source: Delay) -> None:
        self.source = source
        super().__init__()

    @property
    def delay(self) -> float:
        return self.source.draw()

    @delay.setter
    def delay(self, value: float) -> None:
        self.source.longest = value


class RedisStore(Harness):
    """One prefix on a server that runs already."""

    name = "redis"

    def __init__(self, server: Valkey) -> None:
        super().__init__()
        self.server = server
        self.prefix = f"t{secrets.token_hex(4)}"
        self.client: Redis = Redis.from_url(server.url, decode_responses=True)
        self.proxy = Proxy(port=server.port)
        self.proxy.requests, self.proxy.replies = Slow(self.delay), Slow(self.delay)

    async def start(self) -> None:
        await self.proxy.__aenter__()

    async def stop(self) -> None:
        async for key in self.client.scan_iter(f"{self.prefix}:*", count=1000):
            await self.client.delete(key)
        await self.client.aclose()
        await self.proxy.__aexit__()

    def provider(self, **options: Any) -> RedisProvider:
        url = f"redis://127.0.0.1:{self.proxy.listening}/0"
        provider = RedisProvider(url, **{"prefix": self.prefix, **options})
        assert SCRIPT.count(TIME) == 1
        provider.script = SCRIPT.replace(TIME, MOVABLE.format(clock=f"{self.prefix}:clock"))
        return provider

    async def freeze(self, now: int = 4_102_444_800_000_000, wall: int = 4_102_444_800_000_000) -> None:
        # Far ahead, so that nothing expires by the server's own clock meanwhile.
        await super().freeze(now, wall)
        await self.client.hset(f"{self.prefix}:clock", "stopped", str(now))

    async def advance(self, seconds: float) -> None:
        await super().advance(seconds)
        if self.clock.fixed is not None:
            now = self.clock.fixed.now
            await self.client.hset(f"{self.prefix}:clock", "stopped", str(now))
        else:
            await self.client.hset(f"{self.prefix}:clock", "skipped", str(self.clock.skipped))
            second, microsecond = await self.client.time()
            now = second * 1_000_000 + microsecond + self.clock.skipped
        async for key in self.client.scan_iter(f"{self.prefix}:*", count=1000):
            if 0 < await self.client.pexpiretime(key) * 1000 <= now:
                await self.client.delete(key)

    async def keys(self) -> int:
        found = [key async for key in self.client.scan_iter(f"{self.prefix}:lock:*", count=1000)]
        return len(found)
