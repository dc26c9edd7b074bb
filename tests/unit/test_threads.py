"""Worker threads: what they hold is theirs, the loop never waits for itself, and nothing hangs."""

import _thread
import asyncio
import concurrent.futures
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from grel_core import Grelmicro, NotStartedError, OutOfContextError, ShuttingDownError
from grel_core.component import bound
from grel_core.coordination import Lock, LockHandle, LockNotOwnedError, LockReentrantError, LockTimeoutError
from grel_core.coordination.hold import _warn_pool
from grel_core.coordination.owner import current_thread, thread
from grel_core.lease.names import LOCK, Key
from grel_core.threads import EventLoopDeadlockError, call_in_loop
from tests.harness import eventually
from tests.unit.fakes import Place

pytestmark = pytest.mark.anyio

T = TypeVar("T")
CART = Key(LOCK, "cart")


async def in_thread(work: Callable[[], T], *, raw: bool = False) -> tuple[T, int]:
    """What `work` gives in a thread of its own, which ends with it, and the id of that thread."""
    answer: concurrent.futures.Future[tuple[T, int]] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result((work(), threading.get_ident()))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            answer.set_exception(error)

    if raw:
        _thread.start_new_thread(run, ())
        return await asyncio.wrap_future(answer)
    worker = threading.Thread(target=run)
    worker.start()
    result = await asyncio.wrap_future(answer)
    worker.join()
    return result


async def test_the_thread_of_the_loop_is_refused_and_named_the_cure() -> None:
    async with Grelmicro(uses=[Place()]):
        sync = Lock("cart").from_thread
        with pytest.raises(EventLoopDeadlockError, match="await the async method"):
            sync.acquire()
        for call in (sync.acquire_nowait, sync.locked, sync.owned, sync.__enter__, sync.hold().__enter__):
            with pytest.raises(EventLoopDeadlockError):
                call()
        async with Lock("cart") as handle:
            with pytest.raises(EventLoopDeadlockError):
                handle.from_thread.release()
            assert await Lock("cart").owned()


async def test_before_the_backend_is_open_every_call_says_so() -> None:
    lock = Lock("cart", backend=Place().lock())
    sync = lock.from_thread
    for call in (sync.acquire, sync.acquire_nowait, sync.locked, sync.owned, sync.__enter__):
        with pytest.raises(NotStartedError, match="is not open; enter it"):
            await in_thread(call)
    with pytest.raises(OutOfContextError):
        await in_thread(Lock("cart").from_thread.acquire)


async def test_a_thread_finds_the_app_through_the_context_that_it_was_given() -> None:
    async with Grelmicro(uses=[Place()]):
        lock = Lock("cart")
        assert await asyncio.to_thread(lock.from_thread.locked) is False
        context = contextvars.copy_context()
        assert (await in_thread(lambda: context.run(lock.from_thread.locked)))[0] is False
        with pytest.raises(OutOfContextError, match="async with micro"):
            await in_thread(lock.from_thread.locked)


async def test_context_variables_are_carried_into_the_loop_and_the_drain_refuses_threads_of_requests_too() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    loop = asyncio.get_running_loop()

    async def look() -> str:
        return variable.get()

    def work() -> str:
        variable.set("from the thread")
        return call_in_loop(loop, look)

    assert await asyncio.to_thread(work) == "from the thread"
    assert variable.get() == ""
    micro = Grelmicro(uses=[Place()])
    async with micro:
        micro.begin_shutdown()
        with bound(micro, request=True), pytest.raises(ShuttingDownError):
            await asyncio.to_thread(Lock("cart").from_thread.acquire, timeout=5)


