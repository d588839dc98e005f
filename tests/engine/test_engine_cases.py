"""Live engines with mixtures of experts, vLLM's transports, sleep and an FP8 cache.

All of it happens in one process (`engine_cases.py`); here is what has to have come out.
"""

from pathlib import Path
from statistics import fmean

import pytest
from preloaded import found_by

from megatron_rl.weight_sync.buckets import BUCKET_BYTES

pytestmark = pytest.mark.engine
PATIENCE_S = 240.0
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
BEFORE_UPDATE = 6  # tokens: in_flight_cases.py


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    script = Path(__file__).with_name("engine_cases.py")
    return found_by(
        "vllm", script, tmp_path_factory.mktemp("engines"), timeout=PATIENCE_S, **ONE_PROCESS
    )


VICTIMS = {
    "qwen3_moe": (
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "experts.routed_experts.w2_weight[2]",
    ),
    "mixtral": (
        "model.layers.0.block_sparse_moe.experts.3.w1.weight",
        "experts.routed_experts.w13_weight[3]",
    ),
}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_updates_reach_every_expert_and_faults_are_named(family: str, found: dict) -> None:
    """The Qwen3 mixture runs INT8 with its experts in BF16, the Mixtral all BF16."""
    case = found[family]
    victim, stack = VICTIMS[family]
    assert case["said"] == ["", "", ""]
    assert case["changes"]
    assert case["back"], "a change and a change back"
    assert case["fresh"], "as an engine that starts from the exported folder"
    assert f"missing tensor {victim}" in case["missing"]
    assert case["intact"], "a refused update leaves the answers as they were"
    assert case.get("kept_kernels_show", True), (
        "without packing the experts again the answers are wrong"
    )
    assert stack in case["unwritten"]
    assert "unwritten" in case["unwritten"]
    assert case["changed"] == ["", True], (
        "the verified bytes are loaded even if the files change afterwards"
    )
    assert case["healed"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_engine_reports_the_experts_that_its_routers_choose(family: str, found: dict) -> None:
    """Compare with transformers' routers with the same weights in BF16; close choices may differ."""
    case = found[family]
    assert case["unmoved"], "watching changes no answer"
    reported = [
        sorted(experts) for tokens in case["routes"] for layers in tokens for experts in layers
    ]
    other = [
        sorted(experts)
        for tokens in case["other routes"]
        for layers in tokens
        for experts in layers
    ]
    assert len(reported) == len(other) >= 90
    assert sum(map(list.__ne__, reported, other)) <= 0.1 * len(reported)
    assert len(set(map(tuple, reported))) > 3


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_answers_come_with_the_experts_of_every_token_read(family: str, found: dict) -> None:
    """Compare with a prefill of the whole sequence at once, which sums in another order."""
    first, cached = found[family]["kept"]
    for case in (first, cached):
        assert case["answers"] == 7 and case["read"] > 200
        assert case["differ"] <= 0.01 * case["read"]
    assert cached["prefilled"] < first["prefilled"], "a prefix was read before"


def test_the_way_of_gpus_asks_for_what_vllm_loads(found: dict) -> None:
    assert found["checked"]["layerwise"] == "", "INT8 layers, and attention that vLLM gives scales"
    whole, without_an_expert = found["mixtral"]["layerwise"]
    assert whole == ""
    assert "(some of its experts)" in without_an_expert


FAULTS = {
    "unannounced": "missing tensor lm_head.weight",
    "stale": "stale policy version",
    "flipped byte": "corrupt tensor model.layers.1.mlp.down_proj.weight",
    "lost chunk": "announced, never arrived",
    "sent twice": "duplicate tensor",
    "abandoned": "abandoned",
}


def test_a_staged_update_over_a_transport_of_vllm_is_all_or_nothing(found: dict) -> None:
    case = found["checked"]
    assert case["said"] == ["", "", ""]
    assert case["changes"]
    assert case["back"]
    assert case["intact"] == [True] * len(FAULTS), "the version before serves on"
    for fault, message in FAULTS.items():
        assert message in case["staged"][fault]


@pytest.mark.fault(
    "the prefix cache is not reset after an update", "it is an error; no answer until a good update"
)
def test_prefixes_of_the_old_weights_are_not_answered_from(found: dict) -> None:
    case = found["checked"]
    assert "prefix cache" in case["held"]
    assert "of no version" in case["refused while held"]
    assert case["reset"], "the next good update repairs it"


def test_a_request_between_sleep_and_a_completed_sync_is_refused(found: dict) -> None:
    case = found["checked"]["sleep"]
    assert "asleep (kv_cache, weights)" in case["asleep"]
    assert "tag 'weights'" in case["update asleep"]
    assert case["same"], "level 1 keeps the weights"
    assert "asleep (kv_cache)" in case["cache asleep"]
    assert "corrupt tensor" in case["refused sync"]
    assert case["synced"] == ""
    assert "asleep (kv_cache)" in case["synced, cache asleep"]
    assert case["new"]
    assert "discarded in sleep" in case["discarded"]
    assert "versions or scales" in case["lost scale"]


def differences(answers: list, reference: list, span: slice) -> list[float]:
    return [
        abs(mine - other)
        for (_, logprobs, _), theirs in zip(answers, reference, strict=True)
        for mine, other in zip(logprobs[span], theirs[span], strict=True)
    ]


def test_new_weights_come_between_two_tokens(found: dict) -> None:
    """Each span agrees with its own version's weights in transformers, and with those of the other
    it does not.
    """
    case = found["in_flight"]
    before = slice(0, BEFORE_UPDATE)
    after = slice(BEFORE_UPDATE, None)
    assert case["said"] == ["", ""]
    answers = case["updated"]
    by_first, by_second = case["by transformers"]
    assert [a[1][before] for a in answers] == [a[1][before] for a in case["alone"]], (
        "what was written stays"
    )
    assert [a[0][before] for a in answers] == [a[0][before] for a in case["alone"]]
    for tokens, _, versions in answers:
        first = versions[0]
        of_second = len(tokens) - BEFORE_UPDATE
        assert versions == [first] * BEFORE_UPDATE + [first + 1] * of_second
    assert fmean(differences(answers, by_first, before)) < 0.01
    assert fmean(differences(answers, by_first, after)) > 0.3
    assert fmean(differences(answers, by_second, before)) > 0.3
    assert fmean(differences(answers, by_second, after)) < 0.01


def test_an_update_of_the_same_weights_changes_no_answer(found: dict) -> None:
    """Random states are kept; only keys and values that are computed again round differently."""
    case = found["in_flight"]
    alone = [(tokens, logprobs) for tokens, logprobs, _ in case["alone"]]
    assert [(tokens, logprobs) for tokens, logprobs, _ in case["ahead"][0]] == alone
    for answers in (case["same weights"], case["ahead"][1]):
        same = [tokens == mine for (tokens, _, _), (mine, _) in zip(answers, alone, strict=True)]
        assert sum(same) >= len(alone) - 2
        assert all(len(set(versions)) == 2 for _, _, versions in answers)


def test_a_refused_update_in_mid_answer_changes_nothing(found: dict) -> None:
    case = found["in_flight"]
    refused = case["refused"]
    assert "missing tensor" in refused["said"]
    assert [answer[:2] for answer in refused["answers"]] == [answer[:2] for answer in case["alone"]]
    assert {len(set(versions)) for _, _, versions in refused["answers"]} == {1}
    assert refused["status"]["policy_version"] == case["versions"]


def test_answers_in_the_making_and_other_requests(found: dict) -> None:
    case = found["in_flight"]["beside others"]
    assert "responses are being generated" in case.pop("asleep")
    assert "was announced last" in case.pop("impatient")
    assert case.pop("open") == 12
    assert all(case.values()), case


@pytest.mark.parametrize("name", ["all", "top_k and top_p", "temperature", "updated"])
def test_top_tokens_are_those_of_all_logprobs(name: str, found: dict) -> None:
    case = found["top"][name]
    assert case["same"]
    counts = [count for one in case["answers"] for count in one["counts"]]
    for one in case["answers"]:
        assert one["right"]
        assert one["logprobs"]
        assert one["sums"] < 1e-4
        assert one["outside"] == 0
        assert one["versions"] == 1 + (name == "updated")
    assert 1 <= min(counts) < max(counts) <= 8
    filtered = name == "top_k and top_p"
    assert any(one["supports"] for one in case["answers"]) == filtered


def test_mass_and_number_both_limit_the_top_tokens(found: dict) -> None:
    counts = [
        count
        for case in found["top"].values()
        for one in case["answers"]
        for count in one["counts"]
    ]
    assert 0.1 < sum(count == 8 for count in counts) / len(counts) < 0.9


def test_vllm_s_trainer_side_takes_our_sources(found: dict) -> None:
    case = found["trainer"]
    assert case["sent"]
    assert "at index 0" in case["out of step"]
    for name, receiver in (("ipc", "CheckedIPC"), ("nccl", "CheckedNCCL")):
        assert case[f"{name} settings"] == [name, True, False], (
            "the first rank sends, the second does not"
        )
        assert case[f"{name} receiver"] == [receiver, True]
        assert f"sync.transport={name}: " in case[f"{name} without a GPU"]
    # the largest tensor has to fit into the buffer of `ipc`; that of `nccl` grows
    assert case["ipc buffers"] == [BUCKET_BYTES, 3 << 30]
    assert case["nccl buffers"] == [BUCKET_BYTES, BUCKET_BYTES]


def test_scales_of_an_fp8_cache_reach_the_kernels(found: dict) -> None:
    case = found["cache"]
    if not case:
        pytest.skip("vLLM has no FP8 cache on processors without AVX-512")
    assert case["said"] == ["", "", ""]
    (scales,) = case["scales"]
    assert scales == pytest.approx([5 / 448, 5 / 448])
    assert case["coarser"], "coarser scales answer differently"
    assert case["missing"] == "missing tensor model.layers.0.self_attn.k_scale"
    assert "unwritten: model.layers.0.self_attn.attn.k_scale" in case["unwritten"]
    assert case["back"]
