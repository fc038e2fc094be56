"""A shell script as a shell reads it: the commands that it would start, with their words. Nothing is run.

Of a loop the first round is read, of branches that depend on what is not known the first that does not give up. A value that is
known only where the script runs keeps its dollar sign.
"""

import operator
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from loadgauge.core.base import read_text, refuse
from loadgauge.job_files.reading.known_files import HERE
from loadgauge.job_files.reading.shell_values import ASSIGNED, UNSET, Value, Values, Word, plain, quotient, settled
from loadgauge.job_files.reading.shell_words import DEEPEST, MOST_WORDS, Listing, Node, Piece, Text, Token, Tree, tokens

COMPARED: dict[str, Callable[[float, float], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge, "-le": operator.le,
}  # fmt: skip
LARGEST_FILE, MOST_CHOICES = 100_000, 1_000
"""Bytes of a file that a script reads, and files among which a variable chooses."""
OPEN = re.compile(r"\$\{?([A-Za-z_]\w*|[1-9])\}?")
"""A variable in the name of a file, which is not known."""
GIVES_UP = ("exit", "return", "continue", "break")
DECLARES = ("export", "local", "declare", "readonly", "typeset")


class _Stop(Exception):
    """The end of a script, a function or a round of a loop, by the word that ends it."""


class Shell(Values):
    """Holds what a script starts.

    commands: each with its words, in order; variables: their last values that are known; documents: here-documents by the
    file that they go to; notes: what was taken for something that is not known, in words;
    guessed: the same of a variable that chooses among files, by its name

    outside: variables that are set where the script is started, `1` for its first argument
    file: the script, beside which those that it reads are

    >>> shell = Shell('TP=${TP:-2}\\nARGS=(--tp $TP)\\nsrun torchrun x.py "${ARGS[@]}" --nodes $N')
    >>> [word.text for word in shell.commands[0]]
    ['srun', 'torchrun', 'x.py', '--tp', '2', '--nodes', '$N']
    """

    def __init__(
        self,
        source: str,
        outside: Mapping[str, str] | None = None,
        file: str = "",
    ) -> None:
        super().__init__(source, {**_scheduled(source), **(outside or {})}, file)
        self.functions: dict[str, tuple[Text, Listing]] = {}
        self.commands: list[list[Word]] = []
        self.documents: dict[str, str] = {}
        self.notes: list[str] = []
        self.guessed: dict[str, str] = {}
        self.directory = ""
        self.said: list[Text] | None = None
        """Holds what a command whose output is taken has printed; None outside of one."""
        self.count = self.depth = 0
        with suppress(_Stop):
            self._script(Text([Piece(source, 0, len(source))]))

    @property
    def variables(self) -> dict[str, str]:
        """The variables that have one known value."""
        return {
            name: value.text
            for name, value in self.values.items()
            if isinstance(value, Text) and not re.search(r"[$`]", value.text)
        }

    # -- commands ------------------------------------------------------------------------------------------------------

    def _script(self, text: Text) -> bool | None:
        before = self.text
        self.depth += 1
        refuse(self.depth > DEEPEST, f"starts itself, or more than {DEEPEST} scripts in each other")
        self.text = text
        try:
            return self._listing(Tree(text.text).parse())
        finally:
            self.depth -= 1
            self.text = before

    def _listing(self, commands: Listing) -> bool | None:
        """Reads commands; whether the last one succeeds, None where that is not known."""
        success: bool | None = True
        for before, node in commands:
            decided = (before == "&&" and success is False) or (before == "||" and success is not False)
            if decided or (before in ("&&", "||") and self._gives_up([("", node)])):
                continue
            success = self._node(node)
        return success

    def _node(self, node: Node) -> bool | None:
        kind = node[0]
        runs: dict[str, Callable[..., bool | None]] = {
            "cmd": self._command,
            "pipe": self._pipe,
            "group": self._listing,
            "if": self._branch,
            "case": self._case,
            "for": self._for,
        }
        if kind in runs:
            return runs[kind](*node[1:])
        if kind == "not":
            success = self._node(node[1])
            return None if success is None else not success
        if kind == "function":
            self.functions[node[1]] = self.text, node[2]
        elif self._listing(node[1]) is (kind == "while"):  # or until
            self._round(node[2])
        return None

    def _gives_up(self, commands: Listing, depth: int = 0) -> bool:
        """Return whether commands end the script, and start nothing before that."""
        ends = False
        for _, node in commands:
            if node[0] == "cmd":
                names = [token.text for token in node[1]]
                if sum(name.startswith("--") or "--" in name for name in names) > 1:
                    return False
                called = self.functions.get(names[0]) if names else None
                ends |= bool(names) and names[0] in GIVES_UP
                ends |= called is not None and depth < 3 and self._gives_up(called[1], depth + 1)
            elif node[0] == "group":
                ends |= self._gives_up(node[1], depth + 1)
        return ends

    def _branch(self, branches: list[tuple[Listing | None, Listing]]) -> None:
        rest = [(test, body) for test, body in branches if not self._gives_up(body)]
        for test, body in rest:
            success = True if test is None else self._listing(test)
            if success is None and len(branches) > 1:
                self._chose(test)
            if success is not False:
                self._listing(body)
                return
        # None but those that give up, or all that ask for an argument that is not there.
        asked = len(branches) > 1 and branches[-1][0] is not None and self._asks(branches[0][0])
        if rest and (asked or (len(rest) < len(branches) and branches[-1][0] is None)):
            self._chose(rest[0][0])
            self._listing(rest[0][1])

    def _asks(self, test: Listing | None) -> bool:
        """Return whether a test compares one of the script's arguments, which is not known, to a word."""
        tokens_of = [token for _, node in test or () if node[0] == "cmd" for token in node[1]]
        values = [self._joined(token) for token in tokens_of if "$" in token.text]
        return any(re.fullmatch(r"\$\{?[1-9]\}?", value) for value in values)

    def _chose(self, test: Listing | None) -> None:
        words = " ".join(token.text for _, node in test or () if node[0] == "cmd" for token in node[1])
        self.notes.append(f"{words[:60] or 'a test'} is not known before it runs; the first branch is read")

    def _case(self, head: list[Token], choices: list[tuple[list[Token], Listing]]) -> None:
        subject = self._joined(head[0]) if head else ""
        value = settled(subject)
        rest = [(patterns, body) for patterns, body in choices if not self._gives_up(body)]
        for patterns, body in choices:
            texts = [self._joined(pattern)[:200] for pattern in patterns]
            if value is not None and any(fnmatchcase(value[:1000], pattern) for pattern in texts):
                if self._gives_up(body):
                    break
                self._listing(body)
                return
        if value and not any(self._gives_up(body) for _, body in choices):
            return
        default = next((body for patterns, body in rest if "*" in (pattern.text for pattern in patterns)), None)
        if default is None and rest:
            # What a case takes for granted holds for the tests after it.
            name = UNSET.fullmatch(subject) or UNSET.fullmatch(head[0].text.strip('"') if head else "")
            chosen = self._joined(rest[0][0][0]) if rest[0][0] else ""
            if not chosen.startswith("-"):
                self.notes.append(f"{subject or 'a case'} is set nowhere; its first choice, {chosen}, is read")
                if name is not None and not re.search(r"[*?\[]", chosen):
                    self.values[name[0].strip("${}")] = plain(chosen)
            else:
                return
            default = rest[0][1]
        if default is not None:
            self._listing(default)

    def _for(self, head: list[Token], body: Listing) -> None:
        if not head:
            return
        if head[0].text.startswith("(("):
            for name, value in re.findall(r"^\(\(\s*(\w+)\s*=\s*(\w+)", head[0].text):
                self._set(name, plain(value))
        else:
            words = [word for token in head[2:] for field in self._fields(token) for word in _listed(Text(field))]
            if len(words) > 1:
                self.notes.append(
                    f"{head[0].text} goes through {len(words)} values; the first, {words[0].text[:60]}, is read"
                )
            if words:
                self._set(head[0].text, words[0])
        self._round(body)

    def _round(self, body: Listing) -> None:
        try:
            self._listing(body)
        except _Stop as stop:
            if str(stop) not in ("continue", "break"):
                raise

    def _pipe(self, nodes: list[Node]) -> bool | None:
        """Reads a pipeline; of output that is taken, filters that only change blanks leave it as it is."""
        success: bool | None = None
        for index, node in enumerate(nodes):
            names = [token.text for token in node[1]] if node[0] == "cmd" else []
            if index and self.said is not None and self.said and names:
                blank = names[0] in ("xargs", "sed", "tr") and re.search(r"\\n| |^xargs$", " ".join(names))
                if names[0] == "tr" and "upper" in names[-1] and "lower" in names[-2]:
                    self.said[-1] = plain(self.said[-1].text.upper())
                elif names[0] == "tr" and "lower" in names[-1]:
                    self.said[-1] = plain(self.said[-1].text.lower())
                elif not blank:
                    raise _Stop("unknown")
                continue
            success = self._node(node)
        return None if len(nodes) > 1 else success

    def _command(self, command_words: list[Token], redirects: list[Token]) -> bool | None:
        self.count += 1 + len(command_words)
        refuse(self.count > 2 * MOST_WORDS, f"has more than {MOST_WORDS} words")
        index = 0
        while index < len(command_words) and (
            command_words[index].kind == "array" or ASSIGNED.match(command_words[index].text)
        ):
            self._assign(command_words[index])
            index += 1
        rest = command_words[index:]
        if not rest:
            return True
        name = rest[0].text
        if name in DECLARES:
            for token in rest[1:]:
                if token.kind == "array" or ASSIGNED.match(token.text):
                    self._assign(token)
            return True
        if name in GIVES_UP:
            raise _Stop(name)
        if name.startswith("[["):
            inner = name[2:-2]
            return self._tested(inner, tokens(inner))
        if name in ("[", "test"):
            return _test([field for token in rest[1:] for field in self._tests(token, self.text)], self.values)
        if name.startswith("(("):
            return None
        if name == "eval":
            pieces: list[Piece] = []
            for token in rest[1:]:
                # Outside quotes a line's end is a blank like any other.
                bare = self.text.text[token.start : token.start + 1] not in "\"'"
                read = self._expanded(self.text, token.start, token.end)
                pieces += [piece._replace(text=piece.text.replace("\n", " ")) if bare else piece for piece in read]
                pieces.append(Piece(" ", -1, -1))
            self._script(Text(pieces))
            return None
        words = [word for token in rest for word in self._words(token)]
        self._documents(words, redirects)
        if not words:
            return True
        words[0] = words[0]._replace(first=True)
        return self._started(words, redirects)

    def _document(self, redirects: list[Token]) -> Text | None:
        """The here-document of a command, with its variables unless its end is quoted."""
        token = next((token for token in redirects if token.kind == "doc"), None)
        if token is None:
            return None
        pieces = self.text.part(token.start, token.end)
        if token.text:
            return Text(pieces)
        body = Text(pieces)
        return Text(self._expanded(body, 0, len(body.text), True))

    def _documents(self, words: list[Word], redirects: list[Token]) -> None:
        target = next((token for token in redirects if token.text in (">", ">>")), None)
        document = self._document(redirects)
        if document is None or not words:
            return
        if words[-1].text in ("bash", "sh", "-s") and target is None:
            self._script(document)
        if words[0].text == "cat" and target is None and self.said is not None:
            self.said.append(document)
        elif words[0].text in ("cat", "tee") and target is not None:
            self.documents[self._joined(target)] = document.text
        elif words[0].text == "read" and "-d" in (word.text for word in words):
            self._set(words[-1].text, document)

    def _started(self, words: list[Word], redirects: list[Token]) -> bool | None:
        name, texts = words[0].text, [word.text for word in words]
        if name in self.functions and self.depth < DEEPEST:
            self._called(name, words)
            return None
        if name in ("source", ".") and len(words) > 1:
            before = self.arguments
            self.arguments = [self._text(word) for word in words[2:]] or before  # without any, the script's own
            self._sourced(texts[1])
            self.arguments = before
            return True
        if name == "set":
            if "--" in texts:
                self.arguments = [plain(text) for text in texts[texts.index("--") + 1 :]]
        elif name == "shift":
            del self.arguments[: int(texts[1]) if len(texts) > 1 and texts[1].isdecimal() and len(texts[1]) < 5 else 1]
        elif name == "unset":
            for text in texts[1:]:
                self.values.pop(text, None)
        elif name == "read":
            self._read(texts, redirects)
        elif name in (
            "true",
            ":",
            "cd",
            "echo",
            "printf",
            "pwd",
            "dirname",
            "basename",
            "realpath",
            "readlink",
            "expr",
            "seq",
        ):
            self._printed(name, words)
            return True
        elif name == "false":
            return False
        elif (name == "cat" and self.said) or (name == "exec" and len(words) == 1):
            return True
        elif self.said is not None:
            if re.search(r"\bimport torch_npu\b", " ".join(texts)):
                return False  # where there is a GPU, a test for another maker's cards fails
            raise _Stop("unknown")
        else:
            self.commands.append(words)
            for index in range(2, len(texts)):
                if re.fullmatch(r"-[el]*c", texts[index - 1]) and texts[index - 2].rpartition("/")[2] in ("bash", "sh"):
                    self._script(Text(self._pieces(words[index])))
            script = next((text for text in texts[:3] if text.endswith(".sh")), "")
            if HERE.sub("", script) in self.documents:
                self._script(plain(self.documents[HERE.sub("", script)]))
            elif script and texts[0] in (script, "bash", "sh", "exec", "source", "sbatch"):
                before, self.arguments = self.arguments, [self._text(word) for word in words[texts.index(script) + 1 :]]
                self._sourced(script, False)
                self.arguments = before
            if name == "exec":
                raise _Stop("exit")
        return None

    def _called(self, name: str, words: list[Word]) -> None:
        before, self.arguments = self.arguments, [self._text(word) for word in words[1:]]
        text, (self.text, body) = self.text, self.functions[name]
        self.depth += 1
        try:
            self._listing(body)
        except _Stop as stop:
            if str(stop) != "return":
                raise
        finally:
            self.depth -= 1
            self.arguments, self.text = before, text

    def _sourced(self, name: str, noted: bool = True) -> None:
        name = HERE.sub("", name)
        here = Path(self.file).resolve().parent
        root = Path.cwd() if here.is_relative_to(Path.cwd()) else here
        if noted and self.file and (asked := OPEN.search(name)) is not None:
            choices = _choices(here, name)
            which = f"{choices[0]} is read, the first of {len(choices)}" if choices else "it is not read"
            note = f"the name {name} follows from {asked[1]}, and {which}: add --set {asked[1]}=VALUE"
            if len(choices) > 1:
                self.guessed[f"${asked[1]}"] = note
            else:
                self.notes.append(note)
            name = choices[0] if choices else name
        if re.search(r"[$`]", name.lstrip("$")) or not self.file or self.depth > 5:
            return
        for position in (here / name, root / name):
            path = position.resolve()
            if path.is_relative_to(root) and os.path.isfile(path) and path.stat().st_size <= LARGEST_FILE:
                text = read_text(path, LARGEST_FILE)
                try:
                    self._script(Text([Piece(text, -1, -1)]))
                except _Stop as stop:
                    if str(stop) != "return" and (noted or str(stop) != "exit"):
                        raise
                return
        if noted and not name.startswith(("/", "~")):
            self.notes.append(f"{name} is not there, so what it sets is not known")

    def _read(self, texts: list[str], redirects: list[Token]) -> None:
        """`IFS=, read -r A B <<< "$X"`, and `read -a ARRAY`."""
        if any(token.kind == "doc" for token in redirects):
            return
        source = next((token for token in redirects if token.text == "<<<"), None)
        value = None if source is None else self._joined(source)
        if value is None or re.search(r"[$`]", value):
            return
        separators = self.values.pop("IFS", None)
        split = re.split(
            f"[{re.escape(separators.text)}]" if isinstance(separators, Text) and separators.text else r"\s+",
            value.strip(),
        )
        names = [text for text in texts[1:] if not text.startswith("-")]
        if "-a" in texts or "-ra" in texts or "-rA" in texts:
            self.values[names[-1]] = [plain(text) for text in split]
            return
        for index, name in enumerate(names):
            self._set(name, plain(split[index] if index < len(split) else ""))

    def _printed(self, name: str, words: list[Word]) -> None:
        """Return what a command prints, where its output is taken, and where `cd` goes."""
        texts = [word.text for word in words[1:] if word.text not in ("-e", "-n", "-f", "-P", "--", "-m", "-ne", "-en")]
        if self.said is None:
            return
        if name == "cd":
            self.directory = texts[0] if texts else "$HOME"
            return
        if name in ("true", ":"):
            return
        if name == "echo":
            told = (self._pieces(word) for word in words[1:] if word.text not in ("-e", "-n", "-ne"))
            self.said.append(Text([piece for pieces in told for piece in (*pieces, Piece(" ", -1, -1))][:-1]))
            return
        paths = {
            "dirname": texts and (texts[-1].rpartition("/")[0] or "."),
            "basename": texts and texts[0].rstrip("/").rpartition("/")[2].removesuffix([*texts, "\0"][1]),
            **dict.fromkeys(("realpath", "readlink"), texts and texts[-1]),
        }
        numbers = {"expr": quotient(" ".join(texts)), "seq": texts and ("1" if len(texts) == 1 else texts[0])}
        others = {"pwd": self.directory, "printf": texts[0] if len(texts) == 1 else ""}
        result = (paths | numbers | others).get(name)
        if not result:
            raise _Stop("unknown")
        self.said.append(plain(str(result)))

    # -- tests ---------------------------------------------------------------------------------------------------------

    def _tested(self, text: str, parts: list[Token]) -> bool | None:
        """`[[ A && B || C ]]`, from the left."""
        result: bool | None = None
        group: list[str | None] = []
        joined = ""
        for token in [*parts, Token("op", "&&", 0, 0)]:
            if token.text in ("(", ")"):
                return None
            if token.kind == "op" and token.text in ("&&", "||"):
                value = _test(group, self.values)
                if joined == "&&":
                    result = False if False in (result, value) else None if None in (result, value) else True
                elif joined == "||":
                    result = True if True in (result, value) else None if None in (result, value) else False
                else:
                    result = value
                group, joined = [], token.text
            elif token.kind == "word":
                group += self._tests(token, Text([Piece(text, -1, -1)]))
            else:
                group.append(token.text)
        return result

    def _tests(self, token: Token, text: Text) -> list[str | None]:
        """The value of a word of a test: one that is set nowhere is empty, one that is not known None."""
        before, self.text = self.text, text
        try:
            fields = [Text(field).text for field in self._fields(token)]
        finally:
            self.text = before
        return [settled(field) for field in fields or ([""] if token.text[:1] in "\"'" else [])]

    def output(self, script: str) -> Value | None:
        """Return what `$(...)` prints, where it is a plain one such as `$(dirname "$0")` or `$(echo "$A")`."""
        before = self.said, self.directory, self.text
        self.said, self.directory = [], ""
        try:
            self._script(Text([Piece(script, -1, -1)]))
            return self.said[-1] if self.said else None
        except _Stop:
            return None
        finally:
            self.said, self.directory, self.text = before


def _choices(here: Path, name: str) -> list[str]:
    """Return the files that a name with variables may mean, in order; none where it does not say a folder of them."""
    start, end = OPEN.split(name)[0], OPEN.split(name)[-1]
    folder = here / start.rpartition("/")[0]
    if not end or folder.resolve() == here or not folder.resolve().is_relative_to(here):
        return []
    names = [path.relative_to(here).as_posix() for path in islice(folder.rglob(f"*{end}"), MOST_CHOICES)]
    return sorted(path for path in names if path.startswith(start.removeprefix("./")))


def _listed(word: Text) -> list[Text]:
    """The first and the last word that a range in braces stands for; any other word alone.

    >>> [text.text for text in _listed(plain("{2..5}"))]
    ['2', '5']
    """
    match = re.fullmatch(r"\{(\w+)\.\.(\w+)(?:\.\.\d+)?\}", word.text)
    return [word] if match is None else [plain(match[1]), plain(match[2])]


SCHEDULED = (
    ("SLURM_JOB_NUM_NODES", r"(?:--nodes|-N)"), ("SLURM_NNODES", r"(?:--nodes|-N)"), ("SLURM_NTASKS_PER_NODE", "--ntasks-per-node"),
    ("SLURM_GPUS_PER_NODE", r"(?:--gpus-per-node|-G|--gres=gpu|--gpus)"),
)  # fmt: skip
"""Variables that Slurm sets by the `#SBATCH` lines of a script, and their options."""


def _scheduled(source: str) -> dict[str, str]:
    lines = " ".join(re.findall(r"^#SBATCH[ \t]+([^#\n]{1,300})", source[:20_000], re.MULTILINE))
    matches = {
        name: re.search(rf"(?<!\S){option}[ =:](?:\w+:)?(\d{{1,6}})(?!\S|-)", lines) for name, option in SCHEDULED
    }
    return {name: match[1] for name, match in matches.items() if match is not None}


def _test(words: list[str | None], values: Mapping[str, object]) -> bool | None:
    """Return whether the words of `[ ... ]` are true; None where that is not known."""
    words = [word for word in words if word != "]"]
    if words[:1] == ["!"]:
        inner = _test(words[1:], values)
        return None if inner is None else not inner
    for joint in ("-o", "||", "-a", "&&"):
        if joint in words:
            index = words.index(joint)
            both = _test(words[:index], values), _test(words[index + 1 :], values)
            decisive = joint in ("-o", "||")
            return decisive if decisive in both else None if None in both else not decisive
    if len(words) <= 1:
        return None if words[:1] == [None] else bool(words) and words not in (["-n"], [""])
    if len(words) == 2:
        switch, value = words
        empty = None if value is None else value == ""
        return {"-z": empty, "-n": None if empty is None else not empty, "-v": value in values}.get(str(switch))
    left, how, right = words[0], words[1], words[2]
    if left is None or right is None or len(words) > 3:
        return None
    if how in ("=", "==", "!="):
        same = fnmatchcase(left[:1000], right[:200]) if "*" in right else left == right
        return same if how != "!=" else not same
    if how in COMPARED:
        try:
            return COMPARED[how](float(left or 0), float(right or 0))
        except ValueError:
            return None
    return None
