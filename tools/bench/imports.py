"""How much sooner do an engine and a learner start when the collector waits (`startup.collect_rarely`)?

Imports each in fresh processes, with Python's usual pace and with ours in turn:

    python tools/bench/imports.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

MODULES = {"engine": "vllm.v1.engine.core", "learner": "megatron_rl.learner.learner"}
PROGRAM = """
import importlib, sys, time
from megatron_rl.processes.process import collect_rarely
if sys.argv[2] == "rarely":
    collect_rarely()
start = time.process_time()
importlib.import_module(sys.argv[1])
print("seconds", time.process_time() - start)
"""


def seconds(module: str, pace: str) -> float:
    """CPU time of one import in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, module, pace]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    repeats = parser.parse_args().repeats
    for name, module in MODULES.items():
        seconds(module, "usual")  # fills the file cache, and is not counted
        pairs = [(seconds(module, "usual"), seconds(module, "rarely")) for _ in range(repeats)]
        usual, rarely = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(json.dumps({name: {"usual_s": usual, "rarely_s": rarely, "ratio": round(rarely / usual, 3)}}))


if __name__ == "__main__":
    main()
