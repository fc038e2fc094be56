"""Every row of `loadgauge article` beside plain arithmetic from the article's own words, and every verdict beside plain rounding.

Nothing here is the package's: what an article prints is typed from it, what is right is worked out from the sizes in its sentence.
"""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import pytest

from article_claims import tables
from command_line import typed

GIB, GB, DAY = 2**30, 1e9, 86_400


def width(h: int) -> int:
    """LLaMA's feed-forward width."""
    return 256 * ((8 * h // 3 + 255) // 256)


def llama(l: int, h: int, V: int, tables: int) -> int:
    """Parameters of a LLaMA with its norms: four matrices of attention and three of the MLP a layer."""
    return l * (4 * h * h + 3 * h * width(h) + 2 * h) + h + tables * V * h


def gpt_layer(b: int, s: int, h: int, a: int) -> int:
    """Bytes that a layer keeps: attention 11, MLP 19, norms 4; scores twice in 16 bits, and a mask."""
    return b * s * h * (11 + 19 + 4) + 5 * a * b * s * s


def llama_layer(s: int, h: int, a: int) -> int:
    """The same without dropout and GELU, but with a gate."""
    return s * (16 * h + 2 * a * s + 8 * width(h))


def training_flops(l: int, h: int, V: int, s: int, again: float = 0) -> float:
    """FLOPs of one sequence: (3 + gamma) forwards of the layers, three of the logits."""
    return (3 + again) * l * (24 * s * h * h + 4 * s * s * h) + 6 * s * h * V


# -- article 1 -----------------------------------------------------------------------------------------------------------

H65, H7 = 8192, 4096
ROWS: dict[tuple[int, str], tuple[str, float]] = {
    (1, "feed-forward width of LLaMA 65B"): ("22016", width(H65)),
    (1, "feed-forward width of LLaMA 7B"): ("11008", width(H7)),
    (1, "parameters of 65B, one table"): ("65.17", llama(80, H65, 50176, 1) / GB),
    (1, "parameters of 7B, one table"): ("6.68", llama(32, H7, 50176, 1) / GB),
    (1, "the same of 65B by the short form"): ("", (12 * 80 * H65**2 + 50176 * H65) / GB),
    (1, "parameters of the real LLaMA 65B"): ("65.2", llama(80, H65, 32000, 2) / GB),
    (1, "parameters of the real LLaMA 7B"): ("6.7", llama(32, H7, 32000, 2) / GB),
    **{(1, f"attention.{name}"): ("", H65 * H65) for name in ("query", "key", "value", "output")},
    **{(1, f"mlp.{name}"): ("", H65 * 22016) for name in ("gate", "up", "down")},
    (1, "FP32 training, Adam"): ("16", 4 + 4 + 2 * 4),
    (1, "mixed precision, Adam"): ("16", 2 + 2 + 3 * 4),
    (1, "of 65B"): ("971", 16 * llama(80, H65, 50176, 1) / GIB),
    (1, "of 7B"): ("99.5", 16 * llama(32, H7, 50176, 1) / GIB),
    (1, "GPT of the sizes of 65B, s = 2,048"): ("142.5", 80 * gpt_layer(1, 2048, H65, 64) / GIB),
    (1, "GPT of the sizes of 7B"): ("28.5", 32 * gpt_layer(1, 2048, H7, 32) / GIB),
    (1, "GPT of the sizes of 65B, s = 8,192"): ("1770", 80 * gpt_layer(1, 8192, H65, 64) / GIB),
    (1, "LLaMA 65B itself"): ("142.5", 80 * llama_layer(2048, H65, 64) / GIB),
    (1, "LLaMA 7B itself"): ("28.5", 32 * llama_layer(2048, H7, 32) / GIB),
    # Its norms keep a float32 copy and a 16-bit one of their input, its softmax a float32 and a 16-bit result.
    (1, "LLaMA 65B as transformers runs it"): (
        "", (80 * 2048 * (24 * H65 + 6 * 64 * 2048 + 8 * 22016 + 8) + 16384 + 2 * 2 * 2048 * 128) / GIB,
    ),
    (1, "s = 8,192 over s = 2,048"): ("12", gpt_layer(1, 8192, H65, 64) / gpt_layer(1, 2048, H65, 64)),
    (1, "FP32 over 16 bits"): (
        "2", (2048 * H65 * (2 * 32 + 2) + (4 + 4 + 1) * 64 * 2048**2) / gpt_layer(1, 2048, H65, 64),
    ),
    **{(1, f"gamma = {share:g}"): ("", training_flops(80, H65, 50176, 2048, share) / 1e12) for share in (0, 0.5, 1)},
}  # fmt: skip

# -- article 2 -----------------------------------------------------------------------------------------------------------

L, S, H, A = 48, 512, 4096, 32
KEPT = {b: L * 2 * S * b * H * (16 + 2 / 2 + 2 * A * S / H + A * S / (2 * H)) for b in (1, 2, 4, 8, 16, 32, 64)}
"""Its own formula at p = 2 [bytes]."""
FULL = L * 2 * S * 8 * H + KEPT[8] / L
"""The inputs of all layers, and one layer whole [bytes]."""
STATES = {0: 2 + 2 + 12, 1: 2 + 2 + 12 / 64, 2: 2 + (2 + 12) / 64, 3: (2 + 2 + 12) / 64}
"""Bytes a parameter on each of 64 GPUs."""
CODE = {0: ("203.5", "166.6"), 1: ("85.4", "48.5"), 2: ("65.7", "28.8"), 3: ("46.0", "9.1")}


def with_embedding(b: int) -> float:
    """And the mask of the embedding's dropout, ids and positions, four bytes twice a norm [GiB]."""
    return (KEPT[b] + L * 16 * b * S + b * S * (H + 8) + 8 * S) / GIB


ROWS |= {
    (2, "weights of 10 B in 16 bits"): ("20", 10 * 2),
    (2, "states of 10 B, p = 2"): ("160", 10 * (2 + 2 + 12)),
    (2, "states of 1.5 B"): ("24", 1.5 * (2 + 2 + 12)),
    (2, "states of 10 B, p = 4"): ("200", 10 * (4 + 4 + 8)),
    **{(2, f"batch {b}"): (printed, KEPT[b] / GB) for b, printed in
       zip(KEPT, ("5.44", "10.87", "21.74", "43.49", "86.97", "173.95", "347.89"), strict=True)},
    **{(2, f"batch {b}, with the embedding's mask"): ("", with_embedding(b)) for b in (1, 64)},
    **{(2, f"ZeRO {zero}"): (CODE[zero][0], 10 * STATES[zero] + KEPT[8] / GB) for zero in range(4)},
    **{(2, f"ZeRO {zero}, checkpointing"): (CODE[zero][1], 10 * STATES[zero] + FULL / GB) for zero in range(4)},
    (2, "a checkpoint at each layer"): ("6.59", FULL / GB),
    (2, "a checkpoint at every seventh layer"): ("", (7 * 2 * S * 8 * H + 7 * KEPT[8] / L) / GB),
}  # fmt: skip

# -- article 3 -----------------------------------------------------------------------------------------------------------

MODELS = {"13B": (13e9, 40, 5120, 40, 4096, 1272), "65B": (65.2e9, 80, 8192, 64, 2048, 2112),
          "175B": (175e9, 96, 12288, 96, 2048, 1152)}  # fmt: skip
"""Parameters, layers, width, heads, sequence length, global batch."""
CHOSEN = {"13B": (2, 1, 212), "65B": (4, 4, 132), "175B": (8, 8, 18)}
LARGER = {"13B": (1, 1, 424), "65B": (2, 4, 264), "175B": (4, 8, 36)}
"""Layouts t, p, d of the same clusters that need more memory."""


def saving(name: str, t: int, p: int, d: int) -> float:
    """ZeRO 1 of 20 bytes, 16 of them sharded; and of p micro-batches in flight l/p layers, 34 b s h / t each [GB]."""
    P, l, h, _, s, _ = MODELS[name]
    return (P / (t * p) * (4 + 16 / d) + l * 34 * s * h / t) / GB


def plain(name: str) -> float:
    """20 bytes, and all that tensor parallelism alone leaves of layers [GB]."""
    (P, l, h, a, s, _), (t, p, _) = MODELS[name], CHOSEN[name]
    return (P / (t * p) * 20 + l * s * h * (10 + 24 / t + 5 * a * s / (h * t))) / GB


def seconds(name: str, X: float) -> float:
    """A step at 6 FLOPs a parameter and token."""
    (P, _, _, _, s, B), (t, p, d) = MODELS[name], CHOSEN[name]
    return 6 * P * B * s / (t * p * d * X)


def tensor(name: str, X: float) -> float:
    """Four all-reduces of 2 b s h bytes a layer and micro-batch within 5 % of a step [GB/s]."""
    (_, l, h, _, s, B), (t, p, d) = MODELS[name], CHOSEN[name]
    return 4 * 2 * (t - 1) / t * 2 * s * h * (l / p) * (B / d) / (0.05 * seconds(name, X)) / GB


def data(name: str, X: float) -> float:
    """One all-reduce of 16-bit gradients within 5 % of a step [Gbit/s]."""
    P, (t, p, d) = MODELS[name][0], CHOSEN[name]
    return 8 * 2 * (d - 1) / d * 2 * P / (t * p) / (0.05 * seconds(name, X)) / GB


def selective(h: int, s: int) -> float:
    """Scores and context once more, over the three passes of a layer [%]."""
    return 100 * 4 * s * s * h / (3 * (24 * s * h * h + 4 * s * s * h))


ACHIEVED, SLOWER = 150e12, 119.2e12
AMDAHL = 1 / (0.0005 + 0.9995 / 512)
ROWS |= {
    (3, "training"): ("6", 72 / 12),
    (3, "training, all run again"): ("8", 96 / 12),
    (3, "inference"): ("6", 24 / 12),
    # A forward over forward and backward, three forwards.
    (3, "cost of running all again"): ("33", 100 / 3),
    (3, "cost of selective recomputation, 13B"): ("5", selective(5120, 4096)),
    (3, "cost of selective recomputation, 65B"): ("5", selective(8192, 2048)),
    (3, "cost of selective recomputation, 175B"): ("5", selective(12288, 2048)),
    (3, "GPT-3 on one A100"): ("32", 6 * 175e9 * 300e9 / 312e12 / (365 * DAY)),
    (3, "the same with the 3 M tokens"): ("32", 6 * 175e9 * 3e6 / 312e12 / (365 * DAY)),
    (3, "1 T parameters, 450 B tokens, 3072 A100 at 50 %"): ("", 8 * 1e12 * 450e9 / (3072 * 0.5 * 312e12) / DAY),
    (3, "the same of a GPT of 1 T"): (
        "", training_flops(128, 25600, 51200, 2048, 1) / 2048 * 450e9 / (3072 * 0.5 * 312e12) / DAY,
    ),
    (3, "GPUs for 175B"): ("1057", round(6 * 175e9 * 300e9 / (150e12 * 23 * DAY))),
    (3, "GPUs for 65B"): ("2012", round(6 * 65.2e9 * 1.4e12 / (150e12 * 21 * DAY))),
    (3, "GPUs for 13B"): ("402", round(6 * 13.0159e9 * 1e12 / (150e12 * 15 * DAY))),
    (3, "with 5 % for selective recomputation, 175B"): ("1110", 1057 * 1.05),
    (3, "with 5 %, 65B"): ("2113", 2012 * 1.05),
    (3, "with 5 %, 13B"): ("422", 402 * 1.05),
    (3, "the cluster of 13B"): ("424", 2 * 1 * 212),
    (3, "the cluster of 65B"): ("2112", 4 * 4 * 132),
    (3, "the cluster of 175B"): ("1152", 8 * 8 * 18),
    (3, "states of 175 B at 20 bytes"): ("3500", 175 * 20),
    (3, "cards of 80 GB"): ("44", math.ceil(3500 / 80)),
    (3, "the same in whole nodes of 8"): ("", math.ceil(3500 / 80 / 8) * 8),
    **{(3, f"{name}, as it is chosen"): ("30 to 80", saving(name, *CHOSEN[name])) for name in MODELS},
    **{(3, "{}, t = {}, p = {}".format(name, *LARGER[name])): ("30 to 80", saving(name, *LARGER[name])) for name in MODELS},
    **{(3, f"{name}: none of them"): ("", plain(name)) for name in MODELS},
    (3, "selective recomputation with sequence parallelism keeps 5 times less"): (
        "5", (10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8)) / (34 / 8),
    ),
    (3, "all-reduce over 8"): ("1.75", 2 * 7 / 8),
    (3, "all-gather, reduce-scatter and all-to-all"): ("0.875", 7 / 8),
    (3, "broadcast"): ("1", 1),
    (3, "Amdahl: 512 GPUs"): ("407.8", AMDAHL),
    (3, "Amdahl: efficiency"): ("0.796", AMDAHL / 512),
    # Four all-reduces are four gathers and four reduce-scatters; two gathers more in backward.
    (3, "traffic of tensor parallelism, with sequence parallelism"): ("1", (4 + 4 + 2) / (4 * 2)),
    **{(3, f"tensor parallelism of {name} at 150"): ("", tensor(name, ACHIEVED)) for name in MODELS},
    (3, "rate at which that of 175B is 300 GB/s"): ("", 300 / tensor("175B", ACHIEVED) * 150),
    **{(3, f"tensor parallelism of {name} at 119.2"): ("100 to 300", tensor(name, SLOWER)) for name in MODELS},
    **{(3, f"data parallelism of {name} at 150"): ("100 to 400", data(name, ACHIEVED)) for name in MODELS},
    (3, "data parallelism of 13B over 175B"): ("4", data("13B", 1) / data("175B", 1)),
}  # fmt: skip

# -- article 4 -----------------------------------------------------------------------------------------------------------

WIDE, HEADS, BATCH = 6144, 48, 8
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
NAIVE = ("1.085", "2.919", "8.837", "29.674", "107.347", "406.693", "1581.386")
FLASH = ("0.721", "1.441", "2.882", "5.763", "11.524", "23.048", "46.096")
FREE = ("0.411", "0.821", "1.642", "3.283", "6.566", "13.132", "26.263")


def longest(N: int, power: int = 1) -> float:
    """The expected longest of eight lengths from U{1..N}, or its square, from P(longest <= k) = (k/N)^8."""
    below = [Fraction(k, N) ** BATCH for k in range(N + 1)] if N <= 1024 else [(k / N) ** BATCH for k in range(N + 1)]
    return float(sum(k**power * (below[k] - below[k - 1]) for k in range(1, N + 1)))


def ragged(N: int) -> tuple[float, float, float]:
    """Padded with scores; padded but for the kernel and its copies of queries, keys and values; without padding [GiB]."""
    padded, tokens = BATCH * longest(N), BATCH * (N + 1) / 2
    free = tokens * (34 * WIDE + 4 * HEADS)
    return (
        (34 * WIDE * padded + 5 * HEADS * BATCH * longest(N, 2)) / GIB,
        # Of the 34, queries, keys and values (6) leave the padding; kernel's output (2) is kept beside what is padded again.
        (28 * WIDE * padded + (6 + 2) * WIDE * tokens + 4 * HEADS * tokens) / GIB,
        free / GIB,
    )


RAGGED = {N: ragged(N) for N in SIZES}
TITLES = ("All padded", "FlashAttention inside", "Padding-free throughout")
ROWS |= {
    (4, f"{title}: N = {N:,}"): (printed[place], RAGGED[N][way])
    for way, (title, printed) in enumerate(zip(TITLES, (NAIVE, FLASH, FREE), strict=True))
    for place, N in enumerate(SIZES)
}
ROWS[4, "padding-free against FlashAttention"] = ("43", 100 * (1 - RAGGED[8192][2] / RAGGED[8192][1]))

# -- article 5 -----------------------------------------------------------------------------------------------------------

SLIP = (2**30 - 10**9) / 2**30
"""What its script leaves of a tensor of 2^30 bytes."""
CASES = {"1": ("0.0687", "2.0687"), "2": ("2.0687", "2.0687"), "3": ("1.0687", "2.0687"), "4": ("0.0687", "2.0687"),
         "5": ("2.0687", "3.0687"), "6": ("0.0687", "0.0687"), "7": ("4.0687", "4.0687")}  # fmt: skip
ROWS |= {
    (5, "weights of 7 B in FP16"): ("14", 7 * 2),
    (5, "states of Adam"): ("2", (4 + 4) / 4),
    (5, "states of SGD, times"): ("1", 0),
    (5, "states of SGD with momentum"): ("", 4 / 4),
    (5, 'elements ("500 M")'): ("500", 512 * 1024 * 1024 / 1e6),
    **{(5, f"{title}: case {case}"): (printed[place], round(float(printed[place]) - SLIP, 3))
       for place, title in enumerate(("Kept", "The most")) for case, printed in CASES.items()},
}  # fmt: skip

BOUNDS = {"s = 8,192 over", "cost of selective", "data parallelism of 13B over"}
"""Rows whose printed value is the most."""
EXACT = ('"doubles"', '"unchanged"')
"""Words that leave nothing to rounding."""
TIMES = re.compile(r"(a step, ZeRO|ZeRO 3 over ZeRO 2 there)")
"""Rows that whole predictions give, with no arithmetic of a line: their quotients are looked at below."""
TOLERANCE = 1e-4
"""What norms and the like are of a model."""


def name(number: int, title: str, what: str) -> tuple[int, str]:
    """The longest name above that a row begins with; where tables have rows of one name, their titles stand before it."""
    if what.startswith(("N = ", "case ")):
        what = next(f"{short}: {what}" for short in (*TITLES, "Kept", "The most") if title.startswith(short))
    fitting = [one for one in ROWS if one[0] == number and what.startswith(one[1])]
    return max(fitting, key=lambda one: len(one[1]), default=(number, f"not worked out: {what}"))


@functools.cache
def rows() -> dict[tuple[int, str], dict[str, Any]]:
    """Every row of the five articles by its name above."""
    every = [(number, table, row) for number in range(1, 6) for table in tables(number) for row in table["rows"]]
    named = [
        (name(number, table["title"], row["what"]), row) for number, table, row in every if not TIMES.match(row["what"])
    ]
    assert len(dict(named)) == len(named)
    return dict(named)


def as_printed(row: dict[str, Any], printed: str, value: float) -> bool:
    """Whether a value is as it is printed, by rounding with a pencil."""
    if " to " in printed:
        low, high = (float(end) for end in printed.split(" to "))
        # "30 to 80" are round numbers: 2 %.
        about = 0.02 if printed == "30 to 80" else 0.0
        return low * (1 - about) <= value <= high * (1 + about)
    if any(row["what"].startswith(start) for start in BOUNDS):
        return value <= float(printed)
    digits = len(printed.partition(".")[2])
    if any(word in row["what"] for word in EXACT):
        return value == float(printed)
    if printed in ("99.5", "65.2"):
        return math.floor(value * 10**digits) == round(float(printed) * 10**digits)
    return abs(value - float(printed)) <= 0.5 * 10**-digits


def test_every_row_is_worked_out_here() -> None:
    assert rows().keys() == ROWS.keys()


@pytest.mark.parametrize("place", ROWS, ids=lambda place: f"{place[0]}: {place[1]}")
def test_a_row_is_what_its_sentence_gives(place: tuple[int, str]) -> None:
    row, (printed, value) = rows()[place], ROWS[place]
    if row["right"] is None:
        assert find_spec("torch") is None
        pytest.skip("traced by PyTorch")
    assert row["right"] == pytest.approx(value, rel=TOLERANCE, abs=1e-12)
    assert row["printed"] == (printed or None)
    if printed:
        assert row["agrees"] == as_printed(row, printed, value)
        assert bool(row["wrong"]) != row["agrees"], "a reason for what is wrong, and for nothing else"
    else:
        assert row["agrees"] is None


def test_whether_zero_3_is_slower_depends_on_the_network() -> None:
    """Each quotient is that of the two steps above it, and the verdict follows from it: slower on slow adapters alone."""
    (table,) = (table for table in tables(2) if table["title"].startswith("Time by ZeRO"))
    times = [row["right"] for row in table["rows"]]
    agree = [row["agrees"] for row in table["rows"]]
    for start in (0, 3, 6):
        second, third, quotient = times[start : start + 3]
        assert quotient == pytest.approx(third / second)
        assert agree[start + 2] == (third > second)
    assert [agree[place] for place in (2, 5, 8)] == [True, False, False]
    # A step waits for 3/2 of the traffic at 10 Gbit/s: 2 x 21.4 GB of gradients and weights, three times 21.4 GB with ZeRO 3.
    sent = {2: 2 * 2 * 10.713e9 * 63 / 64, 3: 3 * 2 * 10.713e9 * 63 / 64}
    assert 1 < times[2] < sent[3] / sent[2]


def test_the_figures_in_the_reasons() -> None:
    """Reasons and notes have numbers too."""
    told = " ".join(" ".join(typed(f"article {number}").out for number in range(1, 6)).split())
    short = 1 - ROWS[1, "the same of 65B by the short form"][1] / ROWS[1, "parameters of 65B, one table"][1]
    hours = 6 * 175e9 * 3e6 / 312e12 / 3600
    reduced = {name: 2 * MODELS[name][0] / math.prod(CHOSEN[name][:2]) / GB for name in MODELS}
    batches = {name: MODELS[name][5] // CHOSEN[name][2] for name in MODELS}
    rate = 300 / tensor("175B", ACHIEVED) * 150
    for words in (
        f"{100 * short:.1f} % low", f"{3 * width(H65) / H65:.4f} h^2", "1770 / 142.5, is more than 12", f"{hours:.1f} hours",
        f"{reduced['13B']:.0f} GB of gradients after {batches['13B']} micro-batches, 175B {reduced['175B']:.1f} GB after"
        f" {batches['175B']}",
        "44 is no number of whole nodes", "44 cards hold the states", f"({rate / 300:.0%} of 300".replace("%", " %"),
        *(("the 0.0687 is a slip of units", f"{SLIP:.4f} stays") if find_spec("torch") else ()),
        "needs 4 + 4 + 8 = 16 bytes a parameter, not 20",
    ):  # fmt: skip
        assert words in told, words
    assert 1770 / 142.5 > 12
    assert 44 % 8 != 0
    # Three of the bounds that a rate could meet: tensor parallelism does, data parallelism at none.
    assert tensor("175B", 1) / tensor("13B", 1) < 300 / 100 < 400 / 100 < data("13B", 1) / data("175B", 1)
