"""The figures of `data/calibration`, fitted to measurements of single operations (`data/operators`): `make operators`.

No training run is read. Shapes of the forms are common: medians of free fits over the data-centre GPUs. Each GPU with a table
has its own shares; other GPUs take those of their chip over, by rules in `hardware/calibration.py`. The same functions predict,
in an estimate and in `validate --operators`.
"""

from __future__ import annotations

import csv
import datetime
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from loadgauge.core.definitions.hardware.calibration import PER_WATT, Both, Efficiencies, Figure, Wire
from loadgauge.core.definitions.hardware.hardware import gpu as card_named
from loadgauge.evidence.validate import operators as ops
from loadgauge.evidence.validate.operators import Measured
from operators.chips import chips, completed, middle_of

FOLDER = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "calibration"
CENTRE = (
    "a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "b300-sxm-288gb", "gb200-nvl72", "gb300-nvl72",
)  # fmt: skip
"""Data-centre GPUs with a full sweep of products: the shapes of the forms are theirs."""
SWEEP = ops.SWEEP
MEMORY = {
    "elementwise": (0.86, 0.86), "norm-fused": (0.75, 0.63), "norm-compiled": (0.70, 0.32), "norm-eager": (0.55, 0.25),
    "norm-written": (0.7, 0.7),
    "quantise": (0.70, 0.72), "quantise-fp8": (0.5, 0.5), "quantise-fp8-block": (0.5, 0.5), "quantise-fp4": (0.5, 0.5),
    "permute-serving": (0.5, 0.5), "permute": (0.50, 0.51), "loss": (0.30, 0.30),
}  # fmt: skip
"""Where a family starts; families with rows of their own are fitted."""
FEW_BITS = (
    ("fp8", "fp8_matmul", "fp8_small_k", "quantise_launch"),
    ("fp8-block", "fp8_block_matmul", "fp8_block_small_k", "block_quantise_launch"),
    ("fp4", "fp4_matmul", "fp4_small_k", "block_quantise_launch"),
)
"""Of each format of few bits, the fields of its share, its inner width and the launch of its quantising."""
WIRE = Wire(7e-6, 1.5e-6, 0.75, 4e-3)
START = Efficiencies(
    gpu="", matmul=0.7, fp8_matmul=0.65, fp8_block_matmul=0.65, fp4_matmul=0.5, throttle=0.9,
    small_k=50, fp8_block_small_k=100, block_quantise_launch=5e-6, fp8_small_k=120, fp4_small_k=1000, wave=0.1,
    product_memory=0.8, weight_gradient=1.05, grouped=0.8, grouped_weight=0.6, grouped_launch=5e-6, grouped_memory=0.8,
    expert_start=3e-5, expert_copy=3e-10, dispatch_link=0.8, launch=2.6e-6,
    quantise_launch=1e-5, attention={}, attention_keys=Both(270, 315), narrow=Both(0.7, 0.9), wide=Both(1.05, 1.05),
    memory={name: Both(*shares) for name, shares in MEMORY.items()}, wires=dict.fromkeys(ops.WAYS, WIRE),
    inner_link=0.77, outer_link=0.79, inner_latency=2.5e-6, outer_latency=1.4e-5, outer_start=0.0, outer_root=0.0,
    contention=0.2, routing=3e-4,
    basis="measured",
)  # fmt: skip

SUSTAINED = {
    row["gpu"]: float(row["share_over_8ms"])
    for row in csv.DictReader((Path(__file__).parent / "gemm_shares.csv").open(encoding="utf-8"))
    if row["dtype"] == "bf16"
}
"""Share of the peak of bf16 products above 8 ms each: medians over all stacks of the whole sweeps but those whose weights' values
are not known."""