@pytest.mark.parametrize("raw", [False, True])
async def test_the_thread_is_the_holder_and_no_other_thread_or_task(raw: bool) -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock())
        sync = lock.from_thread

        def hold() -> int:
            with sync as handle:
                assert sync.owned()
                with pytest.raises(LockReentrantError):
                    Lock("cart", backend=place.lock()).from_thread.acquire()
                loop_call(others)
                assert sync.extend() is handle
                return handle.fencing_token

        def loop_call(body: Callable[[], None]) -> None:
            concurrent.futures.wait([asyncio.run_coroutine_threadsafe(checked(body), loop)])

        async def checked(body: Callable[[], None]) -> None:
            failures.append(None)
            assert not await lock.owned()
            with pytest.raises(LockNotOwnedError):
                await lock.release()
            await in_thread(body, raw=raw)
            failures.pop()

        def others() -> None:
            assert not sync.owned()
            for call in (sync.extend, sync.release):
                with pytest.raises(LockNotOwnedError):
                    call()
            with pytest.raises(LockTimeoutError):
                sync.acquire(timeout=0.01)

        failures: list[None] = []
        loop = asyncio.get_running_loop()
        fence, _ = await in_thread(hold, raw=raw)
        assert fence > 0
        assert not failures
        assert not await lock.locked()


@pytest.mark.parametrize("raw", [False, True])
async def test_a_recycled_thread_id_inherits_nothing(raw: bool) -> None:
    async with Place() as place:
        sync = Lock("cart", backend=place.lock()).from_thread
        _, dead = await in_thread(lambda: sync.acquire().fencing_token, raw=raw)

        def stranger() -> None:
            assert not sync.owned()
            for call in (sync.release, sync.extend):
                with pytest.raises(LockNotOwnedError):
                    call()
            with pytest.raises(LockTimeoutError):  # it waits for the dead thread's lease; it is not nested in it
                sync.acquire(timeout=0.01)

        for _ in range(100):
            _, ident = await in_thread(stranger, raw=raw)
            if ident == dead:
                break
        else:
            pytest.fail("no thread got the id of the dead one")


async def test_a_recycled_task_inherits_nothing() -> None:
    async with Grelmicro(uses=[Place()]):
        lock = Lock("cart")
        dead = asyncio.create_task(lock.acquire())
        await dead
        number = id(dead)
        del dead
        for _ in range(1000):
            task = asyncio.create_task(lock.owned())
            assert not await task
            if id(task) == number:
                break


async def test_the_bookkeeping_of_threads_goes_away_with_them() -> None:
    from grel_core.coordination import owner
    from grel_core.coordination.handle import _holdings

    async with Place() as place:
        sync = Lock("cart", backend=place.lock(), lease_duration=0.001).from_thread

        def leave_held() -> None:
            sync.acquire()
            thread(threading.get_ident())

        before = len(_holdings), len(owner._by_id), len(owner._unborn)
        for _ in range(20):
            await in_thread(leave_held)
        await eventually(lambda: (len(_holdings), len(owner._by_id), len(owner._unborn)) <= before)


async def test_the_operations_by_thread_id_act_for_that_thread() -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock())
        idents, end = list[int](), threading.Event()

        def work() -> bool:
            idents.append(threading.get_ident())
            end.wait()
            assert lock.from_thread.owned()  # taken for this thread before it ever asked for anything
            lock.from_thread.release()
            return lock.from_thread.owned()

        worker = asyncio.create_task(in_thread(work))
        await eventually(lambda: bool(idents))
        (ident,) = idents
        handle = await lock.do_thread_acquire(ident, timeout=1)
        assert (await lock.do_thread_extend(ident)).token == handle.token
        with pytest.raises(LockReentrantError):
            await lock.do_thread_acquire_nowait(ident)
        await lock.do_thread_release(ident)
        with pytest.raises(LockNotOwnedError):
            await lock.do_thread_release(ident)
        await lock.do_thread_acquire_nowait(ident)
        end.set()
        assert (await worker)[0] is False
        with pytest.raises(ValueError, match="no thread has the id"):
            await lock.do_thread_acquire(-1)


