"""Forms of MODEL, the sampling settings of each, and the weights found."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import cli
from megatron_rl.apps.commands.models import as_the_run
from megatron_rl.apps.evaluation.measure import with_sets
from megatron_rl.apps.evaluation.stored_model import StoredWeights, find, run_of, settings
from megatron_rl.config import ConfigError, from_mapping, load, to_yaml
from megatron_rl.config.evaluation import held_out
from megatron_rl.config.schema import Format
from megatron_rl.data.toy import write_toy
from megatron_rl.learner.weights import random_tensors
from megatron_rl.models.hf_folder import HfFolder, copy_companions, write_folder
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.weight_sync.source import ShardSource

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's, in FP32."""
    folder = tmp_path_factory.mktemp("stored")
    write_toy(folder)
    about = Model.of(read_hf_config(folder / "model"), Layout())
    get = random_tensors(about, 1)
    names = [name for param in params(about.shape) if not param.row.copy for name in param.hf]
    write_folder(folder / "model", {name: get(name) for name in names}, about.hf_config)
    return folder / "model"


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """A warm start's run, with settings that no other process can repeat."""
    config = load(
        ROOT / "recipes" / "toy_sft.yaml", [f"model.path={model}", "quantization.smoothing=0.5"]
    )
    home = tmp_path / "runs" / "mine"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text(to_yaml(config))
    return home


def test_the_weights_are_the_folder_s_in_bf16(model: Path) -> None:
    weights = StoredWeights(find(model, None, None))
    source = ShardSource(weights.model, weights.groups)
    sent = dict(source.tensors(dict(weights.named_parameters())))
    stored = HfFolder(model)
    assert source.failure is None
    assert sent.keys() == set(stored.names)
    assert all(torch.equal(tensor, stored.get(name).bfloat16()) for name, tensor in sent.items())


def test_a_run_is_its_model_once_there_is_one(run: Path, model: Path) -> None:
    config = load(run / "config.yaml")
    with pytest.raises(ConfigError, match=r"runs/mine: .*checkpoint\.export_hf=true"):
        find(run, config, None)
    copy_companions(model, run / "model")
    os.link(model / "model.safetensors", run / "model" / "model.safetensors")
    found = find(run, config, None)
    assert (found.folder, found.label, found.note) == (run / "model", "mine", "")
    assert (
        run_of(run)
        == run_of(run / "model")
        == run_of(run / "checkpoints" / "step_3" / "policy")
        == run
    )
    assert run_of(model) is run_of(run / "logs") is None
    assert find(run / "model", config, None).label == "mine-model"


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a run"):
        find(tmp_path, None, None)


def test_a_bare_checkpoint_needs_a_tokenizer_from_somewhere(tmp_path: Path, model: Path) -> None:
    for name in ("metadata.json", ".metadata"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"--hf FOLDER"):
        find(tmp_path, None, None)
    assert find(tmp_path, None, model).folder == model


def test_a_run_s_settings_without_what_only_a_run_has(run: Path, model: Path) -> None:
    stored = find(model, None, None)
    config = settings(run, stored, "int8", ["eval.samples=4"])
    assert (config.quantization.format, config.quantization.smoothing) == (Format.int8, None)
    assert (config.eval.samples, config.rollout.max_response_tokens, config.run.stop) == (
        4,
        8,
        None,
    )
    assert config.data.eval == "data/toy/test.jsonl"


def test_a_model_of_no_run_has_lengths_that_its_context_allows(model: Path) -> None:
    rollout = settings(None, find(model, None, None), "bf16").rollout
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (16, 48)


def test_a_mismatch_is_looked_for_as_the_run_had_it(tmp_path: Path) -> None:
    text = "{learner: {precision: fp32}, quantization: {format: int4}}"
    (tmp_path / "config.yaml").write_text(text)
    options = SimpleNamespace(format=None)
    assert "learner.precision=fp32" in as_the_run(options, tmp_path)
    assert options.format == "int4"


def test_sets_are_named_by_file_name_or_preset() -> None:
    config = from_mapping(
        {"data": {"eval": "e.jsonl"}, "eval": {"sets": {"a": {"samples": 2}, "b": {}}}}
    )
    chosen = held_out(with_sets(config, ["a", "eval", "some/x.y.jsonl", "z=f.jsonl", "math"]))
    files = {
        "": "e.jsonl",
        "a": "e.jsonl",
        "x_y": "some/x.y.jsonl",
        "z": "f.jsonl",
        "math": "HuggingFaceH4/MATH-500[test]",
    }
    assert [(one.name, one.path) for one in chosen] == list(files.items())
    assert [one.name for one in held_out(with_sets(config, []))] == ["", "a", "b"]
    assert [(one.name, one.path) for one in held_out(with_sets(config, ["a"]))] == [
        ("a", "e.jsonl")
    ]
    for twice in (["some/x.jsonl", "x.jsonl"], ["a b=x.jsonl"]):
        with pytest.raises(ConfigError, match="write NAME=FILE"):
            with_sets(config, twice)
    with pytest.raises(ConfigError, match="--set: "):
        with_sets(from_mapping({}), [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["eval", "MODEL", "--set", "missing.jsonl"],
            "eval.sets.missing.path",
        ),
        (["eval", "MODEL", "--set", "x.jsonl", "--format", "fp8_block"], "no CPU kernel"),
        (["chat", "MODEL", "-p", ""], "-p: the prompt is empty"),
        (["chat", "MODEL", "-p", "a\udcff"], "is not UTF-8"),
        (["mismatch", "MODEL", "-n", "0"], "--sequences: 0"),
        (
            ["mismatch", "MODEL", "--format", "fp8_block", "learner.forward=as_sampler"],
            "as_sampler with quantization.f",
        ),
        (
            ["mismatch", "MODEL", "sampler.tensor_parallel=2"],
            "sampler.tensor_parallel=2",
        ),
    ],
)
def test_the_commands_refuse_before_anything_starts(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words,
    said,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(model) if word == "MODEL" else word for word in words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    "chat is given a pipe without a text, of other bytes or without an end", "nothing starts"
)
@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("</dev/null", "the prompt is empty"),
        ("</dev/zero", "longer than 1048576"),
        ("< <(printf '\\377')", "UTF-8"),
    ],
)
def test_what_a_pipe_gives_is_refused_before_anything_starts(
    model: Path, redirection: str, said: str
) -> None:
    command = f'exec "$0" -m megatron_rl.cli chat "$1" {redirection}'
    words = ["bash", "-c", command, sys.executable, str(model)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
