"""Synthetic run directories, written by the real Recorder: what the record and report tests
read.
"""

import math
import random
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rollouts import rollout

from megatron_rl.config import to_yaml
from megatron_rl.config.schema import (
    Config,
    CorrectionConfig,
    Format,
    Level,
    QuantizationSection,
    WeightConfig,
)
from megatron_rl.tracking.console import Display, PlainDisplay, choose
from megatron_rl.tracking.record import Recorder
from megatron_rl.types import Prompt, Scored, Verdict


def make_config(level: Level = Level.token, fmt: Format = Format.int8) -> Config:
    return Config(
        correction=CorrectionConfig(weight=WeightConfig(level=level)),
        quantization=QuantizationSection(format=fmt),
    )


def make_yaml(config: Config, name: str) -> str:
    text = to_yaml(config)
    return text.replace("name: null", f"name: {name}", 1)


def quiet(n_steps: int) -> Display:
    return PlainDisplay(StringIO())


def start(path: Path, config: Config | None = None, steps: int = 3, **others: Any) -> Recorder:
    """A recorder of a run whose directory is `path`."""
    config = config or make_config()
    given = {"display": quiet(steps), "if_exists": config.run.if_exists, **others}
    return Recorder(config.log, make_yaml(config, path.name), path, steps, **given)


def make_scored(
    n: int, length: int = 12, noise: float = 0.05, seed: int = 0
) -> tuple[list[Scored], torch.Tensor]:
    """Rollouts with sampler logprobs, and the learner's of all tokens: a little off. Lengths vary."""
    draw = random.Random(seed)
    scored = []
    prox: list[float] = []
    for index in range(n):
        size = draw.randint(1, length)
        logprobs = tuple(-draw.expovariate(2.0) for _ in range(size))
        prox += [lp + draw.gauss(0, noise) for lp in logprobs]
        prompt = Prompt(index // 4, (1, 2, 3), "1+1=", {"answer": "2"})
        tokens = tuple(draw.randint(3, 20) for _ in range(size))
        one = rollout(
            tokens,
            prompt=prompt,
            group=index // 4,
            sample=index % 4,
            logprobs=logprobs,
            policy_version=3,
        )
        right = draw.random() < 0.5
        scored.append(
            Scored(one, float(right), text="2", verdict=Verdict.right if right else Verdict.wrong)
        )
    return scored, torch.tensor(prox)


def make_run(
    folder: Path,
    name: str,
    steps: int = 60,
    level: Level = Level.token,
    fmt: Format = Format.int8,
    seed: int = 0,
) -> Path:
    draw = random.Random(seed)
    recorder = start(folder / name, make_config(level, fmt), steps)
    recorder.log(0, {"eval/accuracy": 0.31, "eval/n": 256})
    kl = {Format.none: 1e-4, Format.int8: 3e-3, Format.fp8: 4e-3}[fmt]
    for step in range(1, steps + 1):
        skill = 1 / (1 + math.exp(-(step - steps / 2.4) / (steps / 9)))
        metrics = {
            "reward/sampler_mean": 0.3 + 0.6 * skill + draw.gauss(0, 0.03),
            "reward/mean": 0.5 + draw.gauss(0, 0.02),
            "rollout_corr/kl": kl * draw.uniform(0.5, 1.4),
            "rollout_corr/k3_kl": kl * draw.uniform(0.9, 1.2),
            "rollout_corr/rollout_is_eff_sample_size": 0.985 + draw.gauss(0, 0.003),
            "rollout_corr/rollout_rs_masked_fraction": 0.0,
            "rollout/response_tokens_mean": 7 + 2 * skill + draw.gauss(0, 0.2),
            "rollout/groups_kept_fraction": 0.8 - 0.5 * skill,
            "rollout/groups": 100,
            "rollout/groups_all_right": round(60 * skill),
            "rollout/groups_all_wrong": round(30 * (1 - skill)),
            "rollout/tokens": 4000.0,
            "loss/total": draw.gauss(0, 0.01),
            "loss/entropy": 0.8 - 0.5 * skill,
            "loss/clip_fraction_high": abs(draw.gauss(0.004, 0.001)),
            "optim/grad_norm": 0.4 + abs(draw.gauss(0, 0.1)) if step != 7 else math.nan,
            "sync/bytes": 1_450_000,
            "sync/quant_error_max": 0.011 + draw.gauss(0, 0.0003),
            "time/rollout": 0.25,
            "time/update": 0.18,
        }
        metrics |= {
            f"sync/{part}_s": 0.004 for part in ("plan", "quantize", "gather", "transfer", "load")
        }
        for phase in ("rollout", "prox", "correction", "update", "sync"):
            with recorder.phase(phase):
                pass
        if step % 10 == 0:
            metrics |= {"eval/accuracy": 0.31 + 0.6 * skill, "eval/n": 256}
            metrics |= {
                "sync/probe_abs_diff": 0.03 + draw.gauss(0, 0.004),
                "sync/probe_budget": 0.08,
            }
            scored, prox_N = make_scored(32, noise=0.02 if fmt is Format.none else 0.5, seed=step)
            sampler_N = torch.cat([torch.tensor(one.rollout.logprobs) for one in scored])
            weights_N = (prox_N - sampler_N).exp().clamp(max=2.0)
            pieces = {
                row: [f"<{token}>" for token in scored[row].rollout.token_ids]
                for row in choose(scored, prox_N)
            }
            recorder.rollouts(
                step, scored, prox_logprobs_N=prox_N, weights_N=weights_N, pieces=pieces
            )
        recorder.log(step, metrics)
    recorder.close()
    return folder / name
