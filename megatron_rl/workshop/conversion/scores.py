"""Logprobs of texts by each program that runs a model: transformers, the learner, and vLLM as anybody starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import torch

from megatron_rl.processes.process import SHORT_SPIN
from megatron_rl.sampler.engine_process import engine_environment
from megatron_rl.workshop.conversion.prompts import Rows, batch_of
from megatron_rl.workshop.conversion.sources import Source

PLAIN_VLLM = Path(__file__).parents[2] / "engine" / "plain_logprobs.py"
CACHE_BYTES = 512 << 20
LONGEST_WAIT_S = 3600.0


class Program(StrEnum):
    transformers = "transformers"
    learner = "learner"
    vllm = "vllm"


Scores = list[torch.Tensor]  # of each row, its first token left out


def runs(program: Program, source: Source) -> bool:
    """Whether the program takes weights of this form."""
    if program is Program.learner:
        return source.quantization is None
    if program is Program.transformers:
        return source.is_folder and (source.quantization is None or _known_to_transformers(source))
    return source.is_folder


def _known_to_transformers(source: Source) -> bool:
    """compressed-tensors, but for experts in INT8: it joins experts as it loads them, and expects those packed."""
    quantization = source.quantization or {}
    joined = quantization.get("format") == "int-quantized" and any(".experts." in name for name in source.weights.specs)
    return quantization.get("quant_method") == "compressed-tensors" and not joined


def score(program: Program, source: Source, rows: Rows) -> Scores:
    """ValueError with what the program said where it does not take the model."""
    return _SCORERS[program](source, rows)


def _transformers(source: Source, rows: Rows) -> Scores:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.path, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True
    )
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            logprobs_TV = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs_TV.gather(1, ids[0, 1:, None]).squeeze(1))
    return found


def _learner(source: Source, rows: Rows) -> Scores:
    from megatron_rl.workshop.conversion.calibration import learner_at

    with learner_at(source) as learner:
        logprobs_BT = learner.logprobs(batch_of(rows))
    return [logprobs_BT[number, : len(row) - 1].cpu() for number, row in enumerate(rows)]


def _vllm(source: Source, rows: Rows) -> Scores:
    (found,) = plain_vllm([source.path], rows)
    if isinstance(found, str):
        raise ValueError(f"vLLM does not take {source.path}: {found}")
    return found


def plain_vllm(folders: Sequence[Path], rows: Rows) -> list[Scores | str]:
    """In a process that imports nothing of this project; what vLLM says against a folder is text."""
    arguments = {"max_model_len": 2 * max(map(len, rows)), "max_num_seqs": 8, "enforce_eager": True}
    if not torch.cuda.is_available():
        arguments["kv_cache_memory_bytes"] = CACHE_BYTES
    request = {"folders": list(map(str, folders)), "rows": list(map(list, rows)), "arguments": arguments}
    done = subprocess.run(
        [sys.executable, "-P", str(PLAIN_VLLM)],
        input=json.dumps(request), capture_output=True, text=True, env=engine_environment() | SHORT_SPIN,
        timeout=LONGEST_WAIT_S, check=False,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) < len(folders):
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        answers += [{"error": f"its process ended with status {done.returncode}: {said}"}] * (
            len(folders) - len(answers)
        )
    return [one["error"] if isinstance(one, dict) else [torch.tensor(row) for row in one] for one in answers]


_SCORERS: dict[Program, Callable[[Source, Rows], Scores]] = {
    Program.transformers: _transformers,
    Program.learner: _learner,
    Program.vllm: _vllm,
}
