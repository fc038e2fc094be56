"""A fake `linear_sum_assignment` for detection losses: the pairs are unknown, their number is not.

`linear_sum_assignment` matches as many rows and columns of its matrix as the smaller number of the two, always.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

NAME = "linear_sum_assignment"


@contextlib.contextmanager
def assigned() -> Iterator[None]:
    """In the body, SciPy's assignment of a tensor without values pairs its first rows and columns, where SciPy is imported by then.

    Modules that are imported in the body get it too, and keep it; of anything but such a tensor it is SciPy's own.
    """
    scipy: Any = sys.modules.get("scipy.optimize")
    own = getattr(scipy, NAME, None)
    if own is None or getattr(own, "loadgauge", False):
        yield
        return

    def assign(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(cost_matrix, FakeTensor):
            return own(cost_matrix, *args, **kwargs)
        import numpy

        pairs = int(min(cost_matrix.shape))
        return numpy.arange(pairs), numpy.arange(pairs)

    assign.loadgauge = True  # type: ignore[attr-defined]
    holders = [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(NAME) is own]
    for module in holders:
        setattr(module, NAME, assign)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, NAME, own)
