"""Real collectives over gloo: what PyTorch asks for, and the bytes that each process's own sockets then send.

Run as ``python wire_workers.py FILE``: forks two, three and four ranks in turn, which train small models in every way that
`CASES` names, and writes as JSON what each rank asked for and sent. Exit code 77: sockets do not say what they sent.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from wire_counters import Recorder, bytes_of, counter_works, set_phase

NO_COUNTER = 77
RANKS = (2, 3, 4)
WHOLE_STEPS = (3, 4)
"""Numbers of ranks that train: an odd one, and one that makes two axes; two ranks have neither a middle stage nor rest."""
PATIENCE = 600
"""Seconds for each number of ranks."""
S, B = 24, 2
"""Tokens of a sequence, sequences of a micro-batch."""
MICRO_BATCHES = 2
"""Of the data-parallel cases."""
SIZES = {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 24, "vocab_size": 240,
    "max_position_embeddings": 64, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
"""2, 3 and 4 divide everything that a layout shards."""
NEOX = {**SIZES, "use_parallel_residual": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
PIECE = 96 * 1024
"""Bytes that each rank of a raw collective holds of the tensor."""
SMALL, LARGE = (1, 2), 24
"""Pieces a rank: two sizes that gloo cuts into equally many messages, and one that makes their headers negligible."""

# -- models and steps -----------------------------------------------------------------------------------------------------

Step = Callable[[Recorder | None], None]


def llama(**keys: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=12, attn_implementation="sdpa", **{**SIZES, **keys}))


def tokens(sequences: int = B) -> torch.Tensor:
    return torch.arange(sequences * S).reshape(sequences, S) % 240


def data_parallel(model: Any, parameters: nn.Module, held_back: Callable[[bool], Any]) -> Step:
    """A step of `MICRO_BATCHES`; `held_back(True)` is the framework's way to say that this is not the last of them."""

    def step(recorder: Recorder | None) -> None:
        for index in range(MICRO_BATCHES):
            with held_back(index < MICRO_BATCHES - 1) or contextlib.nullcontext():
                set_phase(recorder, "forward")
                loss = model(input_ids=tokens(), labels=tokens()).loss
                set_phase(recorder, "backward")
                loss.backward()
        for parameter in parameters.parameters():
            parameter.grad = None

    return step


def ddp(mesh: DeviceMesh, **keys: Any) -> Step:
    model = DistributedDataParallel(llama(), **keys)
    return data_parallel(model, model, lambda more: model.no_sync() if more else None)


def fsdp(
    mesh: DeviceMesh,
    *,
    root: bool | None = None,
    zero: int = 3,
    policy: MixedPrecisionPolicy | None = None,
    **keys: Any,
) -> Step:
    """FSDP2. `root`: whether embedding and head are resharded after the forward too; `zero`: the stage it acts as.

    Stages below 3 keep the gathered weights over the backward; stage 1 over the whole step, and whole gradients too.
    """
    model = llama(**keys)
    chosen = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=zero == 3, **chosen)
    fully_shard(model, reshard_after_forward=root if zero == 3 else False, **chosen)

    def held_back(more: bool) -> None:
        model.set_requires_gradient_sync(zero > 1 or not more)
        model.set_reshard_after_backward(zero > 1 or not more)

    return data_parallel(model, model, held_back)


