"""The comparison with other projects' loops: this project's is equal to itself, and a difference is
named.
"""

from pathlib import Path

import pytest
from environments.chats import APPENDS, SPECIAL, Published, folder_of
from environments.loops import compared, play, scripted

UNLIKE = "no message"  # there is nothing to answer here, and there the policy goes on


@pytest.mark.parametrize("history", ["template", "append"])
def test_differences_are_named(tmp_path: Path, history: str) -> None:
    own = Published("own", "", "", SPECIAL, SPECIAL[1:])
    script = scripted(own, "", folder_of(tmp_path / "model", APPENDS), False, 2)
    rows = [row for (row,) in play(script, history)]
    lines = dict(line.split(": ", 1) for line in compared(script, rows, history))
    assert lines.pop(UNLIKE).startswith("0 of 2 equal; here: step returned no message")
    assert set(lines.values()) == {"2 of 2 equal"}

    kinds = [talk["kind"] for talk in script["conversations"]]
    changed = {
        "answers": ("mask", 0, "mask at 0: here [1"),
        "thinking": ("tokens", 1, "tokens at 1 of"),
        "a cut answer": ("logprobs", 0, "logprobs at 0"),
        "two messages": ("prompt", 0, "the answers are the same, prompt at 0 of"),
    }
    for kind, (name, place, _) in changed.items():
        rows[kinds.index(kind)][name][place] = 0 if name == "mask" else 5
    found = dict(line.split(": ", 1) for line in compared(script, rows, history))
    for kind, (_, _, text) in changed.items():
        assert found.pop(kind).startswith(f"1 of 2 equal; {text}"), kind
    found.pop(UNLIKE)
    assert set(found.values()) == {"2 of 2 equal"}
