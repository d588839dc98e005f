"""How many logits are worked on in FP32 at once, by device. Torch-free: the plan of memory reckons with it too."""

# 4 MiB stay in a host's cache; to read and write 64 MiB takes a GPU ten times as long as a launch
HOST_BYTES = 4 << 20
DEVICE_BYTES = 64 << 20
FP32 = 4
COPIES = 4  # alive at most: a chunk, probabilities, what entropy adds, and the next chunk


def chunk_bytes(host: bool) -> int:
    return HOST_BYTES if host else DEVICE_BYTES


def chunk_rows(columns: int, host: bool) -> int:
    """Of logits with so many columns; one at least."""
    return max(1, chunk_bytes(host) // (FP32 * max(1, columns)))
