"""The command line: `megatron-rl COMMAND`. What a command takes and does is in its module of
`commands/`, or of `apps/commands/`.
"""

import sys
from collections.abc import Sequence

from megatron_rl.processes.interrupts import leave_at_once, leaving_at_once

with leaving_at_once():
    import argparse
    import os

    from megatron_rl.processes.process import STOP_AFTER_STEP, hold, status_of

    hold(STOP_AFTER_STEP)  # until a run can act on it: before the slower imports

    from megatron_rl import __version__, logs
    from megatron_rl.commands import app, fetch, serve, train
    from megatron_rl.config import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return status_of(lambda: _execute(_parser(), arguments))
    finally:
        if arguments is None:  # a process, which only ends now
            leave_at_once()


def _execute(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    options, rest = parser.parse_known_args(arguments)
    stray = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if stray:
        parser.error(f"unknown argument {stray[0]!r}; overrides are written section.key=value")
    if rest:  # overrides after an option
        options.overrides += rest
    if options.log_level:
        os.environ[logs.LEVEL] = options.log_level  # for the processes of a run, too
    logs.configure(sys.stderr)
    try:
        return options.run(options)
    except ConfigError as error:
        said = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        said = f"{error.filename}: {error.strerror}"
    print("\n".join(f"error: {line}" for line in said.splitlines()), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description="More of each: megatron-rl COMMAND --help"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    apps = app("commands")
    for command in (train, fetch, serve, *(apps.COMMANDS if apps else ())):
        command.add(commands)
    for one in commands.choices.values():
        one.add_argument(
            "--log-level", choices=logs.LEVELS, help="least severe log lines shown (default: info)"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
