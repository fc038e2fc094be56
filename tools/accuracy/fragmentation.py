"""What PyTorch's caching allocator holds beyond what it hands out, simulated on traced training steps.

Real training code runs on the simulated CUDA device, with sequences of one length and with lengths that change from step to
step; its allocations are served by the simulated allocator. Two shares of the allocated peak come out: `reserved`, what
`max_memory_reserved` shows on a card with room, and `needed`, by how much the smallest card that serves every request exceeds
the allocated peak (there the allocator has given idle segments back).

Of FSDP2, one rank of a real sharded training runs. What its streams hold at most, each in a pool of its own, is counted by
`loadgauge.core.estimate.states.pools`, and so are the 16-bit logits in whose place nothing fits at the loss; `reserved` is what the
allocator holds beyond these, as a share of what the main stream holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from loadgauge.core.base.errors import NothingFits
from loadgauge.core.base.units import MIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.memory_range import Fragmentation, Share
from loadgauge.pytorch.parallel.parallel import ParallelJob
from loadgauge.pytorch.record.allocations import Stream
from loadgauge.pytorch.record.caching_allocator import Allocator, replay
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.trace import record

STEPS = 8
"""Steps of a run: the states of the optimizer come in the first one, and most lengths come up several times."""
LONGEST = 2048
WIDTHS = ((2048, 5632, 32000, 22), (4096, 14336, 128256, 32))
"""Hidden size, MLP width, vocabulary and layers of the models that are trained: those of TinyLlama 1.1B and Llama 3 8B."""
KINDS = ("static", "fixed", "dynamic")
SHARDED = {"sharded": False, "expandable": True}
"""Kinds of trainings under FSDP2, and whether the allocator's segments grow page by page."""
METHODS = ("full", "full, recomputed", "lora", "lora, recomputed")


class Case(NamedTuple):
    """A training to simulate: widths, method, sequences of a micro-batch, the kind of lengths and gradients.

    kind: `static`, one length and gradients that exist from the start; `fixed`, one length; `dynamic`, one length each step
    """

    widths: tuple[int, int, int, int]
    method: str
    micro_batch: int
    kind: str


class Found(NamedTuple):
    """A case, and what its allocator holds beyond the allocated peak, as shares of it."""

    case: Case | Sharded
    reserved: float
    needed: float


