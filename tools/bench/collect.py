"""What a rollout step of DAPO's size costs without an engine:      python tools/bench/collect.py [--answers 8192]

Synthetic answers of 2,000 to 20,000 tokens arrive as an engine sends them (messages of arrays); then they become
rollouts, are scored with `math_dapo`, collated, and recorded with the columns that a correction makes. Decoding whole
answers, which only a recorded step needs, stands apart. Seconds by the clock and of CPU, and the most memory that the
process had.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from megatron_rl.batch import collate
from megatron_rl.config.schema import RewardSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_chat_tokenizer
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.collect import Scorer
from megatron_rl.runs.rollout_file import write_rollouts
from megatron_rl.sampler.client.engine_client import EngineClient, Line
from megatron_rl.sampler.client.interface import Completion, Look
from megatron_rl.types import Prompt, Rollout, SamplingParams, written

SAMPLES, PROMPT_TOKENS, SHORTEST, LONGEST = 16, 400, 2_000, 20_000


@contextmanager
def timed(name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak:.1f} |", flush=True)


def answered(tokenizer: FolderTokenizer, lengths: list[int]) -> list[msgspec.Raw]:
    """What an engine replies: every answer ends in an answer line."""
    draw = np.random.default_rng(1)
    digits = np.asarray([tokenizer.encode(digit)[0] for digit in "0123456789"], np.int32)
    end = np.asarray(tokenizer.encode("Answer: 42"), np.int32)
    found = []
    for length in lengths:
        tokens = draw.choice(digits, length)
        tokens[-len(end) :] = end
        logprobs = -draw.exponential(0.3, length).astype(np.float32)
        said = {"tokens": tokens.tobytes(), "logprobs": logprobs.tobytes(), "finish": "stop", "spans": [(1, length)]}
        found.append(msgspec.Raw(msgspec.msgpack.encode(said)))
    return found


class Recorded(Line):
    """An engine that has every answer already."""

    def __init__(self, answers: list[msgspec.Raw]) -> None:
        super().__init__()
        self._answers = iter(answers)

    async def open(self) -> None:
        pass

    def send(self, content: bytes) -> None:
        for request in msgspec.msgpack.decode(content):
            self.received(msgspec.msgpack.encode([{"id": request["id"], "value": next(self._answers)}]))

    async def look(self) -> Look:
        return Look(True)

    async def close(self) -> None:
        pass


async def received(answers: list[msgspec.Raw], prompts: list[Prompt]) -> list[Rollout]:
    client = EngineClient("engine", Recorded(answers), 600.0, vocabulary=1 << 20)
    params = SamplingParams(samples=SAMPLES, max_tokens=LONGEST)
    drawn = [
        client.generate(prompts[number // SAMPLES].token_ids, params, number, version=1, patient=True)
        for number in range(len(answers))
    ]
    done = await asyncio.gather(*drawn)
    await client.close()
    return [_rollout(number, prompts[number // SAMPLES], one) for number, one in enumerate(done)]


def _rollout(number: int, prompt: Prompt, one: Completion) -> Rollout:
    return Rollout(
        prompt=prompt,
        group=number // SAMPLES,
        sample=number % SAMPLES,
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        loss_mask=written(len(one.token_ids)),
        finish_reason=one.finish_reason,
        policy_version=one.spans[0][0],
        format="int8",
        versions=one.versions,
    )


def main(count: int) -> None:
    draw = random.Random(1)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
    print(f"{count} answers, {sum(lengths) / 1e6:.1f} million tokens\n")
    print("| what | s | CPU s | GiB at most |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_chat_tokenizer(Path(folder), iter(["0 1 2 3 4 5 6 7 8 9 Answer: 42"]))
        tokenizer = FolderTokenizer(Path(folder))
        prompts = [
            Prompt(n, (2,) * PROMPT_TOKENS, "1" * PROMPT_TOKENS, {"answer": "42"}) for n in range(count // SAMPLES)
        ]
        pool = RewardPool(RewardSection(name="math_dapo", workers=2))
        try:
            pool.start()
            answers = answered(tokenizer, lengths)
            with timed("(making the answers)"):
                pass
            with timed("receive"):
                rollouts = asyncio.run(received(answers, prompts))
            with timed("score"):
                scored = Scorer(RewardSection(name="math_dapo"), pool, tokenizer).score(rollouts, LONGEST)
        finally:
            pool.close()
        del answers, rollouts
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
