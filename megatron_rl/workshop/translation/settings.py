"""Reader of another project's settings: found wherever the user's file has them, and none silently ignored.

A file may be the section alone, a whole run's configuration, dotted overrides or flags. Everything is flattened to
dotted names first. What is not about correction is listed in a note, what may be is an error: a misspelt switch, or one
that is newer than this translator, must not be left out as if it changed nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatron_rl.workshop.translation.keys import Keys, Native, TranslationError, is_null

Removed = Mapping[str, str]  # a name that is no longer there -> what has taken its place
# what a removed setting holds when it is switched off
OFF = (None, False, -1, "", "null", "none", "disabled")
LEFT_OUT = "left out, as not about correction: "
RESOLVE = "resolve the configuration first"
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


def flatten(mapping: Native, prefix: str = "") -> dict[str, Any]:
    """Sections, dotted names and command-line flags as dotted names with underscores."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        path = prefix + str(name).lstrip("-+").replace("-", "_")
        inner = flatten(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
        for key, leaf in inner.items():
            if key in flat and flat[key] != leaf:
                raise TranslationError(f"{key} is given twice, as {flat[key]!r} and as {leaf!r}")
            flat[key] = leaf
    return flat


def last(path: str) -> str:
    return path.rpartition(".")[2]


def _switched_off(value: Any) -> bool:
    return (value.strip().lower() if isinstance(value, str) else value) in OFF


def _removed(framework: str, path: str, old: Removed) -> bool:
    """Whether it is a removed name; under the section of another loss it is that section's own."""
    return last(path) in old and LEFT_OUT_NAMES[framework].isdisjoint(path.split(".")[:-1])


def _read(framework: str, mapping: Native) -> dict[str, Any]:
    flat = flatten(mapping)
    if flat and all(path == "defaults" or path.startswith("hydra.") for path in flat):
        raise TranslationError(f"{framework}: {', '.join(flat)}: what the files it names set is not read; {RESOLVE}")
    return flat


def anywhere(
    framework: str, mapping: Native, known: Collection[str], common: Collection[str] = (), old: Removed | None = None
) -> Keys:
    """Keys of projects whose names say enough without their section; `common` are too short to look for typos of."""
    flat = _read(framework, mapping)
    used = {path for path in flat if last(path) in known}
    values: dict[str, Any] = {}
    for path in sorted(used):
        _set(framework, values, last(path), flat[path], path)
    keys = Keys(framework, values)
    keys.paths |= used
    _leave_out(keys, flat, used, set(known) - set(common), old or {}, known)
    return keys


def _set(framework: str, values: dict[str, Any], name: str, value: Any, path: str) -> None:
    if values.setdefault(name, value) != value:
        raise TranslationError(f"{framework}: {name} is given twice with different values, once at {path}")


def in_section(
    framework: str,
    mapping: Native,
    section: str,
    known: Collection[str],
    beside: Collection[str] = (),
    common: Collection[str] = (),
    old: Removed | None = None,
    bare: bool = True,
) -> Keys:
    """Keys of a section `section` (dotted), given in full, from any of its parents on, or (`bare`) as its keys.

    `beside` are full dotted names outside it that are read too. Names in `common` may mean something else
    in other sections; any other known name outside is an error.
    """
    flat, old = _read(framework, mapping), old or {}
    parts = section.split(".")
    names = [".".join(parts[place:]) for place in range(len(parts))]
    values: dict[str, Any] = {}
    used: set[str] = set()
    present = loose = False
    for path, value in flat.items():
        if path in names:
            if value not in (None, {}):
                raise TranslationError(f"{framework}: {path} is {value!r}: expected keys and values")
            present |= value is not None
            used.add(path)
            continue
        inside = next((path[len(name) + 1 :] for name in names if path.startswith(f"{name}.")), None)
        if inside is None and bare and path in known:
            inside, loose = path, True
        if inside is not None:
            present = True
        elif any(name == path or name.endswith(f".{path}") for name in beside):
            inside = last(path)
        elif not (_removed(framework, path, old) and _switched_off(value)):
            continue
        used.add(path)
        if inside is not None and not (inside in old and _switched_off(value)):
            _set(framework, values, inside, value, path)
    keys = Keys(framework, values, present)
    keys.paths |= used
    outside = {last(name) for name in beside}
    for name in values:
        if name not in known and name not in outside:
            raise _unknown(keys, name, known, old)
    rest = [path for path in flat if path not in used]
    if rest and not any("." in path for path in flat) and (loose or not used):
        raise _unknown(Keys(framework, flat), rest[0], set(known if bare else ()) | outside | {last(section)}, old)
    telling = set(known) - set(common)
    _leave_out(keys, flat, used, telling | outside - set(common) | {last(section)}, old, {*common, *section.split(".")})
    for path in rest:
        if last(path) in telling and last(section) not in path and flat[path] is not None:
            raise TranslationError(f"{framework}: {path}: {framework} reads it under {section} only")
    return keys


def _unknown(keys: Keys, name: str, known: Iterable[str], old: Removed) -> TranslationError:
    if name in old:
        return keys.error(name, f"no longer there; {old[name]}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return keys.error(name, f"unknown; {hint}")


def _leave_out(
    keys: Keys, flat: Native, used: Collection[str], telling: Collection[str], old: Removed, elsewhere: Collection[str]
) -> None:
    """Note what was not looked at; names in `elsewhere` are known without being looked for."""
    shown: dict[str, None] = {}
    for path in flat:
        if path in used:
            continue
        _refuse_unread(keys.framework, path, flat[path], telling, old, elsewhere)
        parts = path.split(".")
        heads = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        shown[next(head for head in heads if head == path or not any(u.startswith(f"{head}.") for u in used))] = None
    if "defaults" in flat:
        keys.note(f"defaults: what the files it names set is not read; {RESOLVE}")
    if shown:
        keys.note(f"{LEFT_OUT}{', '.join(_summary(list(shown), used))}")


def _refuse_unread(
    framework: str, path: str, value: Any, telling: Collection[str], old: Removed, elsewhere: Collection[str]
) -> None:
    """Refuses what looks like a mistyped, removed or new setting of the correction."""
    if _removed(framework, path, old) and not _switched_off(value):
        raise TranslationError(f"{framework}: {path}: no longer there; {old[last(path)]}")
    known = {*telling, *old, *elsewhere, *LEFT_OUT_NAMES[framework]}
    for part in path.split("."):
        if part in known:
            continue
        if close := difflib.get_close_matches(part, telling, n=1, cutoff=0.85):
            raise TranslationError(f"{framework}: {path}: unknown; did you mean {close[0]}?")
        if may_correct(part) and not is_null(value):
            near = difflib.get_close_matches(part, telling, n=1, cutoff=0.0)
            raise TranslationError(
                f"{framework}: {path}: unknown, and by its words it may be about correction: the nearest that is known "
                f"is {near[0]}; take it out if it is about something else"
            )


def _summary(paths: list[str], used: Collection[str]) -> list[str]:
    """The names, and where a section holds many of them the section but for what was read."""
    children: dict[str, list[str]] = {}
    for path in paths:
        children.setdefault(path.rpartition(".")[0], []).append(path)
    summary = []
    for parent, names in children.items():
        if not parent or len(names) < 4:
            summary += names
            continue
        inside = [path[len(parent) + 1 :].partition(".")[0] for path in used if path.startswith(f"{parent}.")]
        summary.append(f"{parent} (all but {', '.join(sorted(set(inside)))})")
    return sorted(summary)
