"""Modules that no library wrote, each small, with what they are called with.

`loadgauge capture own_modules.py:unet --inputs own_modules.py:pictures --micro-batch 4 --size side=64`
docs/captured-accuracy.md has all.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


def tokens(b, s):
    """Sequences of vectors, and the sizes' names: b sequences of s."""
    return torch.empty(b, s, WIDTH)


def sound(b, s):
    """One channel of s samples."""
    return torch.empty(b, 1, s)


def pictures(b, side):
    """Square pictures; a U-Net halves them twice."""
    return torch.empty(b, 3, side, side)


def rows(b):
    """Plain rows."""
    return torch.empty(b, WIDTH)


class UNet(nn.Module):
    """Down twice, up twice, with skips."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.low, self.norm = nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(16)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x):
        """Return a loss of pictures."""
        one = F.relu(self.first(x))
        two = F.silu(self.norm(self.down(one)))
        low = F.gelu(self.low(two))
        up = self.up(low) + two
        up = F.interpolate(up, scale_factor=2.0, mode="nearest")
        return self.out(torch.cat([one, up], 1)).square().mean()


class Shared(nn.Module):
    """One block, used four times, and an embedding that is the head too."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.block[1].weight

    def forward(self, x):
        """Return a loss of sequences."""
        for _ in range(4):
            x = x + self.block(x)
        return self.head(x).logsumexp(-1).mean()


class Penalty(nn.Module):
    """A critic and the penalty on its gradient: backward of a backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, 1))

    def forward(self, x):
        """Return a loss of rows."""
        x = x.requires_grad_(True)
        y = self.layers(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (slope.norm(dim=-1) - 1).square().mean()


class Recurrent(nn.Module):
    """A recurrent layer of PyTorch, by its name, and a head."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.layer = getattr(nn, kind)(WIDTH, 32, batch_first=True, **settings)
        self.head = nn.Linear(32 * (1 + settings.get("bidirectional", False)), 8)

    def forward(self, x):
        """Return a loss of sequences."""
        return self.head(self.layer(x)[0]).square().mean()


class Cube(torch.autograd.Function):
    """x ** 3, which keeps x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Custom(nn.Module):
    """A function with a backward of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Return a loss of sequences."""
        return Cube.apply(self.linear(x)).mean()


class Experts(nn.Module):
    """Two of four experts for each token, in a loop over experts."""

    def __init__(self):
        super().__init__()
        self.experts, self.router = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 4)

    def forward(self, x):
        """Return a loss of sequences."""
        x = x.flatten(0, 1)
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out.square().mean()


class Norms(nn.Module):
    """Convolutions whose weights are normed: a direction and a length."""

    def __init__(self):
        super().__init__()
        parts = [nn.Conv1d(1, 16, 5, padding=2), nn.Conv1d(16, 16, 5, padding=2)]
        self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(part) for part in parts)

    def forward(self, x):
        """Return a loss of sounds."""
        for layer in self.layers:
            x = F.leaky_relu(layer(x))
        return x.abs().mean()


class Fourier(nn.Module):
    """A filter in the frequencies of the positions."""

    def __init__(self):
        super().__init__()
        self.filter, self.linear = nn.Parameter(torch.empty(WIDTH, dtype=torch.cfloat)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Return a loss of sequences."""
        spectrum = torch.fft.rfft(self.linear(x), dim=1) * self.filter
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1).square().mean()


class Branch(nn.Module):
    """Does more where a value is large."""

    def __init__(self):
        super().__init__()
        self.linear, self.more = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Return a loss of sequences."""
        y = self.linear(x)
        if y.abs().max() > 4:
            y = self.more(y)
        return y.square().mean()


class OverTime(nn.Module):
    """A loop over positions."""

    def __init__(self):
        super().__init__()
        self.linear, self.cell = nn.Linear(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        """Return a loss of sequences."""
        state = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        for place in range(x.shape[1]):
            state = self.cell(self.linear(x[:, place]), state)
        return state[0].square().mean()


class Spectral(nn.Module):
    """A linear layer divided by its largest singular value, by the power method."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 48))

    def forward(self, x):
        """Return a loss of rows."""
        return F.softplus(-self.layer(x)).mean()


