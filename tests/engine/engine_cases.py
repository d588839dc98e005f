"""Live engines, several in one process: run as a script, leaves what it found as JSON.

One process, because importing vLLM takes longer than everything that happens here.
"""

import json
import os
import sys
from pathlib import Path

import torch
from checked_cases import run_checked
from in_flight_cases import run_in_flight
from live_engine import EngineCase
from top_cases import run_top
from trainer_cases import run_trainer
from update_cases import run_cache, run_case

from megatron_rl.config.schema import Format, KvCache


def main() -> None:
    out = Path(sys.argv[1])
    runs = {
        "qwen3_moe": lambda: run_case(
            EngineCase("qwen3_moe", Format.int8, out / "qwen3_moe"),
            "model.layers.1.mlp.experts.2.down_proj.weight",
        ),
        "mixtral": lambda: run_case(
            EngineCase("mixtral", Format.none, out / "mixtral"),
            "model.layers.0.block_sparse_moe.experts.3.w1.weight",
        ),
        "checked": lambda: run_checked(EngineCase("qwen3", Format.int8, out / "checked")),
        "trainer": run_trainer,
        "in_flight": lambda: run_in_flight(EngineCase("qwen3", Format.none, out / "in_flight")),
        "top": lambda: run_top(EngineCase("qwen3", Format.int8, out / "top")),
        "cache": lambda: run_cache(
            EngineCase(
                "qwen3",
                Format.none,
                out / "cache",
                kv_cache=KvCache.fp8,
            )
        ),
    }
    if not torch.cpu._is_avx512_supported():
        runs["cache"] = dict  # vLLM has no FP8 cache there
    found = {name: run() for name, run in runs.items() if name in (sys.argv[2:] or runs)}
    (out / "found.json").write_text(json.dumps(found))
    os._exit(0)  # no wait for the engines' threads


if __name__ == "__main__":
    main()
