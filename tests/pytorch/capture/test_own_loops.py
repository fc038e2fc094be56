"""How batches reach modules, what lies there in the optimizer's step, and the time of convolutions and recurrences."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import loadgauge
from command_line import document
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.time.roofline import CONVOLUTIONS, Machine, OperationTime, operation_seconds
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor
from loadgauge.pytorch.measure.benchmarks import FlopCounter
from loadgauge.pytorch.trace.programs.own_loops import fitted, manual_step

ROWS, WIDTH, FRAMES = 64, 512, 48
TEXT = f"""
import torch
from torch import nn

class Whole(nn.Linear):
    def forward(self, data):
        return super().forward(data["x"]).mean() * data["y"].mean()

def whole():
    return Whole({WIDTH}, 8)

def dictionary(b):
    return {{"x": torch.randn(b, {WIDTH}), "y": torch.randn(b)}}

def classes():
    return nn.Linear({WIDTH}, 1000)

def labelled(b):
    return torch.randn(b, {WIDTH}), torch.randint(0, 1000, (b,))

def speech():
    return nn.Linear({WIDTH}, {WIDTH})

def frames(b, t={FRAMES}, n=2):
    return torch.randn(b * n, t, {WIDTH})

def pair():
    net = nn.Linear({WIDTH}, 8)
    return net, torch.optim.SGD(net.parameters(), 0.1)

def step(nets, batch):
    net, optimizer = nets
    x, _ = batch
    optimizer.zero_grad()
    net(x).mean().backward()
    optimizer.step()

class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(8, {WIDTH}), nn.Linear({WIDTH}, 8), {{}}
        self.first.register_forward_hook(lambda module, given, made: self.kept.__setitem__("first", made.detach().clone()))

    def forward(self, x):
        return self.last(self.first(x).relu())

def aside():
    return Aside()

def narrow(b):
    return torch.randn(b, 8)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(TEXT)
    return file


def estimated(script: Path, target: str, inputs: str, more: str = "") -> dict[str, object]:
    return document(f"estimate {script}:{target} --inputs {script}:{inputs} --micro-batch {ROWS} {more}")


def captured(script: Path, target: str, inputs: str, more: str = "") -> dict[str, object]:
    return document(f"capture {script}:{target} --inputs {script}:{inputs} --micro-batch {ROWS} --json {more}")


def test_a_batch_is_spread_as_one_or_in_part() -> None:
    def two(x: int, y: int) -> tuple[int, int]:
        return x, y

    assert fitted(two, (1, 2), {}, {})(1, 2) == (1, 2)
    assert fitted(two, ([1, 2],), {}, {})([1, 2]) == (1, 2)
    assert fitted(lambda data: data, (1, 2), {}, {})(1, 2) == (1, 2)
    assert fitted(lambda record: record, (), {"x": 1}, {})(x=1) == {"x": 1}
    losses: dict[str, None] = {}
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    loss = fitted(lambda x: x, (x, y), {}, losses)(x, y)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(3.0)).item())
    assert list(losses) == ["the cross entropy of what it returns and the rest of the batch"]
    assert fitted(lambda x: x, (x, x + 1), {}, losses)(x, x + 1).item() == 1


def test_what_a_module_leaves_of_a_batch_is_what_it_is_scored_against(script: Path) -> None:
    """The probabilities of 1000 classes, and one number a row: kept by the two kernels of the loss."""
    found = captured(script, "classes", "labelled")
    own = ROWS * 1000 * 4
    assert found["kept"]["value"] == pytest.approx(own, rel=0.01)  # type: ignore[index]
    assert "cross entropy" in str(found["assumed"])
    assert captured(script, "whole", "dictionary")["parameters"] == WIDTH * 8 + 8
    assert captured(script, "pair", "labelled", f"--step {script}:step")["parameters"] == WIDTH * 8 + 8


def test_sizes_of_inputs_keep_their_defaults(script: Path) -> None:
    """t and n are frames and channels here, and not a second text or samples of a sound."""
    given = ROWS * 2 * FRAMES * WIDTH * 4
    for found in (captured(script, "speech", "frames"), captured(script, "speech", "frames", f"--size t={2 * FRAMES}")):
        assert found["sizes"]["n"] == 2  # type: ignore[index]
        assert found["at_peak"]["inputs"] == given * found["sizes"]["t"] // FRAMES  # type: ignore[index]
    memory = estimated(script, "speech", "frames")["memory"]
    states = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    assert sum(memory["parts"].values()) - memory["parts"]["outside"] > given + states  # type: ignore[index]
    assert sum(memory["parts"].values()) < 8 * given + 2**30  # type: ignore[index]


def test_inputs_and_what_is_put_aside_lie_there_in_the_optimizers_step(script: Path) -> None:
    """Of 4 bytes: five times the parameters, the batch, and what the hook keeps of the step."""
    memory = estimated(script, "aside", "narrow")["memory"]
    step = next(one for one in memory["moments"] if one["phase"] == "step")["parts"]  # type: ignore[index]
    parameters = 8 * WIDTH + WIDTH + WIDTH * 8 + 8
    expected = 4 * (5 * parameters + ROWS * 8 + ROWS * WIDTH)
    assert sum(step.values()) - step["outside"] == pytest.approx(expected, rel=1e-3)