Predict = Callable[[Measured, Efficiencies], float]
SOURCES = {
    "ai-dynamo/aiconfigurator": "aiconfigurator", "MooreThreads/SimuMax": "simumax", "NVIDIA/cudnn-frontend": "cudnn-frontend",
    "microsoft/vidur": "vidur", "sitar-lab/NeuSight": "neusight", "linkedin/Liger-Kernel": "liger",
    "stas00/ml-engineering": "ml-engineering-network", "HazyResearch/HipKittens": "hipkittens",
    "Dao-AILab/flash-attention": "dao2023", "Dao-AILab/quack": "quack", "pytorch/ao": "torchao",
    "aws-samples/awsome-distributed-training": "aws-distributed-training", "NVIDIA/nccl#1801": "nccl-1801",
    "PrincetonUniversity/LLMCompass": "llmcompass", "Azure/AI-benchmarking-guide": "azure-benchmarking",
    "tile-ai/tilelang": "tilelang", "VIA-Research/vTrain": "vtrain", "Azure/msccl": "msccl", "microsoft/mscclpp": "mscclpp",
    "deepseek-ai/DeepEP": "deepep",
}  # fmt: skip
"""Citation keys of `data/sources.toml`."""


def replaced(known: Efficiencies, **changes: Any) -> Efficiencies:
    """Return the efficiencies with other figures."""
    return msgspec.structs.replace(known, **changes)


def solved(
    rows: Sequence[Measured], predict: Predict, build: Callable[[np.ndarray], Efficiencies], starts: Sequence[Sequence[float]],
    low: Sequence[float], high: Sequence[float], pull: Callable[[np.ndarray], Any] = lambda _: (),
) -> np.ndarray:  # fmt: skip
    """Return the parameters of least |log(predicted / measured)|, robustly: parameters are scaled by their starts."""
    logs = np.log([one.seconds for one in rows])

    def error(x: np.ndarray) -> np.ndarray:
        known = build(x)
        wrong: np.ndarray = np.r_[np.log([predict(one, known) for one in rows]) - logs, pull(x)]
        return wrong

    tries = (
        least_squares(
            error, np.clip(start, low, high), bounds=(low, high), x_scale=np.maximum(np.abs(start), 1e-12), loss="soft_l1",
            f_scale=0.1, max_nfev=80,
        )
        for start in starts
    )  # fmt: skip
    best: Any = min(tries, key=lambda result: result.cost)
    x: np.ndarray = best.x
    return x


def figure(rows: Sequence[Measured], predict: Predict, known: Efficiencies) -> Figure:
    """Return how many rows a figure is from, their median error under it, and their works."""
    wrong = statistics.median(abs(predict(one, known) / one.seconds - 1) for one in rows)
    return Figure(len(rows), round(wrong, 3), tuple(sorted({SOURCES[one.source] for one in rows})))


# -- products ----------------------------------------------------------------------------------------------------------


