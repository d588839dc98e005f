"""What vLLM, as anybody starts it, transformers and the learner compute with the folders that are
made here.

One vLLM process, which imports nothing of this project, loads all folders in turn.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import config_of, convert, done, fails, made, tensors_of, verdicts

from megatron_rl.checkpoint.torch_dist.reader import hf_shapes
from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.processes.process import SHORT_SPIN
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.workshop.conversion.calibration import Rows, token_rows
from megatron_rl.workshop.conversion.sources import find
from megatron_rl.workshop.conversion.verification import (
    PLAIN_GATE,
    QUANTIZED_GATE,
    Scores,
    by_learner,
    by_transformers,
)

MODELOPT = ("modelopt_fp8_kv", "modelopt_nvfp4")
# families that nothing else here starts
NEW = {
    "phi3": "Phi3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}
FOLDERS = ("hf", "int8", "smooth", "fp8", *MODELOPT, *NEW, *(f"{family}-int8" for family in NEW))
TEXTS = "".join(f"{a}+{b}={a + b}\n" for a in range(4, 12) for b in (3, 17, 58))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every form of one small model; its weights are large enough for logprobs to be far from
    uniform.
    """
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
    smooth = ("--smooth", 0.5, "--calibrate", folder / "texts.txt")
    forms = {"int8": ("int8",), "smooth": ("int8", *smooth), "fp8": ("fp8",)}
    forms |= {format: (format, *smooth[2:]) for format in MODELOPT}
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
    """What vLLM says against a folder is text."""
    arguments = {"max_model_len": 2 * max(map(len, rows)), "max_num_seqs": 8, "enforce_eager": True}
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


@pytest.mark.engine
def test_plain_weights(
    folders: Path, rows: list[tuple[int, ...]], answers: dict[str, Scores | str]
) -> None:
    """Transformers, learner and vLLM agree, on families too that nothing else here starts."""
    for name in ("hf", "checkpoint", *NEW):
        by_vllm = answers["hf" if name == "checkpoint" else name]
        assert distance(by_learner(find(str(folders / name)), rows), by_vllm) < PLAIN_GATE, name
    assert distance(by_transformers(find(str(folders / "hf")), rows), answers["hf"]) < PLAIN_GATE


@pytest.mark.engine
def test_quantized_weights(answers: dict[str, Scores | str]) -> None:
    pairs = [("hf", name) for name in ("int8", "smooth", "fp8")] + [
        (family, f"{family}-int8") for family in NEW
    ]
    for plain, quantized in pairs:
        assert 0 < distance(answers[plain], answers[quantized]) < QUANTIZED_GATE, quantized


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_s_folders_load_up_to_the_kernel(
    tmp_path: Path, folders: Path, answers: dict[str, Scores | str], name: str
) -> None:
    """vLLM on hosts reads them all, and then lacks what multiplies them; the weights come back from
    each.
    """
    said = answers[name]
    if isinstance(said, str):
        assert re.search(r"_C::\w*(fp8|fp4|scaled)|kernel|capability", said), said
    else:
        assert distance(answers["hf"], said) < QUANTIZED_GATE
    done("dequantize", folders / name, tmp_path / "plain")
    verdicts(tmp_path, folders / "hf", folders / name)
    assert tensors_of(tmp_path / "plain").keys() == tensors_of(folders / "hf").keys()
    calibrated = json.loads((folders / name / "parity.json").read_text())["calibration"]
    assert calibrated.endswith("100.0% of the places to measure were reached")


def test_verify_with_logprobs(
    tmp_path: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders by transformers, a checkpoint by the learner; beyond the gate the exit status is
    1.
    """
    texts = ["--logprobs", folders / "texts.txt", "--report", tmp_path / "parity.json"]
    for one, other, gate in (("checkpoint", "hf", PLAIN_GATE), ("hf", "int8", QUANTIZED_GATE)):
        done("verify", folders / one, folders / other, *texts)
        found = json.loads((tmp_path / "parity.json").read_text())["logprobs"]
        assert (found["ok"], found["budget"]) == (True, gate)
    another = tmp_path / "another"
    shutil.copytree(folders / "hf", another)
    tensors = tensors_of(another)
    write_folder(
        another,
        tensors | {"model.norm.weight": 4 * tensors["model.norm.weight"]},
        read_hf_config(another),
    )
    assert (
        convert.main(
            [str(word) for word in ("verify", folders / "hf", another, "--bound", "9", *texts)]
        )
        == 1
    )
    assert "TOO FAR" in capsys.readouterr().out
    said = json.loads((tmp_path / "parity.json").read_text())
    assert said["verdict"] == "not verified"
    assert said["tensors"]["within_the_bound"] == 1
    assert "runs no weights of this form" in fails(
        capsys, "verify", folders / "hf", folders / MODELOPT[0], *texts
    )
