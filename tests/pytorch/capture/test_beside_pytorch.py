"""Modules in many styles beside plain PyTorch: the peak of a training step as its CPU allocator has it, to a thousandth.

Each is trained with real numbers in this process, its allocations are those that PyTorch's profiler sees, and `loadgauge estimate`
is asked about the same file. Left out is what a CPU does otherwise than CUDA: fused recurrences and norms, attention with another
layout, the state of random numbers. Dropout is CUDA's, whose mask has a byte for each number where a CPU's has four.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from command_line import document
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.measure.cpu_allocator import PHASE, events, live, profiler, ranges, tensors

ROWS = 8
HEAD = """
import copy
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
"""
GAN = """
class GAN(nn.Module):
    automatic_optimization = False
    device = property(lambda self: next(self.parameters()).device)

    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.2), nn.Linear(128, 400), nn.Tanh())
        self.d = nn.Sequential(nn.Linear(400, 256), nn.LeakyReLU(0.2), nn.Linear(256, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def optimizers(self):
        return self._trainer.optimizers

    def manual_backward(self, loss):
        loss.backward()

    def configure_optimizers(self):
        return [torch.optim.AdamW(net.parameters(), foreach=True) for net in (self.g, self.d)]
"""
PROGRAMS: dict[str, str] = {
    "residual pictures": """
def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 16, 7, 2, 3), block(16, 16), block(16, 32, 2)
        self.side, self.head = nn.Conv2d(16, 32, 1, 2), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        x = F.relu(self.a(x) + x)
        x = F.relu(self.b(x) + self.side(x))
        return self.head(x.mean((2, 3)))

def batch(b): return torch.randn(b, 3, 64, 64), torch.randint(0, 10, (b,))
""",
    "depthwise with a scale": """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.dw, self.n = nn.Conv2d(d, d, 7, padding=3, groups=d), nn.LayerNorm(d)
        self.a, self.b, self.scale = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Parameter(torch.ones(d))

    def forward(self, x):
        y = self.b(F.gelu(self.a(self.n(self.dw(x).permute(0, 2, 3, 1)))))
        return x + (self.scale * y).permute(0, 3, 1, 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 24, 4, 4), nn.Sequential(*[Block(24) for _ in range(3)])
        self.head = nn.Linear(24, 10)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), y, label_smoothing=0.1)

def batch(b): return torch.randn(b, 3, 64, 64), torch.randint(0, 10, (b,))
""",
    "squeeze and excite": """
