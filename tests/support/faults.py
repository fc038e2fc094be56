"""Training code with one fault each: what runs out of memory in practice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

H, LAYERS, VOCABULARY = 1024, 8, 2000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, x: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = (one.reshape(b, s, 16, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, H))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(H), nn.LayerNorm(H), Attention()
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY, checkpointed: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, H)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = nn.Linear(H, vocabulary, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.lm_head(x)


def compute_loss(model: Any, ids: Any) -> Any:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def made(dtype: torch.dtype = torch.bfloat16, **keys: Any) -> Any:
    return Model(**keys).to("cuda", dtype)


def ids_of(tokens: int, batch: int = 1) -> Any:
    return torch.zeros(batch, tokens, dtype=torch.long, device="cuda")


def train(model: Any, ids: Any, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        compute_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def large_vocabulary() -> None:
    """A vocabulary of 256 thousand, and float32 copies of all logits."""
    train(made(vocabulary=256_000, checkpointed=True, layers=2), ids_of(8192))


def all_kept() -> None:
    train(made(), ids_of(8192))


class Float32AdamW(torch.optim.AdamW):
    """As a mixed-precision optimizer: float32 moments of 16-bit weights."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for one in group["params"]:
            if one.grad is not None and not self.state[one]:
                self.state[one]["step"] = torch.zeros(())
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[one][name] = torch.zeros_like(one, dtype=torch.float32)
        return super()._init_group(group, *lists)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])


def wide_moments() -> None:
    model = made(checkpointed=True, layers=24)
    optimizer = Float32AdamW(model.parameters())
    for _ in range(2):
        compute_loss(model, ids_of(512)).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_kept() -> None:
    """The losses are kept for a mean, and with them every graph."""
    model, ids, losses = made(), ids_of(1024), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(12):
        loss = compute_loss(model, ids)
        loss.backward(retain_graph=True)
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()


def gaps() -> None:
    """Buffers cut from what a first, large one has left behind; every second is let go, and then larger ones come."""
    mib = 2**18  # elements of four bytes
    workspace = torch.empty(1600 * mib, device="cuda")
    del workspace
    caches = [torch.empty(20 * mib, device="cuda") for _ in range(80)]
    del caches[::2]
    for _ in range(20):
        caches.append(torch.empty(40 * mib, device="cuda"))


def evaluate(model: Any, ids: Any) -> Any:
    model.eval()
    return compute_loss(model, ids)


def after_training() -> None:
    model = made(checkpointed=False)
    train(model, ids_of(1024), 1)
    evaluate(model, ids_of(16384))


def in_one_piece() -> None:
    """FSDP around the whole model: all weights are gathered at once."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = made(checkpointed=True, layers=24)
    fully_shard(model, mesh=mesh)
    train(model, ids_of(512))


def too_long() -> None:
    train(made(checkpointed=True, layers=16), ids_of(65_536))


FAULTS = {
    large_vocabulary: "logits and loss",
    all_kept: "activations, without checkpointing",
    wide_moments: "optimizer states",
    losses_kept: "graphs of earlier steps are kept",
    gaps: "fragmentation",
    after_training: "evaluation without torch.no_grad",
    in_one_piece: "weights gathered unsharded",
    too_long: "too many tokens at once",
}
