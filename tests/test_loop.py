"""Every correction preset and every loss trains the toy for a few steps, with the real learner and
the real engine.
"""

import json
import math
import os
from pathlib import Path

import pytest
from preloaded import said

from megatron_rl.config.schema import Estimator, LossName
from megatron_rl.data.toy import write_toy
from megatron_rl.loss import table

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parent.parent
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "correction").glob("*.yaml"))
LOSSES = [name.value for name in LossName]
# anchored to the sampler, a ratio and a weight exclude each other
BYPASS_ONLY = {name for name, loss in table.LOSSES.items() if loss.against_sampler}

# rejects nothing; with renormalize it reads the proximal logprobs
FAR = "[{level: token, stat: ratio, high: 1e8}]"

RECIPE = """
base: {root}/recipes/quickstart.yaml
run: {{steps: 2, name: loop}}
model: {{path: {folder}/toy/model, init: random}}
data: {{train: {folder}/toy/train.jsonl, eval: {folder}/toy/test.jsonl}}
rollout: {{prompts_per_step: 16, samples_per_prompt: 4, max_gen_batches: 2}}
sampler: {{vllm: {{max_num_seqs: 64}}}}
reward: {{name: "uneven_reward:by_answer"}}
learner: {{tensor_parallel: 1, n_minibatches: 2}}
loss: {{kl_coef: 0.1}}  # so that the learner keeps a reference; the cases switch it off
eval: {{every: 0}}
log: {{record_every: 0}}
"""
# a policy that knows nothing is right too rarely: this reward differs within a group without being
# noise
REWARD = """
def by_answer(row, answer_key, response):
    return (sum(map(ord, response)) % 3) / 2
"""


def cases() -> dict[str, list[str]]:
    wanted = {f"correction {name}": [f"correction={name}", "loss.kl_coef=0"] for name in PRESETS}
    for name in ("center", "center_tis"):
        wanted[f"correction {name}"].append("rollout.top_logprobs.max=8")
    for name in LOSSES:
        anchor = ["correction=bypass"] if name in BYPASS_ONLY else ["correction=tis"]
        wanted[f"loss {name}"] = [f"loss.name={name}", "loss.kl_coef=0", *anchor]
    wanted["kl to a reference"] = ["loss.kl_coef=0.1"]
    wanted["entropy bonus"] = ["loss.entropy_coef=0.01"]
    once = ["learner.n_minibatches=1", "loss.kl_coef=0", f"correction.reject={FAR}"]
    wanted["one update"] = [*once, "correction.rebaseline=false", "correction.renormalize=false"]
    wanted["one update, scored before"] = [*once, "correction.rebaseline=false"]
    wanted["top_k and top_p"] = [
        "rollout.top_k=4",
        "rollout.top_p=0.8",
        "sync.probe_every=1",
        "loss.kl_coef=0.1",
    ]
    wanted["top logprobs"] = ["rollout.top_logprobs={max: 8, mass: 0.9}", "sync.probe_every=1"]
    wanted["estimate under the learner"] = ["reward.learner_estimate=true"]
    wanted |= {
        f"advantage {name.value}": [f"advantage.estimator={name.value}", "loss.kl_coef=0"]
        for name in Estimator
        if name is not Estimator.none
    }
    return wanted


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("loop")
    write_toy(folder / "toy")
    (folder / "loop.yaml").write_text(RECIPE.format(root=ROOT, folder=folder))
    (folder / "uneven_reward.py").write_text(REWARD)
    words = [ROOT / "tests" / "loop_cases.py", folder, json.dumps(cases())]
    printed = said(
        "megatron", words, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, timeout=500
    )
    found = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("CASE ")]
    return {case["name"]: case for case in found}


