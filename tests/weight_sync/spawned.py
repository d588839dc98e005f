"""The `run_rank` of a module as each of two ranks, each in a process of its own.

`python spawned.py MODULE ARGUMENTS_JSON OUT` is one of them: what the function returns is written
to OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from preloaded import Process

TIMEOUT_S = 240.0


def run_ranks(
    module: str, folder: Path, *arguments: Any, kind: str = "torch"
) -> tuple[list[Any], list[Any]]:
    """Exit codes, None where a rank did not end in time and was killed; and what each returned,
    None where it died.

    `run_rank` is called with its rank and a file to meet at, then `arguments`.
    """
    outs = [folder / f"rank{rank}.json" for rank in range(2)]
    processes = []
    for rank, out in enumerate(outs):
        given = json.dumps([rank, folder / "store", *arguments], default=str)
        program = [sys.executable, __file__, module, given, out]
        processes.append(Process(kind, program, stdin=subprocess.DEVNULL))
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
    found = importlib.import_module(sys.argv[1]).run_rank(*json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(found))
    os._exit(0)  # the process group of a dead rank cannot be taken down in good order
