"""CPU layers of a learner (norm, residual, rotary, attention, SwiGLU) in place of megatron-core's,
rounding as vLLM's.

Reading memory costs more than arithmetic there: norm and activation walk their rows in blocks that
stay in cache.

S positions of a pack, A attention heads, G key/value heads, D width of a head, H any width, N
sequences of one bucket, L its longest length.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from megatron_rl.learner.modules.context import whole
from megatron_rl.learner.modules.packing import Bucket, Pack
from megatron_rl.quantization import vllm_operators
from megatron_rl.quantization.cpu_matmul import narrowed

BLOCK_ELEMENTS = 1 << 18  # FP32, for each thread: a megabyte
# up to this length the CPU's attention kernel is several times faster in FP32 than in BF16
FP32_ATTENTION_LENGTH = 384
# attributes of tensors
UNROUNDED = "unrounded"  # of a BF16 sum what was added, for the norm that reads it next
TURNS = "turns"  # of a pack's angles: their cosines and sines


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors alike into blocks of rows that fit the processor's cache."""
    rows = max(1, torch.get_num_threads() * BLOCK_ELEMENTS // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_H: Tensor, eps: float, summands: tuple[Tensor, ...] | None
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        exact = [part.reshape(rows.shape) for part in summands or (x,)]
        out = torch.empty_like(rows)
        scales = rows.new_empty((len(rows), 1), dtype=torch.float32)
        for result, scale, block, *others in blocks(out, scales, *exact):
            wide = block.float()
            for other in others:
                wide.add_(other)
            scale.copy_(wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_())
            result.copy_(wide * scale).mul_(weight_H)
        ctx.save_for_backward(rows, weight_H, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight_H, scales = ctx.saved_tensors
        weight = weight_H.float()
        grad_weight = torch.zeros_like(weight)
        grad_rows = torch.empty_like(rows)
        for block, scale, grad_block, result in blocks(
            rows, scales, grad.reshape(rows.shape), grad_rows
        ):
            normed = block.float() * scale
            wide = grad_block.float()
            product = wide * normed
            grad_weight += product.sum(0)
            mean = torch.mv(product, weight).div_(rows.shape[-1]).unsqueeze_(-1)
            result.copy_((wide * weight).addcmul_(normed, mean, value=-1).mul_(scale))
        return grad_rows.view(grad.shape), grad_weight.to(weight_H.dtype), None, None


class RMSNorm(torch.nn.Module):
    """RMS norm in FP32, rounded where vLLM's CPU kernel rounds: the normed input, and the product.

    Of a sum (`add`) it norms the sum before rounding.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # megatron-core sums such gradients over the tensor-parallel group
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, x.__dict__.pop(UNROUNDED, None))


def add(
    training: bool, fused: bool
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """The addition to the residual, in the place of megatron-core's bias, dropout and addition."""
    plain = get_bias_dropout_add(training, fused)

    def added(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None or (training and prob) or x.dtype != torch.bfloat16:
            return plain(x_with_bias, residual, prob)
        out = residual + x
        setattr(out, UNROUNDED, (residual.detach(), x.detach()))
        return out

    return added


class _Turned(torch.autograd.Function):
    """Rotary embedding of positions. `turns_SD`: cosines of each position's angles, then sines."""

    @staticmethod
    def forward(ctx: Any, x_S1AD: Tensor, turns_SD: Tensor) -> Tensor:
        ctx.save_for_backward(turns_SD)
        if x_S1AD.dtype == torch.bfloat16 and vllm_operators.has_rotary():
            return vllm_operators.rotary(x_S1AD, turns_SD)
        return narrowed(_turned(x_S1AD, turns_SD), x_S1AD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_S1AD: Tensor) -> tuple[Tensor, None]:
        (turns_SD,) = ctx.saved_tensors
        cos_SD, sin_SD = turns_SD.chunk(2, dim=-1)
        back_SD = torch.cat((cos_SD, -sin_SD), dim=-1)
        # elsewhere it cuts off, which gradients would all lean to
        rounds = torch.cpu._is_avx512_bf16_supported()
        if grad_S1AD.dtype == torch.bfloat16 and rounds and vllm_operators.has_rotary():
            return vllm_operators.rotary(grad_S1AD, back_SD), None
        return _turned(grad_S1AD, back_SD).to(grad_S1AD.dtype), None


def _turned(x_S1AD: Tensor, turns_SD: Tensor) -> Tensor:
    """Return the rotated values in FP32."""
    cos, sin = turns_SD[:, None, None].float().chunk(2, dim=-1)
    left, right = x_S1AD.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rotary(
    x_S1AD: Tensor,
    angles: Tensor,
    config: TransformerConfig,
    *args: Any,
    mscale: float = 1.0,
    **kwargs: Any,
) -> Tensor:
    """Rotary embedding as in vLLM's CPU kernel: cosine and sine in the model's precision."""
    width = x_S1AD.shape[-1]
    if (
        config.rotary_interleaved
        or config.multi_latent_attention
        or mscale != 1.0
        or angles.shape[-1] != width
    ):
        return apply_rotary_pos_emb(x_S1AD, angles, config, *args, mscale=mscale, **kwargs)
    turns_SD = angles.__dict__.get(TURNS)
    if turns_SD is None:
        half = angles.flatten(0, -2)[:, : width // 2]
        turns_SD = torch.cat((half.cos(), half.sin()), dim=-1).to(x_S1AD.dtype)
        setattr(angles, TURNS, turns_SD)
    return _Turned.apply(x_S1AD, turns_SD)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(silu(gate), grad, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grad_x


class SwiGLU(torch.nn.Module):
    """silu(gate) * up over the joined output of a gated linear layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing, as the MLP asks each of its parts for what a checkpoint holds of it."""
        return {}


class _Pad(torch.autograd.Function):
    """A pack's rows in their padded places. Both directions only read: nothing adds into memory."""

    @staticmethod
    def forward(ctx: Any, rows_S: Tensor, pack: Pack) -> Tensor:
        ctx.pack = pack
        return rows_S.index_select(0, pack.padded_index_X)

    @staticmethod
    def backward(ctx: Any, grad_X: Tensor) -> tuple[Tensor, None]:
        return grad_X.index_select(0, ctx.pack.packed_index_S), None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`; the padding's gradient is zero, so as not to reach real keys."""

    @staticmethod
    def forward(ctx: Any, rows_X: Tensor, pack: Pack) -> Tensor:
        ctx.pack = pack
        return rows_X.index_select(0, pack.packed_index_S)

    @staticmethod
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None]:
        return grad_S.index_select(0, ctx.pack.padded_index_X).index_fill_(
            0, ctx.pack.blanks, 0
        ), None


class StoredRounding(torch.autograd.Function):
    """FP32 rounded as vLLM's CPU kernels store it; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.wide = x.dtype
        return narrowed(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.wide), None


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a pack, by torch's own kernel.

    Sequences of similar length run as one batch, padded on the right, where a causal mask lets no
    real position look.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query_S1AD: Tensor,
        key_S1GD: Tensor,
        value_S1GD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, PackedRows)
        pack = packed_seq_params.pack
        qkv = [x.squeeze(1) for x in (query_S1AD, key_S1GD, value_S1GD)]
        if pack.order_S is not None:
            return self._shared(pack, *qkv).unsqueeze(1)
        if not pack.whole:
            qkv = [_Pad.apply(x, pack) for x in qkv]
        out = []
        start = 0
        for bucket in pack.buckets:
            stop = start + bucket.sequences * bucket.length
            out.append(self._bucket(bucket, *(x[start:stop] for x in qkv)))
            start = stop
        joined = out[0] if len(out) == 1 else torch.cat(out)
        if not pack.whole:
            joined = _Unpad.apply(joined, pack)
        return joined.unsqueeze(1)

    def _shared(self, pack: Pack, query_SAD: Tensor, key_SGD: Tensor, value_SGD: Tensor) -> Tensor:
        """Attention of this rank's part of each sequence to keys and values of all ranks."""
        ranks = len(pack.order_S) // len(pack.positions_S)  # type: ignore[arg-type]
        keys, values = (whole(x, pack) for x in (key_SGD, value_SGD))
        out = []
        start = 0
        for bucket in pack.buckets:
            here = slice(start // ranks, (start + bucket.length) // ranks)
            stop = start + bucket.length
            seen = torch.arange(bucket.length) <= pack.positions_S[here, None]
            out.append(
                self._bucket(bucket, query_SAD[here], keys[start:stop], values[start:stop], seen)
            )
            start = stop
        return torch.cat(out)

    def _bucket(
        self,
        bucket: Bucket,
        query_XAD: Tensor,
        key_XGD: Tensor,
        value_XGD: Tensor,
        seen: Tensor | None = None,
    ) -> Tensor:
        dtype = query_XAD.dtype
        shape = (bucket.sequences, -1)
        query, key, value = (
            x.unflatten(0, shape).transpose(1, 2) for x in (query_XAD, key_XGD, value_XGD)
        )
        if bucket.length <= FP32_ATTENTION_LENGTH:
            query = query.float()
            key = key.float()
            value = value.float()
        out_NALD = scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, scale=self.scale, enable_gqa=True
        )
        return StoredRounding.apply(out_NALD.transpose(1, 2).flatten(2).flatten(0, 1), dtype)


class PackedRows(PackedSeqParams):
    """megatron-core's description of a pack, with ours beside it for PackedAttention."""

    def __init__(self, pack: Pack) -> None:
        # not "thd": rotary angles come per position, so the pack may pass as one long sequence
        super().__init__(qkv_format="sbhd", max_seqlen_q=pack.longest, max_seqlen_kv=pack.longest)
        self.pack = pack
