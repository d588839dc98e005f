"""Rollout throughput per format: our sampler against the bare engine, and INT8 against BF16.

    python tools/bench/rollout.py [--shape toy] [--shape large] [--format none ...] [--repeats 5]

Both engines of a format stay up and take turns, so that other load on the machine affects both.
The bare engine is `vllm.LLM.generate` on the same prompts with the same engine arguments: once with
the same seeds, which is the same work (a seed of its own costs each sample a generator, drawn from
at each token), once without. Weights are random: lengths are fixed, so only shapes matter for
speed. `|d|` is the mean |logprob difference| on sampled tokens between the sampler,
which was given the model's weights in its format, and transformers with the same weights in BF16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_rl.config.schema import (
    Config,
    Format,
    QuantizationSection,
    RolloutSection,
    SamplerSection,
)
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.quantization.formats import is_quantized
from megatron_rl.quantization.quantize import quantize
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.sampler.engine_settings import (
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)
from megatron_rl.sampler.sampler import Sampler, request_seed
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.file_transport import update_info, write_version

START_TIMEOUT_S = 600.0
COMPARED = 16  # rollouts whose logprobs transformers computes too


@dataclass(frozen=True)
class Workload:
    """A Qwen3 shape and what is asked of it."""

    model: dict[str, int]
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int

    @property
    def parameters(self) -> int:
        m = self.model
        attention = (
            m["hidden_size"]
            * m["head_dim"]
            * 2
            * (m["num_attention_heads"] + m["num_key_value_heads"])
        )
        layer = attention + 3 * m["hidden_size"] * m["intermediate_size"]
        return m["num_hidden_layers"] * layer + m["vocab_size"] * m["hidden_size"]

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.response_tokens


SHAPES = {
    "toy": Workload(
        model={
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        prompts=32,
        samples=8,
        prompt_tokens=12,
        response_tokens=12,
    ),
    "large": Workload(  # linear layers dominate, as they do in models worth training
        model={
            "vocab_size": 4096,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        prompts=8,
        samples=8,
        prompt_tokens=16,
        response_tokens=64,
    ),
}


def make_settings(format: Format, work: Workload) -> EngineSettings:
    config = Config(
        quantization=QuantizationSection(format=format),
        rollout=RolloutSection(
            max_prompt_tokens=work.prompt_tokens, max_response_tokens=work.response_tokens
        ),
        sampler=SamplerSection(
            start_timeout_s=START_TIMEOUT_S,
            vllm={"kv_cache_memory_bytes": 512 << 20},
        ),
    )
    return EngineSettings.from_config(config)


def write_model(folder: Path, work: Workload) -> Path:
    folder.mkdir()
    config = work.model | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {
        name: value
        for name, value in config.items()
        if name not in ("architectures", "torch_dtype")
    }
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**settings), dtype=torch.bfloat16
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def give_weights(sampler: Sampler, hf_folder: Path, to: Path, section: QuantizationSection) -> None:
    hf = HfFolder(hf_folder)

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for name in hf.names:
            if is_quantized(name, section.format, section.ignore):
                for suffix, value in quantize(hf.get(name), section.format).items():
                    yield name.removesuffix("weight") + suffix, value
            else:
                yield name, hf.get(name)

    write_version(to, 0, converted(), format=section.format.value)
    sampler.init_weight_transfer_engine({})
    sampler.start_weight_update()
    sampler.update_weights(update_info(to, 0, 1))
    sampler.finish_weight_update("0")


def mean_difference(rollouts: list[Rollout], hf_folder: Path) -> float:
    """Between the sampler's logprobs and those of the model as transformers runs it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.bfloat16).eval()
    differences = []
    for one in rollouts[:COMPARED]:
        tokens_1S = torch.tensor([[*one.prompt.token_ids, *one.token_ids]])
        with torch.no_grad():
            logprobs_SV = (
                model(tokens_1S)
                .logits[0, len(one.prompt.token_ids) - 1 : -1]
                .float()
                .log_softmax(-1)
            )
        own_T = logprobs_SV.gather(1, torch.tensor(one.token_ids)[:, None]).squeeze(1)
        differences.append((own_T - torch.tensor(one.logprobs)).abs())
    return float(torch.cat(differences).mean())


