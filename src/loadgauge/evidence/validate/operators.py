"""Measured operations, one by one: what `core/definitions/hardware/calibration.py` says of them against what was published of them.

The tables in `data/operators` hold measurements of single operations, each with its source, commit and licence; nothing in them is
modelled. `make operators` fits the figures of `data/calibration` to them, `validate --operators` scores them.
"""

import csv
import functools
import gzip
import io
import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from loadgauge.core.base import NotStated, lists, read_bytes
from loadgauge.core.definitions.hardware.calibration import Efficiencies, efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu as card_named, gpu_ids
from loadgauge.core.definitions.model.kernels import WRITTEN_KERNELS, written_norm_bytes
from loadgauge.core.definitions.training.precision import TRANSFORMER_ENGINE
from loadgauge.core.estimate.time.collectives import Fabric, Group, seconds
from loadgauge.core.estimate.time.roofline import Machine, gemm_seconds, grouped_seconds, operation_seconds
from loadgauge.core.layers.operations.operations import Gemm, Operation

COOL, HOT = 4.5e-3, 0.135
"""Seconds of products one after the other that leave a chip cool, and from which on it runs at the sustained rate."""
CALLS = {"MooreThreads/SimuMax": 75}
FEW_CALLS = 9
"""Calls one after the other of a measurement, by source, and of all others: 3 to warm up and 6 that are timed."""
FORMATS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "mxfp8": "fp8-block", "nvfp4": "fp4"}
_RECIPES = {"fp8": "fp8-tensorwise", "fp8-block": "mxfp8", "fp4": "nvfp4"}
SWEEP = "ai-dynamo/aiconfigurator"
"""One sweep of the same operations on every GPU, by CUDA graphs: without the host's time."""
ENDLESS = ("microsoft/vidur", "Azure/AI-benchmarking-guide")
"""Sources that run a product for seconds."""
OWN_POWER = ("MooreThreads/SimuMax", *ENDLESS)
"""Sources whose machines get a `throttle` of their own, set by one product of theirs."""
WARM = 0.2
"""Share of the throttle from which on a product counts as sustained."""
LEAST = 1024
"""Sides of a product below which it is no product of training."""
LARGE = 64e6
"""Bytes above which the time of a kernel that memory bounds is not mostly its start."""

SMALL = 2**20
"""Bytes of a message whose time is its start."""

EfficienciesOf = Callable[[str], Efficiencies]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: `row` of the table, and its time [s]."""

    kind: str
    gpu: str
    source: str
    row: dict[str, str]
    seconds: float

    def __getitem__(self, name: str) -> str:
        return self.row[name]

    def number(self, name: str) -> float:
        """Return a column as a number; 0 where it is empty."""
        return float(self.row.get(name) or 0)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the measurements of one GPU and kind: (predicted - measured) / measured; `p90` of their absolute values."""

    kind: str
    gpu: str
    rows: int
    signed: float
    median: float
    p90: float


