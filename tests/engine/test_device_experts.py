"""The experts that an engine on a GPU tells come out as chosen, through vLLM's own recorder,
batches and store.
"""

import json
from pathlib import Path

import pytest
from preloaded import said

from megatron_rl.apps.quickstart import write_experts

pytestmark = pytest.mark.engine


def test_routed_experts_of_a_device_come_with_the_response(tmp_path: Path) -> None:
    write_experts(tmp_path)
    case = Path(__file__).with_name("device_experts_case.py")
    found = json.loads(said("vllm", [case, tmp_path / "model"]).splitlines()[-1])
    assert [len(one) for one in found["chosen"]] == [59, 51, 40]
    assert found["reported"] == found["chosen"]
