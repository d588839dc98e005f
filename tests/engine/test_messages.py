"""Requests that a server passes to its engine, and their forms."""

import msgspec
import pytest

from megatron_rl.engine import messages
from megatron_rl.engine.messages import REQUESTS, checked, transmissions
from megatron_rl.processes.channel import Refused

SAMPLING = {
    "seed": 7,
    "max_tokens": 4,
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": -1,
    "stop_token_ids": [3],
    "candidates": 16,
    "top_logprobs": 32,
    "top_mass": 0.999,
    "policy_version": 3,
    "patient": True,
}
UPDATE = {"directory": "/sync", "policy_version": 3, "writers": 2, "background": True}
encode = msgspec.msgpack.encode


def read(content: bytes, transport: str = "file"):
    return checked(content, 101, 48, transport)


def ask(method: str, arguments: object, transport: str = "file") -> tuple[list[dict], list[dict]]:
    return read(encode([{"id": 5, "method": method, "arguments": arguments}]), transport)


def refusal(method: str, arguments: object, transport: str = "file") -> str:
    requests, (refused,) = ask(method, arguments, transport)
    assert requests == []
    assert (refused["id"], refused["error"]["type"]) == (5, "Refused")
    return refused["error"]["message"]


def prompt(ids: object, **sampling: object) -> dict:
    return {"tokens": ids, "seed": 7, "max_tokens": 4, **sampling}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("generate", {"tokens": [0, 100], **SAMPLING}),
        ("generate", prompt([1] * 44)),
        ("cancel", {"requests": [1, 2]}),
        ("init_weight_transfer_engine", {"init_info": {}}),
        ("update_weights", {"update_info": UPDATE}),
        ("finish_weight_update", {"pause": True}),
        ("sleep", {"level": 2}),
        ("wake", {"tags": ["weights", "kv_cache"]}),
        ("wake", {"tags": None}),
        *((method, {}) for method, form in REQUESTS.items() if form.__struct_fields__ == ()),
    ],
)
def test_what_a_sampler_asks_passes(method, arguments):
    ((request,), refused) = ask(method, arguments)
    assert (request["id"], request["method"], refused) == (5, method, [])
    assert arguments.items() <= request["arguments"].items()


@pytest.mark.fault(
    "token ids that the engine cannot look up", "refused at the door, which names them"
)
@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([101], "101 is beyond"),
        ([-1], "tokens"),
        ([], "length >= 1"),
        ([1] * 45, "max_tokens=4 exceed 48"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_token_ids_are_checked(ids, why):
    assert why in refusal("generate", prompt(ids))


@pytest.mark.fault("sampling parameters beyond reason", "refused at the door")
@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"seed": 2**63},
        {"stop_token_ids": [101]},
        {"top_p": 2},
        {"temperature": float("nan")},
        {"policy_version": -2},
        {"logit_bias": {"1000": 1}},
    ],
    ids=str,
)
def test_sampling_parameters_are_checked(sampling):
    refusal("generate", prompt([1], **sampling))


DEEP = b"\x91" * 100_000  # lists in lists


@pytest.mark.fault(
    "a worker method that no sampler calls, or odd arguments",
    "refused; the engine never hears of it",
)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("__class__", {}),
        ("shutdown", {}),
        ("x" * 999, {}),
        ("status", None),
        ("generate", {"x": 1}),
        ("update_weights", {"update_info": UPDATE | {"writers": 0}}),
        ("update_weights", {"update_info": UPDATE | {"pickled": b"x"}}),
        ("init_weight_transfer_engine", {"init_info": {"x": 1}}),
        ("sleep", {"level": 9}),
        ("wake", {"tags": ["all"]}),
        ("cancel", {"requests": [-1]}),
        ("values", {"kind": "activations", "sequences": [[1]], "policy_version": 3}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_methods_are_those_of_a_list(method, arguments):
    assert len(refusal(method, arguments)) < 400


NAMED = {"names": ["w"], "dtype_names": ["int8"], "shapes": [[2]]}
MEETING = {
    "master_address": "node7",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "packed": True,
    "packed_buffer_size_bytes": 1,
    "packed_num_buffers": 2,
}


@pytest.mark.fault(
    "a form of another transport, or with a field that would be unpickled", "refused at the door"
)
@pytest.mark.parametrize(
    ("transport", "info", "why"),
    [
        ("file", NAMED, "names"),
        ("nccl", UPDATE, "directory"),
        ("nccl", NAMED | {"dtype_names": ["load"]}, "dtype_names"),
        ("nccl", NAMED | {"shapes": [[2**31]]}, "shapes"),
        ("file", MEETING, "master_address"),
        ("nccl", {"packed": True}, "master"),
        ("nccl", MEETING | {"nccl_unique_id_b64": 1}, "nccl_unique_id_b64"),
    ],
    ids=str,
)
def test_forms_are_those_of_the_engine_s_transport(transport, info, why):
    method = "init_weight_transfer_engine" if "packed" in info else "update_weights"
    assert why in refusal(
        method, {"init_info" if "packed" in info else "update_info": info}, transport
    )


@pytest.mark.fault(
    "a transmission that is no list of requests", "it is refused as a whole, with the connection"
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        DEEP,
        encode([{"id": 1, "method": "status"}]),
        b"\x91\x81\xa2id\xa1\xff",
    ],
    ids=lambda content: repr(content[:24]),
)
def test_what_is_no_list_of_requests(content):
    with pytest.raises(Refused, match="invalid transmission"):
        read(content)


def test_one_refusal_spoils_no_neighbour():
    frames = [
        {
            "id": i,
            "method": "generate",
            "arguments": prompt([100 + i]),
        }
        for i in range(3)
    ]
    requests, refusals = read(encode(frames))
    assert [one["id"] for one in requests] == [0]
    assert [one["id"] for one in refusals] == [1, 2]


@pytest.mark.fault(
    "more is asked, or finished, at once than a transmission may take", "it travels in several"
)
def test_transmissions_are_as_few_as_may_travel(monkeypatch):
    monkeypatch.setattr(messages, "LONGEST_TRANSMISSION", 200)
    frames = [{"id": i, "value": bytes(size)} for i, size in enumerate((10, 20, 30, 40, 300, 5, 5))]
    parts = list(transmissions(frames))
    assert [[one["id"] for one in msgspec.msgpack.decode(part)] for part in parts] == [
        [0, 1, 2],
        [3],
        [4],
        [5, 6],
    ]
    assert [one for part in parts for one in msgspec.msgpack.decode(part)] == frames
    assert list(transmissions([])) == []


def test_a_name_given_twice_is_read_once():
    """The engine reads the value that was checked, whichever of the two another parser would take."""
    tokens = encode("tokens")
    arguments = b"\x84" + tokens + encode([100_000]) + tokens + encode([1])
    arguments += encode("seed") + encode(7) + encode("max_tokens") + encode(4)
    frame = {"id": 1, "method": "generate", "arguments": msgspec.Raw(arguments)}
    ((request,), _) = read(encode([frame]))
    assert request["arguments"]["tokens"] == [1]