class Net(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.up, self.dw = nn.Conv2d(3, c, 1, bias=False), nn.Conv2d(c, c, 3, 2, 1, groups=c, bias=False)
        self.n, self.m = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.s, self.e, self.head = nn.Conv2d(c, 6, 1), nn.Conv2d(6, c, 1), nn.Linear(c, 10)

    def forward(self, x):
        x = F.silu(self.m(self.dw(F.silu(self.n(self.up(x)), inplace=True))), inplace=True)
        x = x * self.e(F.silu(self.s(F.adaptive_avg_pool2d(x, 1)))).sigmoid()
        return self.head(x.mean((2, 3)))

def batch(b): return torch.randn(b, 3, 48, 48), torch.randint(0, 10, (b,))
""",
    "a U-Net with two losses": """
def pair(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(True), nn.Conv2d(o, o, 3, padding=1), nn.ReLU(True))

class Net(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.a, self.b, self.up, self.c = pair(1, c), pair(c, 2 * c), nn.ConvTranspose2d(2 * c, c, 2, 2), pair(2 * c, c)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x, y):
        a = self.a(x)
        z = self.out(self.c(torch.cat([self.up(self.b(F.max_pool2d(a, 2))), a], 1)))
        p = z.sigmoid()
        dice = 1 - (2 * (p * y).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)
        return {"bce": F.binary_cross_entropy_with_logits(z, y), "dice": dice.mean()}

def batch(b): return torch.randn(b, 1, 64, 64), torch.zeros(b, 1, 64, 64)
""",
    "upsampled classes": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Conv2d(3, 32, 3, 4, 1), nn.Conv2d(32, 12, 1), nn.Conv2d(32, 12, 1)

    def forward(self, x, y):
        f = self.body(x).relu()
        a, b = (F.interpolate(h(f), size=x.shape[-2:], mode="bilinear", align_corners=False) for h in (self.head, self.aux))
        return F.cross_entropy(a, y) + 0.4 * F.cross_entropy(b, y)

def batch(b): return torch.randn(b, 3, 64, 64), torch.randint(0, 12, (b, 64, 64))
""",
    "pictures in time": """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv3d(3, 16, 3, (1, 2, 2), 1), nn.BatchNorm3d(16), nn.ReLU(True), nn.Conv3d(16, 32, 3, 2, 1),
                         nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 10))

def batch(b): return torch.randn(b, 3, 8, 32, 32), torch.randint(0, 10, (b,))
""",
    "noise with an average of weights": """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n, self.ada = nn.LayerNorm(d, elementwise_affine=False), nn.Sequential(nn.SiLU(), nn.Linear(d, 3 * d))
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU("tanh"), nn.Linear(4 * d, d))

    def forward(self, x, c):
        shift, scale, gate = self.ada(c).unsqueeze(1).chunk(3, -1)
        return x + gate * self.mlp(self.n(x) * (1 + scale) + shift)

class Inner(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.i, self.t, self.o = nn.Linear(16, d), nn.Embedding(1000, d), nn.Linear(d, 16)
        self.blocks = nn.ModuleList(Block(d) for _ in range(5))

    def forward(self, x, t):
        h, c = self.i(x), self.t(t)
        for block in self.blocks: h = block(h, c)
        return self.o(h)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Inner()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        t, noise = torch.randint(0, 1000, (x.shape[0],), device=x.device), torch.randn_like(x)
        a = torch.cos(t / 1000 * 1.57).view(-1, 1, 1)
        return F.mse_loss(self.net(a * x + (1 - a * a).sqrt() * noise, t), noise)

def batch(b): return torch.randn(b, 64, 16)
""",
    "adapters on what is frozen": """
class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x): return self.base(x) + 2 * self.b(self.a(x))

class Net(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.i, self.o = nn.Linear(32, d).requires_grad_(False), nn.Linear(d, 1).requires_grad_(False)
        self.layers = nn.ModuleList(nn.ModuleList([Adapted(nn.Linear(d, 2 * d)), Adapted(nn.Linear(2 * d, d))]) for _ in range(4))

    def forward(self, x, y):
        h = self.i(x)
        for up, down in self.layers: h = h + down(F.silu(up(h)))
        return F.mse_loss(self.o(h), y)

def batch(b): return torch.randn(b, 64, 32), torch.randn(b, 64, 1)
""",
    "a frozen encoder": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.GELU(), nn.Conv2d(64, 128, 2, 2), nn.GELU()).requires_grad_(False)
        self.head = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x, y): return F.cross_entropy(self.head(self.encoder(x).mean((2, 3))), y)

def batch(b): return torch.randn(b, 3, 64, 64), torch.randint(0, 10, (b,))
""",
    "messages along edges": """
class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(20, d)
        self.m, self.u = (nn.ModuleList(nn.Linear(i, d) for _ in range(3)) for i in (2 * d + 4, 2 * d))
        self.head = nn.Linear(d, 1)

    def forward(self, z, e, src, dst, graph, y):
        h = self.emb(z)
        for m, u in zip(self.m, self.u):
            sent = F.silu(m(torch.cat([h[src], h[dst], e], -1)))
            h = h + F.silu(u(torch.cat([h, torch.zeros_like(h).index_add_(0, dst, sent)], -1)))
        pooled = torch.zeros(y.shape[0], h.shape[1], device=h.device).index_add_(0, graph, h)
        return (self.head(pooled).squeeze(-1) - y).abs().mean()

