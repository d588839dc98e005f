"""Smoothing: the function stays, every layout sends the same bytes, outliers cost INT8 less.

O output features, I input features, L layers, N norms of a layer, H hidden channels, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import learner_cases as cases
import pytest
import torch
from safetensors.torch import save_file
from simulated import (
    ThreadGroup,
    assert_same_bits,
    hf_config,
    local_parameters,
    quantized_whole,
    random_hf,
    run_sources,
)

from megatron_rl.config.schema import Format
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups, cut
from megatron_rl.models.table import Norm
from megatron_rl.quantization.smoothing import LARGEST_EXPONENT, Smoothing, scales
from megatron_rl.weight_sync.source import ShardSource

ALPHA = 0.5
# for each norm: its name, what reads its outputs, and what reads them unquantized
READERS = [
    ("input_layernorm", r"self_attn\.(q|k|v|qkv)_proj", "none"),
    (
        "post_attention_layernorm",
        r"mlp\.(gate|up|gate_up)_proj|experts\.\d+\.(gate_proj|up_proj|w1|w3)",
        r"mlp\.gate|block_sparse_moe\.gate",
    ),
]


def seen(shape: ModelShape, seed: int = 3) -> torch.Tensor:
    """Activations with outliers of several orders of magnitude, and a channel that never moved."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.layers, len(Norm), shape.hidden)
    amax_LNH = torch.exp(3 * torch.randn(size, generator=generator))
    amax_LNH[..., 5] = 0
    return amax_LNH


def weights_of(hf: dict[str, torch.Tensor], layer: int, modules: str) -> list[str]:
    pattern = rf"model\.layers\.{layer}\.(.*\.)?({modules})\.weight"
    return [name for name in hf if re.fullmatch(pattern, name)]


