#!/usr/bin/env python3
"""Measurement behind the factors of `sync.probe_budget: auto`: sampler against learner, beside one
rounding more.

    python tools/bench/probe_budget.py MODEL ... [--formats bf16 int8 fp8] [--prompts 16] [--samples
    4] [--tokens 48]
    python tools/bench/probe_budget.py --random 640 6 --outliers 1 32 --tokens 32 --samples 2

MODEL: a Hugging Face folder; `--random HIDDEN LAYERS` makes one; `--outliers` makes copies of the
same function in which four channels of each norm are so many times as large (tools/outliers.py).
Each format is served as a sync brings it and answers random prompts; learners of one rank compute
the same tokens: in BF16, in FP32 (whose roundings are none of the engine's), and as the sampler. Of
each: mean |d|, the noise (learner/weights.py) and how many times it d is; what rounding as the
format does changes of the learner's own logprobs (`expected`), and how far it is then from the
sampler. `--head fp32`: logits in FP32 on both sides. With `--fault`, weights of layers are put
wrong in the engine, one layer at a time: what has to be found.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.apps.evaluation.stored_model import StoredModel, StoredWeights, settings
from megatron_rl.batch import Batch, collate
from megatron_rl.config.schema import Config, Format
from megatron_rl.data.toy import hf_config
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.processes.scratch import entered
from megatron_rl.rank import alone
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, SamplingParams, Scored
from megatron_rl.weight_sync.push import WeightSync

sys.path.insert(0, str(Path(__file__).parents[1]))
from outliers import with_outliers

LEARNERS = {
    "bf16": (),
    "fp32": ("learner.precision=fp32",),
    "as_sampler": ("learner.forward=as_sampler",),
}
FAULTS = {
    "rows of {} by one": lambda weight: weight.roll(1, 0),
    "{} zeroed": torch.zeros_like,
}
RIGHT = ""


class Faulty:
    """The stored weights, of which one is wrong."""

    def __init__(self, stored: StoredModel, victim: str, change: Any) -> None:
        self._right = StoredWeights(stored)
        self._victim = victim
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._right.named_parameters():
            yield name, self._change(weight) if name == self._victim else weight


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--random", type=int, nargs=2, metavar=("HIDDEN", "LAYERS"))
    parser.add_argument(
        "--outliers",
        type=int,
        nargs="+",
        default=[],
        metavar="FACTOR",
        help="in 4 channels of a norm",
    )
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "fp8"])
    parser.add_argument(
        "--learners",
        nargs="+",
        default=list(LEARNERS),
        choices=list(LEARNERS),
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="maximum tokens of a response")
    parser.add_argument("--head", choices=("bf16", "fp32"), default="bf16", help="of the logits")
    parser.add_argument("--fault", action="store_true")
    options = parser.parse_args()
    print(
        f"{'model':<24}{'sampler':<8}{'weights':<44}{'learner':<12}{'mean |d|':>10}{'noise':>10}"
        f"{'times':>8}{'expected':>10}{'left':>10}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        models = [*options.models]
        if options.random:
            models.append(
                make_random(Path(scratch) / "random_{}x{}".format(*options.random), *options.random)
            )
        for origin, factor in [
            (origin, factor) for origin in models for factor in options.outliers
        ]:
            models.append(Path(scratch) / f"{origin.name}_x{factor}")
            with_outliers(origin, models[-1], factor, 4)
        for folder in models:
            measure(StoredModel(folder.resolve(), folder.resolve(), folder.name), options)


def make_random(folder: Path, hidden: int, layers: int) -> Path:
    """A model without a tokenizer, of weights as large as trained ones have."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    card = hf_config() | {
        "vocab_size": 32000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**card)).bfloat16()
    write_folder(
        folder, {name: tensor.contiguous() for name, tensor in model.named_parameters()}, card
    )
    return folder


