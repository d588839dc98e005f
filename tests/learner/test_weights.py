"""A second rounding of every weight: as large as one, equal on all layouts, and reverted after."""

from typing import Any

import learner_cases as cases
import pytest
import torch

from megatron_rl.learner.weights import rounded_again

LAYOUTS = ("tp2_sp", "pp2", "dp2")


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(300, 200, generator=random).to(dtype) for name in ("a", "b")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_large_as_a_rounding_to_bf16_and_gone_afterwards(dtype: torch.dtype) -> None:
    held = weights(dtype)
    before = {name: tensor.clone() for name, tensor in held.items()}
    with rounded_again(iter(held.items())):
        moved = {name: (held[name].float() - before[name].float()) for name in held}
    assert all(torch.equal(held[name], before[name]) for name in held)
    exact = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 1  # one binade
    rounding = (exact.bfloat16().float() - exact).square().mean().sqrt()
    last = 2.0 ** (before["a"].float().abs().log2().floor() - 7)  # a unit in the last place of BF16
    shares = moved["a"] / last
    assert set(shares.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert float(shares.square().mean().sqrt()) * 2**-7 == pytest.approx(float(rounding), rel=0.05)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = {"kind": "noise", "precision": "bf16", "hf": cases.QWEN3}
    one = [
        {**job, "name": f"one {forward}", "forward": forward} for forward in ("bf16", "as_sampler")
    ]
    one.append({**job, "name": "one cached", "kv_cache": "fp8"})
    one.append({**job, "name": "one experts", "hf": cases.QWEN3_MOE})
    two = [
        {
            **job,
            "name": name,
            "layout": cases.LAYOUTS[name],
        }
        for name in LAYOUTS
    ]
    two.append(
        {
            **job,
            "name": "ep2",
            "hf": cases.QWEN3_MOE,
            "layout": cases.EXPERT_LAYOUTS["ep2"],
        }
    )
    return cases.run(tmp_path_factory, one, two)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["one bf16", "one as_sampler", "one experts", "one cached", *LAYOUTS, "ep2"]
)
def test_a_learner_is_as_it_was_and_its_noise_the_same_on_every_layout(
    name: str, found: dict[str, Any]
) -> None:
    case = found[name]
    assert case["same"] and case["repeats"] and not case["seen"]
    same_model = "one experts" if name in ("one experts", "ep2") else "one bf16"
    least = found[same_model]["noise"]
    # codes of INT8 that fall on the other side of a rounding make more of it
    assert 1e-3 < least / 1.5 < case["noise"] < least * (4 if name.endswith("as_sampler") else 1.5)
