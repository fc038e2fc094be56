"""A command line, or the shell script that contains one, as a document. It is parsed and never run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.ideas.coverage import words
from loadgauge.job_files.ideas.table import MISSING
from loadgauge.job_files.reading.shell import Word, variables_of, words_of

Style = Literal["switch", "flags", "value", "tyro", "hydra"]
SWITCHES = ("switch", "flags")
NAME = re.compile(r"--[A-Za-z][\w.\-]*(?:=|$)")
HYDRA = re.compile(r"\+{0,2}[A-Za-z_][\w@/]*(?:\.\w+)+=")
UNDOTTED = re.compile(r"[a-z_]+=")
ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}$")
SUBCOMMAND = re.compile(r"[a-z][a-z-]*:[a-z][a-z-]*$")


class Option(NamedTuple):
    """An option of a command line, its words and their places; `inline`: the value is in the same word, after an equals sign."""

    name: str
    shown: str
    start: int
    end: int
    values: tuple[Word, ...]
    inline: bool


class Argv:
    """Options of a command line. Dashes and underscores of a name are the same.

    style: `switch` (Megatron: --bf16), `flags` (OpenRLHF: the same, with underscores), `value` (transformers: --bf16 True),
        `tyro` (torchtitan: --a.b, --a.no-b) or
        `hydra` (verl: a.b=True), in which new options are written
    objects: options whose value is a JSON object
    outside: values of variables that a script sets nowhere

    >>> script = "torchrun --nproc-per-node 8 pretrain_gpt.py \\\\\\n  --bf16 \\\\\\n  --micro-batch-size 1  # small\\n"
    >>> document = Argv(script)
    >>> document.names()
    ('nproc_per_node', 'bf16', 'micro_batch_size')
    >>> document.put("micro_batch_size", 2)
    >>> document.put("tensor_model_parallel_size", 8)
    >>> print(document.text())
    torchrun --nproc-per-node 8 pretrain_gpt.py \\
      --bf16 \\
      --micro-batch-size 2 \\
      --tensor-model-parallel-size 8  # small
    """

    syntax = "argv"

    def __init__(
        self,
        text: str,
        style: Style = "switch",
        objects: frozenset[str] = frozenset(),
        outside: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.style, self.objects, self.outside = text, style, objects, outside or {}
        self._parse()

    def _parse(self) -> None:
        self.variables = variables_of(self.source)
        self.words = list(words_of(self.source, self.variables))
        self.options: dict[str, list[Option]] = {}
        for option in _options(self.words):
            self.options.setdefault(option.name, []).append(option)
        self.doubtful = {
            name
            for name, options in self.options.items()
            if len({tuple(word.text for word in option.values[:1]) for option in options}) > 1
        }

    def names(self) -> tuple[str, ...]:
        """The names of all options, in order; of an option whose value is JSON, the paths inside it."""
        names: list[str] = []
        for name in self.options:
            inner = self._object(name)
            names += [name] if inner is None else [f"{name}.{key}" for key in _flat(inner)]
        return tuple(names)

    def _object(self, name: str) -> dict[str, Any] | None:
        options = self.options.get(name)
        if not options or not options[0].values or not options[0].values[0].text.lstrip().startswith("{"):
            return None
        try:
            value = json.loads(options[0].values[0].text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def get(self, key: str) -> Any:
        """The value of an option: True for a switch, a word, a list of words, False for `--no-key`, or `MISSING`.

        Raises `ConfigError` where it is given twice with different values.
        """
        options = self.options.get(key)
        if options is None:
            if _negative(key) in self.options:
                return False
            name, _, rest = key.partition(".")
            node: Any = self._object(name) if rest else None
            for part in rest.split("."):
                node = node.get(part, MISSING) if isinstance(node, dict) else MISSING
            return node
        if key in self.doubtful:
            first, second = (" ".join(word.text for word in option.values) for option in (options[0], options[-1]))
            raise ConfigError(
                f"is given as {first!r} and as {second!r}; a script is not run, so keep one", key=options[0].shown
            )
        values = [word.text for word in options[0].values]
        if not values:
            return True
        inner = self._object(key)
        if inner is not None or len(values) > 1:
            return values if inner is None else inner
        listed = self.style == "hydra" and values[0][:1] == "[" and values[0][-1:] == "]"
        return [word.strip("\"' ") for word in values[0][1:-1].split(",")] if listed else values[0]

    def put(self, key: str, value: Any) -> None:
        """Sets the value of an option in place, or adds the option after the last one of the tool."""
        name, _, rest = key.partition(".")
        if rest and name in self.objects:
            inner = self._object(name) or {}
            place = inner
            *sections, last = rest.split(".")
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
            key, value = name, inner
        if isinstance(value, bool) and self.style in (*SWITCHES, "tyro"):
            self.drop(key)
            if not value and self.style in SWITCHES:
                return
            key, value = (key if value else _negative(key)), True
        words = [] if value is True and self.style in (*SWITCHES, "tyro") else _spelled(value)
        if self.style == "hydra" and isinstance(value, list):
            words = [f"'[{','.join(words)}]'"]
        options = self.options.get(key)
        if options:
            for option in reversed(options):
                self._replace(option, words, isinstance(value, list))
        else:
            self._insert(key, words)
        self._parse()

    def _replace(self, option: Option, words: list[str], all_words: bool) -> None:
        values = option.values
        if not values:
            if words:
                self.source = f"{self.source[: option.end]} {' '.join(words)}{self.source[option.end :]}"
            return
        # A positional word after the value, such as the script's name, stays.
        last = values[-1 if all_words else 0]
        self.source = self.source[: values[0].start] + " ".join(words) + self.source[last.end :]

    def _insert(self, key: str, words: list[str]) -> None:
        if ":" in key:
            spelled = key.replace("_", "-")
        elif self.style == "hydra" and key not in LAUNCHER:
            spelled, words = f"{key}={words[0]}", []
        else:
            spelled = self.shown(key)
        new = " ".join([spelled, *words])
        anchor = self._anchor(key in LAUNCHER)
        if anchor is None:
            self.source = self.source.rstrip("\n") + (" " if self.source.strip() else "") + new + "\n"
            return
        line = self.source.rfind("\n", 0, anchor) + 1
        end = self.source.find("\n", anchor)
        rest = self.source[anchor : len(self.source) if end < 0 else end]
        indent = re.match(r"[ \t]*", self.source[line:])[0]  # type: ignore[index]
        alone = self.source[line:anchor].strip().startswith(("-", '"-', "'-")) or HYDRA.match(
            self.source[line:anchor].strip()
        )
        if self._in_array(anchor):
            joint = f"\n{indent}" if alone else " "
        elif rest.strip() == "\\" or self.source[line - 2 : line].startswith("\\"):
            joint = f" \\\n{indent or '    '}"
        else:
            joint = " "
        self.source = self.source[:anchor] + joint + new + self.source[anchor:]

    def _anchor(self, launcher: bool) -> int | None:
        """Where the last option ends that the tool takes, or its launcher."""
        ends = [
            option.end if not option.values else option.values[0 if launcher else -1].end
            for options in self.options.values()
            for option in options
            if (option.name in LAUNCHER) == launcher and ":" not in option.name
        ]
        if ends:
            return max(ends)
        return None if not self.words else self.words[0].end if launcher else self.words[-1].end

    def _in_array(self, place: int) -> bool:
        return self.source.rfind("=(", 0, place) > self.source.rfind(")", 0, place)

    def drop(self, key: str) -> None:
        """Removes an option if it is there, and its line if nothing else is on it."""
        name, _, rest = key.partition(".")
        inner = self._object(name) if name in self.objects and rest else None
        if inner is not None and self.get(key) is not MISSING:
            place = inner
            for part in rest.split(".")[:-1]:
                place = place[part]
            del place[rest.rpartition(".")[2]]
            if inner:
                self._replace(self.options[name][0], _spelled(inner), False)
            else:
                self.drop(name)
            self._parse()
            return
        for option in sorted(
            [*self.options.get(key, ()), *self.options.get(_negative(key), ())], reverse=True, key=_start
        ):
            end = option.values[0].end if option.values and not option.inline else option.end
            start = option.start
            if (
                start
                and self.source[start - 1 : start] in "\"'"
                and self.source[end : end + 1] == self.source[start - 1]
            ):
                start, end = start - 1, end + 1
            line = self.source.rfind("\n", 0, start) + 1
            stop = self.source.find("\n", end)
            stop = len(self.source) if stop < 0 else stop
            if not self.source[line:start].strip() and self.source[end:stop].strip() in ("", "\\"):
                if self.source[end:stop].strip() == "" and line >= 2 and self.source[line - 2] == "\\":
                    self.source = self.source[: line - 2].rstrip() + self.source[stop:]
                else:
                    self.source = self.source[:line] + self.source[stop + 1 :]
            else:
                self.source = self.source[:start].rstrip(" ") + self.source[end:]
            self._parse()

    def shown(self, key: str) -> str:
        """The name of an option as the file spells it, or would."""
        options = self.options.get(key) or self.options.get(_negative(key))
        if options:
            return options[0].shown
        if ":" in key or (self.style == "hydra" and key not in LAUNCHER):
            return key
        return f"--{key.replace('_', '-') if self.style == 'switch' else key}"

    @property
    def program(self) -> tuple[str, ...]:
        """The words that are not options, such as the launcher, the script and its subcommand."""
        return tuple(word.text for word in self.words if not word.text.startswith("-"))

    def text(self) -> str:
        """The script with all changes."""
        return self.source


LAUNCHER = words(
    """
    nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id num_processes num_machines
    machine_rank main_process_ip main_process_port tee local_ranks_filter role config_file m log_dir redirects num_nodes
    num_gpus hostfile
    """
)
"""Options of torchrun, `accelerate launch` and `deepspeed`."""


def _start(option: Option) -> int:
    return option.start


def _negative(key: str) -> str:
    """The name of the switch that turns another off: `no_bf16`, `training.no_compile`."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}no_{name}"


