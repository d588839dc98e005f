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
# interpolated: the sampler's, moved towards the policy, further for staler tokens (A-3PO)
Anchor = StrEnum("Anchor", "prox sampler interpolated")
Level = StrEnum("Level", "none token sequence turn prefix segment")
Aggregate = StrEnum("Aggregate", "product geometric")
Center = StrEnum("Center", "none top_logprobs")
Outside = StrEnum("Outside", "truncate zero")
# staleness: steps between the policy that sampled the token and the learner's; top_*: of the
# distributions at a token's prefix, from top logprobs
Stat = StrEnum(
    "Stat",
    "ratio k1 k2 k3 m2 abs tv binary_kl binary_kl_max staleness top_kl top_reverse_kl top_tv",
)
TOP_STATS = (Stat.top_kl, Stat.top_reverse_kl, Stat.top_tv)
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
# trained: those trained on; counted: also rejected ones that the denominator counts
KlOn = StrEnum("KlOn", "trained counted")
# reference: KL(pi, ref); sampler: KL(mu, pi); anchor: KL(a, pi)
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
    archive = "archive"  # the old folder is renamed
    # resume from the newest complete checkpoint; start a new run if there is none
    resume = "resume"


class AnswerFormat(StrEnum):
    text = "text"  # the answer, as the column has it
    # the final answer of a solution: after ####, in the last \boxed{}, or a whole number without
    # leading zeros; the first row of each set decides
    solution = "solution"


class RolloutSource(StrEnum):
    sampler = "sampler"  # reinforcement learning: responses are sampled from the policy
    dataset = "dataset"  # supervised warm start: responses are the data set's own answers


class History(StrEnum):
    # the chat template renders the conversation, which forks if that changes earlier turns
    template = "template"
    # a turn continues the exact tokens before it, even if the template would render others
    append = "append"


class Credit(StrEnum):
    outcome = "outcome"  # the sum of a conversation's rewards, on all of its turns
    turns = "turns"  # the return from a turn on, less the group's mean over conversations
    environment = "environment"  # the environment reports the advantage of each turn


class InFlight(StrEnum):
    # responses in flight finish with the old weights; the sync waits
    drain = "drain"
    interrupt = "interrupt"  # the sync happens between two tokens of a response


class Format(StrEnum):
    none = "none"  # BF16
    int8 = "int8"  # a scale per output channel and per token
    # INT4 values stored as INT8, for experiments on the effect of 4 bits; saves no memory
    int4 = "int4"
    fp8 = "fp8"  # e4m3, scales as int8's
    fp8_block = "fp8_block"  # e4m3, a scale per block of 128 x 128 weights


class KvCache(StrEnum):
    none = "none"  # BF16, as the activations
    fp8 = "fp8"  # scales are measured in the learner's forward pass and sent with the weights


class Sleep(StrEnum):
    none = "none"  # the engine stays awake
    offload = "offload"  # weights are kept in CPU memory
    discard = "discard"  # weights are dropped; the next sync sends all of them


class Offload(StrEnum):
    none = "none"  # nothing is moved
    optimizer = "optimizer"  # master weights and moments; memory of gradients is released


class Recompute(StrEnum):
    # the least recomputation with which an update fits the GPU by estimate: none, some layers, or
    # all
    auto = "auto"
    none = "none"
    selective = "selective"  # the modules in learner.megatron.recompute_modules
    full = "full"  # whole layers, from their inputs


class Wandb(StrEnum):
    none = "none"  # off
    auto = "auto"  # online with a key, offline without
    offline = "offline"
    online = "online"


class TrackerName(StrEnum):
    wandb = "wandb"
    tensorboard = "tensorboard"  # event files in the run folder
    mlflow = "mlflow"  # the server of MLFLOW_TRACKING_URI, or files in the run folder
    trackio = "trackio"  # a database in the run folder


class Forward(StrEnum):
    bf16 = "bf16"  # unquantized layers, in learner.precision
    # layers that are quantized in the sampler use its arithmetic
    as_sampler = "as_sampler"


class Router(StrEnum):
    own = "own"  # the learner's own routers
    # experts are those that the sampler chose, with the gate weights of the learner
    replay = "replay"


class Transport(StrEnum):
    file = "file"  # files in shared memory or on a shared disk
    ipc = "ipc"  # CUDA IPC between processes that share a GPU
    nccl = "nccl"  # NCCL between different GPUs


class Estimator(StrEnum):
    grpo = "grpo"  # (r - group mean) / group std
    dr_grpo = "dr_grpo"  # r - group mean
    rloo = "rloo"  # r - mean of the group's other responses
    reinforce_pp = "reinforce_pp"  # (r - batch mean) / batch std
    maxrl = "maxrl"  # (r - group mean) / group mean
    none = "none"  # advantage 1 everywhere, for the supervised warm start


@dataclass(frozen=True)
class AlarmSetting:
    on: bool = True
    stops: bool = False  # if true, the alarm stops the run; else it warns
    bound: float | None = None  # None: the rule's own (tracking/alarms.py)


def alarm_setting(value: Any) -> AlarmSetting | None:
    """Return the setting of an alarm from the value in `log.alarms`; None if it is invalid."""
    if value in (False, "off"):  # YAML reads a bare `off` as false
        return AlarmSetting(on=False)
    if value in ("warn", "stop"):
        return AlarmSetting(stops=value == "stop")
    action = "warn"
    if isinstance(value, Mapping) and len(value) == 1:
        ((action, value),) = value.items()
    if action in ("warn", "stop") and is_number(value) and value >= 0:
        return AlarmSetting(stops=action == "stop", bound=float(value))
    return None
