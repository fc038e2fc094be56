"""Achieved shares of a GPU's datasheet, by kernel: `data/calibration`, made by `make operators` from published measurements.

No figure is fitted to training runs, and none belongs to a run, a model or a framework. `common.toml` holds what all GPUs share
(the shape of the forms, shares of the bandwidth by kernel) and, by chip, what a GPU without measurements takes over; a file for
each measured GPU holds its own figures. What software adds beside its kernels is in `data/software.toml`.
"""

import functools
from contextlib import suppress
from typing import Any, Literal

import msgspec

from loadgauge.core.base import ConfigError, NotStated, read_table
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu, Quantity, gpu as card_named

MEASURED_BEST, PER_WATT, SHARE, HIGHEST = 0.85, 0.27, 0.70, 0.85
"""Of a GPU without measured products: what the best one ever found loses when it is any, and runs long; the power of the watts
for each FLOP/s with which the share of chips of one kind goes; the share where nothing is known; and the highest that any rule
gives."""
PLAIN, PER_PLAIN_WATT, HIGHEST_PLAIN = 0.191, 0.548, 0.935
"""Share of float32's peak that products without tensor cores reach at 1 W for each of its TFLOP/s, the power of the watts, and the
highest one found: of five GPUs from 2 W (L4) to 18 W (V100), each within 2 to 11 % of what the other four say (`fit_plain` of
`operators.left_out`)."""
WHOLE = {"7": 1.81e12, "8.6": 1.84e12, "8.9": 2.64e12, "9": 7.49e12, "12": 2.49e12}
HELD_BACK = 1.5
"""16-bit FLOP/s of a multiprocessor of the fastest card of each chip. A card with that many times fewer is held back by design
(GeForce sums up in float32 at half the rate, H20), so that its power is not what slows its tensor cores down."""
PCIE_CHIP = "12"
"""The chip whose measured cards have PCI Express alone between them."""


class Both(msgspec.Struct, frozen=True, array_like=True):
    """A figure of forward and of backward kernels."""

    forward: float
    backward: float


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A collective inside a domain of n ranks takes `start` + `step` (n - 1) + y + `root` sqrt(y) seconds.

    y: the bytes that a rank sends over `share` of the link's bandwidth; start, step [s], root [s^0.5]: the ramp between small
    and large messages
    """

    start: float
    step: float
    share: float
    root: float


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a figure comes from: how many measurements, their median error under it, and the works they are from."""

    rows: int
    spread: float
    sources: tuple[str, ...]


