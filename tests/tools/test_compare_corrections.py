"""Comparisons of corrections and grids: their runs, failures, signals and reports.

The trainer is a stand-in that writes a run directory with the real Recorder.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import compare_corrections
import psutil
import pytest
from helpers import wait_for
from hub_server import hub_server, use, write_weights
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.data.toy import write_toy
from megatron_rl.tracking.status import read_status

ROOT = Path(__file__).parents[2]
TRAINER = """
import os, shutil, signal, sys, time
from io import StringIO
from pathlib import Path
from megatron_rl.tracking.console import PlainDisplay
from megatron_rl.tracking.record import Recorder
from megatron_rl.config.schema import LogSection

heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
options = dict(word.split("=", 1) for word in sys.argv[2:])
name = options["run.name"]
text = "run: {name: " + name + "}\\narguments: " + repr(sys.argv[1:]) + "\\ntags: " + os.environ.get("WANDB_TAGS", "")
with Recorder(LogSection(), text, Path(options["run.root"]) / name, 2, PlainDisplay(StringIO())) as recorder:
    recorder.log(0, {"eval/accuracy": 0.25})
    print("on cores", sorted(os.sched_getaffinity(0)))
    correction = options.get("correction")
    if correction == "broken" or sys.argv[1] == os.environ.get("BROKEN"):
        raise RuntimeError("no such luck")
    while correction == "endless" or correction == "asked" and not heard:
        time.sleep(0.05)
    if sys.argv[1].endswith("_sft.yaml"):
        shutil.copytree(os.environ["MODEL"], Path(options["run.root"]) / name / "model")
    recorder.log(2, {"eval/accuracy": 0.75})
"""


@pytest.fixture
def place(empty, handlers, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    (empty / "recipe.yaml").touch()
    (empty / "trainer.py").write_text(TRAINER)
    return empty


@pytest.fixture
def compare(place, capfd):
    """Output of the tool, for runs below runs/ whose trainer is the stand-in."""

    def compare(*words: str, status: int = 0, recipe: str = "recipe.yaml") -> str:
        capfd.readouterr()
        ended = compare_corrections.main(
            [recipe, "--root", "runs", *words], [sys.executable, "trainer.py"]
        )
        said = "".join(capfd.readouterr())
        assert ended == status, said
        return said

    return compare


def test_a_failed_run_does_not_stop_the_next_and_the_exit_status_says_so(compare, place):
    out = compare("--corrections", "broken", "tis", "--steps", "2", "optim.lr=0.1", status=1)
    assert re.search(r"_broken +failed", out)
    assert re.search(r"_tis +finished", out)
    assert "0.250 → 0.750" in out
    html = (place / "runs/recipe_corrections.html").read_text()
    assert "recipe_corrections_broken" in html
    assert "recipe_corrections_tis" in html
    config = (place / "runs/recipe_corrections_tis/config.yaml").read_text()
    assert os.environ["WANDB_RUN_GROUP"] == "recipe_corrections"
    for word in ("correction=tis", "run.steps=2", "optim.lr=0.1"):
        assert f"- {word}\n" in config
    # used: said before anything is started
    assert "run.if_exists=archive" in compare("--corrections", "tis", status=2)


GRID = """
base: recipe.yaml
seeds: [1, 2]
axes:
  sampler: {fine: [a.b=1], coarse: [a.b=2]}
  correction: {none: [correction=none], other: [correction=broken]}
