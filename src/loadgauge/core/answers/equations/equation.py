"""Equations: the list of operations read with letters for sizes, printed as papers print them."""

from typing import Any, Literal

import msgspec

from loadgauge.core.answers.equations.layers import LAYERS, subject
from loadgauge.core.answers.equations.options import AXES, Choice, chosen
from loadgauge.core.answers.equations.parts import by_part, listed, natural, written, written_latex
from loadgauge.core.answers.equations.validity import origin, validity
from loadgauge.core.base import Size, refuse
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.definitions.training.training import choose
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.states.states import model_states
from loadgauge.core.estimate.symbols import MEANING, factored, kinds, latex, letter, substitute, terms, text
from loadgauge.core.layers import block_layer, embedding_layer, head_layer

QUANTITIES = {
    "params": ("parameters of one layer", "parameters"),
    "active-params": ("parameters of one layer that one token passes through", "parameters"),
    "forward-flops": ("FLOPs of the forward of one layer, one micro-batch", "FLOP"),
    "backward-flops": ("FLOPs of the backward of one layer, one micro-batch", "FLOP"),
    "training-flops": ("FLOPs of forward, backward and recomputation of one layer, one micro-batch", "FLOP"),
    "recompute-flops": ("FLOPs that one layer computes a second time, one micro-batch", "FLOP"),
    "activations": ("bytes one layer keeps for backward, one micro-batch", "byte"),
    "wire": ("bytes one rank sends for one layer, forward and backward of one micro-batch", "byte"),
    "model-params": ("parameters of the whole model", "parameters"),
    "model-active-params": ("parameters of the whole model that one token passes through", "parameters"),
    "model-flops": ("FLOPs of the whole model, forward, backward and recomputation, one micro-batch", "FLOP"),
    "states": ("bytes of weights, gradients and optimizer states on one rank, per parameter", "byte"),
}
"""What can be asked for: a sentence and the unit."""
MANY = 6
"""Terms that a sum may have to be printed as one line."""


