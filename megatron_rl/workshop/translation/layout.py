"""Sizes of learner and sampler, the GPUs of each, and the cluster, from what other projects say of theirs; and
the account of where each key of their file has gone."""

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.plain_yaml import CONF
from megatron_rl.workshop.translation.table import shared

Values = dict[str, Any]  # by our key, or by a fact with its =


@dataclass
class Accounts:
    """Where each key of a file has gone, and what else a translated recipe says in its comments."""

    translated: dict[str, str] = field(default_factory=dict)  # their key -> ours
    not_needed: dict[str, list[str]] = field(default_factory=dict)  # reason -> their keys
    unknown: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)  # of those notes that `shared.yaml` has
    missing: dict[str, str] = field(default_factory=dict)  # their key with its value -> why it is not here

    def note(self, sentence: str, **fields: Any) -> None:
        """A sentence of `shared.yaml`, by its word."""
        if (said := shared()["says"][sentence].format(**fields)) not in self.notes:
            self.notes.append(said)
            self.words[said] = sentence

    def lacks(self, what: str, sentence: str) -> None:
        self.missing[what] = shared()["says"][sentence]


def number(values: Values, name: str, default: float | None = None) -> Any:
    found = values.get(name)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else default


def size(values: Values, name: str, default: int) -> int:
    """A number that others are divided by: what is no size is refused where the translated recipe is loaded."""
    return max(1, int(number(values, name, default)))


def ranks(values: Values, told: Accounts) -> None:
    """Sizes that are written as one word, such as fsdp:d4p1t1 or sglang.d4t2+d8."""
    both = str(values.get("=allocation") or "").split("+")
    words = {"sampler": values.get("=sampler_ranks") or both[0], "learner": values.get("=learner_ranks") or both[-1]}
    for role, word in words.items():
        sizes = {kind: int(size) for kind, size in re.findall(r"([dptce])(\d+)", str(word).rsplit(":", 1)[-1])}
        if not sizes:
            continue
        count = sizes.get("d", 1) * sizes.get("p", 1) * sizes.get("t", 1) * sizes.get("c", 1)
        values[f"={role}_gpus"] = count
        values[f"{role}.tensor_parallel"] = sizes.get("t", 1)
        if role == "learner":
            values |= {"learner.pipeline_parallel": sizes.get("p", 1), "learner.expert_parallel": sizes.get("e", 1)}
            values["learner.context_parallel"] = sizes.get("c", 1)
            values["=sharded"] = "fsdp" in str(word)


def layout(values: Values, told: Accounts) -> None:
    nodes, gpus = size(values, "=nodes", 1), size(values, "=gpus", 8)
    tensor, stages = (size(values, f"learner.{kind}_parallel", 1) for kind in ("tensor", "pipeline"))
    engine = size(values, "sampler.tensor_parallel", 1)
    ahead, own = values.get("rollout.ahead"), number(values, "=sampler_gpus")
    if own is None and (servers := number(values, "=sampler_nodes")):
        own = int(servers) * gpus
    apart = ahead or values.get("=shared") is False
    if own is None and apart and (engines := number(values, "=sampler_engines")):
        own = int(engines) * engine
    if values.get("=shared") and not ahead:  # an engine that runs ahead has GPUs of its own
        own = None
    elif own is None and ahead:
        told.lacks(f"rollout.ahead: {values.pop('rollout.ahead')} on shared GPUs", "never_sleeps")
    learner = int(number(values, "=learner_gpus", nodes * gpus))
    if own is not None:  # beside those of the learner
        learner = max(1, nodes * gpus - int(own)) if values.get("=total") and "=learner_gpus" not in values else learner
        all_gpus = learner + int(own)
        nodes, gpus = (1, all_gpus) if all_gpus <= 8 else (-(-all_gpus // gpus), gpus)
    if nodes == 1:
        _one_node(values, gpus, gpus if own is None else int(own), engine)
    else:
        if own is None:
            own, learner = learner // 2, learner - learner // 2
            told.note("halves")
        values["sampler.fleet.servers"] = max(1, int(own) // engine)
    each = tensor * stages * size(values, "learner.context_parallel", 1)
    if learner % each:
        told.note("no_multiple", learner=learner, tensor=tensor, stages=each // tensor)
    values["learner.data_parallel"] = max(1, learner // each)
    name = f"{nodes}n{nodes * gpus}g"
    if (CONF / "cluster" / f"{name}.yaml").is_file():
        values["cluster"] = name
    else:
        told.note("no_cluster", nodes=nodes, gpus=gpus)
    _activations(values, tensor)
    if values.get("=sharded"):
        told.note("sharded")


def _activations(values: Values, tensor: int) -> None:
    """Megatron's words for what is computed again; ranks of a tensor share sequences where nothing else is said."""
    key = "learner.megatron.recompute"
    if values.get(f"{key}_granularity") == "full" and not values.get(f"{key}_method"):
        values |= {f"{key}_method": "uniform", f"{key}_num_layers": 1}
    if tensor > 1:
        values.setdefault("learner.megatron.sequence_parallel", True)


def _one_node(values: Values, gpus: int, engines_gpus: int, engine: int) -> None:
    if engines_gpus == gpus:  # shared
        values["sampler.sleep"] = "discard" if gpus > 1 else "offload"
        values["learner.offload"] = "optimizer" if gpus > 1 else "none"
    if gpus > 1:
        values["sampler.devices"] = ",".join(map(str, range(gpus - engines_gpus, gpus)))
        values["sampler.engines"] = max(1, engines_gpus // engine)
