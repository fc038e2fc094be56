"""Closed forms of a whole run: the bandwidth each kind of parallelism needs, the bubble, checkpoints, time, GPUs, the cache.

Bytes and FLOPs are read off the list of operations of a GPT layer with letters for its sizes, as in `equation`; what is
written here is only how they are put together.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import msgspec

from loadgauge.core.answers.equations.equation import Equation
from loadgauge.core.answers.equations.layers import letters
from loadgauge.core.answers.why.reason import Line, line
from loadgauge.core.base.errors import refuse
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.model.kernels import PAPER, Dtypes, Kernels
from loadgauge.core.estimate.memory.recompute import checkpointed
from loadgauge.core.estimate.symbols import letter
from loadgauge.core.estimate.time.bandwidth_needs import bandwidth_needed
from loadgauge.core.families.reference import gpt_block, mixtral_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Collective, Gemm, Layer

FLASH = Kernels(dtypes=Dtypes(norm_statistic=0, index=0))
"""The paper's accounting with a fused attention kernel."""

Part = tuple[str, Any, str]
"""What it is, its expression, its unit."""

LETTERS = {
    "X": "FLOP/s that each GPU achieves", "r": "share of compute's time that communication may take", "P": "parameters",
    "N": "tokens of the whole run", "B": "global batch [sequences]", "n": "GPUs", "t": "tensor-parallel ranks",
    "p": "pipeline stages", "d": "data-parallel ranks", "v": "chunks of layers on a stage", "m": "micro-batches of a step",
    "b": "micro-batch [sequences]", "s": "sequence length [tokens]", "h": "hidden size", "l": "layers",
    "f": "share of the work that runs on one GPU alone", "A": "bytes a layer keeps", "A_in": "bytes of a layer's input",
    "c": "context-parallel ranks", "e": "expert-parallel ranks", "F_e": "width of one expert", "E": "experts",
    "K": "experts of a token", "a": "attention heads", "T": "tokens without padding", "T_p": "tokens with padding",
    "gamma": "share of the layers that run again", "M": "mean length [tokens]",
    "F": "FLOPs of a step", "S": "seconds of a step, or of a run", "k": "key-value heads", "w": "width of a head",
}  # fmt: skip
OWN_LETTERS = {
    "collectives": {"n": "ranks", "m": "servers"},
    "parameter-servers": {
        "n": "workers", "m": "servers", "V": "bytes of gradients, and of weights", "w": "byte/s of an adapter",
        "S": "seconds of a worker's step without sending",
    },
    "longest": {"N": "longest length there is [tokens]", "n": "lengths that are drawn", "k": "a length [tokens]"},
    "gamma": {"v": "vocabulary"},
    "utilisation": {"X": "peak FLOP/s of a GPU"},
}  # fmt: skip
"""Letters that stand for something else in one quantity."""


def _gpt(tp: Any = 1, kernels: Kernels = PAPER, **more: Any) -> Layer:
    """A GPT layer in letters, with 16-bit activations. more: of the view"""
    b, s, h, a = letters("b s h a")
    view = {"tokens": b * s, "pairs": b * s * s, "sequences": b, "positions": s, "tp": tp, "kernels": kernels, **more}
    return block_layer(gpt_block(h, a), h, View(**view))


def _mixture(**more: Any) -> Layer:
    """A Mixtral layer in letters. more: of the view"""
    b, s, h, a, k, w, f, E, K = letters("b s h a k w F_e E K")
    view = View(tokens=b * s, pairs=b * s * s, sequences=b, positions=s, kernels=FLASH, **more)
    return block_layer(mixtral_block(h, a, k, w, E, K, f), h, view)


def _layer_seconds() -> Any:
    """Forward and backward of a layer for one micro-batch on one of t ranks [s]."""
    whole, (t, X) = _gpt(), letters("t X")
    return (whole.forward_flops + whole.backward_flops) / (t * X)


def _tensor_bandwidth(t: Any, r: Any) -> Part:
    layer = bandwidth_needed(_gpt(t).wire, _layer_seconds(), r)
    return "bandwidth that tensor parallelism needs, all-reduces of 16-bit activations", layer, "byte/s"


def _pipeline_bandwidth(l: Any, p: Any, b: Any, s: Any, h: Any, r: Any) -> Part:
    stage = bandwidth_needed(2 * 2 * b * s * h, l / p * _layer_seconds(), r)
    return "bandwidth that an inner pipeline stage needs, activations and their gradients", stage, "byte/s"


