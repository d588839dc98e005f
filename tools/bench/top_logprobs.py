"""Rollout time with top logprobs against without, in turns on one engine.

    python tools/bench/top_logprobs.py [--shape large] [--format int8] [--max 32] [--repeats 5]

The two requests of a repeat have the same prompts and seeds, and alternate in who is first. Weights
are random: the distributions are broad, and most sets have `--max` tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rollout import SHAPES, give_weights, make_settings, prompt_ids, write_model

from megatron_rl.config.schema import Format
from megatron_rl.processes.channel import encode
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams


def entries(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """(top tokens of a token, bytes of a token on the wire for them)."""
    tokens = sum(len(one.token_ids) for one in rollouts)
    columns = [part for one in rollouts for part in (one.top_counts, one.top_ids, one.top_logprobs)]
    found = sum(len(one.top_ids or ()) for one in rollouts)
    return found / tokens, sum(len(encode(part)) for part in columns) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="large", choices=sorted(SHAPES))
    parser.add_argument("--format", default="int8", choices=["none", "int8", "fp8"])
    parser.add_argument("--max", type=int, default=32)
    parser.add_argument("--mass", type=float, default=0.999)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    work = SHAPES[options.shape]
    settings = replace(make_settings(Format(options.format), work), candidates=options.max)
    prompts = [Prompt(i, ids, "", {}) for i, ids in enumerate(prompt_ids(work))]
    plain = SamplingParams(samples=work.samples, max_tokens=work.response_tokens)
    top = replace(plain, top_logprobs=options.max, top_mass=options.mass)
    seconds: dict[SamplingParams, list[float]] = {plain: [], top: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hf_folder = write_model(folder / "hf", work)
        with Sampler(settings, hf_folder, folder) as sampler:
            give_weights(sampler, hf_folder, folder, settings.quantization)
            for repeat in range(options.repeats + 1):
                for params in (plain, top) if repeat % 2 else (top, plain):
                    start = time.perf_counter()
                    rollouts = sampler.generate(prompts, params, seed=repeat)
                    if repeat:  # the first round is warm-up
                        seconds[params].append(time.perf_counter() - start)
                    if params is top:
                        count, nbytes = entries(rollouts)
    ratio = median(b / a for a, b in zip(seconds[plain], seconds[top], strict=True))
    print(
        f"{options.shape} {options.format} max {options.max}: without "
        f"{median(seconds[plain]):.3f} s, with {median(seconds[top]):.3f} s, ratio {ratio:.3f}; "
        f"{count:.1f} top tokens and {nbytes:.1f} bytes a token"
    )


if __name__ == "__main__":
    main()
