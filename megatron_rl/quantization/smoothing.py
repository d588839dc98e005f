"""Smoothing (SmoothQuant by powers of two): moves outliers of activations into the weights that a
sync sends as INT8.

For any scale s per channel, x / s times W * s is the same product: a norm's own weight is divided
by s and the columns of all its readers are multiplied by it. SmoothQuant's choice, s =
amax(x)^alpha / amax(W)^(1 - alpha), is taken relative to its median over the layer's channels and
rounded to a power of two. Folding those is exact in BF16, also for unquantized readers; channels
near the median are unchanged, so that rounding differences between layouts almost vanish.

L layers, N norms of a layer (`table.Norm`), H hidden channels.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_rl.distributed import Group
from megatron_rl.models.mapping import Param
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm

SCALES_STAY = 10  # syncs: see docs/design/weight-sync.md
LARGEST_EXPONENT = 20  # well within BF16's range, and beyond any real outlier
FLOAT32_BIAS = 127
FLOAT32_FRACTION_BITS = 23


class Smoothing:
    """Current scales, equal on every rank of the learner, and their updates.

    A sync before any activation was recorded smooths nothing. Afterwards the scales are kept for
    `every` syncs: each change of a scale changes every quantized byte of its columns.
    """

    def __init__(
        self,
        shape: ModelShape,
        alpha: float,
        every: int,
        world: Group,
        take_activation_amax: Callable[[], Tensor],
    ) -> None:
        """`take_activation_amax`: this rank's maxima [L, N, H] since its last call.

        `world`: all ranks of the learner.
        """
        self._alpha = alpha
        self._every = every
        self._world = world
        self._take_activation_amax = take_activation_amax
        self.scales_LNH = torch.ones(shape.layers, len(Norm), shape.hidden)
        self._repeats = False
        self._age: int | None = (
            None  # syncs since the scales were computed; None: there are none yet
        )

    def begin_sync(self, weight_amax: Callable[[], Tensor]) -> None:
        """Compute new scales if they are due; every rank calls this at the start of a sync.

        `weight_amax`: [L, N, H], the largest magnitude per column of this rank's quantized readers.
        """
        if self._repeats:
            self._repeats = False
            return
        if self._age is not None and self._age + 1 < self._every:
            self._age += 1
            return
        activations_LNH = self._take_activation_amax().float()
        both = torch.stack((activations_LNH, weight_amax().to(activations_LNH)))
        self._world.max_(both)
        if both[0].any():
            self.scales_LNH = scales(both[0], both[1], self._alpha)
            self._age = 0

    def state(self) -> dict[str, Tensor]:
        return {
            "smoothing": self.scales_LNH,
            "smoothing.age": torch.tensor(-1 if self._age is None else self._age),
        }

    def restore(self, state: Mapping[str, Tensor], repeats: bool) -> None:
        """Load scales. `repeats`: the next sync is again the one before the checkpoint, with its
        scales.
        """
        if "smoothing" in state:
            age = int(state["smoothing.age"])
            self.scales_LNH = state["smoothing"]
            self._age = None if age < 0 else age
            self._repeats = repeats

    def scale_of(self, param: Param) -> Tensor | None:
        """Return [H], the factors of a parameter's columns and divisors of its inputs; None if it
        is not smoothed.
        """
        if param.row.norm is None or self._age is None:
            return None
        assert param.layer is not None
        return self.scales_LNH[param.layer, param.row.norm]

    def fold(self, param: Param, local: Tensor) -> Tensor:
        """Return a smoothed copy of the shard; the learner's own is unchanged."""
        scale_H = self.scale_of(param)
        return local if scale_H is None else folded(local, scale_H)


def folded(tensor: Tensor, scale_H: Tensor) -> Tensor:
    """Smooth a norm's own weight, or a matrix that reads the norm."""
    scale_H = scale_H.to(tensor)
    if tensor.ndim == 1:
        return tensor / scale_H
    return tensor * scale_H


def scales(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return powers of two per channel (last dimension) of each norm; 1 without inputs or
    readers.
    """
    known = (
        (activations > 0) & (weights > 0) & torch.isfinite(activations) & torch.isfinite(weights)
    )
    wanted = torch.where(
        known, alpha * activations.log2() - (1 - alpha) * weights.log2(), torch.nan
    )
    exponent = (wanted - wanted.nanmedian(-1, keepdim=True).values).trunc_().nan_to_num_(0.0)
    exponent.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    # the bits of 2^n: exp2 may be inexact in the last bit
    bits = (exponent.to(torch.int32) + FLOAT32_BIAS) << FLOAT32_FRACTION_BITS
    return bits.view(torch.float32)
