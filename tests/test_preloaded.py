"""Forks of a parent that has its imports done behave as fresh processes do.

Their arguments, streams and descriptors are what every test that starts one relies on.
"""

import os
import select
import subprocess
import sys

import pytest
from preloaded import run

LIMIT_S = 120  # the first of a session waits for its parent's imports


def program(text: str, *words: str) -> list[str]:
    return [sys.executable, "-c", text, *words]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit('error: in words')", 1, "error: in words\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_how_a_program_ends(text: str, code: int, words: str) -> None:
    done = run("torch", program(text), timeout=LIMIT_S)
    assert done.returncode == code
    assert words in done.stderr


def test_its_imports_are_done_and_its_state_is_its_own() -> None:
    text = "import sys; print('torch' in sys.modules); import megatron_rl; print(hasattr(megatron_rl, 'mark'))"
    for _ in range(2):
        assert (
            run("torch", program(f"{text}; megatron_rl.mark = 1"), timeout=LIMIT_S).stdout
            == "True\nFalse\n"
        )


def test_a_program_that_takes_too_long_is_ended_and_shown() -> None:
    sleeps = program("print('begun', flush=True); import time; time.sleep(999)")
    with pytest.raises(AssertionError, match="begun"):
        run("torch", sleeps, timeout=5)  # is to be missed


def test_it_ends_with_its_requester() -> None:
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    asker = "import sys; from preloaded import Process; Process('torch', sys.argv[1:], start_new_session=True).wait()"
    command = program(asker, *program(text))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    ) as one:
        assert one.stdout
        end = os.pidfd_open(int(one.stdout.readline()))
        one.kill()
    assert select.select([end], [], [], LIMIT_S)[0]
    os.close(end)