def measure(stored: StoredModel, options: argparse.Namespace) -> None:
    answers: dict[tuple[str, str], Batch] = {}
    for format in options.formats:
        answers |= {(format, what): batch for what, batch in answered(stored, format, options)}
    for kind in options.learners:
        formats = [format for format in options.formats if kind != "as_sampler" or format == "int8"]
        for format in formats:
            mine = {what: batch for (of, what), batch in answers.items() if of == format}
            for what, (d, noise, expected, left) in compared(
                stored, format, kind, options.head, mine
            ).items():
                print(
                    f"{stored.label:<24}{format:<8}{what or 'right':<44}{kind:<12}{d:>10.2e}{noise:>10.2e}"
                    f"{d / noise if noise else 0:>8.2f}{expected:>10.2e}{left:>10.2e}",
                    flush=True,
                )


def configured(stored: StoredModel, format: str, head: str, *overrides: str) -> Config:
    named = "int4" if format == "int4" else None
    given = ["data.eval=null", "run.device=cpu", f"model.head_precision={head}", *overrides]
    config = settings(None, stored, "int8" if named else format, given)
    if named:
        return replace(config, quantization=replace(config.quantization, format=Format.int4))
    return config


def answered(
    stored: StoredModel, format: str, options: argparse.Namespace
) -> Iterator[tuple[str, Batch]]:
    config = configured(
        stored, format, options.head, "sampler.vllm={kv_cache_memory_bytes: 200000000}"
    )
    vocab = json.loads((stored.folder / "config.json").read_text())["vocab_size"]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        2,
        vocab,
        (options.prompts, 8),
        generator=draw,
    ).tolist()
    prompts = [Prompt(number, tuple(ids), "", {}) for number, ids in enumerate(tokens)]
    with entered():
        sampler = Sampler(
            EngineSettings.from_config(config), stored.folder, Path(tempfile.gettempdir()), _quiet
        )
        with closing(sampler):
            sampler.launch()
            for version, (what, weights) in enumerate(served(stored, options)):
                with closing(WeightSync(weights, sampler, config)) as sync:
                    sync.push(version)
                    params = SamplingParams(options.samples, options.tokens)
                    fresh = sampler.generate(prompts, params, seed=version)
                    yield what, collate([Scored(one, reward=0.0) for one in fresh])


def served(stored: StoredModel, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    right = StoredWeights(stored)
    yield RIGHT, right
    if not options.fault:
        return
    layers = right.model.shape.layers
    for layer in sorted({0, layers // 2, layers - 1}):
        for module in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        ):
            for what, change in FAULTS.items():
                name = f"decoder.layers.{layer}.{module}.weight"
                yield what.format(f"{layer}.{module}"), Faulty(stored, name, change)


def compared(
    stored: StoredModel, format: str, kind: str, head: str, answers: Mapping[str, Batch]
) -> dict[str, tuple[float, ...]]:
    with alone():
        from megatron_rl.learner.learner import Learner
        from megatron_rl.models.model import Model

        config = configured(stored, format, head, "rollout.temperature=1", *LEARNERS[kind])
        model = Model.read(stored.folder, config.learner, config.model.head_precision)
        learner = Learner(model, config)
        with closing(learner):
            learner.load_hf(stored.folder)
            return {what: _one(learner, batch) for what, batch in answers.items()}


def _one(learner: Any, batch: Batch) -> tuple[float, ...]:
    own_N = learner.logprobs(batch)
    sampler_N = batch.sampler_logprobs_N
    noise_N = learner.logprobs_rounded_again(batch)
    expected_N = learner.expected_logprobs(batch)
    assert torch.equal(own_N, learner.logprobs(batch)), "something of the rounding was left behind"
    pairs = [(own_N, sampler_N), (own_N, noise_N)]
    pairs += [(own_N, expected_N), (expected_N, sampler_N)] if expected_N is not None else []
    found = [
        float((one_N - other_N)[batch.mask_N].double().abs().mean()) for one_N, other_N in pairs
    ]
    return (*found, math.nan, math.nan)[:4]


def _quiet(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
