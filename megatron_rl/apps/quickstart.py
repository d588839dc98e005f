"""`megatron-rl quickstart`: makes one of five tasks, runs a supervised warm start, then RL with a
quantized sampler.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.apps.toy_tools import write_tools
from megatron_rl.commands import recipe_file
from megatron_rl.config import load
from megatron_rl.config.schema import Config
from megatron_rl.data.toy import write_counting, write_reasoning, write_toy
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine, detect
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import read_status


def write_experts(folder: Path) -> dict[str, int]:
    """The counting task, and a model of a mixture's family."""
    return write_counting(folder, read_card("Qwen3-30B-A3B"))


@dataclass(frozen=True)
class Task:
    name: str
    about: str
    write: Callable[[Path], dict[str, int]]
    after: str = ""  # the recipe that follows the warm start, if it is not of the task's name

    @property
    def data(self) -> Path:
        return Path("data") / self.name

    @property
    def warm_start(self) -> Path:
        return Path(f"recipes/{self.name}_sft.yaml")

    @property
    def recipe(self) -> Path:
        return Path(f"recipes/{self.after or self.name}.yaml")


TASKS = {
    task.name: task
    for task in (
        Task(
            "toy",
            "the toy: sums such as 590+1=, a character tokenizer, a Qwen3 of under a million parameters",
            write_toy,
            "quickstart",
        ),
        Task(
            "counting",
            "counting on in steps, 32 tokens a response: all eight sums have to be right",
            write_counting,
        ),
        Task(
            "experts",
            "the counting task, for a Qwen3 of four experts in each layer, of which a token goes to two",
            write_experts,
        ),
        Task(
            "reasoning",
            "chain sums of reasoning-gym, a BPE tokenizer with a chat template, a Qwen3 of 2.4 million parameters",
            write_reasoning,
        ),
        Task(
            "tools",
            "products of numbers of three digits, a calculator to call, a Qwen3 of under a million parameters",
            write_tools,
        ),
    )
}
# overrides that say where things run: the warm start runs there too
OF_THE_MACHINE = (
    "run.device=",
    "sampler.",
    "learner.tensor_parallel=",
    "learner.pipeline_parallel=",
    "learner.data_parallel=",
    "learner.tokens_per_microbatch=",
)


def quickstart(
    overrides: Sequence[str],
    run: Callable[[Config], int],
    check: Callable[[Config], None] | None = None,
    task: Task = TASKS["toy"],
) -> int:
    """`run` ends a configuration's run with its exit status; `check` raises what `run` would, and
    starts nothing.
    """
    begun = time.monotonic()
    fitted = ["run.if_exists=archive", *fitting(detect(), overrides)]
    here = [override for override in overrides if override.startswith(OF_THE_MACHINE)]
    warm = load(recipe_file(task.warm_start), [*fitted, *here])
    config = load(recipe_file(task.recipe), [*fitted, *overrides])
    print(f"1/3  {task.about}")
    counts = task.write(task.data)
    print(f"     {task.data}: {counts['train']} problems to train on, {counts['test']} held out\n")
    # with the model that the warm start begins with, as its own is still to come
    if check is not None:
        check(
            load(
                task.recipe,
                [
                    *fitted,
                    f"model.path={warm.model.path}",
                    f"model.init={warm.model.init}",
                    *overrides,
                ],
            )
        )

    print("2/3  a supervised warm start: the same learner and loop, cross-entropy on the responses")
    status = run(warm)
    # it was asked to
    if status or read_status(warm.run.folder).get("state") == "stopped":
        return status

    print(
        "\n3/3  reinforcement learning: DAPO's sampling and clipping, "
        f"{config.advantage.estimator} advantages, sampler format {config.quantization.format}"
    )
    status = run(config)
    if status == 0:
        print(_summary(RunDir(config.run.folder), time.monotonic() - begun))
    return status


def fitting(machine: Machine, overrides: Sequence[str] = ()) -> list[str]:
    """Return overrides that fit the recipes to a machine: tensor parallelism and memory share of
    a colocated engine on GPUs, the fastest supported kernels on CPUs. A requested sampler is kept.
    """
    if not machine.gpus:
        own = any(override.startswith("sampler") for override in overrides)
        return [
            f"{key}={value}"
            for key, value in machine.fastest
            if not (own and key.startswith("sampler."))
        ]
    return [
        f"learner.tensor_parallel={min(2, machine.gpus)}",
        "sampler.vllm.gpu_memory_utilization=0.3",
    ]


def _summary(run: RunDir, seconds: float) -> str:
    lines = read_metrics(run.metrics)
    evals = [
        (line["progress/step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line
    ]
    steps = [line for line in lines if line["progress/step"] > 0]
    kl = sum(line.get("rollout_corr/k3_kl", 0.0) for line in steps) / max(1, len(steps))
    sync = sum(line.get("time/sync", 0.0) for line in steps) / max(
        1e-9, sum(line["time/step"] for line in steps)
    )
    wall = f"{seconds / 60:.1f} minutes"
    status = read_status(run.path)["state"]
    if evals:
        accuracy = f"{evals[0][1]:.2f} before, {evals[-1][1]:.2f}"
    else:
        accuracy = "not measured,"
    return (
        f"\n{status} in {wall}. Accuracy on held-out problems: {accuracy} after {len(steps)} "
        f"steps.\nSampler against learner: mean k3 KL {kl:.4f} nats per token. Weight sync: "
        f"{sync:.1%} of the time.\nThe report, with curves: "
        f"{run.report if run.report.exists() else 'not written; see above'}"
    )
