"""A command line whose arguments are in a file that it names: `llamafactory-cli train FILE.yaml learning_rate=1e-5`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from loadgauge.core.base import read_table
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.gpu_names import find_id
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.job_files.ideas.table import MISSING, Document, Keys
from loadgauge.job_files.reading.argv import LAUNCHER, Argv

ENDINGS = (".yaml", ".yml", ".toml")
MERGES = re.compile(r"(?:^| |/)(?:llamafactory-cli|lmf|tune|src/train\.py)(?= )")
"""Programs that take `key=value` over their file, as OmegaConf does (`hparams/parser.py` of LLaMA-Factory)."""
OPTIONS = frozenset({"config", "config_file", "config_path", "config_name", "cfg"})
"""Options that name such a file."""


LAUNCHED_AS = {
    **{name: name for name in ("mixed_precision", "use_fsdp", "use_deepspeed")},
    **{
        name: f"deepspeed_config.{name}"
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
    },
}
"""Options of `accelerate launch`, and the keys of its configuration that they are."""


class Configured:
    """The keys of a file, and those of the command line that names it, which go before them."""

    syntax = "argv"

    def __init__(self, line: Argv, named: Document, path: str) -> None:
        self.line, self.named, self.path = line, named, path
        self.inner = named.syntax
        for name in self.names() if hasattr(named, "layers") else ():
            if line.get(name) is not MISSING:
                named.put(name, line.get(name))  # where other values of the file refer to it
        self.skipped = (*line.skipped, f"its arguments are in {path}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.line, name)

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, those of the command line first."""
        return tuple(dict.fromkeys((*[name for name in self.line.names() if name not in OPTIONS], *self.named.names())))

    def get(self, key: str) -> Any:
        """The value of a key on the command line, else in the file, or `MISSING`."""
        value = self.line.get(key)
        return self.named.get(key) if value is MISSING else value

    def shown(self, key: str) -> str:
        """The key as its file spells it."""
        return self.named.shown(key) if self.line.get(key) is MISSING else self.line.shown(key)


def configured(line: Argv, file: str, read: Callable[[Path], Document]) -> Document:
    """The command line with the file that it names, by itself or as `--config`, read by `read`; without one, the command line.

    Raises `ConfigError` where all arguments are in a file that is not there.
    """
    values = {word.start for options in line.options.values() for option in options for word in option.values}
    names = [word.text for word in line.words if word.start not in values]
    launched = "accelerate" in line.program  # which has a file of its own
    options = [key for key in OPTIONS & line.options.keys() if not (launched and key == "config_file")]
    for words in (line.options[key][-1].values for key in sorted(options)):
        names += [f"{word.text}{end}" for word in words[:1] for end in ("", ".yaml")]  # Hydra's names have no ending
    tuned = "tune" in line.program  # whose options are all of the launcher, and whose values go over the file's
    inside = next((name for name in names if re.fullmatch(r"\w[\w.]*/\w+", name)), None)
    names = [name for name in names if name.endswith(ENDINGS) and not re.search(r"^-|[=$\s]", name)]
    if tuned and inside is not None and f"{inside}.yaml" in names:
        raise ConfigError(
            f"names {inside}, a configuration inside torchtune: `tune cp {inside} FILE.yaml` writes it; give that file,"
            " and --gpus"
        )
    if not names:
        return line
    places = [Path(names[0]), *(parent / names[0] for parent in (Path(file).parents if file else ()))]
    position = next((position for position in places if os.path.isfile(position)), None)
    if position is not None:
        line.style = "hydra" if MERGES.search(" ".join(line.program)) else line.style
        return Configured(line, read(position), names[0])
    if tuned or set(line.names()) <= LAUNCHER | OPTIONS:
        raise ConfigError(f"has its arguments in {names[0]}, which is not there; give that file")
    return line


class Over:
    """A document over what a recipe that it names says by itself (`beneath`): keys that it leaves out are looked up there."""

    def __init__(self, own: Document, beneath: Mapping[str, Any]) -> None:
        self.own, self.beneath = own, beneath

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def get(self, key: str) -> Any:
        """The value of a key here, else beneath."""
        value = self.own.get(key)
        return self.beneath.get(key, MISSING) if value is MISSING else value


