"""Datasheets of GPUs, with the source of every figure: `data/gpus/*.toml`, one file per GPU, read on demand.

"GPU" is any accelerator of the catalogue (TPU chip, Gaudi, Trainium, Ascend too), in the unit its `name` says:
a package, a chip, a card. A figure that no source states is absent from the file and raises `NotStated` when read.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from loadgauge.core.base import ConfigError, NotStated, closest, list_data, parse, read_data, read_text
from loadgauge.core.base.sources import Source, cite
from loadgauge.core.definitions.hardware.gpu_names import find_id, nearest, split_size
from loadgauge.core.definitions.hardware.topology import Topology


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
_KINDS = {
    **dict.fromkeys(("label", "reported", "chips", "usable"), "byte"),
    "bandwidth": "byte/s", "int8": "OP/s", "domain": "GPU", "tdp": "watt",
}  # fmt: skip


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a GPU file. Checks that each figure is in the unit its field calls for."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            figure, kind = getattr(self, name), _KINDS.get(name, "FLOP/s")
            if isinstance(figure, Quantity) and figure.kind != kind:
                raise ConfigError(f"{figure.text!r} is not in {kind}", key=name)


class Memory(_Section, frozen=True):
    """`label` as marketed, `reported` as the driver shows it (bytes), `bandwidth` in byte/s.

    chips: what the memory chips hold, where a source says so in powers of two
    ecc: `inline` where error correction is on by default and keeps its check bits in a sixteenth of the chips (GDDR)
    shared: whether it is the system's memory, which processes outside the GPU use too
    usable: what of shared memory the GPU may use by default
    """

    label: Quantity
    reported: Quantity | None = None
    chips: Quantity | None = None
    ecc: Literal["", "inline"] = ""
    shared: bool = False
    usable: Quantity | None = None
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


class Pcie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PCI Express connection: `generation` and `lanes`; `sources` are citation keys.

    >>> round(Pcie(4, 16, ("techpowerup",)).bandwidth / 1e9, 2)  # byte/s per direction, before packet headers
    31.51
    """

    generation: int
    lanes: int
    sources: tuple[str, ...] = msgspec.field(name="source")

    def __post_init__(self) -> None:
        if self.generation not in _TRANSFERS or self.lanes not in (1, 2, 4, 8, 16):
            raise ConfigError(f"no PCI Express {self.generation} x{self.lanes}", key="pcie")
        if not self.sources:
            raise ConfigError("has no source", key="pcie")

    @property
    def bandwidth(self) -> float:
        """Byte/s per direction: a bit per lane and transfer, less the line code (128 of 130 bits; 242 of 256 bytes in 6)."""
        code = 242 / 256 if self.generation == 6 else 128 / 130
        return _TRANSFERS[self.generation] * self.lanes * code / 8


# Transfers per second and lane of each generation (PCI Express Base Specification, PCI-SIG).
_TRANSFERS = {3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}


class Host(_Section, frozen=True):
    """The link to the host's memory: `pcie`, or another `kind` with its `bandwidth` in byte/s per direction."""

    pcie: Pcie | None = None
    kind: str | None = None
    bandwidth: Quantity | None = None


class Nic(_Section, frozen=True):
    """The network adapter between nodes: `bandwidth` in byte/s per GPU and direction (files print Gbit/s)."""

    bandwidth: Quantity | None = None


class Power(_Section, frozen=True):
    """`tdp`, the thermal design power, in watts. Vendors differ in what it covers (chip, module, board)."""

    tdp: Quantity | None = None


class Measured(_Section, frozen=True):
    """Published measurements: `bf16_best` is the best bf16 matrix multiplication found, in FLOP/s."""

    bf16_best: Quantity | None = None


