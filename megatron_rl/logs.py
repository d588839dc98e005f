"""Log lines: time, level, component, message. `--log-level` sets the least severe level shown, in
this process and in those that it starts.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

LEVEL = "MEGATRON_RL_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")


class Formatter(logging.Formatter):
    """`2026-01-31 09:05:02 INFO sync: message`"""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(component)s: %(message)s", "%Y-%m-%d %H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        record.component = record.name.rpartition(".")[2]
        return super().format(record)


def logger(component: str) -> logging.Logger:
    return _root().getChild(component)


def warn(component: str, text: str, path: Path) -> None:
    """Log a warning, also into a file that handlers of another process may write."""
    log = logger(component)
    log.warning(text)
    if not any(getattr(handler, "path", None) == path for handler in _root().handlers):
        record = log.makeRecord(log.name, logging.WARNING, "", 0, text, (), None)
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{Formatter().format(record)}\n")


def configure(stream: TextIO, level: int = logging.NOTSET) -> None:
    """Write the log lines of this process to a stream. `level`: the least severe one, if above that
    of `--log-level`.
    """
    handler = logging.StreamHandler(stream)
    handler.setLevel(level)
    handler.setFormatter(Formatter())
    replace_handlers([handler])


def replace_handlers(handlers: list[logging.Handler]) -> list[logging.Handler]:
    """Set the handlers of the log lines; return those before."""
    root = _root()
    before = root.handlers
    root.handlers = handlers
    root.propagate = False
    root.setLevel(os.environ.get(LEVEL, "info").upper())
    return before


def _root() -> logging.Logger:
    return logging.getLogger("megatron_rl")