def batch(b):
    n, m = 30 * b, 120 * b
    ends = torch.randint(0, n, (m,)), torch.randint(0, n, (m,))
    return torch.randint(0, 20, (n,)), torch.randn(m, 4), *ends, torch.arange(b).repeat_interleave(30), torch.randn(b)
""",
    "neighbours of points": """
class Net(nn.Module):
    def __init__(self, k=6):
        super().__init__()
        self.net, self.head, self.k = nn.Sequential(nn.Conv2d(6, 32, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)), nn.Linear(32, 8), k

    def forward(self, x, y):
        B, C, N = x.shape
        near = torch.cdist(x.transpose(1, 2), x.transpose(1, 2)).topk(self.k, -1, largest=False).indices
        nb = x.transpose(1, 2).gather(1, near.reshape(B, -1, 1).expand(-1, -1, C)).view(B, N, self.k, C).permute(0, 3, 1, 2)
        own = x.unsqueeze(-1).expand_as(nb)
        return F.cross_entropy(self.head(self.net(torch.cat([nb - own, own], 1)).max(-1).values.amax(-1)), y)

def batch(b): return torch.randn(b, 3, 100), torch.randint(0, 8, (b,))
""",
    "tables and crosses": """
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(500, d, mode="sum") for _ in range(5))
        self.low, self.top = nn.Linear(13, d), nn.Sequential(nn.Linear(d + 15, 64), nn.ReLU(), nn.Linear(64, 1))
        i, j = torch.tril_indices(6, 6, -1)
        self.register_buffer("i", i), self.register_buffer("j", j)

    def forward(self, dense, ids, y):
        x = self.low(dense).relu()
        v = torch.stack([x] + [t(ids[:, k]) for k, t in enumerate(self.tables)], 1)
        z = (v @ v.transpose(1, 2))[:, self.i, self.j]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, z], 1)).squeeze(1), y)

def batch(b): return torch.randn(b, 13), torch.randint(0, 500, (b, 5, 4)), torch.zeros(b)
""",
    "two towers": """
def tower(): return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.i, self.q, self.k = nn.Embedding(300, 32), nn.Embedding(500, 32), tower(), tower()
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, u, i):
        q, k = F.normalize(self.q(self.u(u)), dim=-1), F.normalize(self.k(self.i(i)), dim=-1)
        z, y = self.scale.exp() * q @ k.T, torch.arange(len(u), device=u.device)
        return (F.cross_entropy(z, y) + F.cross_entropy(z.T, y)) / 2

def batch(b): return torch.randint(0, 300, (32 * b,)), torch.randint(0, 500, (32 * b,))
""",
    "a scan written as a loop": """
