"""Comparing corrections: the runs that are started, what a failure and Ctrl-C do, one report of all.

The trainer here is a stand-in that writes a run directory with the real Recorder: what is tested is the
tool around it.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.runs.status import read_status

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/compare_corrections.py"
TRAINER = """
import sys, time
from io import StringIO
from pathlib import Path
from megatron_rl.runs.console import PlainDisplay
from megatron_rl.runs.record import Recorder
from megatron_rl.config.schema import LogSection

options = dict(word.split("=", 1) for word in sys.argv[2:])
name = options["run.name"]
text = "run: {name: " + name + "}\\narguments: " + repr(sys.argv[1:])
with Recorder(LogSection(), text, Path(options["run.root"]) / name, 2, PlainDisplay(2, StringIO())) as recorder:
    recorder.log(0, {"eval/accuracy": 0.25})
    if options["correction"] == "broken":
        raise RuntimeError("no such luck")
    while options["correction"] == "endless":
        time.sleep(0.05)
    recorder.log(2, {"eval/accuracy": 0.75})
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_corrections", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "trainer.py").write_text(TRAINER)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def call(tool, place, *words):
    train = [sys.executable, str(place / "trainer.py")]
    return tool.main([str(place / "recipe.yaml"), "--root", str(place / "runs"), *words], train)


def test_seeds_are_the_outer_loop(tool):
    names = [experiment.name for experiment in tool.plan("g", ["none", "tis"], [1, 2])]
    assert names == ["g_none_s1", "g_tis_s1", "g_none_s2", "g_tis_s2"]


def test_a_failed_run_does_not_stop_the_next_and_the_exit_status_says_so(tool, place, capfd):
    assert call(tool, place, "--corrections", "broken", "tis", "--steps", "2", "optim.lr=0.1") == 1
    out = capfd.readouterr().out
    assert "recipe_corrections_broken  failed, exit status 1" in out
    assert "recipe_corrections_tis     finished" in out
    assert "0.250 → 0.750" in out
    html = (place / "runs/recipe_corrections.html").read_text()
    assert "recipe_corrections_broken" in html
    assert "recipe_corrections_tis" in html
    config = (place / "runs/recipe_corrections_tis/config.yaml").read_text()
    assert os.environ["WANDB_RUN_GROUP"] == "recipe_corrections"
    for word in ("correction=tis", "run.steps=2", "optim.lr=0.1"):
        assert f"'{word}'" in config
    assert call(tool, place, "--corrections", "tis") == 2  # used: said before anything is started
    assert "run.if_exists=archive" in capfd.readouterr().err


def test_all_finished_is_success(tool, place):
    assert call(tool, place, "--corrections", "none", "--seeds", "1", "--group", "g") == 0
    assert "'run.seed=1'" in (place / "runs/g_none_s1/config.yaml").read_text()


def test_ctrl_c_stops_the_child_and_still_reports(place):
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('compare_corrections', sys.argv[1]); "
        "m = u.module_from_spec(s); sys.modules[s.name] = m; s.loader.exec_module(m); "
        "sys.exit(m.main(sys.argv[3:], [sys.executable, sys.argv[2]]))"
    )
    words = [str(place / "recipe.yaml"), "--root", str(place / "runs"), "--corrections", "endless", "tis"]
    command = [sys.executable, "-c", code, str(TOOL), str(place / "trainer.py"), *words]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    metrics = place / "runs/recipe_corrections_endless/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    tool.send_signal(signal.SIGINT)
    out, _ = tool.communicate(timeout=60)
    assert tool.returncode == 130
    assert read_status(metrics.parent)["state"] == "stopped"
    assert "recipe_corrections_endless  stopped" in out
    assert "recipe_corrections_tis      not started" in out
    assert (place / "runs/recipe_corrections.html").exists()
    assert not (place / "runs/recipe_corrections_tis").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--corrections", "tis", "tis"], "names one twice"),
        (["--corrections", "tis", "run.name=x"], "sets that key itself"),
    ],
)
def test_bad_arguments(tool, place, capsys, words, message):
    with pytest.raises(SystemExit):
        call(tool, place, *words)
    assert message in capsys.readouterr().err
