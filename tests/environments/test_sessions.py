"""Sessions of environments and tools: rows, rewards, limits, and failures of environments."""

import asyncio
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from environments.chats import APPENDS
from environments.scripted_policy import HERE, Played, call
from helpers import refusal, wait_for

from megatron_rl.config.schema import Credit, EnvironmentSection
from megatron_rl.environments import pool
from megatron_rl.environments.environment import Answer, Environment, Step, as_messages, as_step
from megatron_rl.environments.pool import check_importable
from megatron_rl.environments.sessions import SessionsEnded
from megatron_rl.environments.tools import ToolBox
from megatron_rl.processes.process import state_of
from megatron_rl.processes.threads import in_thread
from megatron_rl.types import Prompt


def counting(text: str, seed: int) -> str:
    """41, 42 after one refusal."""
    return str(41 + text.count("Not yet"))


def test_a_session_is_a_row_with_the_environments_reward(tmp_path: Path) -> None:
    with Played(tmp_path, counting) as played:
        ((rollout,),) = played.play()
    session = rollout.session
    assert (
        session.reward,
        session.end,
        len(session.turns),
        session.rows,
    ) == (1.0, "done", 2, 1)
    assert rollout.format == "int8"  # of the engine
    assert session.numbers == {"tries": 2.0}
    assert played.sampled(rollout) == "41<|im_end|>42<|im_end|>"
    assert "Not yet. Again.<|im_end|>\n<|im_start|>assistant\n42" in played.text(rollout)
    assert {played.policy.asked[turn][2] for turn in range(2)} == {"0"}  # one engine
    assert [turn >= 0 for turn in rollout.turns or ()] == list(map(bool, rollout.loss_mask))
    assert sorted(set(rollout.turns or ())) == [-1, 0, 1]


def test_what_the_row_and_the_recipe_say_comes_first(tmp_path: Path) -> None:
    with Played(tmp_path, counting, system="Be brief.") as played:
        played.policy.policy_version = 7
        ((rollout,), (failed,)) = played.play({}, {"how": "reset raises"})
    assert played.text(rollout).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is"
    )
    assert (len(failed.token_ids), failed.policy_version) == (0, 7)  # it makes no batch look old


def test_tools_are_called_and_answered(tmp_path: Path) -> None:
    def says(text: str, seed: int) -> str:
        return "42" if "42<|im_end|>" in text else call("add", a=12, b=30)

    with Played(tmp_path, says) as played:
        ((rollout,),) = played.play()
    counts = rollout.session.counts
    assert (
        rollout.session.reward,
        counts["calls"],
        counts["calls_failed"],
    ) == (1, 1, 0)
    assert "<|im_start|>tool\n42<|im_end|>" in played.text(rollout)