def launch_options(keys: Keys, owned: Callable[[str], bool]) -> dict[str, Any]:
    """Return the options of `accelerate launch` as keys of its configuration, without those that the tool has itself (`owned`)."""
    names = keys.document.names() if keys.document.syntax == "argv" else ()
    places = {name: f"fsdp_config.{name}" if name.startswith("fsdp_") else LAUNCHED_AS.get(name) for name in names}
    values: dict[str, Any] = {
        field: keys.plain(name) for name, field in places.items() if field is not None and not owned(name)
    }
    for switch, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED")):
        if values.pop(switch, None):
            values["distributed_type"] = kind
    return values


UNWRAPPED = "#!/bin/sh\n# of a manifest\n"
MANIFEST = re.compile(r"^(?:apiVersion|services|run|commands|entrypoint):", re.MULTILINE)
"""Manifests of Kubernetes, Docker Compose, SkyPilot, dstack and Ray's jobs, by a key of theirs."""
CARDS = re.compile(r"(?:\.com/gpu['\"]?|\baccelerators|\bgpu): *['\"{]?(?:[\w-]+: *)?(\d{1,3})\b")
TOLD = (
    "SKYPILOT_NUM_NODES",
    "SKYPILOT_NUM_GPUS_PER_NODE",
    "DSTACK_NODES_NUM",
    "DSTACK_GPUS_PER_NODE",
    "DSTACK_GPUS_NUM",
)
"""Variables in which SkyPilot and dstack tell machines, cards of each, and all cards."""
MACHINES = re.compile(r"^(?:num_nodes|nodes): *(\d{1,5})\b", re.MULTILINE)


def unwrapped(text: str) -> str:
    r"""Return the shell script that a manifest starts its containers with; any other text as it is.

    >>> print(unwrapped("resources: {accelerators: H100:8}\nnum_nodes: 2\nrun: torchrun a.py --bf16\n"), end="")
    #!/bin/sh
    # of a manifest
    # torchrun --nnodes 2 --nproc_per_node 8
    SKYPILOT_NUM_NODES=2
    SKYPILOT_NUM_GPUS_PER_NODE=8
    DSTACK_NODES_NUM=2
    DSTACK_GPUS_PER_NODE=8
    DSTACK_GPUS_NUM=16
    torchrun a.py --bf16
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not MANIFEST.search(text):
        return text
    try:
        nodes = list(_mappings(list(YAML(typ="safe", pure=True).load_all(text))))
    except (YAMLError, RecursionError, ValueError):
        return text
    commands = [command for node in nodes for command in _commands(node)]
    if not any(" --" in command or "=" in command for command in commands):
        return text
    replicas = [node["replicas"] for node in nodes if isinstance(node.get("replicas"), int) and "template" in node]
    told = (MACHINES.search(text), CARDS.search(text))
    machines, cards = (
        int(match[1]) if match else usual for match, usual in zip(told, (sum(replicas) or 1, 0), strict=True)
    )
    counted = f"# torchrun --nnodes {machines} --nproc_per_node {cards}\n" if cards else ""
    values = {
        name: number
        for name, number in zip(TOLD, (machines, cards, machines, cards, machines * cards), strict=True)
        if cards
    }
    for node in nodes:
        values |= _variables(node.get("env") or node.get("envs") or node.get("environment"))
    lines = [*(f"{name}={shlex.quote(str(value))}" for name, value in values.items()), *dict.fromkeys(commands)]
    return UNWRAPPED + counted + "\n".join(lines).rstrip() + "\n"


def rewrapped(manifest: str, script: str, changed: str) -> str:
    r"""Return a manifest whose script is changed. Raises `ConfigError` where its lines are not those of the manifest.

    >>> text = "run: |\n  # 8 cards\n  torchrun a.py --bf16\n"
    >>> script = unwrapped(text)
    >>> print(rewrapped(text, script, script.replace("bf16", "fp16")), end="")
    run: |
      # 8 cards
      torchrun a.py --fp16
    """
    new, was, now = manifest.splitlines(True), script.splitlines(), changed.splitlines()
    for kind, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes()[::-1]:
        if kind == "equal":
            continue
        a, c = (a, c) if b > a else (a - 1, c - 1)  # what comes in follows a line
        old = [line.strip() for line in was[a:b]]
        for at in range(len(new)):
            if [line.strip() for line in new[at : at + b - a]] == old:
                depth = " " * (len(new[at]) - len(new[at].lstrip()) - len(was[a]) + len(was[a].lstrip()))
                new[at : at + b - a] = [f"{depth}{line}\n" for line in now[c:d]]
                break
    text = "".join(new)
    if unwrapped(text) != changed:
        raise ConfigError("the script stands in a manifest in other words; change it there")
    return text


def _variables(held: Any) -> dict[str, Any]:
    """Return the variables of a container: a mapping, a list of names with values, or of `NAME=value`."""
    pairs: list[Any] = list(held.items()) if isinstance(held, dict) else []
    for each in held if isinstance(held, list) else ():
        pairs.append((each.get("name"), each.get("value")) if isinstance(each, dict) else str(each).split("=", 1))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and isinstance(pair[1], str | int | float)}


def _mappings(root: Any) -> Iterator[dict[str, Any]]:
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
        stack += list(node.values())[::-1] if isinstance(node, dict) else node[::-1] if isinstance(node, list) else []


def _commands(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a container, or a task, runs; of a shell that is told to run a script, the script."""
    parts = [node.get(name) or [] for name in ("command", "args")]
    words = [str(word) for part in parts for word in (part if isinstance(part, list) else shlex.split(str(part)))]
    script = next((after for word, after in pairwise(words) if re.fullmatch(r"-\w*c", word)), None)
    if words:
        yield shlex.join(words) if script is None else script
    for text in (node.get("run"), node.get("entrypoint"), node.get("commands")):
        if text:
            yield "\n".join(map(str, text)) if isinstance(text, list) else str(text)


