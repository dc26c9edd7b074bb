"""`python -m grel_core ...`: see `cli.py`."""

import sys

try:
    from grel_core.cli import main
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    sys.exit("the command line needs click: pip install 'grel-fastapi[cli]'")

main(prog_name="python -m grel_core")