class Efficiencies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):  # each is itself
    """Efficiencies of one GPU's kernels: shares of its datasheet, unless a unit is given.

    Matrix products take ((arithmetic)^3 + (traffic)^3)^(1/3) + launch:
    matmul, fp8_matmul, fp8_block_matmul, fp4_matmul: share of the peak of the format that a large product reaches while the
        chip is cool; `block`: with a scale for each block of an operand
    float32: share of the float32 peak that a large product without tensor cores reaches (`PLAIN`)
    throttle: what is left of the tensor cores' rate, in products and attention, when they are busy all the time: it depends on
        cooling and power limits, so it belongs to the machine (0.7 to 1) and not to the kind of GPU
    small_k, fp8_small_k, fp8_block_small_k, fp4_small_k: inner width at which a product reaches half of its share [elements]
    wave: how much of the loss by partial waves of tiles shows (0: none, 1: all)
    product_memory: share of the memory bandwidth at which a product reads and writes
    weight_gradient: time of a product that adds to a gradient, over that of one that writes
    grouped, grouped_weight: rate of the products of experts that are launched one by one over that of one product, in forward
        and for the gradient of its inputs, and for that of weights; grouped_launch: of each of them beside [s]
    grouped_memory: share of the memory bandwidth at which one kernel with the products of all experts reads and writes, whose
        arithmetic runs as that of one product
    expert_start, expert_copy: what a layer of experts takes beside its products and its bytes where the host waits for nothing,
        once and for each copy of a token [s]: sorting, and the starts of its kernels
    launch: of each kernel [s]; quantise_launch, block_quantise_launch: of making the copy of few bits that a product reads, with
        one scale for the tensor or one for each block [s]

    attention: by kernel, share of the 16-bit peak over the pairs that are not masked, of heads 128 wide and long sequences;
        attention_keys: keys that a query sees at which half of that is reached; narrow, wide: factors on it for heads of 64 and
        256
    memory: by family of kernels that memory bounds, share of the memory bandwidth

    wires: by collective, inside a domain, `dispatch` being an all-to-all that sends a token once to each rank (DeepEP, on
        Blackwell HybridEP), whose `step` is of each token and `root` of each copy of one [s]
    nvls: share of the link that an all-reduce in the switch reaches, counted once over the tensor (0: there is no such switch),
        from `nvls_ranks` on
    inner_link, outer_link: achieved share of the link inside a domain where no collective is named, and of the network adapter
    dispatch_link: achieved share of the network adapter by that dispatch
    inner_latency, outer_latency: latency of one step of a ring [s]
    outer_start, outer_root: what a collective that leaves its domain takes beside [s], and the ramp of the network as in
        `Wire.root` [s^0.5]
    contention: share of hidden communication's time that the overlapping compute loses
    routing: time that an expert layer's routing adds in each direction [s]: many small kernels, and a host that waits for
        the number of tokens of each expert; without a host in between, `expert_start` and `expert_copy` stand in its place
    multiprocessors: how many tiles of a matrix product are computed at a time

    basis: `measured` on this GPU, or `assumed`; how: in words, for a GPU without measurements of its own
    figures: where the figures come from, by their names
    slower: measured over predicted seconds, by a run of the user's: of what a card and its host do, of links inside a domain, of
        the network between domains
    """

    gpu: str
    matmul: float
    fp8_matmul: float
    fp8_block_matmul: float
    fp4_matmul: float
    throttle: float
    small_k: float
    fp8_small_k: float
    fp8_block_small_k: float
    fp4_small_k: float
    wave: float
    product_memory: float
    weight_gradient: float
    grouped: float
    grouped_weight: float
    grouped_launch: float
    grouped_memory: float
    expert_start: float
    expert_copy: float
    launch: float
    quantise_launch: float
    block_quantise_launch: float
    attention: dict[str, Both]
    attention_keys: Both
    narrow: Both
    wide: Both
    memory: dict[str, Both]
    wires: dict[str, Wire]
    nvls: float = 0.0
    nvls_ranks: int = 5
    inner_link: float
    outer_link: float
    dispatch_link: float
    inner_latency: float
    outer_latency: float
    outer_start: float
    outer_root: float
    contention: float
    routing: float
    multiprocessors: int = 132
    basis: Literal["measured", "assumed"]
    how: str = ""
    date: str = ""
    float32: float = 0.75
    figures: dict[str, Figure] = {}
    slower: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Chip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Efficiencies that the measured GPUs of a chip share, for its other cards.

    per_watt: `matmul` of 1 W for each TFLOP/s of the 16-bit peak; fp8, fp8_block: over `matmul`; fp4: FLOP/s over those of
    16-bit products; attention: over `matmul`, by kernel
    """

    per_watt: float
    throttle: float
    fp8: float
    fp8_block: float
    fp4: float
    attention: dict[str, Both]
    wires: dict[str, Wire] = {}
    nvls: float = 0.0
    gpus: tuple[str, ...] = ()
    """GPUs that were measured."""


def chip_of(card: Gpu) -> str:
    """Return the kind of chip: of NVIDIA's the compute capability, of which 10.x is one kind, 12.x too; of others the vendor.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [chip_of(gpu(id)) for id in ("a100-sxm4-40gb", "gb300-nvl72", "rtx4090", "mi300x")]
    ['8.0', '10', '8.9', 'amd']
    """
    major, _, minor = card.compute_capability.partition(".")
    if not major:
        return card.vendor
    return f"{major}.{minor}" if major == "8" else major


@functools.cache
def efficiencies(gpu: str) -> Efficiencies:
    """Return the measured efficiencies of a GPU's kernels; those of a rule where it was not measured. Raises `ConfigError`.

    >>> efficiencies("no-such-gpu").basis, efficiencies("t4").multiprocessors, efficiencies("h100-sxm5-80gb").basis
    ('assumed', 40, 'measured')
    """
    own: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        if not gpu.endswith(".toml"):  # a card of the user's
            own = dict(read_table(f"calibration/{gpu}.toml"))
    try:
        return with_own(gpu, own)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), file=f"data/calibration/{gpu}.toml") from None


def with_own(gpu: str, own: dict[str, Any]) -> Efficiencies:
    """Return the efficiencies of a GPU with figures of its own, in place of those by rule. Raises `msgspec.ValidationError`."""
    card = None
    with suppress(ConfigError):  # of a card that is not in the catalogue nothing more is known
        card = card_named(gpu) if gpu else None
    fields = transferred(card) | {"gpu": gpu}
    if own:
        tables = {name: fields[name] | own.get(name, {}) for name in ("attention", "memory", "wires")}
        fields |= {"how": "", **own, **tables}
    return msgspec.convert(fields, Efficiencies)


LEAST_POWER, MOST_POWER = 0.4, 1.15
"""Between which shares of a cool chip's rate the sustained one can lie; what lies outside is another product or GPU."""


def of_cluster(cluster: Cluster) -> Efficiencies:
    """Return the efficiencies of the kernels of a cluster's GPUs: those measured there, at the power that somebody measured there.

    Raises `ConfigError` for a sustained rate that no long 16-bit product of such a GPU has.
    """
    measured: Efficiencies = cluster.kernels or efficiencies(cluster.gpu.id)
    if cluster.sustained is None:
        return measured
    peak = cluster.gpu.peak("bf16" if cluster.gpu.bf16 and cluster.gpu.peaks.bf16 is not None else "fp16")
    throttle = cluster.sustained / (peak * measured.matmul)
    if not LEAST_POWER <= throttle <= MOST_POWER:
        raise ConfigError(
            f"gemm={cluster.sustained / 1e12:g}TFLOP/s is {cluster.sustained / peak:.0%} of the dense 16-bit peak of"
            f" {cluster.gpu.name}, where long products reach {measured.matmul * measured.throttle:.0%}",
            key="measured",
        )
    return msgspec.structs.replace(measured, throttle=throttle)


