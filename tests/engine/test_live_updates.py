"""A live engine that is updated in place: equal to a fresh one, all or nothing, and wrong when it must be."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_engine import Live, fresh_rollouts, startable

from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.types import Rollout, SamplingParams
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.manifest import WeightSyncError

pytestmark = pytest.mark.engine

VICTIM = "model.layers.1.mlp.down_proj.weight"


def essence(rollouts: list[Rollout]) -> list[tuple]:
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in rollouts]


def mean_difference(live: Live, right: list[Rollout], wrong: list[Rollout]) -> float:
    """Mean |logprob difference| on the tokens that both sampled from equal prefixes; infinite if there is none."""
    differences = []
    for a, b in zip(right, wrong, strict=True):
        for i, (mine, other) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
            if a.token_ids[: i + 1] == b.token_ids[: i + 1]:
                differences.append(abs(mine - other) if math.isfinite(other) else math.inf)
    return sum(differences) / len(differences) if differences else math.inf


def resident_mib(pid: int) -> float:
    """Memory of a process that no other shares: what it has mapped of the files it reads does not count."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) / 1024


@pytest.mark.parametrize("fixture", ["live_bf16", "live_int8", "live_fp8"])
def test_fifty_updates_equal_a_fresh_engine(fixture, request, tmp_path):
    live: Live = request.getfixturevalue(fixture)
    pid = live.sampler.health()["pid"]
    answers, memory = {}, {}
    for update in range(50):
        seed = 11 + update
        live.update(seed)
        if update in (0, 24, 48, 49):
            answers[seed] = essence(live.rollouts())
        if update in (19, 49) and Path("/proc/self/status").exists():
            memory[update] = resident_mib(pid)
    assert len({str(answer) for answer in answers.values()}) == 4, "every update must show"
    assert answers[60] == essence(fresh_rollouts(live, 60, tmp_path))
    live.update(11)
    assert essence(live.rollouts()) == answers[11], "a change and a change back"
    assert live.rollouts()[0].policy_version == live.sampler.policy_version == 50
    assert not any(math.isnan(lp) for answer in answers.values() for _, logprobs, _ in answer for lp in logprobs)
    if memory:
        # thirty updates of half a megabyte or more would show
        assert memory[49] - memory[19] < 6, memory


def test_the_engine_answers_while_the_next_weights_are_built(live_int8):
    live: Live = live_int8
    live.update(21)
    before = essence(live.rollouts())
    live.write(22)
    version = live.next_version
    live.sampler.start_weight_update()
    live.sampler.update_weights(transport.update_info(live.directory, version, 1, background=True))
    meanwhile = live.rollouts()
    assert (essence(meanwhile), meanwhile[0].policy_version) == (before, version - 1)
    live.sampler.finish_weight_update(str(version))
    assert essence(live.rollouts()) != before
    live.update(21)
    assert essence(live.rollouts()) == before


def flip_a_byte(manifest: Path) -> None:
    entry = next(e for e in json.loads(manifest.read_text())["tensors"] if e["name"] == VICTIM)
    path = manifest.parent / entry["file"]
    content = bytearray(path.read_bytes())
    content[entry["offset"]] ^= 1
    path.write_bytes(content)