def prompt_ids(work: Workload) -> list[tuple[int, ...]]:
    size = work.model["vocab_size"]
    return [
        tuple((7 * i + 3 * j) % size for j in range(work.prompt_tokens))
        for i in range(work.prompts)
    ]


def serve_bare(arguments: dict[str, Any], work: Workload) -> None:
    """The bare engine's process: one generation per line of standard input (a seed, or `none`), its
    seconds per line of output.
    """
    from vllm import LLM
    from vllm import SamplingParams as EngineParams

    llm = LLM(**arguments)
    params = EngineParams(
        n=work.samples, max_tokens=work.response_tokens, logprobs=0, detokenize=False
    )
    inputs: Any = [{"prompt_token_ids": list(ids)} for ids in prompt_ids(work)]
    for line in sys.stdin:
        asked = [params.clone() for _ in inputs]
        if line.strip() != "none":
            for group, one in enumerate(asked):
                one.seed = request_seed(int(line), group)
        start = time.perf_counter()
        llm.generate(inputs, asked, use_tqdm=False)
        print(f"seconds {time.perf_counter() - start}", flush=True)


@contextmanager
def bare_engine(
    settings: EngineSettings, hf_folder: Path, folder: Path, shape: str
) -> Iterator[subprocess.Popen[str]]:
    engine_folder = write_engine_folder(hf_folder, folder / "engine", settings.quantization)
    arguments = engine_arguments(settings, engine_folder)
    with (folder / "bare.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--bare", json.dumps(arguments), "--shape", shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=engine_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ask_bare(process: subprocess.Popen[str], seed: int | None) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{'none' if seed is None else seed}\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise RuntimeError("the bare engine ended; see bare.log")


def measure(format: Format, shape: str, repeats: int) -> tuple[float, float, float, float]:
    """(our tokens/s, the bare engine's with the same seeds and without, |d|); medians over
    alternating runs.
    """
    work = SHAPES[shape]
    settings = make_settings(format, work)
    prompts = [Prompt(i, ids, "", {}) for i, ids in enumerate(prompt_ids(work))]
    params = SamplingParams(samples=work.samples, max_tokens=work.response_tokens)
    ours: list[float] = []
    seeded: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hf_folder = write_model(folder / "hf", work)
        with (
            Sampler(settings, hf_folder, folder) as sampler,
            bare_engine(settings, hf_folder, folder, shape) as process,
        ):
            give_weights(sampler, hf_folder, folder, settings.quantization)
            for repeat in range(repeats + 1):
                start = time.perf_counter()
                rollouts = sampler.generate(prompts, params, seed=repeat)
                elapsed = time.perf_counter() - start
                assert sum(len(rollout.token_ids) for rollout in rollouts) == work.tokens
                same = ask_bare(process, repeat)
                other = ask_bare(process, None)
                if repeat:  # the first round is warm-up
                    ours.append(work.tokens / elapsed)
                    seeded.append(work.tokens / same)
                    bare.append(work.tokens / other)
        return median(ours), median(seeded), median(bare), mean_difference(rollouts, hf_folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--format", action="append", choices=["none", "int8", "fp8"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        serve_bare(json.loads(options.bare), SHAPES[options.shape[0]])
        return
    from transformers.utils import logging

    logging.disable_progress_bar()
    for shape in options.shape or ["toy", "large"]:
        print(
            f"{shape}: {SHAPES[shape].parameters / 1e6:.1f}M parameters, {SHAPES[shape].tokens} "
            "tokens per call"
        )
        rates: dict[str, float] = {}
        for format in options.format or ["none", "int8", "fp8"]:
            ours, seeded, bare, difference = measure(Format(format), shape, options.repeats)
            rates[format] = ours
            speeds = f"sampler {ours:8.0f} tokens/s   bare {seeded:8.0f} tokens/s   ratio {ours / seeded:.3f}"
            speeds += f"   without seeds {bare:8.0f} tokens/s   ratio {ours / bare:.3f}"
            print(f"  {format:5} {speeds}   |d| {difference:.4f}")
        if {"none", "int8"} <= rates.keys():
            print(f"  INT8 / BF16: {rates['int8'] / rates['none']:.2f}")


if __name__ == "__main__":
    main()
