"""A chat with an environment's tools and a scripted policy: requests, output, failures."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from environments.chats import APPENDS, folder_of
from environments.scripted_policy import HERE, ScriptedPolicy, call
from helpers import logged, refusal, wait_for
from safetensors.torch import save_file

from megatron_rl.apps.evaluation.chat import ChatError, ToolChat, _environment, begun
from megatron_rl.apps.evaluation.stored_model import StoredModel
from megatron_rl.apps.toy_tools import CALL_END, CALL_START, write_tool_tokenizer
from megatron_rl.config import from_mapping
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import TURN_END
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model
from megatron_rl.processes.process import state_of

HELLO = "What is 12 + 30?"


class Spelled(ScriptedPolicy):
    """Samples letter by letter, unlike any tokenizer; records its samples."""

    def __init__(self, tokenizer: FolderTokenizer, says: Callable[[str, int], str]) -> None:
        super().__init__(self, says)  # type: ignore[arg-type]
        self.known = tokenizer
        self.sampled = list[list[int]]()
        self.stop_token_ids = tokenizer.stop_token_ids
        self.decode_all = tokenizer.decode_all

    def encode(self, text: str) -> list[int]:
        ids = [one for letter in text for one in self.known.encode(letter)]
        self.sampled.append([*ids, self.stop_token_ids[0]])
        return ids


class Talked:
    """A chat, and what was shown before its answers."""

    def __init__(
        self, folder: Path, says: Callable[[str, int], str], row: Any = None, **sections: Any
    ) -> None:
        environment = {"name": f"{HERE}:Guess", "tool_parser": "hermes", "tool_timeout_s": 2.0}
        environment |= sections.pop("environment", {})
        rollout = {
            "max_response_tokens": 256,
            "max_context_tokens": 4096,
            **sections.pop("rollout", {}),
        }
        self.config = from_mapping({"environment": environment, "rollout": rollout, **sections})
        self.tokenizer = FolderTokenizer(folder_of(folder, APPENDS))
        self.policy = Spelled(self.tokenizer, says)
        self.shown = list[str]()
        self.pool = EnvironmentPool(self.config.environment)
        self.pool.start()
        self.chat = ToolChat(
            self.policy,  # type: ignore[arg-type]
            self.tokenizer,
            self.config,
            self.pool,
            row or {},
            self.shown.append,
        )

    def close(self) -> None:
        self.chat.close()

    def last(self) -> str:
        """The request before the last answer."""
        return self.tokenizer.decode_all(self.policy.asked[-1][0])


def adds(text: str, seed: int) -> str:
    if text.endswith("42<|im_end|>\n<|im_start|>assistant\n"):
        return "42"
    return call("add", a=12, b=30)


def test_tools_are_called_shown_and_read_in_the_exact_tokens(tmp_path: Path) -> None:
    with closing(Talked(tmp_path, adds, data={"system_prompt": "Be brief."})) as talked:
        assert [talked.chat.answer(text) for text in (HELLO, "Again.")] == ["42", "42"]
    shown, answered = talked.shown[:2]
    assert talked.shown == [shown, answered] * 2
    assert json.loads(shown.removeprefix("-> add ")) == {"a": 12, "b": 30}
    assert answered == "<- 42"
    assert talked.last().startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" + HELLO
    )
    assert "42<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n" in talked.last()
    asked = [tokens for tokens, _, _ in talked.policy.asked]
    for before, sampled, after in zip(asked, talked.policy.sampled, asked[1:], strict=False):
        assert after[: len(before) + len(sampled)] == before + sampled


def test_what_a_tool_does_wrong_is_shown_and_the_chat_goes_on(tmp_path: Path) -> None:
    wrong = {
        "raise": (call("raises"), "nothing there"),
        "unread": ("<tool_call>{add", "could not be read"),
        "flood": (call("flood"), "[cut: the first 512 tokens]"),
    }

    def says(text: str, seed: int) -> str:
        said = text.rpartition("<|im_start|>user\n")[2]
        return (
            "so be it" if "<|im_start|>tool" in said else wrong[said.partition("<|im_end|>")[0]][0]
        )

    with closing(Talked(tmp_path, says, rollout={"max_context_tokens": 16384})) as talked:
        for name, (_, shown) in wrong.items():
            assert talked.chat.answer(name) == "so be it"
            assert shown in talked.shown[-1], name
            assert shown in talked.last(), name


def test_a_tool_that_ends_its_process_ends_the_conversation(tmp_path: Path) -> None:
    def says(text: str, seed: int) -> str:
        return call("die") if HELLO in text else "so be it"

    with closing(Talked(tmp_path, says)) as talked:
        with pytest.raises(ChatError, match=r"environment\.name"):
            talked.chat.answer(HELLO)
        assert talked.chat.answer("Again.") == "so be it"


def test_a_model_that_never_stops_calling_is_stopped(tmp_path: Path) -> None:
    with closing(
        Talked(
            tmp_path,
            lambda *_: call("add", a=1),
            environment={"max_turns": 3},
        )
    ) as talked:
        assert "environment.max_turns: 3 responses" in talked.chat.answer(HELLO)
        assert len(talked.policy.asked) == 3
        assert "environment.max_turns: 3 responses" in talked.chat.answer("Go on.")
    assert talked.last().count("<|im_start|>tool\n2<|im_end|>") == 5


def test_a_context_that_is_full_begins_another_conversation(tmp_path: Path) -> None:
    small = {"max_context_tokens": 60, "max_response_tokens": 8}
    with closing(Talked(tmp_path, lambda *_: "41", rollout=small)) as talked:
        assert [talked.chat.answer("Hm?") for _ in range(3)] == ["41", "41", "41"]
        with pytest.raises(ChatError, match=r"rollout\.max_context_tokens: 60 "):
            talked.chat.answer("Hm?")
        assert talked.chat.answer("Well?") == "41"
        assert "Hm?" not in talked.last()
    short = {"max_response_tokens": 4}
    with closing(Talked(tmp_path, lambda *_: "41 and so on", rollout=short)) as talked:
        assert talked.chat.answer("Hm?").startswith("41 a\n[cut")


def test_what_reset_reads_is_given_and_what_it_raises_is_said(tmp_path: Path) -> None:
    with (
        closing(Talked(tmp_path, adds, {"how": "reset raises"})) as talked,
        pytest.raises(ChatError, match=r"environment\.name: no such task"),
    ):
        talked.chat.answer(HELLO)
    with closing(Talked(tmp_path, adds, {"prompt": "12 and 30?"})) as talked:
        talked.chat.answer("text")
    assert "<|im_start|>user\n12 and 30?<|im_end|>" in talked.last()


def test_what_cannot_be_a_chat_is_known_before_an_engine_starts(tmp_path: Path) -> None:
    stored = StoredModel(tmp_path, tmp_path, "model")
    notes = logged()

    def opened(name: str) -> Any:
        config = from_mapping({"environment": {"name": name, "tool_parser": "hermes"}})
        return refusal(begun(config, stored, {}).__enter__)

    said = opened(f"{HERE}:Nothing")
    assert "cannot be imported" in said
    assert "environment.name=null" in said
    assert "no chat template" in opened(f"{HERE}:Guess")
    config = from_mapping({"environment": {"name": f"{HERE}:agent"}})
    with _environment(config, tmp_path) as pool:
        assert pool is None
    assert "agent" in notes[0]


def heed() -> None:
    """Restore Ctrl-C, which a shell's background processes ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SLOW = """
