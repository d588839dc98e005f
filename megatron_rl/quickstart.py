"""The whole chain on one machine: toy data, a supervised warm start, RL with a quantized sampler, a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.config import ConfigError, load
from megatron_rl.config.schema import Config
from megatron_rl.data.toy import write_toy
from megatron_rl.preflight.machine import Machine, detect
from megatron_rl.runs.metrics_file import read_metrics
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.runs.status import read_status

TOY = Path("data/toy")
WARM_START = Path("recipes/toy_sft.yaml")
RECIPE = Path("recipes/quickstart.yaml")


def quickstart(overrides: Sequence[str], run: Callable[[Config], int]) -> int:
    if not RECIPE.is_file():
        raise ConfigError(f"{RECIPE}: not here; run this from the repository's folder")
    begun = time.monotonic()
    print("1/3  the toy: addition problems, a character tokenizer, a Qwen3 of under a million parameters")
    counts = write_toy(TOY)
    print(f"     {TOY}: {counts['train']} problems to train on, {counts['test']} held out\n")

    fitted = ["run.if_exists=archive", *fitting(detect())]
    print("2/3  a supervised warm start: the same learner and loop, cross-entropy on the answers")
    warm = load(WARM_START, fitted)
    status = run(warm)
    if status:
        return status

    config = load(RECIPE, [*fitted, *overrides])
    print(f"\n3/3  reinforcement learning: DAPO with a sampler in format {config.quantization.format}")
    status = run(config)
    if status == 0:
        print(_summary(RunDir(Path(config.run.root) / str(config.run.name)), time.monotonic() - begun))
    return status


def fitting(machine: Machine) -> list[str]:
    """What the recipes leave open: on GPUs the engine lives beside the learner's ranks, of which there may be one."""
    if not machine.gpus:
        return []
    return [f"learner.tensor_parallel={min(2, machine.gpus)}", "sampler.vllm.gpu_memory_utilization=0.3"]


def _summary(run: RunDir, seconds: float) -> str:
    lines = read_metrics(run.metrics)
    evals = [(line["progress/step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    steps = [line for line in lines if line["progress/step"] > 0]
    kl = sum(line.get("rollout_corr/k3_kl", 0.0) for line in steps) / max(1, len(steps))
    sync = sum(line.get("time/sync", 0.0) for line in steps) / max(1e-9, sum(line["time/step"] for line in steps))
    wall = f"{seconds / 60:.1f} minutes"
    status = read_status(run.path)["state"]
    accuracy = f"{evals[0][1]:.2f} before, {evals[-1][1]:.2f}" if evals else "not measured,"
    return (
        f"\n{status} in {wall}. Greedy accuracy on held-out problems: {accuracy} after {len(steps)} steps.\n"
        f"Sampler against learner: mean k3 KL {kl:.4f} nats per token. Weight sync: {sync:.1%} of the time.\n"
        f"The report, with curves: {run.report}"
    )
