"""Notes and advice of the dry run."""

import json
import re
from pathlib import Path

import pyarrow.json
import pyarrow.parquet as pq
import pytest
from helpers import Command

from megatron_rl.config import from_mapping, load
from megatron_rl.config.schema import DataSection, LossConfig, ModelSection
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight import notes as advice
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.notes import plain_prompts, unusual_clip

ROOT = Path(__file__).parents[2]


@pytest.mark.fault(
    "a recipe of a large model lacks model and data", "the advice is not to make the toy's"
)
@pytest.mark.usefixtures("empty")
def test_the_toy_is_no_advice_for_a_large_model(command: Command) -> None:
    files = ("model.path=models/a", "data.train=data/a.parquet", "data.eval=data/a.parquet")
    said = command.refused("run.device=cpu", *files, recipe=ROOT / "recipes" / "dapo_int8.yaml")
    assert "model.path: no config.json" in said
    assert "data.train: no file" in said
    assert "toy" not in said
    said = command.refused(recipe=ROOT / "recipes" / "toy_sft.yaml")
    assert said.count("`megatron-rl toy`") == 3


def notes(command: Command, *overrides: str) -> list[str]:
    return [line for line in command.dry_run(*overrides).splitlines() if line.startswith("note:")]


@pytest.mark.fault(
    "plain prompts meet a model with a chat template", "the plan says so, for both kinds of file"
)
def test_plain_prompts_for_a_chat_model(place: Path, command: Command) -> None:
    assert notes(command) == []
    settings = place / "data" / "toy" / "model" / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"chat_template": "{{ messages }}"})
    )
    (found,) = notes(command)
    assert "data/toy/train.jsonl are plain text" in found
    pq.write_table(
        pyarrow.json.read_json(place / "data" / "toy" / "train.jsonl"), place / "train.parquet"
    )
    (found,) = notes(command, "data.train=train.parquet")
    assert "train.parquet are plain text" in found
    (place / "chat.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
    )
    sections = ModelSection(path="data/toy/model"), DataSection(train="chat.jsonl")
    assert list(plain_prompts(*sections)) == []
    for damaged in ("", "[", "[1]\n", "[" * 99_999, "\x00", '{"answer": "2"}\n'):
        (place / "chat.jsonl").write_text(damaged)
        assert list(plain_prompts(*sections)) == []


@pytest.mark.fault("run.stop waits for an evaluation that is turned off", "the plan says so")
def test_a_stop_that_never_comes(place: Path, command: Command) -> None:
    (found,) = notes(command, "eval.every=0")
    assert "run.stop={'eval/accuracy': 0.28} never happens" in found
    _, found = notes(command, "eval.every=0", "run.steps=2", "log.profile_steps=[2, 3]")
    assert "log.profile_steps=[2, 3]: [3] " in found


@pytest.mark.fault(
    "a run would write more than there is room",
    "the plan says so, with the sizes",
)
def test_a_disk_that_is_short(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = command.dry_run()
    assert re.search(r"^disk .* 3 checkpoints", said, re.M)
    monkeypatch.setattr(advice, "free_bytes", lambda root: 1 << 20)
    (found,) = notes(command)
    assert "run.root=runs has 1.0 MiB" in found
    assert "checkpoint.keep_last" in found


def test_what_a_large_run_writes() -> None:
    shape = ModelShape.from_hf(read_card("Qwen3-8B"))

    def writes(checkpoint: dict, log: dict, **more: dict) -> advice.Writes:
        config = from_mapping(
            {"run": {"steps": 1000}, "checkpoint": checkpoint, "log": log, **more}
        )
        return advice.writes(shape, config)

    found = writes({"export_hf": True}, {})
    assert found.checkpoint == pytest.approx(14 * 8.19e9, rel=0.01)
    assert found.checkpoints == 2 + 1
    assert found.models == pytest.approx(2 * 8.19e9, rel=0.01)
    row = 512 * 8 + 512 * 22
    assert found.rollouts == 100 * 64 * 8 * row
    top = writes({}, {}, rollout={"top_logprobs": {"max": 32}}).rollouts
    assert top == 100 * 64 * 8 * (row + 512 * (2 + 6 * 32))
    assert writes({"every": 0}, {"record_every": 0}).total < 5e6


def test_a_clip_of_another_loss() -> None:
    (found,) = unusual_clip(LossConfig(name="gspo"))
    assert "loss.clip_low=0.2, loss.clip_high=0.28 with loss.name=gspo" in found
    assert "conf/gspo.yaml" in found
    small = LossConfig(name="ppo", clip_low=3e-4, clip_high=4e-4)
    assert list(unusual_clip(small))
    assert list(unusual_clip(LossConfig(name="cispo", clip_low=0.0, clip_high=5.0)))
    assert not list(unusual_clip(LossConfig(name="reinforce", clip_low=9.0, clip_high=9.0)))


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*-*.yaml")), ids=lambda path: path.stem
)
def test_the_clips_of_the_recipes_are_usual(recipe: Path) -> None:
    loss = load(recipe).loss
    assert not list(unusual_clip(loss))
