"""The gateway for agents: OpenAI's own client against it, its key, its limits, its refusals."""

import json
import logging
import socket
import struct
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from environments.chats import ROW, TOOLS
from environments.scripted_policy import HERE, Played, call
from helpers import half_open, wait_for
from openai import OpenAI

from megatron_rl.config.schema import Credit
from megatron_rl.environments import agent
from megatron_rl.environments.session import PolicyClient
from megatron_rl.processes import unauthenticated
from megatron_rl.processes.threads import in_thread
from megatron_rl.sampler.client.interface import SamplerError


def counting(text: str, seed: int) -> str:
    return str(41 + text.count("Again."))


def test_an_agent_with_openais_client_is_a_session(tmp_path: Path) -> None:
    with Played(
        tmp_path, counting, f"{HERE}:agent", session_timeout_s=60.0, credit=Credit.turns
    ) as played:
        groups = played.play({}, {"answer": "43"}, samples=2)
    for group, reward in zip(groups, (1.0, 0.0), strict=True):
        for rollout in group:
            session = rollout.session
            assert (session.error, session.reward, session.rows) == (None, reward, 1)
            assert session.numbers == {"answers": 2.0}
            assert set(rollout.credit) == {0.0}, "no turn is worth another return than the session"
            assert played.sampled(rollout) == "41<|im_end|>42<|im_end|>"


def test_what_the_engines_fail_with_is_no_failure_of_the_agent(tmp_path: Path) -> None:
    def gone(text: str, seed: int) -> str:
        raise SamplerError("no engine is left")

    with (
        Played(tmp_path, gone, f"{HERE}:agent") as played,
        pytest.raises(SamplerError, match="no engine is left"),
    ):
        played.play()


class Asked:
    """A session that is open at a gateway, and requests of it."""

    def __init__(self, played: Played) -> None:
        self.played = played
        sessions = played.sessions
        rules = sessions.rules(played.params.max_tokens)
        assert sessions._gateway is not None
        self.gateway = sessions._gateway
        self.policy = PolicyClient(played.policy, played.tokenizer, rules, lambda turn: turn, "0")  # type: ignore[arg-type]
        self.name, self.url, self.key = self.gateway.begin(self.policy)

    def __call__(
        self, body: Any, key: str | None = None, path: str = "chat/completions", url: str = ""
    ) -> Any:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {self.key if key is None else key}",
            "Content-Type": "application/json",
        }
        request = urllib.request.Request(f"{url or self.url}/{path}", content, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


HELLO = {"model": "policy", "messages": [{"role": "user", "content": "Hm?"}]}


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    def says(text: str, seed: int) -> str:
        time.sleep("Slowly" in text)
        return call("add", a=12, b=30) if "Add" in text else "41"

    with Played(tmp_path, says, f"{HERE}:agent", context=200, response=64) as played:
        yield Asked(played)


def test_the_gateway_is_closed_to_strangers_and_to_other_sessions(asked: Asked) -> None:
    other = Asked(asked.played)
    assert asked(HELLO)[0] == 200
    for key, url in (
        ("", ""),
        ("wrong", ""),
        (other.key, ""),
        (asked.key, other.url),
        (asked.key, other.url + "x"),
    ):
        status, said = asked(HELLO, key=key, url=url)
        assert (status, "key of its session" in said["error"]["message"]) == (401, True)
    assert len(asked.policy.transcript.turns) == 1
    assert not other.policy.transcript.turns
    asked.gateway.end(asked.name)
    assert asked(HELLO)[0] == 401


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


REFUSED = {
    "not JSON": (b"{", "the request is not JSON"),
    "half a pair": (said("\ud800"), "surrogates not allowed"),
    "deep": (b"[" * 10_000, "is not JSON"),
    "no role": (
        {"messages": [{"content": "x"}]},
        "messages[0]: Object missing required field `role`",
    ),
    "an image": (said([{"type": "image_url"}]), "messages[0].content[0].type: "),
    "none": ({**HELLO, "max_tokens": -1}, "max_tokens: "),
    "too long": (said("x " * 400), "rollout.max_context_tokens"),
    "a long role": (
        {"messages": [{"role": "x" * 100_000, "content": ""}]},
        "rollout.max_context_tokens",
    ),
    "no stop": ({**HELLO, "stop": ""}, "stop: "),
}
CANNOT = [
    ("stream", 1),
    ("n", 2),
    ("n", 1.0),
    ("logprobs", True),
    ("logit_bias", {"5": 1}),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("model", "gpt-5"),
    ("echo", True),
]
IGNORED = {
    "temperature": 0.5,
    "seed": 1,
    "user": "x",
    "metadata": {},
    "n": 1,
    "stream": False,
    "logprobs": None,
}


@pytest.mark.parametrize("case", [*REFUSED, *CANNOT], ids=str)
def test_what_cannot_be_asked_is_refused_by_its_field(asked: Asked, case: Any) -> None:
    if isinstance(case, str):
        body, why = REFUSED[case]
    else:
        body, why = {**HELLO, case[0]: case[1]}, f"{case[0]}: "
    status, reply = asked(body)
    assert (status, why in reply["error"]["message"]) == (400, True), reply
    full = reply["error"]["code"] == "context_length_exceeded"
    assert full == ("rollout.max_context_tokens" in why)
    assert asked({**HELLO, **IGNORED})[0] == 200
    assert asked.policy.transcript.end == "done", "what was too long before has not ended it"
    assert len(asked.policy.transcript.conversation.rows(ROW)) == 1


def left(asked: Asked, how: str, body: Any) -> None:
    """A client that sends a request and does not read the answer."""
    content = json.dumps(body).encode()
    head = f"POST /{asked.name}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {asked.key}\r\n"
    policy, counts = asked.played.policy, asked.policy.transcript.counts
    before = len(policy.asked)
    unread = counts["answers_unread"]
    with socket.create_connection(("127.0.0.1", asked.gateway._port)) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_for(lambda: len(policy.asked) > before)
        if how == "the answer is there":
            client.recv(1, socket.MSG_PEEK)
        if how == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: counts["answers_unread"] > unread)


