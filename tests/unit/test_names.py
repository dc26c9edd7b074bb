"""Names: what may be one, and that no two of them, and no two sets of template values, ever meet."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grel_core.coordination import Coordination, LeaderElection, Lock, lock_name
from grel_core.lease.names import ELECTION, LOCK, READWRITELOCK, SCHEDULE, TASKLOCK, Key, check_name, placeholders
from grel_core.providers.memory import MemoryProvider

KINDS = [LOCK, READWRITELOCK, TASKLOCK, ELECTION, SCHEDULE]
# Text that is about separators and escapes more often than chance would have it.
tricky = st.text(
    st.one_of(st.sampled_from("a:{}%|/2537BD"), st.characters(exclude_categories=("Cc", "Cs"))), min_size=1
)
names = tricky.filter(lambda text: len(text.encode()) <= 512)


@pytest.mark.parametrize(
    "name",
    [
        "cart",
        "42",
        "0b6ce2a1-9d2e-4a8f-8f57-000000000000",
        "2024-report",
        "a b",
        " ",
        "ada@example.org",
        "order:7",
        "Käse/🧀",
        "\u202eabc",
        "{}",
        "%",
        "x" * 512,
        "é" * 256,
    ],
)
def test_any_text_is_a_name_for_every_primitive(name: str) -> None:
    assert check_name(name) == Lock(name).name == LeaderElection(name).name == Coordination(name=name).name == name


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("", "empty"),
        ("cart\n", "control character"),
        ("\0", "control character"),
        ("a\x7fb", "control character"),
        ("a\u0085b", "control character"),
        ("\ud800", "half a character"),
        ("x" * 513, "at most 512 bytes"),
        ("é" * 257, "at most 512 bytes"),
    ],
)
def test_what_is_no_name_is_refused_by_every_primitive(wrong: str, why: str) -> None:
    for make in (check_name, Lock, LeaderElection, lambda name: Coordination(name=name)):
        with pytest.raises(ValueError, match=why):
            make(wrong)


@pytest.mark.parametrize("wrong", [None, 5, b"cart", ["cart"]])
def test_a_name_is_text(wrong: str) -> None:
    for make in (check_name, Lock, LeaderElection):
        with pytest.raises(TypeError, match="a name is text"):
            make(wrong)


async def test_an_adapter_refuses_what_is_no_name() -> None:
    with pytest.raises(ValueError, match="control character"):
        await MemoryProvider().lock().acquire(name="cart\n", token="w.1", duration=5)


@given(st.tuples(names, st.sampled_from(KINDS), names), st.tuples(names, st.sampled_from(KINDS), names))
@example(("a", LOCK, "b:c"), ("a:lock", LOCK, "c"))
@example(("a", LOCK, "x}"), ("a", LOCK, "x%7D"))
@example(("a:", LOCK, "x"), ("a%3A", LOCK, "x"))
@example(("a", LOCK, "x"), ("a", TASKLOCK, "x"))
def test_no_two_keys_are_spelled_alike(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    spelled = [Key(kind, name).text(prefix) for prefix, kind, name in (one, other)]
    assert (spelled[0] == spelled[1]) == (one == other)


@given(names, names)
def test_a_key_has_one_pair_of_braces_so_that_a_cluster_hashes_the_name_alone(prefix: str, name: str) -> None:
    text = Key(LOCK, name).text(prefix)
    assert text.count("{") == text.count("}") == 1
    assert text.index("{") + 1 < text.index("}")


# Templates.


def test_a_template_gives_the_name_that_an_f_string_would_for_ordinary_values() -> None:
    assert lock_name("order:{order_id}", order_id=7) == "order:7"
    assert lock_name("{a}:{b}:{a}", a="x y", b="ada@example.org") == "x y:ada@example.org:x y"
    assert lock_name("plain") == "plain"
    assert lock_name("{{{a}}}", a=1) == "{1}"
    assert lock_name("{template}", template="x", unused=1) == "x"


def test_percent_and_colon_in_values_are_encoded_and_nothing_else() -> None:
    assert lock_name("a:{x}", x="1:2%3/{4}") == "a:1%3A2%253/{4}"


@given(st.tuples(tricky, tricky), st.tuples(tricky, tricky))
@example(("1:2", "3"), ("1", "2:3"))
@example(("1%3A2", "3"), ("1:2", "3"))
@example(("x" * 201, "y"), ("x" * 202, "y"))
def test_no_two_sets_of_values_give_one_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    made = [lock_name("a:{x}:{y}", x=x, y=y) for x, y in (one, other)]
    assert (made[0] == made[1]) == (one == other)


def test_a_long_value_is_hashed_and_no_short_one_passes_for_its_hash() -> None:
    long = "x" * 201
    name = lock_name("file:{path}", path=long)
    assert len(name) < 100
    assert name == lock_name("file:{path}", path=long)
    assert name != lock_name("file:{path}", path=name.removeprefix("file:"))
    assert lock_name("file:{path}", path="x" * 200) == "file:" + "x" * 200


@pytest.mark.parametrize("length", [1, 66, 70, 71, 100, 132, 134, 199, 200, 201, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_long_values_never_make_too_long_a_name(count: int, length: int) -> None:
    fields = "abcdef"[:count]
    template = "prefix:" + ":".join(f"{{{field}}}" for field in fields)
    lock_name(template, **dict.fromkeys(fields, "%" * length))
    lock_name(template, **dict.fromkeys(fields, "é" * length))


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ValueError, match="needs a value for 'b'"):
        lock_name("{a}:{b}", a=1)


@pytest.mark.parametrize(
    "template", ["{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "{a-b}", "{a", "a}", "{ a }", "{a:{b}}"]
)
def test_only_plain_fields_may_stand_in_a_template(template: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        placeholders(template)
    with pytest.raises(ValueError, match=r"."):
        lock_name(template, a=1, b=2)


@pytest.mark.parametrize("value", ["", "\n", "\ud800"])
def test_a_value_that_makes_no_name_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"empty|control character"):
        lock_name("{x}", x=value)
