"""What the learner does on a device: the same numbers, and no value of one side is read into a tensor of the other."""

from __future__ import annotations

from typing import Any

import learner_cases as cases
import pytest

pytestmark = pytest.mark.ranks
PACKS: dict[str, Any] = {"tokens_per_microbatch": 80}
JOBS: dict[str, dict[str, Any]] = {
    "anchored": {"kind": "one_update", "scored": True, "smoothing": 0.5, "kv_cache": "fp8"},
    "its own anchor": {"kind": "one_update", "scored": False, "smoothing": 0.5, "kv_cache": "fp8"},
    "bf16": {"kind": "one_update", "scored": False, "precision": "bf16"},
    "kept and entropy": {"steps": 2, "kept": True, "entropy_coef": 0.1},
    "reference": {"kind": "activations", "smoothing": 0.5, "kv_cache": "fp8"},
    "rejected": {"kind": "rejected", "kl_coef": 0.1, "kl_on": "counted"},
    "noise": {"kind": "noise", "precision": "bf16"},
    "not a number": {"kind": "nonfinite", "on_nonfinite": "skip"},
    "emptiness": {"kind": "emptiness"},
    "whole": {"kind": "whole", "precision": "bf16", "offload": "optimizer", "smoothing": 0.5, "kv_cache": "fp8"},
    **{loss: {"steps": 1, "loss": loss} for loss in ("gspo", "cross_entropy", "cispo", "sapo")},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    jobs = [
        {"hf": cases.QWEN3, "layout": PACKS, **job, "name": f"{name} {at}", "on_device": at == "device"}
        for name, job in JOBS.items()
        for at in ("host", "device")
    ]
    for job in jobs:
        job["root"] = str(folder / job["name"])
    return cases.run_ranks(1, jobs, folder)


@pytest.mark.parametrize("name", JOBS)
def test_a_device_gives_the_numbers_of_the_host(name: str, found: dict[str, Any]) -> None:
    _same(found[f"{name} device"], found[f"{name} host"])


def _same(here: Any, there: Any) -> None:
    if isinstance(there, dict):
        assert here.keys() == there.keys()
        for key in there.keys() - {"seconds"}:
            _same(here[key], there[key])
    elif isinstance(there, list):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            _same(one, other)
    else:
        assert here == (pytest.approx(there, rel=1e-4, abs=1e-5, nan_ok=True) if isinstance(there, float) else there)
