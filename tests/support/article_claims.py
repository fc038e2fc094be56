"""What the five articles say, claim by claim, in plain arithmetic: formulas and figures, by which commands' answers are judged.

Claims whose values are rows of `loadgauge article` are in tests/evidence/articles/test_recomputed.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from command_line import document

GIB = 2**30


@functools.cache
def tables(number: int) -> list[dict[str, Any]]:
    """The tables of `loadgauge article NUMBER --json`."""
    found: list[dict[str, Any]] = document(f"article {number}")["tables"]
    return found


LETTERS: dict[str, float] = {
    "b": 3, "s": 101, "h": 448, "a": 7, "l": 5, "v": 1009, "t": 8, "p": 4, "m": 24, "d": 6, "k": 2, "f": 1216, "n": 12, "N": 31,
    "T": 211, "T_p": 303, "gamma": 0.3, "X": 1e14, "r": 0.05, "B": 96, "A": 34.0, "A_in": 2.0, "P": 7e9, "M": 50,
}  # fmt: skip
"""Numbers for the letters of formulas; those of a letter that an article has too are its own."""


class Form(NamedTuple):
    """A formula that a claim states. part: which of the command's, or a name of its parts; right: the article's own"""

    claim: str
    command: str
    right: Callable[..., float]
    part: int | str = 0

    @property
    def value(self) -> float:
        """The article's formula with the numbers of `LETTERS`."""
        return self.right(**{name: LETTERS[name] for name in self.right.__code__.co_varnames})


def _form(claim: str, quantity: str, right: Callable[..., float], part: int | str = 0) -> Form:
    return Form(claim, f"equation {quantity}", right, part)


def _longest(N: int, n: float, power: int) -> float:
    """Expected power of the longest of n lengths from U{1..N}."""
    return sum(k**power * ((k / N) ** n - ((k - 1) / N) ** n) for k in range(1, N + 1))


