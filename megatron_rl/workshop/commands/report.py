"""`megatron-rl report`: what runs have written, as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
    report = commands.add_parser("report", help="one HTML page from one or several run directories")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    report.add_argument("-o", "--output", type=Path, help="default: report.html in the (first) run directory")
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from megatron_rl.workshop.reports.report import write_report

    output = options.output or options.runs[0] / "report.html"
    try:
        unread = write_report(options.runs, output)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; name another file with --output") from None
    print("\n".join([*(f"not readable: {problem}" for problem in unread), str(output)]))
    return 0