class Block(nn.Module):
    """A pre-norm transformer layer with a gated MLP; `rank`: of adapters on its frozen matrices, 0 to train them."""

    def __init__(self, hidden: int, wide: int, rank: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, dtype=torch.bfloat16) for _ in range(2))
        sizes = {"q": (hidden, hidden), "k": (hidden, hidden // 4), "v": (hidden, hidden // 4), "o": (hidden, hidden),
                 "gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}  # fmt: skip
        self.linears = nn.ModuleDict({name: linear(*size, rank) for name, size in sizes.items()})
        self.heads = hidden // 128

    def forward(self, x: Any) -> Any:
        """Return the layer's output, shaped as its input (sequences, tokens, hidden)."""
        of, y = self.linears, self.norms[0](x)
        q, k, v = (of[name](y).unflatten(-1, (-1, 128)).transpose(1, 2) for name in "qkv")
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + of["o"](mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + of["down"](nn.functional.silu(of["gate"](y)) * of["up"](y))


class Adapted(nn.Module):
    """A frozen matrix with a trained adapter."""

    def __init__(self, before: int, after: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(before, after, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.low = nn.Linear(before, rank, bias=False)
        self.high = nn.Linear(rank, after, bias=False)

    def forward(self, x: Any) -> Any:
        """Return the base's output and the adapter's, which computes in float32 as PEFT's does."""
        return self.base(x) + self.high(self.low(x.float())).to(x.dtype)


def linear(before: int, after: int, rank: int) -> nn.Module:
    """A matrix that is trained (`rank` 0), or one with an adapter."""
    return Adapted(before, after, rank) if rank else nn.Linear(before, after, bias=False, dtype=torch.bfloat16)


def lengths(case: Case) -> Iterator[int]:
    """The length of each step's padded batch: the longest, or the longest of a log-normal draw for each sequence.

    A median of a fifth of the longest and a deviation of one e-fold are usual of instruction data.
    """
    draw = random.Random(0)
    for _ in range(STEPS):
        if case.kind != "dynamic":
            yield LONGEST
            continue
        drawn = max(draw.lognormvariate(0, 1) for _ in range(case.micro_batch))
        yield min(LONGEST, max(32, int(LONGEST / 5 * drawn)))


def training(case: Case) -> Callable[[], None]:
    """Return a function that trains the case on `cuda`."""

    def run() -> None:
        hidden, wide, vocabulary, layers = case.widths
        rank = 16 if case.method.startswith("lora") else 0
        with torch.device("cuda"):
            table = nn.Embedding(vocabulary, hidden, dtype=torch.bfloat16).requires_grad_(not rank)
            blocks = nn.ModuleList(Block(hidden, wide, rank) for _ in range(layers))
            head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(not rank)
        trained = [weight for one in (table, blocks, head) for weight in one.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        if case.kind == "static":
            for weight in trained:
                weight.grad = torch.zeros_like(weight)
        for length in lengths(case):
            tokens = torch.zeros(case.micro_batch, length, dtype=torch.long, device="cuda")
            x = table(tokens)
            if rank:
                x.requires_grad_()
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if "recomputed" in case.method else block(x)
            logits = head(x).float()
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            del x, logits
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.kind != "static")

    return run


def smallest(stream: Stream, allocated: int, reserved: int, *, expandable: bool = False) -> int:
    """Return the memory [bytes] of the smallest card on which the allocator serves the whole stream, to 8 MiB."""
    low, high = allocated, reserved
    while high - low > 8 * MIB:
        middle = (low + high) // 2
        try:
            replay(stream, Allocator(limit=middle, expandable=expandable))
            high = middle
        except NothingFits:
            low = middle
    return high


def simulate(case: Case) -> Found:
    """Return the shares of a case."""
    stream = record(FunctionJob(training(case)), "cuda", steps=0).stream
    found = replay(stream).result()
    needed = smallest(stream, found.allocated, found.reserved)
    return Found(case, found.reserved / found.allocated - 1, needed / found.allocated - 1)


class Sharded(NamedTuple):
    """A training under FSDP2 to simulate: widths, ZeRO stage, ranks, what runs again, and sequences of a micro-batch."""

    widths: tuple[int, int, int, int]
    zero: int
    ranks: int
    recompute: str
    micro_batch: int


def sharded_cases() -> Iterator[Sharded]:
    """Every training under FSDP2 that is simulated."""
    for widths, zero, ranks, recompute, micro_batch in product(WIDTHS, (2, 3), (8, 64), ("none", "full"), (1, 4)):
        yield Sharded(widths, zero, ranks, recompute, micro_batch)


def simulate_sharded(case: Sharded) -> dict[str, Found]:
    """Return the shares of a case, by kind."""
    hidden, wide, vocabulary, layers = case.widths
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=wide, vocab_size=vocabulary, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=hidden // 128, num_key_value_heads=hidden // 512, max_position_embeddings=LONGEST,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    job = Job(
        model="", gpus=case.ranks, zero=case.zero, recompute=case.recompute, micro_batch=case.micro_batch, seq_len=LONGEST,
        global_batch=case.ranks * case.micro_batch, precision="bf16-autocast", optimizer="adamw-fused",
    )  # fmt: skip
    stream = record(ParallelJob(config, TorchRun.of(job)), "cuda", gpus=case.ranks).stream
    live: dict[int, int] = {}
    most: dict[int, int] = {}
    hole = 2 * case.micro_batch * LONGEST * vocabulary
    for number, change in zip(stream.ids, stream.changes, strict=True):
        made = stream.records[number]
        live[made.stream] = live.get(made.stream, 0) + change
        at_loss = hole if "log_softmax_backward" in str(made.op) else 0
        most[made.stream] = max(most.get(made.stream, 0), live[made.stream] + at_loss)
    main = most.pop(0)
    found = {}
    for kind, expandable in SHARDED.items():
        served = replay(stream, Allocator(expandable=expandable)).result()
        needed = smallest(stream, served.allocated, served.reserved, expandable=expandable)
        beyond = (served.reserved - sum(most.values())) / main - 1
        found[kind] = Found(case, beyond, needed / served.allocated - 1)
    return found


def cases() -> Iterator[Case]:
    """Every training that is simulated."""
    for widths in WIDTHS:
        for method in METHODS:
            for micro_batch in (1, 4):
                for kind in KINDS:
                    if kind != "static" or method.startswith("full"):  # who keeps gradients trains everything
                        yield Case(widths, method, micro_batch, kind)


def share(values: list[float]) -> Share:
    """The share that the middle 80 % of the cases lie in, and their median."""
    ordered = sorted(values)
    at = [ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.5, 0.9)]
    return Share(*(round(value, 3) for value in at))


def fragmentation(say: Callable[[str], object] = print) -> dict[str, Fragmentation]:
    """Return the shares by the kind of a case."""
    found: dict[str, list[Found]] = {}
    for case in cases():
        found.setdefault(case.kind, []).append(simulate(case))
        one = found[case.kind][-1]
        say(f"{case}: reserved {one.reserved:+.1%}, needed {one.needed:+.1%}")
    for sharded in sharded_cases():
        for kind, one in simulate_sharded(sharded).items():
            found.setdefault(kind, []).append(one)
            say(f"{sharded}, {kind}: reserved {one.reserved:+.1%}, needed {one.needed:+.1%}")
    return {
        kind: Fragmentation(
            reserved=share([one.reserved for one in found[kind]]), needed=share([one.needed for one in found[kind]])
        )
        for kind in (*KINDS, *SHARDED)
    }
