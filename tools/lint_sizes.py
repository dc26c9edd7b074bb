"""Hold src/ to its budget: lines in a file, lines in a function, suppressions and their reasons."""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 350
FUNCTION_LINES = 40
SUPPRESSIONS = 15
SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore|pragma:\s*no cover)")
WITH_CODE_AND_REASON = re.compile(r"#\s*(noqa: ?[A-Z]+\d+|type: ignore\[[\w-]+\]|pragma: no cover)\s*[-#:(]*\s*\w")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def length(function: Function) -> int:
    """Lines from `def` to the last one, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def too_long(path: Path) -> Iterator[str]:
    """One sentence for the file and for each function that is over the limit."""
    text = path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > FILE_LINES:
        yield f"{path}: {lines} lines, {FILE_LINES} allowed: split it by reason to change"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and length(node) > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {length(node)} lines, {FUNCTION_LINES} allowed"


def suppressions(path: Path) -> Iterator[tuple[str, bool]]:
    """Where a check is silenced, and whether the comment carries a code and a reason."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and SUPPRESSION.search(token.string):
                reasoned = WITH_CODE_AND_REASON.search(token.string) is not None
                yield f"{path}:{token.start[0]}: {token.string}", reasoned


def main() -> int:
    """0 when everything is within budget; prints what is not, and the totals of each package."""
    paths = sorted(Path("src").rglob("*.py"))
    silenced = [found for path in paths for found in suppressions(path)]
    problems = [problem for path in paths for problem in too_long(path)]
    problems += [f"{where}: give a code and a reason on the same line" for where, reasoned in silenced if not reasoned]
    if len(silenced) > SUPPRESSIONS:
        problems += [
            f"src/ has {len(silenced)} suppressions, {SUPPRESSIONS} allowed:",
            *(where for where, _ in silenced),
        ]
    print("\n".join(problems), end="\n" if problems else "")
    for package in sorted(Path("src").iterdir()):
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in package.rglob("*.py"))
        print(f"{package.name}: {lines} lines")
    print(f"suppressions: {len(silenced)} of {SUPPRESSIONS}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