ASKED = re.compile(
    r"""(?xm)
    ^\#SBATCH.*?\s(?:--gres[ =]gpu:|--gpus(?:-per-\w+)?[ =]|--constraint[ =]|-[CG][ ]?)['"]?(?P<slurm>[A-Za-z][\w.-]*(?::\d+)?)
    | ^[ \t]{0,99}srun\b.*?\s--gres[ =]gpu:(?P<srun>[A-Za-z][\w.-]*)
    | \baccelerators['"]?:\s{0,99}[\['"{]{0,9}\s{0,99}(?P<sky>[A-Za-z][\w.-]*['"]?(?::\s{0,99}\d+)?)
    | ^[ \t]{0,99}gpu:\s{0,99}['"{]?\s{0,99}(?:name:\s{0,99})?(?P<dstack>[A-Za-z][\w.-]*(?::\d+)?)
    | (?:gpu\.product|gke-accelerator)['"]?:\s{0,99}['"]?(?P<labels>[\w.-]+)
    | \bgpu\s{0,99}=\s{0,99}['"](?P<modal>[A-Za-z][\w.-]*!?(?::\d+)?)['"] | \bmodal\.gpu\.(?P<older>\w+)\(
    | "gpuType":\s{0,99}"(?P<colab>\w+)" | "accelerator":\s{0,99}"nvidiaTesla(?P<kaggle>\w+)"
    | \binstance_?[tT]ype['"]?\s{0,99}[:=]\s{0,99}['"]?(?:ml\.|Standard_)?(?P<machine>[\w.-]+)
    """
)
"""Where files name the cards, or the machines, that they run on."""
NODES = re.compile(r"(?m)^#SBATCH.*?\s(?:--nodes[= ]|-N ?)(\d{1,5})\b|^(?:num_nodes|nodes): *(\d{1,5})\b")


class Asked(NamedTuple):
    """A GPU by its id, how many of them there are on all machines (0: not said), and the words that ask for it."""

    gpu: str
    cards: int
    words: str


def asked_for(text: str) -> Asked | None:
    r"""Return the GPUs that a file asks for; None where it names none that the catalogue has.

    >>> asked_for("#SBATCH --nodes=2 --gres=gpu:h100:8\nsrun python a.py")
    Asked(gpu='h100-sxm5-80gb', cards=16, words='--gres=gpu:h100:8')
    >>> asked_for("resources: {accelerators: {A100-80GB: 4}}").gpu, asked_for("#SBATCH --gres=gpu:8")
    ('a100-sxm4-80gb', None)
    """
    for match in ASKED.finditer(text[:100_000] + text[100_000:][-5_000:]):
        name, _, number = str(match[match.lastgroup or 0]).partition(":")
        name = name.strip("'\"!")
        gpu, count = name, int(number) if number.strip().isdecimal() else 0
        if match["machine"] is not None:
            number, _, gpu = read_table("instances.toml").get(name.lower(), "0 ").partition(" ")
            count = int(number)
        gpu = "a100-sxm4-40gb" if match["colab"] == "A100" else gpu
        if (id := find_id(gpu, gpu_ids())) is not None:
            words = re.sub(r"^#SBATCH\s+", "", match[0].strip())
            nodes = NODES.search(text)
            count *= int(nodes[1] or nodes[2]) if nodes else 1
            return Asked(id, count, words.rpartition(" ")[2] if words.startswith("-") else " ".join(words.split()))
    return None
