"""Watches code train: what it allocates by phase and module, what it saves, computes and sends.

Nothing is asked of the code: modules, backward and optimizers are seen by the hooks that PyTorch has for all of them.
"""

import bisect
import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from loadgauge.pytorch.device.patches import removing, replaced
from loadgauge.pytorch.record.allocations import GRADIENTS, INPUTS, SAVED, WEIGHTS, Stream
from loadgauge.pytorch.record.collectives import Collective, collective
from loadgauge.pytorch.record.flops import formula
from loadgauge.pytorch.record.tracker import Tracker, next_node, node_key, own
from loadgauge.pytorch.trace.result import SavedTensor
from loadgauge.pytorch.trace.saved import Field, described, fields, nodes

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"


class Work(msgspec.Struct):
    """FLOPs of one operation, and where it ran."""

    flops: int
    op: str
    module: str
    node: int
    phase: str
    step: int


class Observer:
    """Records a training: allocations, FLOPs, collectives and saved tensors. Use `observing`."""

    def __init__(self, device: str | None, stacks: bool = False) -> None:
        self.tracker = Tracker(device, stacks)
        self.tracker.watchers.append(self._saw)
        self.work: list[Work] = []
        self.uncounted: Counter[str] = Counter()
        self.collectives: list[Collective] = []
        self.saved: list[SavedTensor] = []
        self.multiplied: set[int] = set()
        self.keepers: list[tuple[int, int]] = []
        """(number of a storage, number of the node of the graph that keeps it), for `saved`."""
        self.steps = 0
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.kinds: dict[str, str] = {}
        self.phase = FORWARD
        """The name of the phase that runs."""
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # a deleted model is gone
        self._roots: Counter[str] = Counter()
        self._switches: list[tuple[int, str]] = []
        self._within = 0
        self._noted = -1

    @property
    def stream(self) -> Stream:
        """The stream of allocations recorded so far."""
        return self.tracker.stream

    # -- modules -------------------------------------------------------------------------------------------------------

    def name(self, root: nn.Module, prefix: str = "") -> None:
        """Give the modules of a model their names, which begin with `prefix`; the first model's have none."""
        for path, module in root.named_modules():
            if module not in self._names:
                label = f"{prefix}.{path}" if prefix and path else path or prefix
                self._names[module] = label
                self.kinds.setdefault(label, type(module).__name__)
        self.tracker.claim(root.parameters(), WEIGHTS)
        self.tracker.claim(root.buffers(), WEIGHTS)

    def _enter(self, module: nn.Module, _: Any) -> None:
        entered = self._names.get(module)
        if entered is None:
            kind = type(module).__name__
            self._roots[kind] += 1
            first = not self._names
            label = kind if self._roots[kind] == 1 else f"{kind} {self._roots[kind]}"
            above = self._stack[-1] if self._stack else ""
            self.name(module, "" if first else f"{above}.{kind}" if above else label)
            entered = self._names[module]
        self._stack.append(entered)
        self._switch()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        label = self._names.get(module)
        if label is not None and label in self._stack:
            while self._stack.pop() != label:  # modules that an exception left
                pass
            self._switch()

    def _switch(self) -> None:
        name = self._stack[-1] if self._stack else ""
        self.tracker.module = name
        self._switches.append((next_node(), name))

    def module_of(self, node: int) -> str:
        """Return the name of the module whose forward made a node of the graph, by the node's sequence number."""
        if node < 0:
            return ""
        index = bisect.bisect_right(self._switches, node, key=lambda switch: switch[0]) - 1
        return self._switches[index][1] if index >= 0 else ""

    # -- operations ----------------------------------------------------------------------------------------------------

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        count = formula(func)
        if isinstance(count, str):
            self.uncounted[count] += 1
        elif count is not None:
            node, flops = node_key(torch._C._current_autograd_node()), count(args, kwargs, out)
            self.work.append(Work(flops, str(func._overloadpacket), self.tracker.module, node, self.phase, self.steps))
        elif func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            sent = collective(func, args, kwargs, out, self.phase, self.tracker.module, self.steps)
            if sent is not None:
                self.collectives.append(sent)
                if sent.kind == "all_gather":
                    self._gathered(func, [*tree_leaves(args), *tree_leaves(out)], sent.payload)

    def _gathered(self, func: Any, tensors: list[Any], payload: int) -> None:
        """Attributes the buffer that an all-gather fills to the all-gather."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.nbytes == payload:
                number = self.tracker.take(tensor, func)
                if number is not None and self.stream.records[number].category == "":
                    self.stream.records[number].op = func

    def sent(self, kind: str, ranks: int, payload: int) -> None:
        """Record a collective that PyTorch does not dispatch. ranks: size of its group; payload: bytes on this rank"""
        self.collectives.append(Collective(kind, ranks, payload, self.phase, self.tracker.module, self.steps))

    # -- phases --------------------------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """Begin a phase of the step, by its name: forward, backward or step."""
        self.phase = phase
        self.tracker.begin(phase)

    def _backward(self, original: Any) -> Any:
        """`torch.autograd.backward`, or `grad`, watched: it runs a phase of its own."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._within:
                return original(tensors, *args, **kwargs)
            self._note_saved([leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)])
            before, self._stack, self._within = self._stack, [], 1
            self._switch()
            self.begin(BACKWARD)
            try:
                return self.tracker.engine.run(lambda: original(tensors, *args, **kwargs))
            finally:
                self._stack, self._within = before, 0
                self._switch()
                for optimizer in list(self.optimizers):
                    self.tracker.claim_optimizer(optimizer)
                for module in list(self._names):
                    for parameter in module._parameters.values():
                        if parameter is not None and parameter.grad is not None:
                            self.tracker.claim([parameter.grad], GRADIENTS)
                self.begin(FORWARD)

        return backward

    def _note_saved(self, roots: list[torch.Tensor]) -> None:
        """Every tensor that the graph of these keeps, with the module that saved it. Of the graphs of the last step the
        largest stays."""
        if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
            return  # an older PyTorch does not say what is a checkpoint: to read it would run its region again
        before = (self.saved, self.multiplied, self.keepers) if self._noted == self.steps else ([], set(), [])
        self._noted = self.steps
        self.saved, self.multiplied, self.keepers = [], set(), []
        numbers: dict[int, int] = {}
        regions: set[int] = set()
        for node in sorted(nodes(roots), key=node_key):
            module = self.module_of(node_key(node))
            for field in fields(node):
                if not isinstance(field, Field):  # recomputed in backward
                    if id(field.region) not in regions:
                        regions.add(id(field.region))
                        for tensor in field.inputs:
                            self._keep("checkpoint", "input", tensor, module, numbers)
                elif field.packed is not None or field.tensor.dim():  # else a Python number
                    number = self._keep(field.node, field.field, field.tensor, module, numbers)
                    if number is not None:
                        self.keepers.append((number, node_key(node)))
                    if number is not None and field.node.startswith("MulBackward"):
                        self.multiplied.add(number)
        if kept_bytes(before[0]) > kept_bytes(self.saved):
            self.saved, self.multiplied, self.keepers = before

    def _keep(self, node: str, field: str, tensor: torch.Tensor, module: str, numbers: dict[int, int]) -> int | None:
        tensor = own(tensor)
        number = self.tracker.take(tensor, "external")
        if number is None:
            return None
        record = self.stream.records[number]
        storage = numbers.setdefault(number, len(numbers) + 1)
        owner = "" if record.category in ("", SAVED) and record.phase else record.category or INPUTS
        self.saved.append(described(tensor, node, field, storage, owner, module))
        return number

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizers.add(optimizer)
        self.tracker.claim_optimizer(optimizer)
        self.begin(STEP)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.tracker.claim_optimizer(optimizer)
        self.steps += 1
        self.begin(FORWARD)

    def finish(self) -> None:
        """Attributes what backward allocated to the module of the node that asked for it."""
        entries: list[Any] = [*self.stream.records, *self.work]
        for record in entries:
            if record.node >= 0 and not record.module:
                record.module = self.module_of(record.node)


def kept_bytes(saved: Iterable[SavedTensor]) -> int:
    """Bytes of the storages of saved activations, each once: neither parameters nor inputs."""
    return sum({tensor.storage: tensor.storage_nbytes for tensor in saved if not tensor.owner}.values())


@contextlib.contextmanager
def observing(device: str | None, stacks: bool = False) -> Iterator[Observer]:
    """Records the code in its body and yields the observer; preparation lasts until `begin` is called."""
    observer = Observer(device, stacks)
    handles = [
        modules.register_module_forward_pre_hook(observer._enter),
        modules.register_module_forward_hook(observer._leave, always_call=True),
        register_optimizer_step_pre_hook(observer._before_step),
        register_optimizer_step_post_hook(observer._after_step),
    ]
    watched = [(torch.autograd, name, observer._backward(vars(torch.autograd)[name])) for name in ("backward", "grad")]
    try:
        with removing(handles), replaced(*watched, observer.tracker.engine.hooks), observer.tracker:
            yield observer
    finally:
        observer.finish()
