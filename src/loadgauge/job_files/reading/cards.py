"""The kind of GPU that a job file asks its cluster for: Slurm's options, manifests, Modal's functions, machines of clouds."""

from __future__ import annotations

import re
from typing import NamedTuple

from loadgauge.core.base import read_table
from loadgauge.core.definitions.hardware.gpu_names import find_id
from loadgauge.core.definitions.hardware.hardware import gpu_ids

ASKED = re.compile(
    r"""(?xm)
    ^\#SBATCH.*?\s(?:--gres[ =]gpu:|--gpus(?:-per-\w+)?[ =]|--constraint[ =]|-[CG][ ]?)['"]?(?P<slurm>[A-Za-z][\w.-]*(?::\d+)?)
    | ^\s*srun\b.*?\s--gres[ =]gpu:(?P<srun>[A-Za-z][\w.-]*)
    | \baccelerators['"]?:\s*[\['"{]*\s*(?P<sky>[A-Za-z][\w.-]*['"]?(?::\s*\d+)?)
    | ^\s*gpu:\s*['"{]?\s*(?:name:\s*)?(?P<dstack>[A-Za-z][\w.-]*(?::\d+)?)
    | (?:gpu\.product|gke-accelerator)['"]?:\s*['"]?(?P<labels>[\w.-]+)
    | \bgpu\s*=\s*['"](?P<modal>[A-Za-z][\w.-]*!?(?::\d+)?)['"] | \bmodal\.gpu\.(?P<older>\w+)\(
    | \binstance_?[tT]ype['"]?\s*[:=]\s*['"]?(?:ml\.|Standard_)?(?P<machine>[\w.-]+)
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
    for match in ASKED.finditer(text[:100_000]):
        name, _, number = str(match[match.lastgroup or 0]).partition(":")
        name = name.strip("'\"!")
        gpu, count = name, int(number) if number.strip().isdecimal() else 0
        if match["machine"] is not None:
            number, _, gpu = read_table("instances.toml").get(name.lower(), "0 ").partition(" ")
            count = int(number)
        if (id := find_id(gpu, gpu_ids())) is not None:
            words = re.sub(r"^#SBATCH\s+", "", match[0].strip())
            nodes = NODES.search(text)
            count *= int(nodes[1] or nodes[2]) if nodes else 1
            return Asked(id, count, words.rpartition(" ")[2] if words.startswith("-") else " ".join(words.split()))
    return None
