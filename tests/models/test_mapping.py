"""The table of names and the layers of each stage, against megatron-core's."""

from __future__ import annotations

import pytest
from simulated import hf_config, random_hf

from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import find, global_name, params
from megatron_rl.models.shape import FAMILIES, ModelShape
from megatron_rl.models.shards import local_shard

LAYER = "decoder.layers.1."


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_unique_and_found_again(family: str) -> None:
    shape = ModelShape.from_hf(hf_config(family))
    seen = [param.megatron for param in params(shape)]
    assert len(seen) == len(set(seen))
    assert all(find(param.megatron, shape) == param for param in params(shape))
    names = [name for param in params(shape) for name in param.hf]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("spelling", "plain"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight3", "mlp.experts.local_experts.3.linear_fc1.weight"),
    ],
)
def test_transformer_engine_spellings(spelling: str, plain: str) -> None:
    shape = ModelShape.from_hf(hf_config("qwen3_moe"))
    assert find(LAYER + spelling, shape) == find(f"module.module.{LAYER}{plain}", shape)


def test_local_numbers_become_global() -> None:
    assert global_name(
        "module.decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight", 4, 6
    ) == ("decoder.layers.5.mlp.experts.local_experts.6.linear_fc2.weight")
    assert global_name("decoder.layers.0.mlp.experts.linear_fc1.weight2", 4, 6) == (
        "decoder.layers.4.mlp.experts.linear_fc1.weight8"
    )
    assert global_name("output_layer.weight", 4, 6) == "output_layer.weight"


@pytest.mark.parametrize(
    "name", ["mlp.linear_fc3.weight", "self_attention.linear_qkv.bias", "mlp.router.weight"]
)
def test_unknown_names_are_answered_with_the_nearest(name: str) -> None:
    with pytest.raises(KeyError, match=r"name is decoder\.layers"):
        find(LAYER + name, ModelShape.from_hf(hf_config("qwen3")))


def test_wrong_shapes_are_named() -> None:
    shape = ModelShape.from_hf(hf_config("llama"))
    hf = random_hf(shape)
    hf["model.norm.weight"] = hf["model.norm.weight"][:-1]
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*63.*64"):
        local_shard("decoder.final_layernorm.weight", shape, Layout(), Place(), hf.__getitem__)


LAYOUTS = [
    Layout(),
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=2, vp=2),
    Layout(pp=4, vp=3),
    Layout(pp=2, first_layers=5),
    Layout(pp=2, last_layers=1),
    Layout(pp=4, first_layers=2, last_layers=4),
    Layout(pp=4, vp=2, first_layers=2, last_layers=2),
]


def test_layers_are_where_megatron_puts_them() -> None:
    from megatron_rl.learner.modules import cpu  # before megatron

    cpu.install()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build  # isort: skip
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    for layout in LAYOUTS:
        config = TransformerConfig(
            num_layers=12,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp,
            num_layers_in_first_pipeline_stage=layout.first_layers,
            num_layers_in_last_pipeline_stage=layout.last_layers,
            pipeline_dtype="unused",  # type: ignore[arg-type]
        )
        for pp in range(layout.pp):
            for chunk in range(layout.chunks):
                stage = layout.vp and chunk
                start = get_transformer_layer_offset(config, stage, pp)
                stop = start + get_num_layers_to_build(config, stage, pp)
                assert layout.layers(12, pp, chunk) == range(start, stop), (layout, pp, chunk)
