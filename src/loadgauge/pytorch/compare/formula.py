"""The estimate, layer by layer, of a job that is also traced and measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.memory.ledger import kept_by
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer, rotary_layer
from loadgauge.core.layers.embedding_head import mask_bytes
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Recompute
from loadgauge.pytorch.trace.torch_run import TorchRun

BLOCK, END = "block {}", "ends"


class Line(NamedTuple):
    """A tensor [bytes] or an operation [FLOP]. `place`: the block, or the ends of the model; `part`: the half of the block."""

    place: str
    part: str
    op: str
    nbytes: int


class Formula:
    """The estimate of a traced job, and its layers. Raises NotModelled for what has no formula.

    device: that it is traced as on. A CPU's fused attention takes float32 with fewer key heads than heads (source: pytorch 2.13,
    `native/transformers/attention.cpp`).
    """

    def __init__(self, config: Any, run: TorchRun, device: str = "cuda") -> None:
        if run.keep:
            raise NotModelled("selective checkpointing by a policy over operations of PyTorch has no formula")
        self.spec: ModelSpec = from_dict(config.to_dict())
        self.run, self.layout, self.training = run, run.layout, run.training
        if device == "cpu":
            kernels = msgspec.structs.replace(run.training.kernels, writes_groups=False)
            self.training = msgspec.structs.replace(run.training, kernels=kernels)
        self.policy = self.layout.recompute
        self.view = View.of(run.layout.seq_len, run.layout.micro_batch, kernels=self.training.kernels)

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The estimate of the job. Raises NotModelled."""
        return estimate(self.spec, self.layout, self.training)

    def layers(self) -> Iterator[tuple[str, Layer, Recompute]]:
        """Every layer of the model in order, and the operations of it that are recomputed: (place, layer, operations)."""
        blocks = [block_layer(block, self.spec.hidden_size, self.view) for block in self.spec.blocks]
        again = [applied(self.policy, layer) if self.policy.mode != "none" else NOTHING for layer in blocks]
        yield END, embedding_layer(self.spec, self.view), NOTHING
        yield END, rotary_layer(self.spec, self.view), NOTHING
        for number, kind in enumerate(self.spec.pattern):
            yield BLOCK.format(number), blocks[kind], again[kind]
        yield END, head_layer(self.spec, self.view), NOTHING

    def saved(self) -> list[Line]:
        """The tensors kept for backward [bytes], each at the operation that keeps it first."""
        result = []
        for place, layer, again in self.layers():
            for op, tensor in kept_by(layer, again):
                result.append(Line(place, _part(op), f"{op} keeps {tensor.name}", int(tensor.nbytes)))
        masks = int(mask_bytes(self.spec, self.view)) if self.policy.mode == "full" else 0
        if masks:
            result.append(Line(END, "attention", "checkpoints keep the mask", masks))
        return result

    def flops(self) -> list[Line]:
        """FLOPs of a step by operation, recomputation included."""
        result = []
        for place, layer, again in self.layers():
            for operation in layer:
                runs = 2 if operation.name in again else 1
                flops = operation.forward_flops * runs + operation.backward_flops + operation.rerun_flops
                if flops:
                    result.append(Line(place, _part(operation.name), operation.name, int(flops * self.run.accumulate)))
        return result


def _part(operation: str) -> str:
    half, _, rest = operation.partition(".")
    return "norm" if rest.split(".")[0].endswith("norm") else half