class Deformed(nn.Module):
    """Reads pictures at places that it computes itself."""

    def __init__(self):
        super().__init__()
        self.offset, self.conv = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        """Return a loss of pictures."""
        move = self.offset(x).permute(0, 2, 3, 1).tanh()
        side = torch.linspace(-1, 1, x.shape[-1], device=x.device)
        grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1) + move
        return self.conv(F.grid_sample(x, grid, align_corners=False)).square().mean()


class Scattered(nn.Module):
    """A graph layer: messages along edges, summed at nodes."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, nodes, start, end):
        """Return a loss of nodes and edges from start to end."""
        sent = F.relu(self.message(torch.cat([nodes[start], nodes[end]], -1)))
        total = torch.zeros_like(nodes).scatter_add(0, end[:, None].expand_as(sent), sent)
        return self.update(total, nodes).square().mean()


def graph(nodes, edges):
    """Nodes, and edges between them."""
    return torch.empty(nodes, WIDTH), torch.empty(edges, dtype=torch.long), torch.empty(edges, dtype=torch.long)


class Tables(nn.Module):
    """Bags of categories, as in recommendation."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000, 32, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        """Return a loss of ids (batch, table, entries of a bag)."""
        parts = [bag(ids[:, at]) for at, bag in enumerate(self.bags)]
        return F.softplus(self.top(torch.cat(parts, -1))).mean()


def bags(b, n):
    """n entries of each of three tables."""
    return torch.empty(b, 3, n, dtype=torch.long)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**at) for at in range(5))

    def forward(self, x):
        """Return a loss of sounds."""
        x, total = self.first(x), 0
        for at, layer in enumerate(self.layers):
            gate, value = layer(F.pad(x, (2**at, 0))).chunk(2, 1)
            y = gate.sigmoid() * value.tanh()
            x, total = x + y, total + y
        return total.square().mean()


class Flow(nn.Module):
    """A normalising flow: a mixing matrix with its determinant and inverse, and a coupling."""

    def __init__(self):
        super().__init__()
        self.mix, self.net = nn.Parameter(torch.empty(WIDTH, WIDTH)), nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x):
        """Return the loss of rows."""
        z = x @ self.mix
        a, b = z.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        z = torch.cat([a, b * scale.exp() + shift], -1)
        back = z @ torch.linalg.inv(self.mix)
        volume = torch.linalg.slogdet(self.mix)[1] + scale.sum(-1)
        return (0.5 * z.square().sum(-1) - volume).mean() + (back - x).square().mean()


class Ode(nn.Module):
    """A neural differential equation in eight fixed steps of Runge and Kutta."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH))

    def forward(self, x):
        """Return a loss of rows."""
        h = 1 / 8
        for _ in range(8):
            one = self.slope(x)
            two = self.slope(x + h / 2 * one)
            three = self.slope(x + h / 2 * two)
            four = self.slope(x + h * three)
            x = x + h / 6 * (one + 2 * two + 2 * three + four)
        return x.square().mean()


class Mixture(nn.Module):
    """A mixture of Gaussians, and two losses more."""

    def __init__(self, parts=5):
        super().__init__()
        self.trunk, self.parts = nn.Linear(WIDTH, WIDTH), parts
        self.weight, self.mean, self.scale = (nn.Linear(WIDTH, parts) for _ in range(3))
        self.kind = nn.Linear(WIDTH, 7)

    def forward(self, x, y, kind):
        """Return the sum of three losses of rows, numbers and classes."""
        h = self.trunk(x).relu()
        log = self.weight(h).log_softmax(-1)
        scale = F.softplus(self.scale(h)) + 1e-3
        distance = (y[:, None] - self.mean(h)) / scale
        likely = (log - scale.log() - 0.5 * distance.square() - 0.5 * math.log(2 * math.pi)).logsumexp(-1)
        return -likely.mean() + F.cross_entropy(self.kind(h), kind) + 0.01 * h.abs().mean()


def labelled(b):
    """Rows, a number and a class for each."""
    return torch.empty(b, WIDTH), torch.empty(b), torch.empty(b, dtype=torch.long)


