#!/usr/bin/env python3
"""Convert between Hugging Face folders, Megatron checkpoints and quantized folders; every conversion proves itself.

    python tools/convert.py inspect ANY
    python tools/convert.py import HF_FOLDER CHECKPOINT
    python tools/convert.py export RUN[@STEP] HF_FOLDER

What is written appears under its name when it is whole. What a kill or a full disk has ended goes on where it was
when the same command is given again; until then it is called .NAME.partial. Beside the weights, parity.json says what
they were made of, with which versions, and that every tensor reads as it was written.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    pass


def main(argv: Sequence[str] | None = None) -> int:
    given = _parse(argv)
    from megatron_rl.config import ConfigError
    from megatron_rl.conversion.work import partial_of

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return int(given.act(given) or 0)
    except (ConfigError, OSError, ValueError, KeyError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        status = 1
    except Interrupted as interrupted:
        print(f"error: interrupted by {interrupted}", file=sys.stderr)
        status = 128 + signal.Signals[str(interrupted)]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    target = getattr(given, "target", None)
    if target is not None and partial_of(target).exists():
        print(
            f"{target} was not written. What is finished is kept in {partial_of(target)}: give the same command again "
            "to go on, or remove it",
            file=sys.stderr,
        )
    return status


def note(line: str) -> None:
    print(line, file=sys.stderr)


def import_(given: argparse.Namespace) -> None:
    from megatron_rl.conversion.imports import import_folder
    from megatron_rl.conversion.sources import find

    import_folder(find(given.source, None, note), given.target, note)
    print(f"wrote the checkpoint {given.target}")


def export(given: argparse.Namespace) -> None:
    from megatron_rl.conversion.exports import export_folder
    from megatron_rl.conversion.sources import find

    export_folder(find(given.source, given.hf, note), given.target, note)
    print(f"wrote the Hugging Face folder {given.target}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("import", help="Hugging Face folder -> torch_dist checkpoint", formatter_class=plain)
    one.set_defaults(act=import_)
    one.add_argument("source", metavar="HF_FOLDER")
    one.add_argument("target", type=Path, metavar="CHECKPOINT")

    one = commands.add_parser("export", help="checkpoint or run -> Hugging Face folder", formatter_class=plain)
    one.set_defaults(act=export)
    one.add_argument("source", metavar="CHECKPOINT|RUN[@STEP]")
    one.add_argument("target", type=Path, metavar="HF_FOLDER")
    one.add_argument("--hf", type=Path, help="folder with config.json and tokenizer, where the checkpoint has none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