def _data_bandwidth(p: Any, s: Any, d: Any, t: Any, P: Any, B: Any, X: Any, r: Any) -> Part:
    reduced = Collective("all_reduce", "dp", 2 * P / (t * p), d).wire
    data = bandwidth_needed(reduced, 6 * P * B * s / (d * t * p * X), r)
    return "bandwidth that data parallelism needs, one all-reduce of 16-bit gradients a step", data, "byte/s"


def _ring(c: Any) -> Layer:
    """A GPT layer of c ranks that send keys and values around a ring."""
    b, s = letters("b s")
    return _gpt(kernels=FLASH, tokens=b * s / c, pairs=b * s * s / c, positions=s / c, cp=c)


def _context_bandwidth(c: Any, X: Any) -> Part:
    core = next(operation for operation in _ring(c) if operation.kind == "attention")
    hidden = bandwidth_needed(
        sum(exchange.wire for exchange in core.forward_comm), core.forward_flops / X * (c - 1) / c
    )
    meaning = "bandwidth that context parallelism needs, keys and values around a ring under the forward of attention"
    return meaning, hidden, "byte/s"


def _expert_bandwidth(e: Any, X: Any, r: Any) -> Part:
    mixture = _mixture(ep=e)
    seconds = (mixture.forward_flops + mixture.backward_flops) / X
    meaning = "bandwidth that expert parallelism needs, balanced, tokens to experts and back (layers of Mixtral)"
    return meaning, bandwidth_needed(mixture.wire, seconds, r), "byte/s"


BANDWIDTH_OF: dict[str, Callable[..., Any]] = {
    "tp": _tensor_bandwidth, "pp": _pipeline_bandwidth, "dp": _data_bandwidth, "cp": _context_bandwidth,
    "ep": _expert_bandwidth,
}  # fmt: skip
"""The form of `bandwidth` of each axis."""


def _traffic(l: Any, p: Any, b: Any, s: Any, h: Any, d: Any, t: Any, P: Any, m: Any, c: Any, e: Any) -> list[Part]:
    return [
        ("bytes that one GPU sends a step, tensor parallelism", l / p * m * _gpt(t).wire, "byte"),
        ("bytes that an inner stage sends a step, activations and their gradients", 2 * 2 * b * s * h * m, "byte"),
        ("the same of the first or the last stage", 2 * b * s * h * m, "byte"),
        (
            "bytes that one GPU sends a step, data parallelism, 16-bit gradients",
            Collective("all_reduce", "dp", 2 * P / (t * p), d).wire,
            "byte",
        ),
        ("bytes that one GPU sends a step, context parallelism, a ring", l / p * m * _ring(c).wire, "byte"),
        ("bytes that one GPU sends a step, expert parallelism, balanced", l / p * m * _mixture(ep=e).wire, "byte"),
    ]


def _padded_flash(T: Any, T_p: Any) -> list[Part]:
    import sympy

    free = _gpt(kernels=FLASH, tokens=T, pairs=T)
    padded = _gpt(kernels=FLASH, tokens=T_p, pairs=T, kernel_tokens=T)
    return [
        ("bytes a layer keeps where only the kernel runs without padding", sympy.expand(padded.saved()), "byte"),
        ("the same without padding throughout", sympy.expand(free.saved()), "byte"),
        ("what is saved by the second", sympy.expand(padded.saved() - free.saved()), "byte"),
        (
            "what is saved where all are equally long: there is no mask, and nothing is copied",
            sympy.expand(_gpt(kernels=FLASH, tokens=T_p, pairs=T).saved() - free.saved().subs(T, T_p)),
            "byte",
        ),
    ]


def _mask() -> list[Part]:
    import sympy

    kept = sympy.expand(_gpt(kernels=msgspec.structs.replace(PAPER, scores_mask=True)).saved())
    return [("bytes a layer keeps where the mask of its scores is kept too, a byte each", kept, "byte")]


def _collectives(n: Any, m: Any) -> list[Part]:
    import sympy

    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    parts: list[Part] = [
        (
            f"bytes that one of n ranks sends, over the bytes of the whole tensor: {kind.replace('_', '-')}",
            Collective(kind, "dp", sympy.Integer(1), n).wire,
            "times",
        )
        for kind in collectives
    ]
    return [
        *parts,
        ("the same of broadcast, of reduce, and of sending and receiving", sympy.Integer(1), "times"),
        (
            "the same of gather, at the rank that gathers, and of scatter, at the one that scatters",
            (n - 1) / n,
            "times",
        ),
        (
            "the same at one of m parameter servers, to which n workers send gradients and which send weights back",
            n / m,
            "times",
        ),
    ]


