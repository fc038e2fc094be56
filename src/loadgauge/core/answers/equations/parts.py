"""A quantity of a layer, part by part: attention, MLP, router, experts, norms; of traffic, axis by axis.

A tensor that several operations keep belongs to the first of them. So Korthikanti et al. divide a GPT layer too
(source: korthikanti2022, section 4.1): attention 11 s b h + 5 a s^2 b bytes, MLP 19 s b h, norms 4 s b h.
"""

import functools
from typing import Any

from loadgauge.core.base import Size, lists
from loadgauge.core.definitions.layout.axes import AXES, STAGE_AXES
from loadgauge.core.definitions.model.model import Block, Moe
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Operation, Recompute, Weight

ORDER = (
    "embedding", "attention", "scores and context", "MLP", "router", "experts", "shared expert", "norms", "head",
    *(AXES[axis].label for axis in STAGE_AXES),
)  # fmt: skip
"""The order in which parts are listed; any other (a mixer other than attention) goes first."""


def by_part(quantity: str, layer: Layer, block: Block | None, again: Recompute = NOTHING) -> dict[str, Size]:
    """Return what each part of a layer adds to a quantity. `block`: what the layer is made from; None: an end of the model.

    >>> from loadgauge.core.families.reference import gpt_block
    >>> from loadgauge.core.definitions.model.kernels import PAPER
    >>> from loadgauge.core.layers import View, block_layer
    >>> h, block = 8, gpt_block(8, 2)
    >>> found = by_part("activations", block_layer(block, h, View.of(1, 1, kernels=PAPER)), block)
    >>> found == {"attention": 11 * h + 5 * 2, "MLP": 19 * h, "norms": 4 * h}
    True
    """
    terms_of: dict[str, list[Size]] = {}
    experts = block is not None and isinstance(block.mlp, Moe)
    if quantity == "wire":
        for operation in layer:
            repeated = operation.forward_comm if operation.name in again else ()
            for collective in (*operation.forward_comm, *operation.backward_comm, *repeated):
                terms_of.setdefault(AXES[collective.axis].label, []).append(collective.wire)
    elif quantity == "activations":
        owner: dict[str, Operation] = {}
        for operation in layer:
            for tensor in (*operation.keeps, *(operation.inputs if operation.name in again else ())):
                owner.setdefault(tensor.name, operation)
        for tensor in layer.kept(again):
            terms_of.setdefault(_part(owner[tensor.name], experts, False), []).append(tensor.nbytes)
    else:
        of_flops = quantity.endswith("flops")
        for operation in layer:
            for term in _terms(quantity, operation, block, again):
                terms_of.setdefault(_part(operation, experts, of_flops), []).append(term)
    sums = {name: sum(terms) for name, terms in terms_of.items()}
    return listed({name: size for name, size in sums.items() if size != 0})


def listed(parts: dict[str, Any]) -> dict[str, Any]:
    """Sort parts in the order of `ORDER`."""
    places = {name: index for index, name in enumerate(ORDER)}
    return {name: parts[name] for name in sorted(parts, key=lambda name: places.get(name, -1))}


def _share(weight: Weight, block: Block | None) -> Size:
    """Of a weight, what one token passes through: K of E experts."""
    if block is not None and isinstance(block.mlp, Moe) and weight.expert:
        return block.mlp.computed_per_tok / block.mlp.num_experts
    return 1


def _terms(quantity: str, operation: Operation, block: Block | None, again: Recompute) -> tuple[Size, ...]:
    if quantity == "params":
        return tuple(weight.numel for weight in operation.weights)
    if quantity == "active-params":
        return tuple(weight.numel * _share(weight, block) for weight in operation.weights)
    if quantity == "forward-flops":
        return (operation.forward_flops,)
    if quantity == "backward-flops":
        return (operation.backward_flops,)
    repeated = operation.rerun_flops + (operation.forward_flops if operation.name in again else 0)
    return (
        (repeated,)
        if quantity == "recompute-flops"
        else (
            operation.forward_flops,
            operation.backward_flops,
            repeated,
        )
    )


def _part(operation: Operation, experts: bool, core_apart: bool) -> str:
    head, _, name = operation.name.partition(".")
    if operation.kind == "norm" and head in ("attention", "mlp"):
        return "norms"
    if head == "attention":
        return "scores and context" if core_apart and operation.name in CORE else head
    if head != "mlp":
        return head
    if not experts or name == "residual":
        return "MLP"
    if name.startswith("shared"):
        return "shared expert"
    return "router" if name.startswith(("router", "order")) else "experts"


# -- how a part is written ---------------------------------------------------------------------------------------------


def natural(whole: Any) -> Any:
    """Group a sum's terms by their power of s and their ranks, and put common factors before brackets.

    >>> from loadgauge.core.estimate.symbols import letter
    >>> h, a, k, d, s, t = (letter(name) for name in "hakdst")
    >>> natural(2 * h * a * d + 2 * h * k * d)
    2*d*h*(a + k)
    >>> in_order(natural(h * s + 2 * a * d * s / t + h * s / t + a * s**2 + h))
    [h*s, s*(2*a*d + h)/t, a*s**2, h]
    """
    import sympy

    alike = lists((_place(term), term) for term in sympy.Add.make_args(sympy.sympify(whole)))
    return sympy.Add(*(_shortest(sympy.Add(*several)) for several in alike.values()))


@functools.lru_cache(4096)
def _shortest(whole: Any) -> Any:
    """Of a sum factored and expanded, the form with the fewest operations; parts recur from one equation to the next."""
    import sympy

    if not whole.has(sympy.Add):
        return whole
    if whole.has(sympy.Min, sympy.Max, sympy.ceiling, sympy.Piecewise):
        return sympy.factor_terms(whole)
    forms = [sympy.factor_terms(whole), sympy.factor(sympy.expand(whole)), sympy.expand(whole)]
    return min(forms, key=sympy.count_ops)


def _place(term: Any) -> tuple[Any, ...]:
    """Return the sort key of a term: its power of s (or of tokens), what has none last; then by the ranks that share it."""
    powers = {str(base): power for base, power in term.as_powers_dict().items()}
    tokens, pairs = powers.get("s", 0) + powers.get("T", 0), powers.get("P", 0)
    shared = sorted(symbol.name for symbol in term.as_numer_denom()[1].free_symbols)
    return (tokens + pairs == 0, tokens + 2 * pairs, tuple(shared))


def in_order(expression: Any) -> list[Any]:
    """Return the terms of a sum in the order of printing, each as it was built."""
    import sympy

    return sorted(sympy.Add.make_args(expression), key=lambda term: (_place(term), str(term)))


def written(expression: Any) -> str:
    """Format a sum, as it was built, as one line of Python.

    >>> from loadgauge.core.estimate.symbols import letter
    >>> h, a, d, s = (letter(name) for name in "hads")
    >>> written(natural(h * s + 2 * a * d * s + a * s**2))
    's*(2*a*d + h) + a*s**2'
    """
    import sympy

    return _joined([str(sympy.sstr(term)) for term in in_order(expression)])


def written_latex(expression: Any) -> str:
    """Format a sum, as it was built, in LaTeX."""
    import sympy

    return _joined([str(sympy.latex(term)) for term in in_order(expression)])


def _joined(terms: list[str]) -> str:
    first, *rest = terms
    return first + "".join(f" - {term[1:].lstrip()}" if term.startswith("-") else f" + {term}" for term in rest)