Vendor = Literal["nvidia", "amd", "google", "intel", "huawei", "aws", "apple", "other"]
Segment = Literal["datacenter", "workstation", "consumer", "laptop", "unified"]
"""Market of a card; `unified`: its memory is that of the system."""
Form = Literal["", "card", "sxm", "oam", "laptop", "soc", "superchip"]
YOURS = "yours"
"""Citation key of figures that the user gives."""
LARGEST_FILE = 100_000
"""Bytes of a GPU file of the user's."""
DRIVER_SHARE, DRIVER_BYTES = 0.016, 128 * 2**20
"""Upper bound of the memory that a driver reserves: a share and a constant. No card of the catalogue with a reported
figure reports less than its chips less these."""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU of the catalogue. The properties are plain numbers in base units; the figures with their sources are in
    `memory`, `peaks`, `interconnect`, `host`, `nic`, `power` and `measured`. `confidence` says how far to trust the
    whole entry, `notes` where its sources disagree. `segment` and `form` say what kind of product it is.
    `compute_capability` is NVIDIA's (developer.nvidia.com/cuda-gpus), `multiprocessors` the count of its SMs.

    >>> h100 = gpu("h100-sxm5-80gb")
    >>> h100.peak("bf16"), h100.memory_bandwidth, h100.link_bandwidth, h100.link_domain
    (989000000000000.0, 3350000000000.0, 450000000000.0, 8)
    >>> h100.memory.bandwidth.sources
    ('ml-engineering-accelerators', 'aiconfigurator')
    """

    id: str
    name: str
    vendor: Vendor
    confidence: Literal["high", "medium", "low"]
    segment: Segment = "datacenter"
    form: Form = ""
    notes: str = ""
    compute_capability: str = ""
    multiprocessors: int = 0
    memory: Memory
    peaks: Peaks = msgspec.field(default=Peaks(), name="peak")
    interconnect: Interconnect = msgspec.field(default=Interconnect(), name="link")
    host: Host = Host()
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
        """Return whether it is a data-centre GPU of Hopper or Blackwell, for which cuBLAS and Transformer Engine take larger
        workspaces: compute capability 9.x or 10.x.

        >>> [gpu(id).data_center_hopper_or_later for id in ("a100-sxm4-80gb", "h20-96gb", "gb300-nvl72", "rtx5090")]
        [False, True, True, False]
        """
        return self.compute_capability.partition(".")[0] in ("9", "10")

    @property
    def blackwell(self) -> bool:
        """Return whether it is a data-centre GPU of Blackwell: compute capability 10.x.

        >>> [gpu(id).blackwell for id in ("h100-sxm5-80gb", "gb300-nvl72", "rtx5090")]
        [False, True, False]
        """
        return self.compute_capability.partition(".")[0] == "10"

    @property
    def capacity(self) -> float:
        """Usable memory [bytes]: what the driver reports where a source states it, else what of shared memory the GPU may
        use, else the chips less inline ECC and less what drivers keep, else the label, GB as 10^9 and GiB as 2^30 bytes.

        Stacks of HBM hold powers of two: NVIDIA's and AMD's modules (SXM, OAM) of "80 GB" have 80 GiB, less what drivers keep,
        as have the cards of the same chip. Of others 10^9 promises nothing that is not there.

        >>> [round(gpu(id).capacity / 2**30, 2) for id in ("h100-sxm5-80gb", "h100-pcie-80gb", "rtx3060-12gb", "h20-96gb")]
        [79.19, 78.59, 11.68, 94.34]
        """
        memory = self.memory
        stated, chips = memory.reported or memory.usable, self.chips
        if stated is None and chips:
            return chips * (15 / 16 if memory.ecc else 1) * (1 - DRIVER_SHARE) - DRIVER_BYTES
        return (stated or memory.label).value

    @property
    def chips(self) -> float:
        """The bytes that its memory chips hold, where a source says so or they are stacks of HBM; else 0."""
        memory, stacks = self.memory, self.vendor in ("nvidia", "amd") and self.form in ("sxm", "oam", "superchip")
        if memory.chips is not None:
            return memory.chips.value
        return memory.label.value / 1e9 * 2**30 if stacks and memory.label.text.endswith(" GB") else 0

    @property
    def bf16(self) -> bool:
        """Return whether it multiplies in bf16; NVIDIA's do from compute capability 8.0 (Ampere) on. PyTorch emulates it elsewhere.

        >>> [gpu(id).bf16 for id in ("t4", "v100-sxm2-32gb", "a100-sxm4-40gb")]
        [False, False, True]
        """
        return self._capability >= (8, 0)

    @property
    def flash_attention(self) -> bool:
        """Return whether FlashAttention-2 runs on it: of NVIDIA's, from compute capability 8.0 (Ampere) on."""
        return self._capability >= (8, 0)

    @property
    def _capability(self) -> tuple[int, ...]:
        """Compute capability; where there is none (not NVIDIA's), one that has everything."""
        return tuple(map(int, self.compute_capability.split("."))) if self.compute_capability else (99, 0)

    @property
    def capacity_basis(self) -> Literal["reported", "assumed"]:
        """`reported` by the driver, or `assumed` from the label."""
        return "reported" if self.memory.reported else "assumed"

    def peak(self, precision: str) -> float:
        """Return the dense peak [FLOP/s, `int8`: OP/s] at `fp32 tf32 bf16 fp16 fp8 fp4 int8`.

        Raises `NotStated` where none states it (or the GPU cannot: see `notes`), `ConfigError` for another word.

        >>> gpu("h20-96gb").peak("fp8")
        Traceback (most recent call last):
        loadgauge.core.base.errors.NotStated: H20 SXM 96GB: no trusted source states peak.fp8 (data/gpus/h20-96gb.toml)
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
        of a card without a link of its own, the PCI Express that it is plugged into. `NotStated` where no source says."""
        if self.interconnect == Interconnect() and self.form == "card" and self.host.pcie is not None:
            return self.host.pcie.bandwidth
        return self._stated(self.interconnect.bandwidth, "link.bandwidth")

    @property
    def link_domain(self) -> int:
        """Number of GPUs that the link joins. Raises `NotStated` where no source states it."""
        return int(self._stated(self.interconnect.domain, "link.domain"))

    @property
    def host_bandwidth(self) -> float:
        """Bandwidth to the host's memory [byte/s per direction], before protocol overhead. Raises `NotStated` where no
        source states the connection.

        >>> round(gpu("t4").host_bandwidth / 1e9, 2), round(gpu("a100-sxm4-80gb").host_bandwidth / 1e9, 2)
        (15.75, 31.51)
        """
        if self.host.pcie is not None:
            return self.host.pcie.bandwidth
        if self.host.bandwidth is None and (self.interconnect.kind or "").startswith("PCIe"):
            return self.link_bandwidth
        return self._stated(self.host.bandwidth, "host.bandwidth")

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
            if self.id.startswith("memory="):
                raise NotStated("only the size of the memory is known; --gpu names a card")
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
    from the innermost to the one that joins all. `sustained`: of a long 16-bit matrix product on one of them, where somebody
    measured it [FLOP/s]. `topology`: the tiers of its network, where they are stated. `kernels`: `Efficiencies` that somebody
    measured there, in place of those of the GPU's calibration.

    >>> inner, outer = Link(bandwidth=450e9, latency=2e-6, domain=8), Link(bandwidth=50e9, latency=5e-6, domain=64)
    >>> Cluster(gpu=gpu("h100-sxm5-80gb"), gpus=64, gpus_per_node=8, links=(inner, outer)).gpus
    64
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    links: tuple[Link, ...]
    sustained: float | None = None
    topology: Topology | None = None
    kernels: Any = None

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


