"""Hostile files: their contents stay text, their cost is bounded, and an error is one line."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import cli
from megatron_rl.apps.translation.keys import TranslationError
from megatron_rl.apps.translation.reading import Reading
from megatron_rl.apps.translation.recipe import recipe
from megatron_rl.apps.translation.shell import Script, shell_sum

NEMO = """
policy: {model_name: Qwen/Qwen3-8B, max_total_sequence_length: 4096}
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 10}
data: {train: {dataset_name: x}}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_files=x.parquet"
SPECIAL = (
    "\x85\u2028\u2029\r\n\t\v\f\x1c\x1b\u202e\ufeff\xa0\x00\\\"':#-?{}[]&*!|>%@`,0123456789e._+~=< "
)
TEXTS = st.text(
    st.one_of(st.sampled_from(SPECIAL), st.characters()),
    min_size=1,
    max_size=30,
)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a file and translate it; return the status and all output."""
    monkeypatch.setenv("MEGATRON_RL_FLEET_KEY", "short")
    monkeypatch.setenv("WANDB_API_KEY", "8765")
    monkeypatch.chdir(tmp_path)

    def run(project: str, name: str, text: str, *words: str) -> tuple[int, str]:
        write(tmp_path / name, text.replace("NEMO", NEMO).replace("VERL", VERL))
        status = cli.main(["translate", project, name, *words])
        return status, "".join(capsys.readouterr())

    return run


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


# as keys, values, words and flags; TEXT is quoted as each form has it
FORMS = {
    "nemo_rl a.yaml": NEMO.replace("name: x", "name: TEXT")
    + 'TEXT: TEXT\nfoo: {TEXT: TEXT, bar: "${nothing}"}\n',
    "verl a.sh": f"{VERL} TEXT reward_model.enable=TEXT k=TEXT$NO --TEXT 1",
    "trl a.py": "GRPOConfig(max_steps=8, zzz=TEXT)\nGRPOTrainer(model=TEXT, reward_funcs=TEXT)",
    "prime_rl a.toml": "max_steps = 10\nTEXT = TEXT\n[model]\nname = TEXT",
}


@pytest.mark.parametrize("separator", SPECIAL[:13])
@pytest.mark.parametrize(("form", "text"), FORMS.items())
def test_text_of_a_file_stays_in_its_comment(
    separator: str, form: str, text: str, run: Any
) -> None:
    evil = f'zzz{separator}environment: {{name: "evil.py:f"}} #'
    text = text.replace("TEXT", f"'{evil}'" if form == "verl a.sh" else json.dumps(evil))
    project, name = form.split()
    status, said = run(project, name, text, "-o", "mine.yaml")
    written = Path("mine.yaml").read_text()
    assert (status, (said + written).replace("\n", "").isprintable()) == (0, True)
    assert yaml.safe_load(written) == recipe(project, Path(name), {}).mapping
    assert "environment" not in yaml.safe_load(written)
    section = yaml.safe_load(run(project, name, text, "--correction")[1])
    assert section.keys() == {"correction"}


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=2))
def test_what_is_written_is_read_as_the_same_keys(
    model: str, rows: str, rest: dict[str, str]
) -> None:
    with TemporaryDirectory() as folder, suppress(TranslationError):
        policy = {"model_name": f"a/{model}", "tokenizer": {"chat_template_kwargs": {"x": rows}}}
        text = json.dumps(
            {"policy": policy, "data": {"train": {"dataset_name": rows}}, "other": rest}
        )
        made = recipe("nemo_rl", write(Path(folder) / "theirs.yaml", text), {})
        assert yaml.safe_load(made.text(rows)) == made.mapping


SECRETS = """
${oc.env:WANDB_API_KEY}
data/${oc.env:WANDB_API_KEY}.jsonl
${logger.key}
${mul:${oc.env:WANDB_API_KEY},1}
${oc.select:nothing,${oc.env:WANDB_API_KEY}}
${oc.${logger.half}:WANDB_API_KEY}
${oc.decode:${oc.env:WANDB_API_KEY}}
"""


@pytest.mark.parametrize("value", SECRETS.split())
@pytest.mark.parametrize("key", ["foo.bar", "data.train.dataset_name", "grpo.max_num_steps"])
def test_the_environment_is_not_read(value: str, key: str, run: Any) -> None:
    logger = "logger: {key: '${oc.env:WANDB_API_KEY}', half: env}"
    status, said = run("nemo_rl", "a.yaml", f"{NEMO}{logger}\n{key}: ['{value}']\n")
    assert status == (0 if key == "foo.bar" else 2)
    assert "WANDB_API_KEY" in said
    assert "8765" not in said
    assert Reading().read(Path("/proc/self/environ")) == ""  # a script that takes it over


def test_interpolations_of_a_file_s_own_keys(run: Any, tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", NEMO)
    text = """
    defaults: [ppo_trainer, base.yaml, _self_]
    grpo:
      num_prompts_per_step: ${mul:4,${other.eight}}
      max_num_steps: ${oc.select:none.here, ${oc.select:other.dozen,1}}
    policy: {model_name: "${other.org}/Qwen3-8B", max_total_sequence_length: "${..other.long}"}
    cluster: {num_nodes: 2}
    other:
      {eight: 8, org: Qwen, long: 2048, dozen: 12, all: "${grpo}", self: "${other.self}",
       me: ["${..org}", "${.x}"]}
    """
    said = run("nemo_rl", "a.yaml", text)[1]
    ours = ("model: Qwen3-8B", "steps: 12", "prompts_per_step: 32", "max_response_tokens: 1024")
    unknown = (
        "defaults: ['ppo_trainer']",
        "other.all.max_num_steps: 12",
        "other.self: ${other.self}",
        "me: ['Qwen', ${.x}]",
    )
    assert all(part in said for part in (*ours, *unknown)), said


SUMS = """
7/2=3 7%3=1 1+2*(3-4)=-1 -5=-5 9223372036854775807=9223372036854775807 9223372036854775807+1= -7/2= 7%-3=
08= 0x1F= 3(4)= ()= = 1,2= 7//2= 2**3= 1/0= 1.5= 1_0= A= ((((=
"""


def test_sums_are_the_shell_s_or_unknown() -> None:
    for line in SUMS.split():
        text, _, value = line.rpartition("=")
        assert str(shell_sum(text)) == (value or "None"), text


def test_variables_of_a_shell(tmp_path: Path) -> None:
    """A variable in a sum is a number of its own; what is appended to a word stays in it."""
    script = "A=1+2\nNAME=qwen\nNAME+=3-8b\nrun $((A*2)) $NAME $(($A*2)) $((NOTHING+1))\n"
    words = Script(tmp_path, {}).read(script).commands[-1]
    assert list(map(str, words[1:])) == ["6", "qwen3-8b", "5", "$((NOTHING+1))"]


REFUSED = yaml.safe_load((Path(__file__).parent / "hostile.yaml").read_text())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(case: dict[str, Any], run: Any, tmp_path: Path) -> None:
    write(tmp_path / "b.sh", "source a.sh\n")
    write(tmp_path / "list.yaml", "- a\n")
    os.mkfifo(tmp_path / "pipe")
    for place in range(16):
        write(
            tmp_path / f"c{place}.yaml",
            f"defaults: {[f'c{place + 1}.yaml'] * 3}" if place < 15 else "{}",
        )
    more = case.get("more", "")
    text = case.get("text", "")
    for place in range(case.get("times", 0)):
        text += more.replace("NEXT", str(place + 1)).replace("LAST", str(place))
    for words in [case["words"]] if "words" in case else ["", "-o -"]:
        status, said = run(*case["file"].split(), text, *words.split())
        assert (status, said[:7], said.count("\n")) == (2, "error: ", 1)
        assert all(part in said for part in case["error"].split(" ... ")), said
        assert len(said) < 2100


def test_overrides_behind_the_file_that_is_written(run: Any) -> None:
    script = 'source elsewhere.sh\nVERL actor_rollout_ref.actor.optim.lr=$LR "${MORE[@]}"\n'
    words = ["LR=3e-6", "MORE=data.seed=5 trainer.total_training_steps=7", "trainer.project_name=x"]
    said = run("verl", "a.sh", script, "-o", "-", *words)[1]
    for part in ("lr: 3.0e-06", "seed: 5", "steps: 7", "trainer.project_name"):
        assert part in said
