"""Keys of ours that follow from several of theirs: batch, lengths, schedule, layout, model and data of a recipe.

`FACTS` is what a table's rows may name besides our keys, after a =; `derive` turns them into keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.plain_yaml import CONF

FACTS = {
    "model": "`model`: a preset of conf/model, or models/NAME",
    "train": "`data.train`: a file, or data/NAME for a published set",
    "eval": "`data.eval`, likewise",
    "template": "`data.template: {}` where it is on",
    "batch_answers": "`rollout.prompts_per_step`: the answers of a step by those of a prompt",
    "minibatch_prompts": "`learner.n_minibatches`: prompts of a step by these",
    "minibatch_answers": "`learner.n_minibatches`: answers of a step by these",
    "passes": "nothing where it is 1; several updates with the same answers are not built",
    "microbatch_answers": "`learner.tokens_per_microbatch`: so many of the longest answers",
    "total_tokens": "`rollout.max_prompt_tokens` or `max_response_tokens`: what the other leaves",
    "warmup_share": "`optim.warmup_steps`: of `run.steps`",
    "min_lr_share": "`optim.min_lr`: of `optim.lr`",
    "kl_used": "`loss.kl_coef`: 0 where it is off",
    "overlong_used": "`reward.overlong_buffer`: 0 where it is off",
    "both_clips": "`loss.clip_low` and `loss.clip_high`",
    "nodes": "`cluster`, and how many ranks and servers there are",
    "gpus": "`cluster`: of a node",
    "context_parallel": "`learner.data_parallel`: as many ranks more",
    "sampler_gpus": "`sampler.devices`: GPUs of their own; else learner and sampler take turns",
    "sampler_nodes": "`sampler.fleet.servers`: nodes of their own",
    "sampler_engines": "`sampler.engines`, or servers",
    "learner_gpus": "as `gpus`, of the learner alone",
    "learner_ranks": "`learner`'s parallel sizes, of words such as fsdp:d4p1t1",
    "sampler_ranks": "`sampler.tensor_parallel` and its GPUs, of words such as sglang:d4p1t1",
    "allocation": "the sizes of both, of words such as sglang:d4p1t1+d4p1t1",
    "total": "nodes and GPUs are those of learner and sampler together",
    "leave_one_out": "`advantage.estimator: rloo` where rewards are not divided by their deviation",
    "ahead_used": "`rollout.ahead`: 0 where it is off",
    "entropy_used": "`loss.entropy_coef`: 0 where it is off",
    "device_answers": "with the two below and the GPUs: answers of an update, and of a step",
    "accumulated": "micro-batches of an update",
    "steps_per_generation": "micro-batches of a step",
    "shared": "learner and sampler on the same GPUs, in turns",
    "sharded": "a note: sizes of the learner are to be found with `megatron-rl plan --suggest`",
    "wandb": "`log.wandb: auto` where it is among the loggers",
    "wandb_named": "`log.wandb: auto` where it is named",
    "reward": "a note: which reward judges there",
}
GROUPED = ("grpo", "dr_grpo", "rloo", "maxrl")
MOST_AHEAD = 64
LONGEST_PROMPT = 2048  # where only the sum of prompt and answer is said


@dataclass
class Told:
    """What a translated recipe says in its comments."""

    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # their key with its value -> why it is not here

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


Values = dict[str, Any]  # by our key, or by a fact with its =


def derive(values: Values, told: Told) -> None:
    """Replaces the facts by keys."""
    for step in (_switches, _clips, _ranks, _lengths, _batch, _schedule, _layout, _model, _data, _sampling):
        step(values, told)
    if reward := values.get("=reward"):
        told.note(f"the reward there is {reward}; see that reward.name judges alike")
    for name in [name for name in values if name.startswith("=")]:
        del values[name]


def _number(values: Values, name: str, default: float | None = None) -> Any:
    found = values.get(name)
    return default if found is None or isinstance(found, bool) else found


def _switches(values: Values, told: Told) -> None:
    switched = {
        "=kl_used": "loss.kl_coef",
        "=overlong_used": "reward.overlong_buffer",
        "=ahead_used": "rollout.ahead",
        "=entropy_used": "loss.entropy_coef",
    }
    for fact, key in switched.items():
        if values.get(fact) is False:
            values.pop(key, None)
    if not values.get("rollout.ahead"):
        values.pop("rollout.in_flight", None)
    if values.get("rollout.in_flight") != "continue":
        values.pop("rollout.in_flight_cache", None)
    if values.get("=leave_one_out"):
        if values.get("advantage.estimator") == "dr_grpo":
            values["advantage.estimator"] = "rloo"
        else:
            told.missing["a baseline without the answer itself"] = "grpo's is the group's mean; rloo divides by nothing"


def _ranks(values: Values, told: Told) -> None:
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
            values["=sharded"] = "fsdp" in str(word)


def _clips(values: Values, told: Told) -> None:
    both = values.get("=both_clips")
    for key in ("loss.clip_low", "loss.clip_high"):
        if values.get(key) is None and both is not None:
            values[key] = both
    if _number(values, "loss.clip_low", 0) > 1:  # no ratio is below 0
        values["loss.clip_low"] = 1.0


def _lengths(values: Values, told: Told) -> None:
    total = _number(values, "=total_tokens")
    prompt, response = (_number(values, f"rollout.max_{part}_tokens") for part in ("prompt", "response"))
    if total is None or (prompt and response and prompt + response <= total):
        return
    if response is None or response >= total:
        prompt = prompt if prompt and prompt < total else min(LONGEST_PROMPT, total // 2)
        told.note(f"prompt and answer share {total} tokens there; here prompts have {prompt} of them, answers the rest")
        response = total - prompt
    values["rollout.max_prompt_tokens"] = prompt if prompt and prompt + response <= total else total - response
    values["rollout.max_response_tokens"] = response


def _batch(values: Values, told: Told) -> None:
    samples = int(_number(values, "rollout.samples_per_prompt", 1))
    if (rows := _number(values, "=device_answers")) is not None:
        rows, updates = int(rows) * int(_number(values, "=gpus", 1)), int(_number(values, "=accumulated", 1))
        values.setdefault("=batch_answers", rows * int(_number(values, "=steps_per_generation", updates)))
        values["=minibatch_answers"], values["=microbatch_answers"] = rows * updates, values["=device_answers"]
    if (answers := _number(values, "=batch_answers")) is not None:
        values["rollout.prompts_per_step"] = max(1, int(answers) // samples)
    prompts = int(_number(values, "rollout.prompts_per_step", 1))
    for fact, whole in (("=minibatch_prompts", prompts), ("=minibatch_answers", prompts * samples)):
        if (part := _number(values, fact)) is not None:
            values["learner.n_minibatches"] = min(max(1, whole // int(part)), prompts)
            if whole % int(part) and int(part) < whole:
                told.note(
                    f"a step's {whole} are no multiple of the {int(part)} of an update: the updates are larger here"
                )
    if (passes := _number(values, "=passes", 1)) != 1:
        told.missing[f"{passes} passes over a batch"] = "several updates with the same answers are not built"
    longest = sum(int(_number(values, f"rollout.max_{part}_tokens", 0)) for part in ("prompt", "response"))
    tokens = _number(values, "learner.tokens_per_microbatch")
    if tokens is None and (rows := _number(values, "=microbatch_answers")) is not None and longest:
        tokens = int(rows) * longest
    if tokens is not None:
        values["learner.tokens_per_microbatch"] = max(int(tokens), longest)


def _schedule(values: Values, told: Told) -> None:
    steps, lr = _number(values, "run.steps"), _number(values, "optim.lr")
    if (share := _number(values, "=warmup_share", 0)) and not values.get("optim.warmup_steps"):
        if steps is None:
            told.note(f"the warm-up is {share:g} of all steps: set run.steps and optim.warmup_steps")
        else:
            values["optim.warmup_steps"] = round(share * steps)
    if (share := _number(values, "=min_lr_share")) and lr is not None and "optim.min_lr" not in values:
        values["optim.min_lr"] = share * lr
    warmup = _number(values, "optim.warmup_steps")
    values["optim.warmup_steps"] = 0 if warmup is None else max(0, int(warmup))
    if lr is not None and _number(values, "optim.min_lr", 0) > lr:
        values["optim.min_lr"] = lr
    if steps is None:
        told.note("there a run is so many passes over its data; here it is run.steps steps, 100 unless set")


def _layout(values: Values, told: Told) -> None:
    nodes, gpus = int(_number(values, "=nodes", 1)), int(_number(values, "=gpus", 8))
    tensor, stages = (int(_number(values, f"learner.{kind}_parallel", 1)) for kind in ("tensor", "pipeline"))
    engine = int(_number(values, "sampler.tensor_parallel", 1))
    own = _number(values, "=sampler_gpus")
    if own is None and (servers := _number(values, "=sampler_nodes")):
        own = int(servers) * gpus
    if (
        own is None
        and (values.get("=shared") is False or values.get("rollout.ahead"))
        and (engines := _number(values, "=sampler_engines"))
    ):
        own = int(engines) * engine
    if values.get("=shared") and not values.get("rollout.ahead"):  # an engine that runs ahead has GPUs of its own
        own = None
    elif own is None and values.get("rollout.ahead"):
        told.missing[f"rollout.ahead: {values.pop('rollout.ahead')} on shared GPUs"] = "an engine ahead never sleeps"
    learner = int(_number(values, "=learner_gpus", nodes * gpus))
    if own is not None:  # beside those of the learner
        learner = max(1, nodes * gpus - int(own)) if values.get("=total") and "=learner_gpus" not in values else learner
        all_gpus = learner + int(own)
        nodes, gpus = (1, all_gpus) if all_gpus <= 8 else (-(-all_gpus // gpus), gpus)
    if _number(values, "=context_parallel", 1) != 1:
        told.note(
            "context parallelism is not built: its ranks hold other answers here; long ones may want learner.megatron"
        )
    if nodes == 1:
        _one_node(values, gpus, gpus if own is None else int(own), learner, engine)
    else:
        servers = int(own) if own is not None else learner // 2
        learner = learner if own is not None else learner - servers
        if own is None:
            told.note("learner and sampler take turns on all nodes there; here half of the nodes learn and half serve")
        values["sampler.fleet.servers"] = max(1, servers // engine)
    if learner % (tensor * stages):
        told.note(
            f"{learner} GPUs of the learner are no multiple of {tensor} x {stages}: see megatron-rl plan --suggest"
        )
    values["learner.data_parallel"] = max(1, learner // (tensor * stages))
    name = f"{nodes}n{nodes * gpus}g"
    if (CONF / "cluster" / f"{name}.yaml").is_file():
        values["cluster"] = name
    else:
        told.note(f"{nodes} nodes of {gpus} GPUs: no file of conf/cluster is for that; name or write one as `cluster`")
    if values.get("=sharded"):
        told.note("the learner is sharded there (FSDP, ZeRO); `megatron-rl plan --suggest` names sizes that fit here")


def _one_node(values: Values, gpus: int, engines_gpus: int, learner: int, engine: int) -> None:
    shared = engines_gpus == gpus
    if shared:
        values["sampler.sleep"] = "discard" if gpus > 1 else "offload"
        values["learner.offload"] = "optimizer" if gpus > 1 else "none"
    if gpus > 1:
        devices = range(gpus - engines_gpus, gpus)
        values["sampler.devices"] = ",".join(map(str, devices))
        values["sampler.engines"] = max(1, engines_gpus // engine)


def _model(values: Values, told: Told) -> None:
    path = values.get("=model")
    if path is None:
        return
    name = str(path).rstrip("/").rsplit("/", 1)[-1]
    presets = {one.stem.lower(): one.stem for one in (CONF / "model").glob("*.yaml")}
    if name.lower() in presets:
        values["model"] = presets[name.lower()]
    else:
        values["model.path"] = _local(str(path), "models", told)


def _local(path: str, folder: str, told: Told) -> str:
    """A path as it is; a name on the hub is expected in a folder."""
    if path.startswith(("/", ".", "~", "$")) or path.count("/") != 1 or re.search(r"\.\w{4,7}$", path):
        return path
    name = path.rsplit("/", 1)[-1]
    told.note(f"{path} is a name there, here a path: put it at {folder}/{name}")
    return f"{folder}/{name}"


def _data(values: Values, told: Told) -> None:
    for key in ("train", "eval"):
        named = values.get(f"={key}")
        if isinstance(named, str) and "," in named:
            named = named.split(",")
        if named in (None, [], ""):
            continue
        files = [_local(str(one), "data", told) for one in (named if isinstance(named, list) else [named])]
        values[f"data.{key}"] = files[0] if len(files) == 1 else dict.fromkeys(files, 1.0)
        if len(files) > 1 and key == "eval":
            values["data.eval"] = files[0]
            told.missing[f"evaluation on {', '.join(files[1:])}"] = "name more sets in eval.sets"
        elif len(files) > 1:
            told.note("data.train: theirs are one set after another; weigh the files by their rows")
    if values.get("=template"):
        values["data.template"] = {}
    if "wandb" in str(values.get("=wandb", "")) or values.get("=wandb") is True or values.get("=wandb_named"):
        values["log.wandb"] = "auto"


def _sampling(values: Values, told: Told) -> None:
    top_p, top_k = _number(values, "rollout.top_p", 1), _number(values, "rollout.top_k")
    if top_k is not None and not 1 <= top_k <= 1024:
        values["rollout.top_k"] = top_k = None
    if top_p < 1 and top_k is None:
        told.missing[f"top_p {top_p:g}"] = (
            "alone it keeps sets of any size; set rollout.top_p and rollout.top_k, such as 50"
        )
        values["rollout.top_p"] = 1.0
    if _number(values, "eval.samples", 1) > 1 and values.get("eval.temperature") == 0:
        values["eval.samples"] = 1
        told.note("eval.samples: greedy answers to a prompt are all the same")
    if _number(values, "rollout.ahead", 0) > MOST_AHEAD:
        told.note(f"there the sampler may be {values['rollout.ahead']:g} batches ahead, here at most {MOST_AHEAD}")
        values["rollout.ahead"] = MOST_AHEAD
    if values.get("eval.every") is not None and values["eval.every"] < 0:
        values["eval.every"] = 0
    if values.get("rollout.samples_per_prompt") == 1 and values.get("rollout.dynamic_sampling"):
        values["rollout.dynamic_sampling"] = False
        told.note("rollout.dynamic_sampling: groups of one answer have no spread; set rollout.samples_per_prompt too")
    if values.get("rollout.samples_per_prompt") == 1 and values.get("advantage.estimator", "grpo") in GROUPED:
        told.note("advantage.estimator compares answers to a prompt; with one answer each it is reinforce_pp here")
        values["advantage.estimator"] = "reinforce_pp"
