"""Print every Python from 3.11 on that this machine has: one line for each minor version, with its path."""

import os
import re
import subprocess
from pathlib import Path

OLDEST = (3, 11)
ASK = "import sys, venv, ensurepip; print(*sys.version_info[:3], sys.executable)"
NAME = re.compile(r"python3(\.\d+)?")

Version = tuple[int, int, int]


def candidates() -> list[Path]:
    """Files that may be interpreters, on PATH and of pyenv; a shim of a version that is not active is none."""
    directories = [Path(name) for name in os.get_exec_path()]
    directories += Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.*/bin")
    return [path for directory in directories for path in directory.glob("python3*") if NAME.fullmatch(path.name)]


def pythons() -> dict[Version, str]:
    """A working interpreter of every version, oldest first."""
    found: dict[Version, str] = {}
    for candidate in candidates():
        answer = subprocess.run([candidate, "-c", ASK], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            major, minor, micro, path = answer.stdout.strip().split(maxsplit=3)
            found.setdefault((int(major), int(minor), int(micro)), path)
    return {version: found[version] for version in sorted(found) if version >= OLDEST}


if __name__ == "__main__":
    newest = {version[:2]: path for version, path in pythons().items()}
    for (major, minor), path in newest.items():
        print(f"{major}.{minor} {path}")
