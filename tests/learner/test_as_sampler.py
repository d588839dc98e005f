"""`learner.forward=as_sampler`: the same codes on every layout, the engine's slices, gradients of
the plain layers.

That the outputs are the engine's own: tests/engine/test_host_kernels.py.
"""

from typing import Any

import learner_cases as cases
import pytest
import torch

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
PAIRS = [("tp2", "bf16"), ("tp2", "as_sampler"), ("dp2", "bf16")]
PAIRS_OF = [
    (at, forward, model) for model in FORMATS for at, forward in PAIRS if at in LAYOUTS[model]
]
PRECISIONS = ("fp32", "bf16")
PLACES = [
    (model, layout, slices) for model in MODELS for layout in LAYOUTS[model] for slices in SLICES
]


def _job(model: str, layout: dict[str, Any], slices: int, name: str, **more: Any) -> dict[str, Any]:
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


def _pair(
    at: str, forward: str = "bf16", slices: int = 1, model: str = "qwen3", **more: Any
) -> dict[str, Any]:
    job = _job(
        model, LAYOUTS[model].get(at, {}), slices, f"pair {at} {forward} {slices} {model}", **more
    )
    return {
        **job,
        "kind": "bf16_pair",
        "forward": forward,
        "precision": more.get("precision", "bf16"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one = [_job(model, {}, slices, f"{model} {slices}") for model in MODELS for slices in SLICES]
    one.append(_job("qwen3", {}, 1, "plain", forward="bf16"))
    for model, format in FORMATS.items():
        for precision in PRECISIONS:
            name = f"gradients {format} {precision}"
            one.append(_job(model, {}, 2, name, kind="straight_through", precision=precision))
        one += [_pair("one", *how, model=model) for how in ((), ("as_sampler",), ("bf16", 2))]
    one.append({**_pair("one", precision="fp32"), "name": "pair of fp32"})
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
    two += [_pair(at, forward, model=model) for at, forward, model in PAIRS_OF]
    two += [_pair("tp2", slices=2, model=model) for model in FORMATS]
    return cases.run(tmp_path_factory, one, two)


@pytest.mark.parametrize(("model", "at", "slices"), PLACES)
def test_every_layout_computes_the_same(
    model: str, at: str, slices: int, found: dict[str, Any]
) -> None:
    split = found[f"{model} {at} {slices}"]
    whole = found[f"{model} {slices}"]
    torch.testing.assert_close(cases.matrix(split), cases.matrix(whole), rtol=0, atol=1e-4)
    # updated weights differ in their last bits, which move some codes by one
    assert (cases.matrix(split, "after") - cases.matrix(whole, "after")).abs().median() < 1e-3
    for here, there in zip(split["steps"], whole["steps"], strict=True):
        assert here["optim/grad_norm"] == pytest.approx(there["optim/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("model", FORMATS)
def test_it_is_another_arithmetic_and_a_close_one(model: str, found: dict[str, Any]) -> None:
    plain = cases.matrix(found["plain"])
    quantized, slices = (cases.matrix(found[f"{model} {slices}"]) for slices in SLICES)
    assert 1e-4 < (quantized - plain).abs().mean() < 0.1
    assert (quantized - slices).abs().mean() > 1e-5, "two slices have scales of their own"


@pytest.mark.parametrize(("at", "forward", "model"), PAIRS_OF)
def test_a_bf16_pair_differs_by_what_tensor_parallelism_rounds(
    at: str, forward: str, model: str, found: dict[str, Any]
) -> None:
    """One BF16 rank is what a BF16 engine on one rank would be; one rank with the sampler's codes,
    what it is.
    """
    engine = found[f"pair one bf16 1 {model}"]
    here = found[f"pair {at} {forward} 1 {model}"]
    plain = found[f"pair {at} bf16 1 {model}"]
    assert engine["same"] and here["same"]
    between = cases.matrix(plain, "own") - cases.matrix(engine, "own")  # of two BF16 engines
    # of a stand-in, and the sampler
    told = cases.matrix(here, "paired") - cases.matrix(engine, "paired")
    split = at.startswith("tp2")
    assert (between.abs().mean() > 1e-3) == split
    assert told.abs().mean() == pytest.approx(float(between.abs().mean()), rel=0.25, abs=1e-5)
    if split:  # token by token, as far as codes that differ by one allow
        assert torch.corrcoef(torch.stack((told.flatten(), between.flatten())))[0, 1] > 0.8


@pytest.mark.parametrize("model", FORMATS)
def test_a_pair_on_one_layout_differs_by_nothing(model: str, found: dict[str, Any]) -> None:
    assert (
        found[f"pair one bf16 1 {model}"]["paired"]
        == found[f"pair one as_sampler 1 {model}"]["own"]
    )
    assert found[f"pair one bf16 2 {model}"]["paired"] is None, (
        "an engine in two parts, a learner in one"
    )
    assert found["pair of fp32"]["paired"] is None
    assert found[f"pair tp2 bf16 2 {model}"]["paired"] is not None


@pytest.mark.parametrize("format", FORMATS.values())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_those_of_plain_layers(
    precision: str, format: str, found: dict[str, Any]
) -> None:
    layers = found[f"gradients {format} {precision}"]
    assert len(layers) == 4 * cases.TINY["num_hidden_layers"]
    assert all(layers.values()), layers


def test_where_vllm_leaves_fp8_to_the_processor_it_is_refused(found: dict[str, Any]) -> None:
    assert "learner.forward=as_sampler" in found["elsewhere as_sampler"]
    assert found["elsewhere bf16"] == "", "a plain learner has no part in it"


def test_a_part_of_a_joined_matrix_is_refused(found: dict[str, Any]) -> None:
    assert found["partly"].startswith("quantization.ignore ")
