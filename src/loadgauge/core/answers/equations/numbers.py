"""Numbers for the letters of a closed form, and the letter that a value of it asks for."""

from bisect import bisect_left
from collections.abc import Callable
from operator import mul, truediv

import msgspec

from loadgauge.core.answers.equations.equation import Equation
from loadgauge.core.base import ConfigError, parse, parse_count, refuse, share

COMBINED: dict[str, tuple[str, str, Callable[[float, float], float]]] = {
    "f": ("serial", "total", truediv),
    "X": ("peak", "mfu", mul),
}
"""A letter, and the two numbers that it is worked out from."""
WORDS = {"params": "parameters", "size": "parameters", "cards": "gpus", "duration": "seconds", "time": "seconds"}
"""Words that people say, and those that the meaning of a letter has."""


def read_number(text: str, key: str) -> float:
    """Return a number, a count with a letter, a percentage, or one with a unit in its base unit. Raises `ConfigError`.

    >>> [read_number(text, "f") for text in ("0.05", "175B", "5%", "23d", "150TFLOP/s")]
    [0.05, 175000000000.0, 0.05, 1987200.0, 150000000000000.0]
    """
    if text.rstrip().endswith("%"):
        return share(text, key)
    try:
        return parse_count(text, key)
    except ConfigError:
        return parse(text, key)[0]


def read_numbers(text: str) -> dict[str, float]:
    """Return what `--numbers letter=value,...` says. Raises `ConfigError` for a part that is no pair.

    >>> read_numbers("n=1024,serial=1h,total=20h")
    {'n': 1024.0, 'serial': 3600.0, 'total': 72000.0}
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, value in pairs:
        refuse(not (name.strip() and equals and value.strip()), "write letter=value,letter=value", key="--numbers")
    return {name.strip(): read_number(value, f"--numbers {name.strip()}") for name, _, value in pairs}


def by_letter(form: Equation, values: dict[str, float]) -> dict[str, float]:
    """Return the values under the letters of a form: a letter's own, or a word that the meaning of one letter alone has.

    >>> from loadgauge.core.answers.equations.run_forms import run_forms
    >>> by_letter(run_forms("amdahl")[0], {"gpus": 64, "serial": 1, "total": 20})
    {'n': 64, 'f': 0.05}
    """
    letters = {letter: values[name] for name in values if (letter := _letter(form, name))}
    return letters | {
        letter: of(values[first], values[second])
        for letter, (first, second, of) in COMBINED.items()
        if letter in form.legend and letter not in letters and {first, second} <= values.keys()
    }


def _letter(form: Equation, name: str) -> str:
    """The letter that a name means; empty where there is none, or more than one."""
    if name in form.legend:
        return name
    word = WORDS.get(name.lower(), name.lower())
    meant = [letter for letter, meaning in form.legend.items() if word in meaning.lower().split()]
    return meant[0] if len(meant) == 1 else ""


def unread(forms: tuple[Equation, ...], values: dict[str, float]) -> list[str]:
    """Return the names that no form has a letter for.

    >>> from loadgauge.core.answers.equations.run_forms import run_forms
    >>> unread(run_forms("duration"), {"params": 1, "peak": 2, "mfu": 0.4, "hidden": 3})
    ['hidden']
    """
    parts = {
        name
        for letter, (first, second, _) in COMBINED.items()
        for name in (first, second)
        if {first, second} <= values.keys() and any(letter in form.legend for form in forms)
    }
    return [name for name in values if name not in parts and not any(_letter(form, name) for form in forms)]


def with_numbers(form: Equation, values: dict[str, float]) -> Equation:
    """Return a form with numbers for its letters, beside those of its layer."""
    return msgspec.structs.replace(form, numbers=form.numbers | by_letter(form, values))


def solved(form: Equation, letter: str, value: float) -> float:
    """Return the number of a letter with which a form has a value; the others are numbers. Raises `ConfigError` where none has.

    >>> from loadgauge.core.answers.equations.run_forms import run_forms
    >>> form = with_numbers(run_forms("duration")[0], {"P": 175e9, "N": 300e9, "X": 140e12})
    >>> round(solved(form, "n", 24 * 86400))
    1085
    """
    import mpmath  # type: ignore[import-untyped]
    import sympy

    unknown = sympy.Symbol("unknown", positive=True)
    free = form.expression.free_symbols
    own = {symbol: unknown for symbol in free if symbol.name == letter}
    rest = {symbol: form.numbers[symbol.name] for symbol in free - own.keys() if symbol.name in form.numbers}
    left = sympy.nsimplify(form.expression.subs(rest | own) - value)
    missing = sorted(symbol.name for symbol in left.free_symbols - {unknown})
    if missing or not own:
        problem = f"{', '.join(missing)} have no number" if missing else f"{letter} is not in {form.text}"
        raise ConfigError(f"{problem} (--numbers letter=value,...)", key="--solve")
    if left.has(sympy.Sum, sympy.harmonic) or any(power.exp.has(unknown) for power in left.atoms(sympy.Pow)):
        over = sympy.lambdify(unknown, left.rewrite(sympy.Sum), "mpmath")
        ends = [end for each in left.rewrite(sympy.Sum).atoms(sympy.Sum) for limit in each.limits for end in limit[1:]]
        exact = int if any(end.has(unknown) for end in ends) else mpmath.mpf  # of an exponent: powers are large
        roots = _least_whole(lambda count: over(exact(count)), value)
    else:
        roots = [root for root in sympy.solve(left, unknown) if root.is_real and root > 0]
    if not roots:
        raise ConfigError(f"no positive {letter} gives {value:g} {form.unit}", key="--solve")
    return float(min(roots))


MOST = 2**16
"""The largest whole number that is tried for a letter which is summed over, or stands in an exponent."""


def _least_whole(over: Callable[[int], float], value: float) -> list[int]:
    """The least whole number that brings a quantity to a value, or past it; none up to `MOST`. over: what it is beyond the value

    >>> _least_whole(lambda count: 3 * count - 10, 10), _least_whole(lambda count: -1, 10)
    ([4], [])
    """
    near = 1e-9 * abs(value)
    sign = -1 if over(1) > near else 1  # it falls, or it rises
    ends = (2**power for power in range(MOST.bit_length()))
    end = next((count for count in ends if sign * over(count) >= -near), None)
    if end is None:
        return []
    return [1 + bisect_left(range(1, end), -near, key=lambda count: sign * over(count))]
