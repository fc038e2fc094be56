"""Detection networks: torchvision's operators on the simulated device, boxes that data chooses, and several losses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import loadgauge
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.capture.capture import capture_at
from loadgauge.pytorch.capture.inputs.libraries import usual_precision, usual_sizes
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.device.kernels.vision_ops import operators, torchvision
from loadgauge.pytorch.trace.programs.training import loss_words, mean_loss
from loadgauge.pytorch.trace.torch_run import TorchRun

operators()
VISION = torch.ops.torchvision


class Boxes(nn.Module):
    """Features of the boxes that non-maximum suppression leaves, pooled, and two losses of them. `suppress`: how it is done"""

    def __init__(self, suppress: Any = None, pool: Any = None) -> None:
        super().__init__()
        self.body, self.head, self.places = nn.Conv2d(3, 8, 3), nn.Linear(8 * 9, 5), nn.Linear(8 * 9, 4)
        self.suppress, self.pool = suppress or VISION.nms, pool or VISION.roi_align

    def forward(self, pictures: torch.Tensor, boxes: torch.Tensor, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        left = self.suppress(boxes, scores, 0.5)  # stated
        regions = torch.cat([torch.zeros_like(boxes[left, :1]), boxes[left]], 1)
        pooled = self.pool(self.body(pictures), regions, 0.5, 3, 3, 2, False).flatten(1)
        return {"classes": self.head(pooled).logsumexp(1).mean(), "places": self.places(pooled).abs().sum()}


LINE = next(
    f"{Path(__file__).name}:{number}"
    for number, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# stated")
)


def inputs(b: int, k: int) -> Any:
    return torch.empty(b, 3, 16, 16), torch.empty(k, 4), torch.empty(k)


def one_after_another(boxes: torch.Tensor, scores: torch.Tensor, most: float) -> torch.Tensor:
    """Non-maximum suppression as it is defined."""
    left: list[int] = []
    for one in scores.argsort(descending=True).tolist():
        low, high = torch.max(boxes[one, :2], boxes[left, :2]), torch.min(boxes[one, 2:], boxes[left, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        if bool((shared / (areas[one] + areas[left] - shared) <= most).all()):
            left.append(one)
    return torch.tensor(left)


def average(features: torch.Tensor, regions: torch.Tensor, *_: Any) -> torch.Tensor:
    """Some pooling of 3 x 3 places with the sizes of the real one."""
    return functional.adaptive_avg_pool2d(features[regions[:, 0].long()], 3)


def test_boxes_that_are_left_are_stated_and_all_losses_are_trained() -> None:
    """FLOPs are those of a step on real boxes, of which as many are left."""
    corner = torch.arange(30.0)[:, None] % 10 * 4
    boxes = torch.cat([corner, corner, corner + 3, corner + 3], 1)  # three of each
    real = torch.rand(2, 3, 16, 16), boxes, torch.rand(30)
    with FlopCounterMode(display=False) as counter:
        sum(Boxes(one_after_another, average)(*real).values()).backward()
    captures = loadgauge.capture(Boxes, inputs, optimizer="sgd", rows={LINE: 10})
    found = capture_at(captures.job, "", {"b": 2, "k": 30})
    assert found.flops(b=2, k=30) == counter.get_total_flops()
    assert "loss: the sum of classes, places" in found.assumed
    most = capture_at(loadgauge.capture(Boxes, inputs, optimizer="sgd", rows="most").job, "", {"b": 2, "k": 30})
    assert most.flops(b=2, k=30) > found.flops(b=2, k=30)
    with pytest.raises(ConfigError, match=rf"{LINE}.*--rows LINE=NUMBER"):
        loadgauge.capture(Boxes, inputs, optimizer="sgd").at(b=2, k=30)


def test_formulas_hold_at_other_numbers_of_boxes() -> None:
    """With as many boxes as there are; what non-maximum suppression compares, a bit a pair, is rounded up to words."""
    captures = loadgauge.capture(Boxes, inputs, optimizer="sgd", rows="most")
    found = captures.at(b=2, k=100)
    assert not found.plain
    asked = {"b": 5, "k": 256}
    plain = record(captures.job, asked)
    assert found.holds(**asked)
    assert found.flops(**asked) == sum(op.flops for op in plain.ops[plain.second :] if op.flops)
    assert found.kept_bytes(**asked) == sum(plain.kept)
    pairs = [change for change in plain.changes if change == 256 * 4 * 8]  # 256 bits are 4 words
    assert pairs


def test_under_autocast_boxes_are_in_single_precision() -> None:
    captures = loadgauge.capture(Boxes, inputs, optimizer="sgd", precision="bf16-autocast", rows="most")
    run = record(captures.job, {"b": 2, "k": 30})
    pooled = [one for op in run.ops[run.second :] if op.name == "torchvision::roi_align" for one in op.makes]
    assert [run.nbytes[one] for one in pooled] == [30 * 8 * 9 * 4]


def test_a_deformable_convolution_has_the_work_of_one_that_is_not() -> None:
    class Deformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Conv2d(4, 6, 3, padding=1)

        def forward(self, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
            weight, bias = self.own.weight, self.own.bias
            mask = x.new_zeros(x.shape[0], 1)
            return VISION.deform_conv2d(x, weight, offset, mask, bias, 1, 1, 1, 1, 1, 1, 1, 1, False).mean()

    def given(b: int) -> Any:
        return torch.empty(b, 4, 7, 5, requires_grad=True), torch.empty(b, 18, 7, 5)

    with FlopCounterMode(display=False) as counter:
        nn.Conv2d(4, 6, 3, padding=1)(given(3)[0]).mean().backward()
    found = capture_at(loadgauge.capture(Deformed, given, optimizer="sgd").job, "", {"b": 3})
    assert found.flops(b=3) == counter.get_total_flops()


def test_what_of_a_result_is_trained() -> None:
    one, two = (torch.tensor(value, requires_grad=True) for value in (2.0, 0.5))
    accuracy, logits = torch.tensor(0.9), torch.ones(3, 4, requires_grad=True)
    cases: list[tuple[Any, float, str]] = [
        ({"a": one, "b": two}, 2.5, "the sum of a, b"),
        ((one, two), 2.5, "the sum of 0, 1"),
        ({"a": one, "accuracy": accuracy, "b": two}, 2.5, "the sum of a, b"),
        ({"a": two, "loss": one}, 2.0, "what the result has at loss"),
        ({"logits": logits, "loss": one}, 2.0, "what the result has at loss"),
        ((logits, two), 0.5, "what the result has at 1"),  # nanoGPT's
        ((logits, logits, accuracy), 1.0, "the mean of the first of 3 tensors that it returns"),
        ({"a": one}, 2.0, ""),
    ]
    for result, value, words in cases:
        assert float(mean_loss(result).detach()) == value
        assert loss_words(result) == words


def test_a_mask_that_is_filled_chooses_no_rows() -> None:
    """CUDA writes a number where a mask is true without looking for the places."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            labels = torch.empty_like(x)
            labels[x > 0] = 1.0
            return (self.own(x) * labels).mean()

    run = record(loadgauge.capture(Filled, lambda b: torch.empty(b, 4), optimizer="sgd", rows="most").job, {"b": 64})
    assert not any("rows" in line for line in run.assumed)
    assert not any("nonzero" in op.name for op in run.ops)


