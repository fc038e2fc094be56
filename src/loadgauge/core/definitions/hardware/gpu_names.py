"""The names that people and drivers give to GPUs, read as ids of the catalogue (`data/gpu_names.toml`, `data/gpus`)."""

import re
from collections.abc import Iterable

from loadgauge.core.base import closest, read_table

# Words of makers and drivers that tell no two cards apart: "NVIDIA GeForce RTX 4090 Laptop GPU" is "rtx4090laptop".
_WORDS = re.compile(
    r"\((r|tm)\)|radeon (ai )?pro|(nvidia|geforce|tesla|amd|instinct|radeon|intel|google|cloud|apple|aws|huawei|colab|kaggle)"
    r"|\b(graphics|generation|gpu|(workstation|server) edition|blackwell|hgx|dgx)\b"
)
_SHORT = (
    (re.compile(r"(?<=[2-5]0[5-9]0)(ti)?m$"), r"\1laptop"),
    (re.compile(r"(?<=[2-5]0[5-9]0)(ti)?s$"), r"\1super"),
    (re.compile(r"^(910[bc])\d$"), r"\1"),
)
"""Endings in one letter: 4090m, 4080s; 910B3 is a bin of the 910B."""
_PREFIXES = ("", "rtx", "gtx", "rx", "arc", "tpu")
"""Prefixes that a name may leave out: 4090, 7900 XTX, a770, v5e."""


def plain(text: str) -> str:
    """Return a name in small letters without spaces, hyphens and the words of makers and drivers.

    >>> plain("NVIDIA GeForce RTX 4090 Laptop GPU"), plain("Intel(R) Arc(TM) A770 Graphics")
    ('rtx4090laptop', 'arca770')
    """
    bare = _WORDS.sub(" ", text.lower().replace("_", " ").replace("mobile", "laptop"))
    name = re.sub(r"[\s-]", "", bare)
    for short, long in _SHORT:
        name = short.sub(long, name)
    return name


def find_id(text: str, ids: Iterable[str]) -> str | None:
    """Return the id that a name stands for, the commonest variant where there are several; None for none.

    >>> find_id("GeForce RTX 3080", ["rtx3080-10gb", "rtx3080-12gb"])
    'rtx3080-10gb'
    >>> find_id("rtx 3080 12 GB", ["rtx3080-10gb", "rtx3080-12gb"]), find_id("p4de", []), find_id("4080s", [])
    ('rtx3080-12gb', 'a100-sxm4-80gb', None)
    """
    name, by_name = plain(text), {re.sub(r"-", "", id): id for id in ids}
    for word in (f"{prefix}{name}" for prefix in _PREFIXES):
        if (id := read_table("gpu_names.toml").get(word) or by_name.get(word)) is not None:
            return id
    machine = re.compile(re.escape(re.sub(r"^(ml\.|standard_)", "", text.lower())) + r"(?![a-z0-9])")
    rented: set[str] = {
        row.partition(" ")[2] for type, row in read_table("instances.toml").items() if machine.match(type)
    }
    if len(rented) == 1:  # a machine of a cloud, or a family of them with one card
        return rented.pop()
    card, size = split_size(text)
    if size and (id := find_id(card, by_name.values())) is not None:
        return next(
            (candidate for candidate in (id, *variants(id, by_name.values())) if candidate.endswith(f"-{size}")), None
        )
    return None


def split_size(text: str) -> tuple[str, str]:
    """Return a name without the size of memory at its end, and that size; an empty one where there is none.

    >>> split_size("RTX 4090 24 GB"), split_size("a100-80"), split_size("rtx-4090")
    (('RTX 4090', '24gb'), ('a100', '80gb'), ('rtx-4090', ''))
    """
    match = re.fullmatch(r"(.*?)[\s_-]+(\d+(?=\s*g)|\d{2,3}$)\s*(g|gb|gib)?", text, re.IGNORECASE)
    return (match[1], f"{match[2]}gb") if match else (text, "")


GENERATIONS = {
    "blackwell": "b200-sxm-180gb b300-sxm-288gb gb200-nvl72 rtx5090",
    "hopper": "h100-sxm5-80gb h200-sxm-141gb h100-pcie-80gb h20-96gb",
    "ada": "rtx4090 l40s l4 rtx6000ada",
    "ada lovelace": "rtx4090 l40s l4 rtx6000ada",
    "ampere": "a100-sxm4-80gb a100-sxm4-40gb rtx3090 a10g",
    "volta": "v100-sxm2-32gb v100-sxm2-16gb titanv",
    "turing": "t4 rtx2080ti",
}
"""Generations of GPUs, and the usual cards of each."""


def nearest(text: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that a name which stands for none may mean, the most similar first, at most four.

    >>> nearest("h100x", ["b100-sxm", "h100-nvl-94gb", "rtx3060ti"])
    ['h100-nvl-94gb']
    """
    name, names = plain(text), list(ids)
    if cards := GENERATIONS.get(text.lower()):
        return cards.split()
    for length in range(len(name), 2, -1):  # "h100" is nearer to "h100-nvl-94gb" than to "l4"
        if within := [id for id in names if name[:length] in id.replace("-", "")]:
            return closest(text.lower(), within, 4, cutoff=0.0)
    return closest(text.lower(), names, 4, cutoff=0.0)


def names_one(text: str, id: str) -> bool:
    """Return whether a name spells an id out, so that no variant was chosen for it.

    >>> names_one("RTX 3080 12GB", "rtx3080-12gb"), names_one("RTX 3080", "rtx3080-10gb")
    (True, False)
    """
    return plain(id) in {f"{prefix}{plain(text)}" for prefix in _PREFIXES}


def variants(id: str, ids: Iterable[str]) -> tuple[str, ...]:
    """Return the other ids of the same card: those that differ in what follows the first hyphen, or in the size at the end.

    >>> variants("rtx3080-10gb", ["rtx3080-10gb", "rtx3080-12gb", "rtx3080ti"])
    ('rtx3080-12gb',)
    """
    stem = re.sub(r"-\d+gb$", "", id)
    card = stem.partition("-")[0] if re.match(r"[a-z]+\d{2,}", stem) else stem
    return tuple(
        sorted(
            candidate
            for candidate in ids
            if candidate != id and (candidate == card or candidate.startswith(f"{card}-"))
        )
    )
