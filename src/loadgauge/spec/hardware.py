"""Datasheets of GPUs, with the source of every figure: `data/gpus/*.toml`, one file per GPU, read on demand.

"GPU" is any accelerator of the catalogue (TPU chip, Gaudi, Trainium, Ascend too), in the unit its `name` says:
a package, a chip, a card. A figure that no source states is absent from the file and raises `NotStated` when read.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from typing import Literal

import msgspec

from loadgauge.errors import ConfigError, NotStated, closest
from loadgauge.package_data import list_data, read_data
from loadgauge.sources import Source, cite
from loadgauge.units import parse


class Quantity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure as its source prints it. `value` is in the base unit that `kind` names; `sources` are citation keys.

    >>> Quantity("3350 GB/s", ("ml-engineering-accelerators",)).value
    3350000000000.0
    """

    text: str = msgspec.field(name="value")
    sources: tuple[str, ...] = msgspec.field(name="source")

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ConfigError(f"must be positive, got {self.text!r}")
        if not self.sources:
            raise ConfigError(f"{self.text!r} has no source")

    @property
    def value(self) -> float:
        """The figure in the base unit: byte, byte/s, FLOP/s, OP/s, watt or GPU."""
        return parse(self.text)[0]

    @property
    def kind(self) -> str:
        """The base unit."""
        return parse(self.text)[1]

    def works(self) -> tuple[Source, ...]:
        """Return the cited works. Raises `ConfigError` for an unknown key."""
        return tuple(cite(key) for key in self.sources)


# The unit a figure must be in, by its name in a section; a name that is not here is a rate in FLOP/s.
_KINDS = {"label": "byte", "reported": "byte", "bandwidth": "byte/s", "int8": "OP/s", "domain": "GPU", "tdp": "watt"}


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a GPU file. Checks that each figure is in the unit its field calls for."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            figure, kind = getattr(self, name), _KINDS.get(name, "FLOP/s")
            if isinstance(figure, Quantity) and figure.kind != kind:
                raise ConfigError(f"{figure.text!r} is not in {kind}", key=name)


class Memory(_Section, frozen=True):
    """`label` as marketed, `reported` as the driver shows it (bytes), `bandwidth` in byte/s."""

    label: Quantity
    reported: Quantity | None = None
    bandwidth: Quantity | None = None


class Peaks(_Section, frozen=True):
    """Dense peak rates, never the sparse double: FLOP/s with a multiply-add as two; `int8` in OP/s."""

    fp32: Quantity | None = None
    tf32: Quantity | None = None
    bf16: Quantity | None = None
    fp16: Quantity | None = None
    fp8: Quantity | None = None
    fp4: Quantity | None = None
    int8: Quantity | None = None


class Interconnect(_Section, frozen=True):
    """The link inside a node or rack. `bandwidth` in byte/s per GPU and direction, all its ports together; `domain` the
    GPUs it joins. `kind` and `topology` are words, from the same sources as the bandwidth."""

    kind: str | None = None
    bandwidth: Quantity | None = None
    domain: Quantity | None = None
    topology: str | None = None


class Nic(_Section, frozen=True):
    """The network adapter between nodes: `bandwidth` in byte/s per GPU and direction (files print Gbit/s)."""

    bandwidth: Quantity | None = None


class Power(_Section, frozen=True):
    """`tdp`, the thermal design power, in watts. Vendors differ in what it covers (chip, module, board)."""

    tdp: Quantity | None = None


