"""prime-rl's `trainer.loss` (DPPO against the sampler) as our `correction`; its squared log-ratio is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.workshop.translation.keys import Keys, Native, Translation, TranslationError
from megatron_rl.workshop.translation.settings import flatten, in_section

SECTION = "trainer.loss"
LOW, HIGH, KL, FACTOR = "dppo_mask_low", "dppo_mask_high", "kl_tau", "adv_tau"
KEYS = ("type", LOW, HIGH, KL, FACTOR, "ipo_threshold", "import_path")
COMMON = ("type", "import_path")
REMOVED = {"teacher_tau": "an algorithm of its own (opd) has taken its place"}
OTHER_LOSSES = ("echo", "opd", "opsd", "sft")  # algorithms, of which some tokens have another loss than trainer.loss
KL_DEFAULT = 1e-3


def prime_rl(mapping: Native) -> Translation:
    settings = {path: value for path, value in flatten(mapping).items() if ".kwargs." not in f".{path}"}
    for path, algorithm in _algorithms(settings):
        if algorithm in OTHER_LOSSES:
            raise TranslationError(f"prime_rl: {path} is {algorithm!r}: its tokens have a loss that ours has not")
    keys = in_section("prime_rl", settings, SECTION, KEYS, common=COMMON, old=REMOVED)
    kind = keys.choice("type", "default", "default", "ipo", "custom")
    if kind == "custom":
        raise keys.error("type", "what a custom loss computes is not known here")
    if kind == "ipo":
        raise keys.error("type", "it drops tokens on both sides of its trust region, our dppo those that lead out")
    _refuse_kl(keys)
    if keys.number(FACTOR, 1.0) != 1.0:
        raise keys.error(FACTOR, "our losses have no factor on the advantage; set it to 1 and scale the learning rate")
    low, high = (0.2 if (mask := keys.number(name)) is None else mask for name in (LOW, HIGH))
    keys.note(
        "the ratio is to the sampler; goes with loss.name: dppo, loss.trust_region: total_variation, "
        f"loss.clip_low: {low:g}, loss.clip_high: {high:g}, loss.reduction: token_mean"
    )
    return keys.bypass()


def _refuse_kl(keys: Keys) -> None:
    """prime-rl has it unless told otherwise."""
    if keys.number(KL, KL_DEFAULT) == 0:
        return
    reason = "our losses have no squared log-ratio to the sampler; set it to 0 in prime-rl to train without"
    if not keys.given(KL):
        reason = f"it is not given and {KL_DEFAULT:g} by default: {reason}"
    raise keys.error(KL, reason)


def _algorithms(settings: Native) -> Iterator[tuple[str, Any]]:
    """Algorithm settings of all environments together and of each."""
    for path, value in settings.items():
        if path.endswith("algo.type"):
            yield path, value
        for place, part in enumerate(value if isinstance(value, list) else ()):
            if isinstance(part, Mapping):
                yield from _algorithms(flatten(part, f"{path}[{place}]."))
