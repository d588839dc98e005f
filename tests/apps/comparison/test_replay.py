"""Replay: metrics of other corrections on recorded batches equal those of the loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from run_factory import make_config, make_run, make_scored, make_yaml, quiet

from megatron_rl import cli
from megatron_rl.apps.comparison.replay import replay
from megatron_rl.batch import collate
from megatron_rl.config.schema import (
    AdvantageConfig,
    Anchor,
    CorrectionConfig,
    Level,
    RejectRule,
    Stat,
    WeightConfig,
)
from megatron_rl.rollout_correction.correction import rollout_correction
from megatron_rl.tracking.record import Recorder
from megatron_rl.tracking.rollout_file import load_recorded, recorded_steps
from megatron_rl.tracking.run_dir import RunDir


def main(arguments):
    return cli.main(["replay", *arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "int8", steps=20)


def test_a_recorded_batch_is_the_batch_of_the_step(run):
    step, path = recorded_steps(RunDir(run).rollouts)[0]
    scored, prox_N = make_scored(32, noise=0.5, seed=step)
    recorded = load_recorded(path)
    batch = recorded.batch
    assert recorded.prox_logprobs_N is not None
    assert torch.equal(recorded.prox_logprobs_N, prox_N)
    assert batch.responses.count(batch.mask_N).tolist() == [
        len(one.rollout.token_ids) for one in scored
    ]
    assert batch.rewards_B.tolist() == [one.reward for one in scored]
    assert torch.equal(batch.tokens_P, collate(scored).tokens_P)
    direct = rollout_correction(batch, recorded.prox_logprobs_N, CorrectionConfig())
    found = replay([recorded], {"tis": CorrectionConfig()}, AdvantageConfig())["tis"]
    assert found["kl"] == pytest.approx(direct.metrics["rollout_corr/kl"])


def test_a_rule_on_staleness_judges_by_the_version_that_the_step_began_with(run):
    step, path = recorded_steps(RunDir(run).rollouts)[1]
    recorded = load_recorded(path)
    oldest = step - 1 - int(recorded.batch.token_versions_N[recorded.batch.mask_N].min())
    rules = {
        high: [RejectRule(Level.token, Stat.staleness, high=high)] for high in (oldest, oldest - 1)
    }
    corrections = {str(high): CorrectionConfig(reject=rule) for high, rule in rules.items()}
    found = replay([recorded], corrections, AdvantageConfig())
    assert found[str(oldest)]["stale_masked_fraction"] == 0
    assert found[str(oldest - 1)]["stale_masked_fraction"] > 0


def test_metrics_are_means_over_the_steps_and_the_largest_weight_of_all(run):
    batches = [load_recorded(path) for _, path in recorded_steps(RunDir(run).rollouts)]
    ratios = {"ratios": CorrectionConfig(weight=WeightConfig(high=None))}
    one, other = (replay([batch], ratios, AdvantageConfig())["ratios"] for batch in batches)
    both = replay(batches, ratios, AdvantageConfig())["ratios"]
    assert both["kl"] == pytest.approx((one["kl"] + other["kl"]) / 2)
    assert both["rollout_is_max"] == max(one["rollout_is_max"], other["rollout_is_max"])


def test_the_command_line_replays_presets_of_the_runs_own_configuration(run, capsys):
    assert main([str(run), "--corrections", "none", "tis", "correction.weight.high=1.5"]) == 0
    text = capsys.readouterr().out
    assert main([str(run), "correction.weight.high=1.5", "--corrections", "none", "tis"]) == 0
    assert capsys.readouterr().out == text
    lines = text.splitlines()
    assert lines[0].startswith("2 recorded steps")
    assert [line.split("  ")[0] for line in lines[2:]] == ["(as run)", "none", "tis"]
    assert lines[2].split()[3:5] != lines[4].split()[2:4]  # the override reached the preset


def test_corrections_that_read_top_logprobs(tmp_path, capsys):
    scored, prox_N = make_scored(8, noise=0.5)
    random = np.random.default_rng(0)

    def with_top(one):
        n = len(one.rollout.token_ids)
        logprobs = np.log(random.uniform(0.1, 0.45, 2 * n)).astype(np.float16)
        top = {"top_counts": [2] * n, "top_ids": range(2 * n), "top_logprobs": logprobs}
        return replace(one, rollout=replace(one.rollout, **top))

    scored = [with_top(one) for one in scored]
    batch = collate(scored)
    top_prox_E = batch.top_logprobs_E.float() + torch.linspace(-0.4, 0.4, len(batch.top_ids_E))
    config = make_config()
    folder = tmp_path / "run"
    recorder = Recorder(config.log, make_yaml(config, "run"), folder, 1, quiet(1))
    recorder.rollouts(1, scored, prox_logprobs_N=prox_N, top_prox_logprobs_E=top_prox_E)
    recorded = load_recorded(recorded_steps(RunDir(folder).rollouts)[0][1])
    assert torch.equal(recorded.top_prox_logprobs_E, top_prox_E)
    rule = RejectRule(Level.token, Stat.top_kl, high=0.02)
    correction = CorrectionConfig(center="top_logprobs", reject=[rule])
    direct = rollout_correction(batch, prox_N, correction, top_prox_E=top_prox_E).metrics
    found = replay([recorded], {"center": correction}, AdvantageConfig())["center"]
    for name in ("top_kl", "top_reverse_kl", "top_tv", "rollout_rs_masked_fraction"):
        assert found[name] == pytest.approx(direct[f"rollout_corr/{name}"]), name
        assert found[name] > 0
    assert main([str(folder)]) == 0
    assert f"KL(sampler, learner) {found['top_kl']:.2e}" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_said(run, tmp_path, capsys):
    with pytest.raises(Exception, match="anchor sampler"):
        replay([], {"bypass": CorrectionConfig(anchor=Anchor.sampler)}, AdvantageConfig())
    recorded = load_recorded(recorded_steps(RunDir(run).rollouts)[0][1])
    with pytest.raises(Exception, match="top tokens were not recorded"):
        replay([recorded], {"center": CorrectionConfig(center="top_logprobs")}, AdvantageConfig())
    config = make_config()
    recorder = Recorder(
        config.log,
        make_yaml(config, "run"),
        tmp_path / "run",
        1,
        quiet(1),
    )
    assert main([str(tmp_path / "run")]) == 2
    assert "no recorded steps" in capsys.readouterr().err
    recorder.rollouts(1, make_scored(4)[0])
    assert main([str(tmp_path / "run")]) == 2
    assert "no learner logprobs" in capsys.readouterr().err
    assert main([str(run), "--corrections", "tiss"]) == 2
    assert "tiss" in capsys.readouterr().err