class Net(nn.Module):
    def __init__(self, d=24, n=4):
        super().__init__()
        self.emb, self.x, self.dt, self.o = nn.Embedding(99, d), nn.Linear(d, 2 * n), nn.Linear(d, 1), nn.Linear(d, 99)
        self.A, self.n = nn.Parameter(torch.zeros(d, n)), n

    def forward(self, ids):
        h = self.emb(ids)
        B, C = self.x(h).split(self.n, -1)
        dt, state, ys = F.softplus(self.dt(h)), h.new_zeros(h.shape[0], h.shape[2], self.n), []
        for t in range(h.shape[1]):
            state = torch.exp(dt[:, t, :, None] * -self.A.exp()) * state + (dt[:, t] * h[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(1)
            ys.append((state * C[:, t].unsqueeze(1)).sum(-1))
        return F.cross_entropy(self.o(torch.stack(ys, 1))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def batch(b): return torch.randint(0, 99, (b, 20))
""",
    "sums along time": """
class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb, self.g, self.u, self.o = nn.Embedding(99, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 99)

    def forward(self, ids, y):
        h = self.emb(ids)
        log = -F.softplus(self.g(h))
        total = log.cumsum(1)
        state = torch.cumsum(self.u(h) * torch.exp(-total), 1) * total.exp()
        return F.cross_entropy(self.o(state * F.gelu(h)).transpose(1, 2), y)

def batch(b): return torch.randint(0, 99, (b, 32)), torch.randint(0, 99, (b, 32))
""",
    "two optimizers": GAN + """
    def training_step(self, batch, number):
        first, second = self.optimizers()
        fake = self.g(torch.randn(batch.shape[0], 32, device=batch.device))
        ones = torch.ones(batch.shape[0], 1, device=batch.device)
        loss = F.binary_cross_entropy_with_logits(self.d(batch), ones) + F.softplus(self.d(fake.detach())).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        loss = F.softplus(-self.d(fake)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()

Net = GAN
def batch(b): return torch.randn(64 * b, 400)
""",
    "a penalty on a gradient": GAN + """
    def training_step(self, batch, number):
        x, _ = batch
        first, second = self.optimizers()
        z = torch.randn(x.shape[0], 32, device=x.device)
        fake, share = self.g(z).detach(), torch.rand(x.shape[0], 1, device=x.device)
        between = (share * x + (1 - share) * fake).requires_grad_()
        grad = torch.autograd.grad(self.d(between).sum(), between, create_graph=True)[0]
        loss = self.d(fake).mean() - self.d(x).mean() + 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        loss = -self.d(self.g(z)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()

Net = GAN
def batch(b): return torch.randn(64 * b, 400), torch.zeros(64 * b)
""",
    "a gradient within the loss": """
class Net(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, d), nn.Linear(d, d), nn.Linear(d, 1)])

    def value(self, x):
        for layer in self.layers[:-1]: x = torch.tanh(layer(x))
        return self.layers[-1](x)

    def forward(self, x):
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(self.value(x).sum(), x, create_graph=True)[0]
        curve = torch.autograd.grad(slope[:, :1].sum(), x, create_graph=True)[0][:, :1]
        return (slope[:, 1:] - 0.1 * curve).pow(2).mean() + self.value(x[:10]).pow(2).mean()

def batch(b): return torch.randn(100 * b, 2)
""",
    "a code and its noise": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(16 * 256, 64))
        self.d = nn.Sequential(nn.Linear(32, 16 * 256), nn.Unflatten(1, (16, 16, 16)), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x):
        mu, log = self.e(x).chunk(2, 1)
        out = self.d(mu + torch.randn_like(mu) * (0.5 * log).exp())
        return F.mse_loss(out, x, reduction="sum") / x.shape[0] - 0.5 * (1 + log - mu**2 - log.exp()).sum(1).mean(), out

def batch(b): return torch.randn(b, 3, 32, 32)
""",
    "a book of codes": """
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.e, self.book, self.d = nn.Conv2d(3, d, 4, 4), nn.Embedding(64, d), nn.ConvTranspose2d(d, 3, 4, 4)

    def forward(self, x):
        z = self.e(x).permute(0, 2, 3, 1).contiguous()
        f = z.view(-1, z.shape[-1])
        far = f.pow(2).sum(1, keepdim=True) + self.book.weight.pow(2).sum(1) - 2 * f @ self.book.weight.T
        q = self.book(far.argmin(1)).view_as(z)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        out = self.d((z + (q - z).detach()).permute(0, 3, 1, 2))
        return {"loss": F.mse_loss(out, x) + loss, "out": out}

def batch(b): return torch.randn(b, 3, 48, 48)
""",
    "two views of each": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.g = nn.Linear(128, 32)

    def forward(self, a, b):
        z, n = F.normalize(self.g(self.f(torch.cat([a, b]))), dim=1), len(a)
        like = (z @ z.T / 0.1).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), -1e9)
        return F.cross_entropy(like, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device))

