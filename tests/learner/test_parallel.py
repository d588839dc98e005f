"""Rendezvous of ranks on several nodes: listens on one interface, not all of them."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_rl.learner import parallel
from megatron_rl.processes.process import free_port


def listening(port: int) -> set[str]:
    """Local addresses, as the kernel writes them."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, at = local.split(":")
            if state == "0A" and int(at, 16) == port:
                found.add(address)
    return found


@pytest.mark.fault(
    "a stranger on another interface of the job's node", "the ranks' store does not listen there"
)
def test_the_store_listens_on_the_interface_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = parallel._store(0, 1, timedelta(seconds=60))
    assert listening(port) == {"0100007F"}
    store.set("a", "b")
    # a name that stands for loopback on this node alone: others could not reach it there
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", os.uname().nodename)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(
        parallel.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", port))]
    )
    other = parallel._store(0, 1, timedelta(seconds=60))
    assert listening(port) & {"00000000", "0" * 32}
    other.set("a", "b")
