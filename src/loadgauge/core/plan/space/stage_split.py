"""The best split of a model's layers over pipeline stages, by dynamic programming.

The slowest stage sets the pace, so the split with the fastest slowest stage is best; among those, the most even one (the
least sum of squares), and of those the one with the fewest layers in front, where 1F1B holds the most micro-batches.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from loadgauge.core.base.errors import LayoutError
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer

SLACK = 1e-12
"""Relative; sums of floats in another order differ in the last bits."""


def best_split(
    costs: Sequence[float],
    stages: int,
    first: float = 0.0,
    last: float = 0.0,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the layers of each stage of the best split.

    costs: of each layer; first, last: of the embedding and of the head, in the same unit; most: layers that fit on each
    stage


    Raises `LayoutError` where not every stage can have a layer.

    >>> best_split([1.0] * 14, 4, last=1.0)
    (3, 4, 4, 3)
    >>> best_split([1.0] * 8, 2, most=(3, 8))
    (3, 5)
    """
    layers = len(costs)
    limits = tuple(most) if most is not None else (layers,) * stages
    if stages < 1 or layers < stages or sum(limits) < layers or min(limits) < 1:
        raise LayoutError(f"{layers} layers cannot be split over {stages} stages with at most {max(limits)} each")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    ends = [(first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0) for stage in range(stages)]
    # Near enough to even, the split that is no slower is looked for.
    stops = [0, *(-(-layers * stage // stages) for stage in range(1, stages + 1))]
    even = all(stop - start <= most for most, (start, stop) in zip(limits, pairwise(stops), strict=True))
    costs = [before[stop] - before[start] + end for end, (start, stop) in zip(ends, pairwise(stops), strict=True)]
    ceiling = max(costs) * (1 + SLACK) if even else math.inf
    slowest = _solve(before, limits, ends, ceiling, max)[0]
    return _solve(before, limits, ends, slowest * (1 + SLACK), _squares)[1]


def _squares(total: float, cost: float) -> float:
    return total + cost * cost


def _solve(
    before: list[float],
    limits: tuple[int, ...],
    ends: list[float],
    ceiling: float,
    add: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of all stages, none of them above `ceiling`, and the layers of each.

    `behind[start]`: of the stages behind, for layers `start:`. From the last stage to the first, so that ties fall to
    fewer layers in front.
    """
    layers, stages = len(before) - 1, len(limits)
    behind: dict[int, tuple[float, tuple[int, ...]]] = {layers: (0.0, ())}
    for stage in reversed(range(stages)):
        here: dict[int, tuple[float, tuple[int, ...]]] = {}
        least, most = min(behind, default=layers), max(behind, default=0)
        for start in range(stage, layers - (stages - 1 - stage)):
            if stage and before[start] > stage * ceiling * (1 + SLACK):
                break  # more than the stages in front may have
            best: tuple[float, tuple[int, ...]] | None = None
            for stop in range(max(start + 1, least), min(start + limits[stage], most) + 1):
                rest = behind.get(stop)
                if rest is None:
                    continue
                cost = before[stop] - before[start] + ends[stage]
                # A stage with yet more layers costs more, whatever those behind it cost.
                if cost > ceiling or (best is not None and add(0.0, cost) >= best[0] * (1 - SLACK)):
                    break
                value = add(rest[0], cost)
                if best is None or value < best[0] * (1 - SLACK):
                    best = value, (stop - start, *rest[1])
            if best is not None:
                here[start] = best
        behind = here
    if 0 not in behind:
        raise LayoutError("no split of the layers keeps to the limits")
    return behind[0]


@functools.lru_cache(maxsize=512)
def balanced(model: ModelSpec, stages: int, seq_len: int) -> tuple[int, ...]:
    """Return the layers of each stage of the best split by the FLOPs of layers, embedding and head.

    >>> from loadgauge.core.families.catalogue import model
    >>> balanced(model("llama-3.1-405b"), 16, 8192)  # as it was trained (source: dubey2024)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    view = View.of(seq_len, 1)
    layers = [block_layer(block, model.hidden_size, view) for block in model.blocks]
    work = [float(layer.forward_flops + layer.backward_flops) for layer in layers]
    ends = [embedding_layer(model, view), head_layer(model, view)]
    begin, end = (float(layer.forward_flops + layer.backward_flops) for layer in ends)
    return best_split([work[kind] for kind in model.pattern], stages, begin, end)
