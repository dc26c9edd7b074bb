"""Random histories: every store answers as the pure rules do, over time steps and forgetting."""

import itertools
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grel_core.lease.names import LOCK, READWRITELOCK, SCHEDULE, Key
from grel_core.lease.rules import (
    Advance,
    Downgrade,
    Instant,
    Peek,
    Record,
    Release,
    Renew,
    Rule,
    Take,
    forget_at,
    settle,
)
from tests.harness import Harness

pytestmark = pytest.mark.anyio

RETENTION = 0.3
TOKENS = st.sampled_from(["ann", "bob", "Zoë: {x}", ""])
DURATIONS = st.sampled_from([1, 999, 1_000, 1_001, 50_000, 100_000, 100_001, 250_000, 1_000_000])
RULES: st.SearchStrategy[Rule[Any]] = st.one_of(
    st.builds(
        Take,
        TOKENS,
        DURATIONS,
        shared=st.booleans(),
        queue=st.just(0) | DURATIONS,
        meta=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    ),
    st.builds(Renew, TOKENS, DURATIONS),
    st.builds(Release, TOKENS, least=st.just(0) | DURATIONS),
    st.builds(Downgrade, TOKENS, DURATIONS),
    st.builds(Advance, st.integers(-2, 3)),
)
# Mostly one key: rules that never meet prove little.
KEYS = st.sampled_from([Key(READWRITELOCK, "a{b}:c")] * 5 + [Key(LOCK, "a{b}:c"), Key(SCHEDULE, "%7B ü")])
PAUSES = st.sampled_from([0, 0, 0, 0, 1, 998, 999, 1_000, 49_999, 50_000, 99_999, 100_000, 200_000, 300_000, 1_500_000])
HISTORIES = st.lists(st.tuples(PAUSES, KEYS, RULES), min_size=1, max_size=40)
NUMBERS = itertools.count()
EXAMPLES = int(os.environ.get("GREL_HISTORIES", "200"))


class Model:
    """The rules on a dict: what every store has to be equal to."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        """Microseconds to which the store rounds up when it forgets."""
        self.records: dict[Key, Record] = {}

    def apply(self, key: Key, rule: Rule[Any], at: Instant, keep: int) -> Any:
        record = self.records.get(key, Record())
        if at.now >= -(-forget_at(record, keep) // self.grain) * self.grain:
            record = Record()
        before = settle(record, at.now)
        after, answer = rule(before, at)
        if after is not before:
            self.records[key] = after
        return answer


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=HISTORIES)
async def test_a_store_answers_as_the_rules_do(harness: Harness, history: list[tuple[int, Key, Rule[Any]]]) -> None:
    if harness.clock.fixed is None:
        await harness.freeze()
    model = Model(grain=1_000 if harness.name == "redis" else 1)
    number = next(NUMBERS)  # names of its own for each history: the store goes on from one to the next
    async with harness.provider(retention=RETENTION, memory_retention=2 * RETENTION) as provider:
        for pause, key, rule in history:
            if pause:
                await harness.advance(pause / 1_000_000)
            name = Key(key.kind, f"{key.name}{number}")
            for step in (rule, Peek()):
                assert harness.clock.fixed is not None
                expected = model.apply(name, step, harness.clock.fixed, provider.keep(key))
                assert await provider.apply(name, step) == expected
