"""Commands and words of a shell script, still quoted, and the pieces and expansions that words are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.workshop.translation.keys import TranslationError

GAP = re.compile(r"(?:[ \t\r]|\\[ \t]*\r?(?:\n|$)|(?<!\S)#[^\n]*)+")
OPERATOR = re.compile(r"\n|;;|&&|\|\||&>>?|<<<|<<-?|[<>]>?(?:&\d*-?)?|[;&|()]")
ENDS = " \t\r\n;&|<>()"
PLAIN = re.compile(r"\$(?:\w+|[@*#?!$-])")
ARRAY = re.compile(r"^[A-Za-z_]\w*\+?=$")
CLOSING = {"$(": ")", "${": "}", "(": ")", "{": "}"}
TESTS = ("if", "elif", "[", "[[", "while", "until")


def span(text: str, place: int) -> int:
    """Behind the piece that begins here: a quoted one, an expansion, or a single character."""
    first = text[place]
    if first == "\\":
        return min(place + 2, len(text))
    if first in "'`":
        end = text.find(first, place + 1)
        return len(text) if end < 0 else end + 1
    if first == '"':
        return _closed(text, place + 1, '"')
    if text[place : place + 2] in ("$(", "${"):
        return _closed(text, place + 2, CLOSING[text[place : place + 2]])
    if first == "$" and (plain := PLAIN.match(text, place)):
        return plain.end()
    return place + 1


def _closed(text: str, place: int, closing: str) -> int:
    while place < len(text) and text[place] != closing:
        if closing != '"' and text[place] == {")": "(", "}": "{"}[closing]:
            place = _closed(text, place + 1, closing)
        elif closing == '"' and text[place] == "'":
            place += 1
        else:
            place = span(text, place)
    return min(place + 1, len(text))


def pieces(word: str) -> Iterator[tuple[str, str]]:
    """What a word is put together from: its quote, ' or " or \\ or none, and what it holds."""
    place, bare = 0, ""
    while place < len(word):
        end = span(word, place)
        if word[place] in "'\"\\":
            yield from [("", bare)] if bare else []
            inner = word[place + 1 : end] if word[place] == "\\" else word[place + 1 : end - 1]
            yield word[place], re.sub(r'\\(?:\n|(["\\$`]))', r"\1", inner) if word[place] == '"' else inner
            bare = ""
        else:
            bare += word[place:end]
        place = end
    if bare:
        yield "", bare


def expansions(text: str) -> Iterator[tuple[str, str]]:
    """The text before each `$...`, and that."""
    place = start = 0
    while place < len(text):
        end = place + 1 if text[place] in "'\"" else span(text, place)
        if text[place] == "`" or (text[place] == "$" and end > place + 1):
            yield text[start:place], text[place:end]
            start = end
        place = end
    yield text[start:], ""


def words_of(text: str) -> list[str]:
    """The words of an array."""
    return [word for command in commands_of(text) for word in command]


def commands_of(text: str) -> Iterator[list[str]]:
    """Commands, each as its words; redirections and here-documents are left out."""
    command: list[str] = []
    place, document = 0, ""
    while place < len(text):
        if gap := GAP.match(text, place):
            place = gap.end()
        elif text[place] == "(" and command and ARRAY.match(command[-1]) and text[place - 1] == "=":
            end = _parenthesis(text, place)
            command[-1] += text[place:end]
            place = end
        elif found := OPERATOR.match(text, place):
            sign, place = found[0], found.end()
            if sign[0] in "<>" or sign.startswith("&>"):
                if command and command[-1].isdigit() and text[found.start() - 1].isdigit():
                    command.pop()  # a descriptor
                if not re.search(r"&\d", sign):
                    start = gap.end() if (gap := GAP.match(text, place)) else place
                    place = word_end(text, start)
                    document = text[start:place].strip("\"'") if sign in ("<<", "<<-") else document
                continue
            if sign in ("&&", "||") and command and command[0] in TESTS:
                command.append(sign)
                continue
            if sign == ")" or (sign == ";;"):
                yield [*command, sign]
            elif sign == "|" and command and command[0] not in ("case",) and _is_pattern(text, place):
                command.append(sign)
                continue
            elif command:
                yield command
            command = []
            if sign == "\n" and document:
                end_of = re.compile(rf"^\s*{re.escape(document)}\s*$", re.MULTILINE).search(text, place)
                place, document = end_of.end() if end_of else len(text), ""
        else:
            end = word_end(text, place)
            if end > len(text) or (text[place] in "\"'" and end == len(text) and text[-1] != text[place]):
                raise TranslationError(f"line {text.count(chr(10), 0, place) + 1}: a quote that nothing closes")
            if command in (["then"], ["else"], ["do"]):
                yield command
                command = []
            command.append(text[place:end])
            place = end
    if command:
        yield command


def _is_pattern(text: str, place: int) -> bool:
    """Whether what follows is another pattern of a case: a word, and a parenthesis that closes nothing."""
    return bool(re.match(r"[ \t]*[\w.*?\"'-]+[ \t]*(?:\||\))", text[place:]))


def word_end(text: str, place: int) -> int:
    while place < len(text) and text[place] not in ENDS:
        if text[place] == "\\" and re.match(r"[ \t]*\r?(\n|$)", text[place + 1 :]):
            break
        place = span(text, place)
    return place


def _parenthesis(text: str, place: int) -> int:
    """Behind the parenthesis that closes the one here; comments and quotes hold none."""
    depth = 0
    while place < len(text):
        if gap := GAP.match(text, place):
            place = gap.end()
            continue
        depth += (text[place] == "(") - (text[place] == ")")
        place = span(text, place)
        if not depth:
            break
    return place
