"""Keyword arguments of the calls in a Python script or a notebook, as a document. It is parsed and never run."""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadgauge.core.base import ConfigError, refuse
from loadgauge.job_files.ideas.table import MISSING
from loadgauge.job_files.reading.values import PLAIN, UNKNOWN, Names, called, worked_out

MOST_NODES = 50_000
DEEPEST = 60
MAGIC = re.compile(r"^([ \t]*)[%!](?:.*\\\n)*.*$", re.MULTILINE)
"""Lines of a notebook that are IPython's or the shell's, with those that a backslash joins to them."""
SET = re.compile(
    r"(?m)^[ \t]*(?:%env[ \t]+(\w+)[ \t]*[= ][ \t]*|os\.environ\[['\"](\w+)['\"]\][ \t]*=[ \t]*['\"])([^\s'\"]+)"
)
"""A variable of the environment that a program or a notebook sets."""
OTHER_CELLS = re.compile(r"\s*%%(?!capture|time)")
"""Cells that are not Python: `%%bash`, `%%writefile`."""


class Calls:
    """The keyword arguments of some calls; a key is the section of its call and the keyword, such as `peft.r`.

    A value that does not follow from literals and from names that one value is assigned to is its source text after a dollar
    sign: what it will be is known only where the script runs.

    section: of a call, by the last two names of what is called, such as `FastLanguageModel.from_pretrained`; None: it is not read
    first: of a section, the keyword that its first positional argument is
    once: sections of which the first call counts: what was trained is often loaded again at the end
    options: values of `args.NAME`, of a program's own arguments

    >>> script = "size = 2048  # tokens\\nm = F.load(name, max_seq_length=size, load_in_4bit=True)\\n"
    >>> document = Calls(script, {"F.load": "model"}.get, {"model": "model_name"})
    >>> [(key, document.get(key)) for key in document.names()]
    [('model.model_name', '$name'), ('model.max_seq_length', 2048), ('model.load_in_4bit', True)]
    >>> document.put("model.load_in_4bit", False)
    >>> document.put("model.dtype", None)
    >>> print(document.text(), end="")
    size = 2048  # tokens
    m = F.load(name, max_seq_length=size, load_in_4bit=False, dtype=None)
    """

    syntax = "python"

    def __init__(
        self,
        text: str,
        section: Callable[[str], str | None],
        first: Mapping[str, str],
        once: frozenset[str] = frozenset(),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.source, self.section, self.first, self.once, self.options = text, section, first, once, options or {}
        self.notebook = text.lstrip().startswith("{")
        self._parse()

    def _parse(self) -> None:
        self.code, self.skipped = _cells(self.source) if self.notebook else (self.source, [])
        tree = _tree(self.code)
        taken = _Taken(Names(tree), self.options)
        self.tree = tree = taken.visit(tree)
        self.guessed = taken.guessed
        """Conditions on the card's memory, and as which card's they are taken."""
        self.constants = Names(tree)
        self.values: dict[str, ast.expr] = {}
        self.folders: dict[str, str] = {}
        """Repositories by the folders that the program downloads them to."""
        self.calls: dict[str, ast.Call] = {}
        self.program: tuple[str, ...] = ()
        """The names of all that is called, in order."""
        self.doubtful: set[str] = set()
        for call in (node for node in _running(tree) if isinstance(node, ast.Call)):
            name = called(call.func)
            if name == "dict":  # mmengine's, whose class is one of its words
                name = next((called(word.value) for word in call.keywords if word.arg == "type"), name)
            self.program += (name,)
            if name.endswith("snapshot_download"):
                words = dict(self._arguments("", call, {"": "repo_id"}))
                repository, folder = (
                    self._value(words[word]) if word in words else "" for word in ("repo_id", "local_dir")
                )
                self.folders[str(folder).removeprefix("./").rstrip("/")] = str(repository)
            section = self.section(name)
            if section is None or (section in self.once and section in self.calls):
                continue
            self.calls.setdefault(section, call)
            for keyword, value in self._arguments(section, call, self.first):
                key = f"{section}.{keyword}"
                if key in self.values and ast.dump(self.values[key]) != ast.dump(value):
                    self.doubtful.add(key)
                self.values.setdefault(key, value)

    def _arguments(self, section: str, call: ast.Call, first: Mapping[str, str]) -> Iterator[tuple[str, ast.expr]]:
        if call.args and section in first:
            yield first[section], call.args[0]
        for keyword in call.keywords:
            if keyword.arg is None:
                yield from self._spread(keyword.value)
            else:
                yield keyword.arg, keyword.value

    def _spread(self, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """`**{...}` and `**dict(...)`; any other is left as one key that no list has."""
        if isinstance(value, ast.Name):
            value = self.constants.of(value.id, value.lineno) or value
        if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            for key, inner in zip(value.keys, value.values, strict=True):
                yield str(key.value) if isinstance(key, ast.Constant) else "", inner
        elif isinstance(value, ast.Call) and called(value.func) == "dict" and not value.args:
            for word in value.keywords:
                yield word.arg or "**arguments", word.value
        else:
            yield "**arguments", value

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the environment that it sets, by their names."""
        lines = "\n".join(_sources(self.source).values()) if self.notebook else self.source
        return {match[1] or match[2]: match[3] for match in SET.finditer(lines)}

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, in order."""
        return tuple(self.values)

    def get(self, key: str) -> Any:
        """The value of a key: a literal, `$source` where it is none, or `MISSING`.

        Raises `ConfigError` where two calls differ.
        """
        if key not in self.values:
            return MISSING
        refuse(key in self.doubtful, "has different values in several calls; a script is not run, so keep one", key=key)
        return self._value(self.values[key])

    def _value(self, node: ast.expr) -> Any:
        value = worked_out(node, self.constants, self.options)
        return f"${ast.unparse(node)[:200]}" if value is UNKNOWN else self.downloaded(value)

    def downloaded(self, value: Any) -> Any:
        """The repository that the program downloads to a folder, for the folder; any other value as it is."""
        return self.folders.get(value.removeprefix("./").rstrip("/"), value) if isinstance(value, str) else value

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a keyword where the program says it, or adds it to its call. Raises `ConfigError` without a call."""
        section, _, keyword = key.partition(".")
        node = self.values.get(key)
        origin = None if node is None else self.literal(node)
        if any(self.literal(other) is origin for name, other in self.values.items() if name != key):
            origin = node
        if origin is not node and isinstance(getattr(origin, "value", None), str):
            value = str(value)  # variables of the environment are text
        written = json.dumps(value) if isinstance(value, str) and '"' in self.code else repr(value)
        if origin is not None:
            self._splice(self._place(origin), written)
            return
        call = self.calls.get(section)
        if call is None:
            raise ConfigError(f"has no call that takes {keyword}", key=key)
        parts: list[Any] = [*call.args, *call.keywords]
        last = max(parts, key=lambda part: (part.end_lineno, part.end_col_offset), default=None)
        start, end = [self._place(call)[1] - 1] * 2 if last is None else self._place(last)
        before = self.code[self.code.rfind("\n", 0, start) + 1 : start]
        spaced = " = " if re.search(r"\w = ", self.code[start:end]) else "="
        joint = "" if last is None else ", " if before.strip() else f",\n{before}"
        self._splice((end, end), f"{joint}{keyword}{spaced}{written}")

    def literal(self, node: ast.expr) -> ast.expr:
        """Return the one literal that an expression has its value from; where there is none, the expression.

        >>> text = "import os\\nsize = int(os.environ.get('SIZE', '4'))\\nF.load(r=size)"
        >>> calls = Calls(text, {"F.load": "model"}.get, {})
        >>> calls.literal(calls.values["model.r"]).lineno
        2
        """
        whole = self.constants.stands(node)
        while isinstance(whole, ast.Call) and called(whole.func) in PLAIN and len(whole.args) == 1:
            whole = self.constants.stands(whole.args[0])
        if isinstance(whole, ast.Attribute) and whole.attr in self.options:
            whole = self.constants.declared(whole) or whole
        alike = isinstance(whole, ast.Constant) and hasattr(whole, "lineno")
        return whole if alike and str(getattr(whole, "value", "")) == str(self._value(node)) else node

    def drop(self, key: str) -> None:
        """Removes a keyword from its call if it is there."""
        section, _, name = key.partition(".")
        call = self.calls.get(section)
        matches = None if call is None else next((word for word in call.keywords if word.arg == name), None)
        if matches is None:
            return
        start, end = self._place(matches)
        line = "" if self.notebook else r"(\n[ \t]*)?"
        after = re.match(rf"\s*,[ \t]*(#[^\n]*)?{line}", self.code[end:])
        if after is not None:
            self._splice((start, end + after.end()), "")
        else:
            before = self.code[:start].rstrip().removesuffix(",")
            self._splice((len(before), end), "")

    def _splice(self, span: tuple[int, int], text: str) -> None:
        """Replaces a part of the code; of a notebook, the line of a cell that has it. Raises `ConfigError` where several do."""
        code = self.code
        start = code.rfind("\n", 0, span[0]) + 1 if self.notebook else 0
        end = code.find("\n", span[1]) % (len(code) + 1) if self.notebook else len(code)
        lines = [code[start:end], code[start : span[0]] + text + code[span[1] : end]]
        if self.notebook:
            lines = [json.dumps(line, ensure_ascii=self.source.isascii())[1:-1] for line in lines]
            refuse(
                self.source.count(lines[0]) != 1,
                "a notebook has the line several times, or over several; export it as a script first",
            )
        self.source = self.source.replace(lines[0], lines[1], 1)
        self._parse()

    def _place(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: Any, column: Any) -> int:
        """The place of a line and a column, which Python counts in bytes of UTF-8."""
        *before, whole = self.code.split("\n")[:line]
        return sum(map(len, before)) + len(before) + len(whole.encode()[:column].decode(errors="ignore"))

    def shown(self, key: str) -> str:
        """The keyword as the script spells it."""
        return key.partition(".")[2] or key

    def text(self) -> str:
        """The script with all changes."""
        return self.source


LIGHTNING = re.compile(r"(?m)^\s*(?:import|from) (?:pytorch_)?lightning\b")


def untrained(text: str, name: str) -> str:
    """Return what to give in the place of a program in which no trainer that is read is called. name: of its file

    >>> untrained("import lightning as L", "train.py").partition(":")[0]
    "is of Lightning's Trainer"
    """
    if LIGHTNING.search(text):
        flags = "loadgauge estimate MODEL --gpus N --zero 3 --precision bf16 ..."
        return f"is of Lightning's Trainer: give the run as flags ({flags}), or a function that makes a step, as {name}:FUNCTION"
    return (
        "is no training job: it calls no trainer (looked for: Unsloth's FastLanguageModel, TRL's SFTTrainer, DPOTrainer,"
        " GRPOTrainer and others, transformers' Trainer); give the file or the flags that it is started with, or,"
        f" of a module of your own, {name}:FUNCTION; `loadgauge trace {name}` runs two steps of a loop of its own"
    )


def _sources(text: str) -> dict[int, str]:
    """The text of a notebook's cells of Python, by their number."""
    try:
        parts = {
            number: "".join(cell["source"])
            for number, cell in enumerate(json.loads(text)["cells"], 1)
            if cell["cell_type"] == "code"
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError("is no notebook (JSON with cells of code)") from None
    return {number: part for number, part in parts.items() if not OTHER_CELLS.match(part)}


def _cells(text: str) -> tuple[str, list[str]]:
    """The code of a notebook's cells of Python, and why others are skipped, by their number."""
    code, skipped = [], []
    for number, part in _sources(text).items():
        lines = MAGIC.sub(r"\1pass", part)
        try:
            ast.parse(lines)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            skipped.append(f"cell {number} is skipped: it is not valid Python ({getattr(error, 'msg', error)})")
        else:
            code.append(lines)
    return "\n".join(code) + "\n", skipped


class _Taken(ast.NodeTransformer):
    """Puts in the place of `if` the branch that is taken, where that is known, as of `if False:`."""

    def __init__(self, names: Names, options: Mapping[str, Any]) -> None:
        self.names, self.options = names, options
        self.guessed: dict[str, str] = {}

    def visit_If(self, node: ast.If) -> Any:
        """Return the statements of the branch that is taken, else the whole."""
        test = worked_out(node.test, self.names, self.options)
        if test is UNKNOWN and (test := _of_memory(node.test)) is not UNKNOWN:
            text = ast.unparse(node.test)[:80]
            self.guessed[text] = f"{text}: is taken as on a GPU of {CARD} GB"
        self.generic_visit(node)
        return node if test is UNKNOWN else (node.body if test else node.orelse) or ast.Pass()


CARD = 80
"""Gigabytes of the card whose branch of a program counts: those of the cards that are rented most."""
MEMORY = re.compile(r"(?i)mem(?!ber)|vram")
ORDERED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = dict(
    zip((ast.Gt, ast.GtE, ast.Lt, ast.LtE), (operator.gt, operator.ge, operator.lt, operator.le), strict=True)
)


def _of_memory(test: ast.expr) -> Any:
    """Return whether a comparison of a card's memory with a number holds on a card of `CARD` GB, or `UNKNOWN`.

    >>> [_of_memory(ast.parse(text, mode="eval").body) for text in ("gpu_memory_gb >= 40", "vram < 16")]
    [True, False]
    """
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in ORDERED:
        return UNKNOWN
    number: Any = getattr(test.comparators[0], "value", None)
    if type(number) not in (int, float) or not MEMORY.search(ast.unparse(test.left)[:80]):
        return UNKNOWN
    return ORDERED[type(test.ops[0])](CARD * (1024**3 if number > 1e6 else 1), number)


def _running(tree: ast.Module) -> Iterator[ast.AST]:
    """Every part of a program in the order of its lines."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack += list(ast.iter_child_nodes(node))[::-1]


def _tree(code: str) -> ast.Module:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ConfigError(f"is not valid Python: {error.msg} (line {error.lineno})") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConfigError("is nested too deeply, or holds what is not text") from None
    stack: list[tuple[ast.AST, int]] = [(tree, 0)]
    count = 0
    while stack:
        node, depth = stack.pop()
        count += 1
        if count > MOST_NODES or depth > DEEPEST:
            raise ConfigError(f"is nested too deeply, or has more than {MOST_NODES} parts")
        stack += [(inner, depth + 1) for inner in ast.iter_child_nodes(node)]
    return tree