def batch(b): return torch.randn(b, 3, 48, 48), torch.randn(b, 3, 48, 48)
""",
    "a target that follows": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.target, self.pred = copy.deepcopy(self.online).requires_grad_(False), nn.Linear(32, 32)

    def forward(self, a, b):
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters()): q.mul_(0.99).add_(p, alpha=0.01)
            t = F.normalize(self.target(b), dim=-1)
        return 2 - 2 * (F.normalize(self.pred(self.online(a)), dim=-1) * t).sum(-1).mean()

def batch(b): return torch.randn(32 * b, 64), torch.randn(32 * b, 64)
""",
    "layers that run again": """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n, self.m = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x): return x + self.m(self.n(x))

class Net(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(200, d), nn.ModuleList(Block(d) for _ in range(5)), nn.Linear(d, 200)

    def forward(self, ids, y):
        x = self.emb(ids)
        for block in self.blocks: x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        z = self.head(x)
        return z, F.cross_entropy(z.view(-1, 200), y.view(-1))

def batch(b): return torch.randint(0, 200, (b, 64)), torch.randint(0, 200, (b, 64))
""",
    "routed by capacity": """
class Net(nn.Module):
    def __init__(self, d=32, e=4, k=2):
        super().__init__()
        self.emb, self.gate, self.head, self.e, self.k = nn.Embedding(99, d), nn.Linear(d, e, bias=False), nn.Linear(d, 99), e, k
        self.up, self.down = nn.Parameter(torch.randn(e, d, 4 * d)), nn.Parameter(torch.randn(e, 4 * d, d))

    def forward(self, ids, y):
        f = self.emb(ids).flatten(0, 1)
        w, i = self.gate(f).softmax(-1).topk(self.k, -1)
        order = i.flatten().argsort()
        tokens = order // self.k
        out = torch.bmm(F.gelu(torch.bmm(f[tokens].view(self.e, -1, f.shape[1]), self.up)), self.down).flatten(0, 1)
        f = f + torch.zeros_like(f).index_add_(0, tokens, out * w.flatten()[order].unsqueeze(1))
        return F.cross_entropy(self.head(f), y.flatten())

def batch(b): return torch.randint(0, 99, (b, 32)), torch.randint(0, 99, (b, 32))
""",
    "rays": """
class Net(nn.Module):
    def __init__(self, w=64):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(27, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(w, 1), nn.Linear(w, 3)

    def forward(self, o, d, y):
        t = torch.linspace(2, 6, 16, device=o.device).expand(o.shape[0], 16)
        p = o[:, None] + d[:, None] * t[..., None]
        h = self.a(torch.cat([p] + [f(p * 2**k) for k in range(4) for f in (torch.sin, torch.cos)], -1))
        alpha = 1 - torch.exp(-self.sigma(h).squeeze(-1).relu() * 0.25)
        w = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((w[..., None] * self.rgb(h).sigmoid()).sum(1) - y).pow(2).mean()

def batch(n_rays): return torch.randn(n_rays, 3), torch.randn(n_rays, 3), torch.randn(n_rays, 3)
""",
    "frequencies": """
class Net(nn.Module):
    def __init__(self, c=12, m=6):
        super().__init__()
        self.i, self.o, self.m = nn.Conv2d(3, c, 1), nn.Conv2d(c, 1, 1), m
        self.w = nn.Parameter(torch.randn(c, c, m, m, dtype=torch.cfloat))

    def forward(self, x, y):
        h, m = self.i(x), self.m
        f = torch.fft.rfft2(h)
        out = torch.zeros_like(f)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.w)
        return (self.o(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + h)) - y).flatten(1).norm(dim=1).mean()

def batch(b): return torch.randn(b, 3, 32, 32), torch.randn(b, 1, 32, 32)
""",
    "gated waves": """
class Net(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.emb, self.o = nn.Embedding(64, c), nn.Conv1d(c, 64, 1)
        self.f = nn.ModuleList(nn.Conv1d(c, 2 * c, 2, dilation=2**k) for k in range(4))
        self.r = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(4))

    def forward(self, x):
        h, skip = self.emb(x[:, :-1]).transpose(1, 2), 0
        for k, (f, r) in enumerate(zip(self.f, self.r)):
            a, b = f(F.pad(h, (2**k, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            h, skip = h + r(z), skip + z
        return F.cross_entropy(self.o(F.relu(skip)), x[:, 1:])

def batch(b): return torch.randint(0, 64, (b, 257))
""",
    "a teacher": """
def net():
    body = nn.Conv2d(3, 24, 3, 2), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(24, 10))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = net().eval().requires_grad_(False), net()

    def forward(self, x, y):
        with torch.no_grad(): t = self.teacher(x)
        z = self.student(x)
        return F.cross_entropy(z, y) + 4 * F.kl_div(F.log_softmax(z / 2, 1), F.softmax(t / 2, 1), reduction="batchmean")

def batch(b): return torch.randn(b, 3, 48, 48), torch.randint(0, 10, (b,))
""",
    "dropped": """
class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.a, self.n, self.drop = nn.MultiheadAttention(d, 2, 0.2), nn.LayerNorm(d), nn.Dropout(0.3)
    def forward(self, x):
        x = self.n(x + self.drop(self.a(x, x, x)[0]))
        return (x + self.drop(F.gelu(x))).square().mean()

def batch(b): return torch.randn(64, b, 32)
""",
}  # fmt: skip
SLOW = tuple(PROGRAMS)[::2]
"""Every other one is for thorough runs."""
DROPOUT = lambda x, p=0.5, training=True, inplace=False: torch.ops.aten.native_dropout(x, p, training)[0]  # noqa: E731


