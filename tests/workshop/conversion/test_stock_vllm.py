"""What vLLM, as anybody starts it, transformers and the learner compute with the folders that are made here.

One vLLM process, which imports nothing of this project, loads all folders in turn.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from models import config_of, convert, done, made, tensors_of

from megatron_rl.checkpoint.torch_dist.reader import hf_shapes
from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.workshop.conversion import scores, verification
from megatron_rl.workshop.conversion.prompts import token_rows
from megatron_rl.workshop.conversion.scores import Program, Scores
from megatron_rl.workshop.conversion.sources import Source, find
from megatron_rl.workshop.conversion.verification import PLAIN_GATE, QUANTIZED_GATE

MODELOPT = ("modelopt_fp8_kv", "modelopt_nvfp4")
NEW = {"phi3": "Phi3ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM"}  # families that nothing else here starts
FOLDERS = ("hf", "int8", "smooth", "fp8", *MODELOPT, *NEW, *(f"{family}-int8" for family in NEW))
TEXTS = "".join(f"{a}+{b}={a + b}\n" for a in range(4, 12) for b in (3, 17, 58))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every form of one small model; its weights are large enough for logprobs to be far from uniform."""
    folder = tmp_path_factory.mktemp("forms")
    write_toy(folder / "toy")
    (folder / "toy" / "model").rename(folder / "hf")
    config, generator = read_hf_config(folder / "hf"), torch.Generator().manual_seed(4)
    tensors = {
        name: ((1 if len(size) == 1 else 0) + 0.06 * torch.randn(size, generator=generator)).bfloat16()
        for name, size in hf_shapes(ModelShape.from_hf(config)).items()
    }
    write_folder(folder / "hf", tensors, config)
    (folder / "texts.txt").write_text(TEXTS)
    done("import", folder / "hf", folder / "checkpoint")
    smooth = ("--smooth", 0.5, "--calibrate", folder / "texts.txt")
    done("quantize", folder / "hf", folder / "int8", "--format", "int8")
    done("quantize", folder / "hf", folder / "smooth", "--format", "int8", *smooth)
    done("quantize", folder / "hf", folder / "fp8", "--format", "fp8")
    for family, architecture in NEW.items():
        sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        about = {"architectures": [architecture], "max_position_embeddings": 64, "hidden_act": "silu"}
        made(folder / family, config_of(family, vocab_size=config["vocab_size"], **sizes, **about), scale=0.06)
        done("quantize", folder / family, folder / f"{family}-int8", "--format", "int8")
    for format in MODELOPT:
        done("quantize", folder / "hf", folder / format, "--format", format, *smooth[2:])
    return folder


@pytest.fixture(scope="module")
def rows(folders: Path) -> list[tuple[int, ...]]:
    return token_rows(str(folders / "texts.txt"), folders / "hf")


@pytest.fixture(scope="module")
def answers(folders: Path, rows: list[tuple[int, ...]]) -> dict[str, Scores | str]:
    return dict(zip(FOLDERS, scores.plain_vllm([folders / name for name in FOLDERS], rows), strict=True))


def distance(one: Scores | str, other: Scores | str) -> float:
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    return float((torch.cat(one) - torch.cat(other)).abs().mean())


@pytest.mark.engine
def test_plain_weights(folders: Path, rows: list[tuple[int, ...]], answers: dict[str, Scores | str]) -> None:
    """Transformers, learner and vLLM agree."""
    source = find(str(folders / "hf"))
    for program in (Program.transformers, Program.learner):
        assert distance(scores.score(program, source, rows), answers["hf"]) < PLAIN_GATE
    of_checkpoint = scores.score(Program.learner, find(str(folders / "checkpoint")), rows)
    assert distance(of_checkpoint, answers["hf"]) < PLAIN_GATE


@pytest.mark.engine
@pytest.mark.parametrize("family", NEW)
def test_families_that_are_rows(
    folders: Path, rows: list[tuple[int, ...]], answers: dict[str, Scores | str], family: str
) -> None:
    by_learner = scores.score(Program.learner, find(str(folders / family)), rows)
    assert distance(by_learner, answers[family]) < PLAIN_GATE
    assert 0 < distance(answers[family], answers[f"{family}-int8"]) < QUANTIZED_GATE


@pytest.mark.engine
@pytest.mark.parametrize("name", ["int8", "smooth", "fp8"])
def test_quantized_weights(answers: dict[str, Scores | str], name: str) -> None:
    assert 0 < distance(answers["hf"], answers[name]) < QUANTIZED_GATE


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_s_folders_load_up_to_the_kernel(
    tmp_path: Path, folders: Path, answers: dict[str, Scores | str], name: str
) -> None:
    """vLLM on hosts reads them all, and then lacks what multiplies them; the weights come back from each."""
    said = answers[name]
    if isinstance(said, str):
        assert re.search(r"_C::\w*(fp8|fp4|scaled)|kernel|capability", said), said
    else:
        assert distance(answers["hf"], said) < QUANTIZED_GATE
    done("dequantize", folders / name, tmp_path / "plain")
    done("verify", folders / "hf", folders / name, "--report", tmp_path / "parity.json")
    assert tensors_of(tmp_path / "plain").keys() == tensors_of(folders / "hf").keys()
    assert json.loads((folders / name / "parity.json").read_text())["calibration"]["seen"] == 1.0


@pytest.mark.engine
def test_verify_with_logprobs(
    tmp_path: Path, folders: Path, answers: dict[str, Scores | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(program: Program, source: Source, rows: scores.Rows) -> Scores:
        found = answers[source.path.name]  # of the process above: another one takes seconds
        assert not isinstance(found, str)
        return found if program is Program.vllm else [row + 1 for row in found]

    monkeypatch.setattr(verification, "score", asked)
    words = ["verify", folders / "hf", folders / "int8", "--logprobs", folders / "texts.txt"]
    report = ["--report", tmp_path / "parity.json"]
    done(*words, *report, "--programs", "vllm")
    (pair,) = json.loads((tmp_path / "parity.json").read_text())["logprobs"]
    assert pair["ok"]
    assert pair["budget"] == QUANTIZED_GATE
    assert convert.main([str(word) for word in [*words, *report, "--programs", "learner,vllm"]]) == 1
    said = json.loads((tmp_path / "parity.json").read_text())
    assert said["verdict"] == "not verified"
    assert said["skipped"] == ["B was not scored by learner, which takes no weights of this form"]