FORMS = (
    # A product is 2 m k n: queries, keys and values, scores, context, output, and the two of the MLP.
    _form("1.1", "forward-flops", lambda b, s, h: b * (3 * 2 * s * h * h + 2 * s * h * s + 2 * s * s * h + 2 * s * h * h
                                                       + 2 * 2 * s * h * 4 * h)),
    _form("1.2", "forward-flops", lambda b, s, h: (6 + 2) * b * s * h**2 + (2 + 2) * b * s**2 * h + 2 * 8 * b * s * h**2),
    _form("1.3", "forward-flops", lambda b, s, h: 24 * b * s * h**2 + 4 * b * s**2 * h),
    _form("1.3", "backward-flops", lambda b, s, h: 2 * (24 * b * s * h**2 + 4 * b * s**2 * h)),
    _form("1.4", "training-flops", lambda b, s, h: 72 * b * s * h**2 * (1 + s / (6 * h))),
    _form("1.4", "training-flops --recompute full", lambda b, s, h: 96 * b * s * h**2 * (1 + s / (6 * h))),
    _form("1.5", "model-flops", lambda b, s, h, l, v: l * 72 * b * s * h**2 * (1 + s / (6 * h)) + 6 * b * s * h * v),
    _form("1.6", "gamma", lambda b, s, h, l, v, gamma: (3 + gamma) * 24 * l * b * s * h**2 * (1 + s / (6 * h)) + 6 * b * s * h * v),
    _form("1.14", "states", lambda d: 4 + 12 / d, 1),
    _form("1.14", "states --precision fp32", lambda d: 8 + 8 / d, 1),
    _form("1.15", "activations", lambda a, b, s, h: 11 * b * s * h + 5 * a * b * s**2, "attention"),
    _form("1.15", "activations", lambda b, s, h: 19 * b * s * h, "MLP"),
    _form("1.15", "activations", lambda b, s, h: 4 * b * s * h, "norms"),
    _form("1.16", "mask", lambda a, b, s, h: 34 * b * s * h + 6 * a * b * s**2),
    _form("1.21", "activations", lambda a, b, s, h: b * (s * 34 * h + s**2 * 5 * a)),
    _form("2.5", "states", lambda d: 2 * 2 + 12 / d, 1),
    _form("2.5", "states", lambda d: 2 + (2 + 12) / d, 2),
    _form("2.5", "states", lambda d: (2 * 2 + 12) / d, 3),
    # 9 p s b h + s b h, 5 p s b h + s b h + 2 p a s^2 b + a s^2 b, 2 p s b h, at p = 4 and 2.
    _form("2.7", "activations --precision fp32",
          lambda a, b, s, h: 16 * 4 * s * b * h + 2 * s * b * h + (2 * 4 + 1) * a * s**2 * b),
    _form("2.7", "activations", lambda a, b, s, h: 16 * 2 * s * b * h + 2 * s * b * h + (2 * 2 + 1) * a * s**2 * b),
    _form("2.12", "checkpoints", lambda l, A, A_in: math.sqrt(l * A / A_in)),
    _form("3.1", "duration", lambda P, N, X, n: 6 * P * N / (X * n)),
    _form("3.1", "duration", lambda P, N, X, n: 8 * P * N / (X * n), 1),
    _form("3.8", "params", lambda h: (3 * h * h + 3 * h + h * h + h) + (4 * h * h + 4 * h + 4 * h * h + h) + 4 * h),
    _form("3.11", "model-flops", lambda b, s, h, l, v: 72 * b * l * s * h**2 * (1 + s / (6 * h) + v / (12 * l * h))),
    _form("3.11", "model-flops --recompute full",
          lambda b, s, h, l, v: 96 * b * l * s * h**2 * (1 + s / (6 * h) + v / (16 * l * h))),
    _form("3.14", "bubble", lambda p, m: (p - 1) / m),
    _form("3.15", "wire --tp", lambda b, s, h, t: 4 * 2 * (t - 1) / t * 2 * b * s * h),
    _form("3.16", "traffic", lambda b, s, h, m: 2 * 2 * b * s * h * m, 1),
    _form("3.17", "traffic", lambda P, d, t, p: 2 * (d - 1) / d * 2 * P / (t * p), 3),
    *(_form("3.19", "collectives", right, part) for part, right in enumerate((
        lambda n: 2 * (n - 1) / n, lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda: 1))),
    _form("3.21", "states --precision fp16-mixed-20", lambda d: 2 + 2 + 4 + 4 + 4 + 4),
    _form("3.21", "states --precision fp16-mixed-20", lambda d: 4 + 16 / d, 1),
    _form("3.21", "states --precision fp16-mixed-20", lambda d: 2 + 18 / d, 2),
    _form("3.21", "states --precision fp16-mixed-20", lambda d: 20 / d, 3),
    # Of t ranks together: 10 b s h t + 24 b s h + 5 a b s^2.
    _form("3.24", "activations --tp", lambda a, b, s, h, t: (10 * b * s * h * t + 24 * b * s * h + 5 * a * b * s * s) / t),
    _form("3.24", "activations --tp --sequence-parallel", lambda a, b, s, h, t: b * s * h / t * (34 + 5 * a * s / h)),
    _form("3.24", "activations --tp --recompute selective", lambda b, s, h, t: b * s * h * (10 + 24 / t)),
    _form("3.24", "activations --tp --sequence-parallel --recompute selective", lambda b, s, h, t: 34 * b * s * h / t),
    _form("3.24", "activations --recompute full", lambda b, s, h: 2 * b * s * h),
    # 2 (d - 1)/d of 2 P bytes, in a share r of 6 P B s / (d X) seconds.
    _form("3.38", "bandwidth", lambda d, X, B, r, s: 2 * (d - 1) / d * 2 / (r * 6 * B * s / (d * X)), 2),
    _form("4.1", "activations", lambda a, b, s, h: (2 + 6 + 2 + 1 + 2 + 18 + 1 + 2) * b * s * h + (2 + 1 + 2) * a * b * s**2),
    # Of 34 h a token, queries, keys and values are copied without padding, beside 2 h and 4 a that the kernel makes.
    _form("4.2", "padded-flash", lambda h, a, T, T_p: (34 - 6) * h * T_p + (6 + 2) * h * T + 4 * a * T),
    _form("4.4", "longest", lambda N, n: _longest(N, n, 1)),
    _form("4.9", "padded-flash", lambda: 0, 3),
    _form("4.10", "activations --layer llama --padding-free --attention flash",
          lambda T, h, a, d, k, f: T * (2 * h + 2 * h + 2 * a * d + 2 * (2 * k * d) + 2 * a * d + 4 * a + 2 * h + 2 * h + 8 * f)),
    # Claims that are in no list of 119: no float32 copy of the weights; the square of the longest.
    _form("N1", "states --precision bf16-pure", lambda: 8),
    _form("N1", "states --precision bf16-pure", lambda d: 4 + 4 / d, 1),
    _form("N1", "states --precision bf16-pure", lambda d: 2 + 6 / d, 2),
    _form("N1", "states --precision bf16-pure", lambda d: 8 / d, 3),
    _form("N12", "longest", lambda N, n: _longest(N, n, 2), 3),
)  # fmt: skip

# -- figures of commands -------------------------------------------------------------------------------------------------

H3, S3 = 12288, 2048
"""Width and sequence length of 175B."""


def _kept(l: int, s: int, h: int, a: int, b: int = 1) -> int:
    """A GPT's layers in Megatron's words: means and deviations of two norms beside."""
    return l * (34 * b * s * h + 5 * a * b * s**2 + 16 * b * s)


def _whole(l: int, s: int, h: int, a: int, v: int) -> int:
    """With the embedding's mask, ids and positions, and the head's norm, product and float32 logits."""
    return _kept(l, s, h, a) + s * h + 2 * 8 * s + 2 * 2 * s * h + 8 * s + 4 * s * v


def _embedded(b: int) -> float:
    """XLM-R-XXL's layers and embedding at a batch of b [GiB]."""
    return (_kept(48, 512, 4096, 32, b) + b * 512 * (4096 + 8) + 8 * 512) / GIB


