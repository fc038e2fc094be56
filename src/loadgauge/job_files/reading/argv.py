"""A command line, or the shell script that contains one, as a document. It is parsed and never run.

Of several commands the first that trains is the document's; where none has options, what the script's variables hold is.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import pairwise, takewhile
from typing import Any, Literal, NamedTuple

from loadgauge.core.base import ConfigError, lists
from loadgauge.job_files.ideas.coverage import words
from loadgauge.job_files.ideas.table import MISSING
from loadgauge.job_files.reading.nested import Nested, json_document
from loadgauge.job_files.reading.shell import Shell
from loadgauge.job_files.reading.shell_values import Word

Style = Literal["switch", "flags", "value", "tyro", "hydra"]
SWITCHES = ("switch", "flags")
NAME = re.compile(r"--[A-Za-z][\w.\-]*(?:=|$)")
HYDRA = re.compile(r"\+{0,2}[A-Za-z_][\w@/]*(?:\.\w+)+=")
UNDOTTED = re.compile(r"[a-z_]+=")
VARIABLE = re.compile(r"\$(?:\{\w+\[[@*]\]\}|@|\{?\w*(?:ARG|OPT|FLAG|PARAM|OVERRIDE|EXTRA)\w*\}?)$", re.IGNORECASE)
"""A variable that holds options, by its name."""
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
    outside: variables that are set where it is started; file: the script, beside which others are read
    skipped: what was taken for something that is not known, in words; idle: the program, where none of the commands trains

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
        file: str = "",
    ) -> None:
        self.source, self.style, self.objects, self.outside, self.file = text, style, objects, outside, file
        self._parse()

    def _parse(self) -> None:
        self.idle = ""
        self.shell = Shell(self.source, self.outside, self.file)
        self.words = self._chosen()
        self.variables = self.shell.variables | self._handed()
        self.skipped = tuple(dict.fromkeys(self.shell.notes))
        self.guessed = self.shell.guessed
        self.options = lists((option.name, option) for option in _options(self.words))
        self.program = tuple(word.text for word in self.words if not word.text.startswith("-"))
        """The words that are not options, such as the launcher, the script and its subcommand."""

    def _chosen(self) -> list[Word]:
        """The words of the command that trains: a program's with its launcher, without the words that start those."""
        commands = [_program(command) for command in self.shell.commands]
        asks = {"--help", "-h"}
        commands = [each for each in commands if any(map(_begins, each)) and not asks & {word.text for word in each}]
        ranks = [_rank(command) for command in commands]
        best = max(ranks, default=0)
        lines = [word for command in self.shell.commands if command[0].text.startswith("-") for word in command]
        if best < 2:
            held = [
                word._replace(first=index == 0)
                for value in self.shell.values.values()
                for text in (value if isinstance(value, list) else [value])
                if re.match(r"\s*--[A-Za-z]", text.text)
                for index, word in enumerate(self.shell.words_in(text))
            ]
            if lines or (
                held and sum(map(_begins, held)) > max((sum(map(_begins, each)) for each in commands), default=0)
            ):
                return lines or held
        if not commands:
            return [word for command in self.shell.commands for word in command]
        if best < 1:
            names = [word.text for word in commands[0] if not word.text.startswith("-")]
            script = next((name for name in names if name.endswith(".py")), names[0] if names else "")
            self.idle = "" if BUILDS.search(script) else script
        others = sum(rank == best for rank in ranks) - 1
        if others > 0 and best > 0:
            self.shell.notes.append(
                f"{others} more {'commands train' if others > 1 else 'command trains'}; the first is read"
            )
        return commands[ranks.index(best)]

    def _handed(self) -> dict[str, str]:
        """The variables that `ray job submit` hands to what it starts."""
        words = [word.text for command in self.shell.commands for word in command]
        texts = [
            after if word == RUNTIME else word.removeprefix(f"{RUNTIME}=") for word, after in pairwise([*words, ""])
        ]
        held: dict[str, str] = {}
        for word, text in zip(words, texts, strict=True):
            if word.startswith(RUNTIME):
                with suppress(ValueError, RecursionError, AttributeError, LookupError, TypeError):
                    held |= {name: str(value) for name, value in json.loads(text)["env_vars"].items()}
        return held

    @property
    def processes(self) -> int | None:
        """The processes that `mpirun` or `srun` is told to start, in the first command that it starts."""
        for command in self.shell.commands:
            words = [word.text for word in command[:40]]
            if words[0].rpartition("/")[2] in ("mpirun", "mpiexec", "srun"):
                told = re.search(r" (?:-n|-np|--ntasks)[ =](\d{1,6}) ", f"{' '.join(words)} ")
                return int(told[1]) if told else None
        return None

    def names(self) -> tuple[str, ...]:
        """The names of all options, in order; of an option whose value is JSON, the paths inside it."""
        objects = ((name, self._object(name)) for name in self.options)
        inside = ([name] if whole is None else [f"{name}.{key}" for key in whole.names()] for name, whole in objects)
        return tuple(key for keys in inside for key in keys)

    def _object(self, name: str) -> Nested | None:
        options = self.options.get(name)
        text = options[-1].values[0].text if options and options[-1].values else ""
        try:
            return json_document(text) if text.lstrip().startswith("{") else None
        except ConfigError:
            return None

    def get(self, key: str) -> Any:
        """The value of an option: True for a switch, a word, a list of words, False for `--no-key`, or `MISSING`.

        Of an option that is given twice, as a tool reads them, the last.
        """
        options = self.options.get(key)
        if options is None:
            if _negative(key) in self.options:
                return False
            name, _, rest = key.partition(".")
            whole = self._object(name) if rest else None
            return MISSING if whole is None else whole.raw(rest)
        values = [word.text for word in options[-1].values]
        if not values:
            return True
        inner = self._object(key)
        if inner is not None or len(values) > 1:
            return values if inner is None else inner.root
        if key == "nproc_per_node" and values[0] in ("gpu", "auto"):  # all of a machine, however many there are
            return MISSING
        listed = self.style == "hydra" and values[0][:1] == "[" and values[0][-1:] == "]"
        return [word.strip("\"' ") for word in values[0][1:-1].split(",")] if listed else values[0]

    def put(self, key: str, value: Any) -> None:
        """Sets the value of an option in place, or adds the option after the last one of the tool."""
        name, _, rest = key.partition(".")
        if rest and name in self.objects:
            inner = self._object(name) or json_document("{}")
            inner.put(rest, value)
            key, value = name, inner.root
        if isinstance(value, bool) and self.style in (*SWITCHES, "tyro"):
            self.drop(key)
            if not value and self.style in SWITCHES:
                return
            key, value = (key if value else _negative(key)), True
        words = [] if value is True and self.style in (*SWITCHES, "tyro") else _spelled(value)
        if self.style == "hydra" and isinstance(value, list):
            words = [f"'[{','.join(words)}]'"]
        options = [option for option in self.options.get(key, ()) if option.start >= 0]
        for option in sorted(options, reverse=True, key=lambda option: option.start):
            self._replace(option, words, isinstance(value, list))
        if not options:
            self._insert(key, words)
        self._parse()

    def _replace(self, option: Option, words: list[str], all_words: bool) -> None:
        values = option.values
        # A positional word after the value, such as the script's name, stays.
        start, end = (values[0].start, values[-1 if all_words else 0].end) if values else (option.end, option.end)
        gap = " " if words and not values else ""
        self.source = self.source[:start] + gap + " ".join(words) + self.source[end:]

    def _insert(self, key: str, words: list[str]) -> None:
        spelled = key.replace("_", "-") if ":" in key else self.shown(key)
        joined = self.style == "hydra" and key not in LAUNCHER and ":" not in key
        new = f"{key}={words[0]}" if joined else " ".join([spelled, *words])
        anchor = self._anchor(key in LAUNCHER, key)
        if anchor is None:
            self.source = self.source.rstrip("\n") + (" " if self.source.strip() else "") + new + "\n"
            return
        line = self.source.rfind("\n", 0, anchor) + 1
        rest = self.source[anchor:].partition("\n")[0]
        indent = re.match(r"[ \t]*", self.source[line:])[0]  # type: ignore[index]
        before = self.source[line:anchor].strip()
        alone = before.startswith(("-", '"-', "'-")) or HYDRA.match(before.lstrip("\"'+"))
        if self.source.rfind("=(", 0, anchor) > self.source.rfind(")", 0, anchor):  # in an array
            joint = f"\n{indent}" if alone else " "
        elif rest.strip() == "\\" or self.source[line - 2 : line].startswith("\\"):
            joint = f" \\\n{indent or '    '}"
        else:
            joint = " "
        self.source = self.source[:anchor] + joint + new + self.source[anchor:]

    def _anchor(self, launcher: bool, key: str) -> int | None:
        """Where the last option ends that the tool takes, or its launcher; of a path, the last that shares most of it."""
        path = key.split(".")
        ends = [
            (
                len(
                    [*takewhile(lambda pair: pair[0] == pair[1], zip(path[:-1], option.name.split("."), strict=False))]
                ),
                self._end(option, launcher),
            )
            for options in self.options.values()
            for option in options
            if (option.name in LAUNCHER) == launcher and ":" not in option.name and option.start >= 0
        ]
        if ends:
            return max(ends)[1]
        words = [word for word in self.words if word.start >= 0]
        return None if not words else words[0].end if launcher else words[-1].end

    def _end(self, option: Option, launcher: bool) -> int:
        """Where an option ends, with the quotes around it alone."""
        end = option.end if not option.values else option.values[0 if launcher else -1].end
        before = self.source[: option.start].rstrip("+-")
        quoted = option.inline and before[-1:] in ("'", '"') and before[-2:-1].isspace()
        return end + len(re.match(r"['\"]*", self.source[end:])[0]) if quoted else end  # type: ignore[index]

    def drop(self, key: str) -> None:
        """Removes an option if it is there, and its line if nothing else is on it."""
        name, _, rest = key.partition(".")
        inner = self._object(name) if name in self.objects and rest else None
        if inner is not None and inner.raw(rest) is not MISSING:
            inner.drop(rest)
            if inner.root:
                self._replace(self.options[name][-1], _spelled(inner.root), False)
            else:
                self.drop(name)
            self._parse()
            return
        options = [*self.options.get(key, ()), *self.options.get(_negative(key), ())]
        options = [option for option in options if option.start >= 0]
        for option in sorted(options, reverse=True, key=lambda option: option.start):
            end = option.values[0].end if option.values and not option.inline else option.end
            start = option.start
            if (
                start
                and self.source[start - 1 : start] in "\"'"
                and self.source[end : end + 1] == self.source[start - 1]
            ):
                start, end = start - 1, end + 1
            line = self.source.rfind("\n", 0, start) + 1
            stop = self.source.find("\n", end) % (len(self.source) + 1)
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

    def text(self) -> str:
        """The script with all changes."""
        return self.source


