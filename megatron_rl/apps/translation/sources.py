"""Reader of another project's file in the form it ships: YAML with its bases, TOML, a script's
command line, Python.
"""

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.apps.translation.keys import TranslationError, Unset
from megatron_rl.apps.translation.reading import Reading
from megatron_rl.apps.translation.shell import Script, Word, command_line
from megatron_rl.apps.translation.table import Table
from megatron_rl.config.layers import overlaid

ASSIGNED = re.compile(r"^(?:--+|[+~]{0,2})([A-Za-z_][\w.@/-]*)=(.*)$", re.DOTALL)
NUMBER = re.compile(r"^-[\d.]")
FORMS = {".toml": "TOML", ".py": "Python"} | dict.fromkeys(
    (".sh", ".bash", ".sbatch", ".slurm"), "shell"
)


def read_native(
    path: Path, rules: Table, given: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Read a file into the types of YAML; return it with the variables that its script expands.

    `given`: variables and keys of the command line.
    """
    form = FORMS.get(path.suffix, "YAML")
    reading = Reading()
    script = Script(path.parent, given, reading=reading)
    try:
        text = reading.read(path)
        if form == "TOML":
            found: Any = tomllib.loads(text)
        elif form == "Python":
            found = _python(text, rules)
        elif form == "shell" or text.startswith("#!"):
            found = arguments(command_line(script, text, rules.command), reading)
        else:
            found = _layered(path, text, reading)
        reading.root = found
        return reading.plain(found), script.names
    except (OSError, UnicodeDecodeError) as error:
        said = f"not readable as text: {error}"
    except TranslationError as error:
        said = str(error).removeprefix(f"{path}: ")
    except (RecursionError, MemoryError):
        said = "nested too deeply; leave out what the training does not need"
    except (yaml.YAMLError, ValueError, SyntaxError) as error:
        said = f"not valid {form} ({error})"
    raise TranslationError(f"{path}: {said}")


def arguments(words: Sequence[Word], reading: Reading) -> dict[str, Any]:
    """Flags with their values and `key=value` words; the last one of a repeated key counts."""
    reading.spend(values=len(words))
    found: dict[str, Any] = {}
    flag = ""
    for word in words:
        text = str(word)
        assigned = ASSIGNED.match(text)
        begins_flag = text.startswith("-") and not NUMBER.match(text)
        if isinstance(word, Unset) and text.endswith("[@]}"):  # unknown arguments
            found[text] = word
            flag = ""
        elif assigned and (begins_flag or not flag):
            found[assigned[1]] = _value(word, assigned[2], reading)
            flag = ""
        elif begins_flag:
            flag = text.lstrip("-")
            found[flag] = True
        elif flag:
            one = _value(word, text, reading)
            found[flag] = one if found[flag] is True else [*_listed(found[flag]), one]
        else:
            found[text] = word
    return found


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


def _value(word: Word, text: str, reading: Reading) -> Any:
    if isinstance(word, str):
        return reading.scalar(text)
    return Unset(text, word.names)


def _layered(path: Path, text: str, reading: Reading) -> dict[str, Any]:
    """Over the files that its `defaults` names, where they are paths."""
    mapping = reading.yaml(text)
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise TranslationError(f"{path}: expected keys and values, got {type(mapping).__name__}")
    named = _listed(mapping.pop("defaults", None) or [])
    bases = [one for one in named if isinstance(one, str) and one.endswith((".yaml", ".yml"))]
    whole: dict[str, Any] = {}
    for base in (path.parent / name for name in bases):
        if not base.exists():
            raise TranslationError(
                f"{path}: defaults names {base.name}, which is not at {base}; fetch that file too"
            )
        whole = overlaid(whole, _layered(base, reading.read(base), reading))
    if rest := [one for one in named if one not in (*bases, "_self_")]:
        mapping["defaults"] = rest
    return overlaid(whole, mapping)


def _python(text: str, rules: Table) -> dict[str, Any]:
    """Arguments of the calls that make a configuration, else the docstring's command line."""
    found: dict[str, Any] = {}
    configured = False
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if (section := rules.calls.get(name)) is None:
            continue
        if configured and not section:
            raise TranslationError(f"{name} is called twice; leave one of the calls")
        configured |= not section
        named = {
            f"{name}[{place}]" if place else section or name: one
            for place, one in enumerate(call.args)
        }
        for word in call.keywords:
            if word.arg is None:
                said = f"{name} is called with **{ast.unparse(word.value)}, which is not read"
                raise TranslationError(f"{said}; write its settings into the call")
            named[f"{section}.{word.arg}".strip(".")] = word.value
        for key, node in named.items():
            # several data sets, say: the first counts, and the others are listed as unknown
            found[f"{key} (again)" if key in found else key] = _literal(node)
    if not configured:
        raise TranslationError("no call that makes a configuration; name a script with its command")
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # TypeError: a list as a key
        return Unset(ast.unparse(node))