@pytest.mark.fault(
    "an agent's client times out and asks again", "one row: the answer that it has read"
)
def test_an_answer_that_is_given_up_is_in_no_row(tmp_path: Path) -> None:
    with Played(tmp_path, counting, f"{HERE}:agent", session_timeout_s=60.0, max_turns=2) as played:
        played.policy.pauses = [600.0, 0.0, 600.0]
        ((rollout,),) = played.play({"timeout": 5.0, "retries": 2})
        session = rollout.session
        assert (session.error, session.reward, len(session.turns)) == (None, 1.0, 2)
        assert (session.rows, session.counts["answers_unread"]) == (1, 2)
        assert sorted(set(rollout.turns or ())) == [-1, 0, 1]
        assert played.sampled(rollout) == "41<|im_end|>42<|im_end|>"
        assert len(played.policy.asked) == 4


@pytest.mark.parametrize("how", ["closes", "resets", "closes late", "the answer is there"])
def test_a_client_that_leaves_has_no_turn(asked: Asked, how: str) -> None:
    """Late: while the event loop makes the answer, and hears nothing."""
    words = "Slowly" if how == "closes late" else "Hm?"
    pause_s = 600.0 * (how in ("closes", "resets"))
    transcript = asked.policy.transcript
    asked.played.policy.pauses = [pause_s]
    left(asked, how, said(words))
    _, reply = asked(said(words))
    messages = [
        *said(words)["messages"],
        reply["choices"][0]["message"],
        {"role": "user", "content": words},
    ]
    asked.played.policy.pauses = [pause_s]
    left(asked, how, {"messages": messages})
    assert asked({"messages": messages})[0] == 200
    asked.policy.leave_unread()
    (row,) = transcript.conversation.rows(ROW)
    assert (sorted(set(row.turns)), len(transcript.turns)) == ([-1, 0, 1], 2)


def test_the_turns_of_an_agent_are_bounded(tmp_path: Path) -> None:
    with Played(tmp_path, counting, f"{HERE}:agent", max_turns=1) as played:
        asked = Asked(played)
        assert asked(HELLO)[0] == 200
        status, said = asked(HELLO)
        assert (status, said["error"]["code"]) == (400, "turns_exceeded")
        assert "environment.max_turns=1" in said["error"]["message"]
        assert (asked.policy.transcript.end, len(asked.policy.transcript.turns)) == ("turns", 1)


@pytest.mark.fault(
    "an agent sends a conversation of megabytes", "other sessions are answered meanwhile"
)
def test_a_long_request_holds_no_other_session_up(tmp_path: Path) -> None:
    with Played(tmp_path, counting, f"{HERE}:agent", context=100_000) as played:
        one = Asked(played)
        other = Asked(played)
        other(HELLO)
        long = in_thread("long", lambda: one(said("a " * 1_000_000)))
        time.sleep(0.2)
        for _ in range(3):
            assert other(HELLO)[0] == 200
        assert not long.done()
        assert long.result(300)[1]["error"]["code"] == "context_length_exceeded"


@pytest.mark.fault(
    "hundreds of connections without a key", "few stay, for seconds; sessions are answered"
)
@pytest.mark.parametrize(("files", "most"), [(1 << 20, 128), (80, 10)])
def test_strangers_are_few(
    asked: Asked, files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "descriptors", lambda: files)
    opened = half_open(asked.gateway._port, 300)
    wait_for(lambda: len(asked.gateway._server.connections) <= most)
    assert asked(HELLO)[0] == 200
    monkeypatch.setattr(agent, "UNAUTHENTICATED_S", 0.2)
    opened += half_open(asked.gateway._port, most)
    wait_for(lambda: not asked.gateway._server.connections)
    monkeypatch.setattr(agent, "descriptors", lambda: 0)
    assert asked(HELLO)[0] == 429
    for one in opened:
        one.close()


