"""An engine of two workers: both load every update, or neither does. One of
them killed: tests/faults.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import wait_for
from tiny_engine import make_live

from megatron_rl.config.schema import Format
from megatron_rl.processes.scratch import SHARED_MEMORY, segments_of_session
from megatron_rl.weight_sync import manifest as manifests
from megatron_rl.weight_sync.manifest import WeightSyncError


def leftovers() -> set[str]:
    """Shared memory that vLLM's workers make."""
    return {path.name for path in SHARED_MEMORY.glob("psm_*")} | {
        path.name for path in SHARED_MEMORY.glob("vllm_dist_*")
    }


def has_ended(session: int) -> bool:
    """A killed process is listed until its parent has reaped it, which is the system's
    business for grandchildren.
    """
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.engine
def test_two_workers_update_together_or_not_at_all(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers need two cores")
    live = make_live(tmp_path, Format.int8, tied=True, tensor_parallel=2, request_timeout_s=60)
    others = leftovers()
    try:
        live.restart()
        made = segments_of_session(live.sampler.replicas[0].process.pid)
        # all-reduces of its own kernels
        kinds = {"psm", "vllm"} if torch.cpu._is_avx512_supported() else {"psm"}
        assert {name.partition("_")[0] for name in made} >= kinds, (
            "what an engine leaves has other names now"
        )
        live.update(1)
        first = live.answers()
        live.update(2)
        assert live.answers() != first
        live.update(1)
        assert live.answers() == first
        manifest = live.write(2)
        content = manifests.read(manifest)
        tensors = list(content.tensors)
        parts = tuple(replace(part, checksum="0") for part in tensors[3].parts)
        tensors[3] = replace(tensors[3], parts=parts)
        manifest.write_bytes(manifests.encode(replace(content, tensors=tensors)))
        with pytest.raises(WeightSyncError, match=f"corrupt tensor {tensors[3].name}"):
            live.load()
        assert live.answers() == first
        with live.collecting() as written:
            # answers begin and end together: an update can find none under way
            for step in (
                2,
                *(1, 2) * 12,
            ):
                live.update(step)
                if step == 2 and any(one.versions is not None for one in written):
                    break
        spanning = [one for one in written if one.versions is not None]
        assert spanning, "an update came between two tokens"
        assert all(
            len(one.versions) == len(one.token_ids) and len(set(one.versions)) > 1
            for one in spanning
        )
        assert live.answers() != first
        session = live.sampler.replicas[0].process.pid
        made |= segments_of_session(session)
    finally:
        live.sampler.close()
    wait_for(lambda: has_ended(session))
    assert not (leftovers() - others) & made
