"""Commands about a stored model, with their arguments: eval, chat, mismatch, push; and rerun-step,
about a dumped update.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl import hub
from megatron_rl.commands import command, folder_name, overrides, recipe_file
from megatron_rl.config import ConfigError, load, recorded_config
from megatron_rl.logs import logger
from megatron_rl.processes.process import printable

if TYPE_CHECKING:
    from megatron_rl.apps.evaluation.stored_model import StoredModel
    from megatron_rl.config.schema import Config


LONGEST_TEXT = 1 << 20  # characters of a prompt; more than any context
# files and functions that need not be here
UNUSED = (
    "data.eval=null",
    "eval.sets=null",
    "reward.name=exact_match",
)


note = logger("model").info


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="run, checkpoint, Hugging Face folder, ORG/NAME of the hub, or recipe (its initial model)",
    )
    overrides(parser, "overrides of the configuration, such as eval.samples=8")
    formats = ("bf16", "int8", "int4", "fp8", "fp8_block")
    parser.add_argument(
        "--format",
        choices=formats,
        default="bf16",
        help="weight format in the engine (default: bf16; mismatch: the run's)",
    )
    parser.add_argument(
        "--hf", type=Path, metavar="FOLDER", help="config.json and tokenizer, if MODEL has none"
    )


@contextmanager
def opened(options: argparse.Namespace, *without: str) -> Iterator[tuple[Config, StoredModel]]:
    """The model that MODEL names, and how it is to be sampled, `without` what the run had; what
    fails is one line.
    """
    from megatron_rl.apps.evaluation.stored_model import find, run_of, settings
    from megatron_rl.checkpoint.torch_dist.index import CheckpointError
    from megatron_rl.preflight.downloads import fetched
    from megatron_rl.rewards.pool import RewardsHang
    from megatron_rl.sampler.client.interface import SamplerError
    from megatron_rl.weight_sync.manifest import WeightSyncError

    path = options.model
    run = run_of(options.model)
    recipe = None
    if path.suffix == ".yaml":
        recipe = load(recipe_file(path), options.overrides)
        path = Path(recipe.model.path)
    given = str(path)
    path = fetched(given, "MODEL")
    stored = find(path, recorded_config(run / "config.yaml") if run else recipe, options.hf)
    if one := hub.parse(given):  # its folder has the name of a commit
        stored = replace(stored, label=one.name.rpartition("/")[2])
    if stored.note:
        note(stored.note)
    try:
        yield settings(run, stored, options.format, [*without, *options.overrides], recipe), stored
    except (CheckpointError, RewardsHang, SamplerError, WeightSyncError) as error:
        raise ConfigError(str(error)) from None


def _row(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f'{text}: expected a JSON object, such as {{"answer": "42"}}')


def add(commands: Any) -> None:
    about = "measure avg@k, pass@k and maj@k of a model on held-out sets"
    evaluate = command(commands, "eval", _eval, about)
    model_arguments(evaluate)
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SET",
        dest="sets",
        help="a file, NAME=FILE, a preset of conf/data, or a set of the run; several times for several (default: all)",
    )
    evaluate.add_argument(
        "-o", "--output", type=folder_name, metavar="FOLDER", help="default: evals/MODEL-FORMAT"
    )

    chat = command(commands, "chat", _chat, "chat with the model of a run, or with any other model")
    model_arguments(chat)
    chat.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="respond to this prompt once; without it, prompts are read from standard input",
    )
    chat.add_argument(
        "--row", type=_row, default={}, metavar="JSON", help="columns for an environment's reset"
    )

    about = "measure differences of learner and sampler at points of the forward pass"
    compare = command(commands, "mismatch", _mismatch, about)
    model_arguments(compare)
    compare.add_argument(
        "-n", "--sequences", type=int, default=4, metavar="N", help="number (default: %(default)s)"
    )
    compare.add_argument(
        "--tokens",
        type=int,
        default=128,
        metavar="N",
        help="of each at most (default: %(default)s)",
    )
    compare.set_defaults(format=None)

    about = "repeat an update that was not finite, and locate the first non-finite value"
    repeat = command(commands, "rerun-step", _rerun_step, about)
    repeat.add_argument(
        "dump", type=Path, metavar="DUMP", help="folder, such as runs/NAME/dumps/nonfinite_12"
    )

    about = "upload the exported model of a run, with a model card, to the Hugging Face hub"
    upload = command(commands, "push", _push, about)
    upload.add_argument(
        "folder", type=Path, metavar="RUN", help="run directory, such as runs/quickstart"
    )
    upload.add_argument("repository", metavar="ORG/NAME", help="made if it does not exist")
    upload.add_argument("--private", action="store_true", help="make it private")
    upload.add_argument(
        "--dry-run", action="store_true", help="print the card and the files; upload nothing"
    )


def _eval(options: argparse.Namespace) -> int:
    with opened(options) as (config, stored):
        from megatron_rl.apps.evaluation.measure import measure, with_sets
        from megatron_rl.data.hub_sets import pinned
        from megatron_rl.preflight.checks import check_alone, environment

        config = pinned(with_sets(config, options.sets))
        folder = options.output or Path("evals") / f"{stored.label}-{options.format}"
        for line in check_alone(config, stored.base, environment):
            note(line)
        print(measure(config, stored, folder))
        print(f"pass rates, prompt by prompt: {folder}")
    return 0


def _chat(options: argparse.Namespace) -> int:
    with opened(options, *UNUSED) as (config, stored):
        from megatron_rl.apps.evaluation.chat import ChatError, begun
        from megatron_rl.preflight.checks import check_alone

        once = options.prompt
        if once is None and not (sys.stdin and sys.stdin.isatty()):
            once = _piped()
        if once is not None:
            _check_text(once)
        check_alone(config, stored.base)
        with begun(config, stored, options.row) as chat:
            if once is not None:
                try:
                    print(chat.answer(once))
                except ChatError as error:
                    raise ConfigError(f"-p: {error}") from None
                return 0
            _talk(chat)
    return 0


def _piped() -> str:
    """The text that a pipe or a file gives as standard input, which may be closed."""
    try:
        if sys.stdin:
            return sys.stdin.read(LONGEST_TEXT + 1).rstrip("\n")
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"standard input: {error}; give a text in UTF-8") from None


def _check_text(text: str) -> None:
    if not text.strip():
        raise ConfigError("-p: the prompt is empty; give a text")
    if len(text) > LONGEST_TEXT:
        raise ConfigError(f"-p: the text is longer than {LONGEST_TEXT} characters")
    if any("\ud800" <= one <= "\udfff" for one in text):  # what Python makes of other bytes
        raise ConfigError(f"-p: {text[:40]!a} is not UTF-8")


def _talk(chat: Any) -> None:
    from megatron_rl.apps.evaluation.chat import ChatError

    with suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited

    print(
        "a conversation; Ctrl-D ends it"
        if chat.talks
        else "no chat template: each line is continued; Ctrl-D ends"
    )
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            print(f"error: {error}")
            continue
        if text.strip():
            try:
                _check_text(text)
                print(printable(chat.answer(text)))
            except (ConfigError, ChatError) as error:
                print(f"error: {error}")


def _mismatch(options: argparse.Namespace) -> int:
    from megatron_rl.apps.evaluation.stored_model import run_of

    for name, least in (("sequences", 1), ("tokens", 4)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name}: {getattr(options, name)}, expected {least} or more")
    run = run_of(options.model)
    with opened(options, *UNUSED, *as_the_run(options, run)) as (config, stored):
        from megatron_rl.preflight.checks import check_alone, check_watched
        from megatron_rl.rank import alone

        check_alone(config, stored.base)
        check_watched(config)
        with alone():
            from megatron_rl.apps.mismatch.mismatch import measure

            print(measure(config, stored, options.sequences, options.tokens))
    return 0


def as_the_run(options: argparse.Namespace, run: Path | None) -> list[str]:
    """Settings of the run, unless overridden on the command line."""
    from megatron_rl.apps.evaluation.stored_model import FORMATS
    from megatron_rl.config.schema import Config

    recorded = recorded_config(run / "config.yaml") if run else Config()
    names = {format: name for name, format in FORMATS.items()}
    options.format = options.format or names[recorded.quantization.format]
    if recorded.quantization.smoothing:
        note("the engine is served without the run's quantization.smoothing")
    return [
        f"learner.forward={recorded.learner.forward.value}",
        f"learner.precision={recorded.learner.precision.value}",
        f"model.head_precision={recorded.model.head_precision.value}",
    ]


def _rerun_step(options: argparse.Namespace) -> int:
    from megatron_rl.rank import alone

    with alone():
        from megatron_rl.apps.mismatch.rerun import rerun

        print(rerun(options.dump))
    return 0


def _push(options: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.hub_push import push

    print(push(options.folder, options.repository, options.private, options.dry_run))
    return 0
