"""Two real ranks: one lets the other wait for long, and is waited for; then it does not come, and is named."""

import sys
import time
from pathlib import Path

import pytest
import stuck_rank
from preloaded import Process

from megatron_rl.processes.pulse import file_of
from megatron_rl.survival.watch import Guard, Watch

PATIENCE_S = 240


@pytest.mark.ranks
@pytest.mark.fault("a rank does not come to a collective", "it is named with its stack, the one that waits is not")
def test_a_stuck_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(tmp_path, 0).parent.mkdir(parents=True)
    script = stuck_rank.__file__
    ranks = [Process("torch", [sys.executable, script, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        guard = Guard(Watch(tmp_path, 600, name_s=4.0))
        deadline = time.monotonic() + PATIENCE_S
        while not guard.watch.blocking or guard.watch.blocking[0].phase != "update":
            assert time.monotonic() < deadline, "nobody was named"
            assert [one.poll() for one in ranks] == [None, None], "a rank has ended"
            guard.look()
            time.sleep(0.2)
        assert [one.process for one in guard.watch.blocking] == ["rank 0"]
        assert (tmp_path / "received").read_text() == str(stuck_rank.SIZE)
        said = capsys.readouterr().out
        assert "rank 0 (process" in said
        assert "in `update`" in said
        assert "forget_to_come" in said
    finally:
        for one in ranks:
            one.kill()
            one.wait()