MISTAKES = {
    "an unknown tool": (call("divide", a=1), "there is no tool 'divide'"),
    "too much": (call("add", a=1, c=2), "c: Extra inputs are not permitted"),
    "it raises": (call("raises"), "nothing there"),
    "half a pair": (call("add", a="\ud800"), "not a JSON object"),
    "it hangs": (call("wait", seconds=600), "wait was stopped: it took too long"),
    "it floods": (call("flood"), "[cut: the first 512 tokens]"),
    "it returns what is no JSON": (call("odd"), "keys must be str"),
    "it interrupts": (call("interrupts"), "error: KeyboardInterrupt"),
    "no mapping": ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object"),
    "no call": ("<tool_call>{add 1", "the tool call could not be read"),
    "seventeen": (call("add", a=1) * 17, "more than 16 calls"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_a_tool_is_something_to_answer(tmp_path: Path, mistake: str) -> None:
    said, reply = MISTAKES[mistake]

    def says(text: str, seed: int) -> str:
        return "42" if "<|im_start|>tool" in text else said

    limit_s = 2.0 if mistake == "it hangs" else 60.0
    with Played(tmp_path, says, response=2048, context=16384, tool_timeout_s=limit_s) as played:
        ((rollout,),) = played.play()
        assert reply in played.text(rollout)
        assert (rollout.session.reward, rollout.session.error) == (1.0, None)
        counts = rollout.session.counts
        assert counts.get("observations_cut", 0) == (mistake == "it floods")
        assert counts.get("calls_late", 0) == (mistake == "it hangs")


FAULTS = {
    "reset raises": "no such task",
    "reset hangs": "not done within 3 s",
    "hangs on": "no reply within 3 s: its process was killed",
    "swallows": "not done within 3 s",
    "dies": "died",
    "raises": "RuntimeError: half a pair ?",
    "nothing": "step returned NoneType",
    "no message": "no message to respond to",
    "memory": "MemoryError",
    "nan": "nan is not a finite number",
    "patches": "sent a malformed reply",
    "long calls": "environment.max_observation_tokens=512 takes",
}


def test_what_the_chat_template_does_not_take_ends_that_session_alone(tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 or m.content == 'odd' %}"
    template = refuses + "{{ raise_exception('not this') }}{% endif %}{% endfor %}" + APPENDS
    twice = call("add", a=1) + call("add", a=2)
    with Played(
        tmp_path, lambda text, seed: twice if "twice" in text else "42", template=template
    ) as played:
        (two,), (odd,), (well,) = played.play(
            {"prompt": "twice"},
            {"prompt": "odd"},
            {},
        )
    assert (
        two.session.end,
        two.session.error,
        len(two.session.turns),
    ) == ("refused", None, 1)
    assert sum(two.loss_mask) == len(two.token_ids) > 0
    assert odd.session.error is not None and ": not this" in odd.session.error
    assert (well.session.end, well.session.reward) == ("done", 1.0)


@pytest.mark.parametrize("limit_s", [3.0, 60.0])
def test_an_environment_that_fails_is_begun_again_once_and_hurts_no_other(
    tmp_path: Path, limit_s: float
) -> None:
    hows = [how for how, said in FAULTS.items() if ("within 3 s" in said) == (limit_s == 3.0)]
    with Played(tmp_path, counting, tool_timeout_s=limit_s) as played:
        rows: list[dict[str, Any]] = [{"how": how} for how in hows]
        groups = played.play(
            *rows,
            {},
            {"how": "dies once", "mark": str(tmp_path / "mark")},
        )
        for how, (rollout,) in zip(hows, groups, strict=False):
            assert FAULTS[how] in (rollout.session.error or ""), how
            assert rollout.session.counts["restarts"] == 1
            assert not any(rollout.loss_mask)
        for (rollout,), restarts in zip(groups[-2:], (0, 1), strict=True):
            assert (rollout.session.error, rollout.session.reward) == (None, 1.0)
            assert rollout.session.counts["restarts"] == restarts


def test_all_environments_may_die_at_once(tmp_path: Path) -> None:
    """Those at work, and those that wait for a conversation: each session is begun again once, and
    none is lost.
    """
    asked = 0

    def says(text: str, seed: int) -> str:
        nonlocal asked
        asked += 1
        fork_server = played.sessions.pool._fork_server
        # all sessions are in their second turn or before it
        if asked == 30 and fork_server is not None:
            fork_server.kill()
            fork_server.wait()
        return counting(text, seed)

    with Played(tmp_path, says) as played:
        played.policy.pause_s = 0.01
        played.play()
        groups = played.play(*[{}] * 24)
        for (rollout,) in groups:
            assert (rollout.session.error, rollout.session.reward) == (None, 1.0)
        again = [rollout.session.counts["restarts"] for (rollout,) in groups if rollout.session]
        assert 0 < sum(again) <= 24
        fork_server = played.sessions.pool._fork_server
        fork_server.kill()
        fork_server.wait()
        for (rollout,) in played.play(*[{}] * 4):
            assert (rollout.session.error, rollout.session.counts["restarts"]) == (None, 0), (
                "nothing was open"
            )


def test_a_fork_server_that_is_gone_costs_no_session_a_try(tmp_path: Path) -> None:
    with Played(tmp_path, counting) as played:
        control = played.sessions.pool._control
        control.close()
        for (rollout,) in played.play(*[{}] * 8):
            assert (rollout.session.error, rollout.session.counts["restarts"]) == (None, 0)


@pytest.mark.fault("the environments' parent is stopped (SIGSTOP)", "no session is lost")
def test_a_fork_server_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FORK_TIMEOUT_S", 1.0)
    with Played(tmp_path, counting) as played:
        played.play()
        played.sessions.pool._fork_server.send_signal(signal.SIGSTOP)
        for (rollout,) in played.play(*[{}] * 8):
            assert rollout.session.error is None


def test_no_connection_stays_open_after_a_cancelled_start_or_the_pools_end() -> None:
    async def leaks() -> None:
        held = await processes.take()
        fork_server, _ = processes.start()
        fork_server.send_signal(signal.SIGSTOP)
        taken = asyncio.create_task(processes.take())
        await asyncio.sleep(0.5)  # it waits for the stopped process
        open_then = len(this.net_connections("unix"))
        taken.cancel()
        await asyncio.wait([taken])
        await asyncio.sleep(0)
        assert len(this.net_connections("unix")) == open_then - 1
        processes.close()
        await asyncio.sleep(0.1)
        assert len(this.net_connections("unix")) == before
        assert not held.alive

    this = psutil.Process()
    processes = pool.EnvironmentPool(EnvironmentSection(name=f"{HERE}:Guess"))
    with closing(processes), asyncio.Runner() as runner:
        runner.get_loop()
        before = len(this.net_connections("unix"))
        runner.run(leaks())


def test_a_session_whose_process_dies_before_all_do_is_not_lost(tmp_path: Path) -> None:
    def says(text: str, seed: int) -> str:
        fork_server = played.sessions.pool._fork_server
        if (tmp_path / "mark").exists() and fork_server is not None and not ended:
            ended.append(fork_server)
            fork_server.kill()
            fork_server.wait()
        return counting(text, seed)

    ended: list[Any] = []
    with Played(tmp_path, says) as played:
        ((rollout,),) = played.play({"how": "dies once", "mark": str(tmp_path / "mark")})
    assert rollout.session is not None and len(ended) == 1
    assert (rollout.session.error, rollout.session.counts["restarts"]) == (None, 2)


def test_what_floods_forks_or_prints_harms_nothing(tmp_path: Path) -> None:
    others = set(psutil.Process().children(recursive=True))
    with Played(tmp_path, counting) as played:
        groups = played.play(
            *({"how": how} for how in ("floods", "forks", "leaves a child", "prints"))
        )
        sessions = [rollout.session for (rollout,) in groups]
        assert [one.error for one in sessions] == [None] * 4
        assert [one.reward for one in sessions] == [0.0, 1.0, 1.0, 1.0]
        assert sessions[0].counts["observations_cut"] == 2
        pids = [one.pid for one in psutil.Process().children(recursive=True) if one not in others]
    assert len(pids) > 4
    wait_for(
        lambda: not any(state_of(pid) not in ("", "Z") for pid in pids), "end of all processes"
    )


def test_long_roles_and_first_messages_are_not_rendered(tmp_path: Path) -> None:
    with Played(tmp_path, counting) as played:
        groups = played.play({"how": "long fields"}, {"how": "a long start"})
    cut, refused = (rollout.session for (rollout,) in groups)
    assert cut and refused
    assert (cut.error, cut.counts["observations_cut"]) == (None, 8)
    assert f"<|im_start|>{'x' * 512}\nNot yet." in played.text(groups[0][0])
    assert (refused.end, refused.turns) == ("length", ())


def test_the_context_ends_a_session_as_too_long(tmp_path: Path) -> None:
    with Played(
        tmp_path,
        lambda *_: "41",
        context=90,
        settings={"tries": 50},
        max_turns=50,
    ) as played:
        ((rollout,),) = played.play()
    assert (rollout.session.end, rollout.finish_reason) == ("length", "length")
    assert len(rollout.prompt.token_ids) + len(rollout.token_ids) <= 90
    with Played(tmp_path, lambda *_: "41 " * 300, response=64) as played:
        ((rollout,),) = played.play()
    assert (rollout.session.end, len(rollout.session.turns)) == ("length", 1)


def test_closing_ends_calls_that_wait_for_sessions(tmp_path: Path) -> None:
    with Played(tmp_path, counting, tool_timeout_s=600.0) as played:
        stream = played.sessions.stream(played.params, seed=1)
        row = {"prompt": "Hm?", "answer": "42", "how": "hangs"}
        stream.add([Prompt(0, (1,), "", row)], 0)
        wait_for(lambda: played.policy.asked)
        waiting = in_thread("waiting", stream.finished)
        played.sessions.close()
        with pytest.raises(SessionsEnded):
            waiting.result(60)
        stream.close()


def test_the_number_of_turns_is_bounded(tmp_path: Path) -> None:
    with Played(
        tmp_path,
        lambda *_: call("add", a=1),
        max_turns=3,
    ) as played:
        ((rollout,),) = played.play()
    assert (
        rollout.session.end,
        len(rollout.session.turns),
        rollout.session.reward,
    ) == (
        "turns",
        3,
        None,
    )


def test_sessions_run_side_by_side_and_a_group_is_whole(tmp_path: Path) -> None:
    with Played(tmp_path, counting, max_concurrent=6) as played:
        played.policy.together = 6
        played.policy.pause_s = 0.05
        groups = played.play({}, {}, {}, samples=4)
        assert [[one.sample for one in group] for group in groups] == [[0, 1, 2, 3]] * 3
        assert played.policy.most == 6
        first = {seed for tokens, _, seed in played.policy.asked}
        assert first == {"0", "1", "2"}
        pids = {one.pid for one in psutil.Process().children(recursive=True)}
        played.play({}, {}, {}, samples=4)
        # processes are used again
        assert {one.pid for one in psutil.Process().children(recursive=True)} == pids


@pytest.mark.parametrize("credit", ["turns", "environment"])
def test_turns_have_their_own_credit(tmp_path: Path, credit: str) -> None:
    with Played(tmp_path, counting, credit=Credit(credit)) as played:
        ((rollout,),) = played.play()
    by_turn = {
        turn: value for turn, value in zip(rollout.turns, rollout.credit, strict=True) if turn >= 0
    }
    # rewards 0 and 1: returns 1 and 1, of a session that is worth 1
    assert by_turn == ({0: 0.0, 1: 0.0} if credit == "turns" else {0: -1.0, 1: 2.0})


def test_an_environment_that_cannot_be_is_refused_by_name() -> None:
    for name, why in {
        f"{HERE}:Nothing": "cannot be imported",
        f"{HERE}:WithoutStep": "has no methods reset and step",
        f"{HERE}:os": "neither a class nor",
        f"{HERE}:Guess": "unexpected keyword argument 'odd'",
    }.items():
        said = refusal(check_importable, EnvironmentSection(name=name, settings={"odd": 1}), ())
        assert said.startswith("environment.name: ")
        assert why in said


def test_tools_have_schemas_of_their_signatures() -> None:
    def find(query: str, limit: int = 3, tags: list[str] | None = None) -> list[str]:
        """Find documents."""
        return [query] * limit

    (schema,) = ToolBox([find]).schemas
    function = schema["function"]
    assert (function["name"], function["description"]) == ("find", "Find documents.")
    assert function["parameters"]["required"] == ["query"]
    assert function["parameters"]["properties"]["limit"] == {"default": 3, "type": "integer"}
    assert ToolBox([find]).bound("find", {"query": "x", "limit": "2"})() == ["x", "x"]
    with pytest.raises(TypeError, match="by name"):
        ToolBox([lambda *words: words])


def test_a_step_may_be_a_tuple() -> None:
    assert (
        as_step(("Again.", 1, False))
        == as_step(("Again.", 1, False, None))
        == Step("Again.", 1.0, False)
    )
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert as_messages(parts) == [{"role": "user", "content": "ab"}]
    assert as_step(Environment().step(Answer("42", "42"))).done
