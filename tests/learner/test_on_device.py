"""The learner on a mocked device: equal numbers, and no mixed CPU and device tensors.

Weights, gradients, optimizer, packs and loss are on the device (mocked_device.py), and syncs and
checkpoints are made from them.
"""

from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest
import torch
from learner_cases import Fields
from safetensors.torch import save_file

pytestmark = pytest.mark.ranks
MADE_THERE = {"use_cpu_initialization": False}  # as on GPUs
WHOLE: Fields = {
    "kind": "whole",
    "precision": "bf16",
    "offload": "optimizer",
    "smoothing": 0.5,
    "kv_cache": "fp8",
}
JOBS = {
    "its own anchor": {"kind": "one_update", "scored": False, "smoothing": 0.5, "kv_cache": "fp8"},
    "kept and entropy": {"steps": 2, "kept": True, "entropy_coef": 0.1},
    "noise": {"kind": "noise", "precision": "bf16"},
    "not a number": {"kind": "nonfinite", "on_nonfinite": "skip_and_dump", "dump": "dumps"},
    "emptiness": {"kind": "emptiness"},
    "flips": {"kind": "flips", "hf": cases.QWEN3_MOE},
    "whole": WHOLE,
    "whole fp32 experts": {**WHOLE, "precision": "fp32", "hf": cases.QWEN3_MOE},
    "gspo": {"steps": 1, "loss": "gspo"},
}
OF_TWO = {
    "tp2_sp": {**WHOLE, "at": "tp2_sp"},
    "pp2": {**WHOLE, "at": "pp2"},
    "ep2": {
        **WHOLE,
        "at": "ep2",
        "hf": cases.QWEN3_MOE,
        "optim": {"overlap_grad_reduce": True},
    },
}


def _run(world: int, wanted: dict[str, Fields], folder: Path) -> Fields:
    mixes = {"name": "mixes", "kind": "mixes", "hf": cases.QWEN3, "on_device": True}
    jobs = [{**mixes, "layout": {"data_parallel": world}}]
    random = torch.Generator().manual_seed(0)
    tokens = int(cases.make_batch().lengths_B.sum())
    chosen_PLK = torch.randint(4, (tokens, 4, 2), generator=random).short()
    save_file({"chosen": chosen_PLK}, folder / "chosen.safetensors")
    for name, job in wanted.items():
        layout = cases.PACKS | cases.ALL_LAYOUTS.get(job.get("at", ""), {})
        layout["megatron"] = MADE_THERE | layout.get("megatron", {})
        for at in ("host", "device"):
            root = folder / f"{name} {at}"
            paths = {"root": str(root), "chosen": str(folder / "chosen.safetensors")}
            paths |= {"dump": str(root / job["dump"])} if "dump" in job else {}
            about = {"name": root.name, "layout": layout, "on_device": at == "device"}
            jobs.append({"hf": cases.QWEN3, **job, **about, **paths})
    return cases.run_ranks(world, jobs, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    one = _run(1, JOBS, tmp_path_factory.mktemp("one"))
    return one | _run(2, OF_TWO, tmp_path_factory.mktemp("two"))


def test_a_device_refuses_the_cpu_s_values(found: Fields) -> None:
    assert found["mixes"] == []


@pytest.mark.parametrize("name", [*JOBS, *OF_TWO])
def test_a_device_gives_the_numbers_of_the_cpu(name: str, found: Fields) -> None:
    _same(found[f"{name} device"], found[f"{name} host"])


@pytest.mark.parametrize("name", ["whole", "whole fp32 experts"])
def test_a_save_on_a_device_resumes(name: str, found: Fields) -> None:
    case = found[f"{name} device"]
    _, second, again = case["steps"]
    after, loaded, trained, _ = case["logprobs"]
    _same(again, second)
    _same(loaded, after)
    assert trained != after


def _same(here: Any, there: Any) -> None:
    if isinstance(there, dict):
        assert here.keys() == there.keys()
        for key in there.keys() - {"expected"}:
            _same(here[key], there[key])
    elif isinstance(there, list):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            _same(one, other)
    else:
        assert here == (
            pytest.approx(there, rel=1e-4, abs=1e-5, nan_ok=True)
            if isinstance(there, float)
            else there
        )
