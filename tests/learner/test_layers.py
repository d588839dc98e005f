"""The learner's host layers, against the same written plainly."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.learner.modules import cpu, layers  # isort: skip
from megatron_rl.quantization import vllm_operators

POSITIONS = 9
HEADS = 3
CONFIG: Any = SimpleNamespace(
    rotary_interleaved=False,
    multi_latent_attention=False,
    params_dtype=torch.bfloat16,
    sequence_parallel=False,
)

pytestmark = pytest.mark.skipif(not cpu.ON_CPU, reason="these layers are those of hosts")


def _turned(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(width)
    x = torch.randn(POSITIONS, 1, 2 * HEADS, width, dtype=torch.bfloat16)[
        :, :, :HEADS
    ].requires_grad_()
    half = torch.randn(POSITIONS, 1, 1, width // 2)
    out = layers.rotary(
        x,
        torch.cat((half, half), dim=-1),
        CONFIG,
    )
    (grad,) = torch.autograd.grad(
        out,
        x,
        torch.randn(out.shape).bfloat16(),
    )
    return out.detach(), grad


@pytest.mark.skipif(not vllm_operators.has_rotary(), reason="no vLLM for hosts")
@pytest.mark.parametrize("width", [32, 64, 128])  # whole vectors: what is left over is not cut off
def test_the_engine_s_rotary_embedding_and_torch_s_are_the_same_bytes(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_engine = _turned(width)
    monkeypatch.setattr(vllm_operators, "has_rotary", lambda: False)
    for found, plain in zip(by_engine, _turned(width), strict=True):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("at_once", [1, 40, 1 << 18])
def test_a_norm_reads_the_sum_before_it_was_rounded(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "BLOCK_ELEMENTS", at_once)
    torch.manual_seed(1)
    x, residual = (torch.randn(POSITIONS, 1, 16).bfloat16() for _ in range(2))
    norm = layers.RMSNorm(CONFIG, 16)
    norm.weight.data.copy_(torch.randn(16))
    rounded = layers.add(training=False, fused=False)(
        (x, None),
        residual,
        0.0,
    )
    assert torch.equal(rounded, residual + x)
    wide = residual.float() + x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    assert torch.equal(norm(rounded), normed.bfloat16() * norm.weight)
    of_rounded = (
        rounded.float() * (rounded.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    )
    assert torch.equal(norm(rounded), of_rounded.bfloat16() * norm.weight)  # read once
    assert not torch.equal(normed.bfloat16(), of_rounded.bfloat16())
