"""Checks of config.json and recipe for what the learner cannot train; values of both. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config import foreign
from megatron_rl.config.bounds import did_you_mean
from megatron_rl.config.schema import ALL_LINEAR, LearnerSection, OptimSection
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.shape import HfConfig, Lora, ModelShape

# what each kind of scaling reads from config.json
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
FP8_KINDS = ("hybrid", "e4m3")
FP8_MULTIPLE = 16  # of both sides of a matrix that Transformer Engine multiplies in FP8
# of each kind of scales: what the tokens of a rank are a multiple of, for products that sum over
# tokens and for gathers
FP8_TOKENS = {"blockwise": 128, "tensorwise": FP8_MULTIPLE, "mxfp8": 32}
FP8_RECIPE = "blockwise"  # where a recipe names none; megatron-core would take delayed

# fields of TransformerConfig that follow from other keys of the recipe ...
_BY_KEY = {
    "tensor_model_parallel_size": "learner.tensor_parallel",
    "pipeline_model_parallel_size": "learner.pipeline_parallel",
    "expert_model_parallel_size": "learner.expert_parallel",
    "context_parallel_size": "learner.context_parallel",
    "bf16": "learner.precision",
    "fp16": "learner.precision",
    "params_dtype": "learner.precision",
    "pipeline_dtype": "learner.precision",
}
# ... from the model's config.json ...
_BY_MODEL = frozenset(
    {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "normalization",
        "gated_linear_unit",
        "activation_func",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_router_topk",
        "multi_latent_attention",
        "layernorm_epsilon",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
        "moe_layer_freq",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "rotary_interleaved",
        "window_size",
        "window_attn_skip_freq",
        "no_rope_freq",
        "mrope_section",
        "softmax_scale",
        "softmax_type",
        "qk_l2_norm",
        "attention_output_gate",
        "experimental_attention_variant",
        "glu_linear_offset",
        "activation_func_clamp_value",
        "layernorm_zero_centered_gamma",
        "apply_residual_connection_post_layernorm",
        "is_hybrid_model",
        "heterogeneous_block_specs",
    }
)
# ... or that the learner, or the table of weights, is not written for
_FIXED = frozenset(
    {
        "hierarchical_context_parallel_sizes",
        "hybrid_context_parallel",
        "max_seqlen_per_dp_cp_rank",
        "cp_comm_type",
        "variable_seq_lengths",
        "calculate_per_token_loss",
        "init_method",
        "output_layer_init_method",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "mtp_num_layers",
        "fp8_param",
        "fp4",
        "fp4_param",
        "moe_token_dispatcher_type",
        "init_model_with_meta_device",
        "test_mode",
        # kernels of Apex, buffers and graphs of one length, schedules that take the model apart
        "gradient_accumulation_fusion",
        "tp_comm_overlap",
        "enable_cuda_graph",
        "external_cuda_graph",
        "cuda_graph_impl",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
    }
)

# fields of OptimizerConfig and DistributedDataParallelConfig that the learner decides, or that it
# cannot follow
_OPTIMIZER_OWNED = frozenset(
    {
        "optimizer",
        "lr",
        "min_lr",
        "fp16",
        "bf16",
        "params_dtype",
        "use_distributed_optimizer",
        # sync, checkpoints and prox read weights right after an update
        "overlap_param_gather",
        "align_param_gather",
        "overlap_param_gather_with_optimizer_step",
        # gradients travel and add up in FP32
        "grad_reduce_in_fp32",
        "reduce_scatter_with_fp32_accumulation",
        "average_in_collective",
        # neither clipped nor in checkpoints
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        # learner.on_nonfinite
        "check_for_nan_in_grad",
        "check_for_large_grads",
        "num_distributed_optimizer_instances",
        "delay_wgrad_compute",
        "fp8_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "keep_fp8_transpose_cache",
        # FSDP
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
        "gradient_reduce_div_fusion",
        "suggested_communication_unit_size",
        "preserve_fp32_weights",
        "fsdp_double_buffer",
        "outer_dp_sharding_strategy",
        "fsdp_manual_registration",
    }
)
_TRANSFORMER = ("model_parallel_config.py", "transformer/transformer_config.py")
_OPTIMIZER = ("optimizer/optimizer_config.py",)
_REPLICAS = ("distributed/distributed_data_parallel_config.py",)
_CLASSES = (
    "ModelParallelConfig",
    "TransformerConfig",
    "OptimizerConfig",
    "DistributedDataParallelConfig",
)


def problems(shape: ModelShape, hf_config: HfConfig, learner: LearnerSection) -> list[str]:
    """Every reason for the learner to refuse a model or its own section."""
    return [
        *architecture(shape, hf_config),
        *numbers(shape, hf_config),
        *rope(hf_config),
        *experts(shape, hf_config, learner),
        *fp8_shares(shape, learner),
        *lora(shape, learner),
        *passed_through(learner, shape),
    ]


def architecture(shape: ModelShape, hf_config: HfConfig) -> Iterator[str]:
    def refuse(what: str, why: str) -> str:
        return f"model.path: {what} of config.json {why}; choose another model"

    biases = [
        key
        for key, of in (("attention_bias", "proj_bias"), ("mlp_bias", "dense_mlp_bias"))
        if shape.has(of)
    ]
    for key in ["use_bias"] if hf_config.get("use_bias") and biases else biases:
        yield refuse(
            f"{key}=true", "means biases beyond query, key and value, which are not supported"
        )
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        yield refuse(f"hidden_act={activation!r}", "is not supported, only 'silu' is")
    # off where it is not named
    switched = "use_sliding_window" in hf_config or shape.family.startswith("qwen")
    window = hf_config.get("use_sliding_window" if switched else "sliding_window")
    if window or "sliding_attention" in (hf_config.get("layer_types") or ()):
        yield refuse("sliding_window", "means sliding-window attention, which is not supported")
    if shape.dense_layers:
        yield refuse(
            "mlp_only_layers / decoder_sparse_step",
            "means dense layers among experts, not supported",
        )


def numbers(shape: ModelShape, hf_config: HfConfig) -> Iterator[str]:
    for key in ("rms_norm_eps", "num_experts_per_tok") if shape.experts else ("rms_norm_eps",):
        if hf_config.get(key) is None:  # each family of transformers has another default
            yield f"model.path: config.json of a {shape.family} model lacks {key}; take it from the model's authors"


def rope(hf_config: HfConfig) -> Iterator[str]:
    scaling = rope_settings(hf_config)
    family = hf_config.get("model_type")
    kind = scaling["kind"]
    if scaling["rope_theta"] is None:
        yield f"model.path: config.json of a {family} model lacks rope_theta; take it from the model's authors"
    if (
        scaling.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0
    ) != 1.0:
        yield "model.path: partial_rotary_factor of config.json is not supported, only 1.0 is; choose another model"
    if kind not in ROPE_KINDS:
        yield (
            f"model.path: rope_type {kind!r} of config.json is not supported (supported: "
            f"{', '.join(ROPE_KINDS)}); choose another model, or leave the scaling out where "
            "responses fit into the context without it"
        )
        return
    missing = [key for key in ROPE_KINDS[kind] if scaling.get(key) is None]
    if missing:
        yield f"model.path: rope_type {kind!r} of config.json lacks {', '.join(missing)}; add what the model needs"
    elif kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        yield (
            f"model.path: low_freq_factor of config.json is {scaling['low_freq_factor']}, which is "
            f"not below high_freq_factor, {scaling['high_freq_factor']}; fix it"
        )


def rope_settings(hf_config: HfConfig) -> dict[str, Any]:
    """The rotary embedding's keys under one roof, with its `kind` and `rope_theta`."""
    # newer configs keep everything in rope_parameters, older ones split it in two keys
    scaling = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    # older Llama configs leave it out and mean this; other families have defaults of their own
    missing = 10000.0 if hf_config.get("model_type") == "llama" else None
    theta = scaling.get("rope_theta") or hf_config.get("rope_theta") or missing
    return {
        **scaling,
        "rope_theta": theta,
        "kind": scaling.get("rope_type") or scaling.get("type") or "default",
    }


