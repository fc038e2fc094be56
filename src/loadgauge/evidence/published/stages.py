"""How many layers each pipeline stage of a published run has."""

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.layers import block_layer, head_layer
from loadgauge.evidence.published.free_text import Flags, chunks_of
from loadgauge.evidence.published.models import Inexpressible
from loadgauge.evidence.published.source_rows import SourceRow


def stage_layers(
    run: SourceRow, flags: Flags, model: ModelSpec, pp: int, vpp: int, training: Training
) -> tuple[int, ...] | None:
    """Layers of each stage; None where they are equal.

    A layout that the row states is taken. Else layers that do not divide leave one fewer to the first and the last stage
    (or to the last alone), as embedding and loss count for one layer each; else the first stages have one more.
    """
    layers = model.num_hidden_layers
    if pp == 1:
        return None
    stated = flags.value("pipeline-model-parallel-layout") or flags.value("pp_layout")
    if stated and "L" in stated:
        return _from_layout(stated, pp, layers)
    ends = [flags.number(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    if any(end is not None for end in ends):
        return _ends_given(layers, pp, ends[0], ends[1])
    if flags.says("redistributed") or "redis" in flags.phrases:
        return _balanced(run, model, pp, training)
    if layers % (pp * vpp) == 0:
        return None
    chunks = _chunks(layers, pp * vpp)
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


def _from_layout(text: str, pp: int, layers: int) -> tuple[int, ...]:
    chunks = [count + (1 if further else 0) for count, further in chunks_of(text)]
    stages = tuple(sum(chunks[stage::pp]) for stage in range(pp))
    if len(chunks) % pp or sum(stages) != layers:
        raise Inexpressible(
            f"the pipeline layout {text!r} has {sum(stages)} layers in {len(chunks)} chunks, not {layers}"
        )
    return stages


def _ends_given(layers: int, pp: int, first: int | None, last: int | None) -> tuple[int, ...]:
    between = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if between < 1 or rest % between:
        raise Inexpressible(f"{rest} layers over {between} stages leaves {rest % max(between, 1)}")
    middle = (rest // between,) * between
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,)))


def _chunks(layers: int, count: int) -> list[int]:
    """Layers of each chunk, in order.

    >>> _chunks(22, 8), _chunks(61, 4), _chunks(126, 32)[:2]
    ([2, 3, 3, 3, 3, 3, 3, 2], [16, 15, 15, 15], [3, 4])
    """
    if (layers + 2) % count == 0:
        chunks = [(layers + 2) // count] * count
        chunks[0] -= 1
        chunks[-1] -= 1
    elif (layers + 1) % count == 0:
        chunks = [(layers + 1) // count] * count
        chunks[-1] -= 1
    else:
        chunks = [layers // count + (index < layers % count) for index in range(count)]
    return chunks


def _balanced(run: SourceRow, model: ModelSpec, pp: int, training: Training) -> tuple[int, ...]:
    """As many layers to the last stage, which has the head, as leaves the slowest stage the least work."""
    view = view_of(Layout(seq_len=run.seq_len or 1, micro_batch=1), training)
    head = float(head_layer(model, view).forward_flops)
    layer = float(block_layer(model.blocks[0], model.hidden_size, view).forward_flops)
    layers = model.num_hidden_layers

    def slowest(last: int) -> float:
        return max(last + head / layer, float(-(-(layers - last) // (pp - 1))))

    best = min(range(layers // pp, -1, -1), key=slowest)
    rest = layers - best
    # The first stages hold the most micro-batches, so they get no layer more than they must.
    others = [rest // (pp - 1) + (pp - 2 - index < rest % (pp - 1)) for index in range(pp - 1)]
    return (*others, best)
