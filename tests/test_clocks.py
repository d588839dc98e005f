"""No test is decided by how fast something is: it waits for what happens, with a bound that only a
hang reaches.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter"}
WAITS = {"wait", "join", "communicate", "get", "result", "receive"}
LEAST_S = 30  # of a wait for something that is to happen
MISSED = "is to be missed"


def calls(node: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute | ast.Name):
            if (one.func.attr if isinstance(one.func, ast.Attribute) else one.func.id) in names:
                yield one


def timed(tree: ast.Module) -> Iterator[int]:
    """Lines that assert how long something took; a loop's own deadline is none of them."""
    loops = {
        inner for loop in ast.walk(tree) if isinstance(loop, ast.While) for inner in ast.walk(loop)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node not in loops and any(calls(node.test, CLOCKS)):
            yield node.lineno
    for call in calls(tree, WAITS | {"run"}):
        limits = [word.value for word in call.keywords if word.arg == "timeout"]
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        limits += call.args[:1] if name in WAITS - {"get"} and len(call.args) == 1 else []
        for limit in limits:
            if (
                isinstance(limit, ast.Constant)
                and isinstance(limit.value, int | float)
                and limit.value < LEAST_S
            ):
                yield call.lineno


def test_it_finds_them() -> None:
    text = "assert time.monotonic() - a < 5\nx.join(5)\nq.get(timeout=5)\nwhile 1:\n    assert time.monotonic() < b\n"
    assert list(timed(ast.parse(text))) == [1, 2, 3]


def test_nothing_is_decided_by_the_clock() -> None:
    """A timeout that is to be missed has these words on its line."""
    found = []
    for file in sorted(
        path for path in TESTS.rglob("*.py") if path.parent.name not in ("gpu", "gpu_set")
    ):
        text = file.read_text()
        lines = text.splitlines()
        found += [
            f"{file.relative_to(TESTS)}:{at}"
            for at in timed(ast.parse(text))
            if MISSED not in lines[at - 1]
        ]
    assert found == []