class Towers(nn.Module):
    """Two towers and a queue of old keys, as in contrastive learning with momentum."""

    def __init__(self, length=256):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.register_buffer("queue", torch.empty(length, 32))

    def forward(self, x, y):
        """Return the loss of pairs of rows, and put the new keys into the queue."""
        q = F.normalize(self.one(x), dim=-1)
        with torch.no_grad():
            for old, new in zip(self.two.parameters(), self.one.parameters(), strict=True):
                old.mul_(0.99).add_(new, alpha=0.01)
            k = F.normalize(self.two(y), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.T], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.long, device=x.device))
        with torch.no_grad():
            self.queue = torch.cat([k, self.queue])[: self.queue.shape[0]]
        return loss


def pairs(b):
    """Two views of each."""
    return torch.empty(b, WIDTH), torch.empty(b, WIDTH)


class Masked(nn.Module):
    """Attention with a mask of ones, of which it looks whether it hides anything."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x, mask):
        """Return a loss of sequences and their mask."""
        hidden = None if mask.all() else ~mask
        y = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return y[mask].square().mean()


def padded(b, s):
    """Sequences and a mask that hides nothing."""
    return torch.empty(b, s, WIDTH), torch.ones(b, s, dtype=torch.bool)


# -- trained by a step of one's own ------------------------------------------------------------------------------------


def gan():
    """A generator, a critic, and an optimizer for each."""
    make = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))
    return {
        "make": make,
        "judge": judge,
        "of_make": torch.optim.Adam(make.parameters()),
        "of_judge": torch.optim.RMSprop(judge.parameters()),
    }


def gan_step(made, real):
    """Train the critic twice with a penalty on its gradient, then the generator."""
    make, judge = made["make"], made["judge"]
    for _ in range(2):
        fake = make(torch.randn(real.shape[0], 16)).detach()
        mix = (real + fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(judge(mix).sum(), mix, create_graph=True)
        loss = judge(fake).mean() - judge(real).mean() + 10 * (slope.norm(dim=-1) - 1).square().mean()
        loss.backward()
        made["of_judge"].step()
        made["of_judge"].zero_grad()
    (-judge(make(torch.randn(real.shape[0], 16))).mean()).backward()
    made["of_make"].step()
    made["of_make"].zero_grad()
    made["of_judge"].zero_grad()


def distilled():
    """A teacher, a student, and the student's optimizer."""
    teacher = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 10)).eval().requires_grad_(False)
    student = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 10))
    return teacher, student, torch.optim.AdamW(student.parameters())


def distilled_step(made, x):
    """Two backward calls whose gradients add up, clipped."""
    teacher, student, optimizer = made
    with torch.no_grad():
        wanted = teacher(x).softmax(-1)
    logits = student(x)
    F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean").backward(retain_graph=True)
    (0.1 * logits.square().mean()).backward()
    nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def encoder():
    """PyTorch's own encoder."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2)


def lstm():
    """Two layers, both directions."""
    return Recurrent("LSTM", num_layers=2, bidirectional=True, dropout=0.1)


def gru():
    """One layer."""
    return Recurrent("GRU")


unet, experts = UNet, Experts
MODULES = {
    "U-Net with skips": (UNet, pictures, None),
    "shared and tied weights": (Shared, tokens, None),
    "gradient penalty": (Penalty, rows, None),
    "LSTM": (lstm, tokens, None),
    "GRU": (gru, tokens, None),
    "function with its own backward": (Custom, tokens, None),
    "experts in a loop": (Experts, tokens, None),
    "weight norm": (Norms, sound, None),
    "FFT": (Fourier, tokens, None),
    "branch on a value": (Branch, tokens, None),
    "loop over time": (OverTime, tokens, None),
    "nn.TransformerEncoder": (encoder, tokens, None),
    "spectral norm": (Spectral, rows, None),
    "sampled at computed places": (Deformed, pictures, None),
    "graph, gather and scatter": (Scattered, graph, None),
    "embedding bags": (Tables, bags, None),
    "WaveNet": (WaveNet, sound, None),
    "normalising flow": (Flow, rows, None),
    "neural ODE": (Ode, rows, None),
    "mixture density, three losses": (Mixture, labelled, None),
    "two towers and a queue": (Towers, pairs, None),
    "mask of ones": (Masked, padded, None),
    "GAN, two optimizers": (gan, rows, gan_step),
    "distillation, two backwards": (distilled, rows, distilled_step),
}
"""By name: what makes it, what it is called with, and how it is trained where that is not forward, backward, optimizer."""
