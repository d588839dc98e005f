"""Which unread names of another project may be about correction, and which ones are known to be about something else.

A name that is suspect by its words and not listed here is an error: a misspelt switch, or one that is newer than this
translator, must not be left out as if it changed nothing.
"""

from __future__ import annotations

import re

# acronyms stay whole, camel case comes apart
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SUSPECT = re.compile(r"is|tis|rs|mis|icepop|opsm|kl|veto|correction|importance|(clip|loss|mask|stale)[a-z]*")

# of losses, optimizers and layers, in most projects by the same name
EVERYWHERE = """
    attention_mask calculate_per_token_loss clip_grad clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low cliprange
    cliprange_value cross_entropy_loss_fusion dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss eps_clip eps_clip_c
    eps_clip_high eps_clip_low grad_clip gradient_clipping initial_loss_scale is_critic kl_coef kl_ctrl kl_estimator
    kl_loss_coef kl_loss_type kl_penalty loss_agg_mode loss_fn loss_mask loss_mode loss_reduction loss_scale
    loss_scale_window loss_type loss_weight masked_softmax_fusion min_loss_scale moe_aux_loss_coeff moe_z_loss_coeff
    mtp_loss_scaling_factor no_check_for_nan_in_loss_and_grad no_masked_softmax_fusion policy_loss policy_loss_type
    ppo_kl_coef reset_attention_mask reward_clip router_aux_loss_coef target_kl tp_comm_atomic_rs tp_comm_split_rs
    use_kl_in_reward use_kl_loss value_clip
"""
# beside these, what each project's own definitions and recipes have
OWN = {
    "verl": """
        account_for_loss_in_pipeline_split clip_cov_lb clip_cov_ratio clip_cov_ub cross_entropy_loss_implementation
        distillation_loss distillation_loss_coef is_composition kl_cov_ratio load_balancing_loss_implementation
        loss_max_clamp loss_scale_factor loss_settings policy_loss_mode staleness_threshold
    """,
    "skyrl": """
        cispo_eps_clip_high cispo_eps_clip_low clip_cov clip_cov_lb clip_cov_ub entropy_loss_coef kl_cov kl_cov_frac
        kl_estimator_type kl_target loss_chunk_size max_staleness_steps mtp_loss_chunk_size mtp_loss_topk
        mtp_loss_weight use_entropy_loss vision_is_active
    """,
    "trl": """
        assistant_only_loss completion_only_loss heartbeat_stale_after_s importance_sampling_level loss_weights
        mask_truncated_completions max_staleness parallelism_config_sp_seq_length_is_variable reward_clip_range
        use_liger_loss
    """,
    "nemo_rl": """
        advantage_clip_high advantage_clip_low ce_loss_scale do_not_average_loss dynamic_loss_scaling
        exclude_mask_token_from_logits fuse_loss gold_loss higher_is_better is_async is_mx is_trajectory_collection
        is_vlm kd_loss_mode kl_input_clamp_value kl_loss_weight kl_output_clamp_value kl_type mask_token_id
        max_correction_turns max_staleness_versions max_weight_staleness_versions mixed_kl_weight preference_loss_weight
        ratio_clip_c ratio_clip_max ratio_clip_min reference_policy_kl_type reverse_kl sample_mask_field
        scale_loss_by_dp_cp_size sft_loss_weight should_mask_flagged_samples token_level_loss token_mask_field
        use_linear_ce_fusion_loss value_cliprange value_loss value_loss_fn value_loss_scale xtoken_loss
    """,
    "areal": """
        acceleration_ratio_clip_max c_clip distill_loss_weight eps_clip_higher kl_ctl mask_no_eos_with_zero
        mask_observations overturn_masking parallel_clip_max parallel_ratio_clip_max rl_loss_weight use_sapo_loss
    """,
    "slime": """
        ci_disable_kl_checker custom_loss_function_path custom_pg_loss_reducer_function_path loss_mask_type opd_kl_coef
        recompute_loss_function
    """,
    "openrlhf": """
        aux_loss_coef clip_range compute_fp32_loss_enable dual_clip eps_clip_low_high kl margin_loss_enable
        nll_loss_coef
    """,
    "fireworks": """
        grad_clip_norm kl_beta kl_discount_factor kl_penalty_coef kl_reference_base_model loss_fn_config loss_method
        loss_name mask_prompt opd_loss_scale renderer_name_is_resolved server_loss_config
    """,
    "prime_rl": "action_loss_type",
}
LEFT_OUT_NAMES = {framework: frozenset(f"{EVERYWHERE} {names}".split()) for framework, names in OWN.items()}


def may_correct(name: str) -> bool:
    """Whether a name, by one of its words, may be a setting of a rollout correction."""
    return any(SUSPECT.fullmatch(word.lower()) for word in WORD.findall(name))
