"""What a rollout step of DAPO's size costs without an engine:      python tools/bench/collect.py [--answers 8192]

Synthetic answers of 2,000 to 20,000 tokens arrive as an engine sends them (flat arrays); then they become rollouts, are
scored with `math_dapo`, collated, and recorded with the columns that a correction makes. Decoding whole answers, which
only a recorded step needs, stands apart. Seconds by the clock and of CPU, and the most memory that the process had.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from megatron_rl.sampler.embedded_answering import unpack

from megatron_rl.config.schema import RewardSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_chat_tokenizer
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.collect import Scorer
from megatron_rl.runs.rollout_file import write_rollouts
from megatron_rl.types import Prompt, collate

SAMPLES, PROMPT_TOKENS, SHORTEST, LONGEST = 16, 400, 2_000, 20_000


@contextmanager
def timed(name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak:.1f} |", flush=True)


def answered(tokenizer: FolderTokenizer, lengths: list[int]) -> dict[str, object]:
    """What the engine's child sends: every answer ends in an answer line."""
    draw = np.random.default_rng(1)
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    tokens = draw.choice(np.asarray(digits, np.int32), sum(lengths))
    end = np.asarray(tokenizer.encode("Answer: 42"), np.int32)
    for stop in np.cumsum(lengths):
        tokens[stop - len(end) : stop] = end
    logprobs = -draw.exponential(0.3, len(tokens)).astype(np.float32)
    return {
        "lengths": lengths,
        "tokens": tokens.tobytes(),
        "logprobs": logprobs.tobytes(),
        "finish": ["stop"] * len(lengths),
        "versions": [1] * len(lengths),
        "spans": {},
    }


def main(count: int) -> None:
    draw = random.Random(1)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
    print(f"{count} answers, {sum(lengths) / 1e6:.1f} million tokens\n")
    print("| what | s | CPU s | GiB at most |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_chat_tokenizer(Path(folder), iter(["0 1 2 3 4 5 6 7 8 9 Answer: 42"]))
        tokenizer = FolderTokenizer(Path(folder))
        prompts = {
            n: Prompt(n, (2,) * PROMPT_TOKENS, "1" * PROMPT_TOKENS, {"answer": "42"}) for n in range(count // SAMPLES)
        }
        pool = RewardPool(RewardSection(name="math_dapo", workers=2))
        try:
            pool.start()
            answer = answered(tokenizer, lengths)
            with timed("(making the answers)"):
                pass
            with timed("unpack"):
                rollouts = [one for group in unpack(answer, prompts, SAMPLES, "int8") for one in group]
            with timed("score"):
                scored = Scorer(RewardSection(name="math_dapo"), pool, tokenizer).score(rollouts, LONGEST)
        finally:
            pool.close()
        del answer, rollouts
        with timed("collate"):
            batch = collate(scored)
        prox_BT = batch.sampler_logprobs_BT + 0.01
        with timed("record"):
            path = Path(folder) / "step_1.parquet"
            columns = {"prox_logprobs_BT": prox_BT, "weights_BT": torch.ones_like(prox_BT), "mask_BT": batch.mask_BT}
            write_rollouts(path, scored, **columns)
        print(f"({path.stat().st_size / 2**20:.0f} MiB recorded)")
        with timed("decoding every answer, apart"):
            tokenizer.decode([one.rollout.token_ids for one in scored])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=8192)
    main(parser.parse_args().answers)
