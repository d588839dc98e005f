"""The one table between megatron-core's and Hugging Face's weights: names, shapes and how they are split.

Live sync, import, export and the tests all read `TABLE`; supporting another family means adding rows (and its features
to `shape.FAMILIES`). {L} is a layer, {E} an expert, counted over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Split(StrEnum):
    replicated = "replicated"
    column = "column"  # output rows, equal shares
    row = "row"  # input columns, equal shares
    vocab = "vocab"  # output rows, padded to equal shares
    qkv = "qkv"  # query, key, value rows interleaved by query group; Hugging Face has three tensors, or one
    gate_up = "gate_up"  # each rank holds its gate rows, then its up rows; of two tensors, or one


class Norm(IntEnum):
    """The two norms of a layer, by what reads their output."""

    attention = 0
    mlp = 1


@dataclass(frozen=True)
class Row:
    """One kind of weight. {L} is a layer, {E} an expert; dims are names that ModelShape.size knows."""

    megatron: tuple[str, ...]  # the local spec's name first, then Transformer Engine's aliases
    hf: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]  # the full shape of each hf tensor
    split: Split
    needs: str = ""  # feature of the model or layer; empty: always there
    copy: bool = False  # megatron holds a second copy: loaded, never exported
    norm: Norm | None = None  # vectors: which of the layer's norms this is; matrices: which one's output they read

    @property
    def expert(self) -> bool:
        return "{E}" in self.megatron[0]

    @property
    def vector(self) -> bool:
        return len(self.dims[0]) == 1


_D = "decoder.layers.{L}."
_H = "model.layers.{L}."
_EXPERTS = _D + "mlp.experts."
_QKV = (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden"))
_QKV_NAMES = tuple(_H + f"self_attn.{letter}_proj." for letter in "qkv")
_GATE_UP = (_H + "mlp.gate_proj.", _H + "mlp.up_proj.")

TABLE: tuple[Row, ...] = (
    Row(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), (("vocab", "hidden"),), Split.vocab),
    Row(
        (_D + "input_layernorm.weight", _D + "self_attention.linear_qkv.layer_norm_weight"),
        (_H + "input_layernorm.weight",),
        (("hidden",),),
        Split.replicated,
        norm=Norm.attention,
    ),
    Row(
        (_D + "self_attention.linear_qkv.weight",),
        tuple(n + "weight" for n in _QKV_NAMES),
        _QKV,
        Split.qkv,
        needs="separate_qkv",
        norm=Norm.attention,
    ),
    Row(
        (_D + "self_attention.linear_qkv.weight",),
        (_H + "self_attn.qkv_proj.weight",),
        (("qkv", "hidden"),),
        Split.qkv,
        needs="joined_qkv",
        norm=Norm.attention,
    ),
    Row(
        (_D + "self_attention.linear_qkv.bias",),
        tuple(n + "bias" for n in _QKV_NAMES),
        (("q",), ("kv",), ("kv",)),
        Split.qkv,
        needs="qkv_bias",
    ),
    Row(
        (_D + "self_attention.q_layernorm.weight",),
        (_H + "self_attn.q_norm.weight",),
        (("head_dim",),),
        Split.replicated,
        needs="qk_norm",
    ),
    Row(
        (_D + "self_attention.k_layernorm.weight",),
        (_H + "self_attn.k_norm.weight",),
        (("head_dim",),),
        Split.replicated,
        needs="qk_norm",
    ),
    Row(
        (_D + "self_attention.linear_proj.weight",),
        (_H + "self_attn.o_proj.weight",),
        (("hidden", "q"),),
        Split.row,
    ),
    Row(
        (_D + "self_attention.linear_proj.bias",),
        (_H + "self_attn.o_proj.bias",),
        (("hidden",),),
        Split.replicated,
        needs="proj_bias",
    ),
    Row(
        (_D + "pre_mlp_layernorm.weight", _D + "mlp.linear_fc1.layer_norm_weight"),
        (_H + "post_attention_layernorm.weight",),
        (("hidden",),),
        Split.replicated,
        norm=Norm.mlp,
    ),
    Row(
        (_D + "mlp.linear_fc1.weight",),
        tuple(n + "weight" for n in _GATE_UP),
        (("ffn", "hidden"), ("ffn", "hidden")),
        Split.gate_up,
        needs="separate_mlp",
        norm=Norm.mlp,
    ),
    Row(
        (_D + "mlp.linear_fc1.weight",),
        (_H + "mlp.gate_up_proj.weight",),
        (("gate_up", "hidden"),),
        Split.gate_up,
        needs="joined_mlp",
        norm=Norm.mlp,
    ),
    Row(
        (_D + "mlp.linear_fc1.bias",),
        tuple(n + "bias" for n in _GATE_UP),
        (("ffn",), ("ffn",)),
        Split.gate_up,
        needs="dense_mlp_bias",
    ),
    Row(
        (_D + "mlp.linear_fc2.weight",),
        (_H + "mlp.down_proj.weight",),
        (("hidden", "ffn"),),
        Split.row,
        needs="dense_mlp",
    ),
    Row(
        (_D + "mlp.linear_fc2.bias",),
        (_H + "mlp.down_proj.bias",),
        (("hidden",),),
        Split.replicated,
        needs="dense_mlp_bias",
    ),
    Row(
        (_D + "mlp.router.weight",),
        (_H + "mlp.gate.weight",),
        (("experts", "hidden"),),
        Split.replicated,
        needs="swiglu_experts",
        norm=Norm.mlp,
    ),
    Row(
        (_EXPERTS + "local_experts.{E}.linear_fc1.weight", _EXPERTS + "linear_fc1.weight{E}"),
        (_H + "mlp.experts.{E}.gate_proj.weight", _H + "mlp.experts.{E}.up_proj.weight"),
        (("expert_ffn", "hidden"), ("expert_ffn", "hidden")),
        Split.gate_up,
        needs="swiglu_experts",
        norm=Norm.mlp,
    ),
    Row(
        (_EXPERTS + "local_experts.{E}.linear_fc2.weight", _EXPERTS + "linear_fc2.weight{E}"),
        (_H + "mlp.experts.{E}.down_proj.weight",),
        (("hidden", "expert_ffn"),),
        Split.row,
        needs="swiglu_experts",
    ),
    Row(
        (_D + "mlp.router.weight",),
        (_H + "block_sparse_moe.gate.weight",),
        (("experts", "hidden"),),
        Split.replicated,
        needs="w123_experts",
        norm=Norm.mlp,
    ),
    Row(
        (_EXPERTS + "local_experts.{E}.linear_fc1.weight", _EXPERTS + "linear_fc1.weight{E}"),
        (_H + "block_sparse_moe.experts.{E}.w1.weight", _H + "block_sparse_moe.experts.{E}.w3.weight"),
        (("expert_ffn", "hidden"), ("expert_ffn", "hidden")),
        Split.gate_up,
        needs="w123_experts",
        norm=Norm.mlp,
    ),
    Row(
        (_EXPERTS + "local_experts.{E}.linear_fc2.weight", _EXPERTS + "linear_fc2.weight{E}"),
        (_H + "block_sparse_moe.experts.{E}.w2.weight",),
        (("hidden", "expert_ffn"),),
        Split.row,
        needs="w123_experts",
    ),
    Row(("decoder.final_layernorm.weight",), ("model.norm.weight",), (("hidden",),), Split.replicated),
    Row(("output_layer.weight",), ("lm_head.weight",), (("vocab", "hidden"),), Split.vocab, needs="untied"),
    # a pipeline's last stage holds its own copy of tied embeddings
    Row(
        ("output_layer.weight",),
        ("model.embed_tokens.weight",),
        (("vocab", "hidden"),),
        Split.vocab,
        needs="tied",
        copy=True,
    ),
)
