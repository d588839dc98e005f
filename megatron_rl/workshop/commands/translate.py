"""`megatron-rl translate`: another project's correction settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
    translate = commands.add_parser("translate", help="another project's correction settings as ours")
    translate.add_argument("framework", help="such as verl, skyrl or trl; an unknown one lists them all")
    translate.add_argument(
        "file", type=Path, help="their YAML: a whole run's file or the section; - for standard input"
    )
    translate.set_defaults(run=_translate)


def _translate(options: argparse.Namespace) -> int:
    from megatron_rl.workshop.translation.translate import TranslationError, translate_file

    if str(options.file) != "-" and not options.file.exists():
        raise ConfigError(f"{options.file}: no such file; name a YAML file that holds the other project's keys")
    try:
        print(translate_file(options.framework, options.file), end="")
    except TranslationError as error:
        raise ConfigError(str(error)) from None
    return 0
