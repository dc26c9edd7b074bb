"""The tree of errors, as it is drawn in the code and on its page, is the tree that the classes form."""

import re
from pathlib import Path

from grel_core import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
LINE = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>\w+Error)\b.*$", re.MULTILINE)


def drawn(text: str) -> dict[str, str]:
    """Each error of a drawing, and the one that it hangs on."""
    tree: dict[str, str] = {}
    path: list[str] = []
    for line in LINE.finditer(text):
        depth = len(line["indent"]) // 4
        path[depth:] = [line["name"]]
        tree.setdefault(line["name"], path[depth - 1] if depth else "Exception")
    return tree


def test_the_drawing_in_the_code_is_the_tree_of_the_classes() -> None:
    tree = {name: vars(errors)[name].__mro__[1].__name__ for name in errors.__all__ if name != "WouldBlock"}
    assert drawn(errors.__doc__ or "") == tree


def test_the_page_draws_the_same_tree() -> None:
    block = PAGE.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    assert block.strip() == (errors.__doc__ or "").partition("\n\n")[2].strip()