def fit_products(every: Iterable[Measured]) -> tuple[Efficiencies, dict[str, dict[str, Any]]]:
    """Fit the shape of products to the data-centre GPUs together, then the shares of each GPU."""
    dense = [one for one in every if one["kind"] == "dense" and one["pass"] == "fwd"]
    sweep = [one for one in dense if one.source == SWEEP]

    def form(one: Measured) -> str:
        return ops.FORMATS[one["dtype"]]

    free = []
    for card in CENTRE:
        rows = [one for one in sweep if one.gpu == card and form(one) == "bf16"]
        names = ("matmul", "throttle", "wave", "small_k", "product_memory")

        def build(x: np.ndarray, names: tuple[str, ...] = names) -> Efficiencies:
            return replaced(START, **dict(zip(names, map(float, x[:5]), strict=True)), launch=float(x[5]) * 1e-6)

        free.append(solved(rows, ops.product_seconds, build, [(0.75, 0.9, 0.2, 60, 0.8, 3), (0.7, 0.95, 0.3, 150, 0.7, 5)],
                           [0.05, 0.7, 0, 0, 0.3, 0], [1.2, 1.05, 1, 1000, 1.1, 20]))  # fmt: skip
    shape = np.median(free, axis=0)
    known = replaced(
        START,
        wave=round(float(shape[2]), 3),
        small_k=round(float(shape[3]), 1),
        product_memory=float(shape[4]),
        launch=float(shape[5]) * 1e-6,
    )
    print("products: wave, small_k, memory, launch [us]", shape[2:].round(2))
    for few, share, small_k, launch in FEW_BITS:
        found = []
        for card in CENTRE:
            rows = [one for one in sweep if one.gpu == card and form(one) == few]
            if rows:
                throttle = float(free[CENTRE.index(card)][1])

                def low(x: np.ndarray, throttle: float = throttle, names: Any = (share, small_k), launch: str = launch,
                        few: str = few, base: Efficiencies = known) -> Efficiencies:  # fmt: skip
                    copying = base.memory | {f"quantise-{few}": Both(float(x[3]), float(x[3]))}
                    fields = {names[0]: float(x[0]), names[1]: float(x[1]), launch: float(x[2]) * 1e-6}
                    return replaced(base, throttle=throttle, memory=copying, **fields)

                starts = [(0.6, 500, 8, 0.5), (0.7, 100, 5, 0.7)]
                found.append(solved(rows, ops.product_seconds, low, starts, [0.05, 0, 0, 0.05], [1.3, 8000, 60, 1.0]))
        x = np.median(found, axis=0)
        print(few, "small_k, launch [us], copying", x[1:].round(2))
        copied = round(float(x[3]), 3)
        memory = known.memory | {f"quantise-{few}": Both(copied, copied)}
        known = replaced(known, memory=memory, **{small_k: round(float(x[1]), 1), launch: float(f"{x[2] * 1e-6:.3g}")})
    own: dict[str, dict[str, Any]] = {}
    for card in sorted({one.gpu for one in dense}):
        fields: dict[str, Any] = {}
        rows = [one for one in dense if one.gpu == card and form(one) == "bf16" and one.source not in ops.OWN_POWER]
        rows = [one for one in rows if one.source == SWEEP] or rows
        if len(rows) < 8:
            continue

        def shares(x: np.ndarray, card: str = card) -> Efficiencies:
            long = SUSTAINED.get(card)
            # A product of more than 8 ms fills whole waves and is wide, so that its share is that of the form.
            throttle = min(1.0, long / float(x[0])) if long else 1.0
            return replaced(known, matmul=float(x[0]), throttle=throttle, launch=float(x[1]) * 1e-6)

        x = solved(rows, ops.product_seconds, shares, [(0.75, 2), (0.5, 5)], [0.05, 1], [1.2, 6])
        fields = {"matmul": round(float(x[0]), 3), "launch": float(f"{x[1] * 1e-6:.3g}")}
        fields["throttle"] = round(shares(x).throttle, 3) if card in SUSTAINED else None
        figures = {"matmul": figure(rows, ops.product_seconds, shares(x))}
        for few, share, _, _ in FEW_BITS:
            rows = [one for one in dense if one.gpu == card and form(one) == few and one.source not in ops.OWN_POWER]
            rows = [one for one in rows if one.source == SWEEP] or rows
            if len(rows) >= 8:
                base = shares(x)

                def only(y: np.ndarray, base: Efficiencies = base, share: str = share) -> Efficiencies:
                    return replaced(base, **{share: float(y[0])})

                y = solved(rows, ops.product_seconds, only, [(0.6,)], [0.05], [1.3])
                fields[share] = round(float(y[0]), 3)
                figures[share] = figure(rows, ops.product_seconds, only(y))
        own[card] = {**{name: value for name, value in fields.items() if value is not None}, "figures": figures}
    return known, own


