"""The gateway for agents: OpenAI's own client against it, its key, and what it refuses."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from environments.chats import TOOLS
from environments.scripted_policy import HERE, Played, call
from helpers import wait_for

from megatron_rl.config.schema import Credit
from megatron_rl.environments.session import Policy
from megatron_rl.processes.threads import in_thread
from megatron_rl.sampler.client.interface import SamplerError


def counting(text: str, seed: int) -> str:
    return str(41 + text.count("Again."))


def test_an_agent_with_openais_client_is_a_session(tmp_path: Path) -> None:
    with Played(tmp_path, counting, f"{HERE}:agent", session_timeout_s=60.0, credit=Credit.turns) as played:
        groups = played.play({}, {"answer": "43"}, samples=2)
    for group, reward in zip(groups, (1.0, 0.0), strict=True):
        for rollout in group:
            assert rollout.session is not None
            assert (rollout.session.error, rollout.session.reward, rollout.session.rows) == (None, reward, 1)
            assert rollout.session.numbers == {"answers": 2.0}
            assert set(rollout.credit) == {0.0}, "no turn is worth another return than the session"
            written = [one for one, kept in zip(rollout.token_ids, rollout.loss_mask, strict=True) if kept]
            assert played.tokenizer.decode_all(written) == "41<|im_end|>42<|im_end|>"


def test_what_the_engines_fail_with_is_no_failure_of_the_agent(tmp_path: Path) -> None:
    def gone(text: str, seed: int) -> str:
        raise SamplerError("no engine is left")

    with Played(tmp_path, gone, f"{HERE}:agent") as played, pytest.raises(SamplerError, match="no engine is left"):
        played.play()


class Asked:
    """A session that is open at a gateway, and requests of it."""

    def __init__(self, played: Played) -> None:
        self.played, sessions = played, played.sessions
        rules = sessions.answering(played.params, seed=1)._player.rules
        assert sessions._gateway is not None
        self.gateway = sessions._gateway
        self.policy = Policy(played.policy, played.tokenizer, rules, lambda turn: turn, "0")  # type: ignore[arg-type]
        self.name, self.url, self.key = self.gateway.begin(self.policy)

    def __call__(self, body: Any, key: str | None = None, path: str = "chat/completions", url: str = "") -> Any:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key if key is None else key}", "Content-Type": "application/json"}
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
        return call("add", a=12, b=30) if "Add" in text else "41"

    with Played(tmp_path, says, f"{HERE}:agent", context=200, response=64) as played:
        yield Asked(played)


def test_the_gateway_is_closed_to_strangers_and_to_other_sessions(asked: Asked) -> None:
    other = Asked(asked.played)
    assert asked(HELLO)[0] == 200
    for key, url in (("", ""), ("wrong", ""), (other.key, ""), (asked.key, other.url), (asked.key, other.url + "x")):
        status, said = asked(HELLO, key=key, url=url)
        assert (status, "wants the key of its session" in said["error"]["message"]) == (401, True)
    assert len(asked.policy.transcript.turns) == 1
    assert not other.policy.transcript.turns
    asked.gateway.end(asked.name)
    assert asked(HELLO)[0] == 401


REFUSED = {
    "tools of others": ({**HELLO, "tools": [{"name": "add", "input_schema": {}}]}, "function"),
    "not JSON": (b"{", "is not JSON"), "a list": ([], "no JSON object"), "no messages": ({}, "at least one message"),
    "no role": ({"messages": [{"content": "x"}]}, "no role"), "stream": ({**HELLO, "stream": True}, "leave it out"),
    "two": ({**HELLO, "n": 2}, "one answer"), "odd": ({"messages": [{"role": "user", "content": 7}]}, "not text"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text alone"),
    "none": ({**HELLO, "max_tokens": -1}, "above 0"), "deep": (b"[" * 100_000, "is not JSON"),
    "too long": ({"messages": [{"role": "user", "content": "x " * 400}]}, "rollout.max_context_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_asked_is_refused_with_a_sentence(asked: Asked, case: str) -> None:
    body, why = REFUSED[case]
    status, said = asked(body)
    assert (status, why in said["error"]["message"]) == (400, True), said
    assert asked(HELLO)[0] == 200
    assert asked.policy.transcript.end == "done", "what was too long before has not ended it"
    assert len(asked.policy.transcript.conversation.rows()) == 1


def test_tool_calls_go_out_and_come_back(asked: Asked) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Add 12 and 30."}]}]
    _, reply = asked({"messages": messages, "tools": TOOLS})
    choice = reply["choices"][0]
    (made,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 12, "b": 30})
    messages += [choice["message"], {"role": "tool", "tool_call_id": made["id"], "content": "42"}]
    assert asked({"messages": messages, "tools": TOOLS, "max_tokens": 8})[0] == 200
    (row,) = asked.policy.transcript.conversation.rows()  # it goes on behind the exact tokens
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
    for (_, reply), length, answer in ((first.result(60), tokens[0], 1), ((200, second), tokens[1], 3)):
        usage = {"prompt_tokens": length, "completion_tokens": answer, "total_tokens": length + answer}
        assert reply["usage"] == usage
    assert tokens[0] > tokens[1]
    written = asked.policy.transcript.turns
    assert [(one.tokens, one.finish_reason) for one in written] == [(1, "length"), (3, "stop")], "as they were asked"
