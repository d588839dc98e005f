"""Check of each node of a job against the recipe, before models load: slurm/prologue.sh runs it on
each by srun.

python -m megatron_rl.workshop.nodes.check LEARNING RECIPE [key=value ...]     LEARNING: nodes that
hold the learner

Nodes talk through a torch store that the first one holds. Each says what it has, tries to reach
every other one, and reads and writes the folders that they share; then the learner's nodes sum a
tensor over all. The first one prints what is wrong, a sentence for each node; on its stdout are the
names of the bad ones, unless all are.

exit status of the first: 0 all is well; 2 a node is not what it should be; 75 it may be the next
time Environment, from slurm/prologue.sh: MEGATRON_RL_NODES=name=address,...  MEGATRON_RL_PORT  and
Slurm's own.
"""

import os
import secrets
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import cluster, read
from megatron_rl.config.fleet import gpus_of_engines, size
from megatron_rl.config.schema import Config, Device
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.machine import named
from megatron_rl.processes.process import free_port
from megatron_rl.workshop.nodes import facts
from megatron_rl.workshop.nodes.attend import ANSWER_S, ARRIVE_S, NO_RESULT, RING_S, Board, attend
from megatron_rl.workshop.nodes.facts import Facts, Needs, Problem

REFUSED = 2
PASSING = 75
Folders = Sequence[tuple[str, Path]]  # a key of the recipe, and its folder


def needs(config: Config, machine: str | None, nodes: Sequence[str], learning: int) -> Needs:
    """GPUs of the learner's nodes, those of the engines on the first one, those of the servers."""
    if config.run.device == Device.cpu or (config.run.device == Device.auto and not facts.gpus()):
        return Needs()
    world = Layout.from_config(config.learner).world
    width = config.sampler.tensor_parallel
    gpus = dict.fromkeys(nodes[:learning], -(-world // learning))
    gpus[nodes[0]] = max(gpus[nodes[0]], max(gpus_of_engines(config.sampler), default=0) + 1)
    serving = nodes[learning:]
    servers = size(config.sampler) - config.sampler.fleet.replicas
    gpus |= {node: width * -(-servers // len(serving)) for node in serving}
    return Needs(gpus, named(machine).gib if machine else 0.0, config.run.device == Device.cuda)


def lead(
    nodes: Mapping[str, str], port: int, wanted: Needs, folders: Folders, learning: int
) -> list[Problem]:
    """The first node: hears every node, itself included, and judges."""
    first, address = next(iter(nodes.items()))
    try:
        board = Board.open(address, port)
    except OSError as error:
        return [
            Problem(
                first, f"cannot listen at {address}:{port}: {os.strerror(error.errno or 0)}", False
            )
        ]
    attending = threading.Thread(target=attend, args=(first, nodes, port), daemon=True)
    attending.start()
    try:
        return _compared(board, nodes, wanted, folders) or _sum(board, nodes, wanted, learning)
    finally:
        board.say("ring", {})  # where no sum was asked for
        attending.join(ANSWER_S)


def _compared(
    board: Board, nodes: Mapping[str, str], wanted: Needs, folders: Folders
) -> list[Problem]:
    """Problems of the nodes that have spoken, and the nodes that have not."""
    # a folder in each of those that are shared
    first = next(iter(nodes))
    mark = f".nodes-{secrets.token_hex(8)}"
    board.say("mark", mark)
    about = board.hear_all("about", nodes, ARRIVE_S)
    missing = [
        Problem(node, f"nothing heard of it on {first} within {ARRIVE_S:.0f} s", False)
        for node in nodes
        if node not in about
    ]
    mine = {f"{key}={path}": facts.leave(path, mark) for key, path in folders}
    shared = [(key, str(path)) for key, path in folders if mine[f"{key}={path}"] is None]
    try:
        board.say(
            "peers",
            {"ports": {node: said.pop("port") for node, said in about.items()}, "folders": shared},
        )
        looked = board.hear_all("looked", about, ANSWER_S)
        for node, said in looked.items():
            problems = said["folders"]
            if node == first:
                problems |= {key: problem for key, problem in mine.items() if problem}
            for key, path in shared:
                name = f"{key}={path}"
                if name not in problems and (
                    problem := facts.arrived(Path(path), mark, node, first)
                ):
                    problems[name] = problem
    finally:
        for _, folder in folders:
            shutil.rmtree(folder / mark, ignore_errors=True)
    silent = [
        Problem(node, "it went away during the check", False)
        for node in about
        if node not in looked
    ]
    heard = [
        Facts.read({**about[node], **looked[node], "node": node})
        for node in nodes
        if node in looked
    ]
    return [*missing, *silent, *facts.judge(heard, wanted)]


def _sum(board: Board, nodes: Mapping[str, str], wanted: Needs, learning: int) -> list[Problem]:
    """The learner's nodes, and all their GPUs, sum a tensor, again and again."""
    each = {node: max(1, wanted.gpus.get(node, 0)) for node in list(nodes)[:learning]}
    world = sum(each.values())
    address = next(iter(nodes.values()))
    if world == 1:
        return []
    meeting = {"address": address, "port": free_port(address), "world": world, "cuda": wanted.cuda}
    places = {}
    rank = 0
    for node, count in each.items():
        places[node] = {**meeting, "rank": rank, "count": count}
        rank += count
    board.say("ring", places)
    said = board.hear_all("sum", each, RING_S + ANSWER_S)
    failed = {node: (one["at"], one["why"]) for node, one in said.items() if one["why"]}
    failed |= {node: (0.0, "nothing heard of it") for node in each if node not in said}
    # whoever fails first pulls the others with it; where nobody knows why, it may be any of them
    known = {node: at for node, (at, why) in failed.items() if why != NO_RESULT}
    if known:
        names = [min(known, key=lambda node: known[node])]
    else:
        names = list(failed)
    over = ", ".join(each)
    return [
        Problem(node, f"the sum over {over} failed there: {failed[node][1]}", False)
        for node in names
    ]


def main(arguments: Sequence[str]) -> int:
    learning, (recipe, *overrides) = int(arguments[0]), arguments[1:]
    known = (word.partition("=") for word in os.environ["MEGATRON_RL_NODES"].split(","))
    nodes = {name: address for name, _, address in known}
    node = os.environ["SLURMD_NODENAME"]
    port = int(os.environ["MEGATRON_RL_PORT"])
    if node != next(iter(nodes)):
        attend(node, nodes, port)
        return 0
    config, _ = read(recipe, overrides)
    folders = [("run.root", Path(config.run.root))]
    if config.sync.dir:
        folders.append(("sync.dir", Path(config.sync.dir)))
    wanted = needs(config, cluster(recipe, overrides)[1], list(nodes), learning)
    problems = lead(nodes, port, wanted, folders, learning)
    for problem in problems:
        print(f"nodes: {problem}", file=sys.stderr)
    bad = list(dict.fromkeys(problem.node for problem in problems))
    if 0 < len(bad) < len(nodes):
        print(",".join(bad))
    if not problems:
        return 0
    if any(problem.lasting for problem in problems):
        return REFUSED
    return PASSING


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread may wait for a file system that never answers