def smoothed_by_hand(
    hf: dict[str, torch.Tensor], amax_LNH: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The original tensors, smoothed whole, without the mapping table."""
    out = dict(hf)
    for layer in range(len(amax_LNH)):
        for norm, (norm_name, readers, routers) in enumerate(READERS):
            read = weights_of(hf, layer, readers)
            weight_H = torch.cat([hf[name] for name in read]).abs().amax(0).float()
            wanted_H = amax_LNH[layer, norm] ** ALPHA / weight_H ** (1 - ALPHA)
            typical = wanted_H[wanted_H > 0].median()
            scale_H = torch.where(
                wanted_H > 0,
                2.0 ** (wanted_H / typical).log2().trunc(),
                1.0,
            )
            for name in read + weights_of(hf, layer, routers):
                out[name] = (hf[name] * scale_H).to(hf[name].dtype)
            for name in weights_of(hf, layer, norm_name):
                out[name] = (hf[name] / scale_H).to(hf[name].dtype)
    return out


def partly(
    amax_LNH: torch.Tensor, shape: ModelShape, layout: Layout
) -> Callable[[Place, ThreadGroup], Smoothing]:
    """Every rank has seen its stage's layers, and only some channels at their largest."""
    places = list(layout.places())
    ranks = layout.world // layout.pp

    def make(place: Place, world: ThreadGroup) -> Smoothing:
        own_H = torch.arange(shape.hidden) % ranks == places.index(place) % ranks
        seen_LNH = torch.where(own_H, amax_LNH, amax_LNH / 2)
        mine_LNH = torch.zeros_like(amax_LNH)
        for chunk in range(layout.chunks):
            layers = layout.layers(shape.layers, place.pp, chunk)
            mine_LNH[layers.start : layers.stop] = seen_LNH[layers.start : layers.stop]
        return Smoothing(shape, ALPHA, 1, world, mine_LNH.clone)

    return make


LAYOUTS = [
    Layout(),
    Layout(tp=4, pp=2, first_layers=1),
    Layout(tp=2, pp=2, vp=2),
    Layout(dp=2),
    Layout(tp=2, ep=2, etp=2, dp=2),
    Layout(tp=2, pp=2, ep=2, etp=1),
]
CASES = [
    (f, at) for f in cases.FAMILIES for at in LAYOUTS if at.ep == 1 or f in ("qwen3_moe", "mixtral")
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_sends_the_same_bytes(family: str, layout: Layout) -> None:
    config = hf_config(family, tie_word_embeddings=layout.tp == 2)
    config |= {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
    shape = ModelShape.from_hf(config)
    hf = random_hf(shape)
    amax_LNH = seen(shape)
    sources, yielded = run_sources(
        hf, shape, layout, Format.int8, smoothing=partly(amax_LNH, shape, layout)
    )
    assert [source.failure for source in sources] == [None] * layout.world
    want = quantized_whole(smoothed_by_hand(hf, amax_LNH), Format.int8)
    assert_same_bits([pair for of_rank in yielded for pair in of_rank], want)


def smoothing_of(shape: ModelShape, amax_LNH: torch.Tensor, every: int = 1) -> Smoothing:
    return Smoothing(shape, ALPHA, every, TorchGroup(), amax_LNH.clone)


def sync(
    smoothing: Smoothing | None,
    shape: ModelShape,
    hf: dict[str, torch.Tensor],
    ignore: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Return the tensors that a sampler receives; the learner's own stay as they are."""
    source = ShardSource(
        Model(shape, Layout(), {}), ShardGroups(), Format.int8, ignore, smoothing=smoothing
    )
    local = local_parameters(hf, shape, Layout(), Place())
    kept = {name: tensor.clone() for name, tensor in local.items()}
    received = dict(source.tensors(local))
    assert source.failure is None
    assert all(torch.equal(tensor, kept[name]) for name, tensor in local.items())
    return received


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_the_function_stays_the_same(
    family: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit: scales are powers of two, so no product and no sum rounds otherwise."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**cases.FAMILIES[family], "tie_word_embeddings": tied}
    shape = ModelShape.from_hf(config)
    hf = {name: tensor * 0.2 for name, tensor in random_hf(shape, dtype).items()}
    smoothing = smoothing_of(shape, seen(shape))
    sync(smoothing, shape, hf)
    assert (smoothing.scales_LNH > 1).any() and (smoothing.scales_LNH < 1).any()
    local = local_parameters(hf, shape, Layout(), Place())
    folded = {}
    for param in params(shape):
        if param.megatron in local:
            whole = smoothing.fold(param, local[param.megatron])
            pieces = cut(param, whole, param.slices(shape, Layout(), Place()))
            folded |= {piece.name: part.contiguous() for piece, part in pieces}
    changed = {name for name in hf if not torch.equal(hf[name], folded[name])}
    assert len(changed) >= (4 if family == "phi3" else 5) * shape.layers
    logits = []
    for name, weights in (("plain", hf), ("smoothed", folded)):
        AutoConfig.for_model(**config).save_pretrained(tmp_path / name)
        save_file(weights, tmp_path / name / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(1, 30)[None]).logits)
    assert logits[0].std() > 0.01
    assert torch.equal(logits[0], logits[1])


def test_scales_are_powers_of_two_around_the_median() -> None:
    exponents = torch.tensor([0.3, 0.0, 0.0, 1.9, -1.2, 3.1, 40.0])  # of the formula with alpha 1/2
    # three channels of which nothing is known
    activations = torch.cat([8 * 4.0**exponents, torch.tensor([0.0, 1.0, float("inf")])])
    weights = torch.cat([torch.full((7,), 2.0), torch.tensor([1.0, 0.0, 1.0])])
    wanted = [
        1.0,
        1.0,
        1.0,
        2.0,
        0.5,
        4.0,
        2.0**LARGEST_EXPONENT,
        1.0,
        1.0,
        1.0,
    ]
    assert scales(activations, weights, 0.5).tolist() == wanted
    assert scales(activations * 0, weights, 0.5).tolist() == [1.0] * 10
    # a function-preserving outlier is undone at any alpha
    outlier = torch.tensor([1.0, 1.0, 64.0, 1.0])
    for alpha in (0.3, 0.5, 0.8):
        assert scales(3 * outlier, 5 / outlier, alpha).tolist() == outlier.tolist()


def test_scales_stay_until_they_are_due() -> None:
    shape = ModelShape.from_hf(hf_config("qwen3"))
    hf = random_hf(shape)
    plain = sync(None, shape, hf)
    answers = [
        torch.zeros_like(seen(shape)),
        seen(shape, 1),
        seen(shape, 2),
    ]
    smoothing = Smoothing(shape, ALPHA, 2, TorchGroup(), lambda: answers.pop(0))
    name = "model.layers.0.mlp.gate_proj.weight"
    first, second, third, fourth = (sync(smoothing, shape, hf) for _ in range(4))
    assert all(torch.equal(first[n], plain[n]) for n in plain)  # nothing was seen yet
    assert_same_bits(
        list(second.items()), quantized_whole(smoothed_by_hand(hf, seen(shape, 1)), Format.int8)
    )
    assert torch.equal(second[name], third[name])
    assert_same_bits(
        list(fourth.items()), quantized_whole(smoothed_by_hand(hf, seen(shape, 2)), Format.int8)
    )
    assert answers == []


def test_layers_that_are_ignored_still_compute_the_same() -> None:
    """A layer held in BF16 reads the smoothed norm too; its own size does not enter the scale."""
    shape = ModelShape.from_hf(hf_config("llama", num_hidden_layers=1))
    hf = random_hf(shape)
    amax_LNH = seen(shape)
    names = [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    hf[names[1] + ".weight"] *= 1000
    smoothing = smoothing_of(shape, amax_LNH)
    received = sync(smoothing, shape, hf, [names[1], "lm_head"])
    weight_H = torch.cat([hf[names[0] + ".weight"], hf[names[2] + ".weight"]]).abs().amax(0).float()
    scale_H = scales(amax_LNH[0, 0], weight_H, ALPHA)
    assert torch.equal(
        received[names[1] + ".weight"], hf[names[1] + ".weight"] * scale_H.bfloat16()
    )
    assert torch.equal(smoothing.scales_LNH[0, 0], scale_H)
