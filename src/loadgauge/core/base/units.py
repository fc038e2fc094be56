"""Units, read and printed. Memory is printed in GiB (2^30 bytes), links in GB/s (10^9 bytes per second)."""

import math
import re
from functools import lru_cache

from loadgauge.core.base.errors import ConfigError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_BYTES = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_FACTORS: dict[str, tuple[str, float]] = {
    **{name: ("byte", float(factor)) for name, factor in _BYTES.items()},
    **{f"{name}/s": ("byte/s", float(factor)) for name, factor in _BYTES.items()},
    **{f"{prefix}bit/s": ("byte/s", factor / 8) for prefix, factor in (("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}FLOP/s": ("FLOP/s", factor) for prefix, factor in (("G", 1e9), ("T", 1e12), ("P", 1e15))},
    **{f"{prefix}OP/s": ("OP/s", factor) for prefix, factor in (("G", 1e9), ("T", 1e12), ("P", 1e15))},
    "W": ("watt", 1.0),
    "kW": ("watt", 1e3),
    "GPU": ("GPU", 1.0),
    "s": ("second", 1.0),
    "ms": ("second", 1e-3),
    "us": ("second", 1e-6),
    "min": ("second", 60.0),
    "h": ("second", 3600.0),
    "d": ("second", 86400.0),
}


_BITS = re.compile(r"([MGTmgt])(?:b|[Bb]its?)(?:/s|ps)")


def _bits(match: re.Match[str]) -> str:
    return match[0] if match[0] == match[0].lower() and match[0].endswith("b/s") else f"{match[1].upper()}bit/s"


@lru_cache(1024)
def parse(text: str, key: str = "", kind: str = "") -> tuple[float, str]:
    """Read a number with a unit and return (value in base units, base unit). Raises `ConfigError`, about the flag `key`.

    kind: the base unit that is wanted: only its units are then listed where the text cannot be read

    >>> parse("3.35 TB/s")
    (3350000000000.0, 'byte/s')
    >>> parse("80 GiB")
    (85899345920.0, 'byte')
    >>> parse("400 Gbit/s")
    (50000000000.0, 'byte/s')
    >>> parse("400Gbps") == parse("400 Gb/s") == parse("400gbit/s") == parse("50GBps")
    True
    """
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*", text)
    # Bits are also written Gb/s, Gbps, gbit/s; bytes GBps.
    unit = "" if not match else re.sub(r"(?<=B)ps$", "/s", re.sub(_BITS, _bits, match[2]))
    if not match or unit not in _FACTORS:
        units = ", ".join(name for name, (base, _) in _FACTORS.items() if not kind or base == kind)
        raise ConfigError(f"cannot read {text!r} as a number with a unit (units: {units})", key=key)
    base, factor = _FACTORS[unit]
    value = float(match[1].replace("_", "")) * factor
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not finite", key=key)
    return value, base


PORTS = {"fdr": 56, "edr": 100, "hdr100": 100, "hdr": 200, "ndr200": 200, "ndr": 400, "xdr": 800}
"""Gbit/s of a port of InfiniBand with four lanes (InfiniBand Trade Association, roadmap)."""


def port(text: str) -> str:
    """Return a network adapter's bandwidth with a unit, where it is named by its bits.

    >>> port("NDR"), port("400GbE"), port("200G"), port("50GB/s")
    ('400Gbit/s', '400Gbit/s', '200Gbit/s', '50GB/s')
    """
    word = text.strip().lower()
    bits = PORTS.get(word) or (word.removesuffix("be").removesuffix("g") if re.fullmatch(r"\d+g(be)?", word) else "")
    return f"{bits}Gbit/s" if bits else text


def above_zero(text: str, key: str, unit: str, must: str) -> float:
    """Read a number of a base unit, above 0. Raises `ConfigError`, about the flag `key`. must: what the text must be

    >>> above_zero("400Gbit/s", "between", "byte/s", "a bandwidth")
    50000000000.0
    """
    value, base = parse(text, key, unit)
    if base != unit or value <= 0:
        raise ConfigError(f"must be {must}, got {text!r}", key=key)
    return value


def rate(value: float) -> str:
    """Format a bandwidth [byte/s] so that `parse` reads exactly this number.

    >>> rate(50e9), rate(1e9 / 3)
    ('50GB/s', '333333333.3333333B/s')
    """
    short = f"{value / GB:.15g}GB/s"
    return short if parse(short)[0] == value else f"{value!r}B/s"


def parse_count(text: str, key: str = "") -> float:
    """Read a count, with or without a letter: 15T tokens, 1.4e12, 300_000_000. Raises `ConfigError`, about the flag `key`.

    >>> parse_count("15T"), parse_count("1.4e12"), parse_count("300B")
    (15000000000000.0, 1400000000000.0, 300000000000.0)
    """
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([KMBTkmbt]?)\s*", text)
    if not match:
        raise ConfigError(f"cannot read {text!r} as a count such as 300B or 1.5e12", key=key)
    value = float(match[1].replace("_", "")) * {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()]
    if not 0 < value < math.inf:
        raise ConfigError(f"{text!r} is not a positive, finite count", key=key)
    return value


def gib(nbytes: float, digits: int = 2) -> str:
    """Format bytes as GiB.

    >>> gib(85899345920)
    '80.00 GiB'
    """
    return f"{in_gib(nbytes, digits)} GiB"


def in_gib(nbytes: float, digits: int = 2) -> str:
    """Format bytes as GiB without the unit, for tables that name it.

    >>> in_gib(85899345920, 1)
    '80.0'
    """
    return f"{nbytes / GIB:,.{digits}f}"


def whole(value: float) -> str:
    """Format a count with thousands separators; whole floats print as integers.

    >>> whole(22031663104), whole(2.5)
    ('22,031,663,104', '2.5')
    """
    return f"{value:,}" if isinstance(value, int) or value != round(value) else f"{round(value):,}"


def count(value: float) -> str:
    """Format a count with a letter: 8.03 B parameters, 1.9 T tokens.

    >>> count(8030261248), count(1500), count(12)
    ('8.03 B', '1.50 K', '12')
    """
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {letter}"
    return f"{value:g}"


def flops(value: float) -> str:
    """Format a number of FLOPs with an SI prefix.

    >>> flops(5.2e16)
    '52.00 PFLOP'
    """
    for factor, prefix in ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:,.2f} {prefix}FLOP"
    return f"{value:,.0f} FLOP"


def seconds(value: float) -> str:
    """Format a time [s] in s, ms or us.

    >>> seconds(12.345), seconds(0.01234), seconds(0.0000123)
    ('12.3 s', '12.3 ms', '12.3 us')
    """
    factor, unit = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if value >= pair[0]), (1e-6, "us"))
    return f"{value / factor:,.3g} {unit}" if value / factor < 1000 else f"{value / factor:,.0f} {unit}"


def amount(value: float, unit: str, digits: int = 2) -> str:
    """Format a number by its unit: bytes, seconds, or in the unit as it is.

    >>> amount(3 * 2**29, "byte", 1), amount(0.25, "s"), amount(12.5, "tokens")
    ('1.5 GiB', '250 ms', '12.5 tokens')
    """
    return gib(value, digits) if unit == "byte" else seconds(value) if unit == "s" else f"{value:,.4g} {unit}".rstrip()


def days_words(value: float) -> str:
    """Format a number of days, in years too where they are many, and in hours where they are few.

    >>> days_words(23.14), days_words(11978.9), days_words(0.2)
    ('23.1 days', '11,978.9 days (32.8 years)', '4.8 hours')
    """
    if value < 1:
        return f"{24 * value:.1f} hours"
    years = f" ({value / 365.25:,.1f} years)" if value >= 730 else ""
    return f"{value:,.1f} days{years}"


def share(text: str, key: str = "") -> float:
    """Read a share between 0 and 1, also as per cent. Raises `ConfigError`, about the flag `key`.

    >>> share("40%"), share("0.4"), share("100 %")
    (0.4, 0.4, 1.0)
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"must be a share such as 40% or 0.4, got {text!r}", key=key)
    return value