def fit_gradients(every: Iterable[Measured], known: Efficiencies, own: dict[str, dict[str, Any]]) -> Efficiencies:
    """Fit what gradients of weights and grouped products lose against one product of the same machine."""
    rows = [one for one in every if one.source == "MooreThreads/SimuMax" and one["dtype"] in ("bf16", "fp16")]
    power = {}
    for card in {one.gpu for one in rows}:
        shares = {"matmul": own.get(card, own["a100-sxm4-80gb"])["matmul"]}
        mine = [one for one in rows if one.gpu == card and one["kind"] == "dense" and one["pass"] == "fwd"]
        base = replaced(known, **shares)

        def power_of(y: np.ndarray, base: Efficiencies = base) -> Efficiencies:
            return replaced(base, throttle=float(y[0]))

        x = solved(mine, ops.product_seconds, power_of, [(0.9,)], [0.5], [1.1])
        power[card] = replaced(base, throttle=float(x[0]))
        print("power of SimuMax's", card, round(float(x[0]), 3))

    def predict(one: Measured, found: Efficiencies) -> float:
        mine = power[one.gpu]
        return ops.product_seconds(one, replaced(found, matmul=mine.matmul, throttle=mine.throttle))

    dense = [one for one in rows if one["kind"] == "dense" and one["pass"] == "wgrad"]
    x = solved(dense, predict, lambda y: replaced(known, weight_gradient=float(y[0])), [(1.05,)], [0.9], [1.5])
    known = replaced(known, weight_gradient=round(float(x[0]), 3))
    grouped = [one for one in rows if one["kind"] == "grouped"]

    def launched(y: np.ndarray) -> Efficiencies:
        return replaced(known, grouped=float(y[0]), grouped_weight=float(y[1]), grouped_launch=float(y[2]) * 1e-6)

    y = solved(grouped, predict, launched, [(0.8, 0.6, 5)], [0.1, 0.1, 0], [1.0, 1.2, 100])
    print("wgrad", x, "grouped", y)
    return launched(y.round(3))


def fit_experts(known: Efficiencies, own: dict[str, dict[str, Any]]) -> tuple[Efficiencies, Figure]:
    """Fit what whole layers of experts take beside their products, which run as one product does, to all GPUs together."""
    rows = [one for one in ops.experts() if one.gpu in CENTRE and "min_latency" not in one["kernel"]]

    def predict(one: Measured, found: Efficiencies) -> float:
        names = ("matmul", "throttle", *(share for _, share, _, _ in FEW_BITS))
        return ops.expert_seconds(
            one, replaced(found, **{name: own[one.gpu][name] for name in names if name in own[one.gpu]})
        )

    def build(x: np.ndarray) -> Efficiencies:
        moved = Both(float(x[1]), float(x[1]))
        return replaced(
            known, grouped_memory=float(x[0]), memory=known.memory | {"permute-serving": moved}, expert_start=float(x[2]) * 1e-6,
            expert_copy=float(x[3]) * 1e-9,
        )  # fmt: skip

    x = solved(rows, predict, build, [(0.8, 0.5, 30, 0.2)], [0.3, 0.1, 0, 0], [1, 1, 100, 10])
    found = build(x.round(3))
    print("experts: memory of products, permuting, start [us], copy [ns]", x.round(3), figure(rows, predict, found))
    return found, figure(rows, predict, found)


# -- attention ---------------------------------------------------------------------------------------------------------


