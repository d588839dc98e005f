"""One learner rank with Transformer Engine's layers and no GPU: `python layer_rank.py RANK RANKS STORE` prints JSON.

Weights lie in host memory; what is looked at is how the model, its optimizer and its sync are put together.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import pretended
import pytest
import torch

from megatron_rl.learner import host  # before megatron

from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate  # isort: skip
from megatron_rl.config.schema import Config, Format, KvCache, LearnerSection, QuantizationSection
from megatron_rl.learner import limits
from megatron_rl.learner import model as model_module
from megatron_rl.learner import optimizer as optimizer_module
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.parallel import RENDEZVOUS, leave
from megatron_rl.learner.policy import Sections
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import find, global_name, stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.table import Split
from megatron_rl.weight_sync.source import ShardSource

SIZES: dict[str, Any] = {
    "vocab_size": 17, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 512, "hidden_act": "silu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {"tie_word_embeddings": False, **EXPERTS},
    "mixtral": {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2},
}
MEETINGS, STORE = count(), sys.argv[3]


def section(tp: int, **megatron: Any) -> LearnerSection:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    given = {"sequence_parallel": tp > 1, "use_cpu_initialization": True, **recompute, **megatron}
    return LearnerSection(tensor_parallel=tp, megatron=given)


def learner_of(family: str, learner: LearnerSection, quantization: QuantizationSection) -> Learner:
    leave()  # the learner before
    os.environ[RENDEZVOUS] = f"file://{STORE}_{next(MEETINGS)}"
    config = Config(learner=learner, quantization=quantization)
    model = Model.of({"model_type": family, **SIZES, **FAMILIES[family]}, Layout.from_config(learner))
    return Learner(model, Sections.of(config))


def parameters(learner: Learner) -> dict[str, Any]:
    """Names, shapes and marks of a rank's weights, against the mapping table."""
    shape, layout = learner.shape, learner.layout
    found, problems = set(), []
    for name, parameter in learner.modules[0].named_parameters():
        param = find(global_name(name, 0, learner.place.ep * len(layout.local_experts(shape.experts, 0))), shape)
        found.add(param.megatron)
        if tuple(parameter.shape) != param.local_shape(layout):
            problems.append(f"{name}: shape {tuple(parameter.shape)}, the table says {param.local_shape(layout)}")
        split = param.row.split is not Split.replicated
        if (split or param.row.expert) and not param_is_not_tensor_parallel_duplicate(parameter):
            problems.append(f"{name}: the gradient's norm takes it for a copy")
        norm = not split and parameter.ndim == 1
        if norm and layout.tp > 1 and not getattr(parameter, "sequence_parallel", False):
            problems.append(f"{name}: its gradient is not summed over sequence-parallel ranks")
    wanted = {param.megatron for param in stage_params(shape, layout, learner.place)}
    kinds = sorted({type(module).__name__ for module in learner.modules[0].modules()})
    return {"problems": problems, "missing": sorted(wanted - found), "extra": sorted(found - wanted), "kinds": kinds}


def sync(learner: Learner, quantization: QuantizationSection) -> dict[str, Any]:
    """Everything that a version consists of can be made of these weights."""
    learner.init_random(3)
    source = ShardSource(learner.model, learner.groups, quantization.format, quantization.ignore)
    sent = dict(source.tensors(dict(learner.named_parameters())))
    return {"failure": source.failure, "tensors": len(sent)}


def fp8(learner: Learner) -> dict[str, Any]:
    """megatron-core's scales of this recipe, and packs that Transformer Engine accepts on this rank."""
    from learner_cases import make_batch
    from megatron.core import fp8_utils
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    recipe = fp8_utils.get_fp8_recipe(learner.megatron_config)
    batch = make_batch()
    packs = learner._packs(batch, range(len(batch)))
    shares = learner.layout.tp if learner.megatron_config.sequence_parallel else 1
    for pack in packs:
        assert_dim_for_fp8_exec(torch.empty(len(pack.tokens_S) // shares, 1, 128))
    return {"recipe": type(recipe).__name__, "packs": [len(pack.tokens_S) for pack in packs]}


def replicas(learner: Learner) -> dict[str, Any]:
    """How gradients of replicas are added up, and the weights that no bucket would send."""
    wrapped = learner.chunks[0]
    sent = {
        id(one) for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups) for one in group.params
    }
    left = [name for name, parameter in learner.named_parameters() if id(parameter) not in sent]
    return {"overlap": wrapped.ddp_config.overlap_grad_reduce, "left": left}


def main(rank: int, ranks: int) -> dict[str, Any]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    assert host.ON_HOST
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        pretended.pretend(patch, pretended.H100, count=ranks)
        for module in (model_module, optimizer_module):  # layers and sums as on a GPU
            patch.setattr(module, "host", SimpleNamespace(ON_HOST=False))
        for number, family in enumerate(FAMILIES):
            format = list(Format)[number % len(Format)]
            quantization = QuantizationSection(
                format=format,
                smoothing=0.5 if format == Format.int8 else None,
                kv_cache=KvCache.fp8 if format == Format.fp8 else KvCache.none,
            )
            made = learner_of(family, section(ranks), quantization)
            found[family] = {**parameters(made), **sync(made, quantization)}
            kinds = {type(one.optimizer).__name__ for one in made.optimizer.chained_optimizers}
            found[family]["optimizer"] = sorted(kinds)
        for recipe in (None, *limits.FP8_TOKENS):
            made = learner_of("qwen3", section(ranks, fp8="e4m3", fp8_recipe=recipe), QuantizationSection())
            found[f"fp8 {recipe}"] = fp8(made)
        for family in ("qwen3", "qwen3_moe"):
            section_of = LearnerSection(data_parallel=ranks, megatron={"use_cpu_initialization": True})
            found[f"replicas {family}"] = replicas(learner_of(family, section_of, QuantizationSection()))
    leave()
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
