"""Layout of learner, sampler and cluster from another project's sizes; accounts of its keys."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.apps.translation.table import shared
from megatron_rl.config.plain_yaml import CONF

MOST_RANKS = 4096
Values = dict[str, Any]  # by our key, or by a fact with its =


@dataclass
class Accounts:
    """Accounts of each key of a file, and notes for the comments of the translated recipe."""

    translated: list[str] = field(default_factory=list)
    not_needed: dict[str, list[str]] = field(default_factory=dict)  # reason -> their keys
    unknown: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # their key with its value -> why it is not here
    missing: dict[str, str] = field(default_factory=dict)

    def note(self, sentence: str, **fields: Any) -> None:
        """A sentence of `shared.yaml`, by its word."""
        self.notes.append(shared()["says"][sentence].format(**fields))

    def lacks(self, what: str, sentence: str) -> None:
        self.missing[what] = shared()["says"][sentence]


def ranks(values: Values, accounts: Accounts) -> None:
    """Sizes that are written as one word, such as fsdp:d4p1t1 or sglang.d4t2+d8."""
    both = str(values.get("=allocation") or "").split("+")
    words = {
        "sampler": values.get("=sampler_ranks") or both[0],
        "learner": values.get("=learner_ranks") or both[-1],
    }
    for role, word in words.items():
        if not word:
            continue
        # six digits are too many
        found = re.findall(r"([dptce])(\d{1,6})", str(word).rsplit(":", 1)[-1])
        sizes = dict.fromkeys("dptce", 1) | {kind: int(digits) for kind, digits in found}
        if not found or not all(1 <= one <= MOST_RANKS for one in sizes.values()):
            accounts.lacks(f"sizes of the {role}: {word}", "no_sizes")
            continue
        values[f"={role}_gpus"] = math.prod(sizes[kind] for kind in "dptc")
        values[f"{role}.tensor_parallel"] = sizes["t"]
        if role == "learner":
            values |= {
                "learner.pipeline_parallel": sizes["p"],
                "learner.expert_parallel": sizes["e"],
                "learner.context_parallel": sizes["c"],
                "=sharded": "fsdp" in str(word),
            }


def layout(values: Values, accounts: Accounts) -> None:
    nodes = values.get("=nodes", 1)
    gpus = values.get("=gpus", 8)
    tensor = values.get("learner.tensor_parallel", 1)
    stages = values.get("learner.pipeline_parallel", 1)
    engine = values.get("sampler.tensor_parallel", 1)
    ahead = values.get("rollout.max_staleness")
    own = values.get("=sampler_gpus") or values.get("=sampler_nodes", 0) * gpus
    apart = ahead or values.get("=shared") is False
    if not own and apart:
        own = values.get("=sampler_engines", 0) * engine
    if values.get("=shared") and not ahead:  # asynchronous engines have their own GPUs
        own = 0
    elif not own and ahead:
        accounts.lacks(
            f"rollout.max_staleness: {values.pop('rollout.max_staleness')} on shared GPUs",
            "never_sleeps",
        )
    learner = values.get("=learner_gpus", nodes * gpus)
    if own:  # beside those of the learner
        if values.get("=total") and "=learner_gpus" not in values:
            learner = max(1, nodes * gpus - own)
        all_gpus = learner + own
        nodes, gpus = (1, all_gpus) if all_gpus <= 8 else (-(-all_gpus // gpus), gpus)
    if nodes == 1:
        _one_node(values, gpus, own or gpus, engine)
    else:
        if not own:
            own = learner // 2
            learner -= own
            accounts.note("halves")
        values["sampler.dedicated_nodes"] = True
        values["sampler.engines"] = max(1, own // engine)
    each = tensor * stages * values.get("learner.context_parallel", 1)
    if learner % each:
        accounts.note("no_multiple", learner=learner, tensor=tensor, stages=each // tensor)
    values["learner.data_parallel"] = max(1, learner // each)
    name = f"{nodes}n{nodes * gpus}g"
    if (CONF / "cluster" / f"{name}.yaml").is_file():
        values["cluster"] = name
    else:
        accounts.note("no_cluster", nodes=nodes, gpus=gpus)
    key = "learner.megatron.recompute"
    if values.get(f"{key}_granularity") == "full" and not values.get(f"{key}_method"):
        values |= {f"{key}_method": "uniform", f"{key}_num_layers": 1}
    if tensor > 1:
        values.setdefault("learner.megatron.sequence_parallel", True)
    if values.get("=sharded"):
        accounts.note("sharded")


def _one_node(values: Values, gpus: int, engines_gpus: int, engine: int) -> None:
    if engines_gpus == gpus:  # shared
        values["sampler.sleep"] = "discard" if gpus > 1 else "offload"
        values["learner.offload"] = "optimizer" if gpus > 1 else "none"
    if gpus > 1:
        values["sampler.devices"] = ",".join(map(str, range(gpus - engines_gpus, gpus)))
        values["sampler.engines"] = max(1, engines_gpus // engine)
