"""Before models load: is each node of a job what the recipe needs? One task on each node, under srun.

python -m megatron_rl.workshop.nodes.check LEARNING RECIPE [key=value ...]     LEARNING: nodes that hold the learner

The first node listens. Each node, the first one too, tells it what it has, tries to reach every other one, and reads
and writes the folders that they share; then the learner's nodes sum a tensor over all. The first one prints what is
wrong, a sentence for each node; on its stdout are the names of the bad ones, unless all are.

exit status of the first: 0 all is well; 2 a node is not what it should be; 75 it may be the next time
Environment, from slurm/prologue.sh: MEGATRON_RL_NODES=name=address,...  MEGATRON_RL_PORT  and Slurm's own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import cluster, read
from megatron_rl.config.fleet import gpus_of_engines, size
from megatron_rl.config.schema import Config, Device
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.machine import named
from megatron_rl.workshop.nodes import facts
from megatron_rl.workshop.nodes.attend import attend
from megatron_rl.workshop.nodes.desk import Desk
from megatron_rl.workshop.nodes.facts import Needs, Problem
from megatron_rl.workshop.nodes.line import LONGEST

REFUSED, PASSING = 2, 75


def needs(config: Config, machine: str | None, nodes: Sequence[str], learning: int) -> Needs:
    """GPUs of the learner's nodes, those of the engines on the first one, those of the servers."""
    if config.run.device == Device.cpu or (config.run.device == Device.auto and not facts.gpus()):
        return Needs()
    world, width = Layout.from_config(config.learner).world, config.sampler.tensor_parallel
    gpus = dict.fromkeys(nodes[:learning], -(-world // learning))
    gpus[nodes[0]] = max(gpus[nodes[0]], max(gpus_of_engines(config.sampler), default=0) + 1)
    serving = nodes[learning:]
    servers = size(config.sampler) - config.sampler.fleet.replicas
    gpus |= {node: width * -(-servers // len(serving)) for node in serving}
    return Needs(gpus, named(machine).gib if machine else 0.0, config.run.device == Device.cuda)


async def lead(desk: Desk, node: str, nodes: Mapping[str, str], port: int) -> list[Problem]:
    try:
        server = await asyncio.start_server(desk.hear, nodes[node], port, limit=LONGEST)
    except OSError as error:
        return [Problem(node, f"cannot listen at {nodes[node]}:{port}: {os.strerror(error.errno or 0)}", False)]
    attending = asyncio.create_task(attend(node, nodes, port))
    problems = await desk.judge()
    await desk.release()
    await attending
    server.close()
    return problems


def main(arguments: Sequence[str]) -> int:
    learning, (recipe, *overrides) = int(arguments[0]), arguments[1:]
    known = (word.partition("=") for word in os.environ["MEGATRON_RL_NODES"].split(","))
    nodes = {name: address for name, _, address in known}
    node, port = os.environ["SLURMD_NODENAME"], int(os.environ["MEGATRON_RL_PORT"])
    if node != next(iter(nodes)):
        asyncio.run(attend(node, nodes, port))
        return 0
    config, _ = read(recipe, overrides)
    folders = [("run.root", Path(config.run.root))]
    if config.sync.dir:
        folders.append(("sync.dir", Path(config.sync.dir)))
    wanted = needs(config, cluster(recipe, overrides)[1], list(nodes), learning)
    problems = asyncio.run(lead(Desk(nodes, wanted, folders, learning), node, nodes, port))
    for problem in problems:
        print(f"nodes: {problem}", file=sys.stderr)
    bad = list(dict.fromkeys(problem.node for problem in problems))
    if 0 < len(bad) < len(nodes):
        print(",".join(bad))
    if not problems:
        return 0
    return REFUSED if any(problem.lasting for problem in problems) else PASSING


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a thread may wait for a file system that never answers
