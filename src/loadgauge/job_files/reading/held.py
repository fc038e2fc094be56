"""Runs that a file holds in something else's words: commands of manifests, targets and cells, settings that a run wrote down.

Nothing is run, expanded or fetched. A part is a text in a syntax that job files have; its first line says what it is.
"""

import ast
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from loadgauge.core.base import ConfigError, is_command, read_table
from loadgauge.job_files.reading.nested import leaves, plain_yaml
from loadgauge.job_files.reading.values import UNKNOWN, Names, called, worked_out

HEAD = re.compile(r"#!held (\w+): (.*)\n")
"""The first line of a part: its syntax, and what it is."""
MOST_PARTS = 100
LONGEST_VALUE, LONGEST_LINE = 2_000, 50_000
LONGEST = 1_000_000
"""Letters of a log in which settings are looked for, from its beginning."""


Reader = Callable[[str, str], Iterator["Part"]]
"""Yields the runs in a text. file: where it is, beside which others may be"""


class Part(NamedTuple):
    """A run in a file: its name there, its syntax, its text, and in words what was taken."""

    name: str
    syntax: str
    text: str
    words: str

    @property
    def whole(self) -> str:
        """The text with its first line."""
        return f"#!held {self.syntax}: {' '.join(self.words.split())}\n{self.text}"


def parts(text: str, file: str) -> list[Part]:
    r"""Return the runs that a file holds in something else's words; none of a file that is a job file itself.

    >>> [part.name for part in parts("a:\n\ttorchrun a.py --bf16\nb:\n\ttorchrun b.py --bf16\n", "Makefile")]
    ['a', 'b']
    """
    name = os.path.basename(file).lower()
    reader = next((reader for test, reader in READERS.items() if re.search(test, name)), _log)
    return list(dict.fromkeys(islice(reader(text, file), MOST_PARTS)))


# -- texts with blocks -------------------------------------------------------------------------------------------------

FENCE = re.compile(r"(?ms)^[ \t]{0,20}(```|~~~)`{0,9}[ \t]{0,9}\{?[ \t]{0,9}(\w*)[^\n]*\n(.*?)^[ \t]{0,20}\1")
LANGUAGES = {
    **dict.fromkeys(("bash", "sh", "shell", "console", "zsh", ""), "argv"),
    **dict.fromkeys(("python", "py"), "python"),
    **dict.fromkeys(("yaml", "yml", "json"), "yaml"),
    "toml": "toml",
}


def _blocks(text: str, file: str) -> Iterator[Part]:
    """The fenced blocks of Markdown and Quarto."""
    for number, match in enumerate(FENCE.finditer(text), 1):
        syntax = LANGUAGES.get(match[2].lower())
        if syntax is not None:
            body = re.sub(r"(?m)^[ \t]*\$ ", "", match[3]) if syntax == "argv" else match[3]
            yield Part(str(number), syntax, body, f"its block {number} is read")


