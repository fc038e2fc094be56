"""The commands under a table of `loadgauge article` give its figures: they print them, or the formulas that do."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from article_claims import tables
from command_line import document, typed

GIB, GB, DAY, YEAR = 2**30, 1e9, 86_400, 365 * 86_400
GPT65, GPT7 = {"l": 80, "h": 8192, "a": 64, "s": 2048, "b": 1}, {"l": 32, "h": 4096, "a": 32, "s": 2048, "b": 1}
XXL = {"l": 48, "h": 4096, "a": 32, "s": 512}
MODELS: dict[str, dict[str, Any]] = {
    "13B": {"P": 13e9, "l": 40, "h": 5120, "a": 40, "s": 4096, "B": 1272, "b": 1},
    "65B": {"P": 65.2e9, "l": 80, "h": 8192, "a": 64, "s": 2048, "B": 2112, "b": 1},
    "175B": {"P": 175e9, "l": 96, "h": 12288, "a": 96, "s": 2048, "B": 1152, "b": 1},
}
CHOSEN = {"13B": {"t": 2, "p": 1, "d": 212}, "65B": {"t": 4, "p": 4, "d": 132}, "175B": {"t": 8, "p": 8, "d": 18}}
LARGER = {"13B": {"t": 1, "p": 1, "d": 424}, "65B": {"t": 2, "p": 4, "d": 264}, "175B": {"t": 4, "p": 8, "d": 36}}
Value = Callable[..., float]
Figures = dict[str, float]


@functools.cache
def expressions(command: str) -> tuple[str, ...]:
    """The formulas of `equation ...`, as text that Python reads."""
    found = [form["expression"] for form in document(command.removeprefix("loadgauge "))["equations"]]
    return tuple(re.sub(r"Sum\((.*?), \(k, 1, -1 \+ N\)\)", r"sum(\1 for k in range(1, N))", one) for one in found)


class Asked:
    """A table's commands: formulas with numbers for their letters, and which were asked."""

    def __init__(self, commands: list[str]) -> None:
        self.commands = commands
        self.asked: set[str] = set()

    def __call__(self, command: str, part: int = 0, **letters: float) -> float:
        """The value of a formula of `loadgauge equation COMMAND`, which must be under the table."""
        line = f"loadgauge equation {command}"
        assert line in self.commands
        self.asked.add(line)
        return float(eval(expressions(line)[part], {"sqrt": math.sqrt, **letters}))

    def printed(self, start: str) -> str:
        """What the command prints that begins so."""
        (line,) = (command for command in self.commands if command.startswith(f"loadgauge {start}"))
        self.asked.add(line)
        return typed(line.removeprefix("loadgauge ")).out


def numbers(text: str) -> list[str]:
    """The numbers of a text, without their commas."""
    return [one.replace(",", "") for one in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w]*\d)", text)]


def says(text: str, value: float, digits: int = 3) -> bool:
    """Whether a text has a number of so many digits or more that is this value, rounded as the number is."""
    return any(
        abs(float(one) - value) <= 0.5000001 * 10.0 ** -len(one.partition(".")[2])
        for one in numbers(text)
        if len(one.replace(".", "").lstrip("0")) >= digits
    )


# -- a table each: figures by formula, then those that are printed -------------------------------------------------------


