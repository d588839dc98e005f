"""Derivation of our keys from facts of another project's recipe (table rows with a =).

`shared.yaml` lists the facts: batch, lengths, schedule, layout, model, data. The keys of a
translated recipe are then fitted to each other.
"""

import re
from pathlib import Path

from megatron_rl import hub
from megatron_rl.apps.translation.layout import Accounts, Values, layout, ranks
from megatron_rl.apps.translation.table import shared
from megatron_rl.config.bounds import is_folder_name
from megatron_rl.config.plain_yaml import CONF
from megatron_rl.config.schema import LearnerSection, TrackerName

GROUPED = ("grpo", "dr_grpo", "rloo", "maxrl")
MOST_AHEAD = 64
NO_TRACKERS = {"console", "file", "none", "all"}
LONGEST_PROMPT = 2048  # where only the sum of prompt and response is given


def derive(values: Values, accounts: Accounts) -> None:
    """Replaces the facts by keys."""
    for step in (
        _switches,
        _clips,
        ranks,
        _lengths,
        _batch,
        _schedule,
        layout,
        _model,
        _data,
        _trackers,
        _sampling,
        _names,
    ):
        step(values, accounts)
    for fact in shared()["facts"]:
        values.pop(f"={fact}", None)


def _switches(values: Values, accounts: Accounts) -> None:
    for fact, key in shared()["switches"].items():
        if values.get(f"={fact}") is False:
            values.pop(key, None)
    if not values.get("rollout.max_staleness"):
        values.pop("rollout.in_flight", None)
    estimator = "advantage.estimator"
    if "=grpo_is" in values and values.get(estimator, "grpo") == "grpo":
        values[estimator] = values["=grpo_is"]
    if values.get("=leave_one_out"):
        if values.get(estimator) == "dr_grpo":
            values[estimator] = "rloo"
        else:
            accounts.lacks("a baseline without the response itself", "baseline")


def _clips(values: Values, accounts: Accounts) -> None:
    if "=both_clips" in values:
        for key in ("loss.clip_low", "loss.clip_high"):
            values.setdefault(key, values["=both_clips"])
    if values.get("loss.clip_low", 0) > 1:  # no ratio is below 0
        values["loss.clip_low"] = 1.0