def gpu(id: str) -> Gpu:
    """Read a GPU by its id, by a name that people or drivers give it (see `gpu_names`), or from a TOML file of one's own.

    A name without a variant means the commonest. A file has the keys of those in `data/gpus`, of which only
    `memory.label` is needed; a figure may stand alone, without its sources. Raises `ConfigError`, with the closest ids for
    an unknown one.

    >>> gpu("H100").id, gpu("NVIDIA GeForce RTX 4090").id, gpu("Tesla T4").id
    ('h100-sxm5-80gb', 'rtx4090', 't4')
    >>> gpu("rtx6000")
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: gpu: unknown GPU 'rtx6000' (closest: rtx6000ada, quadrortx6000; another: --memory SIZE)
    """
    return _own(id) if id.endswith(".toml") else _catalogued(id)


@functools.cache
def _catalogued(id: str) -> Gpu:
    ids = gpu_ids()
    if id not in ids:
        named = find_id(id, ids)
        if named is not None:
            return _catalogued(named)
        card, size = split_size(id)
        named = find_id(card, ids) if size else None
        if named is None:
            raise ConfigError(
                f"unknown GPU {id!r} (closest: {', '.join(nearest(id, ids))}; another: --memory SIZE)", key="gpu"
            )
        gpu_record, label = _catalogued(named), re.sub(r"\s", "", _catalogued(named).memory.label.text)
        if label.lower() != size:
            has = f"{label} (another size: --gpu {named} --memory {size.upper()})"
            raise ConfigError(f"{id!r}: {gpu_record.name} has {has}", key="gpu")
        return gpu_record
    return Gpu.from_toml(id, read_data(f"gpus/{id}.toml"))


