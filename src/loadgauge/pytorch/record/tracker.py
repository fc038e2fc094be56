"""Sees every operation that PyTorch dispatches, on real or fake tensors, and records what it allocates.

A storage is live from the operation that returns it until Python and C++ have both let it go, which a weak reference
tells. What an operation allocates and frees inside itself is not seen (its kernel's scratch).
"""

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from loadgauge.pytorch.device.kernels.dtensor_foreach import Parts
from loadgauge.pytorch.device.kernels.streams import current
from loadgauge.pytorch.device.read import RUNS_BACKWARD
from loadgauge.pytorch.record.allocations import GRADIENTS, OPTIMIZER, SAVED, WEIGHTS, Frame, Record, Stream
from loadgauge.pytorch.record.sizes import present

_DEVICE_OF = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_CLONE = torch.ops.aten.clone.default
_EMPTY_LIKE = torch.ops.aten.empty_like.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_ALIAS = torch.ops.aten.alias.default
_FAKE = torch._C._TorchDispatchModeKey.FAKE
UNSHARD = "fsdp::unshard"
"""Stands for the operation that FSDP gets memory with, for weights that it has gathered."""
Watcher = Callable[[Any, Any, Any, Any], None]
"""Called with (operation, arguments, keywords, result) after every operation."""


