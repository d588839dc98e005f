"""docs/guides/extending.md: every "how to add" is carried out, in a copy of the tree, as it is written
there.

A section is an example. Its blocks are edits, by what follows the word python (or yaml) on their
first line: new=PATH, append=PATH, after="LINE" in=PATH, replace="LINE" in=PATH. The one called
`try` fails before the edits and passes after.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text()
COPIED = ("megatron_rl", "conf", "recipes", "docs")


@dataclass
class Example:
    title: str
    touches: set[str]
    edits: list[tuple[dict[str, str], str]] = field(default_factory=list)
    attempt: str = ""


def examples() -> list[Example]:
    found = []
    for section in PAGE.partition("\n## How to add")[2].split("\n### ")[1:]:
        title, _, text = section.partition("\n")
        touches = re.search(r"^Touches (.*?)\n\n", text, re.M | re.S)
        assert touches, f"{title}: no line 'Touches ...'"
        example = Example(title, set(re.findall(r"`([\w./-]+)`", touches[1])))
        for info, content in re.findall(
            r"^```(?:python|yaml|json) (.*?)\n(.*?)^```$", text, re.M | re.S
        ):
            if info == "try":
                example.attempt = content
            else:
                example.edits.append(
                    (dict(word.split("=", 1) for word in shlex.split(info)), content)
                )
        found.append(example)
    return found


def path_of(place: dict[str, str]) -> str:
    return place.get("in") or place.get("new") or place["append"]


def apply(place: dict[str, str], content: str, root: Path) -> None:
    path = root / path_of(place)
    if "new" in place:
        assert not path.exists(), f"{path} is there already"
        path.write_text(content)
        return
    text = path.read_text()
    if "append" in place:
        path.write_text(text + content)
        return
    anchor = place.get("after") or place["replace"]
    lines = [
        line
        for line in text.splitlines(keepends=True)
        if anchor in (line.strip(), line.partition("  # ")[0].strip())
    ]
    assert len(lines) == 1, f"{path}: {anchor!r} stands there {len(lines)} times"
    before, after = text.split(lines[0])
    path.write_text(before + (lines[0] if "after" in place else "") + content + after)


# all in one process, which imports torch once
ATTEMPTS = """
import json, sys
works = []
for title, attempt in json.loads(sys.argv[1]).items():
    try:
        exec(attempt, {"__name__": "__main__"})
        works.append(title)
    except BaseException:
        pass
print(json.dumps(works))
"""


def copied(folder: Path) -> Path:
    """Copy the tree for examples that edit it and write files there."""
    for name in COPIED:
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return folder


@pytest.fixture(scope="module")
def works_already(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Titles of the examples whose last block passes in the tree as it is."""
    command = [
        sys.executable,
        "-c",
        ATTEMPTS,
        json.dumps({one.title: one.attempt for one in examples()}),
    ]
    place = copied(tmp_path_factory.mktemp("as_it_is"))
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=600, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.title)
def test_the_worked_example_works(
    example: Example, tmp_path: Path, works_already: list[str]
) -> None:
    copied(tmp_path)
    assert example.attempt, "no block that tries it"
    assert example.title not in works_already, "it works without the edits"
    for place, content in example.edits:
        apply(place, content, tmp_path)
    command = [sys.executable, "-c", example.attempt]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path_of(place) for place, _ in example.edits} == example.touches