def fit_attention(known: Efficiencies, own: dict[str, dict[str, Any]]) -> Efficiencies:
    """Fit the shape of attention to all kernels together, and the shares of each kernel on each GPU."""
    rows = list(ops.attentions())
    pairs = sorted({(one.gpu, ops.attention_family(one.row)) for one in rows})
    count = len(pairs)
    hot = {card: replaced(known, throttle=1.0) for card, _ in pairs}
    for card in {one.gpu for one in rows if one.source in ops.OWN_POWER}:
        products = (one for one in ops.products() if one.source in ops.OWN_POWER and one.gpu == card)
        same = [one for one in products if one["dtype"] in ("bf16", "fp16") and one.source in ops.CALLS]
        hot[card] = ops.own_power(same, replaced(known, matmul=own.get(card, own["a100-sxm4-80gb"])["matmul"]))
        print("  power in attention", card, round(hot[card].throttle, 3))

    def build(x: np.ndarray) -> Efficiencies:
        """Shares of all GPUs under names of their own."""
        both = {f"{card} {kernel}": Both(float(x[i]), float(x[count + i])) for i, (card, kernel) in enumerate(pairs)}
        rest = [float(value) for value in x[2 * count :]]
        return replaced(
            known, attention=both, attention_keys=Both(*rest[:2]), narrow=Both(*rest[2:4]), wide=Both(*rest[4:6])
        )

    def predict(one: Measured, found: Efficiencies) -> float:
        kernel = f"{one.gpu} {ops.attention_family(one.row)}"
        return ops.attention_seconds(one, replaced(found, throttle=hot[one.gpu].throttle), kernel)

    start = [0.55] * count + [0.45] * count + [250, 250, 0.7, 0.9, 1.05, 1.05]
    x = solved(rows, predict, build, [start], [0.02] * 2 * count + [0, 0, 0.2, 0.2, 0.5, 0.5],
               [1.2] * 2 * count + [3000, 3000, 1.2, 1.2, 1.3, 1.3],
               lambda x: np.log(x[count : 2 * count] / (0.8 * x[:count])) * 0.3)  # fmt: skip
    found = build(x)
    print("attention", found.attention_keys, found.narrow, found.wide)
    for i, (card, kernel) in enumerate(pairs):
        mine = [one for one in rows if (one.gpu, ops.attention_family(one.row)) == (card, kernel)]
        ways = {one["direction"] for one in mine}
        back = bool(ways - {"fwd"})
        fields = own.setdefault(card, {"figures": {}})
        fields.setdefault("attention", {})[kernel] = [
            round(float(x[i]), 3),
            round(float(x[count + i]), 3) if back else None,
        ]
        fields["figures"][f"attention.{kernel}"] = figure(mine, predict, found)
        print("  ", card, kernel, fields["attention"][kernel], fields["figures"][f"attention.{kernel}"])
    return replaced(
        known,
        attention_keys=_rounded(found.attention_keys, 0),
        narrow=_rounded(found.narrow, 3),
        wide=_rounded(found.wide, 3),
    )


def _rounded(both: Both, digits: int) -> Both:
    return Both(round(both.forward, digits), round(both.backward, digits))


# -- memory and collectives --------------------------------------------------------------------------------------------


def fit_memory(known: Efficiencies) -> tuple[Efficiencies, dict[str, Figure]]:
    """Return the share of the bandwidth of each family of kernels, in each direction: medians over all GPUs."""
    rows = [
        one
        for one in ops.streams()
        if card_named(one.gpu).segment == "datacenter" and card_named(one.gpu).vendor == "nvidia"
    ]
    memory, figures = dict(known.memory), {}
    for name in MEMORY:
        ways: list[float] = []
        for way in ("forward", "backward"):
            mine = [one for one in rows if one.kind == f"{name}, {way}"]
            by_card: dict[str, list[float]] = {}
            for one in mine:
                share = (
                    one.number("bytes")
                    / card_named(one.gpu).memory_bandwidth
                    / (one.seconds - (one.number("kernels") or 1) * known.launch)
                )
                by_card.setdefault(one.gpu, []).append(share)
            ways.append(statistics.median(map(statistics.median, by_card.values())) if by_card else 0)
        if not any(ways):
            continue
        one_way = ways[0] or ways[1]
        memory[name] = Both(round(ways[0] or one_way, 3), round(ways[1] or one_way, 3))
        mine = [one for one in rows if one.kind.startswith(f"{name},")]
        figures[f"memory.{name}"] = figure(mine, ops.stream_seconds, replaced(known, memory=memory))
        print("  ", name, memory[name], figures[f"memory.{name}"])
    return replaced(known, memory=memory), figures


