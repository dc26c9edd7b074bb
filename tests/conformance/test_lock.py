"""What a lock does, on every backend."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from grel_core import Grelmicro
from grel_core.coordination import (
    Lock,
    LockConfig,
    LockHandle,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    WouldBlockError,
)
from grel_core.lease.names import LOCK, Key
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
async def mine(harness: Harness) -> AsyncIterator[Provider]:
    async with harness.provider() as provider:
        yield provider


@pytest.fixture
async def theirs(harness: Harness) -> AsyncIterator[Provider]:
    """Another process, as far as a backend can tell."""
    async with harness.provider() as provider:
        yield provider


async def elsewhere(lock: Lock, **options: Any) -> LockHandle:
    """Acquire in a task of its own, which then ends."""
    return await asyncio.create_task(lock.acquire(**options))


async def test_a_held_lock_is_refused_to_everyone_else(mine: Provider, theirs: Provider) -> None:
    async with Lock("cart", backend=mine.lock()) as handle:
        assert handle.fencing_token > 0
        other = Lock("cart", backend=theirs.lock())
        assert await other.locked()
        assert not await asyncio.create_task(other.owned())
        with pytest.raises(WouldBlockError):
            await asyncio.create_task(other.acquire_nowait())
        with pytest.raises(LockTimeoutError) as caught:
            await asyncio.create_task(other.acquire(timeout=0.05))
        assert isinstance(caught.value, TimeoutError)
    assert not await other.locked()


async def test_a_release_lets_the_next_one_in_at_once(mine: Provider, theirs: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())
    first = await lock.acquire()
    waiting = asyncio.create_task(Lock("cart", backend=theirs.lock()).acquire(timeout=10))
    await eventually(lambda: theirs.lines.waiting(Key(LOCK, "cart")) == 1)
    await eventually(lambda: in_line(mine, "cart"))
    loop = asyncio.get_running_loop()
    released = loop.time()
    await lock.release()
    second = await waiting
    assert loop.time() - released < 0.5
    assert second.fencing_token > first.fencing_token
    await second.release()


async def in_line(provider: Provider, name: str) -> bool:
    record, _ = await provider.peek(Key(LOCK, name))
    return bool(record.waiters)


async def test_fencing_tokens_rise_across_release_expiry_and_reaping(mine: Provider, harness: Harness) -> None:
    lock = Lock("cart", backend=mine.lock(), lease_duration=5)
    tokens = []
    for skip in (0, 0, 6, 100, 0, 100_000):
        handle = await elsewhere(lock)
        tokens.append(handle.fencing_token)
        if skip:
            await harness.advance(skip)
        else:
            await handle.release()
    assert tokens == sorted(set(tokens))


async def test_extend_keeps_the_token_and_prolongs_the_lease(mine: Provider, harness: Harness) -> None:
    lock = Lock("cart", backend=mine.lock(), lease_duration=5)
    handle = await lock.acquire()
    for _ in range(3):
        await harness.advance(3)
        extended = await lock.extend()
        assert extended.fencing_token == handle.fencing_token
    await lock.release()


async def test_extend_after_expiry_is_refused_though_nobody_came(mine: Provider, harness: Harness) -> None:
    lock = Lock("cart", backend=mine.lock(), lease_duration=5)
    handle = await lock.acquire()
    await harness.advance(5.1)
    with pytest.raises(LockNotOwnedError):
        await lock.extend()
    assert handle.lost.is_set()
    assert handle.expires_in == 0
    assert not await lock.locked()
    with pytest.raises(LockLostError):
        handle.ensure()


async def test_a_lapsed_holder_cannot_release_its_successor(mine: Provider, theirs: Provider, harness: Harness) -> None:
    lock = Lock("cart", backend=mine.lock(), lease_duration=5)
    await lock.acquire()
    await harness.advance(6)
    successor = await elsewhere(Lock("cart", backend=theirs.lock()))
    with pytest.raises(LockNotOwnedError, match="overlapped"):
        await lock.release()
    assert await theirs.owned(Key(LOCK, "cart"), successor.token)


async def test_a_lapsed_lease_is_taken_over_without_a_release(
    mine: Provider, theirs: Provider, harness: Harness
) -> None:
    await elsewhere(Lock("cart", backend=mine.lock(), lease_duration=5))
    await harness.advance(6)
    handle = await Lock("cart", backend=theirs.lock()).acquire_nowait()
    await handle.release()


async def test_a_waiter_comes_in_when_the_lease_of_a_dead_holder_ends(mine: Provider, theirs: Provider) -> None:
    await elsewhere(Lock("cart", backend=mine.lock(), lease_duration=0.3))
    loop = asyncio.get_running_loop()
    began = loop.time()
    handle = await Lock("cart", backend=theirs.lock()).acquire(timeout=10)
    assert 0.1 < loop.time() - began < 0.8
    await handle.release()


async def test_nesting_is_an_error_also_through_a_second_object(mine: Provider) -> None:
    async with Lock("cart", backend=mine.lock()):
        with pytest.raises(LockReentrantError):
            await Lock("cart", backend=mine.lock()).acquire()
        async with Lock("other", backend=mine.lock()):
            pass


async def test_another_task_may_release_through_the_handle_and_not_through_the_lock(mine: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())
    handle = await lock.acquire()
    with pytest.raises(LockNotOwnedError):
        await asyncio.create_task(lock.release())
    await asyncio.create_task(handle.release())
    assert not await lock.locked()
    with pytest.raises(LockNotOwnedError):
        await lock.release()


async def test_hold_renews_and_cancels_the_body_when_the_lease_is_lost(mine: Provider, harness: Harness) -> None:
    lock = Lock("cart", backend=mine.lock(), lease_duration=0.3)
    reached = False
    with pytest.raises(LockLostError, match="overlapped"):
        async with lock.hold() as handle:
            first = handle.deadline
            await eventually(lambda: handle.deadline > first + 0.1)
            await harness.advance(1)
            await handle.lost.wait()
            await eventually(lambda: False)
            reached = True
    assert not reached
    assert not await lock.locked()


async def test_hold_ends_at_max_hold(mine: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())
    with pytest.raises(LockLostError, match="max_hold"):
        async with lock.hold(max_hold=0.05):
            await asyncio.Event().wait()
    assert not await lock.locked()


async def test_the_error_of_the_body_is_never_masked(mine: Provider, harness: Harness) -> None:
    lock = Lock("cart", backend=mine.lock(), lease_duration=5)
    with pytest.raises(KeyError):
        async with lock:
            await harness.advance(6)
            raise KeyError
    with pytest.raises(KeyError):
        async with lock.hold():
            await harness.advance(6)
            raise KeyError


async def test_a_thread_holds_a_lock_of_its_own(mine: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())

    def work() -> int:
        with lock.from_thread as handle:
            assert lock.from_thread.locked()
            assert lock.from_thread.owned()
            lock.from_thread.extend()
            with pytest.raises(LockReentrantError):
                lock.from_thread.acquire_nowait()
            return handle.fencing_token

    async with lock as handle:
        with pytest.raises(LockTimeoutError):
            await asyncio.to_thread(lambda: lock.from_thread.acquire(timeout=0.05))
    assert await asyncio.to_thread(work) > handle.fencing_token

    def hold() -> None:
        with lock.from_thread.hold(timeout=1) as handle:
            assert not handle.lost.is_set()
            handle.ensure()

    await asyncio.to_thread(hold)
    assert not await lock.locked()


@pytest.mark.parametrize(
    "name",
    [
        "42",
        "0b6ce2a1-9d2e-4a8f-8f57-000000000000",
        "2024-report",
        "a b",
        "ada@example.org",
        "order:7",
        "Käse/🧀",
        "{a}",
        "}{",
        "%7B",
        "a:r",
        "x" * 512,
        "'; DROP TABLE grel_lease; --",
    ],
)
async def test_any_text_is_a_name(mine: Provider, name: str) -> None:
    async with Lock(name, backend=mine.lock()) as handle:
        assert handle.name == name
        assert await Lock(name, backend=mine.lock()).locked()


async def test_no_two_names_meet(mine: Provider) -> None:
    names = [
        "a",
        "A",
        "a ",
        "a:r",
        "a:",
        ":a",
        "{a}",
        "{a",
        "a}",
        "%7Ba%7D",
        "%257Ba",
        "a/b",
        "a.b",
        "a_b",
        "é",
        "e\u0301",
    ]
    handles = [await Lock(name, backend=mine.lock()).acquire(timeout=0) for name in names]
    assert len({handle.fencing_token for handle in handles}) > 1
    for handle in handles:
        await handle.release()


async def test_kinds_do_not_meet(mine: Provider) -> None:
    await mine.leaderelection().acquire_or_renew(name="x", token="w.1", duration=5)
    async with Lock("x", backend=mine.lock()):
        assert await mine.schedule().claim("x", 1.0)
        assert await mine.readwritelock().acquire_write(name="x", token="w.2", duration=5)


async def test_every_waiter_is_served_in_order(mine: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())
    order: list[int] = []

    async def work(number: int) -> None:
        async with lock:
            order.append(number)

    handle = await lock.acquire()
    tasks = [asyncio.create_task(work(number)) for number in range(20)]
    await eventually(lambda: mine.lines.waiting(Key(LOCK, "cart")) == 20)
    await handle.release()
    await asyncio.gather(*tasks)
    assert order == list(range(20))


async def test_one_shot_names_leave_nothing_behind(harness: Harness) -> None:
    if not harness.reaps:
        return
    async with harness.provider(retention=60) as provider:
        for number in range(200):
            async with Lock(f"order:{number}", backend=provider.lock()):
                pass
        await harness.advance(61)
        busy = Lock("busy", backend=provider.lock())
        for _ in range(400):
            async with busy:
                pass
        assert await harness.keys() <= 1


async def test_a_claim_is_released_where_it_was_taken_also_across_an_override(harness: Harness) -> None:
    from grel_core.coordination import Coordination
    from grel_core.providers.memory import MemoryProvider

    lock = Lock("cart")
    async with Grelmicro(uses=[harness.provider()]) as micro:
        await lock.acquire()
        async with micro.override(Coordination(MemoryProvider())):
            assert not await lock.locked()
            await lock.release()
        assert not await lock.locked()


async def test_the_operations_by_the_names_of_the_reference_are_the_same_ones(mine: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())
    fence = await lock.do_acquire("w.1", duration=60)
    assert fence is not None
    assert await lock.do_acquire("w.2", duration=60) is None
    assert await lock.do_owned("w.1")
    assert not await lock.do_owned("w.2")
    assert await lock.do_release("w.1")
    assert not await lock.do_release("w.1")
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        mine_id, other_id = threading.get_ident(), other.ident or 0
        handle = await lock.do_thread_acquire(mine_id, timeout=1)
        assert (await lock.do_thread_extend(mine_id)).fencing_token == handle.fencing_token
        with pytest.raises(LockReentrantError):
            await lock.do_thread_acquire_nowait(mine_id)
        with pytest.raises(WouldBlockError):
            await lock.do_thread_acquire_nowait(other_id)
        await lock.do_thread_release(mine_id)
        with pytest.raises(LockNotOwnedError):
            await lock.do_thread_release(mine_id)
    finally:
        over.set()
        other.join()


async def test_a_configuration_is_what_the_store_is_asked_for_from_the_next_operation_on(mine: Provider) -> None:
    lock = Lock.from_config("cart", LockConfig(lease_duration=7), backend=mine.lock())

    async def asked() -> float:
        record, _ = await mine.peek(Key(LOCK, "cart"))
        return record.duration / 1_000_000

    async with lock:
        assert await asked() == 7
        lock.reconfigure(LockConfig(lease_duration=9))
        assert await asked() == 7
        await lock.extend()
        assert await asked() == 9
    async with lock:
        assert await asked() == 9


async def test_a_wait_that_ended_in_the_line_of_this_process_was_no_silence(mine: Provider) -> None:
    lock = Lock("cart", backend=mine.lock())
    async with lock:
        first = asyncio.create_task(lock.acquire(timeout=0.6))
        await eventually(lambda: mine.lines.waiting(Key(LOCK, "cart")) == 1)
        second = asyncio.create_task(lock.acquire(timeout=0.61))
        for waiting in (first, second):
            with pytest.raises(LockTimeoutError):
                await waiting