def megatron_plan(sequence: bool) -> dict[str, Any]:
    """Llama over DTensor as Megatron does it: queries, keys and values share one input, and so do gate and up."""
    layout = Shard(1) if sequence else Replicate()
    row = RowwiseParallel(output_layouts=layout)
    plan: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": layout}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": row, "mlp.down_proj": row,
    }  # fmt: skip
    plan.update({f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"})
    plan.update({f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")})
    if sequence:
        plan.update(input_layernorm=SequenceParallel(), post_attention_layernorm=SequenceParallel())
    return plan


def tensor_parallel(
    mesh: DeviceMesh, *, sequence: bool = False, shared: bool = True, gathered: bool = False, optimizer: bool = False
) -> Step:
    """Llama over DTensor. `shared` False: every column-parallel matrix takes in its input by itself.

    `gathered`: logits of the whole vocabulary on every rank, instead of a loss over the ranks.
    """
    model = llama()
    for layer in model.model.layers:
        plan = megatron_plan(sequence)
        if not shared:
            plan = {name: style for name, style in plan.items() if "." in name}
        parallelize_module(layer, mesh, plan)
    layout = Shard(1) if sequence else Replicate()
    logits = ColwiseParallel(
        input_layouts=layout, output_layouts=Replicate() if gathered else Shard(-1), use_local_output=gathered
    )
    ends: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout), "lm_head": logits,
    }  # fmt: skip
    if sequence:
        ends["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    return over_tensors(model, gathered, torch.optim.AdamW(model.parameters()) if optimizer else None)


def neox(mesh: DeviceMesh) -> Step:
    """GPT-NeoX: one fused matrix in front of attention, one in front of the activation, biases, LayerNorm."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(attn_implementation="sdpa", **NEOX))
    for layer in model.gpt_neox.layers:
        plan = dict.fromkeys(("attention.query_key_value", "mlp.dense_h_to_4h"), ColwiseParallel())
        parallelize_module(
            layer, mesh, {**plan, "attention.dense": RowwiseParallel(), "mlp.dense_4h_to_h": RowwiseParallel()}
        )
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"gpt_neox.embed_in": RowwiseParallel(input_layouts=Replicate()), "lm_head": head})
    return over_tensors(model, False, None)


def over_tensors(model: Any, gathered: bool, optimizer: torch.optim.Optimizer | None) -> Step:
    """One micro-batch with its loss, which is taken over the ranks unless the logits are gathered."""
    positions = torch.arange(S)[None]

    def step(recorder: Recorder | None) -> None:
        with contextlib.nullcontext() if gathered else loss_parallel():
            logits = model(input_ids=tokens(), position_ids=positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens().flatten())
            set_phase(recorder, "backward")
            loss.backward()
        if optimizer is not None:
            set_phase(recorder, "optimizer")
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def fsdp_over_tensors(mesh: DeviceMesh) -> Step:
    """FSDP2 over two ranks, on top of sequence and tensor parallelism over two."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = llama()
    for layer in model.model.layers:
        parallelize_module(layer, whole["tp"], megatron_plan(True))
        fully_shard(layer, mesh=whole["dp"])
    ends: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, whole["tp"], ends)
    fully_shard(model, mesh=whole["dp"])
    return over_tensors(model, False, None)


class PipelinePart(nn.Module):
    """One stage of Llama: a layer, with the embedding in the first stage and the head in the last."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if stage == 0 else nn.Identity()
        self.layer, self.rotary = model.model.layers[stage], model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if stage == stages - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        y = self.layer(x, position_embeddings=self.rotary(x, torch.arange(S)[None]))
        return self.head(y[0] if isinstance(y, tuple) else y)


def pipeline(mesh: DeviceMesh) -> Step:
    """1F1B over all ranks, a layer and a micro-batch for each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = PipelinePart(llama(num_hidden_layers=ranks), rank, ranks)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(stage, ranks, loss)
    whole = tokens(B * ranks)

    def step(recorder: Recorder | None) -> None:
        schedule.step(*((whole,) if rank == 0 else ()), **({"target": whole} if rank == ranks - 1 else {}))
        for parameter in part.parameters():
            parameter.grad = None

    return step


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, Callable[[DeviceMesh], Step]] = {
    "ddp": ddp,
    "ddp-buckets": lambda mesh: ddp(mesh, bucket_cap_mb=0.25),
    "fsdp": fsdp,
    "fsdp-resharded-root": lambda mesh: fsdp(mesh, root=True),
    "fsdp-zero1": lambda mesh: fsdp(mesh, zero=1),
    "fsdp-zero2": lambda mesh: fsdp(mesh, zero=2),
    "fsdp-bf16": lambda mesh: fsdp(mesh, policy=BF16),
    "fsdp-padded": lambda mesh: fsdp(mesh, vocab_size=241),
    "tp": tensor_parallel,
    "tp-each-gathers": lambda mesh: tensor_parallel(mesh, shared=False),
    "tp-gathered-logits": lambda mesh: tensor_parallel(mesh, gathered=True),
    "tp-neox": neox,
    "sp": lambda mesh: tensor_parallel(mesh, sequence=True),
    "sp-optimizer": lambda mesh: tensor_parallel(mesh, sequence=True, optimizer=True),
    "pp": pipeline,
    "fsdp-sp": fsdp_over_tensors,
}
NEEDS_FOUR = {"fsdp-sp"}
"""Cases of more than one axis."""
SETTLES_LATE = {"ddp", "ddp-buckets", "pp"}
"""Cases whose second step is not yet as all others: DDP fills its buckets anew, pipelines tell their shapes."""

# -- raw collectives ------------------------------------------------------------------------------------------------------


def raw(kind: str, nbytes: int) -> Callable[[], None]:
    """One collective over a float32 tensor of `nbytes`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // ranks)
    other = torch.empty_like(full)

    def pair() -> None:
        if rank == 0:
            dist.send(full, 1)
        elif rank == 1:
            dist.recv(full, 0)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "send_recv": pair,
    }
    return lambda: (calls[kind](), None)[1]


RAW = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

# -- ranks ----------------------------------------------------------------------------------------------------------------


def measure(ranks: int) -> dict[str, Any]:
    """What this rank asked for and sent, in every case."""
    found: dict[str, Any] = {"raw": {}, "cases": {}}
    for kind in RAW:
        found["raw"][kind] = {}
        for pieces in (*SMALL, LARGE):
            call = raw(kind, pieces * ranks * PIECE)
            call()
            found["raw"][kind][str(pieces)] = bytes_of(call)
    if ranks < WHOLE_STEPS[0]:
        return found
    mesh = init_device_mesh("cpu", (ranks,))
    for name, make in CASES.items():
        if name in NEEDS_FOUR and ranks != 4:
            continue
        step = make(mesh)
        for _ in range(2 if name in SETTLES_LATE else 1):
            step(None)
        recorder = Recorder()

        def recorded(step: Step = step, recorder: Recorder = recorder) -> None:
            with recorder:
                step(recorder)

        found["cases"][name] = {"bytes": bytes_of(recorded), "calls": recorder.calls}
    return found


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """One rank, in its own process; there is no port to agree on, ranks find each other through a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(measure(ranks)), encoding="utf-8")
    dist.barrier()


def run_ranks(ranks: int) -> list[Any]:
    """What each rank found. They are forked, so nothing is imported again; one that fails takes the others down."""
    with tempfile.TemporaryDirectory() as folder:
        children = set()
        for rank in range(ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    run_rank(rank, ranks, folder)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.add(child)
        try:
            signal.alarm(PATIENCE)
            while children:
                child, status = os.wait()
                children.discard(child)
                if status:
                    raise SystemExit(f"one of {ranks} ranks failed")
        finally:
            signal.alarm(0)
            for child in children:
                os.kill(child, signal.SIGKILL)
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def late(*_: Any) -> None:
    raise SystemExit(f"the ranks did not end within {PATIENCE} s")


def main(target: str) -> int:
    """Every number of ranks in turn."""
    if not sys.platform.startswith("linux") or not counter_works():
        return NO_COUNTER
    signal.signal(signal.SIGALRM, late)
    gc.collect()
    gc.freeze()  # the ranks, which are forked, do not look through what is imported
    Path(target).write_text(json.dumps({ranks: run_ranks(ranks) for ranks in RANKS}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
