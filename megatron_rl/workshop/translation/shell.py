"""Reader of a shell script's command line: assignments, arrays, tests and cases are followed, nothing is executed.

What only a running shell could tell (a command's output, a branch that depends on the machine) is `Unset`: an error
where it is needed, and of no matter where it is not.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_rl.workshop.translation.keys import TranslationError, Unset
from megatron_rl.workshop.translation.shell_words import commands_of, expansions, pieces, words_of

ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
WHOLE_ARRAY = re.compile(r'"?\$(?:\{(\w+)\[[@*]\](?::?-)?\}|([@*]))"?')
BRACED = re.compile(r"^(\w+|@|\*)(?:\[[@*]\])?(?:(:?[-=+]|##?|%%?)(.*))?$", re.DOTALL)
OWN_FOLDER = re.compile(r"dirname.*(BASH_SOURCE|\$0|\$\{0)")
FROM_USER = ("HOME", "USER", "PWD")
DECLARING = ("export", "local", "readonly", "declare", "typeset", "-a", "-x", "-r")
NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
SUM = re.compile(r"[\d\s+*/%()-]{1,80}")


Word = str | Unset
Holds = bool | Unset


@dataclass
class Block:
    """An `if`, a `case` or a loop: whether its present branch is taken, and whether one before it was."""

    inside: Holds
    taken: bool = False
    subject: Word | None = None  # of a case


@dataclass
class Script:
    """A script up to where it has been read. `given`: variables that the user has set, which stay as they are."""

    folder: Path
    given: Mapping[str, str]
    values: dict[str, list[Word]] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    unread: bool = False  # whether it has taken over another script that is not here

    def read(self, text: str) -> Script:
        for raw in commands_of(text):
            head, rest = raw[0], raw[1:]
            if head == "if":
                holds = self.holds(rest)
                self.blocks.append(Block(holds, holds is True))
            elif head in ("for", "while", "until"):
                self.blocks.append(Block(Unset(" ".join(raw[:4]), (f"the loop `{' '.join(raw[:4])}`",))))
            elif head == "case":
                self.blocks.append(Block(False, subject=self.joined(rest[0] if rest else "")))
            elif head in ("elif", "else") and self.blocks:
                self._turn(True if head == "else" else self.holds(rest))
                self._run(rest if head == "else" else [])
            elif head in ("fi", "done", "esac") and self.blocks:
                self.blocks.pop()
            elif raw[-1] == ")" and self.blocks and self.blocks[-1].subject is not None:
                self._turn(self._matches(raw[:-1]))
            elif head == ";;" and self.blocks:
                self.blocks[-1].inside = False
            else:
                self._run(rest if head in ("then", "do", "{", "}") else raw)
        return self

    def _turn(self, holds: Holds) -> None:
        """To the next branch of the block: taken where none before it was, or may have been."""
        block = self.blocks[-1]
        holds = False if block.taken else holds
        block.inside = block.inside if isinstance(block.inside, Unset) and holds is not False else holds
        block.taken |= block.inside is True

    def _matches(self, patterns: Sequence[str]) -> Holds:
        subject = self.blocks[-1].subject
        if isinstance(subject, Unset):
            return subject
        return any(fnmatchcase(subject or "", pattern.strip("\"'")) for pattern in patterns if pattern not in "(|")

    def _run(self, raw: Sequence[str], *, also: Holds = True) -> None:
        conditions = [*(block.inside for block in self.blocks), also]
        if not raw or any(holds is False for holds in conditions):
            return
        unsure = next((holds for holds in conditions if isinstance(holds, Unset)), None)
        words = list(raw)
        if words[0] in ("[", "[["):
            return self._run_if(words)
        while words and words[0] in DECLARING:
            words = words[1:]
        while words and (found := ASSIGNMENT.match(words[0])):
            name, more, value = found.groups()
            self._assign(name, value, bool(more), unsure)
            words = words[1:]
        if words and words[0] in ("source", ".") and len(words) > 1:
            self._source(self.joined(words[1]))
        elif words and unsure is None:
            self.commands.append([word for raw_word in words for word in self.expanded(raw_word)])

    def _run_if(self, words: Sequence[str]) -> None:
        """`[ test ] && one || other`."""
        starts = [place + 1 for place, word in enumerate(words) if word in ("&&", "||")]
        actions = [start for start in starts if words[start : start + 1] not in (["["], ["[["], ["!"])]
        if actions:
            holds = self.holds(words[: actions[0] - 1])
            for start, end in zip(actions, [*(start - 1 for start in actions[1:]), len(words)], strict=True):
                inverted = words[start - 1] == "||" and isinstance(holds, bool)
                self._run(words[start:end], also=(not holds) if inverted else holds)

    def _assign(self, name: str, value: str, more: bool, unsure: Unset | None) -> None:
        if name in self.given:
            return
        if unsure is not None:
            array = "[@]" if value.startswith("(") else ""
            found: list[Word] = [Unset(f"${{{name}{array}}}", unsure.names)]
        elif value.startswith("(") and value.endswith(")"):
            found = [word for raw in words_of(value[1:-1]) for word in self.expanded(raw)]
        else:
            found = [_named(self.joined(value), name)]
        self.values[name] = [*self.values.get(name, []), *found] if more else found

    def _source(self, path: Word) -> None:
        if isinstance(path, str) and (self.folder / path).is_file():
            self.read((self.folder / path).read_text())
        else:
            self.unread = True

    def joined(self, raw: str) -> Word:
        """One word, whatever spaces its variables hold."""
        words = self.expanded(raw, split=False)
        return words[0] if words else ""

    def expanded(self, raw: str, split: bool = True) -> list[Word]:
        """The words that one word becomes."""
        if whole := WHOLE_ARRAY.fullmatch(raw):
            name = whole[1]
            unset: list[Word] = [Unset(f"${{{name}[@]}}", (name,))]
            return list(self.values.get(name, unset if self.unread else [])) if name else []
        text, spaced, quoted = "", False, False
        missing: list[str] = []
        for kind, inner in pieces(raw):
            value = self._substituted(inner, missing) if kind in ('"', "") else inner
            text += value
            quoted |= kind != ""
            spaced |= kind == "" and len(value.split()) > 1
        if missing:
            return [Unset(raw.replace('"', ""), tuple(dict.fromkeys(missing)))]
        return list(text.split()) if spaced and split else [text] if text or quoted else []

    def _substituted(self, text: str, missing: list[str]) -> str:
        found = ""
        for literal, expansion in expansions(text):
            found += literal
            if expansion.startswith("$(("):
                found += self._sum(expansion[3:-2], missing)
            elif expansion.startswith(("$(", "`")):
                own = OWN_FOLDER.search(expansion)
                found += str(self.folder) if own else ""
                missing += [] if own else [expansion]
            elif expansion:
                found += self._variable(expansion[1:].removeprefix("{").removesuffix("}"), missing)
        return found

    def _variable(self, text: str, missing: list[str]) -> str:
        braced = BRACED.match(text)
        if not braced:
            missing.append(f"${{{text}}}")
            return ""
        name, how, other = braced[1], braced[2], braced[3] or ""
        words: Sequence[Word] | None = [self.given[name]] if name in self.given else self.values.get(name)
        if words is None and name in FROM_USER and name in os.environ:
            words = [os.environ[name]]
        if words is None and (name.isdigit() or name in "@*"):
            words = []
        unset = [one for word in words or () if isinstance(word, Unset) for one in word.names]
        value = " ".join(map(str, words or ()))
        if how and how[-1] in "-=" and (words is None or (not value and ":" in how)):
            value = self._plain(other, missing)
            if how[-1] == "=" and not missing:
                self.values[name] = [value]
            return value
        if how and how[-1] == "+":
            return self._plain(other, missing) if value or (words and ":" not in how) else ""
        missing += [name] if words is None else unset
        if how in ("#", "##") and other == "*/":
            return value.rsplit("/", 1)[-1] if how == "##" else value.split("/", 1)[-1]
        return value.removesuffix(other) if how in ("%", "%%") else value

    def _plain(self, raw: str, missing: list[str]) -> str:
        return "".join(self._substituted(one, missing) if kind in ('"', "") else one for kind, one in pieces(raw))

    def _sum(self, text: str, missing: list[str]) -> str:
        plain = re.sub(
            r"[A-Za-z_]\w*", lambda found: self._variable(found[0], missing), self._substituted(text, missing)
        )
        if missing or not SUM.fullmatch(plain) or "**" in plain:
            missing += [] if missing else [f"$(({text}))"]
            return ""
        return str(int(eval(plain.replace("/", "//"), {"__builtins__": {}})))  # digits, signs and parentheses alone

    def holds(self, condition: Sequence[str]) -> Holds:
        """Whether a test holds; `Unset` where a running shell would have to say."""
        for place, word in enumerate(condition):
            if word in ("&&", "||"):
                both = [self.holds(condition[:place]), self.holds(condition[place + 1 :])]
                decides = word == "||"
                if any(one is decides for one in both):
                    return decides
                return next((one for one in both if isinstance(one, Unset)), not decides)
        parts = [part for part in condition if part not in ("{", "}")]
        if parts[:1] == ["!"]:
            inner = self.holds(parts[1:])
            return inner if isinstance(inner, Unset) else not inner
        if len(parts) < 3 or parts[0] not in ("[", "[["):
            return Unset(" ".join(condition), (f"`{' '.join(condition)}`",))
        words = [self.joined(part) for part in parts[1:-1]]
        unset = next((word for word in words if isinstance(word, Unset)), None)
        return unset if unset is not None else _test([str(word) for word in words])


def _named(word: Word, variable: str) -> Word:
    """What a command's output would have been is asked for by the name of its variable."""
    if isinstance(word, str) or all(re.fullmatch(r"\w+", name) for name in word.names):
        return word
    return Unset(word.text, (variable,))


