"""JSON, YAML and TOML as documents whose keys are paths with dots. They are read as data and written back as they were."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.families.hf import decode
from loadgauge.job_files.ideas.table import MISSING

DEEPEST = 40
MOST_KEYS = 20_000
MOST_VALUES = 100_000
"""Values of a YAML file with every alias written out; a file of the largest size has fewer without aliases."""
INDENT = 2
REFERRED = 10
"""References of OmegaConf to each other."""
REFERENCE = re.compile(r"\$\{\s*(\.*[A-Za-z_][\w.]*)\s*\}")
PRODUCT = re.compile(r"\$\{\s*(mul|div)\s*:\s*([^{},]{1,80}?)\s*,\s*([^{},]{1,80}?)\s*\}")


class Nested:
    """Mappings within mappings. `sections`: the section of a key without dots, in a file that has sections.

    >>> document = json_document('{"zero_optimization": {"stage": 2}, "lr": 1e-5}')
    >>> document.names()
    ('zero_optimization.stage', 'lr')
    >>> document.put("zero_optimization.stage", 3)
    >>> print(document.text())
    {"zero_optimization": {"stage": 3}, "lr": 1e-5}
    """

    def __init__(
        self,
        syntax: str,
        root: Any,
        dump: Callable[[Any], str],
        table: Callable[[], Any] = dict,
        sections: dict[str, str] | None = None,
    ) -> None:
        self.syntax, self.root, self.dump, self.table = syntax, root, dump, table
        self.sections = sections or {}
        self.skipped: tuple[str, ...] = ()
        self._find()

    def _find(self) -> None:
        """Finds the keys as a table names them, and their places."""
        self.paths = {self._named(path): path for path, _ in leaves(self.root)}

    def _named(self, path: tuple[str, ...]) -> str:
        if self.sections and (len(path) == 1 or path[0] in self.sections.values()):
            return path[-1].replace("-", "_")
        return ".".join(path)

    def _place(self, key: str) -> tuple[str, ...]:
        section = self.sections.get(key)
        whole = (key,) if self.sections else tuple(key.split("."))
        return self.paths.get(key) or ((section, key) if section is not None and section in self.root else whole)

    def names(self) -> tuple[str, ...]:
        """The paths of all values, in order."""
        return tuple(self.paths)

    def get(self, key: str) -> Any:
        """The value of a key, with what it refers to (`${a.b}`); a mapping for a section; `MISSING` where there is none."""
        value = self.raw(key)
        if not isinstance(value, str) or "${" not in value:
            return value
        return resolved(key, value, {name: self.raw(name) for name in self.paths})

    def raw(self, key: str) -> Any:
        """The value of a key as it stands, a mapping where the key is that of a section, or `MISSING`."""
        node = self.root
        for name in self._place(key):
            if not isinstance(node, dict) or name not in node:
                return MISSING
            node = node[name]
        return node

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key in place, or adds the key and the sections around it."""
        path = self._place(key)
        node = self.root
        for name in path[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = self.table()
            node = node[name]
        node[path[-1]] = value
        self._find()

    def drop(self, key: str) -> None:
        """Removes a key if it is there, and keeps the comments after it."""
        path = self._place(key)
        if self.get(key) is MISSING:
            return
        node = self.root
        for name in path[:-1]:
            node = node[name]
        _keep_comments(node, path[-1])
        with suppress(KeyError):  # ruamel.yaml's, once the key is out, of a mapping that others merge (`<<: *base`)
            del node[path[-1]]
        self._find()

    def shown(self, key: str) -> str:
        """The path of a key as the file spells it, or would."""
        return ".".join(self._place(key))

    def text(self) -> str:
        """The file with all changes."""
        return self.dump(self.root)


def resolved(key: str, value: Any, flat: Mapping[str, Any], depth: int = 0) -> Any:
    """A value with what it refers to in its place; what cannot be resolved keeps its dollar sign."""
    if not isinstance(value, str) or "${" not in value or depth > REFERRED or len(value) > 500:
        return value

    def of_name(match: re.Match[str]) -> Any:
        name = _absolute(key, match[1])
        return resolved(name, flat[name], flat, depth + 1) if name in flat else match[0]

    if (whole := REFERENCE.fullmatch(value.strip())) is not None:
        return of_name(whole)
    text = REFERENCE.sub(lambda match: str(of_name(match)), value)
    for _ in range(REFERRED):
        product = PRODUCT.search(text)
        if product is None:
            break
        text = text.replace(product[0], _multiplied(*product.groups()), 1)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else text


def _multiplied(how: str, first: str, second: str) -> str:
    numbers = [int(word) for word in (first, second) if re.fullmatch(r"[0-9]{1,9}", word.strip())]
    if len(numbers) < 2 or (how == "div" and not numbers[1]):
        return "$(unknown)"
    return str(numbers[0] // numbers[1] if how == "div" else numbers[0] * numbers[1])


def _absolute(key: str, name: str) -> str:
    """The key that a reference names: `.a` beside the key that has it, `..a` beside its section."""
    dots = len(name) - len(name.lstrip("."))
    return ".".join([*(key.split(".")[:-dots] if dots else ()), name.lstrip(".")])


def leaves(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path of every value that is not a mapping, and the value. An explicit stack: a hostile file may nest without end."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), root)]
    count = 0
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict) and (value or not path):
            if len(path) >= DEEPEST:
                raise ConfigError("is nested too deeply")
            stack += [((*path, str(key)), inner) for key, inner in reversed(list(value.items()))]
            count += len(value)
        elif path:
            yield path, value
        if count > MOST_KEYS:
            raise ConfigError(f"has more than {MOST_KEYS} keys")


def json_document(text: str, sections: dict[str, str] | None = None) -> Nested:
    """Parses JSON; order, indentation and the spelling of numbers are kept. Raises `ConfigError`."""
    decode(text.encode())  # refuses what is not strict JSON, or names a key twice
    numbers: dict[str, str] = {}

    def kept(spelling: str) -> float:
        value = float(spelling)
        numbers[repr(value)] = spelling
        return value

    try:
        root = json.loads(text.removeprefix("\ufeff"), parse_float=kept)
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"is not valid JSON: {error}") from None
    refuse(not isinstance(root, dict), "must be a JSON object")
    indent = re.search(r"\n([ \t]+)\S", text)
    space = indent[1] if indent else None if root and "\n" not in text.strip() else " " * INDENT
    end = "\n" if text.endswith("\n") else ""

    def dump(value: Any) -> str:
        written = json.dumps(value, indent=space, ensure_ascii=False)
        # A float is spelled as it was read; a text cannot look like one of them outside its quotes.
        return (
            re.sub(
                r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?',
                lambda match: numbers.get(match[0], match[0]),
                written,
            )
            + end
        )

    return Nested("json", root, dump, dict, sections)


def toml_document(text: str, sections: dict[str, str] | None = None) -> Nested:
    """Parses TOML; comments and layout are kept, but for tables of one name with others between. Raises `ConfigError`."""
    import tomlkit
    from tomlkit.exceptions import KeyAlreadyPresent

    root: Any
    try:
        root = plain = tomllib.loads(text)  # stricter, and safe from deep nesting
        root = tomlkit.parse(text)
        root.unwrap()  # tables out of order are joined only here
    except RecursionError:
        raise ConfigError("is nested too deeply") from None
    except KeyAlreadyPresent:  # valid TOML, whose layout tomlkit does not keep
        root = plain
    except ValueError as error:
        raise ConfigError(f"is not valid TOML: {error}") from None
    return Nested("toml", root, lambda value: str(tomlkit.dumps(value)), tomlkit.table, sections)


def yaml_document(text: str, sections: dict[str, str] | None = None) -> Nested:
    """Parses YAML 1.2; comments and layout are kept. Raises `ConfigError`, also for tags, which could name code."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    _refuse_tags(text)
    loader = YAML(typ="rt")
    loader.preserve_quotes = True
    loader.constructor.allow_duplicate_keys = True
    repeated: dict[str, None] = {}

    def last_counts(node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        """Let the last of several values of a key count, as it does in PyYAML, with which the tools read their files."""
        if key in mapping:
            repeated[f"{str(key)[:40]} is given more than once, and its last value is read"] = None
        return True

    loader.constructor.check_mapping_key = last_counts
    loader.width = 100_000
    sequence = re.search(r"^(\s*)[\w.-]+:[ \t]*(?:#.*)?\n(?:[ \t]*#.*\n)*(\s*)- ", text, re.MULTILINE)
    if sequence is not None and len(sequence[2]) > len(sequence[1]):
        offset = len(sequence[2].replace("\n", "")) - len(sequence[1].replace("\n", ""))
        loader.indent(mapping=INDENT, sequence=offset + 2, offset=offset)
    with _yaml_errors():
        documents = list(loader.load_all(text)) if text.strip() else [CommentedMap()]
    refuse(len(documents) != 1, f"holds {len(documents)} YAML documents; one job is one document")
    root = CommentedMap() if documents[0] is None else documents[0]
    refuse(not isinstance(root, dict), "must be a YAML mapping of named values")
    _refuse_bombs(root)

    def dump(value: Any) -> str:
        from io import StringIO

        target = StringIO()
        loader.dump(value, target)
        return target.getvalue()

    parsed = Nested("yaml", root, dump, CommentedMap, sections)
    parsed.skipped = tuple(repeated)
    return parsed


NOTES = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/|,(?=\s*(?:[}\]]|//[^\n]*\n\s*[}\]]))', re.DOTALL)
"""Strings of JSON, to be kept, and the comments and last commas that editors allow."""


def plain_yaml(text: str, ending: str = "") -> list[Any]:
    """Return the values of every document of a text in YAML, TOML, or JSON with comments, by the ending; none where it is not.

    >>> plain_yaml('{"a": [1, 2,], // "b"\\n}', ".json"), plain_yaml("a: [1")
    ([{'a': [1, 2]}], [])
    """
    from ruamel.yaml import YAML

    try:
        with _yaml_errors():
            if ending == ".toml":
                return [tomllib.loads(text)]
            if ending == ".json":
                return [decode(NOTES.sub(lambda match: match[1] or "", text).encode())]
            _refuse_tags(text)
            roots = list(YAML(typ="safe", pure=True).load_all(text))
            for root in roots:
                _refuse_bombs(root if isinstance(root, dict | list) else {})
            return roots
    except ConfigError:
        return []


def _refuse_tags(text: str) -> None:
    """Looks through the tokens before anything is built of them: for tags, anchors without number, endless nesting."""
    from ruamel.yaml import YAML
    from ruamel.yaml.tokens import AnchorToken, TagToken

    anchors = depth = 0
    with _yaml_errors():
        for token in YAML(typ="safe", pure=True).scan(text):
            kind = type(token).__name__
            if isinstance(token, TagToken):
                raise ConfigError(f"has the YAML tag {_tag(token)!r}; a job file is plain data")
            anchors += isinstance(token, AnchorToken)
            depth += kind.endswith(("MappingStartToken", "SequenceStartToken"))
            depth -= kind in ("BlockEndToken", "FlowMappingEndToken", "FlowSequenceEndToken")
            if depth > DEEPEST:
                raise ConfigError("is nested too deeply")
    refuse(anchors > 100, f"has {anchors} YAML anchors; a job file has a few")


def _refuse_bombs(root: Any) -> None:
    """Refuses values that hold themselves, and those that are huge once their aliases are written out.

    An alias is one object however often it is used, so each is counted once, by a stack of its own.
    """
    sizes: dict[int, int] = {}
    open_values: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        value, counted = stack.pop()
        inner = list(value.values()) if isinstance(value, dict) else list(value)
        inner = [part for part in inner if isinstance(part, dict | list)]
        if counted:
            open_values.discard(id(value))
            sizes[id(value)] = 1 + len(value) + sum(sizes[id(part)] for part in inner)
            if sizes[id(value)] > MOST_VALUES:
                raise ConfigError(f"has more than {MOST_VALUES:,} values once its YAML aliases are written out")
            continue
        if id(value) in sizes:
            continue
        if id(value) in open_values:
            raise ConfigError("is not valid YAML: a value holds itself")
        open_values.add(id(value))
        stack.append((value, True))
        stack += [(part, False) for part in inner if id(part) not in sizes]


def _tag(token: Any) -> str:
    value = token.value
    return "".join(part or "" for part in value) if isinstance(value, tuple) else str(value)


@contextmanager
def _yaml_errors() -> Iterator[None]:
    """Raises what ruamel.yaml raises for a text as `ConfigError`, in one line."""
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("is nested too deeply") from None
    except MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise ConfigError(f"is not valid YAML: {error.problem}{where}") from None
    except AttributeError:  # a merge key that names the mapping it is in
        raise ConfigError("is not valid YAML: a value holds itself") from None
    except (YAMLError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(f"is not valid YAML: {line}") from None


def _keep_comments(mapping: Any, key: str) -> None:
    """Hands the comment lines after a key to the key before it; ruamel.yaml would take them out with the key."""
    comments: Any = getattr(mapping, "ca", None)
    tokens = None if comments is None else comments.items.get(key)
    _, newline, rest = tokens[2].value.partition("\n") if tokens and tokens[2] else ("", "", "")
    if not rest.strip():
        return
    names = list(mapping)
    index = names.index(key)
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    if index == 0:
        for after in names[1:2]:
            lines = [line.strip().removeprefix("#").removeprefix(" ") for line in rest.splitlines() if line.strip()]
            mapping.yaml_set_comment_before_after_key(after, before="\n".join(lines), indent=0)
        return
    before = comments.items.setdefault(names[index - 1], [None, None, None, None])
    before[2] = before[2] or CommentToken("", CommentMark(0), None)
    before[2].value = before[2].value.rstrip("\n") + newline + rest


def parsed(text: str, syntax: str, sections: tuple[tuple[str, str], ...] = (), fills: str = "") -> Nested:
    """Return a text of JSON, TOML or YAML as keys and values. fills: what stands for the value in its group

    >>> parsed("a: {b: 1}", "yaml").get("a.b")
    1
    """
    reader = {"json": json_document, "toml": toml_document, "yaml": yaml_document}[syntax]
    return reader(re.sub(fills, r"\1", text) if fills else text, dict(sections) if syntax == "yaml" else None)


kept = lru_cache(maxsize=16)(parsed)
"""The same for files that others lie over, which nothing changes: a recipe of thousands of lines is read many times."""
