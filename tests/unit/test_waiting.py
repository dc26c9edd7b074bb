"""Waiting for a lock, and holding it: times are kept, lines are fair, and a handle says where it stands."""

import asyncio
from typing import Any

import pytest

from grel_core import Grelmicro
from grel_core.coordination import (
    Lock,
    LockHandle,
    LockLostError,
    LockNotOwnedError,
    LockQueueFullError,
    LockTimeoutError,
    WouldBlockError,
)
from grel_core.lease.backend import T
from grel_core.lease.names import LOCK, Key
from grel_core.lease.rules import Rule, Take
from tests.unit.fakes import Place, StrangeLocks
from tests.unit.test_drain import passing

pytestmark = pytest.mark.anyio

CART = Key(LOCK, "cart")


class Counting(Place):
    """Counts what it is asked, and may take its time to answer."""

    asked = 0
    late = 0.0

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        self.asked += 1
        answer = await super().apply(key, rule)
        if self.late and isinstance(rule, Take):
            await passing(self.late)
        return answer


async def elsewhere(lock: Lock, **options: Any) -> LockHandle:
    """Acquire in a task of its own, which then ends."""
    return await asyncio.create_task(lock.acquire(**options))


@pytest.mark.parametrize("timeout", [0.001, 0.01, 0.5, 7])
async def test_a_timeout_is_neither_missed_nor_overshot(timeout: float) -> None:
    loop = asyncio.get_running_loop()
    async with Place() as place:
        for backend in (place.lock(), StrangeLocks()):
            lock = Lock("cart", backend=backend, retry_interval=0.3)
            await elsewhere(lock)
            began = loop.time()
            with pytest.raises(LockTimeoutError, match=f"for the {timeout}"):
                await lock.acquire(timeout=timeout)
            assert loop.time() - began == pytest.approx(timeout, abs=0.001)


async def test_a_timeout_of_zero_is_one_try() -> None:
    async with Counting() as place:
        lock = Lock("cart", backend=place.lock())
        await (await lock.acquire(timeout=0)).release()
        await elsewhere(lock)
        asked = place.asked
        with pytest.raises(WouldBlockError, match="held elsewhere"):
            await lock.acquire(timeout=0)
        assert place.asked == asked + 1


@pytest.mark.parametrize("wrong", [-1, -0.001, float("inf"), float("nan")])
async def test_an_impossible_timeout_is_a_value_error(wrong: float) -> None:
    lock = Lock("cart", backend=Place().lock())
    for options in ({"timeout": wrong}, {"max_hold": wrong}, {"max_hold": 0.0}):
        with pytest.raises(ValueError, match=r"timeout|max_hold"):
            lock.hold(**options)
    with pytest.raises(ValueError, match="timeout"):
        await lock.acquire(timeout=wrong)
    with pytest.raises(ValueError, match="timeout"):
        await asyncio.to_thread(lock.from_thread.acquire, timeout=wrong)


@pytest.mark.parametrize("wrong", ["5", True, False, [1]])
async def test_a_timeout_of_the_wrong_type_is_a_type_error(wrong: Any) -> None:
    lock = Lock("cart", backend=Place().lock())
    with pytest.raises(TypeError, match="timeout"):
        await lock.acquire(timeout=wrong)
    with pytest.raises(TypeError, match="max_hold"):
        lock.hold(max_hold=wrong)


async def test_five_hundred_waiters_of_one_process_are_one_contender_and_hardly_ask() -> None:
    async with Counting() as place:
        lock = Lock("cart", backend=place.lock(), lease_duration=600)
        held = await elsewhere(lock)
        waiting = [asyncio.create_task(lock.acquire()) for _ in range(500)]
        await passing(1)
        place.asked = 0
        await passing(60)
        assert place.asked <= 2 * 60
        assert len(place._records[CART].waiters) == 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await held.release()
        assert not place.lines.total()


async def test_a_waiter_comes_in_the_moment_a_dead_holder_s_lease_ends() -> None:
    loop = asyncio.get_running_loop()
    async with Place() as place:
        lock = Lock("cart", backend=place.lock(), lease_duration=7.25)
        await elsewhere(lock)
        await (await lock.acquire()).release()
        assert loop.time() == pytest.approx(7.25, abs=0.01)


