"""Words, operators and commands of a shell script, as a tree. Nothing is expanded here, and nothing is run."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from loadgauge.core.base.errors import ConfigError, refuse

MOST_WORDS, DEEPEST = 15_000, 40
"""Words of a script, and levels of what stands in each other."""
OPERATOR = re.compile(r";;&?|;&|&&|\|\||\|&|&>>|&>|<<<|<<-?|>>|>&|<&|>\||[;&|()<>\n]")
REDIRECTS = ("&>>", "&>", "<<<", "<<", "<<-", ">>", ">&", "<&", ">|", "<", ">")
ENDS = " \t\r\n;&|()<>"


class Piece(NamedTuple):
    """A text and where it is written, from `start` to `end`; -1 where that is in no place of the file."""

    text: str
    start: int
    end: int


class Text:
    """A string that knows where each part of it is written.

    >>> Text([Piece("ab", 10, 12), Piece("16", 20, 25)]).part(1, 3)
    (Piece(text='b', start=11, end=12), Piece(text='1', start=20, end=25))
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(piece for piece in pieces if piece.text)
        self.text = "".join(piece.text for piece in self.pieces)
        self.begins = [*accumulate((len(piece.text) for piece in self.pieces), initial=0)]

    def part(self, start: int, end: int) -> tuple[Piece, ...]:
        """The pieces from one index to another."""
        pieces: list[Piece] = []
        index = max(0, bisect_right(self.begins, start) - 1)
        while index < len(self.pieces) and self.begins[index] < end:
            piece, begin = self.pieces[index], self.begins[index]
            low, high = max(0, start - begin), min(len(piece.text), end - begin)
            literal = piece.end - piece.start == len(piece.text)
            span = (piece.start + low, piece.start + high) if literal else (piece.start, piece.end)
            pieces.append(Piece(piece.text[low:high], *span))
            index += 1
        return tuple(pieces)


def closing(text: str, start: int, depth: int = 0) -> int:
    """Where an expansion, a quoted text or a single letter that begins at an index ends.

    >>> closing("${A:-$(b 'c)' )}/d", 0), closing("'a b' c", 0)
    (16, 5)
    """
    letter = text[start]
    if letter == "\\":
        return min(len(text), start + 2)
    if letter in "'`":
        end = text.find(letter, start + 1)
        return len(text) if end < 0 else end + 1
    bracket = text[start + 1 : start + 2]
    if letter == '"':
        stop, index = '"', start + 1
    elif letter in "$<>" and bracket in ("{", "("):
        stop, index = {"{": "}", "(": ")"}[bracket], start + 2
    elif letter == "$":
        match = re.compile(r"[A-Za-z_]\w*|[0-9@#*?$!-]").match(text, start + 1)
        return start + 1 if match is None else match.end()
    else:
        return start + 1
    if depth > DEEPEST:
        return len(text)
    level = 1
    while index < len(text):
        inner = text[index]
        if inner == stop:
            level -= 1
            index += 1
            if level == 0:
                return index
        elif stop == ")" and inner == "(":
            level, index = level + 1, index + 1
        elif inner in "\\$`" or (inner in "\"'" and stop != '"'):
            index = closing(text, index, depth + 1)
        else:
            index += 1
    return len(text)


def word_end(text: str, start: int) -> int:
    """Where the word ends that begins at an index."""
    index = start
    while index < len(text) and text[index] not in ENDS:
        index = closing(text, index) if text[index] in "\\'\"`$" else index + 1
    return index


class Token(NamedTuple):
    """A word, an operator, a redirection, a here-document (its end where it is quoted) or an array with its `words` (`kind`)."""

    kind: str
    text: str
    start: int
    end: int
    words: tuple[Token, ...] = ()


