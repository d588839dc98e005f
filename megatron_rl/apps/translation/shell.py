"""Reader of a training command in a shell script: follows assignments, tests, cases; runs nothing.

A value known only to a running shell (a command's output, a branch that depends on the machine) is
`Unset`: an error where it is needed, ignored where it is not.
"""

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_rl.apps.translation.keys import TranslationError, Unset
from megatron_rl.apps.translation.reading import Reading

HERE_DOCUMENT = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1(.*\n)(?:.*\n)*?[ \t]*\2[ \t]*(?=\n|\Z)"
)
TOKEN = re.compile(
    r"(?P<gap>(?:[^\S\n]|\\[ \t]*\r?(?:\n|\Z)|(?<!\S)#[^\n]*|\d*[<>]&[\d-]+)+)"
    r"|(?P<redirection>(?:\d+|&)?(?:<<<|[<>]{1,2}\|?)[ \t]*)"
    r"|(?P<operator>\n|;;|&&|\|\||[;&|()])"
)
WORD_ENDS = re.compile(r"[\s;&|<>()]|\\[ \t]*\r?(?:\n|\Z)")
PIECE = re.compile(r"\\.|`[^`]*`|'[^']*'|\$\(|\$\{|\$(?:\w+|[@*#?!$-])|.", re.DOTALL)
CLOSING = {"$(": ")", "${": "}", "(": ")", "{": "}", '"': '"', "'": "'", "`": "`"}
SEPARATORS = ("\n", ";", "&", ";;", ")")
OPERATORS = (*SEPARATORS, "&&", "||", "|", "(")
SPLIT = "\0"  # a space that comes out of an expansion, and parts words

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
WHOLE_ARRAY = re.compile(r'"?\$(?:\{(\w+)\[[@*]\](?::?-)?\}|([@*]))"?')
BRACED = re.compile(r"(\w+|@|\*)(?:\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
OWN_FOLDER = re.compile(r"dirname.*(BASH_SOURCE|\$0|\$\{0)")
FROM_USER = ("HOME", "USER", "PWD")
DECLARING = ("export", "local", "readonly", "declare", "typeset", "-a", "-x", "-r")
NUMBERS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
INTEGER = re.compile(r"-?[0-9]{1,18}")
SUM = re.compile(r"[0-9\s+*/%()-]{1,200}")
SIGNS: dict[Any, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
# characters of a word or a command in which the name of a program is looked for
LONGEST_PROGRAM = 200

Word = str | Unset
# how far a test holds, or a command takes place: 0, 1, or between them where only a running shell
# could tell; `and` is their minimum, `or` their maximum
Holds = float
PERHAPS = 0.5


def tokens(text: str) -> Iterator[str]:
    """Words, still quoted, and operators; redirections and here-documents are left out."""
    text = HERE_DOCUMENT.sub(r"\3", text)
    place = 0
    while place < len(text):
        found = TOKEN.match(text, place)
        place = found.end() if found else place
        if found and found["operator"]:
            yield found[0]
        elif not found or found["redirection"]:
            start = place
            while place < len(text) and not WORD_ENDS.match(text, place):
                place = span(text, place)
            if not found:
                yield text[start:place]


def span(text: str, start: int, within: str = "") -> int:
    """Behind the piece that begins here: quoted, an expansion, or one character; `within`: what
    closes those around.
    """
    found = PIECE.match(text, start)
    if found is None or (text[start] == "'" and '"' in within):
        return start + 1
    piece = found[0]
    place = found.end()
    closing = CLOSING.get(found[0])
    if closing is None or (piece in ("(", "{") and closing != within[-1:]):
        return place
    within = closing if piece == "$(" else within + closing
    while text[place : place + 1] != closing:
        if place >= len(text):
            raise TranslationError(
                f"line {text.count(chr(10), 0, start) + 1}: a {piece} that nothing closes"
            )
        place = span(text, place, within)
    return place + 1


def shell_sum(text: str) -> int | None:
    """The value of a sum of whole numbers; None where a shell has none, or may have another one."""
    if not SUM.fullmatch(text):
        return None
    try:
        return _value(ast.parse(f"({text})", mode="eval").body)
    except (SyntaxError, KeyError, ArithmeticError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right):
            one = _value(left)
            other = _value(right)
            if isinstance(sign, ast.Div | ast.Mod) and min(one, other) < 0:
                raise ArithmeticError  # rounded otherwise than by a shell
            value = SIGNS[type(sign)](one, other)
        case _:
            raise KeyError
    if value.bit_length() > 63:
        raise OverflowError
    return value


@dataclass
class Script:
    """A script up to the place read so far. `given`: variables set by the user, which are kept.

    Commands read under `live` are executed, are not, or may be: in a loop, behind an unknown test.
    """

    folder: Path
    given: Mapping[str, str]
    names: set[str] = field(default_factory=set)  # of variables that it expands
    reading: Reading = field(default_factory=Reading)
    values: dict[str, list[Word]] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    unread: bool = False  # whether it has taken over another script that is not here
    _tokens: list[str] = field(default_factory=list)  # the next one is the last

    def __post_init__(self) -> None:
        self.given = {name: os.environ[name] for name in FROM_USER if name in os.environ} | dict(
            self.given
        )
        self.values |= {name: [*text.split()] or [""] for name, text in self.given.items()}

    def read(self, text: str, live: Holds = 1) -> "Script":
        # here-documents, and the lines that may end them
        self.reading.spend(text.count("<<") * text.count("\n"))
        outer = self._tokens
        self._tokens = list(tokens(text))[::-1]
        self._statements(live)
        self._tokens = outer
        return self

    def _take(self, *which: str) -> str:
        """The next token, if it is one of these."""
        if self._tokens and self._tokens[-1] in which:
            return self._tokens.pop()
        return ""

    def _until(self, end: str) -> list[str]:
        """The tokens before this one, which goes with them."""
        found = []
        while self._tokens and (token := self._tokens.pop()) != end:
            found.append(token)
        return found

    def _statements(self, live: Holds, *ends: str, asked: bool = False) -> Holds:
        holds: Holds = 1
        while self._tokens and self._tokens[-1] not in ends:
            if not self._take(*SEPARATORS):
                holds = self._list(live, asked)
        return holds

    def _list(self, live: Holds, asked: bool) -> Holds:
        """Read `one && two || three`; `asked`: a test depends on the success of plain commands."""
        holds = self._one(live, asked)
        while sign := self._take("&&", "||", "|"):
            while self._take("\n"):
                pass
            then = {"&&": holds, "||": 1 - holds, "|": 1}[sign]
            second = self._one(min(live, then), asked)
            holds = {
                "&&": min(holds, second),
                "||": max(holds, second),
                "|": second,
            }[sign]
        return holds

    def _one(self, live: Holds, asked: bool) -> Holds:
        if self._take("!"):
            return 1 - self._one(live, asked)
        if bracket := self._take("[", "[["):
            return self._test(self._until(bracket.replace("[", "]")))
        if bracket := self._take("(", "{"):
            end = CLOSING[bracket]
            holds = self._statements(live, end, asked=asked)
            self._take(end)
            return holds
        if self._take("if"):
            self._if(live)
        elif self._take("case"):
            self._case(live)
        elif self._take("for", "while", "until"):
            self._until("do")
            self._statements(min(live, PERHAPS), "done")
            self._take("done")
        else:
            return self._command(live, asked)
        return 1

    def _if(self, live: Holds) -> None:
        holds = self._statements(live, "then", asked=True)
        self._take("then")
        self._statements(min(live, holds), "elif", "else", "fi")
        live = min(live, 1 - holds)
        if self._take("elif"):
            self._if(live)
        elif self._take("else", "fi") == "else":
            self._statements(live, "fi")
            self._take("fi")

    def _case(self, live: Holds) -> None:
        subject = self.joined("".join(self._until("in")))
        while self._tokens and not self._take("esac"):
            if self._take(*SEPARATORS):
                continue
            patterns = [token.strip("\"'") for token in self._until(")") if token not in ("(", "|")]
            holds: Holds = PERHAPS
            if isinstance(subject, str):
                self.reading.spend((len(subject) + 100) * len("".join(patterns)))
                holds = any(fnmatchcase(subject, one) for one in patterns)
            self._statements(min(live, holds), ";;", "esac")
            live = min(live, 1 - holds)

    def _command(self, live: Holds, asked: bool) -> Holds:
        words: list[str] = []
        arrays: dict[str, list[str]] = {}
        while self._tokens and self._tokens[-1] not in OPERATORS:
            words.append(self._tokens.pop())
            if words[-1].endswith("=") and self._take("("):
                arrays[words[-1]] = [word for word in self._until(")") if word != "\n"]
        if not words:
            self._tokens.pop()
        self.reading.spend(values=len(words))
        if not live:
            return 1
        while words and words[0] in DECLARING:
            words.pop(0)
        while words and (found := ASSIGNMENT.fullmatch(words[0])):
            name, more, value = found.groups()
            self._assign(name, more, value, arrays.get(words.pop(0)), live)
        if len(words) > 1 and words[0] in ("source", "."):
            script = self.folder / str(self.joined(words[1]))
            if script.exists():
                self.read(self.reading.read(script), live)
            else:
                self.unread = True
        elif words and live == 1:
            self.commands.append([word for raw in words for word in self.expanded(raw)])
        return PERHAPS if words and asked else 1

    def _assign(
        self, name: str, more: str, value: str, array: list[str] | None, live: Holds
    ) -> None:
        if name in self.given:
            return
        if live == PERHAPS:
            whole = "" if array is None else "[@]"
            found: list[Word] = [Unset(f"${{{name}{whole}}}", (name,))]
        elif array is not None:
            found = [word for raw in array for word in self.expanded(raw)]
        else:
            word = self.joined(f'"${{{name}-}}"{value}' if more else value)
            if isinstance(word, Unset) and not all(map(str.isidentifier, word.names)):
                word = Unset(word.text, (name,))  # for what a command's output would have been
            found = [word]
        if more and array is not None:
            self.values.setdefault(name, []).extend(found)
        else:
            self.values[name] = found

    def joined(self, raw: str, between: str = " ") -> Word:
        """Expand to one word, even if its variables hold spaces."""
        missing: list[str] = []
        text = self._text(raw, missing).replace(SPLIT, between)
        if missing:
            return Unset(raw.replace('"', ""), tuple(dict.fromkeys(missing)))
        return text

    def expanded(self, raw: str) -> list[Word]:
        """The words that one word becomes."""
        if whole := WHOLE_ARRAY.fullmatch(raw):
            name = whole[1] or "@"
            self.names.add(name)
            words = list(self.values.get(name, ()))
            if whole[1] and self.unread and name not in self.values:
                words = [Unset(f"${{{name}[@]}}", (name,))]
            self.reading.spend(len(str(words)), len(words))
            return words
        word = self.joined(raw, SPLIT)
        if isinstance(word, Unset):
            return [word]
        return [one for one in word.split(SPLIT) if one or "'" in raw or '"' in raw]

    def _text(self, raw: str, missing: list[str], quoted: bool = False) -> str:
        """Without its quotes and with what its expansions come to; `missing` gets the names of
        those not known.
        """
        self.reading.spend(len(raw))
        text = ""
        place = 0
        while place < len(raw):
            end = span(raw, place, '"' * quoted)
            piece = raw[place:end]
            place = end
            if len(piece) == 1:
                text += piece
            elif piece[0] == "'":
                text += piece[1:-1]
            elif piece[0] == '"':
                text += self._text(piece[1:-1], missing, quoted=True)
            elif piece[0] == "\\":
                text += piece if quoted and piece[1] not in '"\\$`\n' else piece[1:].strip("\n")
            elif piece.startswith("$(("):
                text += self._sum(piece[3:-2], missing)
            elif piece.startswith(("$(", "`")):
                if OWN_FOLDER.search(piece[:LONGEST_PROGRAM]):
                    text += str(self.folder)
                else:
                    missing.append(piece)
            else:
                name = piece[1:].removeprefix("{").removesuffix("}")
                value = self._variable(name, missing, quoted)
                text += value if quoted else re.sub(r"\s+", SPLIT, value)
        return text

    def _variable(self, text: str, missing: list[str], quoted: bool = False) -> str:
        braced = BRACED.fullmatch(text)
        if not braced:
            missing.append(f"${{{text}}}")
            return ""
        name, how, other = braced.groups(default="")
        self.names.add(name)
        words = self.values.get(name, [])
        value = " ".join(map(str, words))
        self.reading.spend(len(value))
        absent = not words or (not value and ":" in how)
        how = how.removeprefix(":")
        if how in ("", "?") or (how != "+" and not absent):
            unset = [one for word in words if isinstance(word, Unset) for one in word.names]
            self.reading.spend(values=len(unset))
            if name not in self.values and not (name.isdigit() or name in "@*"):
                unset = [name]
            missing += unset
            return value
        if how == "+" and absent:
            return ""
        value = self._text(other, missing, quoted).replace(SPLIT, " ")
        if how == "=" and not missing:
            self.values[name] = [value]
        return value

    def _sum(self, text: str, missing: list[str]) -> str:
        plain = self._text(text, missing, quoted=True)
        plain = re.sub(
            r"\b[A-Za-z_]\w*", lambda name: f"({self._variable(name[0], missing)})", plain
        )
        value = shell_sum(plain)
        if value is None and not missing:
            missing.append(f"$(({text}))")
        return str(value)

    def _test(self, parts: Sequence[str]) -> Holds:
        """Evaluate a test; `Unset` if it depends on a running shell."""
        for sign, joins in (("||", max), ("&&", min)):
            if sign in parts:
                place = parts.index(sign)
                return joins(self._test(parts[:place]), self._test(parts[place + 1 :]))
        if parts[:1] == ["!"]:
            return 1 - self._test(parts[1:])
        match [self.joined(part) for part in parts]:
            case ["-z" | "-n" as sign, str(word)]:
                return (word == "") == (sign == "-z")
            case [str(one), "=" | "==" | "!=" as sign, str(other)]:
                return (one == other) == (sign != "!=")
            case [str(one), str(sign), str(other)] if (
                sign in NUMBERS and INTEGER.fullmatch(one) and INTEGER.fullmatch(other)
            ):
                return bool(getattr(operator, sign[1:])(int(one), int(other)))
        return PERHAPS


def command_line(script: Script, text: str, entry: str) -> list[Word]:
    """Arguments of the script's only command that starts the training, after that word."""
    found: list[list[Word]] = []
    for command in script.read(text).commands:
        for place, word in reversed([*enumerate(command)]):
            if isinstance(word, str) and re.search(entry, word[-LONGEST_PROGRAM:]):
                found.append([f"started_by={Path(word).name}", *command[place + 1 :]])
                break
    if len(found) != 1:
        which = f"{len(found) or 'no'} commands with a word like {entry}"
        raise TranslationError(f"{which}, which starts the training; leave one")
    return found[0]
