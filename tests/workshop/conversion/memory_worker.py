"""How much conversions hold, each in a fork of one process as the tool is: reads and prints lines of JSON."""

import json
import os
import sys
from pathlib import Path

from models import convert

from megatron_rl.workshop.conversion import exports, imports, work

FILE_BYTES = 20 << 20


def main() -> None:
    imports.FILE_BYTES = exports.FILE_BYTES = FILE_BYTES
    work.THREADS = 2
    for line in sys.stdin:
        first, words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(peak(first, words))
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"{words} failed")


def peak(first: list[str], words: list[str]) -> int:
    """Of `words`; `first` goes before, since what it imports is not what a conversion holds."""
    answer, sys.stdout = sys.stdout, sys.stderr
    failed = convert.main(first)
    Path("/proc/self/clear_refs").write_text("5")
    before = held("VmRSS")
    failed |= convert.main(words)
    print(held("VmHWM") - before, file=answer, flush=True)
    return failed


def held(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    convert.tune_memory()
    main()
