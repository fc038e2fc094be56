"""`Trace`: what came of two traced steps, as the process that asked for it reads it, without PyTorch."""

from importlib import import_module
from typing import Any

import msgspec

from loadgauge.core.base.by_key import largest_first
from loadgauge.pytorch.device.untraced import Hidden
from loadgauge.pytorch.record.allocations import Moment, Piece


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor kept for backward. `nbytes` are the bytes of `shape` [elements]; `storage_nbytes` what it holds in
    memory: a view holds the whole of its storage. `owner` says what else holds the storage: an input, a parameter, the
    result, or that it is a plain `number` of the program, on the host; nothing else holds it where it is "". `made_by`: the part
    of an expression whose value it is, or `inside` which it was made. `stride` [elements] is empty where it is contiguous.
    """

    node: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    storage: int
    storage_nbytes: int
    owner: str = ""
    module: str = ""
    made_by: str = ""
    stride: tuple[int, ...] = ()


class Sum(msgspec.Struct, frozen=True):
    """The calls of one kind in groups of one size: their number, and their bytes in total."""

    kind: str
    ranks: int
    calls: int
    payload: int


class Advice(msgspec.Struct, frozen=True):
    """An operator of `loadgauge.train.fused`, the modules it fits, and the saved activations it would avoid [bytes]."""

    operator: str
    modules: tuple[str, ...]
    saves: int
    why: str


class Flops(msgspec.Struct, frozen=True):
    """FLOPs of one step, a multiply-add as 2. `uncounted`: operations that look as if they should count, with calls."""

    total: int
    by_phase: dict[str, int]
    by_module: dict[str, int]
    by_op: dict[str, int]
    uncounted: dict[str, int]


class Trace(msgspec.Struct, frozen=True):
    """Memory, work and communication of a training step; of the last step traced unless stated otherwise [bytes].

    `peak` is in tensors' own bytes; `allocated` the same with each storage rounded as CUDA's allocator does (on a CPU
    it does not round). `at_peak` is what was live then, alike storages together. `saved` are the tensors that the largest
    graph of the last step kept; `saved_nbytes` counts each of their storages once, without parameters and inputs; 0
    where no backward ran. `elsewhere`: the most that lay on other devices (tensors of the CPU, under `cuda`).
    """

    target: str
    device: str
    torch: str
    steps: int
    peak: Moment
    allocated: int
    step_peaks: tuple[int, ...]
    phases: dict[str, int]
    at_peak: tuple[Piece, ...]
    timeline: tuple[Moment, ...]
    saved: tuple[SavedTensor, ...]
    saved_nbytes: int
    flops: Flops
    collectives: tuple[Sum, ...]
    attention: dict[str, int]
    hidden: tuple[Hidden, ...]
    advice: tuple[Advice, ...]
    assumed: dict[str, str]
    not_counted: tuple[str, ...]
    events: int
    seconds: float
    elsewhere: int = 0

    def __str__(self) -> str:
        """The text of `loadgauge trace`."""
        text: str = import_module("loadgauge.pytorch.text.trace").text(self)
        return text

    def to_dict(self) -> dict[str, Any]:
        """The document of `loadgauge trace --json`, as plain values [bytes, FLOP]."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    @property
    def kept(self) -> dict[str, int]:
        """Bytes of saved activations by module, each storage once, at the module that saved it first."""
        first = {tensor.storage: tensor for tensor in reversed(self.saved) if not tensor.owner}
        return largest_first((tensor.module, tensor.storage_nbytes) for tensor in reversed(first.values()))
