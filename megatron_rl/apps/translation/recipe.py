"""`megatron-rl translate`: another project's whole recipe as one of ours; each key of the file
is translated, or listed as not needed, without a counterpart, or unknown.
"""

import difflib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_rl.apps.translation.derived import derive
from megatron_rl.apps.translation.keys import TranslationError, Unset, printable
from megatron_rl.apps.translation.layout import Accounts, Values
from megatron_rl.apps.translation.settings import LEFT_OUT, last, some
from megatron_rl.apps.translation.table import KeyRow, Table, expected, projects, table
from megatron_rl.apps.translation.translate import (
    correction_section,
    document,
    known_project,
    native,
    translate,
)
from megatron_rl.config import ConfigError
from megatron_rl.config.bounds import as_written
from megatron_rl.config.correction_rules import corrects
from megatron_rl.config.layers import CLUSTER, nested, overlaid
from megatron_rl.config.load import from_base
from megatron_rl.config.schema import Config, LossConfig
from megatron_rl.loss.table import CLIP, LOSSES

OFF = "of what is switched off there"
SHORT = 4  # letters of a name that many others are near to


@dataclass
class Recipe:
    mapping: dict[str, Any]
    accounts: Accounts

    def text(self, title: str) -> str:
        said = self.accounts
        lines = [title, *dict.fromkeys(said.notes)]
        lines += [f"no counterpart: {key}: {why}" for key, why in said.missing.items()]
        lines += [
            f"unknown, see whether it matters: {key}: {_short(value)}"
            for key, value in said.unknown.items()
        ]
        lines += [f"not needed here ({why}): {some(keys)}" for why, keys in said.not_needed.items()]
        return document(lines, self.mapping)


def _short(value: Any) -> str:
    return textwrap.shorten(as_written(value), 80, placeholder=" ...")


def recipe(project: str, path: Path, given: Mapping[str, str]) -> Recipe:
    """`given`: variables of a script, and keys of theirs that stand over the file's."""
    project = known_project(project)
    if project not in projects():
        others = ", ".join(projects())
        raise TranslationError(
            f"{project}: its correction alone is translated: add --correction, or name one of {others}"
        )
    flat = native(project, path, given)
    if not flat:
        raise TranslationError(f"{path}: there is no key in it")
    made = translated(table(project), flat)
    try:
        from_base(made.mapping)
    except ConfigError as error:
        problems = "; ".join(str(error).splitlines())
        raise TranslationError(
            f"{project}: what these settings come to is refused here: {problems}"
        ) from None
    return made


def translated(rules: Table, flat: Mapping[str, Any]) -> Recipe:
    accounts = Accounts()
    others = {path: rules.reason(path) for path in flat if path not in rules.by_name}
    for path in others:
        _refuse_near(rules, path, flat[path])
    correction = translate(
        rules.project, {path: flat[path] for path in flat if not others.get(path)}
    )
    accounts.notes += [
        note for note in correction.notes if not note.startswith((LEFT_OUT, "goes with "))
    ]
    values = _values(rules, flat, accounts)
    for path, why in others.items():
        if why:
            accounts.not_needed.setdefault(why, []).append(path)
        elif path in correction.read:
            accounts.translated.append(path)
        else:
            accounts.unknown[path] = flat[path]
    derive(values, accounts)
    values |= {f"loss.{key}": value for key, value in correction.loss.items()}
    _fit_loss(values)
    if values.get("rollout.max_staleness") and not corrects(
        correction.config, LossConfig(name=values.get("loss.name", "ppo"))
    ):
        accounts.lacks(
            f"responses {values.pop('rollout.max_staleness')} steps old", "nothing_corrects"
        )
    values |= correction_section(correction.config)
    return Recipe(
        _nested({key: value for key, value in values.items() if value is not None}), accounts
    )