def fit_wires(known: Efficiencies, own: dict[str, dict[str, Any]]) -> Efficiencies:
    """Fit each collective inside a node, for each GPU; what all GPUs share are the medians over data-centre GPUs."""
    rows = [one for one in ops.collectives() if one.source == SWEEP]
    fitted: dict[str, list[Wire]] = {}
    for card in sorted({one.gpu for one in rows}):
        nvls = 0.0
        switched = [
            one
            for one in ops.collectives()
            if one.gpu == card and "NVLS" in one["algorithm"] and one.number("bytes") > 2e9
        ]
        if switched:
            best = max(switched, key=lambda one: one.number("bytes"))
            nvls = round(best.number("bytes") / best.seconds / card_named(card).link_bandwidth, 3)
        if nvls:
            own.setdefault(card, {"figures": {}})["nvls"] = nvls
            own[card]["figures"]["nvls"] = Figure(
                len(switched), 0.0, tuple(sorted({SOURCES[one.source] for one in switched}))
            )
        for way in ops.WAYS:
            mine = [one for one in rows if one.gpu == card and one["op"] == way]

            def build(x: np.ndarray, way: str = way, nvls: float = nvls) -> Efficiencies:
                return replaced(
                    known,
                    nvls=nvls,
                    wires={way: Wire(float(x[0]) * 1e-6, float(x[1]) * 1e-6, float(x[2]), float(x[3]) * 1e-3)},
                )

            x = solved(
                mine,
                ops.collective_seconds,
                build,
                [(5, 1, 0.7, 2), (8, 1, 0.8, 4)],
                [0.1, 0, 0.05, 0],
                [200, 50, 1.5, 100],
            )
            wire = build(x).wires[way]
            own.setdefault(card, {"figures": {}}).setdefault("wires", {})[way] = [
                float(f"{value:.3g}") for value in msgspec.structs.astuple(wire)
            ]
            own[card]["figures"][f"wires.{way}"] = figure(mine, ops.collective_seconds, build(x))
            if card in CENTRE:
                fitted.setdefault(way, []).append(wire)
            print("  ", card, way, own[card]["wires"][way], own[card]["figures"][f"wires.{way}"].spread)
    wires = {
        way: Wire(*(middle_of([getattr(one, name) for one in found]) for name in Wire.__struct_fields__))
        for way, found in fitted.items()
    }
    return replaced(known, wires=wires)


def fit_dispatch(known: Efficiencies, own: dict[str, dict[str, Any]]) -> tuple[Efficiencies, Figure]:
    """Fit the dispatch of DeepEP, and of HybridEP where a GPU has it, which Blackwell's recipes run: for each GPU the start, the
    share of the link and, where rows have several shapes, the time of each token and copy; the adapters' share for all together."""
    every = list(ops.dispatches())
    for card, library in sorted({(one.gpu, one["library"]) for one in every}):
        mine = [one for one in every if (one.gpu, one["library"]) == (card, library) and "nodes" not in one.kind]
        name = (
            library
            if card in {one.gpu for one in every if one["library"] != library} and library == "deepep"
            else "dispatch"
        )
        several = len({one["notes"] for one in mine}) > 20

        def build(x: np.ndarray) -> Efficiencies:
            each = [float(value) * 1e-9 for value in x[2:]] or [0.0, 0.0]
            return replaced(known, wires={"dispatch": Wire(float(x[0]) * 1e-6, each[0], float(x[1]), each[1])})

        count = 4 if several else 2
        x = solved(mine, ops.dispatch_seconds, build, [(40, 0.6, 10, 2)[:count]], [0, 0.05, 0, 0][:count],
                   [300, 1.0, 200, 50][:count])  # fmt: skip
        own[card]["wires"][name] = [_least(value) for value in msgspec.structs.astuple(build(x).wires["dispatch"])]
        own[card]["figures"][f"wires.{name}"] = figure(mine, ops.dispatch_seconds, build(x))
        print("  ", card, library, own[card]["wires"][name], own[card]["figures"][f"wires.{name}"].spread)
    rows = [one for one in every if "nodes" in one.kind]

    def predict(one: Measured, found: Efficiencies) -> float:
        return ops.dispatch_seconds(one, replaced(found, wires={"dispatch": Wire(*own[one.gpu]["wires"]["dispatch"])}))

    def reached(x: np.ndarray) -> Efficiencies:
        return replaced(known, dispatch_link=float(x[0]))

    x = solved(rows, predict, reached, [(0.8,)], [0.2], [1.0])
    found = reached(x.round(3))
    print("dispatch over nodes", x, figure(rows, predict, found))
    hopper = Wire(*own["h100-sxm5-80gb"]["wires"]["dispatch"])
    return replaced(found, wires=found.wires | {"dispatch": hopper}), figure(rows, predict, found)