@pytest.mark.parametrize("name", cases())
def test_it_trains(results: dict[str, dict], name: str) -> None:
    case = results[name]
    steps = case["lines"][1:]
    assert len(steps) == 2
    for line in steps:
        assert line["optim/skipped"] == 0
        assert math.isfinite(line["loss/total"])
        assert line["optim/grad_norm"] > 0
        assert line["reward/std"] > 0
    assert case["moved"] > 0


def test_the_corrections_differ_where_they_should(results: dict[str, dict]) -> None:
    last = {name: results[f"correction {name}"]["lines"][-1] for name in PRESETS}
    assert last["none"]["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert 0 < last["tis"]["rollout_corr/rollout_is_eff_sample_size"] <= 1
    assert "rollout_corr/cap" in last["adaptive"]
    assert last["tis"]["rollout_corr/k3_kl"] > 0  # INT8 and BF16 do not agree exactly
    # the supervised loss on sampled answers is corrected like every other
    assert results["loss cross_entropy"]["lines"][-1]["rollout_corr/k3_kl"] > 0


def test_the_reference_and_the_estimate_are_measured(results: dict[str, dict]) -> None:
    # the cases before have moved the policy away from where the reference was kept
    assert all(line["loss/kl"] > 0 for line in results["kl to a reference"]["lines"][1:])
    line = results["estimate under the learner"]["lines"][-1]
    assert abs(line["reward/learner_estimate"] - line["reward/sampler_mean"]) < 0.2
    assert line["reward/learner_estimate_stderr"] > 0


def test_one_update_makes_no_pass_before_it_and_measures_the_same_things(
    results: dict[str, dict],
) -> None:
    own, scored = (results[f"one update{how}"]["lines"][1:] for how in ("", ", scored before"))
    for line, other in zip(own, scored, strict=True):
        names = [{name for name in one if not name.startswith("sync/")} for one in (line, other)]
        assert names[0] == names[1]
        assert line["loss/ratio_mean"] == pytest.approx(1, abs=1e-6)
        assert line["loss/approx_kl"] == 0
        assert line["rollout_corr/k3_kl"] > 0


def test_the_learner_renormalises_over_what_the_sampler_drew_from(results: dict[str, dict]) -> None:
    """Without, every logprob would be off by what the filters cut: far more than the probe
    allows.
    """
    for line in results["top_k and top_p"]["lines"][1:]:
        assert line["rollout/logprobs_missing"] == 0
        assert line["sync/probe_abs_diff"] < 0.02 < 0.2 < -line["rollout_corr/kept_log_mass"]
        assert line["rollout_corr/logp_abs_diff_mean"] < 0.02
        assert line["rollout_corr/outside_support"] < 0.2
        assert 0 < line["loss/entropy"] < math.log(4 + 1)


def test_top_logprobs_are_measured_where_they_are_requested(results: dict[str, dict]) -> None:
    requested = {"top logprobs", "correction center", "correction center_tis"}
    for name, case in results.items():
        for line in case["lines"][1:]:
            found = [key for key in line if key.startswith("rollout/top_")]
            assert len(found) == (3 if name in requested else 0)
    for line in results["top logprobs"]["lines"][1:]:
        assert 1 <= line["rollout/top_tokens_mean"] <= 8
        assert 0.3 < line["rollout/top_mass_mean"] <= 1
        assert 0 <= line["rollout/top_tokens_limited_fraction"] <= 1
    for name in ("correction center", "correction center_tis"):
        for line in results[name]["lines"][1:]:
            assert line["center/token_fraction"] > 0.9
            assert 0 < line["center/drift_norm"] < 100
            assert -1 <= line["center/drift_cosine"] <= 1


def test_every_step_was_sampled_by_the_policy_before_it(results: dict[str, dict]) -> None:
    for number, case in enumerate(results.values()):
        assert [line["sync/version"] for line in case["lines"]] == [
            3 * number,
            3 * number + 1,
            3 * number + 2,
        ]
        assert all(line["rollout/staleness_max"] == 0 for line in case["lines"][1:])
