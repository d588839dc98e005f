"""The plan says where more, smaller engines on the same GPUs would sample faster, and does not
where they would not.
"""

from __future__ import annotations

import re
from pathlib import Path

from helpers import APART

from megatron_rl.config import load
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named
from megatron_rl.workshop.planner.plan import Plan, plan

RECIPES = Path(__file__).parents[3] / "recipes"
SHORT = ["rollout.max_response_tokens=1024", "reward.overlong_buffer=0"]
SAID = re.compile(
    r"(\d+) engines of (\d+) on the same GPUs would take (\S+) for a rollout, not (\S+) .*"
)


def planned(recipe: str, *overrides: str) -> Plan:
    config = load(RECIPES / f"{recipe}.yaml", list(overrides))
    return plan(config, read_card(config.model.path), named("1x8xH100-80"))


def said(made: Plan) -> list[tuple[str, ...]]:
    return [found.groups() for note in made.notes if (found := SAID.fullmatch(note))]


def test_what_is_said_is_what_the_plan_has_for_a_fleet_of_them() -> None:
    apart = [*APART, "sampler.engines=1", "learner.tensor_parallel=4", "learner.data_parallel=1"]
    one = planned("dr_grpo-qwen2.5_7b-1n8g-int8", *apart)
    ((count, gpus, seconds, instead),) = said(one)
    assert (count, gpus) == ("2", "2")
    fleet = [
        "sampler.engines=2",
        "sampler.tensor_parallel=2",
        "sampler.devices='4,5,6,7'",
    ]
    two = planned("dr_grpo-qwen2.5_7b-1n8g-int8", *apart, *fleet)
    assert one.time is not None
    assert two.time is not None
    assert (seconds, instead) == (f"{two.time.rollout:.0f}s", f"{one.time.rollout:.0f}s")
    assert said(two) == []


def test_nothing_is_said_of_what_is_no_faster_or_does_not_fit() -> None:
    # each would have room for a quarter of the long answers
    assert said(planned("dapo_int8", *APART)) == []
    assert said(planned("dapo-qwen3_8b-1n8g-int8-fleet")) == []  # of one GPU already
    large = ["model.path=models/Llama-3.1-70B", "quantization=none", "sampler.tensor_parallel=4"]
    assert said(planned("dapo_int8", *APART, *large, *SHORT)) == []


def test_engines_that_sleep_cannot_be_many() -> None:
    (note,) = [
        note for note in planned("dapo-qwen3_8b-1n8g-int8", *SHORT).notes if SAID.fullmatch(note)
    ]
    assert note.endswith("(sampler.engines); --suggest has such")
