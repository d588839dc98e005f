"""A learner that reads what another one wrote goes on as that one would have, whatever their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest

pytestmark = pytest.mark.ranks
MODELS = {"dense": cases.QWEN3, "experts": cases.QWEN3_MOE}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "one": {},
        "tp2": {"tensor_parallel": 2},
        "pp2": {"pipeline_parallel": 2},
        "dp2": {"data_parallel": 2},
    },
    "experts": {"one": {}, "ep2": {"data_parallel": 2, "expert_parallel": 2}},
}
PRECISIONS = ("fp32", "bf16")


def _world(layout: str) -> int:
    return 1 if layout == "one" else 2


def _read(precision: str, writer: str, reader: str) -> bool:
    """Of every pair of layouts in FP32; in BF16, what is written by one rank is read by all."""
    return precision == "fp32" or writer in ("one", reader)


def _jobs(folder: Path, world: int, reads: bool) -> list[dict[str, Any]]:
    jobs = []
    for model, hf in MODELS.items():
        for precision in PRECISIONS:
            for name, layout in LAYOUTS[model].items():
                if _world(name) != world:
                    continue
                for writer in (
                    [writer for writer in LAYOUTS[model] if _read(precision, writer, name)] if reads else [name]
                ):
                    jobs.append(
                        {
                            "name": f"{model} {precision} {writer} {name}" if reads else f"{model} {precision} {name}",
                            "kind": "checkpoint",
                            "hf": hf,
                            "precision": precision,
                            "layout": layout,
                            "checkpoint": str(folder / f"{model}_{precision}_{writer}"),
                            "reads": reads,
                            "wrote": _world(writer),
                            "poisoned": True,
                        }
                    )
    return jobs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("state")
    found: dict[str, Any] = {}
    for reads in (False, True):
        for world in (1, 2):
            place = tmp_path_factory.mktemp(f"ranks_{world}_{reads}")
            found |= cases.run_ranks(world, _jobs(folder, world, reads), place)
    return found


CASES = [
    (model, precision, writer, reader)
    for model in MODELS
    for precision in PRECISIONS
    for writer in LAYOUTS[model]
    for reader in LAYOUTS[model]
    if _read(precision, writer, reader)
]


@pytest.mark.parametrize(("model", "precision", "writer", "reader"), CASES)
def test_it_goes_on(results: dict[str, Any], model: str, precision: str, writer: str, reader: str) -> None:
    wrote, read = results[f"{model} {precision} {writer}"], results[f"{model} {precision} {writer} {reader}"]
    if writer == reader:
        assert read == wrote  # to the last bit
        return
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    for before, after in zip(wrote["steps"], read["steps"], strict=True):
        for name in ("loss/total", "optim/grad_norm", "optim/lr"):
            assert after[name] == pytest.approx(before[name], rel=tolerance, abs=tolerance), name