def test_the_code_itself_may_say_how_many_rows_there_are_at_most(tmp_path: Path) -> None:
    """A sampler that takes 40 boxes of which a quarter holds something: 10, though there are 40."""
    folder = tmp_path / "torchvision" / "models" / "detection"
    folder.mkdir(parents=True)
    (folder / "roi_heads.py").write_text(
        "import torch\nclass Sampler:\n    batch_size_per_image, positive_fraction = 40, 0.25\n"
        "class Heads(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.own, self.fg_bg_sampler = torch.nn.Linear(4, 4), Sampler()\n"
        "    def forward(self, x, labels):\n        for img_id in range(1):\n"
        "            pos = torch.where(labels[img_id] > 0)[0]\n        return self.own(x[pos]).mean()\n",
        encoding="utf-8",
    )
    sys.path.insert(0, str(folder))
    try:
        import roi_heads  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("roi_heads", None)

    def given(b: int) -> Any:
        return torch.empty(b, 4), torch.empty(1, b, dtype=torch.long)

    found = capture_at(loadgauge.capture(roi_heads.Heads, given, optimizer="sgd", rows="most").job, "", {"b": 40})
    assert found.flops(b=40) == 2 * 2 * 10 * 4 * 4  # forward, and the weight's gradient
    assert any("as many rows as the code takes at most: 10" in line for line in found.assumed)


def test_detection_has_sizes_and_a_precision_of_its_own() -> None:
    def of(name: str) -> Any:
        keys = {"library": "torchvision", "_class_name": name}
        return usual_sizes(keys, name), usual_precision(keys, name)

    assert of("maskrcnn_resnet50_fpn") == ({"h": 800, "w": 800, "k": 8}, "fp32")
    assert of("resnet50") == ({"h": 224, "w": 224}, None)


# -- with torchvision itself ---------------------------------------------------------------------------------------------


def test_a_small_mask_rcnn_is_its_own_step_operation_by_operation() -> None:
    """In a process of its own: here torchvision's operators may be declared alone."""
    if find_spec("torchvision") is None:
        pytest.skip("needs torchvision: pip install --no-deps torchvision==0.28.0")
    tool = Path(__file__).parents[3] / "tools" / "captured_detection.py"
    run = subprocess.run([sys.executable, tool, "small"], capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for what in ("parameters", "flops", "kept"):
        assert found[what][0] == found[what][1], what
    assert found["most"][0] >= found["flops"][0]
    assert found["most"][1] >= found["kept"][0]
    # non-maximum suppression is written out, and of a sum PyTorch's kernel holds what it adds up
    others = [key for key in found["operations"]["others"] if not key.startswith(("smooth_l1_loss[4] |", "sort["))]
    assert not others
    assert found["operations"]["alike"] > 600


def test_models_of_the_library_have_the_parameters_that_are_published() -> None:
    from loadgauge.pytorch.capture.inputs.libraries import of_keys

    pytest.importorskip("PIL")
    if find_spec("torchvision") is None:
        pytest.skip("needs torchvision: pip install --no-deps torchvision==0.28.0")
    for name in ("fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"):
        keys = {"library": "torchvision", "_class_name": name}
        module = of_keys(keys, name, TorchRun.of(Job(model="", precision="fp32"))).build("meta")
        published = torchvision().models.get_model_weights(name).DEFAULT.meta["num_params"]
        assert sum(one.numel() for one in module.parameters()) == published
        with pytest.raises(NotModelled, match="no 16-bit weights"):
            of_keys(keys, name, TorchRun.of(Job(model="", precision="bf16-pure")))