def _cells(text: str, file: str) -> Iterator[Part]:
    """The cells of a notebook that a shell runs, with the files that others write, as one script."""
    try:
        sources = ["".join(each["source"]) for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    lines: list[str] = []
    assigned = _assigned("\n".join(sources))
    for source in sources:
        magic, _, body = source.lstrip().partition("\n")
        if (match := re.match(r"%%(?:writefile|file)[ \t]+(?:-a[ \t]+)?(\S+)", magic)) is not None:
            lines.append(f"cat > {match[1]} <<'END OF CELL'\n{body.rstrip()}\nEND OF CELL")
        elif re.match(r"%%(?:bash|sh|script)\b", magic):
            lines.append(body)
        else:
            source = re.sub(r"(?m)^[ \t]*%(?!env )", "#", source)
            typed = re.findall(r"(?m)^[ \t]*[!%](?:env )?((?:.*\\\n)*.*)$", source)
            lines += [re.sub(r"\{(\w+)\}", lambda match: assigned.get(match[1], match[0]), line) for line in typed]
    yield Part("shell", "argv", "\n".join(lines) + "\n", "the cells that a shell runs are read")


TARGET = re.compile(r"(?m)^@?([A-Za-z_][\w./-]*)((?:[ \t][^:\n]*)?)::?(?!=)[^\n=]*\n((?:(?:[ \t]+[^\n]*)?\n)+)")
ASSIGNED = re.compile(r"(?m)^(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*(?::{0,3}|\?)=[ \t]*((?:.*\\\n)*.*)$")


def _assigned(text: str) -> dict[str, str]:
    return {name: value.replace("\\\n", " ").strip().strip("\"'") for name, value in ASSIGNED.findall(text)}


def _targets(text: str, file: str) -> Iterator[Part]:
    """The targets of a Makefile, or the recipes of a justfile, with the variables of the file."""
    text = text.rstrip("\n") + "\n"
    assigned = _assigned(text)
    for name, rest, body in TARGET.findall(text):
        defaults = dict(re.findall(r"[*+$]?(\w+)=[\"']?([^\"'\s]*)", rest))
        lines = re.sub(r"(?m)(?<!\\\n)^[ \t]+[@-]{0,2}", "", body)
        yield Part(name, "argv", filled(lines, assigned | defaults).replace("$$", "$"), f"its target {name} is read")


REFERENCE = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}|\{\{\s*\.?([\w.-]+)\s*\}\}|\$\(([\w.-]+)\)|\$\{([\w.-]+)\}")


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with the values of what it refers to, in any tool's way; what is not known stays.

    >>> filled("a $(B) ${{ env.B }} {{.B}} ${train.c} $(D)", {"B": "$(E)", "E": 1, "train.c": 2})
    'a 1 1 1 2 $(D)'
    """

    def value(match: re.Match[str]) -> str:
        name = next(filter(None, match.groups()))
        return str(values.get(name, values.get(name.rpartition(".")[2], match[0])))[:LONGEST_VALUE]

    for _ in range(3):
        if len(text) > LONGEST:
            raise ConfigError("is too large once its variables are written out")
        text = REFERENCE.sub(value, text)
    return text


# -- logs --------------------------------------------------------------------------------------------------------------

BEFORE = re.compile(
    r"(?m)^(?:\x1b\[[\d;]*m|\[?(?:rank|default)?\d{1,5}\]?:[ ]?|[A-Za-z][\w.-]{0,30}-\d{1,5}:[ ]|\([\w. =,]{1,60}\)[ ])+"
)
"""Words that launchers put before each line of a process."""
ARGUMENTS = re.compile(r"(?m)^[ ]*-{3,200} arguments -{3,200}\n((?:.*\.{3}.*\n)+)")
NAMESPACE = re.compile(r"\bNamespace\(\w+=[^\n]*")
DUMP = re.compile(r"\b(\w*(?:Arguments|Config))\(\n((?:[ ]*\w+=.*\n)+)")
ENGINE = re.compile(r"(?:\bjson = |\bconfig:[ ]?\n)(\{\n(?:[ ].*\n)+\})")
RESOLVED = re.compile(
    r"(?i)(?:resolved|final|merged) config(?:uration)?:?[ \t]*\n+((?:[a-z_]\w*:(?:[ \t].*)?\n|[ \-].*\n|\n)+)"
)
COMMAND = re.compile(
    r"(?m)^[ \t]{0,40}(?:[$>+#][ ]?)?((?:torchrun|accelerate launch|deepspeed|python3?|srun) (?:.*\\\n){0,60}.* --.*)$"
)
"""A command on a line of its own, as pages show it and shells print it."""
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots")


def _log(text: str, file: str) -> Iterator[Part]:
    """The settings that a trainer printed: arguments of Megatron or transformers, DeepSpeed's file, a resolved configuration."""
    text = BEFORE.sub("", text[:LONGEST]) + "\n"
    if (match := ARGUMENTS.search(text)) is not None:
        pairs = re.findall(r"(?m)^\s*(\w+) \.{3,} (.*)$", match[1])
        yield Part("log", "argv", printed(dict(pairs)), "the arguments that its log prints are read")
    elif (match := NAMESPACE.search(text)) is not None and (held := _namespace(match[0])):
        yield Part(
            "log",
            "argv",
            shlex.join(["train.py", *options_of(held)]) + "\n",
            "the arguments that its log prints are read",
        )
    elif (match := DUMP.search(text)) is not None:
        values = {name: _value(value) for name, value in re.findall(r"(?m)^[ ]*(\w+)=(.*?),?$", match[2])}
        values = {name: value for name, value in values.items() if value not in ([], None) and name[0] != "_"}
        if (model := CACHED.search(text)) is not None:
            values["model_name_or_path"] = f"{model[1]}/{model[2]}"
        yield Part("log", "yaml", json.dumps(values), f"the {match[1]} that its log prints are read")
    elif (match := RESOLVED.search(text)) is not None or (match := ENGINE.search(text)) is not None:
        yield Part("log", "yaml", match[1], "the configuration that its log prints is read")
    else:
        for number, match in enumerate(COMMAND.finditer(text), 1):
            yield Part(str(number), "argv", f"{match[1]}\n", f"its command {number} is read")


