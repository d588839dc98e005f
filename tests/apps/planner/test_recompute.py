"""`learner.recompute: auto`: the least that fits the GPU by the plan; keys set by hand win."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.phases import TIGHT, UNEVEN, _with, for_machine, planned
from megatron_rl.config import cluster, load
from megatron_rl.config.plain_yaml import CONF
from megatron_rl.config.schema import Config, Recompute
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine, named

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if cluster(path)[1])
ONE_GPU = ROOT / "recipes" / "grpo-qwen3_0.6b-1n1g-int8.yaml"
# of the recipes for one node, those that recompute; the others said that they do not
RECOMPUTED = (
    "dapo-llama3.1_8b-1n8g-fp8-64k",
    "dapo-qwen3_32b-1n8g-int8",
    "gspo-qwen3_30b_a3b-1n8g-int8",
)
H100 = named("1x8xH100-80")


def decided(config: Config, machine: Machine) -> tuple[Config, str]:
    return for_machine(config, read_card(config.model.folder), machine)


def update(config: Config, machine: Machine, card: dict[str, Any]) -> float:
    """The share of its memory that the fullest GPU of the learner needs in an update."""
    shares = []
    for one in planned(Case(config, card, machine)):
        if "learner" in one.kind and one.limit:
            needed = sum(one.phases["update"].values())
            shares.append(needed / one.limit)
    return max(shares)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_recomputes_no_more_than_before(recipe: Path) -> None:
    config = load(recipe)
    machine = named(str(cluster(recipe)[1]))
    found, _ = decided(config, machine)
    assert update(found, machine, read_card(config.model.folder)) <= 1 - TIGHT
    if "-1n" in recipe.stem and recipe.stem not in RECOMPUTED:
        assert found.learner == replace(config.learner, recompute=Recompute.none)


@settings(max_examples=60)
@given(
    model=some.sampled_from(("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B")),
    gib=some.integers(16, 192),
    tokens=some.integers(1024, 65536),
    tp=some.sampled_from((1, 4)),
    stages=some.sampled_from(((1, None), (2, None), (2, 2))),
)
def test_nothing_is_chosen_that_does_not_fit_and_nothing_needless(
    model: str, gib: int, tokens: int, tp: int, stages: tuple[int, int | None]
) -> None:
    base = load(ROOT / "recipes" / "dapo-qwen3_8b-1n8g-int8.yaml")
    card = json.loads((CONF / "model" / f"{model}.json").read_text())
    machine = replace(H100, gib=gib)
    learner = replace(
        base.learner,
        tensor_parallel=tp,
        pipeline_parallel=stages[0],
        tokens_per_microbatch=tokens,
        megatron={"virtual_pipeline_model_parallel_size": stages[1]},
    )
    rollout = replace(base.rollout, max_response_tokens=min(tokens, 8192))
    found, _ = for_machine(replace(base, learner=learner, rollout=rollout), card, machine)
    assert for_machine(found, card, machine) == (found, "")
    most = 1 - TIGHT - UNEVEN * ("A3B" in model)
    layers = found.learner.megatron.get("recompute_num_layers")
    if layers is None and found.learner.recompute is Recompute.full:
        return  # there is no more to recompute
    assert update(found, machine, card) <= most
    if layers is not None:
        case = Case(found, card, machine)
        assert update(_with(case, layers - 1).config, machine, card) > most


FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["recompute=full", "megatron.recompute_num_layers=2"], FULL),
        (["megatron.recompute_granularity=selective"], {"recompute_granularity": "selective"}),
    ],
)
def test_what_is_set_by_hand_comes_first(words: list[str], fields: dict[str, Any]) -> None:
    config = load(ONE_GPU, [f"learner.{word}" for word in words])
    assert decided(config, named("1x1xL4-8")) == (config, "")
    assert config.learner.transformer == fields