def _test(words: list[str]) -> Holds:
    if words[:1] == ["!"]:
        inner = _test(words[1:])
        return inner if isinstance(inner, Unset) else not inner
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return (words[0] == words[2]) == (words[1] != "!=")
    if len(words) == 3 and words[1] in NUMBERS and all(re.fullmatch(r"-?\d+", words[place]) for place in (0, 2)):
        return NUMBERS[words[1]](int(words[0]), int(words[2]))
    return Unset(" ".join(words), (f"`[ {' '.join(words)} ]`",))


def command_line(path: Path, text: str, entry: str, given: Mapping[str, str]) -> list[Word]:
    """The arguments behind the word that starts the training: of the only command of the script that does."""
    found: list[list[Word]] = []
    for command in Script(path.parent, given).read(text).commands:
        names = [place for place, word in enumerate(command) if isinstance(word, str) and re.search(entry, word)]
        if names:
            started_by = str(command[names[-1]]).rsplit("/", 1)[-1]
            found.append([f"started_by={started_by}", *command[names[-1] + 1 :]])
    if len(found) != 1:
        which = "no command" if not found else f"{len(found)} commands"
        raise TranslationError(f"{path}: {which} with a word like {entry}, which starts the training; leave one")
    return found[0]


def commands_with(text: str, entry: str) -> Iterator[str]:
    """The lines of a text that hold such a command, with those that go on."""
    for lines in re.findall(r"(?:.*\\\n)*.*", text):
        if any(re.search(entry, word) for word in lines.split()):
            yield lines