async def test_each_thread_has_one_owner_for_life() -> None:
    owners: list[object] = []

    def ask() -> None:
        owners.extend([current_thread(), current_thread(), thread(threading.get_ident())])

    await in_thread(ask)
    await in_thread(ask, raw=True)
    assert len(set(map(id, owners[:3]))) == len(set(map(id, owners[3:]))) == 1
    assert owners[0] is not owners[3]


async def test_a_handle_may_be_released_from_another_thread() -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock())
        handle, _ = await in_thread(lock.from_thread.acquire)
        await in_thread(handle.from_thread.extend)
        await in_thread(handle.from_thread.release)
        assert not await lock.locked()
        handle = await lock.acquire()
        await in_thread(handle.from_thread.release)
        assert not await lock.owned()


async def test_two_threads_that_contend_both_get_in() -> None:
    async with Place() as place:
        inside = 0

        def work() -> None:
            nonlocal inside
            with Lock("cart", backend=place.lock()).from_thread:
                inside += 1
                assert inside == 1
                inside -= 1

        await asyncio.gather(*(in_thread(work) for _ in range(8)))


async def test_the_error_of_the_body_is_never_masked_in_a_thread() -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock())

        def work(held: bool) -> None:
            with lock.from_thread.hold() if held else lock.from_thread:
                place.error = ConnectionError()
                raise KeyError

        for held in (True, False):
            with pytest.raises(KeyError):
                await in_thread(lambda held=held: work(held))  # type: ignore[misc]  # mypy cannot type the default
            place.error = None
            place._records.clear()


async def test_waiting_without_a_timeout_in_the_pool_of_a_framework_is_mentioned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_pool.cache_clear()
    async with Place() as place:

        def work() -> None:
            with Lock("cart", backend=place.lock()).from_thread:
                pass

        def in_pool() -> None:
            threading.current_thread().name = "AnyIO worker thread"
            work()
            work()

        await in_thread(work)
        assert not caplog.records
        await in_thread(in_pool)
        await in_thread(in_pool)
        assert ["Give a timeout" in record.getMessage() for record in caplog.records] == [True]


# Interrupted, or left alone.


@contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in another thread while the body does."""
    loop = asyncio.new_event_loop()
    worker = threading.Thread(target=loop.run_forever)
    worker.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        worker.join()
        loop.close()


def test_an_interrupted_thread_leaves_nothing_behind() -> None:
    with loop_in_thread() as loop:
        place = Place()
        lock = Lock("cart", backend=place.lock())
        call_in_loop(loop, place.__aenter__)
        held = call_in_loop(loop, lock.acquire)

        async def interrupt() -> None:
            await eventually(lambda: bool(place._records[CART].waiters))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = asyncio.run_coroutine_threadsafe(interrupt(), loop)
        with pytest.raises(KeyboardInterrupt):
            lock.from_thread.acquire()
        interrupting.result(5)

        async def nobody_waits() -> None:
            await eventually(lambda: not place._records[CART].waiters)
            assert place._records[CART].holder == held.token
            assert not place.lines.total()

        call_in_loop(loop, nobody_waits)
        held.from_thread.release()
        call_in_loop(loop, place.__aexit__)


def test_a_loop_that_is_closed_is_an_error_and_never_a_hang() -> None:
    async def body() -> None: ...

    loop = asyncio.new_event_loop()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            call_in_loop(loop, body)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=call)  # the loop never runs
    waiting.start()
    waiting.join(0.05)
    loop.close()
    waiting.join(10)
    assert not waiting.is_alive()
    call()
    assert ["closed" in str(error) for error in errors] == [True, True]


def test_a_body_that_the_loop_cancels_ends_the_wait_of_the_thread() -> None:
    with loop_in_thread() as loop:

        async def cancels_itself() -> LockHandle:
            task = asyncio.current_task()
            assert task
            task.cancel()
            await asyncio.sleep(0)
            raise AssertionError

        with pytest.raises(concurrent.futures.CancelledError):
            call_in_loop(loop, cancels_itself)