leave_out: [{sampler: fine, correction: other}]
reference: {sampler: fine, correction: none}
"""


@pytest.fixture
def grid_file(place):
    (place / "grid.yaml").write_text(GRID)
    return place / "grid.yaml"


@pytest.fixture
def run_grid(compare, grid_file):
    return functools.partial(compare, recipe="grid.yaml")


def begun(said: str) -> list[str]:
    return re.findall(r"^\[\d+/\d+\] (grid_\w+)$", said, re.M)


@pytest.mark.fault(
    "a grid of runs is started again", "finished runs are not run again, the others go on"
)
def test_a_grid_goes_on_where_it_stands(run_grid, place, grid_file):
    said = run_grid(status=1)
    cells = ["fine_none", "coarse_none", "coarse_other"]
    assert begun(said) == [f"grid_{cell}_s{seed}" for seed in (1, 2) for cell in cells]
    assert "grid_coarse_other_s1  failed" in said
    assert "about" in said.partition("[2/6]")[0]
    config = (place / "runs/grid_coarse_none_s2/config.yaml").read_text()
    for word in ("run.if_exists=resume", "a.b=2", "correction=none", "run.seed=2"):
        assert f"- {word}\n" in config
    assert "tags: sampler:coarse,correction:none" in config
    page = (place / "runs/grid.html").read_text()
    assert "2 of 2" in page
    assert "not judged: other" in page

    grid_file.write_text(GRID.replace("correction=broken", "correction=tis"))
    listed = run_grid("--dry-run")
    assert listed.count("to run") == 2
    assert listed.count("finished") == 4
    said = run_grid()
    assert begun(said) == ["grid_coarse_other_s1", "grid_coarse_other_s2"]
    assert "[6/6] finished" in said


@pytest.fixture
def model(place, monkeypatch):
    """Weights that the stand-in leaves after a warm start."""
    write_toy(place / "toy")
    config = AutoConfig.from_pretrained(place / "toy" / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "model")
    monkeypatch.setenv("MODEL", str(place / "model"))
    return place / "model"


def test_the_runs_of_a_seed_share_its_warm_start(run_grid, place, grid_file, model):
    grid_file.write_text(
        GRID.replace("broken", "tis") + "task: toy\noutliers: {factor: 16, channels: 1}\n"
    )
    said = run_grid("--starts")
    assert re.findall(r"^\[start\] (\w+)$", said, re.M) == ["grid_start_s1", "grid_start_s2"]
    assert begun(said) == []
    assert (place / "data/toy/train.jsonl").is_file()
    said = run_grid()
    assert "[start]" not in said
    assert len(begun(said)) == 6
    for seed in (1, 2):
        for cell in ("fine_none", "coarse_tis"):
            config = (
                place / f"runs/grid_{cell.replace('tis', 'other')}_s{seed}/config.yaml"
            ).read_text()
            assert f"- model.path=runs/grid_start_s{seed}/outliers_16x1\n" in config
    start = (place / "runs/grid_start_s2/config.yaml").read_text()
    assert "- run.seed=2\n" in start
    assert (place / "runs/grid_start_s1/outliers_16x1/config.json").is_file()


@pytest.mark.fault(
    "a grid's warm start fails", "no run begins without it, and a second call makes it"
)
def test_without_its_start_no_run_begins(run_grid, grid_file, model, monkeypatch):
    grid_file.write_text(GRID.replace("broken", "tis") + "task: toy\n")
    # as a run exports it
    shard = (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"some": shard.name}})
    )
    monkeypatch.setenv("BROKEN", "recipes/toy_sft.yaml")
    said = run_grid("--seeds", "1", status=1)
    assert begun(said) == []
    monkeypatch.delenv("BROKEN")
    assert len(begun(run_grid("--seeds", "1"))) == 3


def test_what_a_grid_says_goes_into_a_page(run_grid, place, monkeypatch):
    page = place / "page.md"
    monkeypatch.setattr(compare_corrections, "PAGE", page)
    monkeypatch.setattr(compare_corrections, "RESULTS", place)
    page.write_text("before\n<!-- grid: table -->\nold\n<!-- /grid -->\nafter\n")
    run_grid("--seeds", "1", "--write-docs", status=1)
    text = page.read_text()
    assert "0.500 | 0.750" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert (place / "grid.json").is_file()


EVALUATOR = """
import json, sys
from pathlib import Path
model, samples, *rest = sys.argv[1:]
assert samples == "eval.samples=3" and rest[:3] == ["--format", "bf16", "-o"]
Path(rest[3]).mkdir()
accuracy = 0.125 if "coarse" in model else 0.625
(Path(rest[3]) / "summary.json").write_text(json.dumps({"metrics": {"eval/accuracy": accuracy}}))
print("evaluated", model)
"""


def test_finished_runs_are_evaluated_in_bf16_once(run_grid, place, grid_file, monkeypatch):
    (place / "evaluator.py").write_text(EVALUATOR)
    monkeypatch.setattr(compare_corrections, "EVALUATE", [sys.executable, "evaluator.py"])
    monkeypatch.setattr(compare_corrections, "RESULTS", place)
    grid_file.write_text(GRID + "bf16_samples: 3\n")
    page = place / "page.md"
    page.write_text("<!-- grid: table -->\n<!-- /grid -->\n")
    words = ("--seeds", "1", "--write-docs", "page.md")
    said = run_grid(*words, status=1)
    assert said.count("evaluated runs/grid_") == 2  # not of the run that failed
    assert run_grid(*words, status=1).count("evaluated runs/grid_") == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| fine", "| coa"))]
    assert ["0.625" in row for row in rows] == [True, False, False]
    assert ["0.125" in row for row in rows] == [False, True, False]


def started(place, *corrections, at_once=1):
    """Return the tool's process and its first runs' folders, once each holds a line."""
    code = "import sys, compare_corrections as it; sys.exit(it.main(sys.argv[1:], [sys.executable, 'trainer.py']))"
    words = ["recipe.yaml", "--root", "runs", "--corrections", *corrections, f"--jobs={at_once}"]
    command = [sys.executable, "-c", code, *words]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    runs = [place / f"runs/recipe_corrections_{name}" for name in corrections[:at_once]]
    for metrics in (run / "metrics.jsonl" for run in runs):
        wait_for(lambda metrics=metrics: metrics.is_file() and metrics.stat().st_size > 0)
    return tool, *runs


def test_ctrl_c_stops_the_child_and_still_reports(place):
    tool, run = started(place, "endless", "tis")
    tool.send_signal(signal.SIGINT)
    out, _ = tool.communicate(timeout=240)
    assert tool.returncode == 130
    assert read_status(run)["state"] == "stopped"
    assert "recipe_corrections_endless  stopped" in out
    assert "recipe_corrections_tis      not started" in out
    assert (place / "runs/recipe_corrections.html").exists()
    assert not (place / "runs/recipe_corrections_tis").exists()


CORES = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(CORES) < 2, reason="two runs at a time want two cores")


@several
def test_two_at_a_time_have_their_own_cores_and_logs(compare):
    out = compare("--corrections", "none", "broken", "tis", "--jobs", "2", "--group", "g", status=1)
    begun = re.findall(r"^\[([123])/3\] (g_\w+)  its output: (\S+)$", out, re.M)
    assert [name for _, name, _ in begun] == ["g_none", "g_broken", "g_tis"]
    used = [
        re.search(r"on cores \[(.*)\]", Path(log).read_text())[1].split(", ") for _, _, log in begun
    ]
    assert sorted(int(core) for cores in used[:2] for core in cores) == CORES
    assert "no such luck" in Path(begun[1][2]).read_text()
    assert "g_broken failed" in out
    assert "on cores" not in out


@pytest.mark.fault(
    "USR1 to a comparison of several runs", "the present one finishes its step, and none follows"
)
def test_usr1_lets_the_run_end_and_starts_no_other(place):
    tool, _ = started(place, "asked", "tis")
    tool.send_signal(signal.SIGUSR1)
    out, _ = tool.communicate(timeout=240)
    assert tool.returncode == 1
    assert "recipe_corrections_asked  finished" in out
    assert "recipe_corrections_tis    not started" in out


@pytest.mark.fault(
    "kill -9 of a comparison of several runs", "the run that it has started ends too"
)
def test_a_killed_comparison_leaves_no_run(place):
    tool, _ = started(place, "endless", "tis")
    children = psutil.Process(tool.pid).children(recursive=True)
    assert children
    tool.kill()
    tool.communicate(timeout=240)
    assert psutil.wait_procs(children, 240)[1] == []


def test_what_the_runs_take_from_the_hub_is_printed_and_fetched_once(place, monkeypatch, capsys):
    toy = place / "data" / "toy"
    write_toy(toy)
    write_weights(toy / "model", max_file_bytes=200_000)
    (place / "mine.yaml").write_text(
        f"base: {ROOT}/conf/toy.yaml\nmodel: {{path: org/tiny, init: pretrained}}\n"
        "data: {train: org/sums}\n"
    )
    line = ["mine.yaml", "--corrections", "none", "tis"]
    monkeypatch.setattr(
        compare_corrections.Runner,
        "run",
        lambda self, jobs, *_: {job.name: compare_corrections.FINISHED for job in jobs},
    )
    with hub_server() as server:
        server.add("org/tiny", toy / "model")
        rows = (toy / "train.jsonl").read_bytes()
        server.add("org/sums", {"train.jsonl": rows}, kind="dataset")
        use(server, place / ".home", monkeypatch)
        assert compare_corrections.main([*line, "--dry-run"]) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert said.count("fetch      ") == 2
        assert "fetch      org/sums (data.train)" in said
        assert ".safetensors, 4 files to download, 0.6 MB" in said
        assert not any("/cdn/" in request for request in server.requests)
        assert compare_corrections.main(line) == 0, capsys.readouterr().err
        weights = [request for request in server.requests if request.startswith("GET /cdn/")]
        assert len(weights) == len(set(weights)) == len(list(toy.glob("model/*.safetensors")))
        names = [name for name in server.fetched() if not name.endswith(".safetensors")]
        assert len(names) == len(set(names))


@pytest.mark.fault(
    "one of several corrections is mistyped, or an override cannot work", "no run is started"
)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--corrections", "none", "tiss"], "tiss"),
        (["--corrections", "tis", "optim.lr=0"], "optim.lr is 0"),
        (["--corrections", "tis", "--seeds", "1", "-3"], "run.seed is -3"),
        (["--corrections", "tis", "data.train=nope.jsonl"], "'nope.jsonl'"),
    ],
)
def test_a_mistake_is_found_before_the_first_run(place, monkeypatch, capsys, words, key):
    monkeypatch.setattr(
        compare_corrections.Runner, "run", lambda self, *_: pytest.fail("a run was started")
    )
    write_toy(place / "data" / "toy")
    (place / "mine.yaml").write_text(
        f"base: {ROOT}/conf/toy.yaml\nmodel: {{path: data/toy/model, init: random}}\n"
    )
    assert compare_corrections.main(["mine.yaml", *words]) == 2
    assert key in capsys.readouterr().err
    assert not (place / "runs").exists()
