"""Forks of a parent that has its imports done behave as fresh processes do, as far as the tests rely on it."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import Process, run

LIMIT_S = 120  # the first of a session waits for its parent's imports


def program(text: str, *words: str) -> list[str]:
    return [sys.executable, "-c", text, *words]


def test_what_a_program_is_given_and_what_comes_back(tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv[1:], os.environ['MINE'], os.getcwd()); sys.stderr.write('said'); sys.exit(3)"
    done = run("torch", program(text, "a", "b c"), cwd=tmp_path, env=os.environ | {"MINE": "x"}, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (3, "said")
    assert done.stdout == f"['a', 'b c'] x {tmp_path}\n"


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
        assert run("torch", program(f"{text}; megatron_rl.mark = 1"), timeout=LIMIT_S).stdout == "True\nFalse\n"


def test_descriptors_keep_their_numbers() -> None:
    reader, writer = os.pipe()
    text = "import os, sys; os.write(int(sys.argv[1]), b'here')"
    with os.fdopen(reader, "rb") as pipe:
        process = Process("torch", program(text, str(writer)), pass_fds=[writer], start_new_session=True)
        os.close(writer)
        assert pipe.read() == b"here"
    assert process.wait(LIMIT_S) == 0


def test_a_program_that_takes_too_long_is_ended_and_shown() -> None:
    with pytest.raises(AssertionError, match=r"timed out after 5 seconds: begun"):
        run("torch", program("print('begun', flush=True); import time; time.sleep(999)"), timeout=5)  # is to be missed


def test_it_ends_with_whoever_asked_for_it() -> None:
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    asker = "import sys; from preloaded import Process; Process('torch', sys.argv[1:], start_new_session=True).wait()"
    command = program(asker, *program(text))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}) as one:
        assert one.stdout
        end = os.pidfd_open(int(one.stdout.readline()))
        one.kill()
    assert select.select([end], [], [], LIMIT_S)[0]
    os.close(end)