def _longest(N: Any, n: Any, M: Any, k: Any) -> list[Part]:
    import sympy

    each = sympy.Symbol("k", positive=True, integer=True)
    return [
        (
            "expected longest of n lengths, each of 1 to N equally likely",
            N - sympy.Sum((each / N) ** n, (each, 1, N - 1)),
            "tokens",
        ),
        ("the same for a large N", N * n / (n + 1), "tokens"),
        ("expected longest of n lengths, exponential of mean M", M * sympy.harmonic(n), "tokens"),
        (
            "expected square of the longest, each of 1 to N",
            N**2 - sympy.Sum((2 * each + 1) * (each / N) ** n, (each, 1, N - 1)),
            "tokens^2",
        ),
        ("probability that the longest is k, each of 1 to N", (k / N) ** n - ((k - 1) / N) ** n, "share"),
    ]


def _gamma(l: Any, b: Any, s: Any, h: Any, v: Any) -> list[Part]:
    import sympy

    share = sympy.Symbol("gamma", positive=True)
    layer, head = _gpt(), 3 * Gemm(b * s, v, h).flops
    once = layer.forward_flops + layer.backward_flops
    return [
        (
            "FLOPs of the model, a share gamma of the layers run again, one micro-batch",
            l * (once + share * layer.forward_flops) + head,
            "FLOP",
        ),
        ("what that costs, over the layers' own work", share * layer.forward_flops / once, "share"),
    ]


def _checkpoints(l: Any, A: Any, A_in: Any) -> list[Part]:
    import sympy

    count = sympy.Symbol("c", positive=True)
    kept = checkpointed(l, count, A_in, A)
    (best,) = sympy.solve(sympy.diff(kept, count), count)
    return [
        ("checkpoints at which least is kept", best, "checkpoints"),
        ("what is kept then", sympy.simplify(kept.subs(count, best)), "byte"),
    ]


def _partitioned(l: Any, b: Any, s: Any, h: Any, t: Any) -> list[Part]:
    inputs = 2 * l * b * s * h
    part = (t - 1) / t  # what one rank lacks of a tensor that is shared out
    return [
        (
            "inputs of layers that run again, in 16 bits, each rank of t with its part of them (ZeRO-R)",
            inputs / t,
            "byte",
        ),
        ("the same where every rank keeps them whole", inputs, "byte"),
        ("bytes that one rank receives to have them whole again, one micro-batch", inputs * part, "byte"),
        (
            "that over what 6 all-reduces a layer send with all layers run again",
            inputs * part / (6 * 2 * inputs * part),
            "share",
        ),
    ]


def in_letters(form: Callable[..., Any]) -> Any:
    """Return what a function of letters is, given the letters that its arguments are named by."""
    return form(*map(letter, signature(form).parameters))


