"""Variables and words of a shell script: expansions, as far as they are known before it runs."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from loadgauge.core.base.errors import refuse
from loadgauge.job_files.reading.shell_words import DEEPEST, Piece, Text, Token, closing

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
"""Operators of `$((...))`, which divides as whole numbers."""
LARGEST, LONGEST, MOST_LETTERS = 10**12, 60_000, 3_000_000
"""A number, letters of a value, letters of all values."""
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]=]*\])?(\+?)=")
UNSET = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9]|\{(?:[A-Za-z_]\w*|[0-9]+)\})")
EXPANSION = re.compile(r"\$\{([#!]?)([A-Za-z_]\w*|[0-9@*#?])(?:\[([^\]]*)\])?(.*)\}", re.DOTALL)

Value = Text | list[Text]


class Word(NamedTuple):
    """A word of a command: its `text`, and `raw` as spelled from `start` to `end` (-1: in no place of the file); `first`: of
    a line or of a command."""

    start: int
    end: int
    text: str
    first: bool = False
    raw: str = ""


class Values:
    """Holds what variables hold, and what words with them become.

    values, arguments: of the variables and of the positions; said: what a command whose output is taken has printed
    """

    def __init__(self, source: str, outside: Mapping[str, str], file: str) -> None:
        self.source, self.file = source, file
        self.values: dict[str, Value] = {name: plain(value) for name, value in outside.items()}
        self.arguments: list[Text] = []
        while str(len(self.arguments) + 1) in self.values:
            self.arguments.append(self.values[str(len(self.arguments) + 1)])  # type: ignore[arg-type]
        self.whole: dict[tuple[int, int, str], tuple[Piece, ...]] = {}
        self.text = Text([])
        self.letters = 0

    def output(self, script: str) -> Value | None:
        """Return what `$(...)` prints; None where that is not known."""
        raise NotImplementedError

    def _text(self, word: Word) -> Text:
        literal = word.end - word.start == len(word.text) and word.start >= 0
        return Text([Piece(word.text, word.start, word.end)]) if literal else Text([Piece(word.text, -1, -1)])

    def _pieces(self, word: Word) -> tuple[Piece, ...]:
        return self.whole.get((word.start, word.end, word.text), self._text(word).pieces)

    def words_in(self, text: Text) -> Iterator[Word]:
        """The words of a value that is a list of options."""
        for part in split_words(text):
            start, end = self._span(part)
            yield Word(start, end, Text(part).text, False, self.source[start:end] if start >= 0 else "")

    def _assign(self, token: Token) -> None:
        match = ASSIGNED.match(token.text)
        if match is None:
            return
        name = match[1]
        value: Value
        if token.kind == "array":
            value = [Text(field) for word in token.words for field in self._fields(word)]
        else:
            value = Text(self._expanded(self.text, token.start + match.end(), token.end))
        before = self.values.get(name)
        if match[2] and isinstance(value, Text):
            value = [*(before if isinstance(before, list) else ()), plain(f"{match[2]}={value.text}".replace('"', ""))]
        elif match[3]:
            if isinstance(before, list) or isinstance(value, list):
                left = before if isinstance(before, list) else [before] if before is not None and before.text else []
                value = [*left, *(value if isinstance(value, list) else [value])]
            elif before is not None:
                value = Text([*before.pieces, *value.pieces])
        self._set(name, value)

    def _set(self, name: str, value: Value) -> None:
        if isinstance(value, Text):
            self.letters += len(value.text)
            refuse(
                len(value.text) > LONGEST or self.letters > MOST_LETTERS, f"sets {name} to more than {LONGEST} letters"
            )
            if name in self.values and UNSET.fullmatch(value.text):
                return  # set where the script is started, as `NAME=$1` is
        self.values[name] = value

    def _joined(self, token: Token) -> str:
        return Text(self._expanded(self.text, token.start, token.end)).text

    def _words(self, token: Token) -> Iterator[Word]:
        """The words that a word of the script becomes; a quoted "--flag value" those inside."""
        fields = self._fields(token)
        whole = self.text.part(token.start, token.end)
        for field in fields:
            text = Text(field)
            start, end = self._span(field)
            if (
                len(fields) == 1
                and whole[0].start >= 0
                and (not field or whole[0].start <= field[0].start < whole[-1].end)
            ):
                start, end = whole[0].start, whole[-1].end
            self.whole[start, end, text.text] = tuple(field)
            if len(fields) == 1 and re.match(r"\s*--[A-Za-z][\w.-]*\s", text.text):
                yield from self.words_in(text)
            else:
                yield Word(start, end, text.text, False, self.source[start:end] if start >= 0 else text.text)

    def _span(self, pieces: list[Piece]) -> tuple[int, int]:
        """Where pieces that follow each other are written; -1 where they do not."""
        places = [position for piece in pieces for position in (piece.start, piece.end)]
        return (places[0], places[-1]) if places and places[0] >= 0 and places == sorted(places) else (-1, -1)

    def _fields(self, token: Token) -> list[list[Piece]]:
        """A word as the fields that it is split into."""
        fields: list[list[Piece]] = [[]]
        quoted = False
        text, index = self.text.text, token.start
        while index < token.end:
            letter = text[index]
            end = min(token.end, closing(text, index) if letter in "\\'\"`$" else self._plain_end(index, token.end))
            if letter in "'\"" and not (
                letter == '"' and re.fullmatch(r'"\$\{?(?:@|\w+\[@\]).*"', text[index:end], re.DOTALL)
            ):
                quoted = True
                fields[-1] += self._expanded(self.text, index, end)
            elif letter in '"$':
                inner = text[index:end].strip('"')
                position = index + (letter == '"')
                value = self._value(inner, position, position + len(inner))
                parts = value if isinstance(value, list) else [value]
                whole = letter == '"' or (not isinstance(value, list) and value.text == inner)
                split = [piece for part in parts for piece in ([list(part.pieces)] if whole else split_words(part))]
                blank = not isinstance(value, list) and value.text[:1].isspace() and bool(fields[-1])
                if blank:
                    fields.append([])
                fields[-1] += split[0] if split else []
                fields += split[1:]
            else:
                fields[-1] += self._expanded(self.text, index, end)
            index = end
        return [field for field in fields if field or (quoted and len(fields) == 1)]

    def _plain_end(self, start: int, end: int) -> int:
        match = re.compile(r"[^\\'\"`$]+").match(self.text.text, start, end)
        return start + 1 if match is None else match.end()

    def _expanded(self, text: Text, start: int, end: int, within: bool = False) -> list[Piece]:
        """The pieces of a part of a text, without its quotes and with its expansions."""
        pieces: list[Piece] = []
        index = start
        before, self.text = self.text, text
        while index < end:
            letter = text.text[index]
            if letter == "'" and not within:
                stop = min(end, closing(text.text, index))
                pieces += text.part(index + 1, max(index + 1, stop - 1))
            elif letter == '"' and not within:
                stop = min(end, closing(text.text, index))
                pieces += self._expanded(text, index + 1, max(index + 1, stop - 1), True)
            elif letter == "\\":
                stop = min(end, index + 2)
                escaped = text.text[index + 1 : stop]
                position = text.part(index, stop)
                if escaped == "\n":
                    pass
                elif within and escaped not in ('"', "$", "`", "\\"):
                    pieces += position
                else:
                    pieces.append(Piece(escaped, position[0].start, position[-1].end))
            elif letter in "$`":
                stop = min(end, closing(text.text, index))
                value = self._value(text.text[index:stop], index, stop)
                if isinstance(value, list):
                    for part in value:
                        pieces += [*part.pieces, Piece(" ", -1, -1)]
                    pieces = pieces[:-1] if value else pieces
                else:
                    pieces += value.pieces
            else:
                match = re.compile(r"[^\\\"`$]+" if within else r"[^\\'\"`$]+").match(text.text, index, end)
                stop = index + 1 if match is None else match.end()
                pieces += text.part(index, stop)
            index = max(stop, index + 1)
        self.text = before
        return pieces

    def _value(self, raw: str, start: int, end: int) -> Value:
        """Return what an expansion becomes; as it is spelled where that is not known. A plain value is where it is used."""
        self.letters += len(raw)
        refuse(self.letters > MOST_LETTERS, "is too much to expand")
        position = self.text.part(start, end)
        first, last = (position[0].start, position[-1].end) if position else (-1, -1)
        value = self._looked_up(raw)
        if value is None:
            return Text([Piece(raw, first, last)])
        if isinstance(value, list):
            return value
        self.letters += len(value.text)
        if re.search(r"\s", value.text) or value.text.startswith("--") or first < 0:
            return value
        return Text([Piece(value.text, first, last)])

    def _looked_up(self, raw: str) -> Value | None:
        if raw.startswith("$(("):
            inner = Text(self._expanded(plain(raw[3:-2]), 0, len(raw) - 5)).text
            number = _arithmetic(inner, self._plainly)
            return None if number is None else plain(str(number))
        if raw.startswith(("$(", "`")):
            return self.output(raw[2:-1] if raw[0] == "$" else raw[1:-1])
        match = EXPANSION.fullmatch(raw)
        if match is None:
            return self._named(raw[1:])
        prefix, name, index, change = match.groups()
        value = self._named(name, index)
        if prefix == "#":
            listed = value if isinstance(value, list) else None if value is None else value.text
            return None if listed is None or change else plain(str(len(listed)))
        if prefix == "!":
            if isinstance(value, list):
                return [plain(str(number)) for number in range(len(value))]
            return None if value is None else self._named(value.text)
        return self._changed(raw, name, value, change) if change else value

    def _named(self, name: str, index: str | None = None) -> Value | None:
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return plain(str(len(self.arguments)))
        if name in ("0", "BASH_SOURCE") and self.file:
            return plain(f"./{Path(self.file).name}")
        if name.isdecimal() and len(name) < 4:
            return self.arguments[int(name) - 1] if 0 < int(name) <= len(self.arguments) else None
        value = self.values.get(name)
        if index is None:
            return (value[0] if value else Text([])) if isinstance(value, list) else value
        if index in ("@", "*"):
            return value if isinstance(value, list) else [] if value is None else [value]
        key = Text(self._expanded(plain(index), 0, len(index))).text
        number = _arithmetic(key, self._plainly)
        if isinstance(value, list):
            for element in value:
                if element.text.startswith(f"[{key}]="):
                    return plain(element.text[len(key) + 3 :])
            return value[number] if number is not None and -len(value) <= number < len(value) else None
        return value if number == 0 else None

    def _plainly(self, name: str) -> str:
        value = self._named(name)
        if not isinstance(value, Text):
            raise KeyError(name)
        return value.text

    def _changed(self, raw: str, name: str, value: Value | None, change: str) -> Value | None:
        """`${NAME...}` with a default, another value, a part taken off, or other letters."""
        colon, sign = change[0] == ":", change[1:2] if change[0] == ":" else change[0]
        rest = change[1 + colon :]
        if isinstance(value, list):
            number = re.fullmatch(r":\s*(\d{1,4})(?::(\d{1,4}))?", change)
            if number and name in "@*":  # the first argument is number 1
                return value[max(0, int(number[1]) - 1) :][: int(number[2]) if number[2] else None]
            return value[int(number[1]) :][: int(number[2]) if number[2] else None] if number else value
        listed = None if value is None else value.text
        if sign in "-=+?" and sign:
            missing = listed is None or (colon and listed == "") or bool(UNSET.fullmatch(listed))
            if sign == "+":
                return Text([]) if missing else Text(self._expanded(plain(rest), 0, len(rest)))
            if not missing:
                return value
            if sign == "?":
                return None
            default = Text(self._expanded(plain(rest), 0, len(rest)))
            if sign == "=":
                self._set(name, default)
            return default
        if listed is None or re.search(r"[$`]", listed):
            return None
        if sign == "/" and not colon:
            old, new = [*re.split(r"(?<!\\)/", rest.lstrip("/#%"), maxsplit=1), ""][:2]
            old, new = (Text(self._expanded(plain(part), 0, len(part))).text for part in (old, new))
            return plain(listed.replace(old, new, -1 if rest[:1] == "/" else 1)) if old and "*" not in old else None
        pattern = Text(self._expanded(plain(rest), 0, len(rest))).text
        if sign and sign in "#%" and not colon:
            return plain(_taken_off(listed, pattern, sign))
        if change in ("^^", ",,"):
            return plain(listed.upper() if change == "^^" else listed.lower())
        number = re.fullmatch(r":\s*(\d{1,4})(?::(\d{1,4}))?", change)
        return plain(listed[int(number[1]) :][: int(number[2]) if number[2] else None]) if number else None


def plain(text: str) -> Text:
    return Text([Piece(text, -1, -1)])


def settled(text: str) -> str | None:
    """A value in a test: what is set nowhere is empty, and what is not known None."""
    rest = UNSET.sub("", text)
    return None if re.search(r"[$`]", rest) else rest


def split_words(text: Text) -> list[list[Piece]]:
    """The words of an unquoted value; one with quotes inside is one word, for those who mean to run it again."""
    words: list[list[Piece]] = []
    index = 0
    while index < len(text.text):
        if text.text[index].isspace():
            index += 1
            continue
        parts: list[Piece] = []
        while index < len(text.text) and not text.text[index].isspace():
            letter = text.text[index]
            end = closing(text.text, index) if letter in "'\"" else index + 1
            if end > index + 1 and text.text[end - 1] == letter:
                parts += text.part(index + 1, end - 1)
            else:
                match = re.compile(r"[^\s'\"]+").match(text.text, index)
                end = index + 1 if match is None else match.end()
                parts += text.part(index, end)
            index = end
        words.append(parts)
    return words


def _taken_off(text: str, pattern: str, sign: str) -> str:
    """A text without the beginning (`#`) or the end (`%`) that a pattern has; of a doubled sign the longest."""
    longest = pattern[:1] == sign
    pattern = pattern[longest:][:200]
    cuts: Iterable[int] = range(min(len(text), 1000) + 1)
    if sign == "#":
        cuts = reversed(list(cuts)) if longest else cuts
        return next((text[cut:] for cut in cuts if fnmatchcase(text[:cut], pattern)), text)
    cuts = cuts if longest else reversed(list(cuts))
    return next((text[:cut] for cut in cuts if fnmatchcase(text[cut:], pattern)), text)


def _arithmetic(text: str, value_of: Callable[[str], str]) -> int | None:
    """The value of an expression of whole numbers and names; None where it has anything else."""
    try:
        return _worked_out(ast.parse(text.strip()[:500], mode="eval").body, value_of, 0)
    except (ValueError, SyntaxError, ZeroDivisionError, KeyError, TypeError, RecursionError, MemoryError):
        return None


def _worked_out(node: ast.expr, value_of: Callable[[str], str], depth: int) -> int:
    if depth > DEEPEST:
        raise ValueError
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = int(value_of(node.id))
    elif isinstance(node, ast.BinOp):
        left, right = (_worked_out(side, value_of, depth + 1) for side in (node.left, node.right))
        value = OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_worked_out(node.operand, value_of, depth + 1)
    else:
        raise ValueError
    if abs(value) > LARGEST:
        raise ValueError
    return value


def quotient(text: str) -> str:
    """Return what `expr 32 / 4 / 2` prints, where it is of whole numbers, times and divided by; else nothing."""
    first, *rest = text.split() or [""]
    if not first.isdecimal() or len(text) > 60 or len(rest) % 2:
        return ""
    result = int(first)
    for sign, word in zip(rest[::2], rest[1::2], strict=True):
        if sign not in ("*", "/") or not word.isdecimal() or (sign == "/" and int(word) == 0):
            return ""
        result = result * int(word) if sign == "*" else result // int(word)
    return str(result)
