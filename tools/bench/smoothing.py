#!/usr/bin/env python3
"""What smoothing gains: sampler against learner on models whose activations have outliers.

    python tools/bench/smoothing.py runs/toy_sft/model [--factors 1 16 64 256] [--channels 2] [--alpha 0.5]

Copies of the model get outlier channels by the inverse of smoothing: norms are multiplied, the columns of what reads
them divided, by a power of two, so every copy computes exactly the same function. For each copy a run of zero steps
loads the INT8 sampler, without and with smoothing, and its probe compares both engines' logprobs on freshly sampled
tokens. BF16 is the floor.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.data.toy import write_toy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from outliers import with_outliers  # noqa: E402

TIMEOUT_S = 280


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a trained Hugging Face folder")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 16, 64, 256], help="powers of two")
    parser.add_argument("--channels", type=int, default=2, help="outlier channels of every norm")
    parser.add_argument("--alpha", type=float, default=0.5)
    options = parser.parse_args()
    print(f"{options.model}: {options.channels} outlier channels per norm; mean |logprob difference|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_toy(folder / "toy")  # its prompts
        floor = measure(options.model, folder, "none", None)
        print(f"{'BF16, no outliers':<28} {floor:.4f}", flush=True)
        for factor in options.factors:
            model = folder / f"outliers_{factor}"
            with_outliers(options.model, model, factor, options.channels)
            plain = measure(model, folder, "int8", None)
            smooth = measure(model, folder, "int8", options.alpha)
            print(
                f"outliers x{factor:<5} INT8 plain {plain:.4f}   alpha {options.alpha:g}: {smooth:.4f}   "
                f"ratio {plain / smooth:.1f}",
                flush=True,
            )


def measure(model: Path, scratch: Path, format: str, alpha: float | None) -> float:
    """The probe after the first sync of a run that takes no step."""
    runs = scratch / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    overrides = {
        "run.root": runs,
        "run.name": "probe",
        "run.steps": 0,
        "model.path": model.resolve(),
        "data.train": scratch / "toy" / "train.jsonl",
        "data.eval": "null",
        "eval.every": 0,
        "quantization": f"{{preset: {format}, smoothing: {'null' if alpha is None else alpha}}}",
        "sync.probe_budget": 100,
        "learner.tensor_parallel": 1,
    }
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(ROOT / "recipes" / "quickstart.yaml")]
    command += [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    first = json.loads((runs / "probe" / "metrics.jsonl").read_text().splitlines()[0])
    return float(first["sync/probe_abs_diff"])


if __name__ == "__main__":
    main()
