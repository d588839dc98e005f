"""How far the configuration travels from run_rank: one walk through every call that it is handed on to.

A visit is a line that uses the configuration (or one of its sections); where that line hands it to a function or class
of this project, the walk goes on there, and comes back. Each call is followed once, each function entered once. A stay
is a run of visits in one file, a room is a file, a return is a stay in a file that the walk has left before. Calls are
found in the source (ast): by imports, and methods by their class, or by their name where only one class has it.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START, PARAMETER = "megatron_rl.rank.run_rank", "config"
SCHEMA = "megatron_rl.config.schema"


@dataclass(frozen=True)
class Function:
    module: Module
    node: ast.FunctionDef
    owner: ast.ClassDef | None = None

    def parameter(self, call: ast.Call, argument: ast.expr) -> ast.arg | None:
        """What stands for an argument of a call."""
        static = any(ast.unparse(each) == "staticmethod" for each in self.node.decorator_list)
        names = self.node.args.args[self.owner is not None and not static :]
        if argument in call.args:
            return dict(enumerate(names)).get(call.args.index(argument))
        wanted = next((each.arg for each in call.keywords if each.value is argument), None)
        return next((each for each in [*names, *self.node.args.kwonlyargs] if each.arg == wanted), None)


class Module:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.functions: dict[str, Function] = {}  # f, Class, Class.method
        self.imports: dict[str, str] = {}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = Function(self, node)
            elif isinstance(node, ast.ClassDef):
                for inner in (each for each in node.body if isinstance(each, ast.FunctionDef)):
                    name = node.name if inner.name == "__init__" else f"{node.name}.{inner.name}"
                    self.functions[name] = Function(self, inner, node)


class Walk:
    def __init__(self, package: Path, sections: bool) -> None:
        self.sections = sections
        self.modules: dict[str, Module] = {}
        self.entered: set[tuple[ast.FunctionDef, frozenset[str]]] = set()
        for path in sorted(package.rglob("*.py")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            self.modules[name] = Module(name, path)

    def function(self, dotted: str) -> Function | None:
        """A function, a class's __init__ or its method, also under a name by which another module imports it."""
        module, _, name = dotted.rpartition(".")
        owner, _, class_name = module.rpartition(".")
        for home, rest in ((module, name), (owner, f"{class_name}.{name}")):
            if home in self.modules:
                first, _, last = rest.partition(".")
                elsewhere = self.modules[home].imports.get(first)
                found = self.modules[home].functions.get(rest)
                return found or (self.function(f"{elsewhere}.{last}".rstrip(".")) if elsewhere else None)
        return None

    def called(self, module: Module, call: ast.Call) -> Function | None:
        first, _, rest = ast.unparse(call.func).partition(".")
        found = self.function(f"{module.imports.get(first, f'{module.name}.{first}')}.{rest}".rstrip("."))
        if found or not isinstance(call.func, ast.Attribute):
            return found
        everywhere = (each for one in self.modules.values() for each in one.functions.values() if each.owner)
        same = [each for each in everywhere if each.node.name == call.func.attr]
        return same[0] if len(same) == 1 else None

    def visits(self, function: Function, tracked: frozenset[str]) -> Iterator[str]:
        """The file of each visit, in the source's order; then those of the class, for what is kept as self.x."""
        if (function.node, tracked) in self.entered:
            return
        self.entered.add((function.node, tracked))
        nodes = list(ast.walk(function.node))
        copies = {name for node in nodes if isinstance(node, ast.Assign) for name in _copies(node, tracked)}
        names = tracked | {name for name in copies if "." not in name}
        calls = {each: node for node in nodes if isinstance(node, ast.Call)
                 for each in [*node.args, *(word.value for word in node.keywords)]}  # fmt: skip
        parents = {node.value: node for node in nodes if isinstance(node, ast.Attribute)}
        uses = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names]
        uses = [use for use in uses if isinstance(use.ctx, ast.Load)]
        handed = {use: parents.get(use, use) if self.sections and use not in calls else use for use in uses}
        followed: list[ast.Call] = []
        for use in sorted(uses, key=lambda node: (node.lineno, node.col_offset)):
            call = calls.get(handed[use])
            if call in followed:  # with another section that the same call hands on
                continue
            yield str(function.module.path.relative_to(ROOT))
            callee = self.called(function.module, call) if call else None
            if call is None or callee is None:
                continue
            followed.append(call)
            wanted = {each: callee.parameter(call, each) for each in handed.values() if calls.get(each) is call}
            received = {name.arg for each, name in wanted.items()
                        if name and (each in uses or _is_section(callee.module, name))}  # fmt: skip
            if received:
                yield from self.visits(callee, frozenset(received))
        kept = frozenset(name for name in copies if name.startswith("self."))
        for method in function.module.functions.values() if kept else []:
            if method.owner and method.owner is function.owner:
                yield from self.visits(method, kept)


def _copies(node: ast.Assign, tracked: frozenset[str]) -> Iterator[str]:
    """Names and attributes that are assigned a tracked value as it is."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    else:
        pairs = [(target, value)]
    yield from (ast.unparse(left) for left, right in pairs if ast.unparse(right) in tracked)


def _is_section(module: Module, parameter: ast.arg) -> bool:
    kind = ast.unparse(parameter.annotation) if parameter.annotation else ""
    first, _, rest = kind.removesuffix(" | None").partition(".")
    return f"{module.imports.get(first, '')}.{rest}".startswith(SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the file of every stay")
    given = parser.parse_args()
    for what, sections in (("the whole Config alone", False), ("and its sections", True)):
        walk = Walk(ROOT / "megatron_rl", sections)
        start = walk.function(START)
        assert start is not None, START
        visits = list(walk.visits(start, frozenset({PARAMETER})))
        stays = [file for place, file in enumerate(visits) if not place or visits[place - 1] != file]
        if given.show:
            print("\n".join(stays))
        print(f"{what}: {len(stays)} stays in {len(set(stays))} rooms, {len(stays) - len(set(stays))} returns")


if __name__ == "__main__":
    main()
