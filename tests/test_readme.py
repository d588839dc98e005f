"""README: every page of docs/ is named, and its commands go on from `make quickstart`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
STARTS = re.findall(r"^megatron-rl train (recipes/quickstart\.yaml [^#\n]*)", README, re.M)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_a_link_and_a_place_in_the_tree(page: str) -> None:
    (tree,) = [block for block in README.split("```") if "one YAML per experiment" in block]
    assert f"(docs/{page})" in README
    assert page in tree


@pytest.mark.parametrize("page", PAGES)
def test_every_page_begins_with_whom_it_is_for(page: str) -> None:
    assert re.match(r"# .+\n\n\*For .+\.\*\n", (ROOT / "docs" / page).read_text())


@pytest.mark.parametrize(
    "words", [one for one in STARTS if not re.search("--dry-run|--print-config", one)]
)
def test_what_follows_the_quickstart_does_not_want_its_folder(words: str) -> None:
    assert re.search(r"run\.name=(?!quickstart\b)\w+|run\.if_exists=(resume|archive)", words)
