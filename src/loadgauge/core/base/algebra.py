"""The only code that asks what kind of value a size is: int (exact), float64 array (search), SymPy symbol (closed form).

Everything else combines sizes with `+ - * /` and these functions, so that one description of a layer yields a
number, an array of layouts or an equation. Neither NumPy nor SymPy is imported here: a value can only be an array or a
symbol when its library is loaded already.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from loadgauge.core.base.errors import LayoutError

Size: TypeAlias = Any
"""int, float, float64 `numpy.ndarray` or `sympy.Expr`."""


Answer = TypeVar("Answer")
_PLAIN = frozenset({int, float, bool})
"""Types that need no library: most values by far, so they are asked for first."""


def remembered(most: int) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Return a decorator of a function of frozen values: its last `most` answers are kept, none of them for arrays.

    >>> remembered(8)(shard)(4096, 8)
    512
    """

    def decorate(of: Callable[..., Answer]) -> Callable[..., Answer]:
        kept = functools.lru_cache(most)(of)

        @functools.wraps(of)
        def again(*values: Any, **more: Any) -> Answer:
            try:
                return kept(*values, **more)
            except TypeError:  # an array has no hash
                return of(*values, **more)

        again.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
        return again

    return decorate


def _is_symbol(*values: Size) -> bool:
    sympy = sys.modules.get("sympy")
    return sympy is not None and any(isinstance(value, sympy.Basic) for value in values)


def _is_array(*values: Size) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and any(isinstance(value, numpy.ndarray) for value in values)


def shard(size: Size, ranks: Size, dimension: str = "dimension") -> Size:
    """Divide one dimension over ranks (never a product of dimensions).

    Ints stay exact; raises `LayoutError` where they do not divide, naming the `dimension`.

    >>> shard(4096, 8)
    512
    >>> shard(6, 4, "num_key_value_heads")
    Traceback (most recent call last):
    loadgauge.core.base.errors.LayoutError: num_key_value_heads = 6 cannot be divided over 4 ranks: remainder 2
    """
    if isinstance(size, int) and isinstance(ranks, int):
        if size % ranks:
            raise LayoutError(
                f"{dimension} = {size} cannot be divided over {ranks} ranks: remainder {size % ranks}",
                dimension=dimension,
                size=size,
                ranks=ranks,
            )
        return size // ranks
    return size / ranks


def spread(size: Size, ranks: Size) -> Size:
    """Return the largest share of `size` over `ranks` whose parts may be unequal; symbols give the even case.

    >>> spread(50257, 8), spread(2, 8)
    (6283, 1)
    """
    if _is_symbol(size, ranks):
        return size / ranks
    return ceil_div(size, ranks)


def ceil_div(size: Size, parts: Size) -> Size:
    """Return `size / parts`, rounded up.

    >>> ceil_div(7, 2)
    4
    """
    if type(size) in _PLAIN and type(parts) in _PLAIN:
        return -(-size // parts)
    if _is_symbol(size, parts):
        return sys.modules["sympy"].ceiling(size / parts)
    if _is_array(size, parts):
        # Much faster than //, and as exact for whole numbers below 2**53: their quotients differ by more than they round.
        return sys.modules["numpy"].ceil(size / parts)
    return -(-size // parts)


def next_power_of_two(size: Size) -> Size:
    """Return the smallest power of two that is not below `size`.

    >>> next_power_of_two(1), next_power_of_two(96), next_power_of_two(1024)
    (1, 128, 1024)
    """
    if type(size) is int:
        return 1 << (size - 1).bit_length()
    if _is_symbol(size, 1):
        sympy = sys.modules["sympy"]
        return 2 ** sympy.ceiling(sympy.log(size, 2))
    if _is_array(size, size):
        numpy = sys.modules["numpy"]
        return numpy.exp2(numpy.ceil(numpy.log2(size)))
    return 1 << (math.ceil(size) - 1).bit_length()


def common_divisor(first: Size, second: Size) -> Size:
    """Return the greatest common divisor.

    >>> common_divisor(12, 8)
    4
    """
    if type(first) is int and type(second) is int:
        return math.gcd(first, second)
    if _is_symbol(first, second):
        return sys.modules["sympy"].Function("gcd")(first, second)
    if _is_array(first, second):
        numpy = sys.modules["numpy"]
        return numpy.gcd(numpy.asarray(first, dtype="int64"), numpy.asarray(second, dtype="int64")).astype("float64")
    return math.gcd(int(first), int(second))


def same(first: Size, second: Size) -> bool:
    """Return whether two sizes are equal: numbers, expressions, or arrays in every element. For decisions about structure only.

    >>> same(300, 150 * 2), same(8, 64)
    (True, False)
    """
    if type(first) in _PLAIN and type(second) in _PLAIN:
        return bool(first == second)
    if _is_array(first, second):
        return first is second or bool((first == second).all())
    return bool(first == second)


def maximum(first: Size, second: Size) -> Size:
    """Return the larger of two sizes, element by element for arrays.

    >>> maximum(3, 4)
    4
    """
    if type(first) in _PLAIN and type(second) in _PLAIN:
        return max(first, second)
    if _is_symbol(first, second):
        return sys.modules["sympy"].Max(first, second)
    if _is_array(first, second):
        return sys.modules["numpy"].maximum(first, second)
    return max(first, second)


def minimum(first: Size, second: Size) -> Size:
    """Return the smaller of two sizes, element by element for arrays.

    >>> minimum(3, 4)
    3
    """
    if type(first) in _PLAIN and type(second) in _PLAIN:
        return min(first, second)
    if _is_symbol(first, second):
        return sys.modules["sympy"].Min(first, second)
    if _is_array(first, second):
        return sys.modules["numpy"].minimum(first, second)
    return min(first, second)


def several(ranks: Size) -> Size:
    """Return 1 where `ranks` is above one, else 0; a symbol means several.

    >>> several(1), several(8)
    (0, 1)
    """
    return 1 if _is_symbol(ranks) else where(ranks > 1, 1, 0)


def where(condition: Any, yes: Size, no: Size) -> Size:
    """Return `yes` where the condition holds, else `no`; element by element for arrays.

    >>> where(3 > 2, 10, 20)
    10
    """
    if condition is True or condition is False:
        return yes if condition else no
    if _is_symbol(condition, yes, no):
        return sys.modules["sympy"].Piecewise((yes, condition), (no, True))
    if _is_array(condition):
        return sys.modules["numpy"].where(condition, yes, no)
    return yes if condition else no


def square_root(value: Size) -> Size:
    """Return the square root.

    >>> square_root(16.0)
    4.0
    """
    if type(value) in _PLAIN:
        return math.sqrt(value)
    if _is_symbol(value):
        return sys.modules["sympy"].sqrt(value)
    return sys.modules["numpy"].sqrt(value)


def both_count(first: Size, second: Size) -> Size:
    """Return (x^3 + y^3)^(1/3): the time of a kernel that computes for x and moves bytes for y, neither hidden completely.

    >>> round(both_count(1.0, 0.1), 4), round(both_count(1.0, 1.0), 4)
    (1.0003, 1.2599)
    """
    cubes = first * first * first + second * second * second
    if type(cubes) in _PLAIN:
        return cubes ** (1 / 3)
    if _is_symbol(cubes):
        return sys.modules["sympy"].cbrt(cubes)
    return sys.modules["numpy"].cbrt(cubes)