def experts(shape: ModelShape, hf_config: HfConfig, learner: LearnerSection) -> Iterator[str]:
    if not shape.experts:
        return
    if learner.tensor_parallel > 1 and not sequence_parallel(learner):
        yield (
            "learner.megatron.sequence_parallel=false: a mixture of experts with "
            f"learner.tensor_parallel={learner.tensor_parallel} needs true"
        )
    if learner.context_parallel > 1 and learner.megatron.get("moe_aux_loss_coeff"):
        yield (
            "learner.megatron.moe_aux_loss_coeff: with "
            f"learner.context_parallel={learner.context_parallel} each rank would balance its part "
            "of a sequence alone; remove it, or set learner.context_parallel=1"
        )
    chosen = experts_per_token(hf_config)
    if not 1 <= chosen <= shape.experts:
        yield f"model.path: num_experts_per_tok={chosen} of config.json, but there are {shape.experts} experts; fix it"
    elif chosen == 1 and renormalized(shape, hf_config):
        yield (
            "model.path: num_experts_per_tok=1 of config.json with renormalised weights makes "
            "every weight 1, so that the router could not learn; choose another model"
        )


def experts_per_token(hf_config: HfConfig) -> int:
    return int(hf_config.get("num_experts_per_tok", 2))


def choices_bytes(shape: ModelShape, hf_config: HfConfig) -> int:
    """Bytes per token of its routed experts in all layers (`learner.router: replay`)."""
    return shape.layers * experts_per_token(hf_config) * (1 if shape.experts <= 128 else 2)


def renormalized(shape: ModelShape, hf_config: HfConfig) -> bool:
    """True if the weights of the chosen experts add up to 1."""
    return bool(hf_config.get("norm_topk_prob", shape.family == "mixtral"))


def sequence_parallel(learner: LearnerSection) -> bool:
    """True if tensor-parallel ranks split the sequences; needs more than one rank."""
    return bool(learner.megatron.get("sequence_parallel")) and learner.tensor_parallel > 1


