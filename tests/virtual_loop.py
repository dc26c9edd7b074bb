"""An event loop whose clock jumps to the next timer, so that waiting costs a test nothing.

    @pytest.fixture
    def anyio_backend() -> tuple[str, dict[str, object]]:
        return "asyncio", {"loop_factory": VirtualLoop}

The clock stands still while code runs and jumps only when nothing else can happen. Real time flows instead, for as long
as it takes, while

* a socket, pipe or server is registered with the loop (its peer may answer);
* another thread runs Python or C code; a thread blocked on a lock, an event or a queue waits for us and does not count.

Limits. A thread that was woken but has not run yet looks blocked. On Linux the kernel knows better; elsewhere only
`LOOKS` helps: so many times, half a millisecond apart, must all threads look blocked, and a jump costs that much while
other threads exist. A thread blocked in C without a frame of `threading` or `queue` (`SimpleQueue.get`) counts as
running: time then flows, which is slow but never wrong. `time.time()` and `time.monotonic()` do not jump. For tests on
memory; whoever needs a server needs real time.
"""

import asyncio
import selectors
import sys
import threading
import time
from pathlib import Path

LOOKS = 4
WAITING_IN = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
KERNEL = Path("/proc/self/task")


def is_blocked(thread: threading.Thread) -> bool:
    """Whether the thread is in a wait of `threading`, `queue` or an idle pool, and nobody has woken it."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not (frame.f_code.co_filename.endswith(WAITING_IN) or frame.f_code.co_name == "_worker"):
        return False
    try:
        state = (KERNEL / str(thread.native_id) / "stat").read_text()
    except OSError:
        return not KERNEL.exists()
    return state.rpartition(")")[2].split()[0] == "S"


def all_others_blocked() -> bool:
    """Whether nothing can come from another thread until this one does something."""
    return all(is_blocked(thread) for thread in threading.enumerate() if thread is not threading.current_thread())


class VirtualSelector(selectors.DefaultSelector):
    """A selector that answers a time-out at once, by moving `now` forward, when nothing real can happen."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Real events if there are any; else nothing, and `timeout` seconds have passed."""
        began = time.monotonic()
        waited = 0.0
        events = super().select(0)
        while not events and (timeout is None or waited < timeout):
            step = self.patience()
            if step == 0 and timeout is not None:
                self.now += timeout
                return events
            events = super().select(None if step == 0 else step if timeout is None else min(step, timeout - waited))
            waited = time.monotonic() - began
        self.now += waited
        return events

    def patience(self) -> float:
        """Seconds to wait for the world outside, before asking again; 0 when nothing can come from there."""
        if len(self.get_map()) > 1:  # the loop's own alarm is always there
            return 60.0
        looks = LOOKS if threading.active_count() > 1 else 0
        for _ in range(looks):
            if super().select(0.0005) or not all_others_blocked():
                return 0.001
        return 0.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop to hand to anyio's pytest plugin as its `loop_factory`."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        """Seconds since the loop began, on its own clock."""
        return self.virtual.now
