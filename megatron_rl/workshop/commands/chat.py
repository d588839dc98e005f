"""`megatron-rl chat`: a stored model answers."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.workshop.commands.stored import model_arguments, opened

UNUSED = ("data.eval=null", "eval.sets=null", "reward.name=exact_match")  # files and functions that need not be here


def add(commands: Any) -> None:
    parser = commands.add_parser("chat", help="a run's model, or any other, answers what is typed")
    model_arguments(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this once; without it, standard input is asked")
    parser.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> int:
    with opened(options, *UNUSED) as (config, stored):
        from megatron_rl.preflight.checks import check_alone
        from megatron_rl.workshop.evaluation.alone import served
        from megatron_rl.workshop.evaluation.chat import Chat, TooLong

        once = options.prompt
        if once is None and not sys.stdin.isatty():
            once = sys.stdin.read().rstrip("\n")
        if once == "":
            raise ConfigError("-p: nothing to answer; give a text")
        check_alone(config, stored.weights)
        with served(config, stored, lambda line: print(line, file=sys.stderr)) as sampler:
            chat = Chat.with_model(sampler, stored, config)
            if once is not None:
                try:
                    print(chat.answer(once))
                except TooLong as error:
                    raise ConfigError(f"-p: {error}") from None
                return 0
            _talk(chat)
    return 0


def _talk(chat: Any) -> None:
    from megatron_rl.workshop.evaluation.chat import TooLong

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited

    print("a conversation; Ctrl-D ends it" if chat.talks else "no chat template: each line is continued; Ctrl-D ends")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if text.strip():
            try:
                print(chat.answer(text))
            except TooLong as error:
                print(f"error: {error}")
