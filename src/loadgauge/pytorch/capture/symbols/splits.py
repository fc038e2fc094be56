"""Over which ranks a captured model may be split, as data: what its class states, and what must divide."""

from collections.abc import Iterator
from typing import Any

import msgspec


class Splits(msgspec.Struct, frozen=True):
    """Matrices that tensor and expert parallelism may divide.

    tp: sizes that tensor-parallel ranks divide, by name; tp_closed, ep_closed: why there are no such ranks
    experts: routed experts of a layer, 0 where there are none; experts_by_tp: whether each is divided too
    tables: embedding tables are spread over ep ranks in place of experts, row by row where it must be
    plan: (path, style) of matrices that no class states, and that were recognised
    """

    tp: tuple[tuple[str, int], ...] = ()
    tp_closed: str = "its plan is not known"
    experts: int = 0
    ep_closed: str = "its plan is not known"
    experts_by_tp: bool = False
    plan: tuple[tuple[str, str], ...] = ()
    tables: bool = False

    def problems(self, *, tp: int = 1, ep: int = 1) -> Iterator[str]:
        """Why a model cannot be split so, one line each.

        >>> list(Splits((("num_key_value_heads", 2),), "").problems(tp=4))
        ['num_key_value_heads over tp: 2 over 4 leaves 2']
        """
        if tp > 1 and self.tp_closed:
            yield f"tp = {tp}: {self.tp_closed}"
        for name, size in self.tp if tp > 1 else ():
            if size % tp:
                yield f"{name} over tp: {size} over {tp} leaves {size % tp}"
        if ep > 1 and self.ep_closed:
            yield f"ep = {ep}: {self.ep_closed}"
        elif self.experts % ep and not self.tables:
            yield f"num_experts over ep: {self.experts} over {ep} leaves {self.experts % ep}"
        if tp > 1 and ep > 1:
            yield f"tp = {tp}, ep = {ep}: captured experts are divided by one of both"

    def within_experts(self, tp: Any, ep: Any) -> Any:
        """Ranks that one expert is divided over."""
        return tp if self.experts_by_tp and isinstance(tp, int) and ep == 1 else 1
