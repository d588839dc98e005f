"""A rank dies, and the run goes on by itself."""

import json

import pytest
from box import Box, wait_for

START_S = 400


@pytest.mark.fault("a rank is killed, with --attempts 3", "the run goes on from its checkpoint and finishes")
def test_a_run_goes_on_by_itself(box: Box) -> None:
    process = box.train("run.steps=8", "checkpoint.every=2", "--attempts", "3")
    saved = lambda: list((box.run / "checkpoints").glob("step_*"))  # noqa: E731
    wait_for(lambda: saved() or process.poll() is not None, START_S, "a checkpoint")
    (victim,) = [one for one in box.processes("megatron_rl.rank") if one.environ().get("RANK") == "1"]
    victim.kill()
    assert process.wait(START_S) == 0, box.screen
    status = box.status()
    assert (status["state"], status["attempt"]) == ("finished", 2)
    assert status["resumes_after"] >= 2
    assert status["before"]["state"] == "failed"
    assert "rank 1: ended by SIGKILL" in status["before"]["reason"]
    assert "attempt 1 of 3 has failed" in box.screen
    assert "the next one goes on after step" in box.screen
    lines = (box.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["progress/step"] for line in lines] == list(range(9))
