"""Commands of README and docs: each block of them is executed, or says why not; commands in a
sentence exist. A few pages have tests of their own.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference_tables
from helpers import small_recipes, typed

from megatron_rl.data.toy import write_toy

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *(ROOT / name / "README.md" for name in ("recipes", "slurm", "tools", "tools/offline")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
# pages whose commands another test executes
ELSEWHERE = {
    "docs/getting-started/your-own-task.md": "tests/test_own_task_page.py",
    "docs/guides/environments.md": "tests/environments/test_page.py",
    "docs/guides/lora.md": "tests/test_lora_page.py",
    "docs/concepts/precision.md": "tests/apps/planner/test_precision.py",
    "examples/countdown/README.md": "tests/test_examples.py",
    "examples/tool_use/README.md": "tests/test_examples.py",
}
REASON = re.compile(r"# not run: \w.+")
BLOCK = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.M | re.S)
SHELLS = ("bash", "sh", "shell", "console", "zsh")
SMALL = {"toy_sft": 1, "quickstart": 8}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Blocks of commands, less those that say why they are not run."""
    found = BLOCK.findall(page.read_text())
    return [
        text
        for language, about, text in found
        if language in SHELLS and about.strip() != "workflow" and not REASON.match(text)
    ]


EXECUTED = [page for page in PAGES if commands(page) and name_of(page) not in ELSEWHERE]


def test_pages_with_tests_of_their_own_are_named_there() -> None:
    for page, test in ELSEWHERE.items():
        assert commands(ROOT / page), page
        assert Path(page).name in (ROOT / test).read_text(), test


def test_blocks_are_of_one_language() -> None:
    """A block without a language, or in one for transcripts, may hide commands."""
    for page in PAGES:
        for language, _, text in BLOCK.findall(page.read_text()):
            assert language, f"{page}: {text[:60]}"
            assert language in ("bash", "sh") or not re.search(
                r"^\$? ?(megatron-rl|make|sbatch|python) ", text, re.M
            ), f"{page}: {text[:60]}"


def test_generated_pages_are_current() -> None:
    for page, text in reference_tables.pages().items():
        assert page.read_text() == text, f"{page}: python tools/reference_tables.py"


def test_commands_in_sentences_exist() -> None:
    subcommands = reference_tables.subcommands()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    seen = 0
    for page in PAGES:
        for command in re.findall(r"`((?:megatron-rl|make) [^`\n]+)`", page.read_text()):
            program, first, *rest = command.split()
            if program == "make":
                assert "=" in first or first in targets, f"{page}: {command}"
            elif first not in ("COMMAND", "--version", "--help"):
                assert first in subcommands.choices, f"{page}: {command}"
                options = subcommands.choices[first]._option_string_actions
                given = [word.partition("=")[0] for word in rest if word.startswith("--")]
                assert set(given) <= options.keys(), f"{page}: {command}"
            seen += 1
    assert seen > 40


def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-E",
        "-c",
        ROOT / "docs",
        ROOT,
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    index = (tmp_path / "docs" / "index.html").read_text()
    for page in (ROOT / "docs").glob("*/*.md"):
        assert f"{page.parent.name}/{page.stem}.html" in index, page
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"https?:", index)


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder after `make quickstart`, with every step recorded."""
    folder = tmp_path_factory.mktemp("clone")
    small_recipes(folder, **SMALL)
    for path in (ROOT / "recipes").iterdir():
        if path.stem not in SMALL:
            (folder / "recipes" / path.name).symlink_to(path)
    for name in ("conf", "tools", "slurm", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    write_toy(folder / "data" / "toy")
    typed(folder, "megatron-rl train recipes/toy_sft.yaml")
    typed(folder, "megatron-rl train recipes/quickstart.yaml log.record_every=1")
    return folder


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_the_commands_of_a_page(page: Path, after_quickstart: Path) -> None:
    for block in commands(page):
        typed(after_quickstart, f"set -e\n{block}")