class Tracker(TorchDispatchMode):
    """Writes a `Stream`. `device`: only storages on devices of this type count; None: all of them.

    `stacks`: record the lines of the program that ask for each storage.

    Use it as a context manager around the code; mark phases with `stream.begin` and claim tensors with `claim`.
    """

    def __init__(self, device: str | None = None, stacks: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = Stream()
        self.stacks = stacks
        self.device = device
        self.module = ""
        self.phase = 0
        self.watchers: list[Watcher] = []
        self.suspended = 0
        self.parts = True
        """Whether optimizers work on the parts of sharded weights without asking DTensor."""
        self.operations = 0
        self.engine = Engine()
        self.elsewhere = [0, 0]
        """Bytes of storages on other devices: now, and at most."""
        self.rows: set[int | None] = set()
        """Storages of sparse tensors that were claimed."""
        self._known: dict[int, list[Any]] = {}
        self._others: dict[int, Any] = {}
        self._fake: Any = None
        self._hooks: Any = None
        self._resize: Any = None

    # -- what the caller says ------------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """Begin a phase, by its name; phase 0, before the first one, is the preparation."""
        self.phase += 1
        self.stream.begin(phase)

    def claim(self, tensors: Iterable[Any], category: str) -> None:
        """Says what tensors are for; unknown ones are recorded as live from now on. A claim is not changed later,
        except that of an activation."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.layout is torch.sparse_coo:
                self.claim((tensor._indices(),), category)
                self.rows |= {self.take(part, "external") for part in (tensor, tensor._indices())} - {None}
            number = self.take(tensor, "external")
            if number is not None:
                record = self.stream.records[number]
                if record.category in ("", SAVED):
                    record.category = category

    def claim_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Claim the parameters, gradients and states of an optimizer, each under its category."""
        for group in optimizer.param_groups:
            self.claim(group["params"], WEIGHTS)
            self.claim((parameter.grad for parameter in group["params"]), GRADIENTS)
        for state in optimizer.state.values():
            self.claim(state.values() if isinstance(state, Mapping) else (), OPTIMIZER)

    def live(self) -> int:
        """Return the bytes that are live now."""
        return sum(entry[2] for entry in self._known.values())

    # -- what PyTorch says ---------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would wrap every call below; `torch.compile` compiles nothing under a mode like this one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records the storages of its results."""
        try:
            return self._recorded(func, types, args, kwargs)
        except Exception as error:
            if sys._getframe(1).f_code.co_name != RUNS_BACKWARD:
                raise
            return self.engine.keep(error)

    def _recorded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and kind.__name__ == "DTensor":
                local = Parts(func, args) if self.parts else None
                if local is None or not local.ready:
                    return NotImplemented
                return local.wrapped(self._recorded(func, (), local.args, kwargs))
        if func is _WAIT and self._fake is not None:
            return args[0]  # its fake would be a new tensor, where a real one is the same
        if func is _CLONE and args[0].layout is torch.sparse_coo:
            parts, size = (args[0]._indices(), args[0]._values()), args[0].shape
            func, kwargs = _SPARSE, None
            args = (*(parts if _taken_over(args[0]) else (part.clone() for part in parts)), size)
        out = self._run(func, args, kwargs)
        if self.suspended or torch._C._get_dispatch_mode(_FAKE) is not self._fake:
            return out
        self.operations += 1
        self._take_all(out, func)
        for watcher in self.watchers:
            watcher(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation as PyTorch would without a mode that sees it."""
        if func in IN_PLACE and in_place(func, args, self.stream.records, self._number(args[0])):
            func = IN_PLACE[func]
            changed = func(*args, **kwargs) if kwargs else func(*args)
            # Autograd takes the result of a sum in forward for another tensor than what was added to.
            return _ALIAS(changed) if torch.is_grad_enabled() else changed
        alone = made_alone(func, args, kwargs)
        if alone is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        workspaces = [_EMPTY_LIKE(args[0]) for _ in range(sum(alone))]
        for workspace in workspaces:
            self.take(workspace, func)
        out = func(*args, **kwargs) if kwargs else func(*args)
        return _AS_STRIDED(workspaces[0], (), ()) if alone[1] else out

    def _number(self, tensor: Any) -> int | None:
        try:
            entry = self._known.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None
        return None if entry is None else entry[0]

    def _take_all(self, out: Any, func: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.take(out, func)
        elif isinstance(out, tuple | list):
            for item in out:
                self._take_all(item, func)

    def take(self, tensor: torch.Tensor, op: Any) -> int | None:
        """The number of a tensor's storage; a new storage is recorded as an allocation by `op`. None off the device.

        Of a sparse tensor it is that of its values; that of its indices is recorded too.
        """
        if tensor.layout is torch.sparse_coo:
            self.take(tensor._indices(), op)
            return self.take(tensor._values(), op)
        if type(tensor) is FakeTensor:
            device = tensor.fake_device
        else:
            tensor = own(tensor)
            device = tensor.device
        if self.device is not None and device.type != self.device:
            self._note_elsewhere(tensor)
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
            return None
        key = storage._cdata
        nbytes = storage.nbytes()
        entry = self._known.get(key)
        stream = self.stream
        if entry is not None:
            if nbytes is not entry[2] and nbytes != entry[2]:
                self._change(entry, nbytes)
            return entry[0]  # type: ignore[no-any-return]
        number = len(stream.records)
        node = torch._C._current_autograd_node()
        stream.records.append(
            Record(nbytes, op, self.module, self.phase, tensor.shape, tensor.dtype, node_key(node), current().stream_id)
        )
        if self.stacks:
            stream.stacks[number] = stack(node)
        entries, ids, changes = self._known, stream.ids, stream.changes

        def released(_: Any) -> None:
            gone = entries.pop(key, None)
            if gone is not None and present(gone[2]):
                ids.append(number)
                changes.append(-gone[2])

        entries[key] = [number, weakref.ref(storage, released), nbytes]
        if present(nbytes):
            ids.append(number)
            changes.append(nbytes)
        return number

    def _note_elsewhere(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key, nbytes, total = storage._cdata, storage.nbytes(), self.elsewhere
        if key in self._others or tensor.device.type == "meta":
            return

        def released(_: Any) -> None:
            self._others.pop(key, None)
            total[0] -= nbytes

        self._others[key] = weakref.ref(storage, released)
        total[0] += nbytes
        total[1] = max(total)

    def _change(self, entry: list[Any], nbytes: int) -> None:
        self.stream.ids.append(entry[0])
        self.stream.changes.append(nbytes - entry[2])
        entry[2] = nbytes
        record = self.stream.records[entry[0]]
        record.nbytes = max(record.nbytes, nbytes)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Marks a tensor as saved for backward, unless it existed before the first step, and returns it."""
        number = self.take(tensor, "external")
        if number is not None:
            record = self.stream.records[number]
            if not record.category and record.phase:
                record.category = SAVED
        # A node that holds its own result, and is held by it, would stay where backward never comes.
        own_result = tensor.grad_fn is not None and node_key(tensor.grad_fn) == next_node() - 1
        return tensor.detach() if own_result else tensor

    def __enter__(self) -> Self:
        self._fake = torch._C._get_dispatch_mode(_FAKE)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self._hooks.__enter__()
        resize = torch.UntypedStorage.resize_
        self._resize = resize
        entries, change = self._known, self._change

        def resized(storage: Any, size: int) -> Any:
            # FSDP frees and regains unsharded weights in this way.
            result = resize(storage, size)
            entry = entries.get(storage._cdata)
            if entry is not None and storage.nbytes() != entry[2]:
                change(entry, storage.nbytes())
                if size:
                    self.stream.records[entry[0]].op = UNSHARD
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def own(tensor: Any) -> Any:
    """The local part of a DTensor, or the tensor that an asynchronous collective fills; other tensors unchanged."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.elem if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


OWN = str(Path(__file__).parents[1])


def stack(node: Any) -> tuple[Frame, ...]:
    """The lines that are being run, innermost first, as CUDA's allocator records them: in backward, which CUDA runs on
    a thread of its own, the node of the graph precedes what hooks run. Lines of this package are left out."""
    frames = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if node is not None and code.co_name == "backward" and code.co_filename.endswith("_tensor.py"):
            break
        if not code.co_filename.startswith(OWN) and not code.co_filename.endswith(_DISPATCH):
            frames.append(Frame(code.co_filename, line, code.co_name))
    if node is not None:
        frames.append(Frame("??", 0, f"torch::autograd::generated::{node.name()}::apply"))
    return tuple(frames)


_DISPATCH = ("_python_dispatch.py", "_ops.py", "fake_tensor.py", "overrides.py", "_device.py")


_SPARSE = torch.ops.aten._sparse_coo_tensor_unsafe.default


def _taken_over(gradient: torch.Tensor) -> bool:
    """Whether a sparse gradient becomes a parameter's as it is. That is so for one without other owners, and a mode that sees
    operations is one more owner, for which PyTorch makes a copy (torch/csrc/autograd/functions/accumulate_grad.h)."""
    node = torch._C._current_autograd_node()
    return node is not None and "AccumulateGrad" in node.name() and gradient._values().is_contiguous()


def node_key(node: Any) -> int:
    """The sequence number of a node of the graph; -1 outside backward."""
    return -1 if node is None else int(node._sequence_nr())


next_node: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
"""The sequence number that the next node of the graph will have."""


class Engine:
    """Keeps the first error of a backward."""

    def __init__(self) -> None:
        self._stopped: Exception | None = None

    def keep(self, error: Exception) -> Exception:
        """Keep an error; what is returned is to be given to the engine, which takes it for nothing that it knows."""
        self._stopped = self._stopped or error
        return error

    def run(self, backward: Callable[[], Any]) -> Any:
        """Call what runs the engine. Raises the error that was kept meanwhile.

        >>> def backward():
        ...     raise RuntimeError(f"cannot take {engine.keep(KeyError('rows'))!r}")
        >>> engine = Engine()
        >>> engine.run(backward)
        Traceback (most recent call last):
        KeyError: 'rows'
        """
        try:
            return backward()
        except (RuntimeError, TypeError):
            stopped, self._stopped = self._stopped, None
            if stopped is None:
                raise
            raise stopped from None

    @property
    def hooks(self) -> tuple[Any, str, Any]:
        """In place of PyTorch's function that takes hooks of saved tensors: errors of those that give a tensor back are kept.

        They run a checkpointed region again. Read by the engine, a hook that gives no tensor is an error of C++.
        """
        push = torch._C._autograd._push_saved_tensors_default_hooks

        def pushed(pack: Any, unpack: Any) -> None:
            @functools.wraps(unpack)
            def kept(packed: Any) -> Any:
                try:
                    return unpack(packed)
                except Exception as error:
                    return self.keep(error)

            push(pack, kept)

        return torch._C._autograd, "_push_saved_tensors_default_hooks", pushed


aten = torch.ops.aten
_ADD = aten.add.Tensor
IN_PLACE = {
    _ADD: aten.add_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
"""Operations that such code has in both kinds."""
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_HELD, _STORED = 4, 2
"""How many hold a tensor and its storage where only a variable of C++ does: `torch.Tensor._use_count`. One in Python makes it 3."""
_ALONE = {aten.logsumexp.default: (1, False), aten.huber_loss.default: (1, False), aten.mse_loss.default: (1, True),
          aten.smooth_l1_loss.default: (1, True), aten.binary_cross_entropy.default: (0, True)}  # fmt: skip
"""Operations whose code, the same for CPU and CUDA, makes tensors as large as their input: how many that it drops before
it returns, and whether the result, one number, stays in the storage of as many."""


def in_place(func: Any, args: Any, records: list[Record], number: int | None) -> bool:
    """Return whether PyTorch has the operation write into its first argument, of which nothing else is then seen.

    records, number: all allocations, and which one is that of the first argument
    """
    held = args[0]
    if number is None or type(held) not in (FakeTensor, torch.Tensor) or held.layout is not torch.strided:
        return False
    node, record = torch._C._current_autograd_node(), records[number]
    alone = held._use_count() == _HELD and torch._C._storage_Use_Count(held.untyped_storage()._cdata) == _STORED
    if node is None or sys._getframe(4).f_code.co_name != RUNS_BACKWARD:
        # `torch.nn.functional.linear` of rows that do not lie behind one another adds its bias so.
        return func is _ADD and alone and record.op in _PRODUCTS and args[1].dim() == 1 < held.dim()
    if torch.is_grad_enabled():
        return False
    same = record.node == node._sequence_nr()
    if func is not _ADD:  # the gradient of what an operation picks: zeros, of which some become numbers
        return same and (record.op in _ZEROS or (func is aten.masked_fill.Scalar and alone))
    # Gradients that come together. A sum within the operation that is differentiated is of what that operation made itself.
    whole = record.nbytes == held.numel() * held.element_size()  # each byte once
    return alone and whole and (not same or len(set(node.next_functions)) < len(node.next_functions))


def made_alone(func: Any, args: Any, kwargs: Any) -> tuple[int, bool] | None:
    """How many tensors as large as its input an operation makes and drops, and whether its result keeps the storage of one."""
    alone = _ALONE.get(func)
    if alone is None or func is aten.logsumexp.default:
        return alone
    position = 3 if func is aten.binary_cross_entropy.default else 2
    reduction = args[position] if len(args) > position else (kwargs or {}).get("reduction", 1)
    return alone if reduction else None
