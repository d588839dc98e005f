"""`megatron-rl eval`: a stored model on held-out sets (--set); writes a table and pass rates."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from megatron_rl.apps.evaluation.stored_model import StoredModel, served
from megatron_rl.config import ConfigError
from megatron_rl.config.bounds import SET_NAME
from megatron_rl.config.evaluation import HeldOut, held_out
from megatron_rl.config.fleet import max_sequences
from megatron_rl.config.schema import Config, EvalSet
from megatron_rl.data.prompts import FolderTokenizer, load_held_out
from megatron_rl.environments import sessions
from megatron_rl.evaluation import Evaluator
from megatron_rl.files import JsonObject, write_atomic
from megatron_rl.logs import logger
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.collect import Group, Scorer
from megatron_rl.sampler.generation import GenerationSource
from megatron_rl.tracking.console import table
from megatron_rl.tracking.run_dir import SUMMARY
from megatron_rl.types import Verdict

AT_ONCE = (
    8  # between two progress lines: so many times the responses that the engine decodes at once
)


def with_sets(config: Config, words: Sequence[str]) -> Config:
    """Keep the sets of --set: one of the configuration, a file, NAME=FILE, or a preset."""
    if not words:
        if held_out(config):
            return config
        raise ConfigError(
            "--set: nothing to evaluate on; name a file of prompts, such as --set data/math500.parquet"
        )
    known = config.eval.sets or {}
    chosen = dict[str, EvalSet]()
    plain = None
    for word in dict.fromkeys(words):
        name, _, file = word.rpartition("=")
        name = name or re.sub(r"[^A-Za-z0-9-]", "_", Path(file).stem).strip("_-")
        if word in known:
            chosen[word] = replace(known[word], path=known[word].path or config.data.eval)
        elif word == "eval" and config.data.eval:
            plain = config.data.eval
        elif name in chosen or not SET_NAME.fullmatch(name):
            raise ConfigError(
                f"--set {word}: {name!r} is no name for it, or that of another; write NAME=FILE"
            )
        else:
            chosen[name] = EvalSet(path=file)
    return replace(
        config, data=replace(config.data, eval=plain), eval=replace(config.eval, sets=chosen)
    )


def measure(config: Config, stored: StoredModel, folder: Path) -> str:
    """The table. `folder` gets a file for each set, and a summary."""
    sets = held_out(config)
    tokenizer = FolderTokenizer(stored.folder)
    with ExitStack() as stack:
        opened = []
        for one in sets:
            found = load_held_out(one, config.data, tokenizer, config.rollout.max_prompt_tokens)
            logger("eval").info(f"{one.path}: {found.describe()}")
            pool = RewardPool(one.reward, config.run.variables)
            stack.callback(pool.close)
            pool.start()
            opened.append((one, found, Scorer(one.reward, pool, tokenizer)))
        folder.mkdir(parents=True, exist_ok=True)
        sampler = stack.enter_context(served(config, stored, folder))
        answers: GenerationSource = sampler
        if config.environment.name is not None:
            answers = stack.enter_context(sessions.opened(config, tokenizer, sampler))
        rows = []
        metrics = dict[str, float]()
        for one, found, scorer in opened:
            evaluator = Evaluator(one, found.prompts, answers, scorer)
            groups = evaluator.in_parts(
                AT_ONCE * max_sequences(config.sampler), _progress(one, evaluator)
            )
            metrics |= (own := evaluator.metrics(groups))
            lines = [json.dumps(pass_rate(group)) for group in groups]
            write_atomic(folder / f"{_name(one)}.jsonl", "\n".join([*lines, ""]))
            rows.append(_row(one, own))
    names = ("path", "samples", "temperature", "top_p", "max_tokens")
    asked = {
        _name(one): {name: getattr(one, name) for name in names} | {"reward": one.reward.name}
        for one in sets
    }
    about = {
        "model": str(stored.weights),
        "format": config.quantization.format,
        "metrics": metrics,
        "sets": asked,
    }
    write_atomic(folder / SUMMARY, json.dumps(about, indent=1) + "\n")
    head = ("set", "prompts", "k", "avg@k", "pass@k", "maj@k", "tokens", "truncated")
    return "\n".join(table(head, rows))


def pass_rate(group: Group) -> JsonObject:
    """Pass rate of a prompt, as `tools/prepare_data.py --pass-rates` reads it."""
    prompt = group[0].rollout.prompt
    right = sum(one.verdict == Verdict.right for one in group)
    return {
        "prompt": prompt.text,
        "id": prompt.id,
        "n": len(group),
        "right": right,
        "pass_rate": right / len(group),
        "reward_mean": fmean(one.reward for one in group),
        "verdicts": dict(sorted(Counter(str(one.verdict) for one in group).items())),
    }


def _name(one: HeldOut) -> str:
    return one.name or "eval"


def _row(one: HeldOut, metrics: dict[str, float]) -> tuple[str, ...]:
    def value(name: str, form: str = ".3f") -> str:
        found = metrics.get(one.prefix + name)
        error = metrics.get(f"{one.prefix}{name}_stderr")
        if found is None:
            return "-"
        return f"{found:{form}}" + ("" if error is None else f" ± {error:{form}}")

    k = one.samples
    return (
        _name(one),
        value("n", ".0f"),
        str(k),
        value("accuracy"),
        value(f"pass@{k}"),
        value(f"maj@{k}"),
        value("response_tokens_mean", ".0f"),
        value("truncated_fraction", ".1%"),
    )


def _progress(one: HeldOut, evaluator: Evaluator) -> Callable[[int], None]:
    total = len(evaluator.prompts)

    def said(done: int) -> None:
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(f"{_name(one)}: {done} of {total} prompts", end=end, file=sys.stderr, flush=True)

    return said