class Manual(nn.Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = nn.Linear(4, 1), 0

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        return [torch.optim.SGD(self.net.parameters(), 0.1)], []

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        (optimizer,) = self._trainer.optimizers  # type: ignore[attr-defined]
        loss = self.net(batch).mean()
        self._trainer.strategy.backward(loss, None)  # type: ignore[attr-defined]
        self.log("loss", loss)
        optimizer.step()
        self.steps += 1


def test_a_module_that_optimizes_by_itself_finds_a_trainer() -> None:
    module = Manual()
    before = module.net.bias.item()
    step = manual_step(module, (torch.ones(2, 4),), {})
    assert step is not None
    step(torch.ones(2, 4))
    assert module.steps == 1
    assert module.net.bias.item() == pytest.approx(before - 0.1)
    assert manual_step(nn.Linear(2, 2), (), {}) is None


def seconds(precision: str, card: str = "a100-sxm4-80gb", **fields: object) -> OperationTime:
    """A convolution of 3 x 3 over 256 pictures of 56 x 56, from 64 to 64 channels, in its two halves."""
    machine = Machine.of(gpu(card), efficiencies(card), training("huggingface", precision))
    machine = msgspec.structs.replace(machine, software=fields.pop("software", machine.software))
    flops = 2 * 256 * 56 * 56 * 64 * 64 * 9
    nbytes = 2 * 256 * 64 * 56 * 56 * (4 if precision == "fp32" else 2)
    x = Tensor("x", 256 * 64 * 56 * 56, 4)
    given = {"implicit": Gemm(256 * 56 * 56, 64, 576), "moves": (nbytes, 2 * nbytes), "taps": 9, **fields}
    given = {"forward_flops": flops, "input_gradient_flops": 2 * flops} | given
    operation = Operation("conv", "convolution", (x,), (x,), **given)  # type: ignore[arg-type]
    return operation_seconds(operation, machine)


def test_a_convolution_takes_the_time_of_its_product() -> None:
    """No faster than the card's peak in the format that it runs in, nor than its memory; twice as long backward."""
    flops = 2 * 256 * 56 * 56 * 64 * 64 * 9
    for precision, peak in (("fp32", 156e12), ("bf16-autocast", 312e12)):
        found = seconds(precision)
        assert flops / peak < found.forward < 5 * flops / peak
        assert 2 < found.backward / found.forward < 2.6
        assert seconds(precision, strided=True).forward > found.forward
    assert seconds("fp32", "v100-sxm2-32gb").forward > flops / 15.7e12 / 2  # no TF32, but half the products
    # TF32 has half the peak of 16 bits and the same tensor cores, whatever products reach without them.
    wide, half = (
        seconds(name, moves=(0, 0), software=2.0).forward
        - seconds(name, moves=(0, 0), software=1.0).forward
        - CONVOLUTIONS[True].start
        for name in ("fp32", "bf16-autocast")
    )
    assert wide == pytest.approx(2 * half, rel=0.015)  # power slows the narrow ones a little


MEASURED = {
    16: (5.6, 11.0, 14.4, 17.6, 36.0, 171.4),
    32: (21.9, 34.1, 54.8, 76.1, 141.2, 734.8),
    64: (69.6, 141.2, 228.6, 319.8, 600.0, 3090.4),
}
"""Milliseconds of 24 layers of filters of one channel, 64 x 384 channels of so many places a side, float32 on an RTX 2080 Ti, by
side of the filter (arXiv 2203.06717, table 1)."""


@pytest.mark.parametrize("side", MEASURED)
def test_filters_of_one_channel_take_the_time_that_was_measured(side: int) -> None:
    places = 64 * 384 * side**2
    errors = []
    for width, measured in zip((3, 5, 7, 9, 13, 31), MEASURED[side], strict=True):
        flops = 2 * places * width**2
        given: dict[str, object] = {
            "implicit": Gemm(64 * side**2, 1, width**2, 384),
            "moves": (8 * places, 12 * places),
        }
        given |= {"forward_flops": flops, "input_gradient_flops": 2 * flops, "software": 1.0}
        whole, half = (seconds(precision, "rtx2080ti", **given) for precision in ("fp32", "fp16"))
        errors.append(24e3 * whole.forward / measured - 1)
        assert whole.backward == pytest.approx(4.6 * whole.forward, rel=0.1)
        assert half.forward < whole.forward
    assert statistics.median(map(abs, errors)) < 0.1, errors
    assert max(map(abs, errors)) < 0.4, errors


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Conv2d(8, 8, 7, padding=3, groups=8),
        nn.ConvTranspose2d(8, 16, 4, stride=2, groups=4),
    ],
)
def test_each_gradient_of_a_convolution_takes_what_forward_does(layer: nn.Module) -> None:
    """2 FLOPs for each weight at each place: of the result, or of the input where that is the smaller picture."""
    x = torch.randn(2, 8, 10, 12, requires_grad=True)
    with FlopCounter() as forward:
        out = layer(x)
    with FlopCounter() as backward:
        out.sum().backward()
    places = x if isinstance(layer, nn.ConvTranspose2d) else out
    weights = next(layer.parameters()).numel()
    assert forward.hardware == 2 * weights * 2 * places[0, 0].numel()
    assert backward.hardware == 2 * forward.hardware