def tokens(text: str) -> list[Token]:
    """The tokens of a script without comments and continued lines. Raises `ConfigError` for more than `MOST_WORDS`."""
    result: list[Token] = []
    pending: list[tuple[int, str, bool]] = []
    index, continued = 0, False
    while index < len(text):
        letter = text[index]
        joint = re.compile(r"\\[ \t]*\r?(?:\n|\Z)").match(text, index)
        if joint is not None:
            index, continued = joint.end(), True
            continue
        if letter in " \t\r":
            index += 1
            continue
        if letter == "#":
            end = text.find("\n", index)
            end = len(text) if end < 0 else end
            # A comment between continued lines ends them in a shell; those who write one mean that it does not.
            index = end + 1 if continued else end
            continue
        continued = False
        if len(result) > MOST_WORDS:
            raise ConfigError(f"has more than {MOST_WORDS} words")
        opened = not result or result[-1].kind == "op" or result[-1].text in ("if", "while", "for", "elif", "!")
        if letter == "(" and opened and text.startswith("((", index):
            end = text.find("))", index)
            end = len(text) if end < 0 else end + 2
            result.append(Token("word", text[index:end], index, end))
            index = end
            continue
        operator = None if text[index : index + 2] in ("<(", ">(") else OPERATOR.match(text, index)
        if operator is None:
            end = closing(text, index) if text[index : index + 2] in ("<(", ">(") else word_end(text, index)
            if text[index:end] == "[[" and opened:
                match = re.compile(r"\s\]\](?=[\s;&|)]|\Z)").search(text, end)
                end = len(text) if match is None else match.end()
            result.append(Token("word", text[index:end], index, max(end, index + 1)))
            index = max(end, index + 1)
            continue
        index = operator.end()
        if operator[0] not in REDIRECTS:
            result.append(Token("op", operator[0], operator.start(), index))
            if letter == "\n":
                for position, delimiter, quoted in pending:
                    match = re.compile(rf"^\t*{re.escape(delimiter)}[ \t]*\r?$", re.MULTILINE).search(text, index)
                    end = len(text) if match is None else match.start()
                    result[position] = Token("doc", delimiter if quoted else "", index, end)
                    index = len(text) if match is None else match.end()
                pending = []
            continue
        if result and result[-1].kind == "word" and result[-1].text.isdigit() and result[-1].end == operator.start():
            result.pop()
        while index < len(text) and text[index] in " \t":
            index += 1
        end = closing(text, index) if text[index : index + 2] in ("<(", ">(") else word_end(text, index)
        if operator[0] in ("<<", "<<-"):
            plain = re.sub(r"[\"'\\]", "", text[index:end])
            pending.append((len(result), plain, plain != text[index:end]))
        result.append(Token("redirect", operator[0], index, end))
        index = end
    return result


Node = tuple[Any, ...]
"""A kind (`cmd`, `pipe`, `if`, `for`, `while`, `case`, `function`, `group`) and its parts."""
Listing = list[tuple[str, Node]]
"""Commands, each after the operator before it."""
RESERVED = ("then", "fi", "elif", "else", "do", "done", "esac", "}")


