"""Learner rank with Transformer Engine's layers and no GPU: `python layer_rank.py RANK RANKS
STORE` prints JSON.

Weights are in CPU memory; the structure of the model, its optimizer and its sync is checked.
"""

import json
import os
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import mocked_gpu
import pytest
import torch

from megatron_rl.learner.modules import cpu  # before megatron

from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate  # isort: skip
from megatron_rl.config.schema import Config, Format, KvCache, LearnerSection, QuantizationSection
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import fake_quantized as fake_quantized_module
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules import model as model_module
from megatron_rl.learner.modules.fake_quantized import Rounding, fake_quantized
from megatron_rl.learner.modules.observers import fused_norm
from megatron_rl.learner.parallel import RENDEZVOUS, leave
from megatron_rl.learner.weights import random_tensors
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import find, global_name, stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.shards import local_shard
from megatron_rl.models.table import Split
from megatron_rl.quantization.quantize import dequantize, quantize
from megatron_rl.weight_sync.source import ShardSource

SIZES = mocked_gpu.SIZES | {"vocab_size": 17, "num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3_moe": {"tie_word_embeddings": False, **mocked_gpu.EXPERTS["qwen3_moe"]},
}
MEETINGS = count()
STORE = sys.argv[3]


def section(tp: int, **megatron: Any) -> LearnerSection:
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    given = {"sequence_parallel": tp > 1, "use_cpu_initialization": True, **recompute, **megatron}
    return LearnerSection(tensor_parallel=tp, megatron=given)


def learner_of(family: str, learner: LearnerSection, quantization: QuantizationSection) -> Learner:
    leave()  # the learner before
    os.environ[RENDEZVOUS] = f"file://{STORE}_{next(MEETINGS)}"
    config = Config(learner=learner, quantization=quantization)
    model = Model.of(
        {"model_type": family, **SIZES, **FAMILIES[family]}, Layout.from_config(learner)
    )
    return Learner(model, config)


def first_expert(learner: Learner) -> int:
    return learner.place.ep * len(learner.layout.local_experts(learner.shape.experts, 0))


def parameters(learner: Learner) -> dict[str, Any]:
    """Names, shapes and marks of a rank's weights, against the mapping table."""
    shape = learner.shape
    layout = learner.layout
    found = set()
    problems = []
    for name, parameter in learner.modules[0].named_parameters():
        param = find(global_name(name, 0, first_expert(learner)), shape)
        found.add(param.megatron)
        if tuple(parameter.shape) != param.local_shape(layout):
            problems.append(
                f"{name}: shape {tuple(parameter.shape)}, the table says "
                f"{param.local_shape(layout)}"
            )
        split = param.row.split is not Split.replicated
        if (split or param.row.expert) and not param_is_not_tensor_parallel_duplicate(parameter):
            problems.append(f"{name}: the gradient's norm takes it for a copy")
        norm = not split and parameter.ndim == 1
        if norm and layout.tp > 1 and not getattr(parameter, "sequence_parallel", False):
            problems.append(f"{name}: its gradient is not summed over sequence-parallel ranks")
    wanted = {param.megatron for param in stage_params(shape, layout, learner.place)}
    kinds = sorted({type(module).__name__ for module in learner.modules[0].modules()})
    return {
        "problems": problems,
        "missing": sorted(wanted - found),
        "extra": sorted(found - wanted),
        "kinds": kinds,
    }


def sync(learner: Learner, quantization: QuantizationSection) -> dict[str, Any]:
    """Everything that a version consists of can be made of these weights."""
    learner.init_random(3)
    source = ShardSource(learner.model, learner.groups, quantization.format, quantization.ignore)
    sent = dict(source.tensors(dict(learner.named_parameters())))
    return {"failure": source.failure, "tensors": len(sent)}


