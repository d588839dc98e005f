"""Logprobs of stock vLLM, transformers and the learner on converted folders.

One vLLM process, which imports nothing of this project, loads all folders in turn.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers import hf_shapes
from models import config_of, done, made, tensors_of, verdicts
from rollouts import rollout

from megatron_rl.apps.conversion.modelopt import Rows, token_rows
from megatron_rl.batch import collate
from megatron_rl.config.schema import Config
from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.processes.process import SHORT_SPIN
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.types import Prompt, Scored

# nats, mean |d|
PLAIN_GATE = 0.02
QUANTIZED_GATE = 0.08
Scores = list[torch.Tensor]  # of each row, its first token left out
MODELOPT = ("modelopt_fp8_kv", "modelopt_nvfp4")
# families that nothing else here starts
NEW = {
    "phi3": "Phi3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}
FOLDERS = ("hf", "int8", "fp8", *MODELOPT, *NEW, *(f"{family}-int8" for family in NEW))
TEXTS = "".join(f"{a}+{b}={a + b}\n" for a in range(4, 12) for b in (3, 17, 58))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every form of one small model, with weights large enough for logprobs far from uniform."""
    folder = tmp_path_factory.mktemp("forms")
    write_toy(folder / "toy")
    (folder / "toy" / "model").rename(folder / "hf")
    config = read_hf_config(folder / "hf")
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: (
            (1 if len(size) == 1 else 0) + 0.06 * torch.randn(size, generator=generator)
        ).bfloat16()
        for name, size in hf_shapes(ModelShape.from_hf(config)).items()
    }
    write_folder(folder / "hf", tensors, config)
    (folder / "texts.txt").write_text(TEXTS)
    done("import", folder / "hf", folder / "checkpoint")
    forms = {"int8": ("int8",), "fp8": ("fp8",)}
    forms |= {format: (format, "--calibrate", folder / "texts.txt") for format in MODELOPT}
    for name, options in forms.items():
        done("quantize", folder / "hf", folder / name, "--format", *options)
    for family, architecture in NEW.items():
        sizes = {
            "hidden_size": 128,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        about = {
            "architectures": [architecture],
            "max_position_embeddings": 64,
            "hidden_act": "silu",
        }
        made(
            folder / family,
            config_of(family, vocab_size=config["vocab_size"], **sizes, **about),
            scale=0.06,
        )
        done("quantize", folder / family, folder / f"{family}-int8", "--format", "int8")
    return folder


@pytest.fixture(scope="module")
def rows(folders: Path) -> list[tuple[int, ...]]:
    return token_rows(str(folders / "texts.txt"), folders / "hf")


@pytest.fixture(scope="module")
def answers(folders: Path, rows: list[tuple[int, ...]]) -> dict[str, Scores | str]:
    return dict(zip(FOLDERS, plain_vllm([folders / name for name in FOLDERS], rows), strict=True))


def plain_vllm(folders: list[Path], rows: Rows) -> list[Scores | str]:
    """Logprobs of stock vLLM for each folder, or the text of its error."""
    arguments = {
        "max_model_len": 2 * max(map(len, rows)),
        "max_num_seqs": 8,
        "enforce_eager": True,
    }
    arguments |= {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 512 << 20}
    request = {"folders": list(map(str, folders)), "rows": rows, "arguments": arguments}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).parent / "plain_logprobs.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=engine_environment() | SHORT_SPIN,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        one["error"] if isinstance(one, dict) else [torch.tensor(row) for row in one]
        for one in answers
    ]


def distance(one: Scores | str, other: Scores | str) -> float:
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    return float((torch.cat(one) - torch.cat(other)).abs().mean())


def by_learner(folder: Path, rows: Rows) -> Scores:
    from megatron_rl.learner.learner import Learner  # before megatron

    learner = Learner(Model.of(read_hf_config(folder), Layout()), Config())
    rollouts = [
        rollout(row[1:], prompt=Prompt(number, row[:1], "", {}), group=number)
        for number, row in enumerate(rows)
    ]
    with closing(learner):
        learner.load_hf(folder)
        logprobs_N = learner.logprobs(collate([Scored(one, reward=0.0) for one in rollouts]))
    return list(logprobs_N.split([len(row) - 1 for row in rows]))


@pytest.mark.engine
def test_plain_weights(
    folders: Path, rows: list[tuple[int, ...]], answers: dict[str, Scores | str]
) -> None:
    """Learner and vLLM agree, on families too that nothing else here starts."""
    for name in ("hf", *NEW):
        assert distance(by_learner(folders / name, rows), answers[name]) < PLAIN_GATE, name


@pytest.mark.engine
def test_quantized_weights(answers: dict[str, Scores | str]) -> None:
    pairs = [("hf", name) for name in ("int8", "fp8")] + [
        (family, f"{family}-int8") for family in NEW
    ]
    for plain, quantized in pairs:
        assert 0 < distance(answers[plain], answers[quantized]) < QUANTIZED_GATE, quantized


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_s_folders_load_up_to_the_kernel(
    tmp_path: Path, folders: Path, answers: dict[str, Scores | str], name: str
) -> None:
    """vLLM on CPUs reads all folders, then lacks kernels; each restores the weights."""
    said = answers[name]
    if isinstance(said, str):
        assert re.search(r"_C::\w*(fp8|fp4|scaled)|kernel|capability", said), said
    else:
        assert distance(answers["hf"], said) < QUANTIZED_GATE
    done("dequantize", folders / name, tmp_path / "plain")
    verdicts(tmp_path, folders / "hf", folders / name)
    assert tensors_of(tmp_path / "plain").keys() == tensors_of(folders / "hf").keys()
    calibrated = json.loads((folders / name / "parity.json").read_text())["calibration"]
    assert calibrated.endswith("100.0% reached")
