"""Rewrite constraints.txt: the newest release of everything that works on every Python of this machine.

The oldest Python resolves freely; each newer one takes those pins and may only add to them.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

from pythons import pythons

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
HEADER = "# Written by `make pins`. Every release that `make` may install, for all supported Pythons.\n"


def resolve(python: str, pins: Path, directory: Path) -> set[str]:
    """What `pip freeze` lists after the project was installed under `pins`."""
    subprocess.run([python, "-m", "venv", directory], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip"]
    environment = os.environ | {"PIP_CONSTRAINT": str(pins), "PIP_BUILD_CONSTRAINT": str(pins)}
    subprocess.run(
        [*pip, "install", "-qq", "hatchling", "editables", "-e", f"{ROOT}[dev]"], check=True, env=environment
    )
    listed = subprocess.run([*pip, "freeze", "--exclude-editable"], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"^[A-Za-z0-9._-]+==\S+$", listed, re.MULTILINE))


def main() -> None:
    """Write the file only once every Python has agreed."""
    with tempfile.TemporaryDirectory() as name:
        pins = Path(name, "pins.txt")
        found: set[str] = set()
        for version, python in pythons().items():
            number = ".".join(map(str, version))
            pins.write_text("\n".join(found))
            found |= resolve(python, pins, Path(name, number))
            print(f"{number}: {len(found)} pins")
        PINS.write_text(HEADER + "\n".join(sorted(found, key=str.lower)) + "\n")


if __name__ == "__main__":
    main()
