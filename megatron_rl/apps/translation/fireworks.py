"""Fireworks' fw-ai cookbook: `tis` (once `is_correction`), `anchor_logp` as our `correction`."""

from megatron_rl.apps.translation.keys import Keys, TranslationError, ratio_rule, weigh
from megatron_rl.config.schema import CorrectionConfig


def fireworks(keys: Keys) -> CorrectionConfig:
    for path in keys.flat:
        if ".tis." in f".{path}" and path not in keys.paths:
            raise TranslationError(f"fireworks: {path}: the cookbook reads recipe.rl.tis only")
    if keys.choice("anchor_logp", "old_policy", "old_policy", "rollout") == "rollout":
        return keys.bypass()
    keys.note_if(not keys.present, "default")
    cap = keys.positive("cap", 5.0) or 5.0
    level = keys.choice("level", "token", "token", "sequence")
    band = keys.positive("icepop_threshold")
    if level == "sequence":
        keys.refuse_if(band is not None, "icepop_threshold", "row_band")
        keys.note("clamps")
        return keys.correction(weigh(None, cap, "sequence", mean=True))
    if band is None:
        return keys.correction(weigh(None, cap))
    keys.refuse_if(band <= 1, "icepop_threshold", "expected a threshold above 1")
    if cap >= band:
        return keys.correction(weigh(1.0 / band, band, mask=True))
    keys.note_kl("the cookbook")
    keys.note_gspo("the cookbook")
    return keys.correction(weigh(None, cap), [ratio_rule(1.0 / band, band)])