def sizes(ask: Asked) -> Figures:
    """Article 1's models."""
    tied = "model-params --layer llama"
    big = {"l": 80, "h": 8192, "v": 50176, "a": 64, "k": 64, "d": 128, "f": 22016}
    small = {"l": 32, "h": 4096, "v": 50176, "a": 32, "k": 32, "d": 128, "f": 11008}
    short = ask("model-params", l=80, h=8192, n=0, v=50176) - 13 * 80 * 8192 - 2 * 8192
    for model, width in (("llama-65b", "22016"), ("llama-7b", "11008")):
        assert width in numbers(ask.printed(f"equation model-params --layer {model}"))
    return {
        "feed-forward width of LLaMA 65B": 22016, "feed-forward width of LLaMA 7B": 11008,
        # Its one table stands for embedding and head.
        "parameters of 65B, one table": (ask(tied, **big) - 8192 * 50176) / GB,
        "parameters of 7B, one table": (ask(tied, **small) - 4096 * 50176) / GB,
        "the same of 65B by the short form": short / GB,
        "parameters of the real LLaMA 65B": ask("model-params --layer llama-65b", **{**big, "v": 32000}) / GB,
        "parameters of the real LLaMA 7B": ask("model-params --layer llama-7b", **{**small, "v": 32000}) / GB,
    }  # fmt: skip


def states_1(ask: Asked) -> Figures:
    """16 bytes a parameter."""
    P65, P7 = (l * (4 * h * h + 3 * h * f) + 50176 * h for l, h, f in ((80, 8192, 22016), (32, 4096, 11008)))
    return {
        "FP32 training, Adam": ask("states --precision fp32"), "mixed precision, Adam": ask("states"),
        "of 65B": ask("states") * P65 / GIB, "of 7B": ask("states") * P7 / GIB,
    }  # fmt: skip


def activations_1(ask: Asked) -> Figures:
    """A layer's bytes, times the layers."""
    long = {**GPT65, "s": 8192}
    kept = functools.partial(ask, "activations")
    return {
        "GPT of the sizes of 65B, s = 2,048": 80 * kept(**GPT65) / GIB,
        "GPT of the sizes of 7B": 32 * kept(**GPT7) / GIB,
        "GPT of the sizes of 65B, s = 8,192": 80 * kept(**long) / GIB,
        "LLaMA 65B itself": 80 * ask("activations --layer llama-65b", **GPT65, f=22016) / GIB,
        "LLaMA 7B itself": 32 * ask("activations --layer llama-7b", **GPT7, f=11008) / GIB,
        "s = 8,192 over s = 2,048": kept(**long) / kept(**GPT65),
        "FP32 over 16 bits": ask("activations --precision fp32", **GPT65) / kept(**GPT65),
    }


def flops_1(ask: Asked) -> Figures:
    """A share of the layers run again."""
    return {f"gamma = {share:g}": ask("gamma", **GPT65, v=50176, gamma=share) / 1e12 for share in (0, 0.5, 1)}


def states_2(ask: Asked) -> Figures:
    """Bytes a parameter, times billions."""
    return {
        "weights of 10 B in 16 bits": 20, "states of 10 B, p = 2": 10 * ask("states"), "states of 1.5 B": 1.5 * ask("states"),
        "states of 10 B, p = 4": 10 * ask("states --precision fp32"),
    }  # fmt: skip


def activations_2(ask: Asked) -> Figures:
    """48 layers at each batch."""
    return {f"batch {b}$": 48 * ask("activations", b=b, **XXL) / GB for b in (1, 2, 4, 8, 16, 32, 64)}


def checkpointed(ask: Asked, every: int = 1) -> float:
    """The inputs that are kept, and the layers that run again together [GB]."""
    inputs = ask("activations --recompute full", b=8, **XXL)
    return (math.ceil(48 / every) * inputs + every * ask("activations", b=8, **XXL)) / GB


def memory_2(ask: Asked) -> Figures:
    """ZeRO stages, with and without checkpoints."""
    states = [10 * ask("states", zero, d=64) for zero in range(4)]
    whole = 48 * ask("activations", b=8, **XXL) / GB
    return {f"ZeRO {zero}": states[zero] + whole for zero in range(4)} | {
        f"ZeRO {zero}, checkpointing": states[zero] + checkpointed(ask) for zero in range(4)
    }


def checkpoints_2(ask: Asked) -> Figures:
    """One checkpoint a layer, or at every seventh."""
    return {"a checkpoint at each layer": checkpointed(ask), "a checkpoint at every seventh": checkpointed(ask, 7)}


