"""Each text that the page on troubleshooting quotes is one that the package prints."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/troubleshooting.md"
ERROR = re.compile(r"[A-Z]\w*(?:Error|Mismatch|Peer)")


def quoted(text: str) -> list[str]:
    """Texts in backquotes that are errors: of several words, or an exception; no commands."""
    found = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", text)]
    return [
        one
        for one in found
        if ERROR.fullmatch(one) or (" " in one and not one.startswith(("megatron-rl", "hf ", "-")))
    ]


def test_what_the_page_quotes_is_printed_by_the_package() -> None:
    printed = {
        node.value
        for path in (ROOT / "megatron_rl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts = quoted(PAGE.read_text())
    assert len(texts) > 25
    for text in texts:
        for part in filter(None, map(str.strip, text.split("..."))):
            assert any(part in one for one in printed), f"{text}: nothing prints {part!r}"


def test_headings_of_errors_are_their_text() -> None:
    headings = re.findall(r"^### (.+)$", PAGE.read_text(), re.M)
    assert len(headings) > 8
    assert all("`" in heading for heading in headings)
