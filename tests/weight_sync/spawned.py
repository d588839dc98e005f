"""Running one function as every rank of a small group, each in a process of its own.

`python spawned.py MODULE FUNCTION ARGUMENTS_JSON` is one of them.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from preloaded import Process


def exit_codes(run_rank: Callable[..., None], arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
    """One process for each tuple of arguments; None stands for one that did not end in time, and is killed."""
    program = [sys.executable, __file__, run_rank.__module__, run_rank.__name__]
    processes = [Process("torch", [*program, json.dumps(own)], stdin=subprocess.DEVNULL) for own in arguments]
    codes = [_code(process, timeout_s) for process in processes]
    for process in processes:
        process.kill()
    return codes


def _code(process: Process, timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*json.loads(sys.argv[3]))