_BY_PARAMETERS = "6 FLOPs a parameter and token: attention and logits are not counted"
FORMS: dict[str, tuple[Callable[..., list[Part]], tuple[str, ...], tuple[str, ...]]] = {
    "bandwidth": (
        lambda: [in_letters(part) for part in BANDWIDTH_OF.values()],
        (
            "layers of a GPT; the logits, the embedding and recomputation are not counted",
            "a pipeline of several stages",
            "data parallelism: 6 FLOPs a parameter and token",
            "context parallelism: as many key-value heads as heads; half of that time, where a kernel leaves out what is masked",
        ),
        ("narayanan2021", "nccl-tests"),
    ),
    "traffic": (
        _traffic,
        (
            "layers of a GPT, of Mixtral for experts; the embedding, the logits and recomputation are not counted",
            "one sender in each direction of a pipeline; 2 bytes a gradient",
        ),
        ("narayanan2021", "nccl-tests"),
    ),
    "gamma": (_gamma, ("layers of a GPT, whole layers run again",), ("narayanan2021",)),
    "padded-flash": (
        _padded_flash,
        ("a GPT layer with fused attention that drops probabilities itself",),
        ("dao2022", "padfree2024"),
    ),
    "mask": (_mask, ("a GPT layer that writes its scores out",), ("korthikanti2022",)),
    "collectives": (_collectives, ("a ring",), ("nccl-tests",)),
    "parameter-servers": (
        lambda n, m, V, w, S: [
            ("bytes that one of m parameter servers receives and sends a step, of n workers", n * V / m, "byte"),
            ("workers that m servers keep up with, where none waits for others", m * (S * w + 2 * V) / V, "workers"),
            ("seconds of a step where all wait for all, the servers' links being full", S + 2 * n * V / (m * w), "s"),
            ("seconds between updates of a worker that waits for none, below that many workers", S + 2 * V / w, "s"),
            ("the same above it", n * V / (m * w), "s"),
            ("updates by others between a worker's weights and its gradients, in the mean", n - 1, "updates"),
        ],
        ("adapters of servers as fast as the workers'", "both directions at once", "workers that are alike"),
        ("li2014",),
    ),
    "longest": (_longest, ("lengths that are drawn one by one, whatever the others are",), ("padfree2024",)),
    "bubble": (
        lambda p, m, v: [
            ("idle time of a pipeline over its work, 1F1B", (p - 1) / m, "share"),
            ("the same with v chunks of layers on a stage (interleaved)", (p - 1) / (v * m), "share"),
        ],
        ("stages that take equally long",),
        ("narayanan2021",),
    ),
    "checkpoints": (
        _checkpoints,
        ("layers that are alike", "one segment at a time is run again"),
        ("narayanan2021", "chen2016"),
    ),
    "duration": (
        lambda P, N, n, X: [
            ("seconds of a run (a day has 86,400)", 6 * P * N / (n * X), "s"),
            ("seconds of a run with all layers run again", 8 * P * N / (n * X), "s"),
        ],
        (_BY_PARAMETERS,),
        ("narayanan2021",),
    ),
    "gpus": (
        lambda P, N, X, S: [("GPUs that finish a run in S seconds", 6 * P * N / (S * X), "GPUs")],
        (_BY_PARAMETERS,),
        ("narayanan2021",),
    ),
    "amdahl": (
        lambda f, n: [
            ("how many times faster n GPUs are than one", 1 / (f + (1 - f) / n), "times"),
            ("the same at most, whatever the number of GPUs", 1 / f, "times"),
        ],
        (),
        ("amdahl1967",),
    ),
    "utilisation": (
        lambda F, S, n, X: [
            (
                "share of the peak rate X: MFU of the model's FLOPs, HFU of all that are carried out",
                F / (S * n * X),
                "share",
            )
        ],
        (),
        ("korthikanti2022",),
    ),
    "partitioned": (
        _partitioned,
        ("layers that all run again; with sequence parallelism the inputs are in parts already",),
        ("rajbhandari2019",),
    ),
    "kv-cache": (
        lambda l, b, s, k, w: [
            ("keys and values kept to generate with, in 16 bits", 2 * 2 * l * b * s * k * w, "byte")
        ],
        ("attention with keys and values of its own, no window",),
        ("transformers",),
    ),
}
"""What can be asked for of a run: its parts, what they hold for, the works they are from."""


def run_forms(quantity: str) -> tuple[Equation, ...]:
    """Return the closed forms of a quantity of `FORMS`. Raises `ConfigError` for any other.

    >>> [form.text for form in run_forms("bubble")]
    ['(p - 1)/m', '(p - 1)/(m*v)']
    >>> run_forms("bandwidth")[0].text
    '4*X*(t - 1)/(3*r*(6*h + s))'
    """
    import sympy

    refuse(quantity not in FORMS, f"unknown quantity {quantity!r} (known: {', '.join(FORMS)})")
    make, validity, keys = FORMS[quantity]
    forms, meanings = [], LETTERS | OWN_LETTERS.get(quantity, {})
    for quantity_words, value, unit in in_letters(make):
        expression = sympy.factor(sympy.nsimplify(value))
        names = {symbol.name for symbol in expression.free_symbols}
        forms.append(
            Equation(
                quantity=quantity,
                layer="any",
                what=quantity_words,
                expression=expression,
                unit=unit,
                legend={name: meaning for name, meaning in meanings.items() if name in names},
                numbers={},
                validity=validity,
                source="; ".join(str(cite(key)) for key in keys),
                keys=keys,
            )
        )
    return tuple(forms)


def bandwidth_lines(axis: str, numbers: dict[str, float]) -> tuple[Line, ...]:
    """Return the closed form of the bandwidth that an axis needs, with numbers for its letters; none where one is missing."""
    form = run_forms("bandwidth")[list(BANDWIDTH_OF).index(axis)]
    if not form.legend.keys() <= numbers.keys():
        return ()
    value = float(form.expression.subs({letter(name): numbers[name] for name in form.legend}))
    legend = {name: (meaning, numbers[name]) for name, meaning in form.legend.items()}
    return (line(f"closed form of {form.what}", form.text, value, form.unit, legend),)