def flops_3(ask: Asked) -> Figures:
    """FLOPs of a token over the parameters of a layer's matrices, and what runs again over the rest."""
    h = 12288
    one = {"b": 1, "s": 1e-9, "h": h}
    matrices = (ask("params", h=h) - 13 * h) * 1e-9
    run = functools.partial(ask, "training-flops")
    again = functools.partial(ask, "training-flops --recompute full")
    selective = {
        name: 100 * ask("recompute-flops --recompute selective", b=1, s=s, h=h) / run(b=1, s=s, h=h)
        for name, s, h in (("13B", 4096, 5120), ("65B", 2048, 8192), ("175B", 2048, 12288))
    }
    return {
        "training": run(**one) / matrices, "training, all run again": again(**one) / matrices,
        "inference": ask("forward-flops", **one) / matrices,
        "cost of running all again": 100 * (again(b=1, s=2048, h=h) / run(b=1, s=2048, h=h) - 1),
        **{f"cost of selective recomputation, {name}": cost for name, cost in selective.items()},
    }  # fmt: skip


def time_3(ask: Asked) -> Figures:
    """6 or 8 FLOPs a parameter and token."""
    peak = {"P": 175e9, "X": 312e12, "n": 1}
    jobs = {"175B": (175e9, 300e9, 23), "65B": (65.2e9, 1.4e12, 21), "13B": (13.0159e9, 1e12, 15)}
    counts = {name: round(ask("gpus", P=P, N=N, X=150e12, S=days * DAY)) for name, (P, N, days) in jobs.items()}
    return {
        "GPT-3 on one A100": ask("duration", N=300e9, **peak) / YEAR,
        "the same with the 3 M": ask("duration", N=3e6, **peak) / YEAR,
        "1 T parameters": ask("duration", 1, P=1e12, N=450e9, n=3072, X=156e12) / DAY,
        **{f"GPUs for {name}": count for name, count in counts.items()},
        "with 5 % for selective recomputation, 175B": 1.05 * counts["175B"],
        **{f"with 5 %, {name}": 1.05 * counts[name] for name in ("65B", "13B")},
    }  # fmt: skip


def memory_3(ask: Asked) -> Figures:
    """States by parameters of a GPU; activations of a layer, times l: l/p layers of p micro-batches."""
    states = "states --precision fp16-mixed-20"

    def rank(name: str, layout: dict[str, int], zero: int, kept: str) -> float:
        it = {**MODELS[name], **layout}
        return (it["P"] / (it["t"] * it["p"]) * ask(states, zero, **layout) + it["l"] * ask(kept, **it)) / GB

    saved = "activations --tp --sequence-parallel --recompute selective"
    both = ask("activations --tp", **MODELS["175B"], t=8) / ask(saved, **MODELS["175B"], t=8)
    cards = math.ceil(ask(states) * 175e9 / 80e9)
    return {
        "states of 175 B": ask(states) * 175, "cards of 80 GB": cards, "the same in whole nodes": 8 * math.ceil(cards / 8),
        **{f"{name}, as it is chosen": rank(name, CHOSEN[name], 1, saved) for name in MODELS},
        **{"{}, t = {t}, p = {p}".format(name, **LARGER[name]): rank(name, LARGER[name], 1, saved) for name in MODELS},
        **{f"{name}: none": rank(name, CHOSEN[name], 0, "activations --tp") for name in MODELS},
        "selective recomputation with sequence": both,
    }  # fmt: skip