def _ragged() -> tuple[float, float, float, float]:
    """Lengths from U{1..8192}, eight at once: tokens and pairs padded, tokens and pairs alone."""
    N = 8192
    first, second = (_longest(N, 8, power) for power in (1, 2))
    return 8 * first, 8 * second, 8 * (N + 1) / 2, 8 * (N + 1) * (2 * N + 1) / 6


def _layer_flops(tokens: float, pairs: float) -> float:
    """Training of a layer and its logits in 50,000 words [TFLOP]."""
    h = 6144
    return (72 * tokens * h**2 + 12 * pairs * h + 6 * tokens * h * 50_000) / 1e12


_T, _P, _t, _p = _ragged()
_ROWS = 12 * (12 * H3**2 // 8 + 7 * H3 // 8 + 6 * H3) + 51200 * H3 // 8 + S3 * H3
"""Parameters of the first of eight stages of 175B on one of eight ranks: biases of outputs, norms and positions are whole."""
_GPT3 = 96 * (12 * H3**2 + 13 * H3) + (50257 + S3) * H3 + 2 * H3
_FORWARD = 24 * H3**2 * (1 + S3 / (6 * H3)) * 96 + 2 * H3 * 50257
"""FLOPs of a token's forward in GPT-3, every pair counted."""

FIGURES: dict[str, tuple[str, ...]] = {
    "1.2": (f"{6 * 2048 * 8192**2:,}", f"{2 * 2048**2 * 8192:,}", f"{8 * 2048 * 8192**2:,}"),
    "1.9": (f"{8192**2:,}", f"{8192 * 22016:,}"),
    "1.17": (f"{_kept(1, 2048, 8192, 64):,}", f"{_kept(80, 2048, 8192, 64) / GIB:.3f}"),
    # transformers keeps two copies of a norm's input; rotary keys and values are of all heads; the kernel's statistics.
    "1.23": (f"{80 * 2048 * (24 * 8192 + 8 * 22016 + 4 * 64 + 8) / GIB:.2f}",),
    "2.8": (f"{_whole(80, 2048, 8192, 64, 50176):,}",),
    "2.9": tuple(f"{_embedded(b):.2f}" for b in (1, 2, 4, 8, 16, 32, 64)),
    "3.2": (f"{3 * _FORWARD * 300e9 / 312e12 / (365 * 86400):.1f}",),
    # A server makes the last token's logits alone.
    "3.5": (f"{(_FORWARD - 2 * H3 * 50257) / _GPT3:.2f}",),
    "3.6": (f"{2 * 2 * 96 * H3 // 8:,}", f"{17 * 2048 * 2 * 2 * 96 * H3 / 8 / GIB:.2f}",
            f"{2 * (_GPT3 + 7 * H3 * (6 * 96 + S3 + 2)) / 8 / GIB:.2f}"),
    "3.9": (f"{_GPT3:,}",),
    "3.10": (f"{312e12}", f"{156e12}"),
    "3.13": (f"{1152 // (8 * 8)}",),
    "3.16": (f"{2 * 2 * S3 * H3 * 1152 // 18:,}",),
    # Gradients in 32 bits.
    "3.17": (f"{2 * 17 * 4 * _ROWS // 18:,}",),
    "3.23": (f"{12 * 10_712_994_816 / 64 / GIB:.2f}",),
    "3.25": (f"{min(1152 // 18, 8)}",),
    "3.29": (f"{(96 * 128 * 25600**2 * (1 + 2048 / (6 * 25600)) + 6 * 25600 * 51200) * 450e9 / (3072 * 156e12) / 86400:.1f}",),
    "3.31": (f"{8 * 8 * 18:,}",),
    "3.38": (f"{8 * 2 * 150e12 * 17 / (3 * 0.05 * 1152 * 2048) / 1e9:.1f}",),
    "4.6": (f"{(34 * 6144 * _T + 5 * 48 * _P) / GIB:.2f}", f"{(28 * 6144 * _T + (8 * 6144 + 4 * 48) * _t) / GIB:.2f}",
            f"{(34 * 6144 + 4 * 48) * _t / GIB:.2f}", f"{_T / 8:,.0f}"),
    "4.8": (f"{_layer_flops(_T, _P):.2f}", f"{_layer_flops(_T, _p):.2f}", f"{_layer_flops(_t, _p):.2f}"),
}  # fmt: skip
"""Of a claim, the figures that its command prints."""

NO_FIGURE = {
    f"{article}.{place}"
    for article, places in {
        1: (22,),
        2: (1, 6, 14, 16, 17),
        3: (7, 18, 20, 22, 28, 32, 35, 36, 39, 40, 41, 42, 43, 44, 45),
        4: (11, 12, 13, 14, 15, 16, 17),
        5: (1, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17),
    }.items()
    for place in places
}
"""Claims that state a figure of no formula, or none: what something is called, how runs compare, what autograd keeps
(tests/core/paper/test_article5.py counts it)."""