USED = re.compile(r"\$(?:\{(\w+)(?::?-[^}]*)?\}|(\w+))")
"""A variable where a script uses it."""


def at_variables(source: str, text: str) -> str:
    r"""Return a changed script in which values that took the place of variables stand where the only assignment has them.

    >>> at_variables("TP=4\nrun --tp $TP --bf16\n", "TP=4\nrun --tp 2 --bf16\n")
    'TP=2\nrun --tp $TP --bf16\n'
    """
    was, now = source.splitlines(), text.splitlines()
    for kind, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        for line, new in zip(was[a:b], now[c:d], strict=True) if kind == "replace" and b - a == d - c else ():
            bare, then = line.replace('"', ""), new.replace('"', "")
            for use in USED.finditer(bare):
                name = use[1] or use[2]
                value = re.fullmatch(rf"{re.escape(bare[: use.start()])}([\w.]+){re.escape(bare[use.end() :])}", then)
                told = rf"^([ \t]*(?:export[ \t]+)?{name}=[\"']?(?:\$\{{\w+:?-)?)[\w.]+(?=\}}?[\"']?[ \t]*(?:[;#].*)?$)"
                if value and len(re.findall(rf"\b{name}=|\bfor {name} in\b|\bread\b.*\b{name}\b", source)) == 1:
                    changed = re.sub(told, rf"\g<1>{value[1]}", text, count=1, flags=re.MULTILINE)
                    text = text if changed == text else changed.replace(new, line, 1)
    return text