def fp8(learner: LearnerSection) -> str | None:
    return learner.megatron.get("fp8") or None


def fp8_recipe(learner: LearnerSection) -> str:
    """Recipe for the scales of FP8 products."""
    return learner.megatron.get("fp8_recipe") or FP8_RECIPE


def pack_multiple(learner: LearnerSection) -> int:
    """Divisor of every pack's length: ranks that share a pack, times the tiles of FP8 products."""
    tiles = FP8_TOKENS[fp8_recipe(learner)] if fp8(learner) else 1
    return tiles * (learner.tensor_parallel if sequence_parallel(learner) else 1)


def fp8_shares(shape: ModelShape, learner: LearnerSection) -> Iterator[str]:
    key = "learner.megatron.fp8"
    wanted = fp8(learner)
    recipe = fp8_recipe(learner)
    if wanted is None:
        return
    if wanted not in FP8_KINDS:
        yield f"{key}: {wanted}, expected one of {', '.join(FP8_KINDS)}, or null"
    if recipe == "delayed":
        yield (
            f"{key}_recipe: delayed scales are those of updates before; use one of {', '.join(FP8_TOKENS)}"
        )
    elif recipe not in FP8_TOKENS:
        yield f"{key}_recipe: {recipe}, expected one of {', '.join(FP8_TOKENS)}, or null ({FP8_RECIPE})"
    tp = learner.tensor_parallel
    etp = learner.megatron.get("expert_tensor_parallel_size", learner.tensor_parallel)
    sides = {
        "hidden size": shape.hidden,
        "queries of a rank": shape.size("q") // tp,
        "queries, keys and values of a rank": shape.size("qkv") // tp,
    }
    if any(shape.has("dense_mlp", layer) for layer in range(shape.layers)):
        sides["intermediate size of a rank"] = shape.ffn // tp
    if shape.experts:
        sides["experts' width of a rank"] = shape.expert_ffn // etp
    multiple = FP8_TOKENS["mxfp8"] if recipe == "mxfp8" else FP8_MULTIPLE
    for name, size in sides.items():
        if size % multiple:
            yield f"{key}: {wanted} wants multiples of {multiple}, but the {name} is {size}; leave it out"


def lora(shape: ModelShape, learner: LearnerSection) -> Iterator[str]:
    whole = replace(shape, lora=Lora(1, 1.0, (ALL_LINEAR,)))
    every = (
        param
        for param in params(replace(whole, experts=min(shape.experts, 1)))
        if adapters(param, whole)
    )
    known = dict.fromkeys(hf.split(".")[-2] for param in every for hf in param.hf)
    for target in learner.lora.targets if learner.lora.rank else ():
        if target not in (*known, ALL_LINEAR):
            hint = did_you_mean(target, known, "did you mean {}? ")
            yield (
                f"learner.lora.targets: {target}, which no linear layer of a {shape.family} model "
                f"is called; {hint}there are {', '.join(known)}, and {ALL_LINEAR} for all of them"
            )


def passed_through(learner: LearnerSection, shape: ModelShape) -> Iterator[str]:
    given = learner.megatron
    owned = {
        key: f"follows from {key_of_ours}; set that, and remove this"
        for key, key_of_ours in _BY_KEY.items()
    }
    owned |= dict.fromkeys(_BY_MODEL, "follows from the model's config.json; remove it")
    owned |= dict.fromkeys(_FIXED, "the learner is written for one value of it; remove it")
    yield from _passed("learner.megatron", "TransformerConfig", given, _TRANSFORMER, owned)

    rest = [key for key in ("recompute_method", "recompute_num_layers") if given.get(key) is None]
    if given.get("recompute_granularity") == "full" and rest:
        yield (
            f"learner.megatron.recompute_granularity: full without {' and '.join(rest)}; set "
            "learner.recompute=full in its place"
        )
    if given.get("apply_rope_fusion") and shape.has("rotary_pairs"):
        yield (
            f"learner.megatron.apply_rope_fusion: true, but {shape.family} turns pairs of "
            "neighbouring channels, and the fused kernel for packs turns halves; remove it"
        )


def optimizer_fields(optim: OptimSection) -> Iterator[str]:
    """Problems with fields of OptimizerConfig or DistributedDataParallelConfig."""
    owned = dict.fromkeys(_OPTIMIZER_OWNED, "is set by the learner itself; remove it")
    classes = "OptimizerConfig or DistributedDataParallelConfig"
    yield from _passed("optim.megatron", classes, optim.megatron, _OPTIMIZER + _REPLICAS, owned)


def _passed(
    prefix: str,
    name: str,
    given: Mapping[str, Any],
    files: tuple[str, ...],
    owned: Mapping[str, str],
) -> Iterator[str]:
    for key in sorted(owned.keys() & given.keys()):
        yield f"{prefix}.{key}: {owned[key]}"
    known = foreign.fields_of("megatron.core", files, _CLASSES)
    assert known is not None
    rest = given.keys() - owned.keys()
    yield from foreign.schema_errors(prefix, f"megatron-core's {name}", rest, known)
