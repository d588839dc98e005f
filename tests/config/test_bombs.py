"""Recipes that were made to keep their reader busy: a sentence, soon, and in little memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Command, refusal

from megatron_rl.config import ConfigError, load

DEEP = 100_000


def lines(each: Callable[[str], str], count: int = 24) -> str:
    """Each line holds ten of the line before."""
    made = ["l0: &l0 {a: 1}", *(f"l{n}: &l{n} {{{each(f'*l{n - 1}')}}}" for n in range(1, count))]
    return "learner:\n  megatron:\n" + "".join(f"    {line}\n" for line in made)


ALIASES = lines(lambda before: ", ".join(f"k{each}: {before}" for each in range(10)))
MERGES = lines(lambda before: f"<<: [{', '.join([before] * 10)}]")


TEXTS = {
    "aliases of aliases": (ALIASES, "with its aliases it has more than 10000 values"),
    "aliases in a list": (
        "a: &a [1, 1]\nb: &b [*a, *a]\n"
        + "".join(
            f"c{n}: &c{n} [{', '.join([f'*c{n - 1}' if n else '*b'] * 9)}]\n" for n in range(20)
        ),
        "with its aliases",
    ),
    "merge keys of merge keys": (MERGES, "with its aliases it has more than 10000 values"),
    "an alias of itself": (
        "learner: {megatron: &a {b: *a}}\n",
        "an alias in it refers to what it is part of",
    ),
    "a list of itself": (
        "learner: {megatron: {b: &a [*a]}}\n",
        "an alias in it refers to what it is part of",
    ),
    "deep lists": ("learner: {megatron: {a: " + "[" * DEEP, "nested more than 32 deep"),
    "deep sections": ("{a: " * DEEP, "nested more than 32 deep"),
    "deep by indentation": (
        "".join(" " * n + f"k{n}:\n" for n in range(500)),
        "nested more than 32 deep",
    ),
    "many values": ("learner: {megatron: {a: [" + "1," * 50_000 + "]}}", "more than 10000 values"),
    "a long text": ("# " + "x" * (2 << 20), "expected at most 1048576"),
    "a number of many digits": ("run: {steps: " + "1" * 5000 + "}", "not readable as YAML"),
}


@pytest.mark.fault(
    "a recipe is a bomb of aliases, depth or size", "a sentence names the file, in a second"
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", TEXTS)
def test_texts(kind: str, tmp_path: Path) -> None:
    text, said = TEXTS[kind]
    (tmp_path / "bomb.yaml").write_text(text)
    found = refusal(load, tmp_path / "bomb.yaml")
    assert "bomb.yaml: " in found
    assert said in found
    assert len(found) < 1000


@pytest.mark.fault("bases name bases without an end", "a sentence names the recipe, in a second")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["twice", "chain", "list", "itself", "pair"])
def test_bases(kind: str, tmp_path: Path) -> None:
    for number in range(1500):
        next_one = [number + 1]
        back = {"itself": [number], "pair": [number ^ 1]}
        bases = ({"twice": next_one * 2, "chain": next_one, "list": range(1, 1500)} | back)[kind]
        text = "run: {steps: 1}\n" if number >= 1499 or (kind == "list" and number) else ""
        names = ", ".join(f"r{each}.yaml" for each in bases)
        (tmp_path / f"r{number}.yaml").write_text(text or f"base: [{names}]\n")
    said = (
        "`base` leads back"
        if kind in back
        else "more than 64 files or 10000 values by way of `base`"
    )
    assert f"r0.yaml: {said}" in refusal(load, tmp_path / "r0.yaml")


@pytest.mark.fault("an override is a bomb", "a sentence")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.megatron." + "a." * 5000 + "a=1", "a key of more than 32 parts"),
        ("learner.megatron.a=" + "[" * 5000, "nested more than 32 deep"),
        ("learner.megatron.a=&x [*x]", "an alias in it refers"),
        ("learner.megatron.a=[" + "1," * 20_000 + "]", "more than 10000 values"),
        ("run.seed=" + "9" * 6000, "digits"),
    ],
)
def test_overrides(override: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("run: {steps: 1}\n")
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "mine.yaml", [override])


def test_many_files_of_many_values(tmp_path: Path) -> None:
    for number in range(6):
        values = ", ".join(f"a{number}_{each}: 1" for each in range(2000))
        (tmp_path / f"b{number}.yaml").write_text(f"learner: {{megatron: {{{values}}}}}\n")
    (tmp_path / "mine.yaml").write_text(
        f"base: [{', '.join(f'b{number}.yaml' for number in range(6))}]\n"
    )
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: more than 64 files or 10000 values by way of `base`"
    ):
        load(tmp_path / "mine.yaml")


def test_ordinary_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "rollout: {max_prompt_tokens: &n 77, max_response_tokens: *n}\n"
    )
    assert load(tmp_path / "mine.yaml").rollout.max_response_tokens == 77


@pytest.mark.fault(
    "a recipe or its base is not there", "the sentence names who names it, and a name that is near"
)
def test_files_that_are_not_there(tmp_path: Path, command: Command) -> None:
    (tmp_path / "toy_sft.yaml").write_text("run: {steps: 1}\n")
    (tmp_path / "quickstart.yaml").write_text("base: toy_stf.yaml\n")
    (tmp_path / "far.yaml").write_text("base: nope.yaml\n")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    (tmp_path / "zero.yaml").write_text('base: "x\\0.yaml"\n')
    for name, said in (
        ("nope.yaml", f"{tmp_path}/nope.yaml: no such file"),
        (
            "quikstart.yaml",
            f"{tmp_path}/quikstart.yaml: no such file; did you mean {tmp_path}/quickstart.yaml?",
        ),
        (
            "quickstart.yaml",
            f"{tmp_path}/quickstart.yaml: base names {tmp_path}/toy_stf.yaml, but there is no such "
            f"file; did you mean {tmp_path}/toy_sft.yaml?",
        ),
        (
            "far.yaml",
            f"{tmp_path}/far.yaml: base names {tmp_path}/nope.yaml, but there is no such file",
        ),
        ("loop.yaml", f"{tmp_path}/loop.yaml: no such file"),
        (
            "zero.yaml",
            f"{tmp_path}/zero.yaml: base names {tmp_path}/x\\x00.yaml, but there is no such file",
        ),
    ):
        assert command.refused(recipe=tmp_path / name) == f"error: {said}\n"


def test_a_bomb_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(ALIASES)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29)); "
        "from megatron_rl import cli; sys.exit(cli.main(['train', sys.argv[1], '--dry-run']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb.yaml")]
    assert subprocess.run(command, timeout=120, capture_output=True).returncode == 2
