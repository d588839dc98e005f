"""What a server's door lets through to vLLM, and in which form; and what it says of an engine that hangs or is busy."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from megatron_rl.engine.server_requests import BODIES, CheckRequests, Heartbeat, Limits, Refused, checked

from megatron_rl.engine import server_requests
from megatron_rl.processes.process import Work, state_of, work_below

GENERATE, RPC, STAMP = BODIES
LIMITS = Limits(vocabulary=101, tokens=48, sequences=16)
SAMPLING = {
    "n": 2, "seed": 7, "max_tokens": 4, "temperature": 0.0, "top_p": 0.5, "top_k": -1, "stop_token_ids": [3],
    "logprobs": 0, "flat_logprobs": True, "detokenize": False,
}  # fmt: skip
UPDATE = {"update_info": {"directory": "/sync", "policy_version": 3, "writers": 2, "background": True}}


def refusal(route, body) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refused) as refused:
        checked(route, content, LIMITS)
    assert refused.value.status == 400
    return str(refused.value)


def prompt(ids, **sampling) -> dict:
    return {"token_ids": ids, "sampling_params": {"max_tokens": 4, **sampling}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (GENERATE, {"token_ids": [0, 100], "sampling_params": SAMPLING}),
        (GENERATE, {"token_ids": [1] * 44, "sampling_params": {"max_tokens": 4}}),
        (RPC, {"method": "weight_sync_state"}),
        (RPC, {"method": "weight_update_building"}),
        (RPC, {"method": "guarded_call", "args": ["await_weight_update", {}]}),
        (RPC, {"method": "guarded_call", "args": ["abort_weight_update", {}]}),
        (RPC, {"method": "guarded_call", "args": ["init_weight_transfer_engine", {"init_info": {}}]}),
        (RPC, {"method": "guarded_call", "args": ["update_weights", UPDATE]}),
        (STAMP, {"new_version": "-1"}),
        (STAMP, {"new_version": "12"}),
    ],
)
def test_what_a_fleet_asks_passes(route, body):
    assert json.loads(checked(route, json.dumps(body).encode(), LIMITS)) == body


@pytest.mark.fault("token ids that the engine cannot look up", "400 at the door, which names them")
@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([101], "101 is beyond the vocabulary of 101"), ([1, 10**6, 2], "1000000 is beyond"), ([-1], "token_ids"),
        ([2**63], "token_ids"), ([10**400], "token_ids"), ([True], "bool"), ([1.0], "float"), ([1e3], "float"),
        ([[1]], "array"), (["1"], "str"), ([None], "null"), ([], "length >= 1"), (None, "null"), ("1", "str"),
        ({"0": 1}, "object"), ([1] * 45, "45 tokens and max_tokens=4 exceed 48"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_token_ids_are_checked(ids, why):
    assert why in refusal(GENERATE, prompt(ids))


@pytest.mark.fault("sampling parameters beyond reason", "400 at the door")
@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 48}, {"max_tokens": 0}, {"max_tokens": 2**63}, {"max_tokens": 1.5}, {"max_tokens": True},
        {"n": 17}, {"n": 0}, {"seed": -1}, {"seed": 2**64}, {"stop_token_ids": [101]}, {"stop_token_ids": [-1]},
        {"top_p": 0}, {"top_p": 2}, {"top_k": -2}, {"temperature": -1}, {"temperature": "1"}, {"logprobs": 10000},
        {"logit_bias": {"1000": 1}}, {"allowed_token_ids": [1000]}, {"extra_args": {}}, {"structured_outputs": {}},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_are_checked(sampling):
    refusal(GENERATE, prompt([1], **sampling))


@pytest.mark.fault("odd bodies: deep JSON, huge numbers, NaN, other types", "400 at the door")
@pytest.mark.parametrize("route", BODIES, ids=lambda route: route[1])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"x"', b"1", b"\xff\xfe\x00", b'{"a":', b"1" * 6000, b"[" * 100_000, b'{"a":' * 100_000,
        b'{"method":"guarded_call","args":' + b"[" * 100_000, b'{"token_ids":' + b"[" * 100_000,
        b'{"token_ids":[1],"sampling_params":{"temperature":NaN}}',
        b'{"token_ids":[1],"sampling_params":{"temperature":1e999}}',
        b'{"token_ids":[1],"sampling_params":{"max_tokens":4},"stream":true}',
        b'{"token_ids":[1],"sampling_params":{"max_tokens":4},"content_parts":[{"type":"image_url"}]}',
        b'{"new_version":"main"}', b'{"new_version":3}', b'{"new_version":"\xed\xa0\xbd"}',
    ],
    ids=lambda body: body[:24],
)  # fmt: skip
def test_odd_bodies_are_refused(route, body):
    refusal(route, body)


@pytest.mark.fault("a worker method that no fleet calls, or other arguments", "400; the engine never hears of it")
@pytest.mark.parametrize(
    "call",
    [
        {"method": "__class__"},
        {"method": "save_sharded_state", "args": ["/tmp/x"]},
        {"method": "getattr", "args": []},
        {"method": 5},
        {"method": "weight_sync_state", "args": [1]},
        {"method": "weight_sync_state", "timeout": 0.1},
        {"method": "guarded_call"},
        {"method": "guarded_call", "args": ["__class__", {}]},
        {"method": "guarded_call", "args": ["guarded_call", {}]},
        {"method": "guarded_call", "args": ["save_sharded_state", {"path": "/tmp/x"}]},
        {"method": "guarded_call", "args": ["start_weight_update", {"x": 1}]},
        {"method": "guarded_call", "args": ["start_weight_update", []]},
        *(
            {"method": "guarded_call", "args": ["update_weights", {"update_info": info}]}
            for info in ({}, UPDATE["update_info"] | {"writers": 0}, UPDATE["update_info"] | {"directory": 1})
        ),
        {"method": "guarded_call", "args": ["init_weight_transfer_engine", {"init_info": {"x": 1}}]},
    ],
    ids=str,
)
def test_worker_methods_are_those_of_a_list(call):
    refusal(RPC, call)


def test_a_name_given_twice_is_read_once():
    """What vLLM reads is what was checked, whichever of the two its own parser would take."""
    body = b'{"token_ids":[100000],"token_ids":[1],"sampling_params":{}}'
    assert json.loads(checked(GENERATE, body, LIMITS))["token_ids"] == [1]


def ask(method, path, query=b"", body=(b"",)) -> tuple[int, list[dict]]:
    sent: list[dict] = []
    reached: list[dict] = []
    parts = [{"type": "http.request", "body": part, "more_body": i + 1 < len(body)} for i, part in enumerate(body)]

    async def app(scope, receive, send):
        reached.append(scope)
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    async def receive():
        return parts.pop(0)

    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": []}
    asyncio.run(CheckRequests(app)(scope, receive, send))
    return sent[0]["status"], reached


@pytest.mark.fault("any other route, with the key", "404: a server answers what a fleet asks")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/is_paused"), ("POST", "/abort_requests"), ("POST", "/weight_checker"), ("POST", "/scale_elastic_ep"),
        ("POST", "/update_weights"), ("GET", "/collective_rpc"), ("POST", "/collective_rpc/"),
        ("POST", "/v1/completions"), ("OPTIONS", "/collective_rpc"), ("PUT", "/health"), ("POST", "//collective_rpc"),
        ("GET", "/docs"),
    ],
)  # fmt: skip
def test_other_routes_do_not_exist(method, path):
    assert ask(method, path) == (404, [])


QUERIES = {  # what may follow the ? of a route, and what may not
    "/sleep": ([b"level=2", b""], [b"level=9", b"level=1&mode=keep"]),
    "/wake_up": ([b"tags=weights&tags=kv_cache", b""], [b"tags=all"]),
    "/reset_prefix_cache": ([b"", b"reset_running_requests=true"], [b"reset_external=true"]),
    "/pause": ([f"mode={mode}&clear_cache=false".encode() for mode in ("keep", "wait")],
               [b"mode=abort&clear_cache=false", b"mode=keep", b""]),
    "/resume": ([b""], [b"x=1"]),
}  # fmt: skip


@pytest.mark.parametrize("path", QUERIES)
def test_queries_are_checked(path):
    for queries, status in zip(QUERIES[path], (200, 400), strict=True):
        assert {query: ask("POST", path, query)[0] for query in queries} == dict.fromkeys(queries, status)


@pytest.mark.fault("a body that does not end", "413 after 16 MiB")
def test_a_body_has_a_limit():
    part = bytes(1 << 20)
    assert ask("POST", RPC[1], body=[part] * 17)[0] == 413
    assert server_requests.LONGEST_BODY == 16 << 20


class Engine:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()

    async def collective_rpc(self, method: str):
        self.asked += 1
        return await self.answer


@contextmanager
def server(child: str) -> Iterator[int]:
    """A process with one child, which runs `child`, and has started."""
    inner = [sys.executable, "-c", f"import os, time; print(os.getpid(), flush=True)\n{child}"]
    outer = f"import subprocess; subprocess.call({inner!r})"
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True)
    try:
        pid = int(process.stdout.readline())
        while "sleep(100)" in child and state_of(pid) != "S":
            time.sleep(0.01)
        yield pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


@pytest.fixture(autouse=True)
def short_wait(monkeypatch) -> None:
    monkeypatch.setattr(server_requests, "WAIT_S", 0.6)


def look(child: str, during=lambda pid: None) -> tuple[int, dict]:
    async def main(pid: int):
        return await Heartbeat(Engine(), parent(pid)).look()

    with server(child) as pid:
        during(pid)
        return asyncio.run(main(pid))


@pytest.mark.fault("an engine neither answers nor works", "/health says so with 503")
def test_an_engine_that_only_waits_hangs():
    status, body = look("time.sleep(100)")
    assert status == 503
    assert "neither answers nor works" in body["error"]


@pytest.mark.fault("an engine's process is stopped", "/health names it with 503")
def test_a_stopped_process_is_named():
    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    status, body = look("while True: pass", stop)
    assert status == 503
    assert "is stopped" in body["error"]


@pytest.mark.fault("an engine is busy, or waits for a lock, and does not answer", "/health says busy, with 200")
@pytest.mark.parametrize("work", ["pass", "time.sleep(0.02)"])
def test_an_engine_that_works_is_busy(work, monkeypatch):
    monkeypatch.setattr(server_requests, "WAIT_S", 3.0)  # it has a core within that
    assert look(f"while True: {work}") == (200, {"engine": "busy"})


def test_there_is_one_question_at_a_time_and_its_answer_counts():
    async def main() -> None:
        engine = Engine()
        heart = Heartbeat(engine, os.getpid())
        await asyncio.gather(heart.look(), heart.look())
        assert engine.asked == 1
        engine.answer.set_result([False])
        assert await heart.look() == (200, {"engine": "answers"})
        engine.answer = asyncio.get_running_loop().create_future()
        engine.answer.set_exception(RuntimeError("the engine is dead"))
        status, body = await heart.look()
        assert (status, "the engine is dead" in body["error"]) == (503, True)
        assert engine.asked == 2

    asyncio.run(main())


def test_work_below_counts_children():
    with server("while True: pass") as pid:
        deadline = time.monotonic() + 60
        while work_below(parent(pid)).cpu_s < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert work_below(pid) == Work(0, 0, ())
