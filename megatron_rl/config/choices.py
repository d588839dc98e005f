"""Enums of keys that take one of a few words (format, estimator, ...) and of alarms; reads a
recipe's alarm setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from megatron_rl.config.bounds import is_number
from megatron_rl.loss.table import LOSSES

# `raise` and `continue` are Python keywords and cannot name a member; their values are what recipes
# write

ModelInit = StrEnum("ModelInit", "pretrained random")
LongPrompts = StrEnum("LongPrompts", "error drop")
Precision = StrEnum("Precision", "bf16 fp32")
OnNonFinite = StrEnum(
    "OnNonFinite", {"raise_": "raise", "skip": "skip", "skip_and_dump": "skip_and_dump"}
)
Device = StrEnum("Device", "auto cpu cuda")
Decay = StrEnum("Decay", "constant linear cosine")
# interpolated: between sampler and policy, the nearer to the policy the staler the token (A-3PO)
Anchor = StrEnum("Anchor", "prox sampler interpolated")
Level = StrEnum("Level", "none token sequence turn prefix")
Aggregate = StrEnum("Aggregate", "product geometric")
Outside = StrEnum("Outside", "truncate zero")
# staleness: updates between the policy that wrote the token and the learner's
Stat = StrEnum("Stat", "ratio k1 k2 k3 m2 abs tv binary_kl binary_kl_max staleness")
# mean of a ratio: the geometric one
Reduce = StrEnum("Reduce", "sum mean max min")
When = StrEnum("When", "negative_advantage")
NonFinite = StrEnum(
    "NonFinite",
    {"drop": "drop", "one": "one", "zero": "zero", "reject": "reject", "raise_": "raise"},
)
Reduction = StrEnum(
    "Reduction",
    "token_mean seq_mean_token_mean seq_mean_token_sum seq_mean_token_sum_norm prompt_mean",
)
Divergence = StrEnum("Divergence", "k1 k2 k3 abs")
TrustRegion = StrEnum("TrustRegion", "total_variation binary_kl")
KlOn = StrEnum("KlOn", "trained counted")
KlTo = StrEnum("KlTo", "reference sampler anchor")
Alarm = StrEnum(
    "Alarm",
    "mismatch probe ess non_finite entropy reward_errors truncated length accuracy failed_saves",
)
if TYPE_CHECKING:
    LossName = str
else:
    LossName = StrEnum("LossName", list(LOSSES), module=__name__)


class IfExists(StrEnum):
    refuse = "refuse"  # an error
    archive = "archive"  # it is moved aside
    resume = "resume"  # go on from the newest whole checkpoint; start where there is nothing


class RolloutSource(StrEnum):
    sampler = "sampler"  # reinforcement learning: the policy answers
    dataset = "dataset"  # supervised warm start: the data set's own answers


class History(StrEnum):
    # as the chat template writes the conversation: it forks where that changes what was said
    template = "template"
    # a turn goes on behind the exact tokens before it, even where the template would not have those
    append = "append"


class Credit(StrEnum):
    outcome = "outcome"  # the sum of a session's rewards, on all of its turns
    turns = "turns"  # what was earned from a turn on, less the group's mean of whole sessions
    environment = "environment"  # the advantage that the environment says of each turn


class InFlight(StrEnum):
    # answers that are begun end with the weights that they began with; the update waits
    drain = "drain"
    interrupt = "interrupt"  # the update comes between two of their tokens


class Format(StrEnum):
    none = "none"  # BF16
    int8 = "int8"  # each output channel and each token with a scale of its own
    # INT4 values in INT8's place, for experiments: what four bits do to a policy; no byte is saved
    int4 = "int4"
    fp8 = "fp8"  # e4m3, scales as int8's
    fp8_block = "fp8_block"  # e4m3, a scale for each block of 128 x 128 weights


class KvCache(StrEnum):
    none = "none"  # as the weights' activations: BF16
    fp8 = "fp8"  # scales measured on the learner's forward pass, sent with the weights


class Sleep(StrEnum):
    none = "none"  # it stays as it is
    offload = "offload"  # weights wait on the host
    discard = "discard"  # weights are given up: the next sync brings all of them


class Offload(StrEnum):
    none = "none"  # all stays
    optimizer = "optimizer"  # its masters and moments; gradients' memory is given back


class Recompute(StrEnum):
    # the least with which an update fits the GPU by the plan: nothing, some layers, or all
    auto = "auto"
    none = "none"
    selective = "selective"  # the parts of each layer that learner.megatron.recompute_modules names
    full = "full"  # each layer, from its input


class Wandb(StrEnum):
    none = "none"  # it is not
    auto = "auto"  # online with a key, offline without
    offline = "offline"
    online = "online"


class Forward(StrEnum):
    bf16 = "bf16"  # plain layers, in learner.precision
    # linear layers that the sampler holds quantized are computed as it computes them
    as_sampler = "as_sampler"


class Router(StrEnum):
    own = "own"  # the learner's routers choose
    # tokens go to the experts that the sampler has chosen, with the weights of the learner's gate
    replay = "replay"


class Transport(StrEnum):
    file = "file"  # through files, in memory or on a shared disk
    ipc = "ipc"  # between processes that share a GPU
    nccl = "nccl"  # between GPUs


class Estimator(StrEnum):
    grpo = "grpo"  # less the group's mean, over its deviation
    dr_grpo = "dr_grpo"  # less the group's mean
    rloo = "rloo"  # less the others' mean
    reinforce_pp = "reinforce_pp"  # less the batch's mean, over its deviation
    maxrl = "maxrl"  # less the group's mean, over that mean
    none = "none"  # advantage 1 everywhere: the supervised warm start


@dataclass(frozen=True)
class AlarmSetting:
    on: bool = True
    stops: bool = False  # ends the run; else it warns
    bound: float | None = None  # None: the rule's own (tracking/alarms.py)


def alarm_setting(value: Any) -> AlarmSetting | None:
    """What a recipe's `log.alarms` says of one alarm; None where that cannot be read."""
    if value in (False, "off"):  # YAML takes a bare `off` for false
        return AlarmSetting(on=False)
    if value in ("warn", "stop"):
        return AlarmSetting(stops=value == "stop")
    action = "warn"
    if isinstance(value, Mapping) and len(value) == 1:
        ((action, value),) = value.items()
    if action in ("warn", "stop") and is_number(value) and value >= 0:
        return AlarmSetting(stops=action == "stop", bound=float(value))
    return None