def test_the_key_comes_before_the_body_and_oddities_leave_no_traceback(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n"
    with caplog.at_level(logging.WARNING):
        for sent, status in (
            (head, b"401"),
            (head.replace(b"9", b"-9"), b"400"),
            (head + head, b"401"),
        ):
            with socket.create_connection(("127.0.0.1", asked.gateway._port), 60) as client:
                client.sendall(sent)
                assert status in client.recv(100)
    assert not caplog.records


STOPS = {  # what is sampled, the stops, what the agent gets, and what is sampled of it in the row
    "a ReAct agent's": (
        "Act: add\nObservation: 42",
        ["\nObservation:"],
        "Act: add",
        "Act: add\nObservation:",
    ),
    "the first of two": ("a b c", ["c", "b"], "a ", "a b"),
    "the shorter of two": ("a bc", ["bc", "b"], "a ", "a b"),
    "at once": ("41", "4", "", "4"),
}


@pytest.mark.parametrize("case", STOPS)
def test_an_answer_ends_at_a_stop_and_goes_on_behind_its_exact_tokens(
    tmp_path: Path, case: str
) -> None:
    written, stop, content, kept = STOPS[case]
    with Played(tmp_path, lambda *_: written, f"{HERE}:agent") as played:
        asked = Asked(played)
        client = OpenAI(base_url=asked.url, api_key=asked.key)
        made = client.chat.completions.create(
            model="policy",
            stop=stop,
            messages=HELLO["messages"],
        )
        choice = made.choices[0]
        assert (choice.message.content, choice.finish_reason) == (content, "stop")
        messages = [
            *HELLO["messages"],
            choice.message.model_dump(exclude_none=True),
            {"role": "user", "content": "?"},
        ]
        client.chat.completions.create(model="policy", messages=messages)
        (row,) = asked.policy.transcript.conversation.rows(ROW)
        ids = [one for one, turn in zip(row.token_ids, row.turns, strict=True) if turn == 0]
        assert played.tokenizer.decode_all(ids) == kept
        assert made.usage is not None and made.usage.completion_tokens == len(ids)
        assert (
            ids == [*played.tokenizer.encode(written), *played.tokenizer.stop_token_ids][: len(ids)]
        )
        tokens, _, _ = played.policy.asked[1]
        assert tokens == [*row.prompt.token_ids, *row.token_ids][: len(tokens)]


CALLED = call("add", a=1)


@pytest.mark.parametrize(
    ("written", "more", "calls", "content"),
    [
        (f"x {CALLED} stop", {"stop": "stop"}, 1, "x "),
        (f"x stop {CALLED}", {"stop": "stop"}, 0, "x "),
        (CALLED + CALLED, {"parallel_tool_calls": False}, 1, ""),
        (CALLED, {"tool_choice": "none"}, 0, CALLED),
    ],
)
def test_calls_that_are_cut_are_none(
    tmp_path: Path, written: str, more: dict[str, Any], calls: int, content: str
) -> None:
    with Played(tmp_path, lambda *_: written, f"{HERE}:agent") as played:
        _, reply = Asked(played)({**HELLO, "tools": TOOLS, **more})
        message = reply["choices"][0]["message"]
        assert (len(message.get("tool_calls", [])), message["content"]) == (calls, content)


def test_tool_calls_go_out_and_come_back(asked: Asked) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Add 12 and 30."}]}
    ]
    _, reply = asked({"messages": messages, "tools": TOOLS})
    choice = reply["choices"][0]
    (made,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == (
        "add",
        {"a": 12, "b": 30},
    )
    messages += [
        choice["message"],
        {
            "role": "tool",
            "tool_call_id": made["id"],
            "content": "42",
        },
    ]
    assert asked({"messages": messages, "tools": TOOLS, "max_tokens": 8})[0] == 200
    (row,) = asked.policy.transcript.conversation.rows(ROW)  # it goes on behind the exact tokens
    assert sorted(set(row.turns)) == [-1, 0, 1]
    assert asked(None, path="models")[0] == 200
    assert asked(HELLO, path="embeddings")[0] == 404


def test_requests_beside_each_other_have_usages_and_turns_of_their_own(asked: Asked) -> None:
    asked.played.policy.backwards = 2
    longer = {"messages": [{"role": "user", "content": "Hm? " * 9}], "max_tokens": 1}
    first = in_thread("first", lambda: asked(longer))
    wait_for(lambda: asked.played.policy.asked)
    _, second = asked(HELLO)
    tokens = [len(ids) for ids, _, _ in asked.played.policy.asked]
    for (_, reply), length, answer in (
        (first.result(60), tokens[0], 1),
        ((200, second), tokens[1], 3),
    ):
        usage = {
            "prompt_tokens": length,
            "completion_tokens": answer,
            "total_tokens": length + answer,
        }
        assert reply["usage"] == usage
    assert tokens[0] > tokens[1]
    written = asked.policy.transcript.turns
    assert [(one.tokens, one.finish_reason) for one in written] == [(1, "length"), (3, "stop")], (
        "as they were asked"
    )
