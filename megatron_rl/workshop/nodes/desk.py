"""The first node of a job: hears every node, and says which is not what the recipe needs."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.workshop.nodes import facts
from megatron_rl.workshop.nodes.facts import Facts, Needs, Problem
from megatron_rl.workshop.nodes.line import ANSWER_S, ARRIVE_S, NO_RESULT, RING_S, Line


class Desk:
    """The first node: hears every node, and judges."""

    def __init__(
        self, nodes: Mapping[str, str], needs: Needs, folders: Sequence[tuple[str, Path]], learning: int
    ) -> None:
        self._nodes, self._needs, self._folders, self._learning = nodes, needs, folders, learning
        self._lines: dict[str, Line] = {}
        self._all_here = asyncio.Event()
        self._mark = f".nodes-{secrets.token_hex(8)}"  # a folder in each of those that are shared
        self._first = next(iter(nodes))

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        said = await line.ask(ANSWER_S)
        if not isinstance(said, dict) or said.get("node") not in self._nodes:
            writer.close()
            return
        await line.say(clock=time.time(), mark=self._mark)
        self._lines[said["node"]] = line
        if len(self._lines) == len(self._nodes):
            self._all_here.set()

    async def judge(self) -> list[Problem]:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_here.wait(), ARRIVE_S)
        missing = [
            Problem(node, f"nothing heard of it on {self._first} within {ARRIVE_S:.0f} s", False)
            for node in self._nodes
            if node not in self._lines
        ]
        about = await self._of_each("port", ANSWER_S)
        mine = {f"{key}={path}": facts.leave(path, self._mark) for key, path in self._folders}
        shared = [(key, str(path)) for key, path in self._folders if mine[f"{key}={path}"] is None]
        try:
            peers = {node: (self._nodes[node], said["port"]) for node, said in about.items()}
            looked = await self._of_each("folders", ANSWER_S, peers=peers, folders=shared)
            looked = {node: said for node, said in looked.items() if node in about}
            heard = [self._facts(node, {**about[node], **looked[node]}, mine) for node in self._nodes if node in looked]
        finally:
            for _, path in self._folders:
                shutil.rmtree(path / self._mark, ignore_errors=True)
        silent = [Problem(node, "it went away during the check", False) for node in self._lines if node not in looked]
        found = [*missing, *silent, *facts.judge(heard, self._needs)]
        return found or await self._sum()

    def _facts(self, node: str, said: dict[str, Any], mine: Mapping[str, tuple[str, bool] | None]) -> Facts:
        del said["port"]
        folders = {key: (what, bool(lasting)) for key, (what, lasting) in said["folders"].items()}
        if node == self._first:
            folders |= {key: problem for key, problem in mine.items() if problem}
        for key, path in self._folders:
            name = f"{key}={path}"
            if mine[name] is None and name not in folders:
                problem = facts.arrived(path, self._mark, node, self._first)
                folders |= {name: problem} if problem else {}
        return Facts.read({**said, "node": node, "folders": folders})

    async def _sum(self) -> list[Problem]:
        """The learner's nodes, and all their GPUs, sum a tensor, again and again."""
        each = {node: max(1, self._needs.gpus.get(node, 0)) for node in list(self._nodes)[: self._learning]}
        world, address = sum(each.values()), self._nodes[self._first]
        if world == 1:
            return []
        meeting = {"address": address, "port": _free_port(address), "world": world, "cuda": self._needs.cuda}
        waits, rank = [], 0
        for node, count in each.items():
            place = {**meeting, "rank": rank, "count": count}
            waits.append(self._lines[node].ask(RING_S + ANSWER_S, ring=place))
            rank += count
        said = dict(zip(each, await asyncio.gather(*waits), strict=True))
        failed = {node: (one["at"], one["ring"]) for node, one in said.items() if one and one["ring"]}
        failed |= {node: (0.0, "nothing heard of it") for node, one in said.items() if not one}
        # whoever fails first pulls the others with it; where nobody knows why, it may be any of them
        known = {node: at for node, (at, why) in failed.items() if why != NO_RESULT}
        names = [min(known, key=lambda node: known[node])] if known else list(failed)
        over = ", ".join(each)
        return [Problem(node, f"the sum over {over} failed there: {failed[node][1]}", False) for node in names]

    async def _of_each(self, wanted: str, seconds: float, **said: Any) -> dict[str, dict[str, Any]]:
        answers = await asyncio.gather(*(line.ask(seconds, **said) for line in self._lines.values()))
        return {
            node: one for node, one in zip(self._lines, answers, strict=True) if isinstance(one, dict) and wanted in one
        }

    async def release(self) -> None:
        await asyncio.gather(*(line.say(end=True) for line in self._lines.values()))


def _free_port(address: str) -> int:
    with socket.socket() as place:
        place.bind((address, 0))
        return int(place.getsockname()[1])
