"""Results of an experiment, each on disk as soon as it is known; and the demand for a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Results:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.began = time.perf_counter()

    def note(self, name: str, **values: Any) -> None:
        line = {
            "name": name,
            "at_s": round(time.perf_counter() - self.began, 1),
            **values,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        print(f"[{line['at_s']:6.1f} s] {name}: {shown}", flush=True)


def demand_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "error: no CUDA device: torch finds none here. Run this on a machine with a GPU whose "
            f"driver serves CUDA {torch.version.cuda or '13.0 (this torch is built for CPUs)'}"
        )
