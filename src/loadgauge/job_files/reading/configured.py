"""A command line whose arguments are in a file that it names: `llamafactory-cli train FILE.yaml learning_rate=1e-5`."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loadgauge.core.base import read_table, refuse
from loadgauge.core.definitions.hardware.gpu_names import find_id
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.job_files.ideas.table import MISSING, Document, Keys
from loadgauge.job_files.reading.argv import LAUNCHER, Argv
from loadgauge.job_files.reading.layered import Outer

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


class Configured(Outer):
    """The keys of a file, and those of the command line that names it, which go before them."""

    syntax = "argv"

    def __init__(self, line: Argv, named: Document, path: str) -> None:
        self.within, self.named, self.path = line, named, path
        self.inner = named.syntax
        for name in self.names() if hasattr(named, "layers") else ():
            if line.get(name) is not MISSING:
                named.put(name, line.get(name))  # where other values of the file refer to it
        self.skipped = (*line.skipped, f"its arguments are in {path}")

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, those of the command line first."""
        return tuple(
            dict.fromkeys((*[name for name in self.within.names() if name not in OPTIONS], *self.named.names()))
        )

    def get(self, key: str) -> Any:
        """The value of a key on the command line, else in the file, or `MISSING`."""
        value = self.within.get(key)
        return self.named.get(key) if value is MISSING else value

    def shown(self, key: str) -> str:
        """The key as its file spells it."""
        return str((self.named if self.within.get(key) is MISSING else self.within).shown(key))


def configured(line: Argv, file: str, read: Callable[[Path, str | None], Document]) -> Document:
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
    refuse(
        tuned and inside is not None and f"{inside}.yaml" in names,
        f"names {inside}, a configuration inside torchtune: `tune cp {inside} FILE.yaml` writes it; give that file,"
        " and --gpus",
    )
    if not names:
        return line
    written = line.shell.documents.get(names[0])
    places = [Path(names[0]), *(parent / names[0] for parent in (Path(file).parents if file else ()))]
    position = next((position for position in places if written is not None or os.path.isfile(position)), None)
    if position is not None:
        line.style = "hydra" if MERGES.search(" ".join(line.program)) else line.style
        return Configured(line, read(position, written), names[0])
    refuse(
        tuned or set(line.names()) <= LAUNCHER | OPTIONS,
        f"has its arguments in {names[0]}, which is not there; give that file",
    )
    return line


class Over(Outer):
    """A document over what a recipe that it names says by itself (`beneath`): keys that it leaves out are looked up there."""

    def __init__(self, own: Document, beneath: Mapping[str, Any]) -> None:
        self.own = self.within = own
        self.beneath = beneath

    def get(self, key: str) -> Any:
        """The value of a key here, else beneath."""
        value = self.within.get(key)
        return self.beneath.get(key, MISSING) if value is MISSING else value


def launch_options(keys: Keys, owned: Callable[[str], bool]) -> dict[str, Any]:
    """Return the options of `accelerate launch` as keys of its configuration, without those that the tool has itself (`owned`)."""
    names = keys.document.names() if keys.document.syntax == "argv" else ()
    places = {name: f"fsdp_config.{name}" if name.startswith("fsdp_") else LAUNCHED_AS.get(name) for name in names}
    values = {field: keys.plain(name) for name, field in places.items() if field is not None and not owned(name)}
    for switch, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED")):
        if values.pop(switch, None):
            values["distributed_type"] = kind
    return values


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
