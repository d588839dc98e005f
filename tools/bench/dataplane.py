"""What a step's batch costs on its way: put together, handed out to replicas, their logprobs brought back.

    python tools/bench/dataplane.py [--rows 8192] [--ranks 4] [--repeats 3]

Answers of 2,000 to 20,000 tokens, one learner rank a process; no model. Time is told in plain copies of the batch's
bytes (tokens, logprobs, mask), made in turn with it; memory as the most that a rank held at once beyond what it began
with, in the same bytes. Then fewer rows (is it linear?), and other numbers of ranks (do the driver's bytes depend on
them?).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch import Batch, collate
from megatron_rl.config.schema import LearnerSection
from megatron_rl.learner.modules.packing import assign_rows
from megatron_rl.learner.parallel import RENDEZVOUS, LearnerRank, leave
from megatron_rl.learner.shares import DataPlane
from megatron_rl.models.layout import Layout
from megatron_rl.types import Prompt, Rollout, Scored, written

PROMPT, SHORTEST, LONGEST = 200, 2_000, 20_000
LOGPROBS = (torch.float32, ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return be_rank(options, Path(options.rank_of))
    for rows, ranks in ((options.rows, options.ranks), (options.rows // 4, options.ranks)):
        print_one(options, rows, ranks)
    for ranks in (2, 4, 8):
        print_one(options, options.rows // 16, ranks, brief=True)


def print_one(options: argparse.Namespace, rows: int, ranks: int, brief: bool = False) -> None:
    found = run(rows, ranks, options.repeats)
    driver, *others = found
    gigabytes = driver["nbytes"] / 1e9
    print(f"{rows:,} answers, {driver['tokens'] / 1e6:.1f} M tokens, {gigabytes:.3f} GB, {ranks} ranks")
    if not brief:
        parts = ", ".join(f"{name} {driver['seconds'][name]:.1f}" for name in driver["seconds"] if name != "copy")
        print(f"  a plain copy {driver['copy_s'] * 1e3:.0f} ms; in copies: {parts}; together {driver['copies']:.1f}")
        most = max(other["most"] for other in others)
        print(f"  most memory, in batches: driver {driver['most']:.2f}, the others at most {most:.2f}")
    sent, received = driver["sent"] / driver["nbytes"], max(other["received"] for other in others) / driver["nbytes"]
    share = f"1 / ranks: {1 / ranks:.2f}"
    print(f"  moved, in batches: out of the driver {sent:.2f}, into another rank at most {received:.2f} ({share})")


def run(rows: int, ranks: int, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-") as folder:
        command = [sys.executable, __file__, "--rank-of", folder, "--rows", str(rows), "--repeats", str(repeats)]
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        place = {"WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", **quiet}
        place[RENDEZVOUS] = f"file://{folder}/meeting"
        processes = [
            subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank has failed")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def be_rank(options: argparse.Namespace, folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    ranks = LearnerRank(LearnerSection(data_parallel=world), Layout(dp=world), 0, 600.0)
    scored = answers(options.rows) if ranks.is_driver else []
    found: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        dist.barrier()
        plane, seconds = DataPlane(ranks), {}
        held: Batch | None = None
        if ranks.is_driver:
            seconds["copy"] = copied(collate(scored))
        forget_the_most()
        before = memory("VmRSS")
        dist.barrier()
        start = time.perf_counter()
        if ranks.is_driver:
            held = collate(scored)
            seconds["collate"] = time.perf_counter() - start
        shared = plane.share(held)
        wanted = [
            [row for rows in groups for row in rows]
            for groups in assign_rows(shared.lengths_B.tolist(), world, budget=32768)
        ]
        share = plane.read(shared, wanted)
        seconds["hand out"] = time.perf_counter() - start - seconds.get("collate", 0.0)
        own = {row: torch.full((int(shared.response_lengths_B[row]),), -1.0) for row in wanted[ranks.place.dp]}
        begun = time.perf_counter()
        logprobs_N = plane.collect(shared, wanted, "logprobs_N", own, LOGPROBS)
        seconds["collect"] = time.perf_counter() - begun
        assert logprobs_N is None or bool((logprobs_N == -1.0).all())
        most = memory("VmHWM") - before - sum(one.nbytes for one in own.values())
        found.append({"seconds": seconds, "most": most, "sent": plane.sent, "received": plane.received})
        if held is not None:
            found[-1] |= {"nbytes": sum(one.nbytes for one in read(held)), "tokens": len(held.tokens_P)}
        del held, shared, share, own, logprobs_N
    (folder / f"{ranks.rank}.json").write_text(json.dumps(summary(found)))
    leave()


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    nbytes = exchange_nbytes(found[0].get("nbytes", 0))
    one = {**found[-1], "nbytes": nbytes, "most": min(each["most"] for each in found) / nbytes}
    if "copy" in one["seconds"]:
        copy = [each["seconds"]["copy"] for each in found]
        names = [name for name in one["seconds"] if name != "copy"]
        in_copies = {
            name: statistics.median(each["seconds"][name] / each["seconds"]["copy"] for each in found) for name in names
        }
        one |= {"copy_s": statistics.median(copy), "seconds": in_copies, "copies": sum(in_copies.values())}
    return one


def exchange_nbytes(nbytes: int) -> int:
    told = torch.tensor([nbytes])
    dist.broadcast(told, src=0)
    return int(told)


def read(batch: Batch) -> list[torch.Tensor]:
    return [batch.tokens_P, batch.sampler_logprobs_N, batch.mask_N]


def answers(rows: int) -> list[Scored]:
    random = np.random.default_rng(0)
    prompt = tuple(range(PROMPT))
    scored = []
    for row in range(rows):
        length = int(random.integers(SHORTEST, LONGEST))
        tokens = random.integers(0, 150_000, length, dtype=np.int32)
        logprobs = -random.random(length, dtype=np.float32)
        one = Rollout(Prompt(row, prompt, "", {}), row // 16, row % 16, tokens, logprobs, written(length), "stop", 0)
        scored.append(Scored(one, 0.0))
    return scored


def copied(batch: Batch) -> float:
    start = time.perf_counter()
    copies = [one.clone() for one in read(batch)]
    return (time.perf_counter() - start) * bool(copies)


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def forget_the_most() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