class Trainer:
    """What a module that optimizes by itself asks of its trainer."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers


def plainly(module: Any, batch: tuple[Any, ...]) -> Callable[[], None]:
    """One step of a module as a script for one GPU trains it."""
    if hasattr(module, "training_step"):
        module._trainer = Trainer(module.configure_optimizers())
        whole = batch if len(batch) > 1 else batch[0]
        return lambda: module.training_step(whole, 0)
    optimizer = torch.optim.AdamW((one for one in module.parameters() if one.requires_grad), foreach=True)
    taken = len(inspect.signature(module.forward).parameters)

    def step() -> None:
        result = module(*batch[:taken])
        if taken < len(batch):
            result = functional.cross_entropy(result, batch[-1])
        elif isinstance(result, dict):
            result = result.get("loss", sum(result.values()))
        elif isinstance(result, tuple):
            result = next(one for one in result if not one.dim())
        result.backward()
        del result
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_of(script: Path) -> int:
    """Bytes at the peak of the second step in the script's module, without the scratch of kernels."""
    named = importlib.util.spec_from_file_location(script.stem, script)
    assert named is not None
    assert named.loader is not None
    own: Any = importlib.util.module_from_spec(named)
    named.loader.exec_module(own)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with replaced((functional, "dropout", DROPOUT)), profiler() as running:
            module: nn.Module = own.Net()
            batch = own.batch(ROWS)
            batch = batch if isinstance(batch, tuple) else (batch,)
            step = plainly(module, batch)
            for _ in range(2):
                with torch.profiler.record_function(f"{PHASE}step"):
                    step()
    finally:
        torch.set_num_threads(threads)
    second = ranges(running)[-1]
    return live(tensors(events(running)), second.begin, second.end).peak


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SLOW)) for name in PROGRAMS]
)
def test_the_peak_is_that_of_pytorch(name: str, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(HEAD + PROGRAMS[name])
    words = f"estimate {script}:Net --inputs {script}:batch --micro-batch {ROWS} --gpu a100-sxm4-80gb"
    parts = document(words + ("" if "GAN" in PROGRAMS[name] else " --optimizer adamw-foreach"))["memory"]["parts"]
    mine = sum(value for part, value in parts.items() if part != "outside")
    assert mine == pytest.approx(peak_of(script), rel=0.001)
