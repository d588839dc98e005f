"""Running one function as each of two ranks, each in a process of its own.

`python spawned.py MODULE FUNCTION ARGUMENTS_JSON OUT` is one of them: what the function returns is
written to OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preloaded import Process

TIMEOUT_S = 240.0


def run_ranks(
    run_rank: Callable[..., Any], folder: Path, *arguments: Any
) -> tuple[list[Any], list[Any]]:
    """Exit codes, None where a rank did not end in time and was killed; and what each returned,
    None where it died.

    `run_rank` is called with its rank and a file to meet at, then `arguments`.
    """
    program = [sys.executable, __file__, run_rank.__module__, run_rank.__name__]
    outs = [folder / f"rank{rank}.json" for rank in range(2)]
    given = [json.dumps([rank, str(folder / "store"), *map(str, arguments)]) for rank in range(2)]
    processes = [
        Process("torch", [*program, own, out], stdin=subprocess.DEVNULL)
        for own, out in zip(given, outs, strict=True)
    ]
    codes = [_code(process) for process in processes]
    for process in processes:
        process.kill()
    return codes, [json.loads(out.read_text()) if out.exists() else None for out in outs]


def _code(process: Process) -> int | None:
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    found = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*json.loads(sys.argv[3]))
    Path(sys.argv[4]).write_text(json.dumps(found))
    os._exit(0)  # the process group of a dead rank cannot be taken down in good order
