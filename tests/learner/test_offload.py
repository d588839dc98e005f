"""An optimizer that makes room for an engine: the same bytes to the last bit, on every layout, also in a checkpoint."""

from __future__ import annotations

from typing import Any

import learner_cases as cases
import pytest

pytestmark = pytest.mark.ranks
PLACES = [
    *((at, "dense", "bf16") for at in ("one", "tp2", "pp2", "vp2", "dp2")),
    *(("one", "dense", "fp32"), ("dp2", "dense", "fp32"), ("ep2", "experts", "bf16"), ("tp2_ep2", "experts", "bf16")),
]


def _job(at: str, model: str, precision: str, offload: str) -> dict[str, Any]:
    job = {"name": f"{at} {model} {precision} {offload}", "kind": "aside", "hf": cases.MODELS[model]}
    return {**job, "layout": cases.ALL_LAYOUTS.get(at, {}), "precision": precision, "offload": offload}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [_job(*place, offload) for place in PLACES for offload in ("none", "optimizer")]
    one = [job for job in jobs if job["name"].startswith("one")]
    return cases.run(tmp_path_factory, one, [job for job in jobs if job not in one])


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_updates_and_checkpoints_are_what_they_are_without(place: tuple[str, str, str], found: dict[str, Any]) -> None:
    name = " ".join(place)
    plain, offloaded = found[f"{name} none"], found[f"{name} optimizer"]
    assert len(plain["steps"]) == 3 and plain["steps"][0]["optim/grad_norm"] > 0
    assert offloaded == plain
