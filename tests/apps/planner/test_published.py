"""The plan against published results: what ran fits, what died does not, slower is slower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from published import DIED, ETP1, FULL, INTERLEAVED, OF_235B, RAN, SP, ranks

from megatron_rl.apps.planner.case import Assumptions, Case
from megatron_rl.apps.planner.memory.engine import GIB
from megatron_rl.apps.planner.plan import plan
from megatron_rl.apps.planner.time import StepTime
from megatron_rl.config import from_mapping
from megatron_rl.config.plain_yaml import CONF
from megatron_rl.preflight.machine import named


@pytest.mark.parametrize("name", RAN)
def test_what_ran_fits(name: str) -> None:
    found = RAN[name].plan
    learning = [one for one in found.memory if one.kind != "engine"]
    assert {one.verdict for one in learning} <= {"fits", "tight"}
    # those learners keep FP32 logits, or gradients and activations in fewer bytes
    if RAN[name].gib is not None:
        assert max(one.peak for one in learning) / GIB == pytest.approx(RAN[name].gib, rel=0.35)


@pytest.mark.parametrize("name", DIED)
def test_what_died_does_not_fit(name: str) -> None:
    assert DIED[name].plan.verdict == "does not fit"


@dataclass(frozen=True)
class Timed:
    model: str
    machine: str
    learner: dict[str, Any]
    sequences: int
    response: int  # tokens, on average
    seconds: float
    part: str = "step"  # of what these are the seconds
    updates: int = 1
    engines: tuple[int, int] = (8, 1)  # how many, of how many GPUs
    limit: int = 8192
    prompt: int = 200
    layers: int | None = None

    @property
    def planned(self) -> float:
        """A step without its sync: their weights do not travel through files."""
        found = self.times
        return found.step - found.sync if self.part == "step" else getattr(found, self.part)

    @property
    def times(self) -> StepTime:
        count, tp = self.engines
        section = {"tokens_per_microbatch": 8192, "n_minibatches": self.updates, **self.learner}
        config = from_mapping(
            {
                "rollout": {
                    "max_prompt_tokens": self.prompt,
                    "max_response_tokens": self.limit,
                    "prompts_per_step": self.sequences // 16,
                    "samples_per_prompt": 16,
                },
                "learner": section,
                "sampler": {
                    "tensor_parallel": tp,
                    "engines": count,
                    "addresses": [f"http://127.0.0.1:{8000 + number}" for number in range(count)],
                },
            }
        )
        hf_config = json.loads((CONF / "model" / f"{self.model}.json").read_text())
        if self.layers is not None:
            hf_config["num_hidden_layers"] = self.layers
        assumed = Assumptions(prompt=1.0, response=self.response / self.limit)
        found = plan(Case(config, hf_config, named(self.machine), assumed)).time
        assert found is not None
        return found


def nemo(
    model: str,
    machine: str,
    learner: dict[str, Any],
    engines: tuple[int, int],
    response: int,
    seconds: float,
) -> Timed:
    """NVIDIA-NeMo/RL, docs/about/performance-summary.md (v0.4)."""
    large = "235B" in model
    return Timed(
        model,
        machine,
        learner,
        512 if large else 2048,
        response,
        seconds,
        updates=1 if large else 4,
        engines=engines,
        limit=8192 if large else 4096,
    )


def verl(machine: str, learner: dict[str, Any], seconds: float, part: str = "step") -> Timed:
    """ISEEKYAN/verl_megatron_practice, dapo7b.csv."""
    section = {**learner, "tokens_per_microbatch": 20480, "megatron": {**SP, **FULL}}
    engines = named(machine).gpus * named(machine).nodes
    return Timed(
        "Qwen2.5-7B",
        machine,
        section,
        8192,
        1500,
        seconds,
        part,
        updates=16,
        engines=(engines, 1),
        prompt=300,
    )


def llama(pp: int, tp: int, dp: int, tflops: float) -> Timed:
    """Seconds of an update from its measured speed, of the runs in published.llama_70b."""
    section = {
        **ranks(tp=tp, pp=pp, dp=dp),
        "tokens_per_microbatch": 4096,
        "megatron": INTERLEAVED,
    }
    seconds = 1e3 / tflops
    return Timed(
        "Llama-3.1-70B-Instruct", "4x8xH100", section, 32, 3896, seconds, "update", limit=3896
    )


def pai(tp: int, dp: int, seconds: float) -> Timed:
    """alibaba/Pai-Megatron-Patch, issue 658: the two ends of its pipeline count as layers."""
    megatron = {**FULL, **ETP1, "virtual_pipeline_model_parallel_size": 3}
    megatron |= SP if tp > 1 else {}
    section = {
        **ranks(tp=tp, pp=32, dp=dp, ep=8),
        "tokens_per_microbatch": 16384,
        "megatron": megatron,
    }
    return Timed(
        "Qwen3-235B-A22B",
        "32x8xH100",
        section,
        4096,
        3896,
        seconds,
        "update",
        limit=3896,
        layers=96,
    )


# each list from fast to slow
ORDERED: dict[str, list[Timed]] = {
    "models": [
        nemo(
            "Llama-3.1-8B-Instruct",
            "2x8xH100",
            {**ranks(pp=2, dp=8), "megatron": FULL},
            (16, 1),
            1060,
            97.7,
        ),
        nemo(
            "Qwen3-30B-A3B",
            "4x8xH100",
            {**ranks(tp=2, dp=16, ep=8), "megatron": {**SP, **ETP1}},
            (8, 4),
            3154,
            225,
        ),
        nemo(
            "Qwen3-32B", "4x8xH100", {**ranks(tp=4, pp=4, dp=2), "megatron": SP}, (8, 4), 3206, 393
        ),
        nemo(
            "Qwen3-235B-A22B",
            "16x8xH100",
            {**ranks(tp=2, pp=8, dp=8, ep=16), "megatron": OF_235B},
            (8, 16),
            5671,
            506,
        ),
    ],
    "GPUs": [
        verl("4x8xH100", ranks(tp=4, dp=8), 175),
        verl("2x8xH100", ranks(tp=4, dp=4), 249),
        verl("1x8xH100", ranks(tp=4, dp=2), 401),
    ],
    "two stages of a pipeline": [
        verl("1x8xH100", ranks(tp=4, dp=2), 167, "update"),
        verl("1x8xH100", ranks(tp=4, pp=2), 185, "update"),
    ],
    "four ranks or eight for each matrix": [llama(4, 4, 2, 704), llama(4, 8, 1, 508.7)],
    "more stages or more ranks for each matrix": [llama(8, 4, 1, 668), llama(4, 8, 1, 508.7)],
    "a pair of ranks for each tensor": [pai(1, 8, 42.5), pai(2, 4, 43.5)],
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_was_slower_is_planned_slower(name: str) -> None:
    assert [one.seconds for one in ORDERED[name]] == sorted(one.seconds for one in ORDERED[name])
    planned = [one.planned for one in ORDERED[name]]
    assert planned == sorted(planned), [round(seconds, 1) for seconds in planned]
