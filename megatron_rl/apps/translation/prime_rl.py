"""prime-rl's `trainer.loss` (DPPO, IPO, squared log-ratio to the sampler) as our `correction`."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.apps.translation.keys import Keys, Native, TranslationError
from megatron_rl.apps.translation.settings import flatten
from megatron_rl.config.schema import CorrectionConfig, Level, RejectRule, Stat

LOW = "dppo_mask_low"
HIGH = "dppo_mask_high"
IPO = "ipo_threshold"
KL = "kl_tau"
FACTOR = "adv_tau"
# algorithms, of which some tokens have another loss than trainer.loss
OTHER_LOSSES = (
    "echo",
    "opd",
    "opsd",
    "sft",
)


def prime_rl(keys: Keys) -> CorrectionConfig:
    for path, algorithm in _algorithms(keys.flat):
        if algorithm in OTHER_LOSSES:
            raise TranslationError(
                f"prime_rl: {path} is {algorithm!r}: its tokens have a loss that ours has not"
            )
    kind = keys.choice("type", "default", "default", "ipo", "custom")
    keys.refuse_if(kind == "custom", "type", "what a custom loss computes is not known here")
    keys.refuse_if(keys.number(FACTOR, 1.0) != 1.0, FACTOR, "factor")
    tau = _number(keys, KL, 1e-3)
    if tau:
        # tau d^2 of all tokens, those outside the trust region among them
        keys.goes_with(kl_to="sampler", kl_estimator="k2", kl_coef=2 * tau, kl_on="counted")
    keys.note("the ratio is to the sampler")
    rules = []
    low = 1.0
    high = 1.0
    if kind == "ipo":
        # what has moved at all leaves, and dppo then masks nothing: no two probabilities are
        # further apart than 1
        rules = [
            RejectRule(
                level=Level.token,
                stat=Stat.tv,
                high=_number(keys, IPO, 0.1),
            )
        ]
    else:
        low = _number(keys, LOW, 0.2)
        high = _number(keys, HIGH, 0.2)
    keys.goes_with(
        name="dppo",
        clip_low=low,
        clip_high=high,
        reduction="token_mean",
        params={"trust_region": "total_variation"},
    )
    return keys.centered(keys.bypass(*rules))


def _number(keys: Keys, name: str, default: float) -> float:
    value = keys.needed(name, "prime-rl", default)
    keys.refuse_if(value < 0, name, "prime-rl needs a number of 0 or more")
    return value


def _algorithms(flat: Native) -> Iterator[tuple[str, Any]]:
    """Algorithm settings of all environments together and of each."""
    for path, value in flat.items():
        if path.endswith("algo.type"):
            yield path, value
        for place, part in enumerate(value if isinstance(value, list) else ()):
            if isinstance(part, Mapping):
                yield from _algorithms(flatten(part, f"{path}[{place}]."))
