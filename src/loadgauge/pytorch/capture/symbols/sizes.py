"""Sizes as formulas: whole sums of products of the sizes' names, with quotients and remainders rounded as the code rounds them.

A formula is data: its text has names, whole numbers, `+ - * // %`, `max` and `min`, and nothing else is ever evaluated.
"""

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled

SAMPLES, SECONDS = 16_000, 10
"""Samples of sound in a second, and the length of a sound [s] unless it is said."""
LONGEST = 4000
"""Characters of a term."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq,
              ast.NotEq, ast.Not)  # fmt: skip


@functools.cache
def compiled(text: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the sizes by name, for a term or a guard. Raises ConfigError for text that is anything else.

    >>> compiled("b*(-(-s//128))")({"b": 2, "s": 129})
    4
    >>> compiled("__import__('os')")
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: not a size: "__import__('os')"
    """
    try:
        tree = ast.parse(text, mode="eval") if len(text) <= LONGEST else None
    except (SyntaxError, RecursionError, ValueError):
        tree = None
    if tree is None or not _allowed(tree.body):
        raise ConfigError(f"not a size: {text[:60]!r}")
    code = compile(tree, "<size>", "eval")
    functions = {"__builtins__": {}, "max": _max, "min": _min}
    return lambda sizes: eval(code, functions, dict(sizes))  # only what `_allowed` lets pass


def _max(*values: Any) -> Any:
    return max(values) if all(isinstance(value, int) for value in values) else _of_arrays("maximum", values)


def _min(*values: Any) -> Any:
    return min(values) if all(isinstance(value, int) for value in values) else _of_arrays("minimum", values)


def _of_arrays(name: str, values: Any) -> Any:
    import numpy  # only here: an answer about plain numbers is faster without

    return functools.reduce(getattr(numpy, name), values)


def _allowed(root: ast.expr) -> bool:
    """Return whether a tree has nothing but what a formula has. (`ast.walk` takes most of the time of a question that is known.)"""
    nodes: list[ast.expr] = [root]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.BinOp() if isinstance(node.op, _OPERATORS):
                nodes += (node.left, node.right)
            case ast.Constant() if type(node.value) is int:
                pass
            case ast.Name() if not node.id.startswith("_"):
                pass
            case ast.UnaryOp() if isinstance(node.op, _OPERATORS):
                nodes.append(node.operand)
            case ast.Compare() if all(isinstance(operator, _OPERATORS) for operator in node.ops):
                nodes += (node.left, *node.comparators)
            case ast.BoolOp():
                nodes += node.values
            case ast.Call(func=ast.Name(id="max" | "min"), keywords=[]):
                nodes += node.args
            case _:
                return False
    return True


class Formula(msgspec.Struct, frozen=True, gc=False):
    """A whole number that depends on sizes: `terms` are (product of names, whole factor); "1" is the constant's product.

    >>> size = Formula((("1", 512), ("b*s", 4)))
    >>> size.at({"b": 2, "s": 3}), str(size)
    (536, '4*b*s + 512')
    """

    terms: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, expression: Any, names: Mapping[Any, str]) -> Self:
        """The size that a SymPy expression or an int stands for. names: of its symbols

        Raises NotModelled where it is no whole sum.
        """
        if isinstance(expression, int):
            return cls((("1", expression),) if expression else ())
        import sympy

        flat = sympy.expand(expression)
        terms: dict[str, int] = {}
        for product, factor in flat.as_coefficients_dict().items():
            if not factor.is_Integer:
                return cls(((written(expression, names), 1),))
            key = written(product, names)
            terms[key] = terms.get(key, 0) + int(factor)
        return cls(tuple(sorted((key, factor) for key, factor in terms.items() if factor)))

    def at(self, sizes: Mapping[str, Any]) -> Any:
        """Its value. sizes: by name, ints or arrays"""
        return sum(factor * compiled(product)(sizes) for product, factor in self.terms)

    def __str__(self) -> str:
        """Return the formula as people write it, the largest power first."""
        shown = [
            f"{factor}" if product == "1" else product if factor == 1 else f"{factor}*{product}"
            for product, factor in sorted(self.terms, key=lambda term: (term[0] == "1", -term[0].count("*"), term[0]))
        ]
        return " + ".join(shown).replace("+ -", "- ") or "0"


RELATIONS = {
    "Eq": "==", "Equality": "==", "Ne": "!=", "Unequality": "!=", "Lt": "<", "StrictLessThan": "<", "Le": "<=",
    "LessThan": "<=", "Gt": ">", "StrictGreaterThan": ">", "Ge": ">=", "GreaterThan": ">=",
}  # fmt: skip
"""SymPy's relations, as Python writes them."""


def written(expression: Any, names: Mapping[Any, str]) -> str:
    """A SymPy expression of PyTorch's shapes in the words of `compiled`. Raises NotModelled for a function that is none of them."""
    import sympy

    kind = type(expression).__name__

    def of(part: Any) -> str:
        return written(part, names)

    if expression.is_Symbol:
        if expression not in names:
            raise NotModelled(f"a size that depends on values ({expression})")
        return names[expression]
    if expression.is_Integer:
        return str(int(expression))
    if kind in ("CeilToInt", "ceiling", "FloorToInt", "floor", "TruncToInt"):
        upper, lower = _fraction(expression.args[0])
        if kind in ("CeilToInt", "ceiling"):
            return f"(-((-({of(upper)}))//({of(lower)})))"
        return f"(({of(upper)})//({of(lower)}))"
    if expression.is_Add:
        return "(" + " + ".join(of(term) for term in expression.args) + ")"
    if expression.is_Mul:
        upper, lower = _fraction(expression)
        if lower != 1:
            raise NotModelled(f"a size that is a fraction ({expression})")
        return "*".join(of(factor) for factor in expression.args)
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return "*".join([of(expression.base)] * int(expression.exp))
    if kind in ("FloorDiv", "CleanDiv"):
        return f"(({of(expression.args[0])})//({of(expression.args[1])}))"
    if kind in ("Mod", "PythonMod"):
        return f"(({of(expression.args[0])})%({of(expression.args[1])}))"
    if kind in ("Max", "Min"):
        return functools.reduce(
            lambda left, right: f"{kind.lower()}({left}, {right})", (of(left) for left in expression.args)
        )
    if kind in RELATIONS:
        return f"({of(expression.args[0])} {RELATIONS[kind]} {of(expression.args[1])})"
    if isinstance(expression, sympy.And | sympy.Or):
        return "(" + f" {kind.lower()} ".join(of(condition) for condition in expression.args) + ")"
    if isinstance(expression, sympy.Not):
        return f"(not {of(expression.args[0])})"
    raise NotModelled(f"a size that is {kind} ({expression})")


def _fraction(expression: Any) -> tuple[Any, Any]:
    """Return what is above and below a fraction's line, both whole."""
    import sympy

    if type(expression).__name__ == "IntTrueDiv":
        above, below = expression.args
        return above, below
    above, below = sympy.fraction(sympy.together(expression))
    return above, below