def network_3(ask: Asked) -> Figures:
    """Bytes of a step over 5 % of its compute."""

    def need(name: str, kind: int, X: float) -> float:
        it = {**MODELS[name], **CHOSEN[name]}
        sizes = {**it, "m": it["B"] // it["d"]}
        seconds = ask("duration", P=it["P"], N=it["B"] * it["s"], n=it["t"] * it["p"] * it["d"], X=X)
        return ask("traffic", kind, **sizes) / (0.05 * seconds) / GB

    return {
        "all-reduce over 8": ask("collectives", 0, n=8), "all-gather, reduce": ask("collectives", 1, n=8),
        "broadcast": ask("collectives", 4),
        "Amdahl: 512 GPUs": ask("amdahl", n=512, f=0.0005), "Amdahl: efficiency": ask("amdahl", n=512, f=0.0005) / 512,
        "traffic of tensor": ask("wire --tp --sequence-parallel", b=1, s=2, h=3, t=8) / ask("wire --tp", b=1, s=2, h=3, t=8),
        **{f"tensor parallelism of {name} at 150": need(name, 0, 150e12) for name in MODELS},
        "rate at which": 150 * 300 / need("175B", 0, 150e12),
        **{f"tensor parallelism of {name} at 119.2": need(name, 0, 119.2e12) for name in MODELS},
        **{f"data parallelism of {name} at 150": 8 * need(name, 3, 150e12) for name in MODELS},
        "data parallelism of 13B over 175B": need("13B", 3, 1) / need("175B", 3, 1),
    }  # fmt: skip


NS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def naive_4(ask: Asked) -> Figures:
    """As many tokens as eight times the longest, and as many pairs as eight times its square."""
    mean, square = ({N: ask("longest", part, N=N, n=8) for N in NS} for part in (0, 3))
    linear = functools.partial(ask, "activations", b=1, h=6144)
    # A layer's bytes are linear in tokens (no heads) and in pairs.
    return {
        f"N = {N:,}": 8 * (mean[N] * linear(s=1, a=0) + square[N] * (linear(s=1, a=48) - linear(s=1, a=0))) / GIB
        for N in NS
    }


def flash_4(ask: Asked) -> Figures:
    """Only the kernel without padding."""
    return {
        f"N = {N:,}": ask("padded-flash", T_p=8 * ask("longest", N=N, n=8), T=4 * (N + 1), h=6144, a=48) / GIB
        for N in NS
    }


def free_4(ask: Asked) -> Figures:
    """No padding."""
    return {
        f"N = {N:,}": ask("activations --padding-free --attention flash", T=4 * (N + 1), h=6144, a=48) / GIB for N in NS
    }


def states_5(ask: Asked) -> Figures:
    """Of float32 weights, beside weights and gradients of 4 bytes."""
    beside = {
        "states of Adam": "states --precision fp32",
        "states of SGD with momentum": "states --precision fp32 --optimizer sgd-momentum",
        "states of SGD, times": "states --precision fp32 --optimizer sgd",
    }  # fmt: skip
    # Mixed precision: two bytes of 16, weights.
    return {name: (ask(command) - 8) / 4 for name, command in beside.items()} | {
        "weights of 7 B": 7 * ask("states") / 8
    }


def no_formula(ask: Asked) -> Figures:
    """Nothing: its commands print figures."""
    return {}


TABLES: dict[tuple[int, str], tuple[Callable[[Asked], Figures], tuple[tuple[str, tuple[str, ...]], ...]]] = {
    (1, "Sizes"): (sizes, ()),
    (1, "Weights of a layer"): (no_formula, (("estimate", ("attention.", "mlp.")),)),
    (1, "Model states"): (states_1, ()),
    (1, "Activations"): (activations_1, (("estimate", ("LLaMA 65B as transformers",)),)),
    (1, "FLOPs"): (flops_1, (("estimate", ("gamma = 0.5",)),)),
    (2, "Weights"): (states_2, ()),
    (2, "Activations"): (activations_2, (("estimate", ("batch 1,", "batch 64,")),)),
    (2, "Memory"): (memory_2, ()),
    (2, "Checkpointing"): (checkpoints_2, ()),
    (2, "Time"): (no_formula, (("estimate", ("a step,",)),)),
    (3, "FLOPs"): (flops_3, ()),
    (3, "Time"): (time_3, (("estimate", ("the same of a GPT of 1 T",)),)),
    (3, "Memory"): (memory_3, ()),
    (3, "Network"): (network_3, ()),
    (4, "All padded"): (naive_4, (("estimate", ("N = 8,192",)),)),
    (4, "FlashAttention"): (flash_4, (("estimate", ("N = 8,192",)),)),
    (4, "Padding-free"): (free_4, (("estimate", ("N = 8,192",)),)),
    (4, "Saving"): (no_formula, (("estimate", ()),)),
    (5, "Model states"): (states_5, ()),
}
"""Of each table with commands: its figures by formula ($: the whole name); of commands that print figures, the rows whose they
are."""
ANSWERED_ELSEWHERE = {
    "the cluster of 13B": "t p d", "the cluster of 65B": "t p d", "the cluster of 175B": "t p d",
    "ZeRO 3 over ZeRO 2 there": "the quotient of the two rows above",
    "padding-free against FlashAttention": "the quotient of two figures of the command (below)",
}  # fmt: skip


@pytest.mark.parametrize("place", TABLES, ids=lambda place: f"{place[0]}: {place[1]}")
def test_the_commands_under_a_table_give_its_figures(place: tuple[int, str]) -> None:
    number, title = place
    (table,) = (one for one in tables(number) if one["title"].startswith(title))
    ask = Asked(table["commands"])
    by_formula, prints = TABLES[place]
    figures = by_formula(ask)
    seen = set()
    for row in table["rows"]:
        names = [name for name in figures if f"{row['what']}$".startswith(name)]
        if names:
            assert row["right"] == pytest.approx(figures[max(names, key=len)], rel=1e-4, abs=1e-12), row["what"]
            seen.add(max(names, key=len))
        shown = [start for start, begins in prints if begins and row["what"].startswith(begins)]
        for start in shown:
            # A time of 8.30 s is printed as 8.3 s.
            assert says(ask.printed(start), row["right"], 2 if row["unit"] == "s" else 3), row["what"]
        assert names or shown or any(row["what"].startswith(name) for name in ANSWERED_ELSEWHERE), row["what"]
    assert seen == set(figures)
    for start, _ in prints:
        ask.printed(start)
    assert ask.asked == set(table["commands"]), "commands that give no figure of the table"


def test_every_table_with_commands_is_here() -> None:
    every = [(number, table) for number in range(1, 6) for table in tables(number)]
    traced = {"loadgauge saved --cases"}
    listed = [(number, table["title"]) for number, table in every if set(table["commands"]) - traced]
    assert len(listed) == len(TABLES)
    assert all(any(number == n and title.startswith(start) for n, start in TABLES) for number, title in listed)
    # What stands under no table is given by no command: an article's own tensors.
    assert [table["title"] for _, table in every if not table["commands"]] == ["Its tensors"]


def test_the_saving_of_article_4_is_that_of_the_command() -> None:
    """Of its two printed layers, to what their rounding allows."""
    (table,) = (one for one in tables(4) if one["title"] == "Saving")
    out = typed(table["commands"][0].removeprefix("loadgauge ")).out
    flash, free = (
        float(re.search(rf"{name}\s+[\d,]+\s+([\d.]+)", out)[1])  # type: ignore[index]
        for name in ("padded, flash", "padding-free")
    )
    assert table["rows"][0]["right"] == pytest.approx(100 * (1 - free / flash), abs=0.1)


def test_cases_of_article_5_are_those_of_the_command() -> None:
    pytest.importorskip("torch")
    out = typed("saved --cases").out
    pairs = dict(re.findall(r"(?m)^\s+(\d)\s+(\d/\d)\s", out))
    kept, most = (table for table in tables(5) if table["commands"] == ["loadgauge saved --cases"])
    for first, second in zip(kept["rows"], most["rows"], strict=True):
        case = first["what"].removeprefix("case ")[0]
        assert pairs[case] == f"{first['right']:.0f}/{second['right']:.0f}"
