"""What each node of a job does while the first one judges: says what it has, tries others and shared folders."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from megatron_rl.workshop.nodes import facts
from megatron_rl.workshop.nodes.line import ANSWER_S, ARRIVE_S, LONGEST, NO_RESULT, RING_S, Line

CONNECT_S = 10.0


async def attend(node: str, nodes: Mapping[str, str], port: int) -> None:
    """What each node does: the first one listens at `port`."""
    first = next(iter(nodes))
    line = await _reach(nodes[first], port)
    if line is None:
        print(f"nodes: {node} does not reach {first} at {nodes[first]}:{port}", file=sys.stderr)
        return
    sent = time.time()
    said = await line.ask(ANSWER_S, node=node)
    if said is None:
        return
    ahead = (sent + time.time()) / 2 - said["clock"]
    mark = said["mark"]
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), nodes[node], 0)
    versions, gpus = await asyncio.gather(asyncio.to_thread(facts.versions), asyncio.to_thread(facts.gpus))
    said = await line.ask(
        ARRIVE_S + ANSWER_S, port=listening.sockets[0].getsockname()[1], ahead_s=ahead, versions=versions,
        gpus=[asdict(gpu) for gpu in gpus],
    )  # fmt: skip
    if said is None:
        return
    others = {name: where for name, where in said["peers"].items() if name != node}
    reached = await asyncio.gather(*(_connects(*where) for where in others.values()))
    looks = {f"{key}={path}": _look(Path(path), mark, node, first) for key, path in said["folders"]}
    problems = dict(zip(looks, await asyncio.gather(*looks.values()), strict=True))
    said = await line.ask(
        ANSWER_S + ANSWER_S,
        unreached=[name for name, there in zip(others, reached, strict=True) if not there],
        folders={name: problem for name, problem in problems.items() if problem},
    )
    if said and "ring" in said:
        why = await _take_part(**said["ring"])
        await line.ask(RING_S, ring=why, at=time.time() - ahead)


async def _look(path: Path, mark: str, node: str, first: str) -> tuple[str, bool] | None:
    """A file system that is gone may never answer."""
    try:
        work = asyncio.to_thread(facts.folder_problem, path, mark, node, first)
        return await asyncio.wait_for(work, ANSWER_S / 2)
    except TimeoutError:
        return f"does not answer within {ANSWER_S / 2:.0f} s", False


async def _reach(host: str, port: int) -> Line | None:
    end = time.monotonic() + ARRIVE_S
    while time.monotonic() < end:
        try:
            opened = asyncio.open_connection(host, port, limit=LONGEST)
            return Line(*await asyncio.wait_for(opened, CONNECT_S))
        except (OSError, TimeoutError):
            await asyncio.sleep(0.2)
    return None


async def _connects(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _take_part(address: str, port: int, world: int, rank: int, count: int, cuda: bool) -> str:
    """Empty, or why it failed: the processes of this node, one for each GPU."""
    started = []
    for local in range(count):
        place = {
            "RANK": rank + local,
            "LOCAL_RANK": local,
            "WORLD_SIZE": world,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        started.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "megatron_rl.workshop.nodes.ring", *["cuda"] * cuda,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                env=os.environ | {name: str(value) for name, value in place.items()},
            )
        )  # fmt: skip
    try:
        ends = await asyncio.wait_for(asyncio.gather(*(one.communicate() for one in started)), RING_S)
    except TimeoutError:
        for one in started:
            with suppress(ProcessLookupError):
                one.kill()
        return NO_RESULT
    for local, (one, (_, said)) in enumerate(zip(started, ends, strict=True)):
        if one.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            return f"process {local}: {lines[-1] if lines else f'exit status {one.returncode}'}"
    return ""
