"""Table of megatron-core's and Hugging Face's weights: names, shapes and how they are split.

Live sync, import, export and the tests all read `TABLE`; supporting another family means adding
rows (and its features to `shape.FAMILIES`). {L} is a layer, {E} an expert of the whole model.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Split(StrEnum):
    replicated = "replicated"
    column = "column"  # output rows, equal shares
    row = "row"  # input columns, equal shares
    vocab = "vocab"  # output rows, padded to equal shares
    # query, key, value rows interleaved by query group; Hugging Face has three tensors, or one
    qkv = "qkv"
    gate_up = "gate_up"  # each rank holds its gate rows, then its up rows; of two tensors, or one


class Norm(IntEnum):
    """The two norms of a layer, by what reads their output."""

    attention = 0
    mlp = 1


@dataclass(frozen=True)
class Row:
    """A kind of weight. {L} is a layer, {E} an expert; dims are names known to ModelShape.size."""

    megatron: tuple[str, ...]  # the local spec's name first, then Transformer Engine's aliases
    hf: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]  # the full shape of each hf tensor
    split: Split
    needs: str = ""  # feature of the model or layer; empty: always there
    copy: bool = False  # megatron holds a second copy: loaded, never exported
    # vectors: which of the layer's norms this is; matrices: which one's output they read
    norm: Norm | None = None

    @property
    def expert(self) -> bool:
        return "{E}" in self.megatron[0]


def _layer(
    megatron: str, hf: str, dims: str, split: Split, needs: str = "", norm: Norm | None = None
) -> Row:
    """A row of every layer: names as they are inside of one, dims of each hf tensor, or of all."""
    stored = tuple("model.layers.{L}." + name for name in hf.split(", "))
    shapes = tuple(tuple(shape.split()) for shape in dims.split(", "))
    spellings = tuple("decoder.layers.{L}." + name for name in megatron.split(", "))
    return Row(
        spellings,
        stored,
        shapes * (len(stored) // len(shapes)),
        split,
        needs,
        norm=norm,
    )


_FC1 = "mlp.experts.local_experts.{E}.linear_fc1.weight, mlp.experts.linear_fc1.weight{E}"
_FC2 = "mlp.experts.local_experts.{E}.linear_fc2.weight, mlp.experts.linear_fc2.weight{E}"
_QKV, _QKV_BIAS = (
    ", ".join(f"self_attn.{one}_proj.{kind}" for one in "qkv") for kind in ("weight", "bias")
)
_GATE_UP, _GATE_UP_BIAS = (
    f"mlp.gate_proj.{kind}, mlp.up_proj.{kind}" for kind in ("weight", "bias")
)
_SWIGLU = "mlp.experts.{E}.gate_proj.weight, mlp.experts.{E}.up_proj.weight"
_W13 = "block_sparse_moe.experts.{E}.w1.weight, block_sparse_moe.experts.{E}.w3.weight"

TABLE: tuple[Row, ...] = (
    Row(
        ("embedding.word_embeddings.weight",),
        ("model.embed_tokens.weight",),
        (("vocab", "hidden"),),
        Split.vocab,
    ),
    _layer(
        "input_layernorm.weight, self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        "hidden",
        Split.replicated,
        norm=Norm.attention,
    ),
    _layer(
        "self_attention.linear_qkv.weight",
        _QKV,
        "q hidden, kv hidden, kv hidden",
        Split.qkv,
        "separate_qkv",
        Norm.attention,
    ),
    _layer(
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        "qkv hidden",
        Split.qkv,
        "joined_qkv",
        Norm.attention,
    ),
    _layer("self_attention.linear_qkv.bias", _QKV_BIAS, "q, kv, kv", Split.qkv, "qkv_bias"),
    _layer(
        "self_attention.q_layernorm.weight",
        "self_attn.q_norm.weight",
        "head_dim",
        Split.replicated,
        "qk_norm",
    ),
    _layer(
        "self_attention.k_layernorm.weight",
        "self_attn.k_norm.weight",
        "head_dim",
        Split.replicated,
        "qk_norm",
    ),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden q", Split.row),
    _layer(
        "self_attention.linear_proj.bias",
        "self_attn.o_proj.bias",
        "hidden",
        Split.replicated,
        "proj_bias",
    ),
    _layer(
        "pre_mlp_layernorm.weight, mlp.linear_fc1.layer_norm_weight",
        "post_attention_layernorm.weight",
        "hidden",
        Split.replicated,
        norm=Norm.mlp,
    ),
    _layer(
        "mlp.linear_fc1.weight", _GATE_UP, "ffn hidden", Split.gate_up, "separate_mlp", Norm.mlp
    ),
    _layer(
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
        "gate_up hidden",
        Split.gate_up,
        "joined_mlp",
        Norm.mlp,
    ),
    _layer("mlp.linear_fc1.bias", _GATE_UP_BIAS, "ffn", Split.gate_up, "dense_mlp_bias"),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden ffn", Split.row, "dense_mlp"),
    _layer(
        "mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden", Split.replicated, "dense_mlp_bias"
    ),
    _layer(
        "mlp.router.weight",
        "mlp.gate.weight",
        "experts hidden",
        Split.replicated,
        "swiglu_experts",
        Norm.mlp,
    ),
    _layer(_FC1, _SWIGLU, "expert_ffn hidden", Split.gate_up, "swiglu_experts", Norm.mlp),
    _layer(
        _FC2, "mlp.experts.{E}.down_proj.weight", "hidden expert_ffn", Split.row, "swiglu_experts"
    ),
    _layer(
        "mlp.router.weight",
        "block_sparse_moe.gate.weight",
        "experts hidden",
        Split.replicated,
        "w123_experts",
        Norm.mlp,
    ),
    _layer(_FC1, _W13, "expert_ffn hidden", Split.gate_up, "w123_experts", Norm.mlp),
    _layer(
        _FC2,
        "block_sparse_moe.experts.{E}.w2.weight",
        "hidden expert_ffn",
        Split.row,
        "w123_experts",
    ),
    Row(
        ("decoder.final_layernorm.weight",),
        ("model.norm.weight",),
        (("hidden",),),
        Split.replicated,
    ),
    Row(
        ("output_layer.weight",),
        ("lm_head.weight",),
        (("vocab", "hidden"),),
        Split.vocab,
        needs="untied",
    ),
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