def test_a_recurrence_waits_for_each_of_its_turns() -> None:
    gates = Gemm(32, 2048, 512)
    few, many = (seconds("fp32", implicit=gates, turns=turns).forward for turns in (100, 300))
    assert many - few == pytest.approx(2 * (few - seconds("fp32", implicit=gates, turns=1).forward), rel=0.03)


def test_channels_last_stays_and_is_faster() -> None:
    def pictures(b: int) -> torch.Tensor:
        return torch.empty(b, 8, 16, 16).to(memory_format=torch.channels_last)

    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )

    class Rows(nn.Module):
        """Lays channels last, which costs a copy where they do not lie so."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).permute(0, 2, 3, 1).contiguous().square().mean()

    together = loadgauge.capture(lambda: Rows(net()), pictures).at(b=4)
    apart = loadgauge.capture(lambda: Rows(net()), lambda b: torch.empty(b, 8, 16, 16)).at(b=4)
    names = [one.name for one in together.operations]
    assert not any("clone" in name for name in names)
    assert together.kept_bytes(b=4) <= apart.kept_bytes(b=4)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("whisper-small", 241_734_912),
        ("openai/whisper-large-v3", 1_543_490_560),
        ("t5-large", 737_668_096),
        ("bart-large", 406_291_456),
        ("vit-base", 86_567_656),
        ("resnet50", 25_557_032),
        ("clip-vit-base-patch32", 151_277_313),
        ("siglip-base", 203_155_970),
    ],
)
def test_encoders_by_their_plain_names(name: str, parameters: int) -> None:
    """Parameters as each repository's weights have them."""
    from loadgauge.pytorch.capture.inputs.kinds import model_class
    from loadgauge.pytorch.capture.inputs.target import config_keys
    from loadgauge.pytorch.trace.programs.target import config_object

    config = config_object(config_keys(name), name)
    with torch.device("meta"):
        model = model_class(config)._from_config(config)
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(parameters, rel=1e-3)


BOTTLENECK = """
import torch
from torch import nn
class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.first = nn.Conv2d(256, 64, 1, bias=False), nn.BatchNorm2d(64, track_running_stats=False)
        self.middle, self.second = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64, track_running_stats=False)
        self.widen, self.third = nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256, track_running_stats=False)
        self.relu = nn.ReLU(inplace=True)
    def forward(self, x):
        y = self.relu(self.first(self.narrow(x)))
        y = self.third(self.widen(self.relu(self.second(self.middle(y)))))
        y += x
        return self.relu(y)
def net():
    return nn.Sequential(nn.Conv2d(3, 256, 1, bias=False), Bottleneck())
def batch(b):
    return torch.empty(b, 3, 64, 64)
"""


def test_every_byte_of_a_bottleneck_is_moved_once(tmp_path: Path) -> None:
    """Bytes of a block of ResNet, by hand: a unit is a tensor of 64 channels.

    ReLU reads and writes what it overwrites, and backward reads two and writes one; a sum reads two and writes one, and so does the
    sum of the two gradients of what comes in; a norm reads twice and writes, and backward reads two twice.
    """
    script = tmp_path / "net.py"
    script.write_text(BOTTLENECK)
    found = loadgauge.estimate(
        f"{script}:net",
        inputs=f"{script}:batch",
        micro_batch=16,
        optimizer="sgd",
        gpu="v100-sxm2-32gb",
        precision="fp32",
    )
    unit = 16 * 64 * 64 * 64 * 4
    ahead: Counter[str] = Counter()
    back: Counter[str] = Counter()
    for timed in found.workings.operations:
        if timed.operation.moves is not None and timed.operation.kind != "view":
            name = re.sub(r"[.\d]+$", "", timed.operation.name).rpartition(".")[2].strip("_")
            ahead[name] += timed.operation.moves[0] / unit
            back[name] += timed.operation.moves[1] / unit
    assert ahead["relu"] == pytest.approx(2 * (1 + 1 + 4), rel=1e-3)
    assert back["relu"] == pytest.approx(3 * (1 + 1 + 4), rel=1e-3)
    assert ahead["add"] == pytest.approx(3 * 4, rel=1e-3)
    assert ahead["native_batch_norm"] == pytest.approx(3 * (1 + 1 + 4), rel=1e-3)
    assert back["native_batch_norm"] == pytest.approx(5 * (1 + 1 + 4), rel=1e-3)
    assert ahead["convolution"] == pytest.approx((3 / 64 + 4) + (4 + 1) + (1 + 1) + (1 + 4), rel=1e-2)
    # One read of the gradient, of what came in and a gradient of it, if it is asked for.
    assert back["convolution"] == pytest.approx((4 + 3 / 64) + (1 + 2 * 4) + (1 + 2) + (4 + 2), rel=1e-2)
    assert back["beside"] == pytest.approx(3 * 4, rel=0.1)
