"""Values that are worked out once: `Memo`, and `ByIdentity` for keys that cannot be keys themselves."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ByIdentity:
    """A key that equals only that of the very same object, which it keeps alive: for arrays and records of arrays.

    >>> one, other = [0], [0]
    >>> ByIdentity(one) == ByIdentity(one), ByIdentity(one) == ByIdentity(other)
    (True, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value


class Memo(dict[object, Any]):
    """Values by key, each made when it is first needed.

    >>> memo = Memo()
    >>> memo.once("a", lambda: 1), memo.once("a", lambda: 2)
    (1, 1)
    """

    def once(self, key: object, make: Callable[..., T], *arguments: object) -> T:
        """Return the value of a key; `make` is called with the arguments where there is none yet."""
        if key not in self:
            self[key] = make(*arguments)
        value: T = self[key]
        return value
