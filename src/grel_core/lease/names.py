"""Names: what may be one, how a template makes one, and how a store spells it so that no two meet."""

import hashlib
import string
import unicodedata
from typing import NamedTuple

LONGEST = 512
"""Bytes of UTF-8 in the longest name."""
_LONGEST_VALUE = 200

LOCK = "lock"
READWRITELOCK = "rwlock"
TASKLOCK = "tasklock"
ELECTION = "election"
SCHEDULE = "schedule"


class Key(NamedTuple):
    """What a record is filed under. Kinds never meet: a lock and an election may share a name."""

    kind: str
    name: str

    def text(self, prefix: str) -> str:
        """One string for one key: `prefix`, kind and name, none of which can run into the next.

        The braces make Redis Cluster keep everything of one name on one node.
        """
        return f"{escape(prefix, ':{}')}:{self.kind}:{{{escape(self.name, '{}')}}}"


def check_name(name: str) -> str:
    """Return `name` if it can be one: 1 to 512 bytes of any text without control characters.

    Raises:
        TypeError: it is not text.
        ValueError: it is empty, too long, or holds a control character or half a character.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is text, not {type(name).__name__}; give for example 'cart' or f'order:{{id}}'")
    if not name:
        raise ValueError("a name cannot be empty; give for example 'cart'")
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in name):
        raise ValueError(f"the name {name!r} holds a control character or half a character; leave it out")
    if len(name.encode()) > LONGEST:
        raise ValueError(f"a name has at most {LONGEST} bytes, {name[:20]!r}... has more; use a hash of it")
    return name


def escape(text: str, special: str) -> str:
    """Replace `%` and every character of `special` by its percent code, reversibly."""
    for character in "%" + special:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def lock_name(template: str, /, **values: object) -> str:
    """The name that `template` gives with `values`: `lock_name("order:{order_id}", order_id=7)` is `"order:7"`.

    `%` and `:` inside a value are encoded, so that two sets of values never give one name where `:` stands between the
    placeholders; a value over 200 bytes, or its share of 400, is replaced by its hash.

    Raises:
        ValueError: a placeholder has no value, or the result is no name.
    """
    fields = placeholders(template)
    missing = [field for field in fields if field not in values]
    if missing:
        raise ValueError(f"the name {template!r} needs a value for {', '.join(map(repr, missing))}; none was given")
    return check_name(template.format_map({field: _spell(values[field], 400 // len(fields)) for field in fields}))


def placeholders(template: str) -> list[str]:
    """The fields of `template`, in order.

    Raises:
        ValueError: a field is not a plain `{name}`; attributes, indexes and formats could reach into objects.
    """
    fields = []
    for _, field, spec, conversion in string.Formatter().parse(template):
        if field is None:
            continue
        if not field.isidentifier() or spec or conversion:
            raise ValueError(f"the name {template!r} may only hold plain fields such as {{order_id}}, not {{{field}}}")
        fields.append(field)
    return fields


def _spell(value: object, longest: int) -> str:
    text = escape(str(value), ":")
    if len(text.encode(errors="surrogatepass")) <= min(longest, _LONGEST_VALUE):
        return text
    # No encoded value holds a "%s", so that none can pass for a hash.
    return "%sha256-" + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
