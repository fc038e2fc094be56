"""The names that people and drivers give to GPUs, read as ids of the catalogue (`data/gpu_names.toml`, `data/gpus`)."""

import re
from collections.abc import Iterable

from loadgauge.core.base import closest, read_table

# Words of makers and drivers that tell no two cards apart: "NVIDIA GeForce RTX 4090 Laptop GPU" is "rtx4090laptop".
_WORDS = re.compile(
    r"\((r|tm)\)|radeon (ai )?pro|(nvidia|geforce|tesla|amd|instinct|radeon|intel|google|cloud|apple)"
    r"|\b(graphics|generation|gpu|(workstation|server) edition|blackwell)\b"
)
_PREFIXES = ("", "rtx", "gtx", "rx", "arc", "tpu")
"""Prefixes that a name may leave out: 4090, 7900 XTX, a770, v5e."""


def plain(text: str) -> str:
    """Return a name in small letters without spaces, hyphens and the words of makers and drivers.

    >>> plain("NVIDIA GeForce RTX 4090 Laptop GPU"), plain("Intel(R) Arc(TM) A770 Graphics")
    ('rtx4090laptop', 'arca770')
    """
    bare = _WORDS.sub(" ", text.lower().replace("_", " ").replace("mobile", "laptop"))
    return re.sub(r"[\s-]", "", bare)


def find_id(text: str, ids: Iterable[str]) -> str | None:
    """Return the id that a name stands for, the commonest variant where there are several; None for none.

    >>> find_id("GeForce RTX 3080", ["rtx3080-10gb", "rtx3080-12gb"])
    'rtx3080-10gb'
    >>> find_id("rtx 3080 12 GB", ["rtx3080-10gb", "rtx3080-12gb"])
    'rtx3080-12gb'
    """
    name, by_name = plain(text), {re.sub(r"-", "", id): id for id in ids}
    for word in (f"{prefix}{name}" for prefix in _PREFIXES):
        if (id := read_table("gpu_names.toml").get(word) or by_name.get(word)) is not None:
            return id
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


def nearest(text: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that a name which stands for none may mean, the most similar first, at most four.

    >>> nearest("h100x", ["b100-sxm", "h100-nvl-94gb", "rtx3060ti"])
    ['h100-nvl-94gb']
    """
    name, names = plain(text), list(ids)
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
