"""Asks vLLM whether it would start with a share of a GPU: `python startup_share.py CASES_JSON`.

A case is [share, free bytes, all bytes]. Prints the bytes that it would take, or what it says against them.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any, cast

from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory


def answer(share: float, free: int, total: int) -> int | str:
    snapshot: Any = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
    try:
        return request_memory(cast(MemorySnapshot, snapshot), CacheConfig(gpu_memory_utilization=share))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    print("ANSWERS " + json.dumps([answer(*case) for case in json.loads(sys.argv[1])]))
