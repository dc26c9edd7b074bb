"""Fencing tokens of a store that forgets everything: the wall clock floors them."""

import subprocess
import sys

PROGRAM = """
import asyncio
from grel_core.coordination import Lock, MemoryLockAdapter

async def main():
    async with Lock("cart", backend=MemoryLockAdapter()) as handle:
        print(handle.fencing_token)

asyncio.run(main())
"""


def token_of_a_new_process() -> int:
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    return int(answer.stdout)


def test_a_new_process_goes_on_above_the_tokens_of_the_one_before() -> None:
    assert token_of_a_new_process() < token_of_a_new_process()