def imitated(learner: Learner, format: Format, slices: int) -> dict[str, list[float]]:
    """Relative errors of the outputs of layers that imitate an engine, and of plain layers.

    Against weights that were quantized whole, multiplied in FP64 by inputs that an engine of
    `slices` ranks rounds.
    """
    get = random_tensors(learner.model, 3)
    place = learner.place
    layout = learner.layout
    engine = Rounding(format, (), slices)
    errors = dict[str, list[float]]()
    first = first_expert(learner)

    def rounded(name: str) -> torch.Tensor:
        made = quantize(get(name).bfloat16(), format)
        return dequantize(made["weight"], made["weight_scale"])

    def coded(x_MK: torch.Tensor) -> torch.Tensor:
        largest = 127 if format == Format.int8 else 448
        scale = x_MK.double().abs().amax(1, keepdim=True) / largest
        codes = x_MK.double() / scale
        if format == Format.int8:
            return codes.round() * scale
        return codes.to(torch.float8_e4m3fn).double() * scale

    with fake_quantized(learner.numbered_modules, learner.model, learner.groups, engine, None):
        for name, layer in learner.modules[0].named_modules():
            if "forward" not in vars(layer):
                continue
            grouped = hasattr(layer, "weight0")
            sizes = [3, 0, 5, 6][: layer.num_gemms] if grouped else [14]
            names = [f"{name}.weight{i if grouped else ''}" for i in range(len(sizes))]
            params = [find(global_name(one, 0, first), learner.shape) for one in names]
            ranks, mine = params[0].tensor_parallel(layout, place)
            draw = torch.Generator().manual_seed(5)
            row = params[0].row.split is Split.row
            width = params[0].shapes[0][1]
            x_MK = torch.randn(14, width, generator=draw).bfloat16()
            scattered = bool(layer.sequence_parallel) and not grouped
            given = (
                x_MK.chunk(ranks, 1)[mine]
                if row
                else x_MK.chunk(ranks)[mine]
                if scattered
                else x_MK
            )
            if layer.use_bias:
                layer.bias.data.normal_(0, 0.1, generator=draw)
            out, _ = layer(given.contiguous().unsqueeze(1), *([sizes] if grouped else []))
            read = (
                fused_norm(layer, x_MK).bfloat16() if hasattr(layer, "layer_norm_weight") else x_MK
            )
            parts = [coded(part) for part in read.chunk(slices if row else 1, 1)]
            for what, inputs in (("imitated", torch.cat(parts, 1)), ("plain", read.double())):
                wanted = []
                for param, some in zip(params, inputs.split(sizes), strict=True):
                    hf = rounded if what == "imitated" else lambda one: get(one).bfloat16().float()
                    own = local_shard(param.megatron, learner.shape, layout, place, hf)
                    if row and not grouped:  # the ranks' sum
                        own = torch.cat([hf(one) for one in param.hf])
                    elif row:
                        some = some.chunk(ranks, 1)[mine]
                    wanted.append(some @ own.double().t())
                whole = torch.cat(wanted) + (layer.bias.detach().double() if layer.use_bias else 0)
                whole = whole.chunk(ranks)[mine] if row and scattered else whole
                off = (out.squeeze(1).double() - whole).norm() / whole.norm()
                errors.setdefault(what, []).append(float(off))
    assert not any("forward" in vars(layer) for layer in learner.modules[0].modules())
    return errors


def fp8(learner: Learner) -> dict[str, Any]:
    """megatron-core's scales of this recipe, and packs that Transformer Engine accepts on this
    rank.
    """
    from learner_cases import make_batch
    from megatron.core import fp8_utils
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    recipe = fp8_utils.get_fp8_recipe(learner.megatron_config)
    batch = make_batch()
    packs = learner._packs(learner.part(batch), torch.arange(len(batch)))
    shares = learner.layout.tp if learner.megatron_config.sequence_parallel else 1
    for pack in packs:
        assert_dim_for_fp8_exec(torch.empty(len(pack.tokens_S) // shares, 1, 128))
    return {"recipe": type(recipe).__name__, "packs": [len(pack.tokens_S) for pack in packs]}


def main(rank: int, ranks: int) -> dict[str, Any]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    assert cpu.ON_CPU
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        mocked_gpu.pretend(patch, mocked_gpu.H100, count=ranks)
        patch.setattr(model_module, "cpu", SimpleNamespace(ON_CPU=False))  # layers as on a GPU
        patch.setattr(fake_quantized_module, "ROWS", 5)  # a layer's tokens in several blocks
        for number, family in enumerate(FAMILIES):
            format = list(Format)[number % len(Format)]
            quantization = QuantizationSection(
                format=format,
                smoothing=0.5 if format == Format.int8 else None,
                kv_cache=KvCache.fp8 if format == Format.fp8 else KvCache.none,
            )
            made = learner_of(family, section(ranks), quantization)
            found[family] = {**parameters(made), **sync(made, quantization)}
            cases = [(form, slices) for form in (Format.int8, Format.fp8) for slices in (1, 2, 4)]
            found[family]["imitated"] = [imitated(made, *case) for case in cases]
            kinds = {type(one.optimizer).__name__ for one in made.optimizer.chained_optimizers}
            found[family]["optimizer"] = sorted(kinds)
        for recipe in (None, *limits.FP8_TOKENS):
            made = learner_of(
                "qwen3", section(ranks, fp8="e4m3", fp8_recipe=recipe), QuantizationSection()
            )
            found[f"fp8 {recipe}"] = fp8(made)
    leave()
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