import time
from pathlib import Path
from megatron_rl.environments.environment import Environment
class Slow(Environment):
    def __init__(self):
        self.called, self.tools = 0, (self.calculate,)
    def calculate(self, expression: str) -> int:
        self.called += 1
        if self.called == 2:
            Path("hangs").touch()
            time.sleep(600)
        return eval(expression)
"""


def write_caller(folder: Path) -> None:
    """A model that calls the calculator for any prompt: each token alone determines the next."""
    write_tool_tokenizer(folder)
    about = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(about))
    said = FolderTokenizer(folder).encode(f"\n{CALL_START}3*4{CALL_END}{TURN_END}")
    weights = {
        name: (torch.ones if len(size) == 1 else torch.zeros)(
            size
        )  # norms are ones; layers add nothing
        for param in params(Model.of(about, Layout()).shape)
        for name, size in param.sizes.items()
    }
    weights["model.embed_tokens.weight"].fill_diagonal_(1)
    for before, after in pairwise(said):
        weights["lm_head.weight"][after, before] = 30
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.engine
def test_a_live_engines_call_reaches_the_tool_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    write_caller(tmp_path / "model")
    (tmp_path / "slow.py").write_text(SLOW)
    words = [
        "chat",
        "model",
        "environment.name=slow.py:Slow",
        "environment.tool_timeout_s=600",
        "-p",
        "3*4",
    ]
    command = [sys.executable, "-m", "megatron_rl.cli", *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, preexec_fn=heed, **pipes
    )
    wait_for(
        lambda: (tmp_path / "hangs").exists() or process.poll() is not None, "the second call", 300
    )
    below = psutil.Process(process.pid).children(recursive=True)
    assert any("megatron_rl.engine" in " ".join(one.cmdline()) for one in below)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.splitlines()) == (
        130,
        ['-> calculate {"expression": "3*4"}', "<- 12", '-> calculate {"expression": "3*4"}'],
    ), err
    assert "Traceback" not in err
    wait_for(
        lambda: not any(state_of(one.pid) not in ("", "Z") for one in below),
        "end of all",
        60,
    )