def slowed(cluster: Cluster, slower: tuple[float, ...], kernels: Efficiencies | None = None) -> Cluster:
    """Return a cluster whose cards, inner links and network take so many times as long (`Efficiencies.slower`).

    kernels: those of its cards, where others than `of_cluster` gives
    """
    rates = kernels or of_cluster(cluster)
    return msgspec.structs.replace(cluster, kernels=msgspec.structs.replace(rates, slower=slower))


def transferred(card: Gpu | None, common: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of `Efficiencies` for a GPU that nobody measured, from `common.toml` or other figures like it.

    The share of its products is, in this order: that of measured GPUs of its chip, by the watts for each FLOP/s; `MEASURED_BEST`
    of the best product ever found on it; that of all chips by its watts; `SHARE`.
    """
    common = dict(common or read_table("calibration/common.toml"))
    chips = {name: msgspec.convert(chip, Chip) for name, chip in common.pop("chips").items()}
    every, pcie, kind = chips.pop("any"), chips[PCIE_CHIP].wires, "" if card is None else chip_of(card)
    chip = chips.get(kind, every)
    share, how = SHARE, "no measurement: shares in the middle of those of other GPUs"
    spare = 1.0 if card is None else _held_back(card)
    if card is not None:
        how = f"no measurement of {card.name}"
        watts = _watts_per_teraflop(card, card.peaks.bf16 or card.peaks.fp16)
        if kind in chips and watts is not None:
            share = spare * chip.per_watt * (watts / spare) ** PER_WATT
            how += f": as {', '.join(chip.gpus)}, by its watts"
        elif card.measured.bf16_best is not None and card.peaks.bf16 is not None:
            share = MEASURED_BEST * card.bf16_best / card.peak("bf16")
            how += ": from the best product known"
        elif watts is not None:
            share = spare * every.per_watt * (watts / spare) ** PER_WATT
            how += ": as other chips, by its watts"
    short = min(share / chip.throttle, HIGHEST)
    throttle = chip.throttle if spare == 1 else min(1.0, share / short)
    return common | {
        "matmul": short,
        "fp8_matmul": min(HIGHEST, chip.fp8 * short),
        "fp8_block_matmul": min(HIGHEST, chip.fp8_block * short),
        "fp4_matmul": min(HIGHEST, chip.fp4 * short / _four_bits(card)),
        "throttle": throttle,
        "float32": _plain(card, short),
        "attention": {
            name: [min(HIGHEST, way.forward * short), min(HIGHEST, way.backward * short)]
            for name, way in {**every.attention, **chip.attention}.items()
        },
        "wires": {
            name: list(msgspec.structs.astuple(wire))
            for name, wire in (pcie if _over_pcie(card) else every.wires | chip.wires).items()
        },
        "nvls": chip.nvls,
        "multiprocessors": (0 if card is None else card.multiprocessors) or 132,
        "basis": "assumed",
        "how": how,
        "figures": {},
    }


def _held_back(card: Gpu) -> float:
    """Factor by which the chip's tensor cores are slowed by design; else 1."""
    peak = card.peaks.bf16 or card.peaks.fp16
    whole = WHOLE.get(chip_of(card), 0.0) * (card.multiprocessors or 0)
    spare = whole / peak.value if peak is not None else 0.0
    return spare if spare >= HELD_BACK else 1.0


def _four_bits(card: Gpu | None) -> float:
    """The 4-bit peak over the 16-bit one; 4 where either is not stated."""
    if card is None or card.peaks.fp4 is None or card.peaks.bf16 is None:
        return 4.0
    return card.peaks.fp4.value / card.peaks.bf16.value


def _over_pcie(card: Gpu | None) -> bool:
    """Return whether PCI Express alone joins cards of this kind."""
    return card is not None and (
        card.interconnect.bandwidth is None or (card.interconnect.kind or "").startswith("PCIe")
    )


def _plain(card: Gpu | None, usual: float) -> float:
    """The share of float32's peak by the watts for it; that of 16-bit products where they are not stated, or where matrix cores
    compute float32 too (whatever is not NVIDIA's)."""
    watts = _watts_per_teraflop(card, card.peaks.fp32) if card is not None and card.vendor == "nvidia" else None
    return usual if watts is None else min(HIGHEST_PLAIN, PLAIN * watts**PER_PLAIN_WATT)


def _watts_per_teraflop(card: Gpu, peak: Quantity | None) -> float | None:
    """Watts for each TFLOP/s of a peak, where both are stated."""
    if peak is None or card.power.tdp is None:
        return None
    with suppress(NotStated):
        return card.tdp / (peak.value / 1e12)
    return None
