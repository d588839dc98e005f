"""The host profile may not change what else runs in its process."""

import sys

import pytest
from preloaded import run

DEVICE_CONTEXT = """
import megatron_rl.learner.host
import torch
with torch.device("meta"):
    made = [torch.empty(2), torch.arange(2), torch.ones(2), torch.tensor([1.0]), torch.rand(2), torch.full((2,), 1.0)]
assert all(tensor.is_meta for tensor in made), made
assert torch.empty(2, device="meta").is_meta and torch.zeros(2, device="cuda").device.type == "cpu"
"""


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="nothing is patched where CUDA exists")
def test_a_device_context_still_places_tensors() -> None:
    """transformers builds its models under torch.device("meta"); elsewhere their buffers stay uninitialised."""
    done = run("megatron", [sys.executable, "-c", DEVICE_CONTEXT], timeout=60)
    assert done.returncode == 0, done.stderr