async def test_a_waiter_that_is_cancelled_hands_its_turn_on() -> None:
    loop = asyncio.get_running_loop()
    async with Place() as place:
        lock = Lock("cart", backend=place.lock())
        held = await elsewhere(lock)
        first, second, third = (asyncio.create_task(lock.acquire()) for _ in range(3))
        await passing(1)
        second.cancel()
        first.cancel()
        await asyncio.wait([first, second])
        await held.release()
        await (await third).release()
        assert loop.time() < 2.5


async def test_a_claim_whose_answer_took_a_whole_lease_is_given_back_and_not_handed_out() -> None:
    async with Counting() as place:
        lock = Lock("cart", backend=place.lock(), lease_duration=5)
        place.late = 6
        with pytest.raises(WouldBlockError):
            await lock.acquire_nowait()
        with pytest.raises(LockTimeoutError):
            await lock.acquire(timeout=20)
        place.late = 0
        await passing(1)
        assert not await lock.locked()


async def test_a_slow_answer_shortens_what_is_left() -> None:
    async with Counting() as place:
        place.late = 3
        handle = await Lock("cart", backend=place.lock(), lease_duration=10).acquire()
        assert handle.expires_in == pytest.approx(10 * 0.99 - 3, abs=0.01)
        await handle.release()


async def test_a_full_queue_refuses_at_once() -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock())
        held = await elsewhere(lock)
        waiting = [asyncio.create_task(lock.acquire(max_waiters=2)) for _ in range(4)]
        await passing(1)
        assert [type(task.exception()) for task in waiting if task.done()] == [LockQueueFullError] * 2
        await held.release()
        await asyncio.wait(waiting, timeout=1)
        assert sum(task.done() and task.exception() is None for task in waiting) >= 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


# What a handle says.


async def test_a_handle_tells_how_long_and_then_that_it_is_lost() -> None:
    async with Grelmicro(uses=[Place()]):
        lock = Lock("cart", lease_duration=10)
        handle = await lock.acquire()
        assert handle.name == "cart"
        assert handle.expires_in == pytest.approx(9.9)
        waiting = asyncio.create_task(handle.lost.wait())
        await passing(4)
        assert handle.expires_in == pytest.approx(5.9)
        handle.ensure()
        assert not handle.lost.is_set()
        await handle.extend()
        assert handle.expires_in == pytest.approx(9.9)
        await passing(9)
        assert not waiting.done()
        await passing(1)
        assert waiting.done()
        assert handle.lost.is_set()
        assert handle.expires_in == 0
        with pytest.raises(LockLostError, match="stop writing"):
            handle.ensure()
        async with lock:  # the same task may take it anew: it does not hold it any more
            pass


async def test_a_handle_that_was_given_back_is_not_lost_and_does_nothing_more() -> None:
    async with Grelmicro(uses=[Place()]):
        handle = await Lock("cart").acquire()
        waiting = asyncio.create_task(handle.lost.wait())
        await asyncio.sleep(0)
        await handle.release()
        await passing(120)
        assert not waiting.done()
        assert not handle.lost.is_set()
        assert handle.expires_in == 0
        with pytest.raises(LockLostError, match="given back"):
            handle.ensure()
        for again in (handle.release, handle.extend):
            with pytest.raises(LockNotOwnedError):
                await again()
        waiting.cancel()


async def test_hold_renews_for_as_long_as_its_task_lives_and_no_longer() -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock(), lease_duration=10)

        async def forgetful() -> None:
            await lock.hold().__aenter__()
            await passing(30)

        await asyncio.create_task(forgetful())
        assert await lock.locked()
        await passing(11)
        assert not await lock.locked()


async def test_a_cancellation_from_elsewhere_passes_through_a_lost_hold() -> None:
    place = Place()
    async with Grelmicro(uses=[place]):
        inside = asyncio.Event()

        async def work() -> None:
            async with Lock("cart", lease_duration=3).hold():
                inside.set()
                await asyncio.Event().wait()

        for lost_too in (False, True):
            inside.clear()
            task = asyncio.create_task(work())
            await inside.wait()
            if lost_too:
                next(iter(held_by_task(task))).lose("a test said so")
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert not await Lock("cart").locked()


def held_by_task(task: asyncio.Task[None]) -> list[LockHandle]:
    from grel_core.coordination.handle import held_by

    return held_by(task, CART)
