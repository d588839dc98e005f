"""`model.head_precision=fp32`: logits that nothing rounds, on every layout, and gradients of the
plain output layer.
"""

from typing import Any

import learner_cases as cases
import pytest
from learner_cases import Fields

pytestmark = pytest.mark.ranks
MODELS = {"tied": cases.QWEN3, "own": cases.QWEN2}
LAYOUTS = ("tp2", "tp2_sp", "pp2")


def _job(name: str, hf: Fields, head: str = "fp32", **more: Any) -> Fields:
    job = {
        "kind": "wide",
        "name": name,
        "hf": hf,
        "head": head,
        "precision": "bf16",
        "steps": 2,
    }
    return {**job, "forward": "bf16", **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    one = [
        _job(f"{name} {head}", hf, head) for name, hf in MODELS.items() for head in ("bf16", "fp32")
    ]
    one += [
        _job(f"whole {head}", MODELS["tied"], head, precision="fp32") for head in ("bf16", "fp32")
    ]
    two = [
        _job(f"{name} {at}", hf, layout=cases.LAYOUTS[at])
        for name, hf in MODELS.items()
        for at in LAYOUTS
    ]
    return cases.run(tmp_path_factory, one, two)


def norm(case: Fields) -> float:
    """Gradient norm of the first update; later ones include their own BF16 roundings."""
    return case["steps"][0]["optim/grad_norm"]


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_products_of_what_goes_in(model: str, found: Fields) -> None:
    assert found[f"{model} bf16"]["exact"] == [False]
    assert found[f"{model} fp32"]["exact"] == [True]
    for at in LAYOUTS:
        assert found[f"{model} {at}"]["exact"] == [True, True]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("at", LAYOUTS)
def test_every_layout_computes_and_learns_the_same(model: str, at: str, found: Fields) -> None:
    here = found[f"{model} {at}"]
    there = found[f"{model} fp32"]
    # of BF16 layers, whose halves are rounded
    assert (cases.tensor(here) - cases.tensor(there)).abs().mean() < 0.07
    assert norm(here) == pytest.approx(norm(there), rel=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_plain_layer(model: str, found: Fields) -> None:
    wide = found[f"{model} fp32"]
    plain = found[f"{model} bf16"]
    assert 3.5e-4 < (cases.tensor(wide) - cases.tensor(plain)).abs().mean() < 0.07
    assert norm(wide) == pytest.approx(norm(plain), rel=0.01)


def test_a_learner_in_fp32_has_such_logits_already(found: Fields) -> None:
    assert found["whole fp32"]["logprobs"] == found["whole bf16"]["logprobs"]
