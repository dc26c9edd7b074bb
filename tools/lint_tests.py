"""Refuse tests that sleep or mock: waiting is virtual, and fakes show the world as it is afterwards.

Banned in tests/: `sleep` of asyncio, time and anyio under any name, unless its argument is a literal 0;
`unittest.mock`; `monkeypatch` on names of ours. The harness, the proxy and the servers may sleep: they poll for a
condition.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SLEEPS = {"asyncio.sleep", "time.sleep", "anyio.sleep", "anyio.sleep_until", "anyio.sleep_forever"}
MOCKS = ("unittest.mock", "mock", "pytest_mock")
MAY_SLEEP = ("harness", "proxy", "servers", "kubernetes_server", "service")
PATCHING = {"setattr", "delattr", "setitem", "delitem"}


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it stands for, for every import of the module, also inside functions."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def meaning(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted path that an expression reads, with imports resolved; empty when it is no plain path."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := meaning(node.value, names)):
        return f"{owner}.{node.attr}"
    return ""


def is_zero(call: ast.Call) -> bool:
    """Whether this sleep only lets others run."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def sleeping(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Every use of a sleep, called or handed on, that is not `sleep(0)`."""
    harmless = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_zero(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in harmless:
            path = meaning(node, names)
            if path in SLEEPS and isinstance(node.ctx, ast.Load):
                yield node.lineno, f"{path}: wait on the virtual loop, or let harness.lapse() age the claim"


def mocking(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Imports of a mock library, and `monkeypatch` turned against our own packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            paths = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            if any(path == mock or path.startswith(f"{mock}.") for path in paths for mock in MOCKS):
                yield node.lineno, "a mock: write a fake"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in PATCHING
            and node.args
        ):
            target = node.args[0]
            text = str(target.value) if isinstance(target, ast.Constant) else meaning(target, names)
            if "monkeypatch" in ast.unparse(node.func.value) and text.startswith("grel_"):
                yield node.lineno, f"monkeypatch of {text}: give the object a fake instead"


def problems(path: Path) -> Iterator[str]:
    """One sentence for each offence in a test module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported(tree)
    found = list(mocking(tree, names))
    if not path.stem.startswith(MAY_SLEEP):
        found += sleeping(tree, names)
    return (f"{path}:{line}: {what}" for line, what in sorted(found))


def main() -> int:
    """0 when no test sleeps or mocks; prints each one that does."""
    found = [problem for path in sorted(Path("tests").rglob("*.py")) for problem in problems(path)]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
