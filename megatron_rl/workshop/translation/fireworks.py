"""The fw-ai cookbook: `tis` (before it `is_correction`) and `anchor_logp`, in a recipe's config or a provision file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.schema import Aggregate, Level, Outside, RejectRule, Stat, WeightConfig
from megatron_rl.workshop.translation.keys import BYPASS, Translation, TranslationError, gspo_tokens, keeps_kl
from megatron_rl.workshop.translation.settings import flatten, in_section

KEYS = ("cap", "level", "icepop_threshold")
FORMER = {"tis_cap": "cap", "tis_level": "level"}  # in `is_correction`, beside the clips of the loss
CLIPS = ("eps_clip", "eps_clip_high")


def fireworks(mapping: Mapping[str, Any]) -> Translation:
    place, section = _place(mapping)
    known = KEYS if section == "tis" else (*FORMER, *CLIPS)
    keys = in_section("fireworks", mapping, place + section, known, (f"{place}anchor_logp",), ("cap", "level", *CLIPS))
    keys.rename(FORMER)
    if any(keys.given(name) for name in CLIPS):
        keys.note("eps_clip and eps_clip_high are the loss's; they go with loss.clip_low and loss.clip_high")
    if keys.choice("anchor_logp", "old_policy", "old_policy", "rollout") == "rollout":
        return Translation(BYPASS, keys.notes)
    if not keys.present:
        keys.note("there is no tis section: the cookbook's default is a cap of 5 per token")
    cap = keys.positive("cap", 5.0) or 5.0
    level = keys.choice("level", "token", "token", "sequence")
    band = keys.positive("icepop_threshold")
    rules = []
    if level == "sequence":
        if band is not None:
            raise keys.error("icepop_threshold", "the cookbook refuses it with level: sequence")
        keys.note("the cookbook clamps each log-ratio to +-20 before its mean: the same unless one exceeds that")
        weight = WeightConfig(level=Level.sequence, aggregate=Aggregate.geometric, high=cap)
    elif band is None:
        weight = WeightConfig(level=Level.token, high=cap)
    elif band <= 1:
        raise keys.error("icepop_threshold", "expected a threshold above 1")
    elif cap >= band:
        weight = WeightConfig(level=Level.token, outside=Outside.zero, low=1.0 / band, high=band)
    else:
        weight = WeightConfig(level=Level.token, high=cap)
        rules.append(RejectRule(level=Level.token, stat=Stat.ratio, low=1.0 / band, high=band))
        keys.notes += [keeps_kl("the cookbook"), gspo_tokens("the cookbook")]
    return keys.translation(weight, rules)


def _place(mapping: Mapping[str, Any]) -> tuple[str, str]:
    """The dotted sections above the settings, such as `recipe.rl.` in a provision file, and their section's name."""
    found, sections = set(), set()
    for path in flatten(mapping):
        parts = path.split(".")
        for name in ("tis", "is_correction", "anchor_logp"):
            if name in parts:
                found.add(".".join(parts[: parts.index(name)]))
        sections |= {"tis"} & set(parts) | {"is_correction" for part in ("is_correction", *FORMER) if part in parts}
    if len(found) > 1 or len(sections) > 1:
        where = ", ".join(sorted(found if len(found) > 1 else sections))
        raise TranslationError(f"fireworks: the settings are in several places: {where}; keep one")
    place = found.pop() if found else ""
    return f"{place}." if place else "", sections.pop() if sections else "tis"
