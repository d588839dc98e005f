"""Fireworks' fw-ai cookbook: `tis` (formerly `is_correction`) and `anchor_logp` of a file as our
`correction`.
"""

from dataclasses import replace

from megatron_rl.workshop.translation.keys import (
    Native,
    Translation,
    TranslationError,
    ratio_rule,
    weigh,
)
from megatron_rl.workshop.translation.settings import flatten, settings
from megatron_rl.workshop.translation.table import table

CLIPS = ("eps_clip", "eps_clip_high")


def fireworks(mapping: Native) -> Translation:
    place, section = _place(mapping)
    names = table("fireworks").correction
    # beside the clips of the loss
    known = names.keys if section == "tis" else (*names.former, *CLIPS)
    names = replace(names, keys=known, section=place + section, beside=(f"{place}anchor_logp",))
    keys = settings("fireworks", mapping, names)
    keys.note_if(any(keys.given(name) for name in CLIPS), "clips")
    if keys.choice("anchor_logp", "old_policy", "old_policy", "rollout") == "rollout":
        return keys.bypass()
    keys.note_if(
        not keys.present, "there is no tis section: the cookbook's default is a cap of 5 per token"
    )
    cap = keys.positive("cap", 5.0) or 5.0
    level = keys.choice("level", "token", "token", "sequence")
    band = keys.positive("icepop_threshold")
    if level == "sequence":
        keys.refuse_if(
            band is not None, "icepop_threshold", "the cookbook refuses it with level: sequence"
        )
        keys.note("clamps")
        return keys.translation(weigh(None, cap, "sequence", mean=True), [])
    if band is None:
        return keys.translation(weigh(None, cap), [])
    keys.refuse_if(band <= 1, "icepop_threshold", "expected a threshold above 1")
    if cap >= band:
        return keys.translation(weigh(1.0 / band, band, mask=True), [])
    keys.note_kl("the cookbook")
    keys.note_gspo("the cookbook")
    return keys.translation(weigh(None, cap), [ratio_rule(1.0 / band, band)])


def _place(mapping: Native) -> tuple[str, str]:
    """The dotted sections above the settings, such as `recipe.rl.` in a provision file, and their
    section's name.
    """
    found = set()
    sections = set()
    former = table("fireworks").correction.former
    for parts in (path.split(".") for path in flatten(mapping)):
        named = [
            parts.index(name) for name in ("tis", "is_correction", "anchor_logp") if name in parts
        ]
        found |= {".".join(parts[:place]) for place in named}
        sections |= {"tis"} & set(parts) | {
            "is_correction" for part in ("is_correction", *former) if part in parts
        }
    if len(found) > 1 or len(sections) > 1:
        where = ", ".join(sorted(found if len(found) > 1 else sections))
        raise TranslationError(f"fireworks: the settings are in several places: {where}; keep one")
    place = found.pop() if found else ""
    return f"{place}.".removeprefix("."), sections.pop() if sections else "tis"
