"""Costs of a token to the learner: FLOPs of its forward pass; chunk sizes of logits."""

from dataclasses import dataclass

from megatron_rl.learner.modules import limits
from megatron_rl.models.model import Model

# of logits worked on in FP32 at once: 4 MiB stay in a CPU's cache; on a GPU without kernels for
# them launches cost more
HOST_BYTES = 4 << 20
DEVICE_BYTES = 96 << 20
# logits of a pack that are held whole; of others so many bytes exist at once, but for columns too
# few to multiply well
LOGIT_BYTES = 96 << 20
LEAST_COLUMNS = 1024
COLUMN_MULTIPLE = 128  # rows of logits begin where products and kernels read whole vectors
FP32 = 4
COPIES = 4  # alive at most: a chunk, probabilities, what entropy adds, and the next chunk


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a token's forward pass."""

    dense: float  # in matrices that every token meets
    experts: float
    head: float  # output layer, for response tokens only
    attention: float  # at the mean length

    @property
    def body(self) -> float:
        return self.dense + self.experts + self.attention


def operations(model: Model, length: float) -> Operations:
    """Operations at a mean length: a matrix costs two for each element; attention looks back at
    half of it, twice.
    """
    shape = model.shape
    projections = shape.hidden * (2 * shape.size("q") + 2 * shape.size("kv"))
    if shape.experts:
        chosen = limits.experts_per_token(model.hf_config)
        mlp = shape.hidden * shape.experts
        experts = 3 * shape.hidden * shape.expert_ffn * chosen
    else:
        mlp = 3 * shape.hidden * shape.ffn
        experts = 0
    return Operations(
        dense=2.0 * shape.layers * (projections + mlp),
        experts=2.0 * shape.layers * experts,
        head=2.0 * shape.hidden * shape.vocab,
        attention=2.0 * shape.layers * shape.size("q") * length,
    )


def attention_share(model: Model) -> float:
    """Attention's cost per token of a sequence's length, relative to the token's matmuls."""
    each = operations(model, 1)
    return each.attention / (each.dense + each.experts + each.head)


def chunk_rows(rows: int, columns: int, host: bool) -> int:
    """Rows of logits per chunk; on GPUs no chunk is much smaller than the others."""
    nbytes = FP32 * max(1, columns)
    if host:
        return max(1, HOST_BYTES // nbytes)
    chunks = -(-max(1, rows) * nbytes // DEVICE_BYTES)
    return -(-max(1, rows) // chunks)


def logit_columns(rows: int, columns: int, width: int, wide: bool) -> int:
    """Columns of logits to compute at once: all where they are held. `width`: bytes of a weight.

    Wider logits also need a rounded gradient, and on CPUs FP32 copies of the factors.
    """
    fitting = LOGIT_BYTES // (max(1, rows) * (2 * FP32 if wide else width))
    if fitting >= columns:
        return columns
    return max(fitting // COLUMN_MULTIPLE * COLUMN_MULTIPLE, LEAST_COLUMNS)
