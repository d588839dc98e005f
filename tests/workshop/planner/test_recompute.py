"""`learner.recompute: auto`: the least that fits the GPU, by the plan; what is set by hand, or not known, comes first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from megatron_rl import cli
from megatron_rl.config import cluster, load
from megatron_rl.config.load import CONF
from megatron_rl.config.schema import Config, Device, Recompute
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine, named
from megatron_rl.workshop.planner.case import Assumptions, Case
from megatron_rl.workshop.planner.phases import TIGHT, planned
from megatron_rl.workshop.planner.plan import plan
from megatron_rl.workshop.planner.recompute import for_machine

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if cluster(path)[1])
ONE_GPU = ROOT / "recipes" / "grpo-qwen3_0.6b-1n1g-int8.yaml"
WHOLE = (  # nothing had to be recomputed in these when that was still set by hand
    "dapo-qwen2.5_7b-1n8g-", "dapo-qwen3_8b-1n8g-bf16", "dapo-qwen3_8b-1n8g-fp8", "dapo-qwen3_8b-1n8g-int8",
    "dapo-qwen3_32b-1n8g-int8-lora", "dr_grpo-", "grpo-llama3.1_8b-", "grpo-qwen3_1.7b-", "grpo-qwen3_0.6b-",
)  # fmt: skip
H100 = named("1x8xH100-80")


def decided(config: Config, machine: Machine, card: dict[str, Any] | None = None) -> tuple[Config, str]:
    return for_machine(config, card or read_card(str(config.model.folder)), machine)


def update(config: Config, machine: Machine, card: dict[str, Any]) -> float:
    """The share of its memory that the fullest GPU of the learner needs in an update."""
    kinds = [one for one in planned(Case(config, card, machine, Assumptions())) if "learner" in one.kind]
    return max(sum(one.phases["update"].values()) / one.limit for one in kinds if one.limit)


def layers(config: Config) -> int | None:
    """How many are recomputed; None: all."""
    fields = config.learner.transformer
    return fields["recompute_num_layers"] if fields.get("recompute_method") == "block" else None


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_recomputes_no_more_than_before(recipe: Path) -> None:
    config, machine = load(recipe), named(str(cluster(recipe)[1]))
    assert config.learner.undecided
    found, said = decided(config, machine)
    assert said.startswith("learner.recompute=auto: ")
    assert update(found, machine, read_card(str(config.model.folder))) <= 1 - TIGHT
    if recipe.stem.startswith(WHOLE):
        assert found.learner.recompute is Recompute.none
        assert found.learner.megatron == config.learner.megatron


MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B")


@settings(deadline=None, max_examples=60)
@given(
    model=some.sampled_from(MODELS),
    gib=some.integers(16, 192),
    tokens=some.integers(1024, 65536),
    tp=some.sampled_from((1, 2, 4)),
    pp=some.sampled_from((1, 2)),
    vp=some.sampled_from((None, 2)),
)
def test_nothing_is_chosen_that_does_not_fit_and_nothing_needless(
    model: str, gib: int, tokens: int, tp: int, pp: int, vp: int | None
) -> None:
    assume(vp is None or pp > 1)
    base = load(ROOT / "recipes" / "dapo-qwen3_8b-1n8g-int8.yaml")
    card, machine = json.loads((CONF / "model" / f"{model}.json").read_text()), replace(H100, gib=gib)
    megatron = {"sequence_parallel": tp > 1, "virtual_pipeline_model_parallel_size": vp}
    learner = replace(
        base.learner, tensor_parallel=tp, pipeline_parallel=pp, tokens_per_microbatch=tokens, megatron=megatron
    )
    rollout = replace(base.rollout, max_response_tokens=min(tokens, 8192))
    config = replace(base, learner=learner, rollout=rollout)
    found, _ = decided(config, machine, card)
    every = replace(found, learner=replace(learner, recompute=Recompute.full))
    if found.learner.recompute is Recompute.none or layers(found) is not None:
        assert update(found, machine, card) <= 1 - TIGHT
    assert update(every, machine, card) <= update(found, machine, card) * (1 + 1e-9)
    if (count := layers(found)) is not None and count > 1:
        less = replace(found.learner, megatron={**found.learner.megatron, "recompute_num_layers": count - 1})
        spare = 2 * TIGHT if "A3B" not in model else 0.2  # an even spread over experts is not relied on
        assert update(replace(found, learner=less), machine, card) > 1 - spare
    assert decided(found, machine, card)[0] == found  # a configuration that is decided stays


def test_what_is_set_by_hand_comes_first() -> None:
    for words, fields in (
        (["learner.recompute=none"], {}),
        (["learner.megatron.recompute_granularity=selective"], {"recompute_granularity": "selective"}),
        (["learner.recompute=selective"], {"recompute_granularity": "selective"}),
        (
            ["learner.recompute=full", "learner.megatron.recompute_num_layers=2"],
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        ),
    ):
        config = load(ONE_GPU, words)
        assert decided(config, named("1x1xL4-8")) == (config, "")  # where auto would take full
        assert config.learner.transformer == fields
    unset = load(ONE_GPU, ["learner.megatron.recompute_granularity=null"])
    assert unset.learner.undecided


def test_memory_that_is_not_known_and_cpus() -> None:
    config = load(ONE_GPU)
    found, said = decided(config, replace(H100, gib=0.0))
    assert found.learner.transformer["recompute_method"] == "uniform"
    assert said == "learner.recompute=auto: full, as the GPU's memory is not known"
    found, said = decided(config, Machine(Device.cpu, "x86_64 CPU"))
    assert (found.learner.recompute, said) == (Recompute.none, "")


def test_the_plan_and_a_dry_run_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = "learner.recompute=auto: none, with 37."
    assert cli.main(["plan", str(ONE_GPU), "--on", "1x1xH100-80"]) == 0
    assert f"note      {said}" in capsys.readouterr().out
    assert cli.main(["train", str(ONE_GPU), "--dry-run", "--on", "1x1xH100-80"]) == 0
    assert said in capsys.readouterr().out
    small = plan(load(ONE_GPU), read_card("models/Qwen3-0.6B"), named("1x1xL4"))
    assert 0 < small.recomputed < 1
    assert any(line.startswith("learner.recompute=auto: ") and "of 28 layers" in line for line in small.notes)
