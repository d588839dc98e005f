"""Rollouts ahead of the learner against rollouts in turn, and refills begun early against whole rounds.

    python tools/bench/ahead.py steps [--recipe recipes/quickstart.yaml] [--steps 60] [--seeds 1 2 3] [KEY=VALUE ...]
    python tools/bench/ahead.py rollout [--repeats 7]

`steps` runs a recipe to its end with rollout.ahead=0 and 1 in turn, seed by seed, and prints the median time of a step
and the last held-out accuracy of each. `rollout` collects batches of a small random model, whose answers are of
very unequal length, twice with one engine: with groups as they finish, and with rounds that wait for their last
answer. About half of the groups have no spread and are replaced. The prompts, seeds and groups are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

FIRST = 3  # steps that are left out: engines and caches are still cold


def bench_steps(recipe: Path, steps: int, seeds: Sequence[int], overrides: Sequence[str]) -> None:
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as root:
        for seed in seeds:
            for ahead in found:
                name = f"ahead_{ahead}_{seed}"
                settings = [f"rollout.ahead={ahead}", f"run.seed={seed}", f"run.steps={steps}", f"run.name={name}"]
                command = [sys.executable, "-m", "megatron_rl.cli", "train", str(recipe), *settings, f"run.root={root}"]
                subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
                lines = [json.loads(line) for line in (Path(root) / name / "metrics.jsonl").read_text().splitlines()]
                seconds = median(line["time/step"] - line.get("time/eval", 0.0) for line in lines[FIRST:])
                accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line][-1]
                found[ahead].append((seconds, accuracy))
                age = fmean(line["rollout/staleness_mean"] for line in lines[FIRST:])
                print(f"seed {seed}  ahead {ahead}  {seconds:.3f} s a step  accuracy {accuracy:.3f}  age {age:.2f}")
    for ahead, results in found.items():
        print(f"ahead {ahead}: accuracy {fmean(accuracy for _, accuracy in results):.3f}")
    ratios = [turn[0] / ahead[0] for turn, ahead in zip(found[0], found[1], strict=True)]
    print(f"steps per hour, ahead / in turn: {median(ratios):.3f} ({', '.join(f'{one:.3f}' for one in ratios)})")


class OddLengths:
    """A reward that takes no time: half of the groups of four have no spread in it."""

    def score(self, tasks: Sequence[Any]) -> list[Any]:
        from megatron_rl.rewards.pool import Score
        from megatron_rl.types import Verdict

        return [Score(float(len(task.response) % 6 == 0), Verdict.right) for task in tasks]


def with_long_answers(model: Path, folder: Path) -> Path:
    """The same shape with random weights: at each token an answer ends with about the same small probability."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(folder, max_position_embeddings=1024)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


class WholeRounds:
    """A sampler that is waited for until a whole round is answered."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def answering(self, params: Any, *, seed: int, step: int) -> Any:
        from megatron_rl.rollout.collect import AtOnce

        generate = self._sampler.generate
        return AtOnce(lambda prompts, first: generate(prompts, params, seed=seed, first_group=first, step=step))


def bench_rollout(repeats: int) -> None:
    from loop import give_weights

    from megatron_rl.config.schema import Config, DataSection, RolloutSection, SamplerSection
    from megatron_rl.data.prompts import FolderTokenizer, PromptOrder, load_dataset
    from megatron_rl.rollout.collect import Collector, Scorer
    from megatron_rl.sampler.engine_settings import EngineSettings
    from megatron_rl.sampler.sampler import Sampler

    rollout = RolloutSection(prompts_per_step=64, samples_per_prompt=4, max_prompt_tokens=12, max_response_tokens=500)
    sampler_section = SamplerSection(vllm={"max_num_seqs": 128})
    config = Config(data=DataSection(train="data/toy/train.jsonl"), rollout=rollout, sampler=sampler_section)
    seconds: dict[str, list[float]] = {"as they finish": [], "whole rounds": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = with_long_answers(Path("runs/toy_sft/model"), folder / "model")
        tokenizer = FolderTokenizer(model)
        dataset = load_dataset("train", config.data, tokenizer, rollout.max_prompt_tokens)
        sampler = stack.enter_context(Sampler(EngineSettings.from_config(config), model, folder))
        give_weights(sampler, model, folder)
        scorer = Scorer(config.reward, OddLengths(), tokenizer)  # type: ignore[arg-type]
        for repeat in range(repeats + 1):
            drawn = []
            for how, answers in (("as they finish", sampler), ("whole rounds", WholeRounds(sampler))):
                order = PromptOrder(dataset, config.run.seed, shuffle=True, position=repeat * 4096)
                collector = Collector(rollout, order, answers, scorer, rebaseline=True, seed=1)  # type: ignore[arg-type]
                begun = time.perf_counter()
                collected = collector.collect(repeat)
                if repeat:
                    seconds[how].append(time.perf_counter() - begun)
                drawn.append(collected.ordinals)
            metrics = collected.metrics
            print(
                f"{metrics['rollout/gen_batches']} rounds, {metrics['rollout/groups']} groups of "
                f"{metrics['rollout/response_tokens_mean']:.0f} tokens, at most "
                f"{metrics['rollout/response_tokens_max']}; drawn {drawn}"
            )
    for how, each in seconds.items():
        print(f"{how}: {median(each):.3f} s")
    ratios = [slow / fast for fast, slow in zip(*seconds.values(), strict=True)]
    print(f"whole rounds / as they finish: {median(ratios):.3f}")


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True)
    steps = what.add_parser("steps")
    steps.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    steps.add_argument("--steps", type=int, default=60)
    steps.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    steps.add_argument("overrides", nargs="*")
    rollout = what.add_parser("rollout")
    rollout.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if options.what == "steps":
        bench_steps(options.recipe, options.steps, options.seeds, options.overrides)
    else:
        bench_rollout(options.repeats)


if __name__ == "__main__":
    main()
