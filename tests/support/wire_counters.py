"""What a process asks of the others, and what it sends them: PyTorch's dispatcher, and the sockets' own counters."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# -- what the sockets sent -----------------------------------------------------------------------------------------------

# struct tcp_info of linux/tcp.h, since Linux 4.19
STATE, UNSENT, RECEIVED, SENT = 0, 144, 128, 200
ESTABLISHED = 1


def sockets() -> list[bytes]:
    """The kernel's `tcp_info` of every connection that this process holds."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:
            continue
        with one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if info[STATE] == ESTABLISHED:
                    found.append(info)
    return found


def counted() -> tuple[int, int]:
    """(bytes sent, bytes received) of this process so far, without TCP's headers and what was sent again."""
    for _ in range(2000):
        infos = sockets()
        if not any(struct.unpack_from("I", info, UNSENT)[0] for info in infos):
            break
        time.sleep(0.001)
    sent = received = 0
    for info in infos:
        whole, again = struct.unpack_from("QQ", info, SENT)
        sent += whole - again
        received += struct.unpack_from("Q", info, RECEIVED)[0]
    return sent, received


def counter_works() -> bool:
    """Whether there is a loopback, and the kernel tells a process what its sockets sent."""
    try:
        before = counted()
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=10) as client,
            server.accept()[0] as peer,
        ):
            client.sendall(bytes(1000))
            peer.recv(1000, socket.MSG_WAITALL)
            after = counted()
    except (OSError, struct.error):
        return False
    return (after[0] - before[0], after[1] - before[1]) == (1000, 1000)


def bytes_of(call: Callable[[], None]) -> list[int]:
    """[sent, received] of this rank by one call, beyond what the barriers around it take."""

    def window(times: int) -> tuple[int, int]:
        dist.barrier()
        before = counted()
        dist.barrier()
        for _ in range(times):
            call()
        dist.barrier()
        after = counted()
        dist.barrier()
        return after[0] - before[0], after[1] - before[1]

    idle, busy = window(0), window(1)
    return [busy[0] - idle[0], busy[1] - idle[1]]


# -- what PyTorch asks for ------------------------------------------------------------------------------------------------

KINDS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter", "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all", "send": "send_recv",
}  # fmt: skip
SILENT = {"recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd"}


def tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


class Recorder(TorchDispatchMode):
    """Every collective that reaches PyTorch's dispatcher: [phase, kind, ranks, stride of the group, bytes].

    Bytes are those of the full tensor: the larger of what goes in and what comes out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.calls: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor comes back with the tensors of this rank
        output = func(*args, **(kwargs or {}))
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            members = dist.get_process_group_ranks(_group((*args, *(kwargs or {}).values())))
            nbytes = max(map(tensor_bytes, (*args, output)))
            stride = members[1] - members[0]
            self.calls.append([self.phase, KINDS.get(name, name), len(members), stride, nbytes])
        return output


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str) and value not in ("sum", "avg", "max")]
    return torch._C._distributed_c10d._resolve_process_group(names[-1])


def set_phase(recorder: Recorder | None, phase: str) -> None:
    if recorder is not None:
        recorder.phase = phase
