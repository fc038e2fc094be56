"""`At`: a point of a step, by all that copies of weights and gradients at it depend on."""

from typing import Literal, NamedTuple

from loadgauge.core.estimate.schedule.stages import Key

Pass = Literal[
    "enter",
    "forward",
    "gather",
    "head",
    "loss",
    "reduce",
    "prediction",
    "backward",
    "embedding",
    "ends",
    "clip",
    "step",
]


class At(NamedTuple):
    """A point of a step, described by all that the gathered copies at it depend on.

    doing: the gathering of an embedding that is a unit of its own, the pass of a layer, the gathering of a head that is one,
        the head's forward, the loss's backward,
        the reduction of that head's gradients, the backward of multi-token prediction, of a layer
        or of the embedding, the reduction of the gradients of embedding and head, what is done with the gradients when
        backward is over, or the optimizer step
    layer: the kind of layer at work; ahead: of the one whose backward comes next; before: of the one whose backward was
        before
    held: how many layers of each kind have begun their forward and not finished their backward
    """

    doing: Pass = "forward"
    layer: Key | None = None
    ahead: Key | None = None
    before: Key | None = None
    held: tuple[tuple[Key, int], ...] = ()
