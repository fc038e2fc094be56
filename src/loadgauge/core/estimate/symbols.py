"""The papers' letters in place of numbers: the same list of operations, read as an equation (`loadgauge.core.base.algebra`).

SymPy is imported inside functions, so that an estimate that asks for no equation never loads it.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from loadgauge.core.base import NotModelled, Size
from loadgauge.core.definitions.layout.axes import AXES, STAGE_AXES
from loadgauge.core.definitions.model.model import Attention, Block, LatentAttention, Mlp, ModelSpec, Moe
from loadgauge.core.definitions.model.tuners import TUNERS
from loadgauge.core.layers import View

Namer: TypeAlias = Callable[[str, Size], Any]
"""Notes the number behind a letter and returns the symbol."""

MEANING = {
    "s": "sequence length [tokens]",
    "b": "micro-batch [sequences]",
    "T": "tokens of the micro-batch, the sum of its sequence lengths",
    "P": "query-key pairs of the micro-batch, the sum of its squared sequence lengths",
    "h": "hidden size",
    "a": "attention heads",
    "k": "key-value heads",
    "d": "head width",
    "q": "width of the query latent (q_lora_rank)",
    "m": "width of the key-value latent (kv_lora_rank)",
    "d_n": "head width without positions (qk_nope_head_dim)",
    "d_r": "head width with rotary positions (qk_rope_head_dim)",
    "d_v": "head width of the values (v_head_dim)",
    "f": "intermediate size of the MLP",
    "f_e": "intermediate size of one expert",
    "f_s": "intermediate size of the shared expert",
    "E": "experts",
    "K": "experts a token goes to",
    "w": "sliding window [tokens]",
    "v": "vocabulary size [words]",
    "n": "rows of the position table",
    "n_t": "rows of the token-type table",
    "h_e": "width of the token table",
    "l": "layers",
    "l_d": "of them, layers with an MLP in place of experts",
    "t": "tensor-parallel ranks",
    "c": "context-parallel ranks",
    "e": "expert-parallel ranks",
    "t_e": "tensor-parallel ranks of one expert",
    "r": "rank of the LoRA adapters",
}
"""Meaning of each letter. In the equation of model states, `d` is data-parallel ranks."""


def letter(name: str) -> Any:
    """Return a size as a SymPy symbol: a positive integer.

    >>> letter("h") * 4
    4*h
    """
    import sympy

    return sympy.Symbol(name, positive=True, integer=True)


class Symbolic(msgspec.Struct, frozen=True):
    """An object with letters for sizes, and the number each letter stands for."""

    what: Any
    numbers: dict[str, Size]

    def substitute(self, expression: Any) -> Any:
        """Return the expression with the numbers for its letters."""
        return substitute(expression, self.numbers)


def substitute(expression: Any, numbers: dict[str, Size]) -> Any:
    """Return a SymPy expression (or plain number) with numbers for its letters; a Python number where all are given.

    >>> substitute(letter("h") ** 2 / 2, {"h": 6})
    18
    """
    import sympy

    if not isinstance(expression, sympy.Basic):
        return expression
    chosen = {
        symbol: sympy.nsimplify(numbers[symbol.name]) for symbol in expression.free_symbols if symbol.name in numbers
    }
    value = expression.subs(chosen)
    if value.free_symbols:
        return value
    return int(value) if value.is_integer else float(value)


def symbolic_block(block: Block, hidden_size: int, tp: int = 1) -> Symbolic:
    """Return a block with letters for its sizes; mixers other than attention keep their numbers.

    Related sizes share letters: k = a, then d = h/a; f = 4h.
    tp: key-value heads that are fewer than the ranks are copied, one to each rank; k is then written as t.
    """
    numbers: dict[str, Size] = {"h": hidden_size}

    def name(letters: str, value: Size) -> Any:
        numbers[letters] = value
        return letter(letters)

    mixer, mlp = block.attention, block.mlp
    if isinstance(mixer, Attention | LatentAttention):
        mixer = _attention(mixer, hidden_size, tp, name)
    if isinstance(mlp, Moe):
        mlp = _moe(mlp, name)
    elif mlp is not None:
        mlp = _mlp(mlp, hidden_size, "f", name)
    return Symbolic(msgspec.structs.replace(block, attention=mixer, mlp=mlp), numbers)


def _attention(
    spec: Attention | LatentAttention, hidden_size: int, tp: int, name: Namer
) -> Attention | LatentAttention:
    heads = name("a", spec.num_attention_heads)
    changes: dict[str, Any] = {"num_attention_heads": heads}
    if spec.sliding_window is not None:
        changes["sliding_window"] = name("w", spec.sliding_window)
    if isinstance(spec, LatentAttention):
        changes["q_lora_rank"] = None if spec.q_lora_rank is None else name("q", spec.q_lora_rank)
        changes["kv_lora_rank"] = name("m", spec.kv_lora_rank)
        changes["qk_nope_head_dim"] = name("d_n", spec.qk_nope_head_dim)
        changes["qk_rope_head_dim"] = name("d_r", spec.qk_rope_head_dim)
        changes["v_head_dim"] = name("d_v", spec.v_head_dim)
        return msgspec.structs.replace(spec, **changes)
    keys = spec.num_key_value_heads
    if keys == spec.num_attention_heads:
        whole = spec.num_attention_heads * spec.head_dim == hidden_size
        changes["head_dim"] = letter("h") / heads if whole else name("d", spec.head_dim)
        changes["num_key_value_heads"] = heads
    else:
        changes["head_dim"] = name("d", spec.head_dim)
        changes["num_key_value_heads"] = letter("t") if keys % tp else name("k", keys)
    return msgspec.structs.replace(spec, **changes)


def _mlp(spec: Mlp, hidden_size: int, letters: str, name: Namer) -> Mlp:
    plain = spec.intermediate_size == 4 * hidden_size and not spec.gated
    width = 4 * letter("h") if plain else name(letters, spec.intermediate_size)
    return msgspec.structs.replace(spec, intermediate_size=width)


def _moe(spec: Moe, name: Namer) -> Moe:
    shared = spec.shared
    if shared is not None:
        shared = msgspec.structs.replace(shared, intermediate_size=name("f_s", shared.intermediate_size))
    return msgspec.structs.replace(
        spec,
        num_experts=name("E", spec.num_experts),
        num_experts_per_tok=name("K", spec.num_experts_per_tok),
        moe_intermediate_size=name("f_e", spec.moe_intermediate_size),
        shared=shared,
    )


def symbolic_ends(model: ModelSpec) -> Symbolic:
    """Return a model with letters for the sizes of its embedding and head. Its blocks are unchanged."""
    numbers: dict[str, Size] = {"h": model.hidden_size, "v": model.vocab_size}
    changes: dict[str, Any] = {"hidden_size": letter("h"), "vocab_size": letter("v")}
    for name, field in (("n", "learned_positions"), ("n_t", "token_types"), ("h_e", "embedding_size")):
        if getattr(model, field):
            changes[field], numbers[name] = letter(name), getattr(model, field)
    return Symbolic(msgspec.structs.replace(model, **changes), numbers)


def symbolic_view(view: View, *, ragged: bool = False, captured: bool = False) -> Symbolic:
    """Return a view with letters for its sizes.

    ragged: tokens and pairs have letters of their own, T and P; captured: ranks stay numbers, for which layers were recorded
    """
    s, b = letter("s"), letter("b")
    numbers: dict[str, Size] = {"s": view.positions, "b": view.sequences}
    changes: dict[str, Any] = {"tokens": s * b, "pairs": s * s * b, "sequences": b, "positions": s}
    if ragged:
        changes |= {"tokens": letter("T"), "pairs": letter("P")}
        numbers |= {"T": view.tokens, "P": view.pairs}
    for axis in STAGE_AXES:
        name, ranks = AXES[axis].symbol, getattr(view, axis)
        if not captured and (not isinstance(ranks, int) or ranks > 1):
            changes[axis], numbers[name] = letter(name), ranks
    if "c" in numbers and not ragged:
        changes |= {"tokens": s * b / letter("c"), "pairs": s * s * b / letter("c")}
    if view.lora is not None and view.lora.method in TUNERS and TUNERS[view.lora.method].numeric:
        raise NotModelled(
            f"{TUNERS[view.lora.method].title} has no formula in letters: its sizes are divisors of the widths"
        )
    if view.lora is not None and view.lora.rank:
        changes["lora"], numbers["r"] = msgspec.structs.replace(view.lora, rank=letter("r")), view.lora.rank
    return Symbolic(msgspec.structs.replace(view, **changes), numbers)


# -- printing ----------------------------------------------------------------------------------------------------------


def terms(expression: Any) -> list[Any]:
    """Return the terms of a sum as papers order them: by falling power of h, then of all letters together."""
    import sympy

    def degree(term: Any) -> tuple[Any, ...]:
        powers = term.as_powers_dict()
        letters = {str(base): power for base, power in powers.items() if not base.is_number}
        return (-letters.get("h", 0), -sum(letters.values()), -abs(term.as_coeff_Mul()[0]), str(term))

    return sorted(sympy.Add.make_args(sympy.expand(expression)), key=degree)


def _sum(parts: list[Any]) -> Any:
    import sympy

    return sympy.Add(*parts, evaluate=False) if len(parts) > 1 else parts[0]


def text(expression: Any) -> str:
    """Format an expression as a line of Python, its terms in the papers' order.

    >>> s, b, h, a = (letter(name) for name in "sbha")
    >>> text(5 * a * s**2 * b + 34 * s * b * h)
    '34*b*h*s + 5*a*b*s**2'
    """
    import sympy

    if not isinstance(expression, sympy.Basic):
        return f"{expression:,}"
    if isinstance(expression, sympy.Mul) and any(isinstance(factor, sympy.Add) for factor in expression.args):
        return str(sympy.sstr(expression))
    return str(sympy.sstr(_sum(terms(expression)), order="none"))


def latex(expression: Any) -> str:
    """Format an expression as LaTeX, its terms in the papers' order.

    >>> latex(34 * letter("h") * letter("s"))
    '34 h s'
    """
    import sympy

    if not isinstance(expression, sympy.Basic):
        return str(sympy.latex(expression))
    if isinstance(expression, sympy.Mul) and any(isinstance(factor, sympy.Add) for factor in expression.args):
        return str(sympy.latex(expression))
    return str(sympy.latex(_sum(terms(expression)), order="none"))


def factored(expression: Any) -> str:
    """Factor common letters out of a sum, as papers print it; empty where that changes nothing.

    Where only the GPT's letters occur, all letters of the first term go before the bracket.

    >>> s, b, h, a, f = (letter(name) for name in "sbhaf")
    >>> factored(34 * s * b * h + 5 * a * s**2 * b)
    'b*h*s*(34 + 5*a*s/h)'
    >>> factored(8 * s * b * h + 8 * s * b * f)
    'b*s*(8*h + 8*f)'
    """
    import sympy

    if not isinstance(expression, sympy.Add):
        return ""
    parts = terms(expression)
    if any(part.has(sympy.Min, sympy.Max, sympy.ceiling) for part in parts):
        return ""
    if {symbol.name for symbol in expression.free_symbols} <= set("sbhatTPlvn"):
        outside = parts[0] / parts[0].as_coeff_Mul()[0]
    else:
        outside = sympy.gcd_terms(expression).as_coeff_Mul()[1]
        factors = [factor for factor in sympy.Mul.make_args(outside) if not isinstance(factor, sympy.Add)]
        outside = sympy.Mul(*factors)
    above, below = outside.as_numer_denom()
    if any(sympy.expand(part / outside).free_symbols & below.free_symbols for part in parts):
        outside = above  # ranks that not all terms are divided by stay with those that are
    if outside.as_numer_denom()[0] == 1:
        return ""
    inside = sympy.sstr(_sum([sympy.expand(part / outside) for part in parts]), order="none")
    return f"{sympy.sstr(outside)}*({inside})"


def kinds(model: ModelSpec) -> tuple[str, ...]:
    """Return a name for each distinct block of a model, saying how it differs from the others.

    >>> from loadgauge.core.families.reference import gpt_model
    >>> kinds(gpt_model(2, 64, 4, 1000))
    ('layer',)
    """
    if len(model.blocks) == 1:
        return ("layer",)
    if model.own.labels:
        return tuple(f"layer like {label}" for label in model.own.labels)
    described = [_features(block) for block in model.blocks]
    names = []
    for index, features in enumerate(described):
        own = [word for feature, word in features.items() if word and _tells_apart(feature, described)]
        names.append(f"layer with {' and '.join(own)}" if own else f"layer of kind {index + 1}")
    return tuple(names)


def _tells_apart(feature: str, described: list[dict[str, str]]) -> bool:
    words = {features[feature] for features in described}
    # Where one kind of layer has an MLP and the other has experts, its width says nothing more.
    return len(words - {""} if feature == "width" else words) > 1


def _trained(block: Block) -> str:
    """Return the trained part of a block, where it is not all of it."""
    if block.trained is None:
        return "trained weights"
    return "a part of its weights trained" if block.trained else "frozen weights"


def _features(block: Block) -> dict[str, str]:
    """Return the features, in words, by which blocks may differ."""
    mixer, mlp = block.attention, block.mlp
    window = getattr(mixer, "sliding_window", None)
    plain = mixer is None or isinstance(mixer, Attention | LatentAttention)
    return {
        "tower": "" if block.tower is None else "the tower's steps" if block.tower.steps else "the tower's width",
        "mixer": "no mixer" if mixer is None else "attention" if plain else type(mixer).__name__,
        "window": "" if mixer is None or not plain else "full attention" if window is None else f"window of {window}",
        "mlp": "no MLP" if mlp is None else "experts" if isinstance(mlp, Moe) else "MLP",
        "width": "" if mlp is None or isinstance(mlp, Moe) else f"MLP of width {mlp.intermediate_size}",
        "first_norm": "" if block.first_norm else "no first norm",
        "trained": _trained(block),
        "adapted": "adapters" if block.adapted else "no adapters",
        "reached": "" if block.reached else "nothing trained below it",
    }