def _own(path: str) -> Gpu:
    """A GPU from a file of the user's. Not cached: the file may change."""
    text = read_text(path, LARGEST_FILE)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(error), file=path) from None
    for section in content.values():
        for key, figure in section.items() if isinstance(section, dict) else ():
            if isinstance(figure, str) and key not in ("kind", "topology", "ecc"):
                section[key] = {"value": figure, "source": [YOURS]}
            elif isinstance(figure, dict):
                figure.setdefault("source", [YOURS])
    plain: dict[str, Any] = {
        "name": os.path.basename(path).removesuffix(".toml"),
        "vendor": "other",
        "confidence": "low",
    }
    try:
        card = msgspec.convert({**plain, **content, "id": path}, Gpu)
        for figure in (card.memory.label, card.memory.bandwidth):
            assert figure is None or figure.works()
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(str(error), file=path) from None
    return card


def card_of(memory: str) -> Gpu:
    """Return a GPU of which only the memory is known, such as `16GiB`. Raises `ConfigError`.

    >>> card_of("16GiB").capacity / 2**30
    16.0
    """
    label = _size(memory)
    return Gpu(
        id=f"memory={memory}", name=f"GPU of {memory}", vendor="other", confidence="low", memory=Memory(label=label)
    )


def with_memory(card: Gpu, memory: str) -> Gpu:
    """Return a GPU of which a program may use only so much memory, or that has more than the catalogue says.

    >>> with_memory(gpu("rtx4090"), "20GiB").capacity / 2**30
    20.0
    """
    return msgspec.structs.replace(card, memory=msgspec.structs.replace(card.memory, reported=_size(memory)))


def _size(memory: str) -> Quantity:
    try:
        size = Quantity(memory, (YOURS,))
    except ConfigError:
        size = None
    if size is None or size.kind != "byte":
        raise ConfigError(f"must be a size such as 16GiB or 24GB, got {memory!r}", key="memory")
    return size


def gpus() -> tuple[Gpu, ...]:
    """Return the whole catalogue in order of id; reads every file."""
    return tuple(gpu(id) for id in gpu_ids())


def _file(id: str) -> str:
    return id if id.endswith(".toml") else f"data/gpus/{id}.toml"


def _unknown(noun: str, word: str, choices: Iterable[str]) -> ConfigError:
    nearest_ones = closest(word.lower(), choices, 3, cutoff=0.0)
    return ConfigError(f"unknown {noun} {word!r} (closest: {', '.join(nearest_ones)})", key=noun.lower())