MEMBER = re.compile(r"^(?:torch|[A-Z]\w+)\.(?=\w+$)")
"""The class of a member of an enumeration."""


def _namespace(text: str) -> dict[str, Any]:
    """Return the fields of an object of argparse as Python prints it; nothing where it is not Python."""
    try:
        call = ast.parse(text[:LONGEST_LINE].strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {str(word.arg): _value(ast.unparse(word.value)) for word in getattr(call, "keywords", ())}


def _value(text: str) -> Any:
    """Return a value that Python printed: a member of an enumeration by its name in small letters."""
    try:
        value = ast.literal_eval(text)
        return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        member = re.fullmatch(r"<?[A-Z]\w*\.([A-Z0-9_]+)(?:: .*>)?", text)
        return member[1].lower() if member is not None else text


def printed(values: Mapping[str, str]) -> str:
    """Return the command with the arguments that Megatron printed; switches that turn something off are those that are False.

    >>> printed({"tensor_model_parallel_size": "2", "bf16": "True", "lr": "None", "add_bias_linear": "False"})
    'python pretrain_gpt.py --disable-bias-linear --tensor-model-parallel-size 2 --bf16\\n'
    """
    table = read_table("containers.toml")["printed"]
    off = [table[f"not {name}"] for name, value in values.items() if value == "False" and f"not {name}" in table]
    words, world = ["python", "pretrain_gpt.py", *off], values.get("world_size", "")
    if values.get("vocab_size") == "None":
        values = {**values, "vocab_size": values.get("padded_vocab_size", "None")}
    for name, value in values.items():
        if value not in ("None", "False", "[]") and name not in table["none"].split():
            words += [f"--{name.replace('_', '-')}", *([] if value == "True" else [MEMBER.sub("", value)])]
    return f"{'' if not world else f'mpirun -np {world} '}{shlex.join(words)}\n"


# -- mappings ----------------------------------------------------------------------------------------------------------

STRUCTURED = re.compile(
    r"""(?mx)(?:^[ \t-]*|\{[ ]?)["']?(?:apiVersion|services|run|commands|entrypoint|jobs|stages?|tasks|workerPoolSpecs|jobSpec
    |script|command|cmds?|value|parameters|configurations|log_history)["']?:
    | ^-\ \+{0,2}[\w@/.]+= | ["'](?:torchrun|accelerate|deepspeed|python3?)[ ]"""
)
"""Keys of files whose mappings may hold a run."""
ONE_RUN = ("apiVersion", "workerPoolSpecs", "jobSpec")
"""Keys of manifests whose containers are one run together."""


def _structured(text: str, file: str) -> Iterator[Part]:
    """The run of a manifest, of overrides of Hydra, or of settings that something wraps."""
    ending = os.path.splitext(file)[1].lower()
    roots = plain_yaml(text, ending) if ending == ".json" or STRUCTURED.search(text) else []
    root = roots[0] if len(roots) == 1 else {}
    if isinstance(root, list):
        words = [each for each in root if isinstance(each, str) and re.match(r"\+{0,2}[\w@/.]+=", each)]
        yield from (
            [Part("overrides", "argv", f"python -m hydra {shlex.join(words)}\n", "its overrides alone are read")]
            if words and words == root
            else ()
        )
    elif isinstance(root, dict) and (settings := _settings(root)) is not None:
        yield settings
    elif nodes := [each for each in roots if isinstance(each, dict)]:
        yield from _commands(nodes, Path(file))


OF_MODEL = (
    "_name_or_path",
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "transformers_version",
)
"""Keys of every model's configuration."""


def _settings(root: Mapping[Any, Any]) -> Part | None:
    """The settings in a file that wraps each of them, or that says little of a run."""
    if {"log_history", "global_step"} <= root.keys():
        count = root.get("train_batch_size")
        own = {} if count is None else {"per_device_train_batch_size": count}
        return Part("state", "yaml", json.dumps(own), "it says the batch of a GPU alone")
    parameters = root.get("parameters")
    wrapped = parameters if isinstance(parameters, dict) and {"method", "program"} & root.keys() else root
    inner = {str(name): each for name, each in wrapped.items() if isinstance(each, dict)}
    held = {name: each for name, each in inner.items() if each.keys() & {"value", "values"} and "env" not in each}
    if len(held) < max(1, 0.6 * len(wrapped)) or (
        wrapped is root and "_wandb" not in root and len(held) < len(root) - 1
    ):
        return None
    taken = {name: _of_sweep(each) for name, each in held.items() if name != "_wandb"}
    chosen = [
        f"{name} {taken[name]} of {', '.join(map(str, each['values']))}"
        for name, each in held.items()
        if "values" in each
    ]
    words = (
        f"of its values the largest, else the first, are taken: {', '.join(chosen)}"
        if chosen
        else "its values are read"
    )
    if wrapped is root:
        if "_name_or_path" in taken:  # the configuration of the model is among its trainer's
            from loadgauge.core.families.reader import class_defaults

            of_model = {*class_defaults(str(taken.get("model_type"))), *OF_MODEL}
            of_model |= {"max_length"} if taken.get("max_length") == 20 else set[str]()  # of generation
            taken = {"model_name_or_path": taken["_name_or_path"]} | {
                name: each for name, each in taken.items() if name not in of_model
            }
        return Part("values", "yaml", json.dumps(taken), words)
    program, options = str(root.get("program", "train.py")), options_of(taken)
    line = root.get("command") or ["python", "${program}", "${args}"]
    places = {"${env}": [], "${program}": [program], "${args}": options, "${interpreter}": ["python"]}
    command = [word for each in map(str, line) for word in places.get(each, [each])]
    return Part("sweep", "argv", f"{shlex.join(command)}\n", words)


def _of_sweep(each: Mapping[str, Any]) -> Any:
    several = each.get("values")
    if not isinstance(several, list) or not several:
        return each.get("value")
    return max(several) if all(isinstance(value, int | float) for value in several) else several[0]


def options_of(values: Mapping[str, Any]) -> list[str]:
    """Return values as the options of a command; None is left out.

    >>> options_of({"bf16": True, "lr": None, "targets": ["q", "v"]})
    ['--bf16', 'True', '--targets', 'q', 'v']
    """
    told = {name: value for name, value in values.items() if value not in (None, []) and not isinstance(value, dict)}
    several = {name: value if isinstance(value, list) else [value] for name, value in told.items()}
    return [word for name, listed in several.items() for word in (f"--{name}", *map(str, listed))]


UNTRAINED = re.compile(r"(?i)(?:^|[._])(?:eval|val|valid|test|dev)")
"""Sections whose sizes no training step has."""


def flat(root: Any) -> dict[str, Any]:
    """Return the values of mappings within mappings by their paths. ``flat({"a": {"b": 1}}) == {"a.b": 1}``"""
    return {".".join(path): value for path, value in leaves(root)}


def own_words(root: Mapping[Any, Any]) -> str:
    """Return the command with the settings of a file whose sections and words are one's own.

    >>> own_words({"model": {"model_name": "gpt2"}, "trainer": {"devices": 8, "precision": "bf16-mixed"}, "seed": 1})
    'torchrun --nproc_per_node 8 train.py --model_name_or_path gpt2 --seed 1 --bf16 True\\n'
    """
    table = read_table("containers.toml")
    values: dict[str, Any] = {}
    extra, doubtful = list[str](), set[str]()
    settings = flat(root)
    names = table["megatron" if any(path.endswith("tensor_model_parallel_size") for path in settings) else "own"]
    for path, value in settings.items():
        section, _, name = path.rpartition(".")
        own = names.get(name, name)
        told = f".{section}.{own} {str(value)[:80]}"
        words = [shlex.split(word) for key, word in table["values"].items() if re.search(rf"\.(?:{key})$", told)]
        if words:
            extra += words[0]
        elif not UNTRAINED.search(section):
            doubtful |= {own} if values.setdefault(own, value) != value and own in names.values() else set()
    extra += [word for own in doubtful if values.pop(own) for word in (f"--{own}", f"${own}")]
    if isinstance(cards := values.get("nproc_per_node"), list):
        values["nproc_per_node"] = len(cards)
    if "seq_length" in values and names is table["megatron"]:
        values.setdefault("max_position_embeddings", values["seq_length"])  # as NeMo's own files have it
    launch = options_of({name: values.pop(name, None) for name in ("nnodes", "nproc_per_node")})
    line = shlex.join(["torchrun", *launch, "train.py", *options_of(values), *extra])
    return re.sub(r"'(\$\w+)'", r"\1", line) + "\n"


class _Node(NamedTuple):
    """A mapping of a file: its names from the root on, its variables, and how often it is there."""

    held: Mapping[str, Any]
    path: tuple[str, ...]
    variables: dict[str, Any]
    times: int


def _nodes(roots: Sequence[Any], begin: Mapping[str, Any]) -> Iterator[_Node]:
    """Yield every mapping once, in order: an alias is one object however often it is used."""
    table, seen = read_table("containers.toml"), set[int]()
    stack: list[tuple[Any, tuple[str, ...], dict[str, Any], int]] = [(each, (), dict(begin), 1) for each in roots[::-1]]
    while stack:
        value, path, variables, times = stack.pop()
        if id(value) in seen:
            continue
        if isinstance(value, dict | list):
            seen.add(id(value))
        if isinstance(value, dict):
            for key in table["variables"].split():
                variables = variables | _variables(value.get(key))
            below = value.get("resources")
            counts = [value.get(key) for key in table["times"].split()]
            for count in (*counts, below.get("instance_count") if isinstance(below, dict) else None):
                times *= count if isinstance(count, int) and 0 < count < 10**5 else 1
            yield _Node(value, path, variables, times)
            name = str(value.get("name") or "")
            inner = [
                (each, (*path, *([name] if name else []), str(key)), variables, times) for key, each in value.items()
            ]
            stack += inner[::-1]
        elif isinstance(value, list):
            stack += [(each, path, variables, times) for each in value[::-1]]


def _commands(roots: Sequence[Any], file: Path) -> list[Part]:
    """The commands of a manifest: of all its containers together, or each apart where they are alternatives."""
    begin: dict[str, Any] = {}
    if (beside := file.with_name("params.yaml")).is_file() and any("stages" in root for root in roots):
        params = next(iter(plain_yaml(beside.read_text(encoding="utf-8", errors="replace")[:100_000])), None)
        begin = flat(params) if isinstance(params, dict) else {}
    nodes = list(_nodes(roots, begin))
    commands = [
        (node, command)
        for node in nodes
        for command in [_command(node.held), *_scripts(node.held)]
        if " --" in command or "=" in command
    ][:MOST_PARTS]
    if not commands:
        return []
    table = read_table("containers.toml")
    cards, machines = _cards(nodes, table)
    told = {
        name: number
        for key, number in (("machines", machines), ("each", cards), ("all", machines * cards))
        for name in table[key].split()
    }
    counted = f"# torchrun --nnodes {machines} --nproc_per_node {cards}\n" if cards else ""

    def script(lines_of: Sequence[str], variables: Mapping[str, Any]) -> str:
        values = {**(told if cards else {}), **variables}
        lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items() if name.isidentifier()]
        return (
            counted
            + "\n".join([*lines, *dict.fromkeys(_spread(filled(each, values), machines) for each in lines_of)]).rstrip()
            + "\n"
        )

    if any(key in root for root in roots for key in ONE_RUN):
        variables = {name: value for node in nodes for name, value in node.variables.items()}
        return [
            Part(
                "",
                "argv",
                script([command for _, command in commands], variables),
                "the command of its containers is read",
            )
        ]
    several = [
        Part(_name(node), "argv", script([command], node.variables), f"what its {_name(node) or 'entry'} runs is read")
        for node, command in commands
    ]
    return list({part.text: part for part in several[::-1]}.values())[::-1]


