"""Answers per second that one reward worker judges:      python tools/bench/rewards.py [REWARD ...]

The whole way of an answer is measured: row and response to the worker, the verdict back. Responses have thousands of
characters, 16 to a problem: a third of them right, the others one of four mistakes. The first problems, which fill
caches of the parser, are left out. CPU seconds are the worker's own, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from megatron_rl.config.schema import RewardSection
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.task import Task

PROBLEMS, WARM_UP, SAMPLES = 120, 40, 16
TEXT = "We set up the equation and simplify both sides, which leaves one case to check. " * 40


def truth(draw: random.Random) -> str:
    a, b, c = draw.randint(2, 99), draw.randint(2, 99), draw.randint(2, 9)
    forms = (
        str(a * b),
        str(a),
        f"\\frac{{{a}}}{{{b}}}",
        f"{c}\\sqrt{{{a}}}",
        f"({a}, {b})",
        f"{a}^{{{c}}}",
        f"{a}x+{b}",
    )
    return draw.choices(forms, (8, 8, 6, 2, 2, 1, 1))[0]


def response(draw: random.Random, said: str, box: bool) -> str:
    return TEXT[: draw.randint(1000, len(TEXT))] + (f"\n\\boxed{{{said}}}" if box else f"\nAnswer: ${said}$")


def tasks(name: str, problems: int, seed: int) -> list[Task]:
    draw = random.Random(seed)
    found = []
    for _ in range(problems):
        answer = truth(draw)
        row = {"prompt": TEXT[:300], "answer": answer}
        said = draw.choices([answer, *(truth(draw) for _ in range(4))], (2, 1, 1, 1, 1), k=SAMPLES)
        found += [Task(row, response(draw, one, name == "math_verify")) for one in said]
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main(names: list[str]) -> None:
    print("| reward | answers/s, by the clock | answers per CPU second of the worker | right |\n|---|---|---|---|")
    for name in names:
        pool = RewardPool(RewardSection(name=name, timeout_s=60))
        try:
            pool.start()
            pool.score(tasks(name, WARM_UP, seed=1))
            given = tasks(name, PROBLEMS, seed=2)
            pid = pool._workers[0]._process.pid  # type: ignore[union-attr]
            begun, used = time.perf_counter(), cpu_seconds(pid)
            scores = pool.score(given)
            wall, used = time.perf_counter() - begun, cpu_seconds(pid) - used
        finally:
            pool.close()
        right = sum(score.reward == 1 for score in scores)
        print(f"| {name} | {len(given) / wall:.0f} | {len(given) / used:.0f} | {right / len(given):.0%} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rewards", nargs="*", metavar="REWARD", default=["exact_match", "math_dapo", "math_verify"])
    main(parser.parse_args().rewards)
