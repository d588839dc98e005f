"""Check whether a recipe needs a prox pass (a forward pass over the batch before its first update),
and which keys require it.

A single update's own forward pass gives the same logprobs, too late only for what has to be known
of the whole batch before the first gradient.
"""

from collections.abc import Iterator

from megatron_rl.config.choices import TOP_STATS, Anchor, Stat
from megatron_rl.config.objective import CorrectionConfig, LearnerSection, LossConfig
from megatron_rl.config.sampling import RolloutSection
from megatron_rl.loss.table import LOSSES

# of learner.megatron: with them, no two forward passes are the same
DRAWS = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def whole_batch_terms(correction: CorrectionConfig) -> Iterator[str]:
    """Keys of a correction by which one token's weight, mask or denominator depends on the logprobs
    of others' rows.
    """
    if correction.weight.target_ess is not None:
        yield "correction.weight.target_ess"
    if correction.weight.normalize:
        yield "correction.weight.normalize"
    for place, rule in enumerate(correction.reject):
        if rule.stat == Stat.staleness:  # which looks at no logprob
            continue
        if rule.budget is not None:
            yield f"correction.reject[{place}].budget"
        elif rule.stat in TOP_STATS:
            yield f"correction.reject[{place}].stat"
        elif correction.renormalize or (correction.rebaseline and rule.when is None):
            yield f"correction.reject[{place}]"


def prox_readers(
    correction: CorrectionConfig, loss: LossConfig, learner: LearnerSection
) -> list[str]:
    """Yield keys that require a separate pass with `anchor: prox`; none: the update's forward pass
    suffices.
    """
    found = list(whole_batch_terms(correction))
    if learner.n_minibatches > 1:
        found.append("learner.n_minibatches")
    if LOSSES[loss.name].selects:
        found.append("loss.name")
    return found + [f"learner.megatron.{name}" for name in DRAWS if learner.megatron.get(name)]


def makes_prox_pass(
    correction: CorrectionConfig, loss: LossConfig, learner: LearnerSection, rollout: RolloutSection
) -> bool:
    return anchored_to_learner(correction, rollout) and bool(
        prox_readers(correction, loss, learner)
    )


def anchored_to_learner(correction: CorrectionConfig, rollout: RolloutSection) -> bool:
    """True where the loss is anchored to the learner's logprobs, not the sampler's; false for a
    data set's answers.
    """
    return correction.anchor == Anchor.prox and not rollout.supervised