def _name(node: _Node) -> str:
    own = str(node.held.get("name") or "")
    return own or next(
        (each for each in node.path[::-1] if each not in ("steps", "containers", "template", "spec")), ""
    )


def _spread(command: str, machines: int) -> str:
    """Return a command whose torchrun spans all machines of its manifest, as their variables tell it."""
    told = "torchrun" if machines < 2 or "--nnodes" in command else f"torchrun --nnodes {machines}"
    return re.sub(r"\btorchrun(?= )", told, command)


def _cards(nodes: Sequence[_Node], table: Mapping[str, Any]) -> tuple[int, int]:
    """The cards of a machine, and the machines that have as many."""

    def counted(held: Mapping[str, Any], key: str) -> int:
        value: Any = held.get(key)
        if key == "driver":
            value = value == "nvidia" and (held.get("count") or len(held.get("device_ids") or ()))
        elif key in ("accelerators", "gpu"):
            value = next(iter(re.findall(r"[:\s'](\d{1,3})(?=\D|$)", f" {value}")), 0)
        return int(value) if str(value).isdecimal() and int(value) < 1000 else 0

    for key in (*table["cards"].split(), "driver", "accelerators", "gpu"):
        several = [
            (count, node.times)
            for node in nodes
            if node.path[-1:] != ("requests",) and (count := counted(node.held, key))
        ]
        if several:
            most = max(several)[0]
            return most, sum(times for count, times in several if count == most)
    return 0, max(node.times for node in nodes)