def _least(value: float) -> float:
    """A figure to three digits, or 0 where it is less than any clock can tell."""
    return float(f"{value:.3g}") if value > 1e-10 else 0.0


def fit_network(known: Efficiencies, own: dict[str, dict[str, Any]]) -> tuple[Efficiencies, Figure]:
    """Fit what all-reduce loses between nodes: one network for all, as there is no table of each.

    Its start is that of the fastest of them: the others' is their network's own.
    """
    rows = list(ops.collectives(nodes=True))

    def predict(one: Measured, found: Efficiencies) -> float:
        mine = own[one.gpu]
        wires = {way: Wire(*wire) for way, wire in mine["wires"].items()}
        return ops.collective_seconds(one, replaced(found, wires=wires, nvls=mine.get("nvls", 0.0)))

    smallest = [
        min((one for one in rows if one.gpu == card), key=lambda one: one.seconds) for card in {one.gpu for one in rows}
    ]
    start = max(0.0, min(one.seconds - predict(one, known) for one in smallest if one.number("bytes") < 2**20))
    rows = [one for one in rows if one.number("bytes") >= 2**24]

    def build(x: np.ndarray) -> Efficiencies:
        return replaced(known, outer_link=float(x[0]), outer_start=start, outer_root=float(x[1]) * 1e-3)

    x = solved(rows, predict, build, [(0.8, 10), (0.9, 3)], [0.3, 0], [1.0, 60])
    found = build(x)
    print("network", start, x, figure(rows, predict, found))
    return found, figure(rows, predict, found)


# -- files ---------------------------------------------------------------------------------------------------


def lines(fields: dict[str, Any], name: str = "") -> list[str]:
    """Return a table as TOML: what is plain first, then tables."""
    plain = [f"{_key(key)} = {_value(value)}" for key, value in fields.items() if not isinstance(value, dict)]
    text = [*([f"[{name}]"] if name else []), *plain, ""]
    for key, value in fields.items():
        if isinstance(value, dict):
            text += lines(value, f"{name}.{_key(key)}" if name else _key(key))
    return text if plain or not name else text[2:]


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else f'"{name}"'


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Figure):
        return f"{{rows = {value.rows}, spread = {value.spread}, sources = {_value(list(value.sources))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, msgspec.Struct):
        return _value(list(msgspec.structs.astuple(value)))
    return repr(float(f"{value:.4g}")) if isinstance(value, float) else str(value)


def main() -> None:
    """Fit everything and write `data/calibration`."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    every = list(ops.products())
    known, own = fit_products(every)
    known = fit_gradients(every, known, own)
    known = fit_attention(known, own)
    known, figures = fit_memory(known)
    known, figures["grouped_memory"] = fit_experts(known, own)
    known = fit_wires(known, own)
    known, figures["outer_link"] = fit_network(known, own)
    known, figures["dispatch_link"] = fit_dispatch(known, own)
    own = {card: fields for card, fields in own.items() if "matmul" in fields or card == "a100-pcie-80gb"}
    found = chips(own, PER_WATT)
    completed(own, found)
    common = {
        name: getattr(known, name) for name in Efficiencies.__struct_fields__
        if name not in ("gpu", "matmul", "fp8_matmul", "fp8_block_matmul", "fp4_matmul", "throttle", "attention", "wires", "nvls",
                        "multiprocessors", "basis", "how", "date", "figures")
    }  # fmt: skip
    found["any"]["wires"] = known.wires
    head = "# Made by `make operators` from the measurements of single operations in data/operators.\n"
    (FOLDER / "common.toml").write_text(
        head + "\n".join(lines({**common, "date": date, "figures": figures, "chips": found})), encoding="utf-8"
    )
    for path in FOLDER.glob("*.toml"):
        if path.stem not in ("common", "software"):
            path.unlink()
    for card, fields in own.items():
        if "matmul" not in fields:
            continue
        measured = {name: value for name, value in fields.items() if name != "figures"}
        text = lines({"basis": "measured", "date": date, **measured, "figures": fields["figures"]})
        (FOLDER / f"{card}.toml").write_text(head + "\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
