"""Sizes for a translated recipe that fit its cluster, where those of the other project do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.layers import CLUSTER, MACHINE, cluster, of_overrides
from megatron_rl.config.schema import Config
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named
from megatron_rl.workshop.planner.candidates import overrides
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.plan import plan_case
from megatron_rl.workshop.planner.suggest import refused, suggestions
from megatron_rl.workshop.planner.workload import Assumptions
from megatron_rl.workshop.translation.layout import Accounts
from megatron_rl.workshop.translation.sources import merged


def fit(mapping: dict[str, Any], config: Config, told: Accounts) -> None:
    """The first layout of `megatron-rl plan --suggest` in the place of one that has a problem; both are said."""
    try:
        machine = named(cluster(mapping.get(CLUSTER))[MACHINE])
        case = Case(config, read_card(str(config.model.folder)), machine, Assumptions())
    except ConfigError:  # a model or a cluster that nobody knows here
        return
    if (problem := _problem(case)) is None:
        return
    found = suggestions(case, count=1)
    no_longer = ("sharded", "halves", "no_multiple") if found else ("sharded",)
    told.notes = [note for note in told.notes if told.words.get(note) not in no_longer]
    if not found:
        told.note("fits_nowhere", cluster=mapping[CLUSTER], problem=problem)
        return
    sampler = found[0].config.sampler  # a job starts its servers; their addresses are names of a site
    fleet = replace(sampler.fleet, addresses=[], servers=len(sampler.fleet.addresses))
    changed = replace(found[0].config, sampler=replace(sampler, fleet=fleet))
    for layer in of_overrides(list(overrides(config, changed))):
        mapping |= merged(mapping, layer.content)
    given = mapping["learner"].get("megatron", {})
    mapping["learner"]["megatron"] = {key: value for key, value in given.items() if value is not None}
    told.note("fitted", cluster=mapping[CLUSTER], problem=problem)


def _problem(case: Case) -> str | None:
    try:
        case.model.layout.stage_layers(case.model.shape.layers)
        problems = [*plan_case(case).problems, *refused(case.config, case.machine)]
    except (ValueError, ConfigError) as error:
        problems = str(error).splitlines()
    return problems[0].partition(";")[0] if problems else None
