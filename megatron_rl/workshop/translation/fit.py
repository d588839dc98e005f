"""Sizes for a translated recipe that fit its cluster, where those of the other project do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.layers import CLUSTER, MACHINE, cluster
from megatron_rl.config.schema import Config
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named
from megatron_rl.workshop.planner.candidates import overrides
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.plan import plan_case
from megatron_rl.workshop.planner.suggest import refused, suggestions
from megatron_rl.workshop.planner.workload import Assumptions
from megatron_rl.workshop.translation.layout import Accounts
from megatron_rl.workshop.translation.sources import scalar


def fit(mapping: dict[str, Any], config: Config, told: Accounts) -> None:
    """The first layout of `megatron-rl plan --suggest` in the place of one that has a problem; both are said."""
    try:
        machine = named(cluster(mapping.get(CLUSTER))[MACHINE])
        case = Case(config, read_card(str(config.model.folder)), machine, Assumptions())
    except ConfigError:  # a model or a cluster that nobody knows here
        return
    if (problem := _problem(case)) is None:
        return
    if not (found := suggestions(case, count=1)):
        told.note("fits_nowhere", cluster=mapping[CLUSTER], problem=problem)
        return
    for word in overrides(config, _with_servers(found[0].config)):
        key, _, text = word.partition("=")
        _put(mapping, key, scalar(text))
    told.drop("sharded")
    told.note("fitted", cluster=mapping[CLUSTER], problem=problem)


def _with_servers(config: Config) -> Config:
    """A job starts servers; addresses are names of a site."""
    fleet = config.sampler.fleet
    if fleet.addresses:
        fleet = replace(fleet, addresses=[], servers=len(fleet.addresses))
    return replace(config, sampler=replace(config.sampler, fleet=fleet))


def _problem(case: Case) -> str | None:
    try:
        case.model.layout.stage_layers(case.model.shape.layers)
        problems = [*plan_case(case).problems, *refused(case.config, case.machine)]
    except (ValueError, ConfigError) as error:
        problems = str(error).splitlines()
    return problems[0].partition(";")[0] if problems else None


def _put(mapping: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        mapping = mapping.setdefault(section, {})
    mapping[name] = value
    if value is None:
        del mapping[name]
