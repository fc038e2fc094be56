"""Simulates one rank of many in one process: FSDP, DDP, tensor, sequence and pipeline parallel code runs unchanged.

PyTorch's fake process group answers every collective at once, with nothing. What would look at values, or count shapes
of the whole instead of the rank's own, is kept from doing so. Private parts of PyTorch are patched (`simulated.TESTED`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.core.base.errors import NotModelled, refuse
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.device.simulated import TESTED
from loadgauge.pytorch.record.allocations import GRADIENTS
from loadgauge.pytorch.record.observe import Observer
from loadgauge.pytorch.record.tracker import Tracker

MESH = (
    "__init__", "_flatten", "__getitem__", "_concatenate", "_unflatten", "_get_all_submeshes", "get_coordinate",
    "_init_process_groups",
)  # fmt: skip
"""What a device mesh does with small real tensors of ranks."""


@contextlib.contextmanager
def fake_process_group(gpus: int, rank: int, observer: Observer) -> Iterator[None]:
    """A fake process group of `gpus` ranks, of which this process is `rank`; code that would create its own gets this
    one. Raises ConfigError for a rank that is not there, or where a process group exists."""
    refuse(not 0 <= rank < gpus, f"rank {rank} is not one of {gpus}")
    refuse(dist.is_initialized(), "a process group is already there: a dry run needs a process of its own")
    try:
        from torch.distributed.tensor import _redistribute  # noqa: F401
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: F401
    except ImportError:
        raise NotModelled(
            f"a rank of several GPUs is simulated with PyTorch {TESTED[-1]} (this is {torch.__version__}): older releases have no"
            " collectives for a simulated device, 2.4 and 2.5 no FSDP2 in torch.distributed.fsdp"
        ) from None

    devices = {"cpu", "cuda", observer.tracker.device or "cpu"}
    backends = ",".join(f"{device}:fake" for device in sorted(devices))
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=gpus)
    environment = {"RANK": rank, "WORLD_SIZE": gpus, "LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": 8}
    try:
        with contextlib.ExitStack() as patches:
            patches.callback(_forget)
            _forget()
            patches.enter_context(_environment({name: str(value) for name, value in environment.items()}))
            patches.enter_context(replaced(*_patches(observer)))
            yield
    finally:
        dist.destroy_process_group()


def _forget() -> None:
    """Clears the sharding caches of DTensor, which hold process groups that no longer exist."""
    from torch.distributed.tensor import _redistribute, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        again = getattr(getattr(_redistribute, name, None), "cache_clear", None)
        if again is not None:
            again()


def _patches(observer: Observer) -> Iterator[tuple[Any, str, Any]]:
    import torch.distributed.device_mesh as meshes
    import torch.nn.parallel.distributed as ddp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    yield dist, "init_process_group", lambda *_, **__: None
    yield dist, "destroy_process_group", lambda *_, **__: None
    yield dist, "all_gather_object", _everybodys
    yield dist, "gather_object", lambda item, value=None, *_, **__: None if value is None else _everybodys(value, item)
    yield dist, "broadcast_object_list", lambda *_, **__: None
    yield dist, "monitored_barrier", lambda *_, **__: None
    for name in MESH:
        value = vars(DeviceMesh).get(name)
        if isinstance(value, staticmethod | classmethod):
            yield DeviceMesh, name, type(value)(_with_values(value.__func__))
        elif value is not None:
            yield DeviceMesh, name, _with_values(value)
    mesh = vars(DeviceMesh).get("mesh")
    if isinstance(mesh, property) and mesh.fget is not None:
        yield DeviceMesh, "mesh", property(_with_values(mesh.fget))
    patched = _with_values(meshes.init_device_mesh)
    yield meshes, "init_device_mesh", patched
    yield dist, "init_device_mesh", patched
    # DTensor works out the sharding of an operation by running it on the shapes of the whole.
    yield (
        ShardingPropagator,
        "_propagate_tensor_meta_non_cached",
        _unseen(ShardingPropagator._propagate_tensor_meta_non_cached, observer.tracker),
    )
    # DDP compares the values of parameters between ranks before it begins.
    yield ddp, "_verify_param_shape_across_processes", lambda *_, **__: True
    yield ddp, "_sync_module_states", lambda *_, **__: None
    yield ddp.DistributedDataParallel, "__init__", _hooked(ddp.DistributedDataParallel.__init__, observer)
    for name in HELD:
        if name in vars(dist.ProcessGroup):
            yield dist.ProcessGroup, name, _held(vars(dist.ProcessGroup)[name], observer.tracker.device == "cpu")
    yield from _pipeline()


HELD = (
    "send", "recv", "recv_anysource", "allreduce", "reduce", "broadcast", "allgather", "_allgather_base", "gather",
    "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base",
)  # fmt: skip


def _held(original: Any, longer: bool) -> Any:
    def begun(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        return None if work is None else _Work(work, args, longer)

    return begun


class _Work:
    """A call under way: the fake group's holds nothing, NCCL's holds its tensors until somebody has waited for it, and
    gloo's (`longer`) for as long as it is there itself."""

    def __init__(self, work: Any, tensors: Any, longer: bool) -> None:
        self._work, self._tensors, self._longer = work, tensors, longer

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self._longer:
            self._tensors = None
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _everybodys(value: list[Any], item: Any, *_: Any, **__: Any) -> None:
    """Take this rank's value for other ranks."""
    value[:] = [item] * len(value)