class Tree:
    """Parses the tokens of a script into commands. What is no shell is left out."""

    def __init__(self, text: str) -> None:
        self.tokens, self.at = tokens(text), 0

    def parse(self) -> Listing:
        """All commands of the script."""
        commands: Listing = []
        while self.at < len(self.tokens):
            commands += self._listing()
            self.at += 1  # a word or a bracket that closes what was not open
        return commands

    def _peek(self) -> str:
        if self.at >= len(self.tokens) or self.tokens[self.at].kind not in ("word", "op"):
            return ""
        return self.tokens[self.at].text

    def _take(self, text: str) -> bool:
        self.at += (taken := self._peek() == text)
        return taken

    def _listing(self, depth: int = 0) -> Listing:
        refuse(depth > DEEPEST, f"has commands of more than {DEEPEST} levels")
        commands: Listing = []
        operator = ";"
        while self.at < len(self.tokens):
            text = self._peek()
            if text in RESERVED or text in (")", ";;", ";;&", ";&"):
                break
            if text in (";", "&", "\n", "&&", "||"):
                operator = operator if text == "\n" and operator in ("&&", "||") else text
                self.at += 1
                continue
            before, start = operator, self.at
            piped = [self._command(depth)]
            while self._peek() in ("|", "|&"):
                self.at += 1
                while self._take("\n"):
                    pass
                piped.append(self._command(depth))
            commands.append((before, piped[0] if len(piped) == 1 else ("pipe", piped)))
            operator = ";"
            self.at += self.at == start
        return commands

    def _command(self, depth: int) -> Node:
        text = self._peek()
        if text == "!":
            self.at += 1
            return ("not", self._command(depth + 1) if depth < DEEPEST else ("cmd", [], []))
        if text in ("if", "while", "until", "for", "select", "case", "{", "(", "function"):
            self.at += 1
            node = self._compound(text, depth)
            self._redirects()
            return node
        if (
            self.at + 2 < len(self.tokens)
            and self.tokens[self.at].kind == "word"
            and [token.text for token in self.tokens[self.at + 1 : self.at + 3]] == ["(", ")"]
        ):
            self.at += 3
            return self._function(text, depth)
        return self._simple()

    def _function(self, name: str, depth: int) -> Node:
        while self._take("\n"):
            pass
        opened = self._peek()
        if opened not in ("{", "("):
            return ("cmd", [], [])
        self.at += 1
        return ("function", name, self._compound(opened, depth)[1])

    def _compound(self, kind: str, depth: int) -> Node:
        if kind in ("{", "("):
            body = self._listing(depth + 1)
            self._take("}" if kind == "{" else ")")
            return ("group", body)
        if kind == "function":
            name = self._peek()
            self.at += 1
            if self._take("("):
                self._take(")")
            return self._function(name, depth)
        if kind == "if":
            branches: list[tuple[Listing | None, Listing]] = []
            while True:
                test = self._listing(depth + 1)
                self._take("then")
                branches.append((test, self._listing(depth + 1)))
                if not self._take("elif"):
                    break
            if self._take("else"):
                branches.append((None, self._listing(depth + 1)))
            self._take("fi")
            return ("if", branches)
        if kind in ("while", "until"):
            test = self._listing(depth + 1)
            self._take("do")
            body = self._listing(depth + 1)
            self._take("done")
            return (kind, test, body)
        head = self._simple()[1]
        while self._take("\n") or self._take(";"):
            pass
        if kind != "case":
            self._take("do")
            body = self._listing(depth + 1)
            self._take("done")
            return ("for", head, body)
        choices: list[tuple[list[Token], Listing]] = []
        while self.at < len(self.tokens) and not self._take("esac"):
            patterns: list[Token] = []
            while self.at < len(self.tokens) and self._peek() not in (")", "esac"):
                patterns += [self.tokens[self.at]] if self.tokens[self.at].kind == "word" else []
                self.at += 1
            self._take(")")
            choices.append((patterns, self._listing(depth + 1)))
            while self._peek() in (";;", ";;&", ";&", "\n", "}", "fi", "done", "then", "do", "else", "elif"):
                self.at += 1
        return ("case", head, choices)

    def _redirects(self) -> list[Token]:
        taken: list[Token] = []
        while self.at < len(self.tokens) and self.tokens[self.at].kind in ("redirect", "doc"):
            taken.append(self.tokens[self.at])
            self.at += 1
        return taken

    def _simple(self) -> Node:
        words: list[Token] = []
        redirects: list[Token] = []
        while self.at < len(self.tokens):
            redirects += self._redirects()
            if self.at >= len(self.tokens):
                break
            token = self.tokens[self.at]
            if token.text == "(" and words and words[-1].end == token.start and words[-1].text.endswith("="):
                words[-1] = self._array(words[-1])
            elif token.kind == "op":
                break
            else:
                words.append(token)
                self.at += 1
        return ("cmd", words, redirects)

    def _array(self, name: Token) -> Token:
        """`NAME=(...)` with its words."""
        level, inner = 0, []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            level += (token.text == "(") - (token.text == ")") if token.kind == "op" else 0
            self.at += 1
            if token.kind == "word":
                inner.append(token)
            if level == 0:
                break
        return Token("array", name.text, name.start, self.tokens[self.at - 1].end, tuple(inner))
