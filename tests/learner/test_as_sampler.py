"""`learner.forward=as_sampler`: the same codes on every layout, the engine's slices, gradients of
the plain layers.

That the outputs are the engine's own: tests/engine/test_cpu_kernels.py.
"""

from typing import Any

import learner_cases as cases
import pytest
from learner_cases import Fields

pytestmark = pytest.mark.ranks
MODELS = {
    "qwen3": cases.QWEN3,
    "qwen2": cases.QWEN2,
    "experts": cases.QWEN3_MOE,
    "fp8": cases.QWEN3,
}
EXPERTS = ["re:.*experts.*"]
LAYOUTS = {
    "qwen3": {name: cases.LAYOUTS[name] for name in ("tp2", "tp2_sp", "pp2", "dp2")},
    "qwen2": {"tp2": cases.LAYOUTS["tp2"]},
    "experts": {"ep2": cases.EXPERT_LAYOUTS["ep2"]},
}
LAYOUTS["qwen3"]["cp2"] = {"context_parallel": 2}
LAYOUTS["qwen3"]["tp2_recompute"] = {"tensor_parallel": 2, "megatron": cases.RECOMPUTE}
LAYOUTS["fp8"] = {at: LAYOUTS["qwen3"][at] for at in ("tp2", "cp2")}
SLICES = (1, 2)
FORMATS = {"qwen3": "int8", "fp8": "fp8"}  # of the same model
PRECISIONS = ("fp32", "bf16")
PLACES = [
    (model, layout, slices) for model in MODELS for layout in LAYOUTS[model] for slices in SLICES
]


def _job(model: str, layout: Fields, slices: int, name: str, **more: Any) -> Fields:
    return {
        "name": name,
        "hf": MODELS[model],
        "layout": layout,
        "engine_tp": slices,
        "forward": "as_sampler",
        "steps": 2,
        "ignore": EXPERTS,
        "format": "fp8" if model.startswith("fp8") else "int8",
        **more,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    one = [_job(model, {}, slices, f"{model} {slices}") for model in MODELS for slices in SLICES]
    one.append(_job("qwen3", {}, 1, "plain", forward="bf16"))
    for model, format in FORMATS.items():
        for precision in PRECISIONS:
            name = f"gradients {format} {precision}"
            one.append(_job(model, {}, 2, name, kind="straight_through", precision=precision))
        for way in ("bf16", "as_sampler"):
            how = {"kind": "expects", "forward": way, "precision": "bf16"}
            one.append(_job(model, {}, 1, f"{way} {model}", **how))
    one.append(
        _job("qwen3", {}, 1, "partly", kind="refused", ignore=["model.layers.1.self_attn.k_proj"])
    )
    cpuinfo = tmp_path_factory.mktemp("processor") / "cpuinfo"
    cpuinfo.write_text("flags : fpu amx_tile amx_fp8\n")
    elsewhere = {"kind": "refused", "cpuinfo": str(cpuinfo), "precision": "bf16"}
    one += [
        _job("fp8", {}, 1, f"elsewhere {way}", forward=way, **elsewhere)
        for way in ("bf16", "as_sampler")
    ]
    two = [
        _job(model, LAYOUTS[model][at], slices, f"{model} {at} {slices}")
        for model, at, slices in PLACES
    ]
    return cases.run(tmp_path_factory, one, two)


@pytest.mark.parametrize(("model", "at", "slices"), PLACES)
def test_every_layout_computes_the_same(model: str, at: str, slices: int, found: Fields) -> None:
    split = found[f"{model} {at} {slices}"]
    whole = found[f"{model} {slices}"]
    cases.close(split, whole, 1e-4)
    # updated weights differ in their last bits, which move some codes by one
    assert (cases.tensor(split, "after") - cases.tensor(whole, "after")).abs().median() < 1e-3
    for here, there in zip(split["steps"], whole["steps"], strict=True):
        assert here["optim/grad_norm"] == pytest.approx(there["optim/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("model", FORMATS)
def test_it_is_another_arithmetic_and_a_close_one(model: str, found: Fields) -> None:
    plain = cases.tensor(found["plain"])
    quantized, slices = (cases.tensor(found[f"{model} {slices}"]) for slices in SLICES)
    assert 3.5e-4 < (quantized - plain).abs().mean() < 0.35
    assert (quantized - slices).abs().mean() > 3.5e-5, "two slices have scales of their own"


@pytest.mark.parametrize("model", FORMATS)
def test_a_plain_learner_expects_what_the_sampler_computes(model: str, found: Fields) -> None:
    plain = found[f"bf16 {model}"]
    assert plain["expected"] == found[f"as_sampler {model}"]["own"] != plain["own"]


@pytest.mark.parametrize("format", FORMATS.values())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_those_of_plain_layers(precision: str, format: str, found: Fields) -> None:
    layers = found[f"gradients {format} {precision}"]
    assert len(layers) == 4 * cases.TINY["num_hidden_layers"]
    assert all(layers.values()), layers


def test_where_vllm_leaves_fp8_to_the_processor_it_is_refused(found: Fields) -> None:
    assert "learner.forward=as_sampler" in found["elsewhere as_sampler"]
    assert found["elsewhere bf16"] == "", "a plain learner has no part in it"


def test_a_part_of_a_joined_matrix_is_refused(found: Fields) -> None:
    assert found["partly"].startswith("quantization.ignore ")
