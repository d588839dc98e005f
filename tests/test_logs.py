"""Log lines: their form, and the level that `--log-level` sets."""

import re
from io import StringIO

import pytest

from megatron_rl import logs
from megatron_rl.cli import main


@pytest.mark.parametrize(("level", "shown"), [("info", 2), ("warning", 1), ("error", 0)])
def test_lines_have_time_level_component(
    monkeypatch: pytest.MonkeyPatch, level: str, shown: int
) -> None:
    monkeypatch.setenv(logs.LEVEL, level)
    stream = StringIO()
    logs.configure(stream)
    logs.logger("sync").info("100% of the weights")
    logs.logger("alarm").warning("ess")
    lines = stream.getvalue().splitlines()
    assert len(lines) == shown
    for line, rest in zip(
        lines[::-1], ("WARNING alarm: ess", "INFO sync: 100% of the weights"), strict=False
    ):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d " + rest, line)


def test_an_unknown_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "runs/none", "--log-level", "loud"])
    assert "--log-level" in capsys.readouterr().err
