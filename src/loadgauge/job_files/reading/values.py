"""Values of the expressions in a program: literals, names, arguments, fields of its classes, keys. Nothing is run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadgauge.core.base import lists

UNKNOWN = object()
"""The value of an expression that only a run of the program gives."""
ARGUMENTS = re.compile(r"(?:^|_)(?:args?|arguments|config|cfg|opts?|options)$")
"""Usual names of what a program's arguments are parsed into."""
PARSES = re.compile(r"\bparse_(?:known_)?args\w*$|^(?:tyro\.cli|(?:pyrallis|draccus|simple_parsing)\.parse)$")
TORCH = re.compile(r"(?:torch|DType)\.(bfloat16|float16|float32|half)")
MEMBER = re.compile(
    rf"{TORCH.pattern}|(?:.*\.)?[A-Z]\w*(?:Type|Mode|Name|Strategy|Implementation)\.([a-z]\w*)"
    r"|(?:.*\.)?(?:OptimizerNames|IntervalStrategy|SaveStrategy|SchedulerType)\.([A-Z0-9_]+)"
)
"""Members of enumerations, whose values are their names, those of transformers in small letters, but for these."""
MEMBERS = {
    "adamw_bnb": "adamw_bnb_8bit", "lion": "lion_32bit", "paged_adamw": "paged_adamw_32bit",
    "paged_lion": "paged_lion_32bit", "paged_ademamix": "paged_ademamix_32bit",
    "rmsprop_32bit": "rmsprop_bnb_32bit", "rmsprop_8bit": "rmsprop_bnb_8bit",
}  # fmt: skip
LARGEST = 10**12
MOST_STEPS = 200_000
TELLS = re.compile(r"\bis_bf(?:loat)?16_(?:supported|available)$|is_torch_bf16_gpu_available$")
"""Calls that ask the GPU for bfloat16, which those since Ampere have."""
STARTED = re.compile(r"RANK$|^WORLD_SIZE$|^SLURM_|^CUDA_VISIBLE_DEVICES$|^MASTER_")
"""Variables of the environment that what starts a program sets."""
SPACES = re.compile(r"(?i)(?:Namespace|EasyDict|edict|\w*(?:Dot|Attr|Config)_?Dict|Munch|Box|create)$")
"""Calls that make an object of their keywords, or of a dict."""
DEFAULTS = re.compile(r"(?:^|\.)(?:Option|Argument|Field|field)$")
"""Calls that say a default: typer's, pydantic's, those of dataclasses."""
SEARCHES = re.compile(r"\btrial\.suggest_(categorical|int)$|\b(?:tune|ray\.tune)\.(choice|grid_search|randint)$")
"""Calls of Optuna and Ray Tune that choose among values: the largest number counts, else the first."""
NUMBERS: tuple[Callable[..., Any], ...] = (int, float, str, bool, min, max, round, abs)
PLAIN = {each.__name__: each for each in NUMBERS} | {"Path": str}
"""Functions of Python's own whose values are worked out."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def worked_out(node: ast.expr, names: Names, options: Mapping[str, Any], depth: int = 0) -> Any:
    """The value of an expression of literals, names, sums, products and choices, or `UNKNOWN`. Nothing is run.

    >>> whole = ast.parse("(size - 256) * 2 or 5", mode="eval").body
    >>> worked_out(whole, Names(ast.parse("size = 1024")), {})
    1536
    """
    names.left -= 1
    if depth > 20 or names.left < 0:
        return UNKNOWN

    def inner(part: ast.expr) -> Any:
        return worked_out(part, names, options, depth + 1)

    if isinstance(node, ast.Name | ast.Subscript):
        part = names.part(node)
        return UNKNOWN if part is None else inner(part)
    if isinstance(node, ast.Attribute):
        if (match := MEMBER.fullmatch(ast.unparse(node)[:80])) is not None:
            return match[1] or match[2] or MEMBERS.get(match[3].lower(), match[3].lower())
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        part = None if owner in names.parsed and node.attr in options else names.part(node)
        if part is not None and (value := inner(part)) is not UNKNOWN:
            return value
        return options.get(node.attr, UNKNOWN) if ARGUMENTS.search(owner) or owner in names.parsed else UNKNOWN
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = inner(node.left), inner(node.right)
        numbers = all(type(side) in (int, float) and abs(side) < LARGEST for side in (left, right))
        if not numbers or (isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod) and right == 0):
            return UNKNOWN
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        for value in map(inner, node.values):
            if value is UNKNOWN or value:
                return value
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = inner(node.operand)
        return UNKNOWN if value is UNKNOWN else not value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        left, right = inner(node.left), inner(node.comparators[0])
        listed = (
            left is not UNKNOWN
            and right is not UNKNOWN
            and (isinstance(right, list) or not isinstance(node.ops[0], ast.In | ast.NotIn))
        )
        return COMPARED[type(node.ops[0])](left, right) if listed else UNKNOWN
    if isinstance(node, ast.IfExp):
        test = inner(node.test)
        return UNKNOWN if test is UNKNOWN else inner(node.body if test else node.orelse)
    if isinstance(node, ast.JoinedStr):
        parts = [inner(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
        return "".join(map(str, parts)) if UNKNOWN not in parts else UNKNOWN
    if isinstance(node, ast.Call) and TELLS.search(called(node.func)):
        return True
    if isinstance(node, ast.Call):
        return _of_call(node, names, inner)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        values = list(map(inner, node.elts))
        return UNKNOWN if any(value is UNKNOWN for value in values) else values
    if isinstance(node, ast.Dict) and node.keys and all(isinstance(key, ast.Constant | None) for key in node.keys):
        whole: dict[str, Any] = {}
        for key, value in zip(node.keys, map(inner, node.values), strict=True):
            spread = value if isinstance(value, dict) else {}  # of `**value`
            whole |= {str(getattr(key, "value", "")): value} if key is not None else spread
        return {key: value for key, value in whole.items() if value is not UNKNOWN}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def _of_call(node: ast.Call, names: Names, inner: Callable[[ast.expr], Any]) -> Any:
    """The value of `dict(name=...)`, `len([...])`, `int(...)`, `os.environ.get(...)`, `settings.get(...)`, and of a function of
    the program that returns one thing."""
    name, arguments = called(node.func), node.args
    if name == "dict" and not arguments:
        pairs = ((word.arg, inner(word.value)) for word in node.keywords if word.arg is not None)
        return {key: value for key, value in pairs if value is not UNKNOWN}
    if (part := names.part(node)) is not None:
        return inner(part)
    if (search := SEARCHES.search(name)) is not None:
        several = [inner(each) for each in arguments] + [inner(word.value) for word in node.keywords]
        several = next((each for each in several if isinstance(each, list)), several)
        numbers = [each for each in several if isinstance(each, int)]
        value = max(numbers) if numbers else several[0] if search[1] != "int" and several else UNKNOWN
        names.searched[f"{ast.unparse(node)[:80]} is taken as {value}"] = None
        return value
    values = [UNKNOWN] if node.keywords else list(map(inner, arguments))
    if not values or UNKNOWN in values:
        return UNKNOWN
    if name == "len":
        return len(values[0]) if isinstance(values[0], list | str | dict) else UNKNOWN
    if name == "getattr" and len(values) == 2:
        return values[1] if TORCH.fullmatch(f"torch.{values[1]}") else UNKNOWN
    try:
        return PLAIN[name](*values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return UNKNOWN


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod,
}  # fmt: skip


COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: lambda left, right: left == right, ast.IsNot: operator.ne,
    ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip


class Names:
    r"""Holds what a program assigns to names.

    >>> tree = ast.parse("a = 1\nprint(a)\na = 2\nprint(a)\nif b:\n    c = 1\nelse:\n    c = 2")
    >>> names = Names(tree)
    >>> [names.of("a", line).value for line in (2, 4)], names.of("c", 9)
    ([1, 2], None)
    """

    def __init__(self, tree: ast.Module) -> None:
        plain = {id(statement) for statement in tree.body}
        self.parsed = {
            name.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and PARSES.search(called(node.value.func))
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        """Names of what a program's arguments are parsed into."""
        self.left = MOST_STEPS
        """Expressions that may still be looked at: a program can be made to need more of them than anybody has time for."""
        self.searched: dict[str, None] = {}
        """Values that a search chooses, and which of them is taken, in words."""
        self.open: set[int] = set()
        """Expressions that are being looked up: one that stands for itself has no value."""
        nodes = [*ast.walk(tree)]
        self.scopes = [node for node in nodes if isinstance(node, Function | ast.ClassDef)]
        self.around: dict[int, list[Any]] = {}
        self.lone: dict[tuple[str, int], bool] = {}
        self.classes = {node.name: node for node in self.scopes if isinstance(node, ast.ClassDef)}
        self.functions = {node.name: node for node in self.scopes if isinstance(node, Function)}
        self.calls = lists((_function_of(node.func), node) for node in nodes if isinstance(node, ast.Call))
        for call in [each for several in self.calls.values() for each in several]:
            loop = next(iter([*_of_words(call, "train_loop_per_worker"), *call.args[:1]]), None)
            for config in _of_words(call, "train_loop_config") if isinstance(loop, ast.Name) else ():
                assert isinstance(loop, ast.Name)
                self.calls.setdefault(loop.id, []).append(ast.Call(loop, [config], []))  # as Ray Train calls it
        self.assigned = lists(
            (name, (getattr(node, "lineno", 0), value, id(node) in plain))
            for node in nodes
            for name, value in _assignments(node)
        )
        self.environment = {
            name[12:-2]: several[0][1] for name, several in self.assigned.items() if name.startswith("os.environ[")
        }
        """Variables of the environment that it sets."""

    def of(self, name: str, line: int) -> ast.expr | None:
        """The value of a name at a line: the only one that it gets, or the last before, where nothing but the order of the lines
        decides; of a function's parameter, what the only call gives, or its default; None where that is not known."""
        several = self.assigned.get(name, [])
        if not name.isidentifier():  # fields are set in the order of the lines
            several = [each for each in several if each[0] < line]
        for function in self._around(line, Function):
            if any(function.lineno <= at <= (function.end_lineno or 0) for at, _, _ in several):
                break
            if name in _parameters(function) and (value := self._argument(function, name)) is not None:
                return value
        whole = (name, len(several))
        if whole not in self.lone:
            self.lone[whole] = len({"" if value is None else ast.dump(value) for _, value, _ in several}) == 1
        if self.lone[whole]:
            return several[0][1]
        before = sorted((each for each in several if each[0] < line), key=lambda each: each[0])
        return before[-1][1] if before and all(plain for _, _, plain in before) else None

    def part(self, node: ast.expr) -> ast.expr | None:
        """The expression that a name, a field, a key or a call stands for; None where that is not known.

        Such are `config.model`, `table["a"][1]`, `os.environ.get("MODEL", "gpt2")`, `settings.get("batch", 4)`, `read_settings()`.

        >>> names = Names(ast.parse("class Run:\\n    size = 8\\nrun = Run()\\ntable = {'a': [1, 2]}"))
        >>> [worked_out(ast.parse(text, mode="eval").body, names, {}) for text in ("run.size", "table['a'][1]")]
        [8, 2]
        """
        if isinstance(node, ast.Name):
            return self.of(node.id, node.lineno)
        if isinstance(node, ast.Call):
            return self._returned(node)
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and (value := self.of(ast.unparse(node), node.lineno)) is not None:
                return value
            around = self._around(node.lineno, ast.ClassDef) if own else []
            return self._field(around[0], node.attr) if around else self._inside(node.value, node.attr)
        if not isinstance(node, ast.Subscript) or (key := getattr(node.slice, "value", None)) is None:
            return None
        if ast.unparse(node.value) == "os.environ":
            return self._variable(key, None)
        return self.of(ast.unparse(node), node.lineno) or self._inside(node.value, key)

    def stands(self, node: ast.expr) -> ast.expr:
        """The expression that a name, a field or a key stands for, as far as it is known."""
        self.left -= 1
        if id(node) in self.open or len(self.open) > 50 or self.left < 0:
            return node
        self.open.add(id(node))
        value = self.part(node)
        whole = node if value is None else self.stands(value)
        self.open.discard(id(node))
        return whole

    def declared(self, node: ast.Attribute) -> ast.expr | None:
        """The default of an argument that a parser fills: of the one field or option of its name; None where there are several."""
        if not isinstance(node.value, ast.Name) or node.value.id not in self.parsed:
            return None
        fields = [self._field(owner, node.attr) for owner in self.classes.values()]
        options = [
            default
            for call in self.calls.get(".add_argument", [])
            if any(getattr(word, "value", "") == f"--{node.attr}" for word in call.args)
            or any(getattr(word, "value", "") == f"--{node.attr.replace('_', '-')}" for word in call.args)
            for default in _of_words(call, "default")
        ]
        several = [each for each in (*fields, *options) if each is not None]
        return several[0] if len(several) == 1 else None

    def _around(self, line: int, kind: Any) -> list[Any]:
        """Functions or classes that a line is in, the innermost first."""
        if line not in self.around:
            within = (node for node in self.scopes[::-1] if node.lineno <= line <= (node.end_lineno or 0))
            self.around[line] = list(within)
        return [node for node in self.around[line] if isinstance(node, kind)]

    def _argument(self, function: Function, name: str) -> ast.expr | None:
        """The argument of a function in its only call, or its default, which click's decorators may say too."""
        names = _parameters(function)
        method = names[:1] in (["self"], ["cls"])
        owner = next(iter(self._around(function.lineno, ast.ClassDef)), None) if method else None
        own = function.name if owner is None else owner.name if function.name == "__init__" else f".{function.name}"
        calls = self.calls.get(own, [])
        passed = [
            _of_words(call, name)
            or next((call.args[index : index + 1] for index in [names.index(name) - method] if index >= 0), [])
            for call in calls
            if not any(isinstance(each, ast.Starred) for each in call.args) and all(word.arg for word in call.keywords)
        ]
        if len({ast.dump(each[0]) if each else "" for each in passed}) > 1 or len(passed) < len(calls):
            return None
        if passed and passed[0]:
            return passed[0][0]
        for flag in function.decorator_list:
            words = [
                str(getattr(each, "value", "")).lstrip("-").replace("-", "_") for each in getattr(flag, "args", ())
            ]
            if isinstance(flag, ast.Call) and name in words:
                return next(iter(_of_words(flag, "default")), None)
        whole = function.args
        of_place = dict(
            zip([each.arg for each in [*whole.posonlyargs, *whole.args]][::-1], whole.defaults[::-1], strict=False)
        )
        of_word = dict(zip([each.arg for each in whole.kwonlyargs], whole.kw_defaults, strict=True))
        if (default := (of_place | of_word).get(name)) is not None:
            return _default(default)
        kind = next((each.annotation for each in [*whole.args, *whole.kwonlyargs] if each.arg == name), None)
        return kind if isinstance(kind, ast.Name) and kind.id in self.classes else None

    def _returned(self, call: ast.Call) -> ast.expr | None:
        name = called(call.func)
        first = getattr(call.args[0], "value", None) if call.args else None
        if name in ("environ.get", "os.getenv", "getenv"):
            return self._variable(str(first), call.args[1] if len(call.args) > 1 else None)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and first is not None:
            whole = self.stands(call.func.value)
            inside = self._inside(call.func.value, first)
            return (
                inside
                if inside is not None or not isinstance(whole, ast.Dict)
                else next(iter(call.args[1:]), ast.Constant(None))
            )
        function = self.functions.get(name.removeprefix("self."))
        returned = (
            [] if function is None else [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
        )
        return returned[0] if len(returned) == 1 else None

    def _variable(self, name: str, default: ast.expr | None) -> ast.expr | None:
        return None if STARTED.search(name) else self.environment.get(name, default)

    def _inside(self, node: ast.expr, key: Any) -> ast.expr | None:
        """A field or a key of what an expression stands for: of an object of a class of the program, of a dict, of a list."""
        whole = self.stands(node)
        if isinstance(whole, ast.Name) and whole.id in self.classes:
            return self._field(self.classes[whole.id], str(key))
        if isinstance(whole, ast.List | ast.Tuple):
            return whole.elts[key] if isinstance(key, int) and -len(whole.elts) <= key < len(whole.elts) else None
        if isinstance(whole, ast.Dict):
            pairs = [*zip(whole.keys, whole.values, strict=True)][::-1]
            for word, value in pairs:
                part = self._inside(value, key) if word is None else value
                if part is not None and (word is None or getattr(word, "value", None) == key):
                    return part
        if isinstance(whole, ast.Call):
            name, first = called(whole.func), whole.args[0] if whole.args else None
            if name in self.classes:
                return self._field(self.classes[name], str(key), whole)
            if name == "dict" or SPACES.search(name):
                return next(iter(_of_words(whole, key)), None) or (None if first is None else self._inside(first, key))
            if isinstance(first, ast.Name) and first.id in self.classes:  # a parser that fills it
                return self._field(self.classes[first.id], str(key))
        return None

    def _field(self, owner: ast.ClassDef, name: str, call: ast.Call | None = None) -> ast.expr | None:
        """A field of an object: what its making gives, its class's default, or what a method sets."""
        self.left -= 1
        if self.left < 0:
            return None
        first, last = owner.lineno, owner.end_lineno or 0
        parts = dict(_assignments_of(owner.body))
        makes = any(isinstance(node, Function) and node.name == "__init__" for node in owner.body)
        if call is not None and not makes:
            index = [*parts].index(name) if name in parts else len(call.args)
            passed = _of_words(call, name) or call.args[index : index + 1]
            if passed:
                return passed[0]
        own = [value for line, value, _ in self.assigned.get(f"self.{name}", []) if first <= line <= last]
        if len({"" if value is None else ast.dump(value) for value in own}) == 1:
            return own[0]
        if own or parts.get(name) is not None:
            return None if own else _default(parts[name])
        bases = (self.classes.get(getattr(base, "id", "")) for base in owner.bases)
        return next(
            (part for base in bases if base not in (None, owner) and (part := self._field(base, name)) is not None),
            None,
        )


def _function_of(called_as: ast.expr) -> str:
    """The function that a call runs, which Modal and Ray call as `train.remote(...)`; a dot before the name of a method."""
    if not isinstance(called_as, ast.Attribute):
        return getattr(called_as, "id", "")
    run = called_as.attr in ("remote", "local", "spawn") and isinstance(called_as.value, ast.Name)
    return called_as.value.id if run else f".{called_as.attr}"  # type: ignore[attr-defined]


def _parameters(function: Function) -> list[str]:
    whole = function.args
    return [each.arg for each in (*whole.posonlyargs, *whole.args, *whole.kwonlyargs)]


def _of_words(call: ast.Call, name: object) -> list[ast.expr]:
    """The value of a keyword of a call, if it has it."""
    return [word.value for word in call.keywords if word.arg == name]


def _default(node: ast.expr | None) -> ast.expr | None:
    """The default that `field(default=4)`, `Field(4)` or `typer.Option(4)` says; any other expression as it is."""
    if not isinstance(node, ast.Call) or not DEFAULTS.search(called(node.func)):
        return node
    built = [value.body if isinstance(value, ast.Lambda) else None for value in _of_words(node, "default_factory")]
    return next(iter([*_of_words(node, "default"), *built, *node.args]), None)


def _assignments_of(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """The fields of a class in order, with their defaults."""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        else:
            yield from _assignments(node)


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a statement assigns to, and their values; None where only a run gives them."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
                yield ast.unparse(target), node.value
            elif isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                for position, each in enumerate(target.elts):
                    if isinstance(each, ast.Name):
                        yield each.id, values[position] if len(values) == len(target.elts) else None
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield ast.unparse(node.target), node.value
    elif isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
        yield node.target.id, None


def called(function: ast.expr) -> str:
    """The last two names of what is called: `FastLanguageModel.from_pretrained`, `SFTConfig`."""
    if isinstance(function, ast.Attribute):
        owner = function.value
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        return f"{name}.{function.attr}" if name else function.attr
    return function.id if isinstance(function, ast.Name) else ""