def _values(rules: Table, flat: Mapping[str, Any], accounts: Accounts) -> Values:
    """Values by our key: constants, their defaults, then the file's values in the table's order."""
    values: Values = dict(rules.always)
    on = [row for row in rules.rows if _counts(rules, row, flat)]
    for row in on:
        if row.default is not None and row.to:
            if not _set(values, row, row.theirs, row.default) and flat.keys().isdisjoint(row.names):
                accounts.missing[
                    f"{row.theirs}, which is {as_written(row.default)} there by default"
                ] = row.why
    for row in rules.rows:
        found = [name for name in row.names if name in flat]
        for name in [name for name in found if not isinstance(flat[name], Unset)] or found:
            value = flat[name]
            if row not in on:
                accounts.not_needed.setdefault(OFF, []).append(name)
                continue
            accounts.translated.append(name)
            parts = value if isinstance(value, list) else [value]
            unset = next((part for part in parts if isinstance(part, Unset)), None)
            if unset and row.to:
                if row.to != ("=run_name",):
                    raise TranslationError(
                        f"{rules.project}: {name} is {unset.text}: it {unset.hint(name)}"
                    )
                accounts.missing[f"{name}: {unset}"] = row.why
            elif not (_set(values, row, name, value) if row.to else not row.asks(value)):
                accounts.missing[f"{name}: {_short(value)}"] = row.why or f"see {', '.join(row.to)}"
    return values


def _counts(rules: Table, row: KeyRow, flat: Mapping[str, Any]) -> bool:
    if row.when_loss:
        name = next(one for one in rules.rows if "loss.name" in one.to)
        return bool(flat.get(name.theirs, name.default) == row.when_loss)
    return not (row.when and not flat.get(row.when)) and not (row.unless and flat.get(row.unless))


def _set(values: Values, row: KeyRow, name: str, value: Any) -> bool:
    """Set the counterpart of a value of theirs; return False if it has none."""
    if value is None and None not in (row.words or ()):
        return True
    try:
        ours = row.ours(value)
    except (KeyError, TypeError):
        return False
    for key, one in ours.items():
        if one is None:
            values.pop(key, None)
        elif number := expected(key, one):
            raise TranslationError(f"{name} is {_short(value)}: expected {number}")
        else:
            values[key] = one
    return True


def _refuse_near(rules: Table, path: str, value: Any) -> None:
    """A key that is one of the table's but for a letter or two is a mistake."""
    if isinstance(value, Unset) and value.text == path and not rules.reason(path):
        raise TranslationError(
            f"{rules.project}: {path} among the arguments: it {value.hint(path)}"
        )
    name = last(path)
    section = path.removesuffix(name)
    beside = [last(one) for one in rules.by_name if one.removesuffix(last(one)) == section]
    near = difflib.get_close_matches(name, beside, n=1, cutoff=0.9)
    if near and len(name) > SHORT:
        raise TranslationError(
            f"{rules.project}: {path}: unknown; did you mean {section}{near[0]}?"
        )


def _fit_loss(values: Values) -> None:
    """Keys of other losses than the recipe's, and of a KL that is off, are not its own."""
    chosen = values.get("loss.name", "ppo")
    others = {key for loss in LOSSES.values() for key in loss.keys} - {*LOSSES[chosen].keys, *CLIP}
    if not values.get("loss.kl_coef"):
        others |= {"kl_cap", "kl_estimator", "kl_to"}
    for key in others:
        values.pop(f"loss.{key}", None)


def _nested(values: Values) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in values.items():
        preset = isinstance(value, str) and any(other.startswith(f"{key}.") for other in values)
        mapping = overlaid(mapping, nested(f"{key}.preset" if preset else key, value))
    order = [CLUSTER, *(section.name for section in fields(Config))]
    return {section: mapping[section] for section in sorted(mapping, key=order.index)}


def write_recipe(project: str, path: Path, to: Path, given: Mapping[str, str]) -> str:
    """Write the recipe and return a short summary of the file's keys; `-`: return the recipe."""
    made = recipe(project, path, given)
    text = made.text(f"{project}: {path.name}")
    if str(to) == "-":
        return text
    if to.exists():
        raise TranslationError(f"{to} exists; name another file, or remove it")
    to.write_text(text, encoding="utf-8")
    said = made.accounts
    not_needed = sum(map(len, said.not_needed.values()))
    lines = [f"{to}: {len(said.translated)} keys translated, {not_needed} not needed"]
    lines += [f"  no counterpart: {key}" for key in said.missing]
    lines += [f"  unknown: {key}" for key in said.unknown]
    lines.append(
        f"next: megatron-rl plan {to} --on own, with --suggest where the layout does not fit"
    )
    return "\n".join([*map(printable, lines), ""])