def _hooked(original: Any, observer: Observer) -> Any:
    """The C++ of DDP waits for a result that the fake group does not give; a hook in its place gives one, and takes
    down the all-reduce."""

    @functools.wraps(original)
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        original(self, module, device_ids and [0], None if output_device is None else 0, **kwargs)

        def reduce(_: Any, bucket: Any) -> Any:
            buffer = bucket.buffer()
            observer.tracker.claim([buffer], GRADIENTS)
            observer.sent("all_reduce", self.process_group.size(), buffer.nbytes)
            done: Any = torch.futures.Future()
            done.set_result(buffer)
            return done

        reduce.__annotations__ = {}
        self.register_comm_hook(None, reduce)
        self.reducer = _Reducer(self.reducer)

    return init


class _Reducer:
    """DDP's reducer, but for the new order of buckets after the first step, of which the ranks tell each other: the
    buckets stay as they were."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _pipeline() -> Iterator[tuple[Any, str, Any]]:
    """Pipeline schedules ask the other stages how they run; here every stage's shapes are given beforehand."""
    try:
        from torch.distributed.pipelining import schedules, stage
    except ImportError:
        return

    modes: Any = getattr(stage, "InferenceMode", None)
    if modes is None:
        return

    def static_shapes(self: Any, stages: Any, *_: Any, **__: Any) -> None:
        for stage_ in stages:
            stage_._inference_mode = modes.STATIC

    for kind in vars(schedules).values():
        if isinstance(kind, type) and "_warmup_p2p" in vars(kind):
            yield kind, "_warmup_p2p", static_shapes


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily(), _disable_current_modes():
            return original(*map(_ranks, args), **{name: _ranks(value) for name, value in kwargs.items()})

    return real


def _ranks(value: Any) -> Any:
    """A fake tensor of ranks as a real one: what it was made from, or 0, 1, ..., as `init_device_mesh` makes it."""
    if not isinstance(value, FakeTensor):
        return value
    return (
        torch.arange(value.numel(), dtype=value.dtype).view(value.shape) if value.constant is None else value.constant
    )


def _unseen(original: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    @functools.wraps(original)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        tracker.suspended += 1
        try:
            return original(*args, **kwargs)
        finally:
            tracker.suspended -= 1

    return quiet


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    import os

    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