def _spelled(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"'{json.dumps(value)}'"]
    if isinstance(value, list | tuple):
        return [str(word) for word in value]
    return [f"'{value}'" if re.search(r"\s", str(value)) and str(value)[0] != "'" else str(value)]


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _options(words: list[Word]) -> Iterator[Option]:
    """Each option with the words up to the next one."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if _overrides(word) or (NAME.match(word.text) and "=" in word.text):
            name, _, value = word.text.partition("=")
            inner = word.start + word.raw.index("=") + 1
            end = word.end - (word.raw[0] in "\"'")
            yield Option(
                name.lstrip("-+").replace("-", "_"),
                name.lstrip("+"),
                word.start,
                word.end,
                (Word(inner, end, value.strip("\"'")),),
                True,
            )
        elif SUBCOMMAND.match(word.text) and not word.text.startswith("-"):
            yield Option(word.text.replace("-", "_"), word.text, word.start, word.end, (), False)
        elif NAME.match(word.text):
            values = []
            if index < len(words) and not words[index].first and _pairs(words[index]):
                values.append(words[index])  # such as `--optim_args rank=64`
                index += 1
            while index < len(words) and not (words[index].first or _begins(words[index])):
                values.append(words[index])
                index += 1
            yield Option(word.text.lstrip("-").replace("-", "_"), word.text, word.start, word.end, tuple(values), False)


def _begins(word: Word) -> bool:
    # All the words of an array are options of their own.
    return bool(NAME.match(word.text) or _overrides(word) or SUBCOMMAND.match(word.text) or ARRAY.match(word.text))


def _pairs(word: Word) -> bool:
    """Return whether a word is a value of its own kind, `name=number,...`, and not an override with a section."""
    return bool(UNDOTTED.match(word.text) and not HYDRA.match(word.text))


def _overrides(word: Word) -> bool:
    """Return whether a word is one of Hydra's overrides; without dots at the start of a line it would be a variable."""
    return bool(HYDRA.match(word.text) or (UNDOTTED.match(word.text) and not word.first))