class Measured(_Section, frozen=True):
    """Published measurements: `bf16_best` is the best bf16 matrix multiplication found, in FLOP/s."""

    bf16_best: Quantity | None = None


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU of the catalogue. The properties are plain numbers in base units; the figures with their sources are in
    `memory`, `peaks`, `interconnect`, `nic`, `power` and `measured`. `confidence` says how far to trust the whole
    entry, `notes` where its sources disagree. `compute_capability` is NVIDIA's (developer.nvidia.com/cuda-gpus).

    >>> h100 = gpu("h100-sxm5-80gb")
    >>> h100.peak("bf16"), h100.memory_bandwidth, h100.link_bandwidth, h100.link_domain
    (989000000000000.0, 3350000000000.0, 450000000000.0, 8)
    >>> h100.memory.bandwidth.sources
    ('ml-engineering-accelerators', 'aiconfigurator')
    """

    id: str
    name: str
    vendor: Literal["nvidia", "amd", "google", "intel", "huawei", "aws"]
    confidence: Literal["high", "medium", "low"]
    notes: str = ""
    compute_capability: str = ""
    memory: Memory
    peaks: Peaks = msgspec.field(default=Peaks(), name="peak")
    interconnect: Interconnect = msgspec.field(default=Interconnect(), name="link")
    nic: Nic = Nic()
    power: Power = Power()
    measured: Measured = Measured()

    @staticmethod
    def from_toml(id: str, text: str) -> Gpu:
        """Read a GPU from a TOML text such as those in `data/gpus`. Raises `ConfigError`."""
        try:
            return msgspec.convert({**tomllib.loads(text), "id": id}, Gpu)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(str(error), file=_file(id)) from None

    @property
    def data_center_hopper_or_later(self) -> bool:
        """Whether it is a data-centre GPU of Hopper or Blackwell, for which cuBLAS and Transformer Engine take larger
        workspaces: compute capability 9.x or 10.x.

        >>> [gpu(id).data_center_hopper_or_later for id in ("a100-sxm4-80gb", "h20-96gb", "gb300-nvl72", "rtx5090")]
        [False, True, True, False]
        """
        return self.compute_capability.partition(".")[0] in ("9", "10")

    @property
    def capacity(self) -> float:
        """Usable memory [bytes]: what the driver reports where a source states it, else the label read in its own unit,
        GB as 10^9 and GiB as 2^30 bytes.

        NVIDIA's "80 GB" is loosely 80 GiB: where both are stated, the driver reports between 100 % and 107 % of the
        label read as 10^9, and between 93 % and 100 % of it read as 2^30. So 10^9 promises nothing that is not there,
        at the price of up to 7 % that may be. No GPU labelled in GiB has a reported figure to check that reading by.

        >>> round(gpu("h100-sxm5-80gb").capacity / 2**30, 2), round(gpu("h100-pcie-80gb").capacity / 2**30, 2)
        (79.19, 74.51)
        """
        return (self.memory.reported or self.memory.label).value

    @property
    def capacity_basis(self) -> Literal["reported", "assumed"]:
        """`reported` by the driver, or `assumed` from the label."""
        return "reported" if self.memory.reported else "assumed"

    def peak(self, precision: str) -> float:
        """Return the dense peak [FLOP/s, `int8`: OP/s] at `fp32 tf32 bf16 fp16 fp8 fp4 int8`.

        Raises `NotStated` where none states it (or the GPU cannot: see `notes`), `ConfigError` for another word.

        >>> gpu("h20-96gb").peak("fp8")
        Traceback (most recent call last):
        loadgauge.errors.NotStated: H20 SXM 96GB: no trusted source states peak.fp8 (data/gpus/h20-96gb.toml)
        """
        if precision not in Peaks.__struct_fields__:
            raise _unknown("precision", precision, Peaks.__struct_fields__)
        return self._stated(getattr(self.peaks, precision), f"peak.{precision}")

    @property
    def memory_bandwidth(self) -> float:
        """Memory bandwidth [byte/s]. Raises `NotStated` where no source states it."""
        return self._stated(self.memory.bandwidth, "memory.bandwidth")

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second and direction over all link ports of one GPU, of which a pair in a full mesh has only one;
        `NotStated` where no source states it."""
        return self._stated(self.interconnect.bandwidth, "link.bandwidth")

    @property
    def link_domain(self) -> int:
        """Number of GPUs that the link joins. Raises `NotStated` where no source states it."""
        return int(self._stated(self.interconnect.domain, "link.domain"))

    @property
    def nic_bandwidth(self) -> float:
        """Bandwidth to other nodes per GPU and direction [byte/s]. Raises `NotStated` where no source states it."""
        return self._stated(self.nic.bandwidth, "nic.bandwidth")

    @property
    def tdp(self) -> float:
        """Thermal design power [W]. Raises `NotStated` where no source states it."""
        return self._stated(self.power.tdp, "power.tdp")

    @property
    def bf16_best(self) -> float:
        """The fastest bf16 matrix multiplication measured [FLOP/s]. Raises `NotStated` where no source states one."""
        return self._stated(self.measured.bf16_best, "measured.bf16_best")

    def _stated(self, figure: Quantity | None, key: str) -> float:
        if figure is None:
            raise NotStated(f"{self.name}: no trusted source states {key} ({_file(self.id)})")
        return figure.value


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One level of a network: `bandwidth` in byte/s per GPU and direction, `latency` in seconds per message, `domain`
    the GPUs it joins. Latency has no default: no source of the catalogue states one.

    >>> Link(bandwidth=450e9, latency=2e-6, domain=8).domain
    8
    """

    bandwidth: float
    latency: float
    domain: int

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0 and self.domain >= 1):
            raise ConfigError(f"{self}: bandwidth and domain must be positive, latency not negative", key="link")


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`gpus` of one kind in nodes of `gpus_per_node` (a host's share, which a link's domain may exceed), with `links`
    from the innermost to the one that joins all.

    >>> inner, outer = Link(bandwidth=450e9, latency=2e-6, domain=8), Link(bandwidth=50e9, latency=5e-6, domain=64)
    >>> Cluster(gpu=gpu("h100-sxm5-80gb"), gpus=64, gpus_per_node=8, links=(inner, outer)).gpus
    64
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1 or self.gpus % min(self.gpus, self.gpus_per_node):
            raise ConfigError(f"{self.gpus} GPUs are not whole nodes of {self.gpus_per_node}", key="gpus")
        domains = [link.domain for link in self.links]
        if sorted(set(domains)) != domains or max(domains, default=1) < self.gpus:
            raise ConfigError(f"domains {domains} must rise up to all {self.gpus} GPUs", key="links")


def gpu_ids() -> tuple[str, ...]:
    """Return the ids of the catalogue, sorted; reads no file.

    >>> "h100-sxm5-80gb" in gpu_ids()
    True
    """
    return tuple(sorted(list_data("gpus", ".toml")))


@functools.cache
def gpu(id: str) -> Gpu:
    """Read a GPU by its id, or by a name that people give it, which means the commonest variant (`data/gpu_names.toml`).

    Raises `ConfigError` with the closest ids for an unknown one.

    >>> gpu("H100").id, gpu("NVIDIA GeForce RTX 4090").id
    ('h100-sxm5-80gb', 'rtx4090')
    >>> gpu("h1000")
    Traceback (most recent call last):
    loadgauge.errors.ConfigError: gpu: unknown GPU 'h1000' (closest: h100-sxm5-80gb, h100-pcie-80gb, b100-sxm)
    """
    ids = gpu_ids()
    if id not in ids:
        named = _named(id, ids)
        if named is None:
            raise _unknown("GPU", id, ids)
        return gpu(named)
    return Gpu.from_toml(id, read_data(f"gpus/{id}.toml"))


def _named(text: str, ids: tuple[str, ...]) -> str | None:
    """The id that a name without regard to case, spaces, hyphens and the maker's words stands for; None for none."""
    name = re.sub(r"nvidia|geforce|tesla|amd|instinct|intel|google|[\s_-]", "", text.lower())
    plain = {re.sub(r"[\s_-]", "", id): id for id in ids}
    known: dict[str, str] = tomllib.loads(read_data("gpu_names.toml"))
    for word in (name, f"rtx{name}", f"tpu{name}"):
        if (id := known.get(word) or plain.get(word)) is not None:
            return id
    return None


def gpus() -> tuple[Gpu, ...]:
    """Return the whole catalogue in order of id; reads every file."""
    return tuple(gpu(id) for id in gpu_ids())


def _file(id: str) -> str:
    return f"data/gpus/{id}.toml"


def _unknown(what: str, word: str, known: Iterable[str]) -> ConfigError:
    words = list(known)
    longer = [name for name in words if word.lower() in name]  # "h100" is nearer to "h100-nvl-94gb" than to "l4"
    nearest = dict.fromkeys(longer + closest(word.lower(), words, 3, cutoff=0.0))
    return ConfigError(f"unknown {what} {word!r} (closest: {', '.join(nearest)})", key=what.lower())