class Equation(msgspec.Struct, frozen=True, kw_only=True):
    """A closed form. `expression` is SymPy's; `legend` says what its letters mean.

    parts: what each part of the layer adds (of traffic: each axis), common factors before a bracket
    numbers: the letters' values where the layer is a real model's
    validity: the assumptions, a sentence each
    source, keys: where the equation is from, and the citation keys of the works named there
    """

    quantity: str
    layer: str
    what: str
    expression: Any
    unit: str
    legend: dict[str, str]
    numbers: dict[str, Size]
    validity: tuple[str, ...]
    source: str
    keys: tuple[str, ...] = ()
    parts: dict[str, Any] = {}

    @property
    def is_long(self) -> bool:
        """Return whether the sum is long enough to be printed part by part."""
        return bool(self.parts) and len(terms(self.expression)) > MANY

    @property
    def text(self) -> str:
        """The equation as one line of Python; a long sum is the sum of its parts."""
        return " + ".join(self.written_parts.values()) if self.is_long else text(self.expression)

    @property
    def factored(self) -> str:
        """The equation as text, with the first term's letters factored out; empty where that changes nothing."""
        return "" if self.is_long else factored(self.expression)

    @property
    def written_parts(self) -> dict[str, str]:
        """Each part as a line of Python."""
        return {name: written(part) for name, part in self.parts.items()}

    @property
    def lines(self) -> list[str]:
        """Return the sum as lines of Python, a part each, named in a comment."""
        parts = self.written_parts
        width = max((len(part) for part in parts.values()), default=0)
        return [
            f"{'+' if index else ' '} {part:<{width}}  # {name}" for index, (name, part) in enumerate(parts.items())
        ]

    @property
    def latex(self) -> str:
        """The equation in LaTeX, without dollar signs; a long sum is aligned, a part a line."""
        if not self.is_long:
            return latex(self.expression)
        lines = [rf"{written_latex(part)} && \text{{{name}}}" for name, part in self.parts.items()]
        return "\\begin{aligned}\n & " + " \\\\\n + {} & ".join(lines) + "\n\\end{aligned}"

    @property
    def substitute(self) -> Any:
        """Return the expression with the model's numbers for its letters; letters without a number stay."""
        return substitute(self.expression, self.numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `equation --json`."""
        return {
            "quantity": self.quantity,
            "layer": self.layer,
            "what": self.what,
            "expression": self.text,
            "factored": self.factored,
            "parts": self.written_parts,
            "latex": self.latex,
            "unit": self.unit,
            "legend": self.legend,
            "numbers": self.numbers,
            "with_numbers": text(self.substitute) if self.numbers else "",
            "validity": list(self.validity),
            "source": self.source,
            "source_keys": list(self.keys),
        }


def equation(
    quantity: str,
    layer: str = "gpt",
    *,
    tp: int | str = 1,
    sequence_parallel: bool = False,
    cp: int | str = 1,
    ep: int | str = 1,
    etp: int | str = 1,
    recompute: str = "none",
    attention: Literal["eager", "flash"] = "eager",
    experts: Literal["grouped", "fused"] = "grouped",
    padding_free: bool = False,
    precision: str = "bf16",
    zero: int = 0,
    optimizer: str = "adamw",
    kind: int = 0,
) -> Equation:
    """Derive the closed form of a quantity (`QUANTITIES`) from the list of operations.

    layer: `gpt`, `llama`, `mixtral` (or `moe`) and `deepseek` (or `mla`) with every size open, or a model's name or path
        (letters stand for its sizes)
    tp, cp, ep, etp: a number of ranks, or the letter to keep: `"t"`, `"c"`, `"e"`, `"t_e"`
    attention, experts: `loadgauge.core.definitions.model.kernels.Kernels`
    padding_free: tokens and query-key pairs have letters of their own, T and P
    precision: bytes of an activation by number format; for `states` also a recipe (`training.PRECISIONS`)
    zero, optimizer: for `states` only
    kind: which of the model's distinct layers

    Raises `ConfigError` or `LayoutError` for what has no closed form.

    Korthikanti et al.'s equations 1 and 2 (source: korthikanti2022):

    >>> print(equation("activations", "gpt").text)
    34*b*h*s + 5*a*b*s**2
    >>> print(equation("activations", "gpt", tp="t").factored)
    b*h*s*(10 + 24/t + 5*a*s/(h*t))

    Latent attention, of the parameters of a DeepSeek-V3 layer (source: deepseek2024v3):

    >>> print(equation("params", "mla").written_parts["attention"])
    a*d_v*h + a*m*(d_n + d_v) + a*q*(d_n + d_r) + h*(d_r + m) + h*q
    """
    refuse(quantity not in QUANTITIES, f"unknown quantity {quantity!r} (known: {', '.join(QUANTITIES)})")
    if quantity == "states":
        return _states(precision, optimizer, zero)
    ranks = {"tp": tp, "cp": cp, "ep": ep, "etp": etp}
    choice = chosen(quantity, layer, ranks, sequence_parallel, recompute, attention, experts, padding_free, precision)
    of = choice.of
    refuse(not 0 <= kind < of.kinds, f"{layer} has {of.kinds} kinds of layer, so no number {kind}", key="kind")
    whole = quantity.startswith("model-")
    parts, numbers = _whole_model(choice) if whole else _one_layer(choice, kind)
    parts = {name: part for name, part in parts.items() if part != 0}
    expression = _tidy(sum(parts.values()))
    letters = {symbol.name for symbol in getattr(expression, "free_symbols", ())}
    quantity_words, unit = QUANTITIES[quantity]
    if not whole and of.kinds > 1:
        quantity_words = quantity_words.replace("one layer", f"one {kinds(of.model)[kind]}")
    source, keys = origin(choice)
    return Equation(
        quantity=quantity,
        layer=of.name,
        what=f"{quantity_words}, on one rank" if choice.ranks and quantity != "wire" else quantity_words,
        expression=expression,
        unit=unit,
        legend={name: meaning for name, meaning in MEANING.items() if name in letters},
        numbers={name: value for name, value in numbers.items() if name in letters},
        validity=validity(choice),
        source=source,
        keys=keys,
        parts=parts,
    )


def equations(quantity: str, layer: str = "gpt", **options: Any) -> tuple[Equation, ...]:
    """Return one equation for each distinct layer of a model; for `states`, one for each ZeRO stage."""
    if quantity == "states":
        stages = (options.pop("zero"),) if "zero" in options else (0, 1, 2, 3)
        return tuple(equation(quantity, layer, zero=stage, **options) for stage in stages)
    several = layer not in LAYERS and not quantity.startswith("model-")
    count = subject(layer).kinds if several else 1
    by_kind = [equation(quantity, layer, kind=index, **options) for index in range(count)]
    # Kinds that keep, compute and send the same are listed once.
    alike = {(each.text, tuple(each.numbers.items())): each for each in reversed(by_kind)}
    return tuple(reversed(alike.values()))


# -- the readings ------------------------------------------------------------------------------------------------------


def _one_layer(choice: Choice, kind: int) -> tuple[dict[str, Any], dict[str, Size]]:
    """The parts of one layer, and the numbers behind its letters."""
    block = choice.of.blocks[kind]
    layer = block_layer(block.what, letter("h"), choice.view())
    terms = by_part(choice.quantity, layer, block.what, applied(choice.policy, layer))
    return {name: natural(substitute(each, choice.numbers)) for name, each in terms.items()}, block.numbers


def _whole_model(choice: Choice) -> tuple[dict[str, Any], dict[str, Size]]:
    """The same of the whole model: embedding, each part times the layers that have it, head."""
    of, view = choice.of, choice.view()
    quantity = {"model-flops": "training-flops"}.get(choice.quantity, choice.quantity.removeprefix("model-"))
    numbers = dict(of.ends.numbers)
    # By part, how many layers add the same: kinds that share a part are counted together.
    counts: dict[str, dict[Any, Size]] = {}
    for end in (embedding_layer, head_layer):
        for name, size in by_part(quantity, end(of.ends.what, view), None).items():
            counts.setdefault(name, {})[natural(size)] = 1
    for block, count in zip(of.blocks, of.counts, strict=True):
        layer = block_layer(block.what, letter("h"), view)
        # A letter that means another number in an earlier kind of layer is replaced by its number.
        other = {name: size for name, size in block.numbers.items() if numbers.get(name, size) != size}
        numbers = block.numbers | numbers
        for name, size in by_part(quantity, layer, block.what, applied(choice.policy, layer)).items():
            term, terms = natural(substitute(size, other)), counts.setdefault(name, {})
            terms[term] = terms.get(term, 0) + count
    parts = {
        name: natural(sum(count * term for term, count in terms.items())) for name, terms in listed(counts).items()
    }
    return parts, numbers


def _states(precision: str, optimizer: str, zero: int) -> Equation:
    named = {"bf16": "bf16-mixed-16", "fp16": "fp16-mixed-16"}.get(precision, precision)
    recipe, rule = choose(PRECISIONS, named, "precision"), choose(OPTIMIZERS, optimizer, "optimizer")
    states = model_states(letter("N"), recipe, rule, zero=zero, dp=letter("d"))
    expression = _tidy(states.total / letter("N"))
    notes = ["parameters that divide evenly over the ranks"]
    shards = model_states(letter("N"), recipe, rule, zero=2, dp=letter("d"), weights_stage=2)
    gathered = _tidy(shards.total / letter("N") + recipe.compute)
    notes.append(
        "ZeRO as DeepSpeed and Megatron have it; at stage 2 FSDP (huggingface, torchtitan) holds shards of all, and weights"
        f" gathered from forward to backward beside them: {text(gathered)} in all"
    )
    if rule.factored:
        notes.append("the rows and columns that Adafactor keeps of each matrix are left out")
    keys = tuple(dict.fromkeys(("rajbhandari2019", recipe.source, rule.source)))
    return Equation(
        quantity="states",
        layer="any",
        what=f"{QUANTITIES['states'][0]}: {recipe.name}, {optimizer}, ZeRO stage {zero}",
        expression=expression,
        unit=QUANTITIES["states"][1],
        legend={"d": "data-parallel ranks"} if getattr(expression, "free_symbols", None) else {},
        numbers={},
        validity=tuple(notes),
        source="; ".join((f"{cite(keys[0])}, sections 3.1 and 5", *(str(cite(key)) for key in keys[1:]))),
        keys=keys,
    )


def _tidy(expression: Size) -> Any:
    import sympy

    if not isinstance(expression, sympy.Basic):
        return sympy.Integer(expression) if isinstance(expression, int) else sympy.nsimplify(expression)
    expanded = sympy.expand(expression)
    ranks = {letter(name) for name in AXES.values()}
    if ranks.isdisjoint(expanded.free_symbols):
        return expanded
    # (t - 1)/t, the share that travels around a ring, is how papers print it.
    product = sympy.factor(expanded)
    sums = [factor for factor in sympy.Mul.make_args(product) if isinstance(factor, sympy.Add)]
    return product if sums and all(factor.free_symbols <= ranks for factor in sums) else expanded
