"""A lock for plain functions in worker threads, and its handle passed from a thread to the event loop.

Prints:

    8 threads counted to 8
    taken in a thread, given back on the event loop
    on the loop's own thread: EventLoopDeadlockError
"""

import asyncio
import time

from grel_core import Grelmicro
from grel_core.coordination import Lock, LockHandle, locked
from grel_core.providers.memory import MemoryProvider
from grel_core.threads import EventLoopDeadlockError

steps: list[int] = []
lock = Lock("hand-over")


@locked("counter", timeout=5)
def step() -> None:
    """A plain function: `@locked` takes the lock through `from_thread`, so call it in a worker thread."""
    number = len(steps) + 1
    time.sleep(0.001)
    steps.append(number)


def take() -> LockHandle:
    """The thread is the holder: give a timeout, because a waiting thread is one less for everybody."""
    return lock.from_thread.acquire(timeout=1)


async def main() -> None:
    """The event loop goes on while the threads wait for each other."""
    async with Grelmicro(uses=[MemoryProvider()]):
        await asyncio.gather(*(asyncio.to_thread(step) for _ in range(8)))
        print(f"8 threads counted to {max(steps)}")

        handle = await asyncio.to_thread(take)
        await handle.release()
        print("taken in a thread, given back on the event loop")

        try:
            lock.from_thread.acquire_nowait()
        except EventLoopDeadlockError as error:
            print(f"on the loop's own thread: {type(error).__name__}")


if __name__ == "__main__":
    asyncio.run(main())