RUNTIME = "--runtime-env-json"
LAUNCHER = words(
    """
    nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id num_processes num_machines
    machine_rank main_process_ip main_process_port tee local_ranks_filter role config_file m log_dir redirects num_nodes
    num_gpus hostfile
    """
)
"""Options of torchrun, `accelerate launch` and `deepspeed`."""


WRAPPERS = words(
    """
    uv srun env exec nohup time sudo numactl nsys ray mpirun mpiexec docker singularity apptainer stdbuf timeout command
    setsid torchx sky kubectl poetry pdm conda micromamba pixi ncu strace xargs echo
    """
)
"""Programs that start another one, which their last words are."""
PROGRAM = re.compile(
    r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|swift|megatron|llamafactory-cli|axolotl|tune|trl|litgpt|xtuner"
    r"|automodel|composer|lightning|bash|sh|\S+\.(?:py|sh)|\$\{?\w*PYTHON\w*\}?)$"
)
TRAINS = re.compile(
    r"train|tune|sft|dpo|grpo|ppo|rlhf|run_|torchrun|distributed|accelerate|deepspeed|main|swift|\.py$|-m$"
)
OTHERWISE = re.compile(
    r"(?:^|/)ray$|(?:^|[/_.-])(?:pip3?|serve|server|api_server|launch_server|convert\w*|preprocess\w*|prepare\w*|merge\w*"
    r"|download\w*|tokenize\w*|export|rollout|deploy|sample|chat|webchat|webui|eval|evaluate|validate|infer\w*|generate|wandb"
    r"|huggingface-cli|hf|ckpt\w*|checkpoint_\w*|mkdir|curl|wget|apt"
    r"|git|docker|ssh|nvidia-smi|awk|data_preprocess|lm_eval|quantize)(?:$|[/_.-])"
)
"""Programs that do something else than train."""


