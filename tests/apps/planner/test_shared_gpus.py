"""Memory of GPUs that learner and engine share, by moment, and the largest share that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import APART

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.memory.engine import GIB
from megatron_rl.apps.planner.phases import CACHE, MOMENTS, TIGHT, Memory, largest_share
from megatron_rl.apps.planner.plan import Plan, plan, share_problems
from megatron_rl.config import cluster, load
from megatron_rl.config.layers import merged, of_recipe
from megatron_rl.config.schema import Config, Offload, Recompute, Sleep
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if cluster(path)[0])
COLOCATED = [
    path for path in RECIPES if merged(of_recipe(path))["sampler"].get("sleep", "none") != "none"
]
MACHINES = {
    8: ("1x8xH100-80", "1x8xH200", "1x8xB200"),
    1: ("1x1xH100-80", "1x1xA100-40", "1x1xL40S"),
}


def planned(config: Config, machine: str, **vllm: float | None) -> Plan:
    config = replace(config, sampler=replace(config.sampler, vllm={**config.sampler.vllm, **vllm}))
    return plan(Case(config, read_card(config.model.path), named(machine)))


def shared(made: Plan) -> Memory:
    (memory,) = [one for one in made.memory if one.kind == "learner and engine"]
    return memory


def parts(memory: Memory, moment: str) -> set[str]:
    return {part for part in memory.phases[moment] if not part.startswith("engine: ")}


@pytest.mark.parametrize("recipe", COLOCATED, ids=lambda path: path.stem)
def test_each_moment_has_its_own_memory(recipe: Path) -> None:
    config = load(recipe)
    machine = str(cluster(recipe)[1])
    memory = shared(planned(config, machine))
    assert tuple(memory.phases) == MOMENTS
    assert parts(memory, "start") == set()  # nothing else is there
    stays = {"weights"}
    if config.learner.offload is Offload.none:
        stays |= {"gradients", "masters, moments"}
    assert stays <= parts(memory, "rollout") < parts(memory, "probe")
    assert {"weights", "gradients", "masters, moments"} <= parts(memory, "update")
    assert ("masters, moments" in parts(memory, "rollout")) == ("masters, moments" in stays)
    awake = {moment for moment in MOMENTS if CACHE in memory.phases[moment]}
    assert awake == {"start", "rollout", "probe", "save"}
    for moment in ("prox", "update"):
        everything = memory.phases[moment].keys()
        of_engine = everything - parts(memory, moment)
        assert of_engine == {"engine: asleep"}
    assert {"sync", "engine: weights", "engine: runtime"} <= memory.phases["sync"].keys()
    sampler = replace(config.sampler, sleep=Sleep.none)
    awake_always = replace(config, sampler=sampler)
    beside = shared(planned(awake_always, machine))
    assert "masters, moments" in parts(beside, "start")
    assert all(CACHE in moment for moment in beside.phases.values())


@pytest.mark.parametrize("recipe", COLOCATED, ids=lambda path: path.stem)
def test_the_largest_share_fits_and_the_next_does_not(recipe: Path) -> None:
    config = load(recipe)
    seen = set()
    for machine in MACHINES[named(str(cluster(recipe)[1])).gpus]:
        largest = largest_share(shared(planned(config, machine)))
        assert largest is not None
        seen.add(largest)
        assert planned(config, machine, gpu_memory_utilization=largest).problems == ()
        above = round(largest + 0.01, 2)
        (problem,) = planned(config, machine, gpu_memory_utilization=above).problems
        assert problem.startswith(f"sampler.vllm.gpu_memory_utilization: {above}, ")
        assert problem.endswith(f" {largest:.2f}")
    assert len(seen) == 3  # of larger GPUs the learner leaves a larger share


@pytest.mark.parametrize("recipe", COLOCATED, ids=lambda path: path.stem)
def test_a_recipe_that_colocates_has_the_largest_share_with_room_to_spare(recipe: Path) -> None:
    config = load(recipe)
    machine = str(cluster(recipe)[1])
    memory = shared(planned(config, machine))
    share = config.sampler.vllm["gpu_memory_utilization"]
    assert share == largest_share(memory, TIGHT)


def test_the_share_has_to_be_free_where_the_cache_is_given() -> None:
    """vLLM looks at it before it looks at kv_cache_memory_bytes."""
    config = load(ROOT / "recipes" / "dapo-qwen3_8b-1n8g-int8.yaml")
    memory = shared(planned(config, "1x8xH100-80", kv_cache_memory_bytes=8 * GIB))
    asked = sum(memory.phases["start"].values())
    awake = sum(memory.phases["rollout"].values())
    share = config.sampler.vllm["gpu_memory_utilization"]
    assert memory.limit is not None
    assert asked == pytest.approx(
        share * memory.limit + memory.phases["start"]["engine: CUDA, NCCL"]
    )
    assert "engine: unused" not in memory.phases["rollout"]
    assert awake < shared(planned(config, "1x8xH100-80")).peak


def test_only_what_another_share_would_mend_is_said_of_it() -> None:
    config = load(ROOT / "recipes" / "dapo-qwen3_8b-1n8g-int8.yaml")
    card = read_card(config.model.path)
    assert share_problems(config, card, named("1x8xH100-80")) == []
    # its memory is not known
    assert share_problems(config, card, replace(named("1x8xH100-80"), gib=0.0)) == []
    kept = replace(config, learner=replace(config.learner, recompute=Recompute.none))
    small = planned(kept, "1x8xL4")  # the update alone is too much
    assert small.problems[0].startswith("memory: ")
    apart = load(ROOT / "recipes" / "dapo_int8.yaml", APART)
    assert share_problems(apart, read_card(apart.model.path), named("1x8xL4")) == []
