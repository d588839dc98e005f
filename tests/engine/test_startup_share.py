"""vLLM's own look at the memory when an engine starts, against the plan's moment of that name."""

import json
from pathlib import Path

import pytest
from helpers import APART
from preloaded import said

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.phases import SHARE, Memory, largest_share
from megatron_rl.apps.planner.plan import plan
from megatron_rl.config import load
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named

ROOT = Path(__file__).parents[2]
# whether vLLM would start, of each share, free bytes and all bytes of a GPU
ASKED = """
import json, sys
from types import SimpleNamespace
from vllm.config import CacheConfig
from vllm.v1.worker.utils import request_memory

def answer(share, free, total):
    snapshot = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
    try:
        return request_memory(snapshot, CacheConfig(gpu_memory_utilization=share))
    except ValueError as error:
        return str(error)

print(json.dumps([answer(*case) for case in json.loads(sys.argv[1])]))
"""


def engine_alone(recipe: str, overrides: list[str]) -> Memory:
    config = load(ROOT / "recipes" / recipe, overrides)
    made = plan(Case(config, read_card(config.model.path), named("1x8xH100-80")))
    return next(one for one in made.memory if one.kind == "engine")


@pytest.mark.engine
def test_vllm_starts_with_the_largest_share_of_the_plan_and_not_with_the_next() -> None:
    given = ["sampler.vllm.kv_cache_memory_bytes=1000000000"]  # the share is looked at all the same
    share = largest_share(memory := engine_alone("dapo_int8.yaml", [*APART]))
    start = memory.phases["start"]
    assert sum(start.values()) == pytest.approx(
        sum(engine_alone("dapo_int8.yaml", [*APART, *given]).phases["start"].values())
    )
    total = int(memory.limit)
    free = int(memory.limit - sum(n for part, n in start.items() if part not in SHARE))
    cases = [
        [share, free, total],
        [round(share + 0.01, 2), free, total],
        [0.9, free, total],
    ]
    fits, refused, taken = json.loads(
        said("vllm", ["-c", ASKED, json.dumps(cases)]).splitlines()[-1]
    )
    assert fits == pytest.approx(share * total)
    assert "GPU memory utilization" in refused
    assert taken == pytest.approx(sum(n for part, n in start.items() if part in SHARE))