@functools.cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a table of `data/operators`: gemm, moe, attention, membound or collectives."""
    text = gzip.decompress(read_bytes(f"operators/{name}.csv.gz")).decode()
    return tuple(csv.DictReader(io.StringIO(text)))


def _known(name: str) -> Iterator[dict[str, str]]:
    """Rows of a table whose card is in the catalogue and whose time is known."""
    cards = set(gpu_ids())
    return (row for row in table(name) if row["gpu"] in cards and row["time_us"])


def _measured(kind: str, row: dict[str, str]) -> Measured:
    return Measured(kind=kind, gpu=row["gpu"], source=row["source"], row=row, seconds=float(row["time_us"]) * 1e-6)


# -- matrix products ---------------------------------------------------------------------------------------------------


def products() -> Iterator[Measured]:
    """Yield dense products of training sizes, in formats that tensor cores take, and grouped ones.

    vLLM's rows are left out: what its weights held is not known, and with it the power that they took.
    """
    for row in _known("gemm"):
        if (
            row["dtype"] not in FORMATS
            or row["software"].startswith("VLLM")
            or row["pass"] not in ("fwd", "dgrad", "wgrad")
        ):
            continue
        if row["printed"] == "best" or row["source"] == "stas00/ml-engineering":
            continue  # the best of many, which is a ceiling
        if min(float(row[side]) for side in "mnk") < LEAST and row["kind"] == "dense":
            continue
        form = FORMATS[row["dtype"]]
        timing = _measured(f"grouped products {form}", row)
        how = "sustained" if heat(timing) > WARM else "short"
        yield timing if row["kind"] == "grouped" else msgspec.structs.replace(timing, kind=f"products {form}, {how}")


def machine(
    card: str,
    efficiencies: Efficiencies,
    form: str = "bf16",
    heat: float = 1.0,
    attention: str = "fa2",
    *,
    one_kernel: bool = False,
) -> Machine:
    """Return a machine of a card; heat: how much of `throttle` shows (0: none)."""
    gpu = card_named(card)
    low = None if form == "bf16" else TRANSFORMER_ENGINE[_RECIPES[form]]
    throttle = 1 - (1 - efficiencies.throttle) * heat
    return Machine(
        peak=gpu.peak("bf16"),
        bandwidth=gpu.memory_bandwidth,
        efficiencies=msgspec.structs.replace(efficiencies, throttle=throttle),
        fp8_peak=None if low is None else gpu.peak(low.format),
        low=low,
        attention=attention,
        one_kernel=one_kernel,
    )


def heat(timing: Measured) -> float:
    """Return how hot the chip is when this is measured: between `COOL` and `HOT` by the logarithm of the time of all calls."""
    if timing.source in ENDLESS:
        return 1.0
    together = timing.seconds * CALLS.get(timing.source, FEW_CALLS)
    return min(1.0, max(0.0, math.log(together / COOL) / math.log(HOT / COOL)))


def product_seconds(timing: Measured, rates: Efficiencies) -> float:
    """Return the predicted time of a product [s]; where the measurement includes quantising its input, that too."""
    form = FORMATS[timing["dtype"]]
    card = machine(timing.gpu, rates, form, heat(timing))
    m, n, k, groups = (int(timing.number(name)) for name in ("m", "n", "k", "groups"))
    weight = timing["pass"] == "wgrad"
    gemm, few = Gemm(m, n, k, groups), form != "bf16"
    time = float(
        grouped_seconds(gemm, card, fp8=few, weight=weight)
        if timing["kind"] == "grouped"
        else gemm_seconds(gemm, card, fp8=few, slower=rates.weight_gradient if weight else 1.0)
    )
    if "quantising" in timing["notes"]:
        element = 0.5 if form == "fp4" else 1
        time += m * k * groups * (2 + element) / card.memory(f"quantise-{form}").forward + card.quantise_launch
    return time


# -- whole layers of experts -------------------------------------------------------------------------------------------

FEWEST_ROWS = 64
"""Rows of an expert below which its layer is no layer of training."""
OTHER_KERNELS = ("min_latency", "triton_fp8_block")
"""Kernels of decoding, which read every expert for a few rows; and Triton's in place of one that a card lacks."""


def experts() -> Iterator[Measured]:
    """Yield whole layers of experts, forward: permuting, both products, activation and sum."""
    for row in _known("moe"):
        rows = float(row["tokens"]) * float(row["topk"]) / float(row["experts"])
        other = any(name in row["kernel"] for name in OTHER_KERNELS)
        if row["dtype"] in FORMATS and rows >= FEWEST_ROWS and not row["software"].startswith("VLLM") and not other:
            yield _measured(f"expert layer {FORMATS[row['dtype']]}", row)