def _lengths(values: Values, accounts: Accounts) -> None:
    total = values.get("=total_tokens")
    prompt = values.get("rollout.max_prompt_tokens")
    response = values.get("rollout.max_response_tokens")
    if total is None or (prompt and response and prompt + response <= total):
        return
    if response and response < total:
        values["rollout.max_prompt_tokens"] = total - response
        return
    if not prompt or prompt >= total:
        prompt = min(LONGEST_PROMPT, total // 2)
    accounts.note("shared_tokens", total=total, prompt=prompt)
    values["rollout.max_prompt_tokens"] = prompt
    values["rollout.max_response_tokens"] = total - prompt


def _batch(values: Values, accounts: Accounts) -> None:
    samples = values.get("rollout.samples_per_prompt", 1)
    if device_rows := values.get("=device_responses"):
        rows = device_rows * values.get("=gpus", 1)
        updates = values.get("=accumulated", 1)
        values.setdefault("=batch_responses", rows * values.get("=steps_per_generation", updates))
        values["=minibatch_responses"] = rows * updates
        values["=microbatch_responses"] = device_rows
    if responses := values.get("=batch_responses"):
        values["rollout.prompts_per_step"] = max(1, responses // samples)
    prompts = values.get("rollout.prompts_per_step", 1)
    for fact, whole in (
        ("=minibatch_prompts", prompts),
        ("=minibatch_responses", prompts * samples),
    ):
        if part := values.get(fact):  # 0, for some: the whole batch
            values["learner.n_minibatches"] = min(max(1, whole // part), prompts)
            if whole % part and part < whole:
                accounts.note("larger_updates", whole=whole, part=part)
    if (passes := values.get("=passes", 1)) != 1:
        accounts.lacks(f"{passes} passes over a batch", "passes")
    longest = sum(values.get(f"rollout.max_{part}_tokens", 0) for part in ("prompt", "response"))
    key = "learner.tokens_per_microbatch"
    tokens = values.get(key) or values.get("=microbatch_responses", 0) * longest
    if tokens or longest > LearnerSection().tokens_per_microbatch:
        values[key] = max(tokens, longest)


def _schedule(values: Values, accounts: Accounts) -> None:
    updates = values.get("learner.n_minibatches", 1)  # of a step
    for fact, key in (
        ("updates", "run.steps"),
        ("eval_updates", "eval.every"),
        ("save_updates", "checkpoint.every"),
    ):
        if count := values.get(f"={fact}"):
            # a share of the steps stays one
            values[key] = max(1, round(count / updates)) if count >= 1 else count
    steps = values.get("run.steps")
    lr = values.get("optim.lr")
    if (batches := values.get("=warmup_batches", 0)) > 0:
        values["optim.warmup_steps"] = int(batches) * updates
    if 0 < values.get("optim.warmup_steps", 0) < 1:  # TRL's, of both meanings
        values["=warmup_share"] = values.pop("optim.warmup_steps")
    if (share := values.get("=warmup_share")) and not values.get("optim.warmup_steps"):
        if steps is None:
            accounts.note("warmup", share=share)
        else:
            values["optim.warmup_steps"] = round(share * steps * updates)
    values["optim.warmup_steps"] = max(0, int(values.get("optim.warmup_steps", 0)))
    if lr is not None:
        if share := values.get("=min_lr_share"):
            values.setdefault("optim.min_lr", share * lr)
        if values.get("optim.min_lr", 0) > lr:
            values["optim.min_lr"] = lr
    if steps is None:
        accounts.note("steps")


def _model(values: Values, accounts: Accounts) -> None:
    path = values.get("=model")
    if path is None:
        return
    name = Path(str(path)).name
    presets = {one.stem.lower(): one.stem for one in (CONF / "model").glob("*.yaml")}
    if name.lower() in presets:
        values["model"] = presets[name.lower()]
    elif hub.parse(str(path)):
        values["model.path"] = str(path)
    else:
        values["model.path"] = _local(str(path), "models", accounts)


def _local(path: str, folder: str, accounts: Accounts) -> str:
    """A path as it is; a name on the hub is expected in a folder."""
    if (
        path.startswith(("/", ".", "~", "$", f"{folder}/"))
        or path.count("/") > 1
        or re.search(r"\.\w{4,7}$", path)
    ):
        return path
    name = Path(path).name
    accounts.note("name_there", path=path, folder=folder, name=name)
    return f"{folder}/{name}"


def _data(values: Values, accounts: Accounts) -> None:
    for key in ("train", "eval"):
        named = values.get(f"={key}") or []
        names = named if isinstance(named, list) else str(named).split(",")
        files = [_local(str(one), "data", accounts) for one in names]
        if files:
            values[f"data.{key}"] = files[0]
        if len(files) > 1 and key == "eval":
            accounts.lacks(f"evaluation on {', '.join(files[1:])}", "more_sets")
        elif len(files) > 1:
            values["data.train"] = dict.fromkeys(files, 1.0)
            accounts.note("one_after_another")
    if "data.eval" not in values:
        values["eval.every"] = 0
    if values.get("=template"):
        values["data.chat_template_kwargs"] = {}


def _trackers(values: Values, accounts: Accounts) -> None:
    named = set(re.findall(r"\w+", str(values.get("=loggers", "")))) - NO_TRACKERS
    named |= {one for one in (*TrackerName, "swanlab") if values.get(f"={one}")}
    if trackers := [one.value for one in TrackerName if one in named]:
        values["log.trackers"] = trackers
    for one in sorted(named.difference(trackers)):
        accounts.lacks(f"the tracker {one}", "no_tracker")


def _sampling(values: Values, accounts: Accounts) -> None:
    if not 1 <= values.get("rollout.top_k", 0) <= 1024:
        values.pop("rollout.top_k", None)
    top_p = values.get("rollout.top_p", 1)
    if top_p < 1 and "rollout.top_k" not in values:
        accounts.lacks(f"top_p {top_p:g}", "any_size")
        values["rollout.top_p"] = 1.0
    if values.get("eval.samples", 1) > 1 and values.get("eval.temperature") == 0:
        values["eval.samples"] = 1
        accounts.note("greedy")
    if values.get("rollout.max_staleness", 0) > MOST_AHEAD:
        accounts.note("stale_limit", ahead=values["rollout.max_staleness"], most=MOST_AHEAD)
        values["rollout.max_staleness"] = MOST_AHEAD
    for key in ("eval.every", "checkpoint.every"):
        if (every := values.get(key, 0)) % 1:
            accounts.lacks(f"{key}: {every:g}", "share_of_steps")
            del values[key]
    if values.get("eval.every", 0) < 0:
        values["eval.every"] = 0
    alone = values.get("rollout.samples_per_prompt") == 1
    if alone and values.get("rollout.dynamic_sampling"):
        values["rollout.dynamic_sampling"] = False
        accounts.note("no_variance")
    if alone and values.get("advantage.estimator", "grpo") in GROUPED:
        values["advantage.estimator"] = "reinforce_pp"
        accounts.note("one_response")


def _names(values: Values, accounts: Accounts) -> None:
    """The run's name, and a function of verl's signature in place of the manager's reward."""
    if file := values.get("=reward_file"):
        module = str(file).removeprefix("pkg://")
        values["reward.name"] = f"{module}:{values['=reward_function']}"
        values.pop("reward.wrong", None)  # the function returns its own
    name = str(values.get("=run_name", "")).replace("/", "_")
    if is_folder_name(name):
        values["run.name"] = name