def remove(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    content["tensors"] = [entry for entry in content["tensors"] if entry["name"] != VICTIM]
    manifest.write_text(json.dumps(content))


@pytest.mark.fault("a version is damaged before it is checked, or after that", "refused, the version before serves on")
@pytest.mark.parametrize(
    ("fixture", "fault", "message"),
    [
        ("live_int8", flip_a_byte, f"corrupt tensor {VICTIM}"),
        ("live_int8", remove, f"missing tensor {VICTIM}"),
        ("live_int8", "changed_after_the_check", "corrupt tensor"),
        ("live_int8", "cut_after_the_check", "truncated file"),
        ("live_bf16", "parameter_not_written", r"unwritten: model\.norm\.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_a_faulty_update_is_refused_and_the_old_version_serves_on(fixture, fault, message, request):
    live: Live = request.getfixturevalue(fixture)
    live.update(21)
    version, before = live.sampler.policy_version, essence(live.rollouts())
    with pytest.raises(WeightSyncError, match=message):
        live.update(22, fault)
    assert live.sampler.health()["policy_version"] == live.sampler.policy_version == version
    assert essence(live.rollouts()) == before
    live.update(22)
    assert essence(live.rollouts()) != before


def test_patches_load_like_whole_tensors(live_fp8):
    """A version of patches, read by a receiver that has not read the one before; then one whose base is gone."""
    live: Live = live_fp8
    live.update(71)
    right = essence(live.rollouts())
    sent, first = Sent(), live.next_version
    for version, seed in enumerate((72, 71, 72), start=first):
        base = None if version == first else version - 1
        tensors = live.model.quantized(seed, live.format).items()
        transport.write_version(live.directory, version, tensors, format="fp8", sent=sent, base=base)

    live.load(first + 1)
    assert essence(live.rollouts()) == right
    transport.remove_version(live.directory, first)
    with pytest.raises(WeightSyncError, match=f"version {first + 2} is a patch of version {first}, which"):
        live.load(first + 2)
    assert essence(live.rollouts()) == right


def test_finish_needs_an_accepted_update(live_int8):
    live: Live = live_int8
    live.update(21)
    live.sampler.start_weight_update()
    with pytest.raises(WeightSyncError, match="without an accepted update"):
        live.sampler.finish_weight_update()
    assert live.rollouts()


@pytest.mark.parametrize(
    ("fixture", "fault"), [("live_int8", "kernels_not_rebuilt"), ("live_bf16", "tied_head_not_refreshed")]
)
def test_what_the_probe_must_catch_is_visible(fixture, fault, request):
    if fixture == "live_bf16" and not torch.cpu._is_avx512_supported():
        pytest.skip("without AVX-512 the head's weights are not packed, so that nothing is left to refresh")
    live: Live = request.getfixturevalue(fixture)
    live.update(31)
    live.update(32)
    right = live.rollouts()
    live.update(31)
    live.update(32, fault)
    wrong = live.rollouts()
    assert mean_difference(live, right, wrong) > 0.3
    live.update(32)
    assert essence(live.rollouts()) == essence(right), "the next good update repairs it"


def test_after_an_update_that_stops_half_way_another_engine_serves_the_version_before(live_bf16):
    live: Live = live_bf16
    live.update(41)
    before = essence(live.rollouts())
    with startable():
        with pytest.raises(SamplerError, match="stopped half-way"):
            live.update(42, "stopped_half_way")
        assert essence(live.rollouts()) == before
    assert live.sampler.stats.restarts == 1
    live.update(42)
    assert essence(live.rollouts()) != before


def test_seeds_samples_and_greedy(live_bf16):
    live: Live = live_bf16
    live.update(51)
    first = live.rollouts(seed=1)
    assert [(r.group, r.sample) for r in first] == [(group, sample) for group in range(6) for sample in range(2)]
    assert all(len(r.token_ids) == len(r.logprobs) == len(r.loss_mask) == 6 for r in first)
    assert essence(live.rollouts(seed=1)) == essence(first)
    assert essence(live.rollouts(seed=2)) != essence(first)
    assert all(a.token_ids != b.token_ids for a, b in zip(first[::2], first[1::2], strict=True))
    greedy = live.rollouts(params=SamplingParams(samples=2, max_tokens=6, temperature=0.0))
    assert [r.token_ids for r in greedy[::2]] == [r.token_ids for r in greedy[1::2]]
    stop = first[0].token_ids[2]
    stopped = live.rollouts(params=SamplingParams(samples=2, max_tokens=6, stop_token_ids=(stop,)))
    assert stopped[0].finish_reason == "stop"
    assert stopped[0].token_ids[-1] == stop
    assert first[0].finish_reason == "length"
