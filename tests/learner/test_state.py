"""A learner that reads another's state continues exactly like it, on any pair of layouts."""

from pathlib import Path

import learner_cases as cases
import pytest
from learner_cases import Fields

pytestmark = pytest.mark.ranks
LAYOUTS = {"dense": ("one", "tp2", "pp2", "dp2"), "experts": ("one", "ep2", "cp2")}
PRECISIONS = ("fp32", "bf16")


def _read(model: str, precision: str, writer: str, reader: str) -> bool:
    """FP32 states of one rank are read by all layouts; others by their own and the next."""
    layouts = LAYOUTS[model]
    following = layouts[(layouts.index(writer) + 1) % len(layouts)]
    return reader == writer or (precision == "fp32" and (writer == "one" or reader == following))


def _job(folder: Path, model: str, precision: str, writer: str, reader: str = "") -> Fields:
    return {
        "name": f"{model} {precision} {writer} {reader}".strip(),
        "kind": "checkpoint",
        "hf": cases.MODELS[model],
        "precision": precision,
        "layout": cases.ALL_LAYOUTS.get(reader or writer, {}),
        "reads": bool(reader),
        "checkpoint": str(folder / f"{model}_{precision}_{writer}"),
        "wrote": 1 if writer == "one" else 2,
        "poisoned": True,
    }


WRITERS = [
    (model, precision, at) for model in LAYOUTS for precision in PRECISIONS for at in LAYOUTS[model]
]
CASES = [(*writer, at) for writer in WRITERS for at in LAYOUTS[writer[0]] if _read(*writer, at)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    folder = tmp_path_factory.mktemp("state")
    found = {}
    for jobs in (WRITERS, CASES):
        one = [_job(folder, *job) for job in jobs if job[-1] == "one"]
        found |= cases.run(
            tmp_path_factory, one, [_job(folder, *job) for job in jobs if job[-1] != "one"]
        )
    return found


@pytest.mark.parametrize(("model", "precision", "writer", "reader"), CASES)
def test_it_goes_on(results: Fields, model: str, precision: str, writer: str, reader: str) -> None:
    wrote = results[f"{model} {precision} {writer}"]
    read = results[f"{model} {precision} {writer} {reader}"]
    if writer == reader:
        assert read == wrote  # to the last bit
        return
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    cases.same_steps(read, wrote, rtol=tolerance, atol=tolerance)
    if precision == "fp32":
        cases.close(read, wrote, 3e-4, "after")
