"""Records of a run: strict JSON, archives, its end, rollouts, W&B offline."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import program
from run_factory import make_config, make_scored, make_yaml, quiet, start

from megatron_rl.apps.reports.run_data import recorded_breakdowns
from megatron_rl.batch import Share, collate
from megatron_rl.config import ConfigError, load
from megatron_rl.config.plain_yaml import redact
from megatron_rl.config.schema import Config, IfExists, LogSection, RunSection, Wandb
from megatron_rl.tracking.metrics import UnknownMetricWarning
from megatron_rl.tracking.metrics_file import decode_line, encode_line, read_metrics
from megatron_rl.tracking.progress import Seen
from megatron_rl.tracking.record import PhaseClock, Recorder
from megatron_rl.tracking.rollout_file import load_recorded, read_rollouts, recorded_steps
from megatron_rl.tracking.run_dir import RunDir, RunDirectoryUsed, open_run, read_status
from megatron_rl.tracking.wandb_log import resolve_mode


def strict(text):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_nan_and_infinities_are_strict_json_and_come_back():
    metrics = {
        "loss/total": math.nan,
        "optim/grad_norm": math.inf,
        "loss/policy": -math.inf,
        "optim/lr": 0.5,
    }
    line = strict(encode_line(metrics))
    assert line["loss/total"] is None
    assert line["non_finite"] == {
        "loss/total": "nan",
        "optim/grad_norm": "inf",
        "loss/policy": "-inf",
    }
    back = decode_line(encode_line(metrics))
    assert math.isnan(back.pop("loss/total"))
    assert back == {"optim/grad_norm": math.inf, "loss/policy": -math.inf, "optim/lr": 0.5}


def test_each_step_is_one_flushed_line_with_sorted_keys(tmp_path):
    recorder = start(tmp_path / "run")
    recorder.log(1, {"optim/lr": torch.tensor(0.5), "loss/total": math.nan})
    text = (tmp_path / "run/metrics.jsonl").read_text()  # before close: a kill loses nothing
    assert text.count("\n") == 1
    line = strict(text)
    assert line["optim/lr"] == 0.5
    assert line["progress/step"] == 1
    assert isinstance(line["progress/step"], int)
    assert list(line) == sorted(line)


def test_the_time_of_a_step_is_split_without_counting_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("megatron_rl.tracking.record.time.perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    clock = PhaseClock()
    passes(1)
    clock.enter("rollout")
    passes(4)
    clock.enter("reward")
    passes(2)
    assert clock.leave() == "rollout"
    passes(1)
    assert clock.leave() is None
    passes(3)
    split = clock.finish_step()
    assert split == {"time/rollout": 5, "time/reward": 2, "time/step": 11, "time/other": 4}
    passes(2)
    assert clock.finish_step() == {"time/step": 2, "time/other": 2}


def test_archives_are_numbered(tmp_path):
    config = Config(run=RunSection(if_exists=IfExists.archive))
    for number in (1, 2, 3):
        recorder = start(tmp_path / "run", config)
        recorder.log(number, {})
        recorder.close()
    steps = {
        p.name: read_metrics(p / "metrics.jsonl")[0]["progress/step"] for p in tmp_path.iterdir()
    }
    assert steps == {"run.1": 1, "run.2": 2, "run": 3}


def test_a_claimed_directory_is_taken_over_once(run_folder):
    config = make_config()
    run_folder.mkdir()  # an empty one is not used
    run, _ = open_run(run_folder, IfExists.refuse, make_yaml(config, "run"))
    (run.logs / "rank_0.log").write_text("started by the launcher\n")
    recorder = start(run_folder)
    assert recorder.run == run
    assert read_status(run.path)["state"] == "running"
    with pytest.raises(RunDirectoryUsed):
        start(run_folder)
    assert (run.logs / "rank_0.log").exists()
    assert (run.logs / "driver.log").exists()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("bad batch"), "failed", "ValueError: bad batch"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_the_status_says_how_a_run_ended(run_folder, error, state, reason):
    recorder = start(run_folder)
    recorder.log(1, {"loss/total": 1.0})
    with pytest.raises(type(error)), recorder:
        raise error
    status = read_status(run_folder)
    assert (status["state"], status["reason"], status["step"]) == (state, reason, 1)


def test_the_first_close_counts(tmp_path):
    with start(tmp_path / "run") as recorder:
        recorder.close("stopped", "SIGTERM")
    assert read_status(tmp_path / "run")["reason"] == "SIGTERM"


def test_an_unknown_metric_is_written_reported_and_warned_of_once(tmp_path):
    recorder = start(tmp_path / "run")
    with pytest.warns(UnknownMetricWarning):
        recorder.log(1, {"loss/lss": 1.0})
    recorder.log(2, {"loss/lss": 2.0})  # a second warning would be an error here
    recorder.close()
    assert read_status(tmp_path / "run")["unknown_metrics"] == ["loss/lss"]
    assert [line["loss/lss"] for line in read_metrics(tmp_path / "run/metrics.jsonl")] == [1.0, 2.0]


def test_an_incomplete_last_line_loses_only_itself(run_folder):
    recorder = start(run_folder)
    recorder.log(1, {"loss/total": 1.0})
    metrics = RunDir(run_folder).metrics
    metrics.write_text(metrics.read_text() + '{"loss/total": 2.0, "progr')
    (run_folder / "status.json").write_text('{"state": "starting"}')  # as a resumed run finds it
    again = start(run_folder)
    again.log(2, {"loss/total": 3.0})
    assert [line["loss/total"] for line in read_metrics(metrics)] == [1.0, 3.0]


def test_rollouts_round_trip(run_folder):
    recorder = start(run_folder)
    scored, prox_N = make_scored(9)
    weights_N = torch.rand_like(prox_N)
    mask_N = torch.rand_like(prox_N) > 0.2
    recorder.rollouts(20, scored, prox_logprobs_N=prox_N, weights_N=weights_N, mask_N=mask_N)
    recorder.rollouts(1, scored)
    files = recorded_steps(RunDir(run_folder).rollouts)
    assert [(step, path.name) for step, path in files] == [
        (1, "step_1.parquet"),
        (20, "step_20.parquet"),
    ]
    assert len(list(files[0][1].parent.iterdir())) == 2  # nothing partial is left
    table = read_rollouts(files[1][1]).to_pylist()
    lengths = [len(one.rollout.token_ids) for one in scored]
    columns = (column_N.split(lengths) for column_N in (prox_N, weights_N, mask_N))
    for row, one, prox, weights, mask in zip(table, scored, *columns, strict=True):
        n = len(one.rollout.token_ids)
        assert row["token_ids"] == list(one.rollout.token_ids)
        assert row["group"] == one.rollout.group
        assert row["sampler_logprobs"] == torch.tensor(one.rollout.logprobs).tolist()
        assert row["prox_logprobs"] == prox.tolist()
        assert row["weights"] == weights.tolist()
        assert row["kept"] == mask.tolist()
        assert row["loss_mask"] == [True] * n
        assert (row["reward"], row["policy_version"], row["finish_reason"]) == (
            one.reward,
            3,
            "stop",
        )
    assert pq.read_table(files[0][1]).column("prox_logprobs").null_count == 9
    with pytest.raises(ValueError, match="tokens"):
        recorder.rollouts(2, scored, prox_logprobs_N=prox_N[:-1])


def test_what_tokens_were_drawn_among_and_the_versions_of_an_answer_round_trip(run_folder):
    recorder = start(run_folder)
    scored, prox_N = make_scored(3)
    n = len(scored[1].rollout.token_ids)
    # an update came into the second one
    versions = [3] * (n // 2) + [4] * (n - n // 2)
    drawn = []
    for place, one in enumerate(scored):
        counts = [1 + at % 3 for at in range(len(one.rollout.token_ids))]
        kept = {
            "kept_ids": range(sum(counts)),
            "kept_counts": counts,
            "top_ids": range(sum(counts)),
            "top_counts": counts,
            "top_logprobs": np.linspace(0, -9, sum(counts), dtype=np.float16),
            "versions": versions if place == 1 else None,
        }
        drawn.append(replace(one, rollout=replace(one.rollout, **kept)))
    recorder.rollouts(1, drawn, prox_logprobs_N=prox_N)
    ((_, path),) = recorded_steps(RunDir(run_folder).rollouts)
    batch = load_recorded(path).batch
    wanted = collate(drawn)
    assert torch.equal(batch.kept_ids_K, wanted.kept_ids_K)
    assert torch.equal(batch.kept_counts_N, wanted.kept_counts_N)
    assert torch.equal(batch.top_ids_E, wanted.top_ids_E)
    assert torch.equal(batch.top_counts_N, wanted.top_counts_N)
    assert torch.equal(batch.top_logprobs_E, wanted.top_logprobs_E)
    assert batch.top_logprobs_E.dtype == torch.float16
    with pytest.raises(ValueError, match="1 of 3"):
        collate([*drawn[:2], scored[2]])
    assert [row["versions"] for row in read_rollouts(path).to_pylist()] == [None, versions, None]
    assert torch.equal(batch.versions_N, wanted.versions_N)
    assert batch.rows(torch.tensor([1])).token_versions_N.tolist() == versions
    assert batch.versions_B.tolist() == [3, 3, 3]
    metrics = Seen().metrics(Share.alone(batch), step=6)
    assert (metrics["rollout/staleness_max"], metrics["rollout/spanning_fraction"]) == (
        2,
        pytest.approx(1 / 3),
    )
    ages = {
        one.label: one.tokens
        for one in recorded_breakdowns(load_recorded(path), policy_version=5)
        if one.by == "staleness"
    }
    assert ages == {"1": n - n // 2, "2": int(batch.mask_N.sum()) - (n - n // 2)}


def test_without_trackers_the_configuration_is_not_parsed(run_folder, monkeypatch):
    config = make_config()
    monkeypatch.setattr("megatron_rl.tracking.record.read_yaml", lambda _: pytest.fail("parsed"))
    Recorder(config.log, make_yaml(config, "run"), run_folder, 1, quiet(1)).close()


def test_recordings_without_top_logprobs_are_replayed(run_folder):
    recorder = start(run_folder)
    scored, prox_N = make_scored(3)
    recorder.rollouts(1, scored, prox_logprobs_N=prox_N)
    ((_, path),) = recorded_steps(RunDir(run_folder).rollouts)
    table = read_rollouts(path)
    assert table.column("top_ids").null_count == 3
    pq.write_table(table.drop_columns(["top_ids", "top_counts", "top_logprobs"]), path)
    assert load_recorded(path).batch.top_counts_N is None
    pq.write_table(table.drop_columns(["kept_ids"]), path)
    with pytest.raises(ValueError, match="without kept_ids"):
        load_recorded(path)


def test_no_secret_and_no_environment_is_written(run_folder, monkeypatch):
    monkeypatch.setenv("SOME_SETTING", "value-of-the-environment")
    config = make_config()
    text = make_yaml(config, "run") + "extra:\n  api_key: sesame\n  hf_token: sesame\n"
    Recorder(config.log, text, run_folder, 1, quiet(1)).close()
    written = "".join(path.read_text() for path in run_folder.rglob("*") if path.is_file())
    assert "value-of-the-environment" not in written
    assert "sesame" not in written
    assert "prompt_key: null" in written
    plain = {
        "max_prompt_tokens": 5,
        "prompt_key": "q",
        "tokens_per_microbatch": 1,
        "stop_token_id": 3,
    }
    assert redact(plain) == plain
    assert (
        redact({"sampler": {"vllm": {"api_key": "x"}}, "password": None})["sampler"]["vllm"][
            "api_key"
        ]
        == "(hidden)"
    )
    with pytest.raises(ConfigError, match=r"environment\.settings") as refused:
        load("recipes/tools.yaml", ["environment.settings={service: {api_key: sesame}}"])
    assert "sesame" not in str(refused.value)


def test_wandb_modes(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert resolve_mode(Wandb.auto) is Wandb.offline
    assert resolve_mode(Wandb.none) is Wandb.none
    with pytest.raises(ValueError, match=r"log\.wandb=online"):
        resolve_mode(Wandb.online)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / "none").write_text("machine wandb.corp.example login user password key\n")
    assert resolve_mode(Wandb.auto) is Wandb.offline
    (tmp_path / "settings").write_text("[default]\nbase_url = https://wandb.corp.example\n")
    assert resolve_mode(Wandb.auto) is Wandb.online
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_mode(Wandb.auto) is Wandb.online


def test_wandb_offline_needs_no_network_and_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WANDB_RUN_GROUP", "a_group")
    config = Config(log=LogSection(wandb=Wandb.offline))
    with start(tmp_path / "run", config) as recorder:
        recorder.log(1, {"loss/total": 1.0, "optim/grad_norm": math.nan})
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    stored = file.read_bytes()
    assert b"loss/total" in stored
    assert b"a_group" in stored


def test_importing_the_recorder_loads_neither_torch_nor_wandb_nor_plotly():
    heavy = {"torch", "wandb", "plotly", "vllm"}
    assert (
        program(f"import sys, megatron_rl.tracking.record; print({heavy} & {{*sys.modules}})")
        == "set()\n"
    )
