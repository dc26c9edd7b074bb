"""Every page of the documentation: its links lead somewhere, its Python is Python, and what it marks as `run` runs.

All blocks of a page that begin with ```` ```python run ```` run in order, in one namespace, inside an open app on
memory called `micro`. Waiting costs them nothing.
"""

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from grel_core import Grelmicro
from grel_core.providers.memory import MemoryProvider
from tests.virtual_loop import VirtualLoop

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*) *(?P<mark>[^\n]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    titles = HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(page: Path) -> Iterator[str]:
    """Links to files or headings that are not there; other hosts are not asked."""
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def python(page: Path) -> Iterator[tuple[CodeType, bool]]:
    """Every block of Python, compiled, and whether it is marked to run."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["language"] in {"python", "py"}:
            above = text.count("\n", 0, block.start()) + 1  # so that a traceback names the line of the page
            source = "\n" * above + textwrap.dedent(block["text"])
            code = compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            yield code, block["mark"] == "run"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """A loop on which a page's waiting costs nothing."""
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    list(python(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
async def test_marked_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    async with Grelmicro(uses=[MemoryProvider()]) as micro:
        names: dict[str, Any] = {"__name__": page.stem, "micro": micro}
        for code, marked in python(page):
            if marked:
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result