def expert_seconds(timing: Measured, rates: Efficiencies) -> float:
    """Return the predicted time of a layer of experts on one of its ranks, forward [s]."""
    form = FORMATS[timing["dtype"]]
    card = machine(timing.gpu, rates, form, heat(timing), one_kernel=True)
    hidden, inner = int(timing.number("hidden")), int(timing.number("inter"))
    held, copies = (
        timing.number("experts") / timing.number("ep"),
        timing.number("tokens") * timing.number("topk") / timing.number("ep"),
    )
    rows, element = copies / held, {"bf16": 2, "fp4": 0.5}.get(form, 1)
    time = sum(
        grouped_seconds(Gemm(rows, n, k, held), card, fp8=form != "bf16")
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    # Permuting reads 16 bits and writes the product's format, and so does the activation, of twice as many; the sum reads each
    # copy and writes each token. Scales by blocks are made in a kernel of their own.
    moved = copies * ((4 + element) * (hidden + inner)) + 2 * timing.number("tokens") * hidden
    if form in ("fp8-block", "fp4"):
        moved += 4 * copies * (hidden + inner)
    sorting = rates.expert_start + rates.expert_copy * timing.number("tokens") * timing.number("topk")
    return float(time + moved / card.memory("permute-serving").forward + sorting)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_family(row: dict[str, str]) -> str | None:
    """Return the kernel of a row, by the name that `--attention` takes; None for those of serving, which write a cache too."""
    named = {"FlashAttention-2": "fa2", "FlashAttention-3": "fa3", "cuDNN": "cudnn", "AITER": "aiter"}
    if row["source"] == "NVIDIA/cudnn-frontend":
        return "cudnn"
    if row["source"] == "MooreThreads/SimuMax":
        return "cudnn" if row["gpu"].startswith("b") else "fa2"
    return named.get(row["kernel"])


HOST_SHOWS = 1.3
"""Calls of less than so many times the shortest take the host's time, where a source launches them one by one from Python."""


def attentions() -> Iterator[Measured]:
    """Yield fused attention of training: no window, 16 bits, at least 2,048 queries of sequences of at least 512.

    Transformer Engine called from Python takes as long for 4 heads as for 16: those rows are the host's time and are left out.
    """
    listed = list(_attentions())
    shortest: dict[tuple[str, str, str], float] = {}
    for timing in listed:
        case = (timing.source, timing.gpu, timing["direction"])
        shortest[case] = min(timing.seconds, shortest.get(case, timing.seconds))
    for timing in listed:
        from_host = timing.seconds < HOST_SHOWS * shortest[timing.source, timing.gpu, timing["direction"]]
        if timing.source not in CALLS or not from_host:
            yield timing


def _attentions() -> Iterator[Measured]:
    for row in _known("attention"):
        kernel = attention_family(row)
        if kernel is None or row["dtype"] not in ("bf16", "fp16") or row["window"] not in ("", "0"):
            continue
        if (
            float(row["seq"]) < 512
            or float(row["batch"]) * float(row["seq"]) < 2048
            or row["deterministic"] in ("1", "True")
        ):
            continue
        way = {"fwd": "forward", "bwd": "backward"}.get(row["direction"], "both ways")
        yield _measured(f"attention {kernel}, {way}", row)


def attention_seconds(timing: Measured, rates: Efficiencies, kernel: str | None = None) -> float:
    """Return the predicted time of a kernel of fused attention [s], forward, backward or both."""
    kernel = kernel or attention_family(timing.row) or "fa2"
    card = machine(timing.gpu, rates, heat=1.0 if timing.source in OWN_POWER else 0.0, attention=kernel)
    batch, heads, queries, keys = (int(timing.number(name)) for name in ("batch", "heads", "seq", "kv_seq"))
    width, value = int(timing.number("head_dim")), int(timing.number("head_dim_v"))
    flops = 2 * batch * heads * queries * keys * (width + value)
    operation = Operation(
        "attention",
        "attention",
        (),
        (),
        gemms=(Gemm(queries, keys, width, batch * heads), Gemm(queries, value, keys, batch * heads)),
        forward_flops=flops,
        input_gradient_flops=2 * flops,
        rerun_flops=2 * batch * heads * queries * keys * width,
        computed_share=0.5 if timing["causal"] in ("1", "True") else 1,
    )
    time = operation_seconds(operation, card)
    return float({"fwd": time.forward, "bwd": time.backward}.get(timing["direction"], time.forward + time.backward))


# -- kernels that memory bounds ----------------------------------------------------------------------------------------

_ELEMENTWISE = ("add", "mul", "gelu", "residual_add", "stream_add", "stream_triad", "stream_copy", "stream_mul")
_KERNELS = {
    "cudnn": "fused", "quack": "fused", "pytorch": "eager", "torch": "eager", "megatron": "eager", "PyTorch": "eager",
    "torch_compile": "compiled", "torch.compile": "compiled", "huggingface": "written",
}  # fmt: skip


ADDED = ("fused_add_rms_norm", "huggingface")
"""A residual sum and the norm after it; of that source each is written out."""


def memory_family(row: dict[str, str]) -> str | None:
    """Return the family of a kernel that memory bounds (`Efficiencies.memory`); None for what no family describes."""
    name = row["op"]
    if name in _ELEMENTWISE:
        return "elementwise"
    if row["kernel"] in _KERNELS and (name == "rms_norm" or (name, row["kernel"]) == ADDED):
        return f"norm-{_KERNELS[row['kernel']]}"
    if name.startswith("quantise"):
        return "quantise"
    return {
        "moe_permute_unpermute": "permute",
        "cross_entropy (Megatron)": "loss",
        "cross_entropy (fused)": "loss",
    }.get(name)


def streams() -> Iterator[Measured]:
    """Yield kernels that memory bounds and that move more than `LARGE` bytes."""
    for row in _known("membound"):
        family = memory_family(row)
        if family == "norm-written":
            # Counted over the kernels; the gain of that module is float32, and a sum before it reads two tensors and writes one.
            back = row["direction"] == "bwd"
            element = written_norm_bytes(4 if row["dtype"] == "fp32" else 2, 4)[back] + 12 * (row["op"] == ADDED[0])
            row = row | {
                "bytes": str(element * float(row["rows"]) * float(row["cols"])),
                "kernels": str(WRITTEN_KERNELS[back]),
            }
        if family is not None and row["bytes"] and float(row["bytes"]) >= LARGE:
            yield _measured(f"{family}, {'backward' if row['direction'] == 'bwd' else 'forward'}", row)


def stream_seconds(timing: Measured, rates: Efficiencies) -> float:
    """Return the predicted time of a kernel that memory bounds [s]."""
    share = rates.memory[memory_family(timing.row) or "elementwise"]
    rate = share.backward if timing["direction"] == "bwd" else share.forward
    return (
        timing.number("bytes") / (card_named(timing.gpu).memory_bandwidth * rate)
        + (timing.number("kernels") or 1) * rates.launch
    )


# -- collectives -------------------------------------------------------------------------------------------------------

WAYS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DISPATCHED_BYTES = 1 + 4 / 128
"""Of an element as DeepEP sends it in a serving stack: 8 bits, with a scale in float32 for 128 of them. (In 16 bits these rows
would be beyond the links' bandwidth, and in 8 they are at the rate that DeepEP's own table has for 8 bits.)"""


def collectives(*, nodes: bool = False) -> Iterator[Measured]:
    """Yield NCCL's collectives inside a node; or over several, where the network is stated."""
    for row in _known("collectives"):
        if row["library"] != "nccl" or row["op"] not in WAYS or not row["bytes"] or int(row["ranks"]) < 2:
            continue
        several = int(row["nodes"]) > 1
        if card_named(row["gpu"]).compute_capability == "7.0":
            continue  # a mesh, whose pairs have one or two links, or none
        if several != nodes or (several and "network between" in row["link"]):
            continue
        if "off" in row["algorithm"] or row["algorithm"] == "Ring":
            continue  # switched off by hand
        where = " over nodes" if several else "" if row["source"] == SWEEP else ", other machines"
        yield _measured(row["op"].replace("_", "-") + where, row)


def collective_seconds(timing: Measured, rates: Efficiencies) -> float:
    """Return the predicted time of a collective [s]."""
    group = Group("dp", int(timing.number("ranks")), 1)
    return float(seconds(timing["op"], timing.number("bytes"), group, _fabric(timing, rates)))


def _fabric(timing: Measured, rates: Efficiencies) -> Fabric:
    """The links that a collective was measured on."""
    card, ranks, nodes = card_named(timing.gpu), int(timing.number("ranks")), int(timing.number("nodes"))
    switched = (
        "NVLS" in timing["algorithm"] or not timing.source.startswith(("microsoft/vidur", "stas00")) or not rates.nvls
    )
    return Fabric(
        domain=ranks // nodes,
        inner_bandwidth=card.link_bandwidth,
        outer_bandwidth=6.25e9 if "4 x 100 Gbit/s" in timing["link"] else 50e9,
        inner_latency=rates.inner_latency,
        outer_latency=rates.outer_latency,
        inner_efficiency=rates.inner_link,
        outer_efficiency=rates.outer_link,
        wires=rates.wires,
        nvls=rates.nvls if switched else 0.0,
        nvls_ranks=rates.nvls_ranks,
        outer_start=rates.outer_start,
        outer_root=rates.outer_root,
        dispatch_link=rates.dispatch_link,
    )


def dispatches() -> Iterator[Measured]:
    """Yield what DeepEP and HybridEP take to send tokens to random experts and back, without rows that repeat another card's."""
    seen = set()
    for row in _known("collectives"):
        if row["op"] in ("deepep_dispatch", "deepep_combine") and (row["time_us"], row["notes"]) not in seen:
            seen.add((row["time_us"], row["notes"]))
            yield _measured(f"dispatch by {row['library']}{' over nodes' if int(row['nodes']) > 1 else ''}", row)


def dispatch_seconds(timing: Measured, rates: Efficiencies) -> float:
    """Return the predicted time of sending tokens to their experts [s]."""
    words = timing["notes"].split()
    sizes = {key: int(value) for key, value in zip(words[::2], words[1::2], strict=True)}
    nbytes = sizes["tokens"] * sizes["hidden"] * sizes["topk"] * sizes.get("bytes", DISPATCHED_BYTES)
    if timing["library"] in rates.wires:
        wires = rates.wires | {"dispatch": rates.wires[timing["library"]]}
        rates = msgspec.structs.replace(rates, wires=wires)
    fabric, group = _fabric(timing, rates), Group("ep", int(timing.number("ranks")), 1)
    copies = max(sizes["topk"], 1 + 1e-9)
    return float(seconds("all_to_all", nbytes, group, fabric, copies=copies, rows=sizes["tokens"] * sizes["topk"]))


# -- scores ------------------------------------------------------------------------------------------------------------

TABLES: tuple[tuple[Callable[[], Iterable[Measured]], Callable[[Measured, Efficiencies], float]], ...] = (
    (products, product_seconds),
    (experts, expert_seconds),
    (attentions, attention_seconds),
    (streams, stream_seconds),
    (collectives, collective_seconds),
    (functools.partial(collectives, nodes=True), collective_seconds),
    (dispatches, dispatch_seconds),
)
"""What is measured, and what predicts it."""


def own_power(rows: Iterable[Measured], rates: Efficiencies) -> Efficiencies:
    """Return the efficiencies with the `throttle` of a machine that ran some of these products: that of its largest one.

    This is what `calibrate` measures on a machine of one's own.
    """
    largest = max(
        (row for row in rows if row["pass"] == "fwd" and row["kind"] == "dense"),
        key=lambda row: row.number("m") * row.number("n") * row.number("k"),
        default=None,
    )
    if largest is None:
        return rates
    cool = product_seconds(largest, msgspec.structs.replace(rates, throttle=1.0))
    return msgspec.structs.replace(rates, throttle=min(1.05, cool / largest.seconds))


def own_network(rows: Iterable[Measured], rates: Efficiencies) -> Efficiencies:
    """Return the efficiencies with the `outer_start` of a network that was measured: that of its fastest message.

    Networks differ by ten times in it; a user's own is what `calibrate` measures, or the latency of the link that is given.
    """
    fastest = min(rows, key=lambda row: row.seconds)
    if fastest.number("bytes") > SMALL:
        return rates
    start = rates.outer_start + fastest.seconds - collective_seconds(fastest, rates)
    return msgspec.structs.replace(rates, outer_start=max(0.0, start))


def errors(of: EfficienciesOf = efficiencies) -> Iterator[tuple[Measured, float]]:
    """Yield each measurement with its error: (predicted - measured) / measured."""
    power: dict[tuple[str, str], Efficiencies] = {}
    for source in OWN_POWER:
        own = (row for row in products() if row.source == source and row["dtype"] in ("bf16", "fp16"))
        for card, rows in lists((row.gpu, row) for row in own).items():
            power[source, card] = own_power(rows, of(card))
    networks = lists(((f"{row.source} over nodes", row.gpu), row) for row in collectives(nodes=True))
    power |= {case: own_network(rows, of(case[1])) for case, rows in networks.items()}
    for measured, predict in TABLES:
        for timing in measured():
            try:
                machine_of = f"{timing.source} over nodes" if timing.kind == "all-reduce over nodes" else timing.source
                predicted = predict(timing, power.get((machine_of, timing.gpu)) or of(timing.gpu))
            except NotStated:
                continue
            yield timing, predicted / timing.seconds - 1


def scores(of: EfficienciesOf = efficiencies) -> tuple[Score, ...]:
    """Return the errors of all measurements by kind and GPU."""
    by_kind = lists(((row.kind, row.gpu), error) for row, error in errors(of))
    return tuple(_score(kind, card, values) for (kind, card), values in sorted(by_kind.items()))


def _score(kind: str, card: str, values: list[float]) -> Score:
    sizes = sorted(map(abs, values))
    return Score(
        kind=kind,
        gpu=card,
        rows=len(values),
        signed=_quantile(sorted(values), 0.5),
        median=_quantile(sizes, 0.5),
        p90=_quantile(sizes, 0.9),
    )


def _quantile(ordered: list[float], share: float) -> float:
    """The quantile of sorted values, interpolated."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
