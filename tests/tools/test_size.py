"""Sizes of the tree, as `make lint` bounds them."""

from pathlib import Path

import pytest
import size


def test_packing_lines_saves_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text("# Twice.\nx = 1\n\ny = 2  # and once more\n")
    (tmp_path / "packed.py").write_text("x = 1; y = 2\n")
    apart, packed = size.modules(tmp_path)
    assert (apart.tokens, apart.filled) == (6, 3)
    assert (packed.tokens, packed.filled) == (7, 1)


@pytest.mark.parametrize("name", ["package tokens", "tool tokens a line"])
def test_a_broken_bound_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["size.py"])
    values = size.measure()
    monkeypatch.setattr(size, "measure", lambda: values | {name: 2 * values[name]})
    assert size.main() == 1
    assert f"{name} " in next(
        line for line in capsys.readouterr().out.splitlines() if "OVER" in line
    )
