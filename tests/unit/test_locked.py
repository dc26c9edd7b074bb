"""`locked("name:{x}")`: a function that runs only while it holds a lock."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from grel_core import Grelmicro, OutOfContextError
from grel_core.coordination import Lock, LockLostError, LockReentrantError, LockTimeoutError, locked
from grel_core.lease.names import LOCK, Key
from grel_core.threads import EventLoopDeadlockError
from tests.unit.fakes import Place
from tests.unit.test_drain import passing

pytestmark = pytest.mark.anyio


async def held(name: str) -> bool:
    return await Lock(name).locked()


async def test_an_async_function_holds_the_lock_that_its_arguments_name() -> None:
    @locked("report:{day}:{kind}")
    async def report(day: int, /, *, kind: str = "daily") -> str:
        """Make a report."""
        assert await held(f"report:{day}:{kind}")
        return f"{day} {kind}"

    async with Grelmicro(uses=[Place()]):
        assert await report(7) == "7 daily"
        assert await report(8, kind="weekly") == "8 weekly"
        assert not await held("report:7:daily")
    assert report.__name__ == "report"
    assert report.__doc__ == "Make a report."
    assert inspect.iscoroutinefunction(report)
    assert list(inspect.signature(report).parameters) == ["day", "kind"]


async def test_two_calls_of_one_name_never_overlap_and_others_do() -> None:
    inside: list[int] = []
    overlaps: list[tuple[int, ...]] = []

    @locked("order:{order_id}")
    async def work(order_id: int) -> None:
        inside.append(order_id)
        overlaps.append(tuple(inside))
        await passing(1)
        inside.remove(order_id)

    async with Grelmicro(uses=[Place()]):
        await asyncio.gather(*(work(order_id) for order_id in (1, 2, 1, 2, 1)))
    assert any(len(seen) == 2 for seen in overlaps)
    assert not any(len(seen) != len(set(seen)) for seen in overlaps)


async def test_values_are_encoded_as_in_lock_name() -> None:
    @locked("a:{x}:{y}")
    async def work(x: str, y: str) -> bool:
        return await held(f"a:{x.replace(':', '%3A')}:{y}")

    async with Grelmicro(uses=[Place()]):
        assert await work("1:2", "3")


async def test_a_plain_function_holds_it_in_its_thread() -> None:
    @locked("report:{day}")
    def report(day: int) -> bool:
        return Lock(f"report:{day}").from_thread.owned()

    async with Grelmicro(uses=[Place()]):
        assert await asyncio.to_thread(report, 7)
        assert await asyncio.to_thread(report, day=8)
        assert not await held("report:7")
        with pytest.raises(EventLoopDeadlockError):
            report(7)
    with pytest.raises(OutOfContextError):
        await asyncio.to_thread(report, 7)


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    @locked("shop:{item}")
    async def sell(self, item: str) -> str:
        assert await held(f"shop:{item}")
        return f"{self.name} {item}"

    @locked("shop:{self}")
    def close(self) -> bool:
        return Lock(f"shop:{self}").from_thread.owned()

    @classmethod
    @locked("shops:{kind}")
    async def open(cls, kind: str) -> "Shop":
        assert await held(f"shops:{kind}")
        return cls(kind)

    @staticmethod
    @locked("tax:{year}")
    async def tax(year: int = 2026) -> bool:
        return await held(f"tax:{year}")

    def __str__(self) -> str:
        return self.name


async def test_methods_of_every_sort_may_be_locked() -> None:
    async with Grelmicro(uses=[Place()]):
        shop = await Shop.open("books")
        assert await shop.sell("atlas") == "books atlas"
        assert await asyncio.to_thread(shop.close)
        assert await Shop.tax()
        assert await shop.tax(2027)


async def test_star_arguments_may_stand_beside_the_named_ones() -> None:
    @locked("x:{a}")
    async def work(a: int, *rest: int, **more: int) -> tuple[Any, ...]:
        assert await held(f"x:{a}")
        return a, rest, more

    async with Grelmicro(uses=[Place()]):
        assert await work(1, 2, 3, b=4) == (1, (2, 3), {"b": 4})
        with pytest.raises(TypeError, match="missing a required argument: 'a'"):
            await work()  # type: ignore[call-arg]  # that is the point


async def test_errors_pass_and_give_the_lock_back() -> None:
    @locked("x")
    async def work() -> None:
        raise KeyError

    async with Grelmicro(uses=[Place()]):
        with pytest.raises(KeyError):
            await work()
        assert not await held("x")


async def test_a_call_waits_no_longer_than_the_timeout_and_does_not_nest() -> None:
    @locked("x", timeout=2)
    async def work() -> None: ...

    async with Grelmicro(uses=[Place()]):
        async with Lock("x"):
            with pytest.raises(LockReentrantError):
                await work()
            began = asyncio.get_running_loop().time()
            with pytest.raises(LockTimeoutError):
                await asyncio.create_task(work())
            assert asyncio.get_running_loop().time() - began == pytest.approx(2, abs=0.1)
        await work()


async def test_the_lease_is_renewed_and_its_loss_cancels_the_function() -> None:
    place, steps = Place(), list[str]()

    @locked("x", lease_duration=5)
    async def work() -> None:
        await passing(60)
        steps.append("renewed")
        place._records.clear()
        await passing(60)
        steps.append("went on")

    async with Grelmicro(uses=[place]):
        with pytest.raises(LockLostError, match="overlapped"):
            await work()
    assert steps == ["renewed"]


async def test_options_are_those_of_a_lock() -> None:
    place = Place()

    @locked("x", backend=place.lock(), worker="pod-7", lease_duration=33)
    async def work() -> None:
        record = place._records[Key(LOCK, "x")]
        assert str(record.holder).startswith("pod-7.")
        assert record.duration == 33_000_000

    async with place:
        await work()


def test_what_could_never_work_is_refused_where_it_is_written() -> None:
    def function(a: int) -> None: ...

    with pytest.raises(ValueError, match=r"takes no 'b', which the lock 'x:{b}' needs"):
        locked("x:{b}")(function)
    with pytest.raises(ValueError, match="plain fields"):
        locked("x:{a.b}")
    with pytest.raises(ValueError, match="empty"):
        locked("")
    with pytest.raises(ValueError, match="control character"):
        locked("x:{a}\n")
    with pytest.raises(ValueError, match="timeout"):
        locked("x", timeout=-1)
    with pytest.raises(ValueError, match="lease_duration"):
        locked("x", lease_duration=0)
    with pytest.raises(TypeError, match="lease_time"):
        locked("x", lease_time=5)


def test_a_generator_is_refused_since_its_body_would_run_without_the_lock() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    for function in (generator, async_generator):
        with pytest.raises(TypeError, match="is a generator"):
            locked("x")(function)
