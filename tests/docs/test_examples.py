"""Every example runs, says nothing on stderr, and prints what its docstring says that it prints."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))


def promised(example: Path) -> str | None:
    """The block behind `Prints:` in the docstring; None when the example is not for the command line."""
    docstring = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    _, found, block = docstring.partition("Prints:\n\n")
    return textwrap.dedent(block).strip() if found else None


SCRIPTS = [example for example in EXAMPLES if promised(example) is not None]


@pytest.mark.parametrize("example", SCRIPTS, ids=lambda example: example.name)
def test_an_example_prints_what_it_promises(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip() == promised(example)


# Those that need a server of their own to print anything are run where that server is, in `tests/vendor`.
SERVED = [
    *(example for example in EXAMPLES if "\napp = " in example.read_text(encoding="utf-8")),
    ROOT / "examples" / "demo" / "shop.py",
]


@pytest.mark.parametrize("example", SERVED, ids=lambda example: example.name)
def test_an_example_for_a_server_can_be_imported(example: Path, tmp_path: Path) -> None:
    # Ends without the interpreter's farewell: what lives as long as a server's process is never closed.
    program = f"import os, runpy; assert runpy.run_path({str(example)!r})['app']; os._exit(0)"
    command = [sys.executable, "-W", "error", "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (run.returncode, run.stderr) == (0, "")
