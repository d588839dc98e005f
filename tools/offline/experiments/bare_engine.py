"""vLLM alone with the arguments that a run would give it, random weights: tokens per second.

    bare_engine.py PROJECT OUT ENGINE ...      ENGINE: SIZE:FORMAT, as 0.6B:int8, 8B:none, 8B:fp8

Each engine is a process of its own and writes OUT/bare_engine.jsonl line by line. By default it
generates as the recipe for one GPU does, 256 responses of 512 tokens to 32 prompts of 12: as the
sampler asks (a seed for each response, a logprob for each token), without seeds, without logprobs.
--core apart runs vLLM's core in a process apart, as its own server does. --sequences 64 256
compares numbers of concurrent responses instead.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results import Results, demand_gpu

RECIPE = "recipes/grpo-qwen3_0.6b-1n1g-int8.yaml"
QUANTIZATION = {"int8": "int8_smoothed", "fp8": "fp8", "none": "none"}
SAMPLES = 8  # responses to a prompt
CHILD = "BARE_ENGINE_CHILD"


def arguments_of(options: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM, with the model's folder written."""
    from megatron_rl.config.load import load
    from megatron_rl.sampler.engine_settings import (
        EngineSettings,
        engine_arguments,
        write_engine_folder,
    )

    size, _, form = engine.partition(":")
    folder = options.out / f"engine_{size}_{form}"
    model = folder / "hf"
    model.mkdir(parents=True, exist_ok=True)
    card = options.project / "conf" / "model" / f"Qwen3-{size}.json"
    (model / "config.json").write_text(card.read_text())
    overrides = [
        f"model.path={model}",
        "data.train=none",
        "run.device=cuda",
        f"rollout.max_prompt_tokens={options.prompt}",
        f"rollout.max_response_tokens={options.response}",
        f"quantization={QUANTIZATION[form]}",
    ]
    settings = EngineSettings.from_config(load(options.project / RECIPE, overrides))
    engine_folder = write_engine_folder(model, folder / "engine", settings.quantization)
    arguments = engine_arguments(settings, engine_folder)
    for ours in ("weight_transfer_config", "worker_extension_cls"):
        arguments.pop(ours, None)
    return arguments


def measure(options: argparse.Namespace, engine: str) -> None:
    """Start one engine in this process and time it."""
    sys.path.insert(0, str(options.project))
    results = Results(options.out / "bare_engine.jsonl")
    arguments = arguments_of(options, engine)
    from vllm import LLM, SamplingParams

    from megatron_rl.sampler.sampler import request_seed

    demand_gpu()
    about = {"core": options.core, "prompt": options.prompt, "response": options.response}
    began = time.perf_counter()
    llm = LLM(**arguments)
    runner = llm.llm_engine.vllm_config.use_v2_model_runner
    spent = round(time.perf_counter() - began, 1)
    results.note(engine, **about, start_s=spent, model_runner_v2=str(runner))

    def run(variant: str, sequences: int, seeded: bool, logprobs: int | None) -> None:
        count = sequences // SAMPLES
        prompts = []
        parameters = []
        for number in range(count):
            tokens = [(7 * number + 3 * place) % 1000 for place in range(options.prompt)]
            prompts.append({"prompt_token_ids": tokens})
            seed = request_seed(7, number) if seeded else None
            given = {"max_tokens": options.response, "logprobs": logprobs, "seed": seed}
            asked = SamplingParams(n=SAMPLES, detokenize=False, ignore_eos=True, **given)
            parameters.append(asked)
        began = time.perf_counter()
        finished = llm.generate(prompts, parameters, use_tqdm=False)
        spent = time.perf_counter() - began
        tokens = sum(len(one.token_ids) for each in finished for one in each.outputs)
        results.note(
            engine,
            **about,
            variant=variant,
            sequences=sequences,
            tokens_per_s=round(tokens / spent),
            s=round(spent, 3),
            token_ms=round(spent / options.response * 1e3, 2),
        )

    if options.sequences:
        for sequences in (options.sequences[0], *options.sequences):  # the first warms up
            run("as the sampler", sequences, True, 0)
        return
    run("as the sampler", 256, True, 0)
    run("without seeds", 256, False, 0)
    run("without logprobs", 256, False, None)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("engines", nargs="+", metavar="ENGINE")
    parser.add_argument("--core", choices=("inside", "apart"), default="inside")
    parser.add_argument("--sequences", type=int, nargs="*", default=[])
    parser.add_argument("--prompt", type=int, default=12)
    parser.add_argument("--response", type=int, default=512)
    options = parser.parse_args()
    for engine in options.engines:
        if engine.partition(":")[2] not in QUANTIZATION:
            raise SystemExit(f"bare_engine: {engine}: a size and one of {', '.join(QUANTIZATION)}")
    if os.environ.get(CHILD):
        measure(options, options.engines[0])
        return
    flags = sys.argv[sys.argv.index(options.engines[-1]) + 1 :]
    status = 0
    for engine in options.engines:
        environment = {
            **os.environ,
            CHILD: "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if options.core == "apart" else "0",
            "VLLM_USE_DEEP_GEMM": "0",
        }
        command = [
            sys.executable,
            __file__,
            str(options.project),
            str(options.out),
            engine,
            *flags,
        ]
        status = subprocess.run(command, env=environment).returncode or status
    raise SystemExit(status)


if __name__ == "__main__":
    main()