BUILDS = re.compile(r"train|tune|sft|dpo|grpo|ppo|distill")
LAUNCHES = re.compile(r"torchrun|accelerate|deepspeed|torch\.distributed")


def unread_program(line: Argv) -> str:
    """Return what is wrong with a script none of whose options is known, by what it starts; empty where it starts nothing."""
    words = [word.text for command in line.shell.commands for word in command[:20]]
    script = next((word for word in words if word.endswith((".sh", ".bash"))), "")
    if script and not line.options:
        return f"starts {script}, which is not there, and says no size of a run itself; give that script"
    program = next((word for word in words if word.endswith(".py")), "")
    why = "none of whose options is known here; give the run as flags (loadgauge estimate MODEL ...)"
    return f"starts {program}, {why}" if program else ""


def _program(command: list[Word]) -> list[Word]:
    """The words of a command from its program on, without those that only start it."""
    texts = [word.text for word in command]
    wraps = texts[0].rpartition("/")[2] in WRAPPERS or texts[0].startswith("$")
    start = next((index for index, text in enumerate(texts) if wraps and index and PROGRAM.fullmatch(text)), 0)
    # The script or module that a launcher starts is no value of the launcher's option before it.
    script = next((index for index, text in enumerate(texts) if index > start and text.endswith(".py")), 0)
    starts = {script, *(index for index, text in enumerate(texts) if text == "-m")} - {0}
    launched = LAUNCHES.search(" ".join(texts[start : start + 3])) is not None
    words = [word._replace(first=True) if launched and index in starts else word for index, word in enumerate(command)]
    return words[start:]


def _rank(command: list[Word]) -> int:
    """2 for a command that trains by its name, 1 for one that may, 0 for one that does something else."""
    program = [word.text for word in command[:40] if " " not in word.text and "=" not in word.text]
    names = [text for text in program if not text.startswith("--")]
    script = next((position for position, text in enumerate(names) if text.endswith(".py")), len(names))
    names = [*names[: min(script, 3)], *names[script : script + 1]]  # between them and after are values of options
    if any(OTHERWISE.search(name) for name in names):
        return 0
    return 1 + any(TRAINS.search(name) for name in names)


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


def _options(words: list[Word]) -> Iterator[Option]:
    """Each option with the words up to the next one."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if _overrides(word) or (NAME.match(word.text) and "=" in word.text):
            name, _, value = word.text.partition("=")
            equals = word.raw.find("=") if word.start >= 0 else -1
            inner, end = (word.start + equals + 1, word.end - (word.raw[0] in "\"'")) if equals >= 0 else (-1, -1)
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
    return bool(NAME.match(word.text) or _overrides(word) or SUBCOMMAND.match(word.text) or VARIABLE.match(word.text))


def _pairs(word: Word) -> bool:
    """Return whether a word is a value of its own kind, `name=number,...`, and not an override with a section."""
    return bool(UNDOTTED.match(word.text) and not HYDRA.match(word.text))


def _overrides(word: Word) -> bool:
    """Return whether a word is one of Hydra's overrides; without dots at the start of a line it would be a variable."""
    return bool(HYDRA.match(word.text) or (UNDOTTED.match(word.text) and not word.first))
