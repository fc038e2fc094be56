"""Closed forms of a whole run: the bandwidth each kind of parallelism needs, the bubble, checkpoints, time, GPUs, the cache.

Bytes and FLOPs are read off the list of operations of a GPT layer with letters for its sizes, as in `equation`; what is
written here is only how they are put together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgauge.equation.equation import Equation
from loadgauge.errors import ConfigError
from loadgauge.estimate.memory.recompute import checkpointed
from loadgauge.estimate.symbols import letter
from loadgauge.estimate.time.bandwidth_needs import bandwidth_needed
from loadgauge.families.reference import gpt_block
from loadgauge.layers import View, block_layer
from loadgauge.layers.operations import Collective, Layer
from loadgauge.sources import cite
from loadgauge.spec.kernels import PAPER

Part = tuple[str, Any, str]
"""What it is, its expression, its unit."""

LETTERS = {
    "X": "FLOP/s that each GPU achieves", "r": "share of compute's time that communication may take", "P": "parameters",
    "N": "tokens of the whole run", "B": "global batch [sequences]", "n": "GPUs", "t": "tensor-parallel ranks",
    "p": "pipeline stages", "d": "data-parallel ranks", "v": "chunks of layers on a stage", "m": "micro-batches of a step",
    "b": "micro-batch [sequences]", "s": "sequence length [tokens]", "h": "hidden size", "l": "layers",
    "f": "share of the work that runs on one GPU alone", "A": "bytes a layer keeps", "A_in": "bytes of a layer's input",
    "F": "FLOPs of a step", "S": "seconds of a step, or of a run", "k": "key-value heads", "w": "width of a head",
}  # fmt: skip


def _letters(names: str) -> tuple[Any, ...]:
    return tuple(letter(name) for name in names.split())


def _gpt(tp: Any = 1) -> Layer:
    """A GPT layer in letters, with 16-bit activations."""
    b, s, h, a = _letters("b s h a")
    block = gpt_block(h, a)
    view = View(tokens=b * s, pairs=b * s * s, sequences=b, positions=s, tp=tp, kernels=PAPER)
    return block_layer(block, h, view)


def _layer_seconds() -> Any:
    """Forward and backward of a layer for one micro-batch on one of t ranks [s]."""
    whole, (t, X) = _gpt(), _letters("t X")
    return (whole.forward_flops + whole.backward_flops) / (t * X)


def _bandwidth() -> list[Part]:
    l, p, b, s, h, d, t, P, B, X, r = _letters("l p b s h d t P B X r")
    layer = bandwidth_needed(_gpt(t).wire, _layer_seconds(), r)
    stage = bandwidth_needed(2 * 2 * b * s * h, l / p * _layer_seconds(), r)
    reduced = Collective("all_reduce", "dp", 2 * P / (t * p), d).wire
    data = bandwidth_needed(reduced, 6 * P * B * s / (d * t * p * X), r)
    return [
        ("bandwidth that tensor parallelism needs, all-reduces of 16-bit activations", layer, "byte/s"),
        ("bandwidth that an inner pipeline stage needs, activations and their gradients", stage, "byte/s"),
        ("bandwidth that data parallelism needs, one all-reduce of 16-bit gradients a step", data, "byte/s"),
    ]


def _bubble() -> list[Part]:
    p, m, v = _letters("p m v")
    return [
        ("idle time of a pipeline over its work, 1F1B", (p - 1) / m, "share"),
        ("the same with v chunks of layers on a stage (interleaved)", (p - 1) / (v * m), "share"),
    ]


def _checkpoints() -> list[Part]:
    import sympy

    l, A, A_in = _letters("l A A_in")
    count = sympy.Symbol("c", positive=True)
    kept = checkpointed(l, count, A_in, A)
    (best,) = sympy.solve(sympy.diff(kept, count), count)
    return [
        ("checkpoints at which least is kept", best, "checkpoints"),
        ("what is kept then", sympy.simplify(kept.subs(count, best)), "byte"),
    ]


def _duration() -> list[Part]:
    P, N, n, X = _letters("P N n X")
    return [
        ("seconds of a run (a day has 86,400)", 6 * P * N / (n * X), "s"),
        ("seconds of a run with all layers run again", 8 * P * N / (n * X), "s"),
    ]


def _gpus() -> list[Part]:
    P, N, X, S = _letters("P N X S")
    return [("GPUs that finish a run in S seconds", 6 * P * N / (S * X), "GPUs")]


def _amdahl() -> list[Part]:
    f, n = _letters("f n")
    return [("how many times faster n GPUs are than one", 1 / (f + (1 - f) / n), "times")]


def _utilisation() -> list[Part]:
    F, S, n, X = _letters("F S n X")
    return [
        (
            "share of the peak rate X: MFU of the model's FLOPs, HFU of all that are carried out",
            F / (S * n * X),
            "share",
        )
    ]


def _kv_cache() -> list[Part]:
    l, b, s, k, w = _letters("l b s k w")
    return [("keys and values kept to generate with, in 16 bits", 2 * 2 * l * b * s * k * w, "byte")]


_BY_PARAMETERS = "6 FLOPs a parameter and token: attention and logits are not counted"
FORMS: dict[str, tuple[Callable[[], list[Part]], tuple[str, ...], tuple[str, ...]]] = {
    "bandwidth": (
        _bandwidth,
        (
            "layers of a GPT; the logits, the embedding and recomputation are not counted", "a pipeline of several stages",
            "data parallelism: 6 FLOPs a parameter and token",
        ),
        ("narayanan2021", "nccl-tests"),
    ),
    "bubble": (_bubble, ("stages that take equally long",), ("narayanan2021",)),
    "checkpoints": (
        _checkpoints, ("layers that are alike", "one segment at a time is run again"), ("narayanan2021", "chen2016"),
    ),
    "duration": (_duration, (_BY_PARAMETERS,), ("narayanan2021",)),
    "gpus": (_gpus, (_BY_PARAMETERS,), ("narayanan2021",)),
    "amdahl": (_amdahl, (), ("amdahl1967",)),
    "utilisation": (_utilisation, (), ("korthikanti2022",)),
    "kv-cache": (_kv_cache, ("attention with keys and values of its own, no window",), ("transformers",)),
}  # fmt: skip
"""What can be asked for of a run: its parts, what they hold for, the works they are from."""


def run_forms(quantity: str) -> tuple[Equation, ...]:
    """Return the closed forms of a quantity of `FORMS`. Raises `ConfigError` for any other.

    >>> [form.text for form in run_forms("bubble")]
    ['(p - 1)/m', '(p - 1)/(m*v)']
    >>> run_forms("bandwidth")[0].text
    '4*X*(t - 1)/(3*r*(6*h + s))'
    """
    import sympy

    if quantity not in FORMS:
        raise ConfigError(f"unknown quantity {quantity!r} (known: {', '.join(FORMS)})")
    make, validity, keys = FORMS[quantity]
    forms = []
    for what, value, unit in make():
        expression = sympy.factor(sympy.nsimplify(value))
        names = {symbol.name for symbol in expression.free_symbols}
        forms.append(
            Equation(
                quantity=quantity, layer="any", what=what, expression=expression, unit=unit,
                legend={name: meaning for name, meaning in LETTERS.items() if name in names}, numbers={},
                validity=validity, source="; ".join(str(cite(key)) for key in keys), keys=keys,
            )
        )  # fmt: skip
    return tuple(forms)
