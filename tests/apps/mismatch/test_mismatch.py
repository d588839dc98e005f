"""Learner and live engines, point by point: those that cannot differ, and faults that are named.

All of it happens in one process (`mismatch_cases.py`), in which the learner may change torch.
"""

from pathlib import Path

import pytest
from preloaded import found_by

pytestmark = pytest.mark.engine

# of which a quantized engine's values are not those of BF16 weights
QUANTIZED = (
    "qkv",
    "o_proj",
    "gate_up",
    "down",
)
# what sums of another order may come to, at one value of many: BF16's last place, below 2
ROUNDINGS = 2**-7


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = Path(__file__).with_name("mismatch_cases.py")
    return found_by("megatron", script, tmp_path_factory.mktemp("mismatch"), timeout=240.0)


@pytest.mark.parametrize("case", ["int8 bf16", "fp8 bf16"])
def test_a_quantized_engine_differs_in_its_quantized_layers(case: str, found: dict) -> None:
    walk = found[case]
    assert walk["kl"] > 1e-5
    quantized = {point for point in walk["own"] if point.endswith(QUANTIZED)}
    assert len(quantized) == 8
    for point in walk["own"]:
        assert (walk["own"][point] > ROUNDINGS) == (point in quantized), point
    # what has entered once is in all that follows, from equal inputs or not
    assert (
        walk["apart"]["layers.1.post_norm"] > 0.01 > ROUNDINGS > walk["own"]["layers.1.post_norm"]
    )


def test_logits_in_fp32_are_rounded_by_neither_side(found: dict) -> None:
    assert found["bf16"]["rounded logits"]
    assert not found["fp32 logits"]["rounded logits"]
    assert found["fp32 logits"]["own"]["lm_head"] < 1e-5
    assert found["fp32 logits, again"] == found["fp32 logits"], (
        "after other weights, and a tied head, the same"
    )


@pytest.mark.parametrize("case", ["int8 as_sampler", "fp8 as_sampler", "bf16", "fp32 logits"])
def test_one_arithmetic_leaves_roundings(case: str, found: dict) -> None:
    walk = found[case]
    assert walk["left alone"]
    assert max(walk["own"].values()) < ROUNDINGS
    known = {
        point: own
        for point, own in walk["own"].items()
        if point.endswith(("norm", "rotary", *QUANTIZED))
    }
    assert {point: own for point, own in known.items() if own} == {}
    assert walk["kl"] < 1e-7


def test_the_engine_s_values_are_those_that_transformers_modules_have(found: dict) -> None:
    differences = found["transformers"]
    assert len(differences) == 2 * 7
    assert max(differences.values()) < 0.03


@pytest.mark.fault(
    "tensors of one shape lie in each other's places in the engine", "the first point is named"
)
@pytest.mark.parametrize("case", ["faults", "bf16 faults"])
def test_what_a_list_of_names_cannot_see_is_named(case: str, found: dict) -> None:
    starts = {
        "layers": "0.down",
        "gate_and_up": "0.gate_up",
        "norms": "0.input_norm",
        "heads": "1.qkv",
    }
    for fault, start in starts.items():
        assert found[case][f"{fault}_exchanged"][0] == f"layers.{start}"
    assert found[case]["layers_exchanged"] == ["layers.0.down", "layers.1.down"]
    assert found[case]["heads_exchanged"] == ["layers.1.qkv"]
