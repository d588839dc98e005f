"""The learner's megatron-core GPT model: config from config.json and the recipe, a pipeline stage
without weights, and its forward pass, from a pack to hidden states or, on the last stage, to scores
of response tokens.

S positions of a pack, H hidden width, N response tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rl.learner.modules import cpu  # before megatron

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_rl.config.schema import LearnerSection, Precision
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules.experts import mixture
from megatron_rl.learner.modules.head import LogprobOutput, LogprobRequest, everyones, scores
from megatron_rl.learner.modules.layers import (
    UNROUNDED,
    PackedAttention,
    PackedRows,
    RMSNorm,
    SwiGLU,
    add,
    rotary,
)
from megatron_rl.learner.modules.linear import ColumnLinear, RowLinear, widen
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.models.mapping import find, global_name
from megatron_rl.models.model import Model
from megatron_rl.models.shape import HfConfig, ModelShape

if cpu.ON_CPU:
    # megatron-core takes it from no specification
    attention.apply_rotary_pos_emb = rotary


def transformer_config(model: Model, learner: LearnerSection) -> TransformerConfig:
    """megatron-core's config: what config.json and the learner's section say."""
    shape = model.shape
    found = limits.problems(shape, model.hf_config, learner)
    if found:
        raise ValueError("\n".join(found))
    if cpu.ON_CPU and limits.fp8(learner):
        raise ValueError(
            f"learner.megatron.fp8={limits.fp8(learner)} needs CUDA and Transformer Engine: leave "
            "it out here"
        )
    chunks = learner.virtual_pipeline
    if learner.precision is Precision.bf16:
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    fields: dict[str, Any] = {
        **_architecture(shape, model.hf_config),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": learner.precision is Precision.bf16,
        "tensor_model_parallel_size": learner.tensor_parallel,
        "pipeline_model_parallel_size": learner.pipeline_parallel,
        # interleaved chunks send both ways at once: in one batch of two neighbours the two could be
        # swapped
        "overlap_p2p_comm": chunks is not None,
        "batch_p2p_comm": chunks is None,
        "context_parallel_size": learner.context_parallel,
        "expert_model_parallel_size": learner.expert_parallel,
        "variable_seq_lengths": True,  # packs differ in length
        "moe_token_dispatcher_type": "alltoall",  # the only one that allows it
        "calculate_per_token_loss": True,  # megatron-core then averages nothing by itself
        # weights are always loaded; skipping initialization altogether would also skip the marks
        # that say which parameters are split, and the gradient norm would miss shards
        "init_method": _blank,
        "output_layer_init_method": _blank,
        **(_cpu_fields() if cpu.ON_CPU else _device_fields(shape)),
        **learner.transformer,
        **({"fp8_recipe": limits.fp8_recipe(learner)} if limits.fp8(learner) else {}),
        "sequence_parallel": limits.sequence_parallel(learner),
    }
    return TransformerConfig(**fields)


def _architecture(shape: ModelShape, hf_config: HfConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "add_bias_linear": False,
        "add_qkv_bias": shape.has("qkv_bias"),
        "qk_layernorm": shape.has("qk_norm"),
        "rotary_interleaved": shape.has("rotary_pairs"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(hf_config.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if shape.experts:
        fields |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_router_topk": limits.experts_per_token(hf_config),
            # a softmax over the chosen logits is the softmax over all, renormalised over the chosen
            "moe_router_pre_softmax": not limits.renormalized(shape, hf_config),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": not cpu.ON_CPU,
        }
    return fields


def _cpu_fields() -> dict[str, Any]:
    """Settings on CPUs: CUDA-only kernels stay off; the activation is our own module."""
    off = (
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
    )
    return {
        **dict.fromkeys((*off, "apply_rope_fusion", "persist_layer_norm"), False),
        "use_cpu_initialization": True,
        "use_te_activation_func": True,
    }


def _device_fields(shape: ModelShape) -> dict[str, Any]:
    """Settings of GPUs: one kernel for what would be several; sums of gradients inside the products
    would need Apex.
    """
    return {
        **dict.fromkeys(("bias_dropout_fusion", "bias_activation_fusion"), True),
        "apply_rope_fusion": not shape.has(
            "rotary_pairs"
        ),  # the kernel for packs rotates halves, regardless of the setting
        "gradient_accumulation_fusion": False,
        **({"moe_permute_fusion": True} if shape.experts else {}),
    }


def _blank(weight: Tensor) -> Tensor:
    """Zero a weight: padding rows are never loaded, and 0 times garbage would reach gradients."""
    with torch.no_grad():
        return weight.zero_()


def rope_frequencies(hf_config: HfConfig, head_dim: int) -> Tensor:
    """Rotary frequencies per channel pair, with the scaling that config.json asks for."""
    rope = limits.rope_settings(hf_config)
    frequencies = 1.0 / float(rope["rope_theta"]) ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    )
    if rope["kind"] == "default":
        return frequencies
    factor = float(rope["factor"])
    if rope["kind"] == "linear":
        return frequencies / factor
    # llama3: long waves are stretched, short ones kept, those between blended
    old_length = float(rope["original_max_position_embeddings"])
    low = float(rope["low_freq_factor"])
    high = float(rope["high_freq_factor"])
    turns = old_length * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / factor)


class PolicyModel(GPTModel):
    """GPTModel over packs: logits come only for the positions that predict response tokens."""

    # set by tools that inspect the output layer: materialize all logits, at any size
    holds_logits = False
    adapted = False  # the embedding is frozen, and gradients go to adapters behind it

    def forward(self, pack: Pack, asked: LogprobRequest) -> Tensor | LogprobOutput:
        """LogprobOutput of response tokens on the last pipeline stage, else hidden states [S, 1, H]."""
        if self.pre_process:
            hidden_S1H = self.embedding(pack.tokens_S[None], pack.positions_S[None])
        else:
            hidden_S1H = None
        if self.adapted and hidden_S1H is not None and torch.is_grad_enabled():
            hidden_S1H.requires_grad_()  # or what is recomputed in backward would have no gradient
        packed, angles = self._packed(pack)
        hidden_S1H = self.decoder(
            hidden_states=hidden_S1H,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=packed,
        )
        if not self.post_process:
            # kept until backward, and read by no norm here
            hidden_S1H.__dict__.pop(UNROUNDED, None)
            return hidden_S1H
        if self.config.sequence_parallel:
            # every rank sends all its logits' gradient through the output layer, which sums them
            hidden_S1H = gather_from_sequence_parallel_region(
                hidden_S1H, tensor_parallel_output_grad=False
            )
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = None
        hidden_N1H = hidden_S1H.index_select(0, pack.logit_index_N)
        return everyones(
            scores(self.output_layer, hidden_N1H, weight, pack, asked, self.holds_logits), pack
        )

    def _packed(self, pack: Pack) -> tuple[PackedSeqParams, Tensor]:
        if cpu.ON_CPU:
            # of all positions, on any rank
            angles = self.rotary_pos_emb(pack.longest, packed_seq=True)
            return PackedRows(pack), angles[pack.positions_S]
        starts = pack.starts
        longest = pack.longest
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return params, self.rotary_pos_emb(pack.longest, packed_seq=True)


def build(
    model: Model, config: TransformerConfig, *, first: bool, last: bool, chunk: int | None = None
) -> PolicyModel:
    """Build a pipeline stage (or one chunk of it) with weights not yet loaded."""
    shape = model.shape
    policy = PolicyModel(
        config,
        _layers(config, chunk),
        vocab_size=model.layout.padded_vocab(shape.vocab),
        max_sequence_length=int(model.hf_config.get("max_position_embeddings", 32768)),
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        vp_stage=chunk,
    )
    mark_experts(policy, shape)
    frequencies = rope_frequencies(model.hf_config, shape.head_dim)
    policy.rotary_pos_emb.inv_freq = frequencies.to(policy.rotary_pos_emb.inv_freq.device)
    if last and model.head is Precision.fp32 and config.params_dtype is torch.bfloat16:
        widen(policy.output_layer)
    if last and config.sequence_parallel:
        # it sees whole, already gathered rows: see PolicyModel.forward
        policy.output_layer.sequence_parallel = False
        policy.output_layer.allreduce_dgrad = True
    return policy


def mark_experts(policy: torch.nn.Module, shape: ModelShape) -> None:
    """Mark experts' weights as split, which Transformer Engine's grouped ones are not (2.20): on
    all tensor-parallel ranks but the first megatron-core would take them for copies, and leave them
    out of the gradient's norm.
    """
    for name, parameter in policy.named_parameters():
        if find(global_name(name, 0, 0), shape).row.expert:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _layers(
    config: TransformerConfig, chunk: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    if not cpu.ON_CPU:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    linear = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear, activation_func=SwiGLU)
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention_parts = SelfAttentionSubmodules(
        linear_qkv=ColumnLinear,
        core_attention=PackedAttention,
        linear_proj=RowLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention_parts,
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mixture(linear)
            if config.num_moe_experts
            else ModuleSpec(module=MLP, submodules=linear),
            mlp_bda=add,
        ),
    )
    layers = [layer] * get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
