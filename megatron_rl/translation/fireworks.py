"""The fw-ai cookbook: `tis` and `anchor_logp`, at the top of a recipe's config or inside a provision file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.schema import Aggregate, CorrectionConfig, Level, Outside, RejectRule, Stat, WeightConfig
from megatron_rl.translation.keys import Translation, TranslationError, flatten, in_section
from megatron_rl.translation.shared import BYPASS

KEYS = ("cap", "level", "icepop_threshold")


def fireworks(mapping: Mapping[str, Any]) -> Translation:
    place = _place(mapping)
    keys = in_section(
        "fireworks", mapping, f"{place}tis", KEYS, beside=(f"{place}anchor_logp",), common=("cap", "level")
    )
    if keys.choice("anchor_logp", "old_policy", "old_policy", "rollout") == "rollout":
        return Translation(BYPASS, keys.notes)
    if not keys.present:
        keys.notes.append("there is no tis section: the cookbook's default is a cap of 5 per token")
    cap = keys.positive("cap", 5.0) or 5.0
    level = keys.choice("level", "token", "token", "sequence")
    band = keys.positive("icepop_threshold")
    rules = []
    if level == "sequence":
        if band is not None:
            raise keys.error("icepop_threshold", "the cookbook refuses it with level: sequence")
        keys.notes.append(
            "the cookbook clamps each log-ratio to +-20 before its mean: the same unless one exceeds that"
        )
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
    return Translation(CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=False), keys.notes)


def _place(mapping: Mapping[str, Any]) -> str:
    """The dotted sections above `tis` and `anchor_logp`, such as `recipe.rl.` in a provision file."""
    found = set()
    for path in flatten(mapping):
        parts = path.split(".")
        for name in ("tis", "anchor_logp"):
            if name in parts:
                found.add(".".join(parts[: parts.index(name)]))
    if len(found) > 1:
        raise TranslationError(f"fireworks: tis or anchor_logp in several places: {', '.join(sorted(found))}; keep one")
    place = found.pop() if found else ""
    return f"{place}." if place else ""