def _variables(held: Any) -> dict[str, Any]:
    """Return the variables of a container: a mapping, a list of names with values, or of `NAME=value`."""
    pairs: list[Any] = list(held.items()) if isinstance(held, dict) else []
    for each in held if isinstance(held, list) else ():
        pair = [each.get("name"), each.get("value")] if isinstance(each, dict) else str(each).split("=", 1)
        pairs += each.items() if isinstance(each, dict) and "name" not in each else [pair]
    return {str(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and isinstance(pair[1], str | int | float)}


def _command(node: Mapping[str, Any]) -> str:
    """Return what a container, a task or a configuration runs; of a shell that is told to run a script, the script."""
    started = node.get("entrypoint") if isinstance(node.get("entrypoint"), list) else None
    if "request" in node:  # of an editor
        started = ["python", "-m", node["module"]] if "module" in node else ["python", str(node.get("program"))]
    several = [started or [], *(node.get(name) or [] for name in ("command", "args"))]
    if any(isinstance(part, dict) for part in several):
        return ""
    words = [str(word) for part in several for word in (part if isinstance(part, list) else _split(str(part)))]
    script = next((after for word, after in pairwise(words) if re.fullmatch(r"-\w*c", word)), None)
    if script is None and isinstance(several[1], str) and several[1] and len(several) == 3 and not several[2]:
        return several[1].replace("$$", "$")
    if words and (len(words) > 1 or " " in words[0]):
        return (shlex.join(words) if script is None else script).replace("$$", "$")
    text: Any = next(filter(None, map(node.get, read_table("containers.toml")["commands"].split())), [])
    lines = [
        each.get("cmd") if isinstance(each, dict) else each for each in (text if isinstance(text, list) else [text])
    ]
    return "\n".join(str(line or "") for line in lines)


def _scripts(node: Mapping[str, Any]) -> list[str]:
    """Return the values of a mapping of scripts that are commands, such as those of `package.json` and of task runners."""
    return [each for key, each in node.items() if isinstance(each, str) and key != "command" and is_command(each)]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


# -- programs ----------------------------------------------------------------------------------------------------------


STARTER = re.compile(
    r"\bhyperparameters\s*=|\b(?:command|cmd|entrypoint)[\"']?\s*[=:]|\b(?:system|run|call|check_call|Popen)\("
)
RUNS = re.compile(r"(?:^|\.)(?:system|run|call|check_call|Popen)$")
"""Calls that start a command."""


def _started(text: str, file: str) -> Iterator[Part]:
    """Commands that a program has a cloud or a shell start: an estimator with its hyperparameters as options, or a command."""
    try:
        tree = ast.parse(text if STARTER.search(text) else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    names = Names(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        keywords = {str(word.arg): word.value for word in call.keywords}
        told = {name: worked_out(node, names, {}) for name, node in keywords.items()}
        lines: list[Any] = [told.get(name) for name in ("command", "cmd", "entrypoint")]
        lines += [worked_out(each, names, {}) for each in call.args[:1] if RUNS.search(called(call.func))]
        if {"entry_point", "hyperparameters"} <= keywords.keys():
            values = told["hyperparameters"] if isinstance(told["hyperparameters"], dict) else {}
            values |= _set_later(ast.unparse(keywords["hyperparameters"]), names)
            kind = read_table("instances.toml").get(str(told.get("instance_type")).removeprefix("ml."), "1 ")
            nodes = told.get("instance_count") if isinstance(told.get("instance_count"), int) else 1
            launch = (
                ["torchrun", f"--nnodes={nodes}", f"--nproc_per_node={kind.split()[0]}"]
                if "distribution" in keywords
                else ["python"]
            )
            script = "train.py" if told["entry_point"] is UNKNOWN else told["entry_point"]
            lines.append([*launch, script, *options_of(values)])
        specs = [each for value in told.values() if isinstance(value, list) for each in value if isinstance(each, dict)]
        yield from _commands(specs, Path("program")) if specs else ()
        for line in (shlex.join(map(str, line)) if isinstance(line, list) else line for line in lines):
            if isinstance(line, str) and is_command(line):
                yield Part(f"{call.lineno}", "argv", f"{line}\n", f"what line {call.lineno} starts is read")


def _set_later(name: str, names: Names) -> dict[str, Any]:
    """Return what a program sets of a mapping after it is made: `name["key"] = value`, `name.update(key=value)`."""
    start = f"{name}['"
    nodes = {key[len(start) : -2]: several[-1][1] for key, several in names.assigned.items() if key.startswith(start)}
    calls = [call for call in names.calls.get(".update", []) if called(call.func) == f"{name}.update"]
    nodes |= {str(word.arg): word.value for call in calls for word in call.keywords}
    values = {key: UNKNOWN if node is None else worked_out(node, names, {}) for key, node in nodes.items()}
    for inner in (worked_out(each, names, {}) for call in calls for each in call.args):
        values |= inner if isinstance(inner, dict) else {}
    return {key: value for key, value in values.items() if value is not UNKNOWN}


BY_NAME: dict[str, Reader] = {
    r"\.(?:md|markdown|qmd|rmd|mdx)$": _blocks,
    r"^(?:gnu)?makefile$|\.mk$|^\.?justfile$|\.just$": _targets,
}
"""Readers by the names of files."""
READERS: dict[str, Reader] = {
    r"\.(?:sh|bash|slurm|sbatch|args)$": lambda text, file: iter(()),  # job files themselves
    r"\.ipynb$": _cells,
    r"\.py$": _started,
    **BY_NAME,
    r"\.(?:ya?ml|json|toml)$|^\.*[^.]*$": _structured,
}
"""Readers of all files but logs."""


@lru_cache(maxsize=8)
def held(text: str, file: str) -> tuple[Part, ...]:
    """Return `parts`, worked out once for a text."""
    return tuple(parts(text, file))
