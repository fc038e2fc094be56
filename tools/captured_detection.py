"""Compare captured detection networks of torchvision with their own training step on the CPU, with the rows which that step had.

python tools/captured_detection.py NAME [side]      one model, pictures of side x side, as JSON
python tools/captured_detection.py small            a Mask R-CNN of three layers

A step of the real model is run on random pictures and boxes. How many rows were chosen at each line is read off it and stated for
the capture, as by `--rows`. Compared are parameters, FLOPs (PyTorch's own counter), the bytes that autograd keeps (its hooks on
saved tensors), and operation by operation the names and the bytes of every new tensor. Needs torchvision; `torchvision_beside_cpu`.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchvision_beside_cpu import torchvision

_NAMES = (
    "fasterrcnn_resnet50_fpn fasterrcnn_resnet50_fpn_v2 fasterrcnn_mobilenet_v3_large_fpn fasterrcnn_mobilenet_v3_large_320_fpn "
    "maskrcnn_resnet50_fpn maskrcnn_resnet50_fpn_v2 keypointrcnn_resnet50_fpn retinanet_resnet50_fpn retinanet_resnet50_fpn_v2 "
    "fcos_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large"
)
MODELS = _NAMES.split()
PICTURES, OBJECTS, SIDE = 2, 8, 800
SEED = 0


class Step(TorchDispatchMode):
    """What a real step does. rows: by line, how many were chosen, in order; ops: names, and the bytes of each new tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, list[int]] = {}
        self.ops: list[tuple[str, tuple[int, ...]]] = []
        self._asked: list[tuple[Any, int]] = []
        self._there: dict[int, Any] = {}
        """Storages by address; held, so that none is used again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and write it down."""
        from loadgauge.pytorch.record.allocations import op_name
        from loadgauge.pytorch.record.recording import views
        from loadgauge.pytorch.record.sizes import leaves

        name = func._schema.name.partition("::")[2]
        self._read(name, args)
        for leaf in leaves((args, kwargs or {})):
            self._new(leaf)
        out = func(*args, **(kwargs or {}))
        if name in ("nonzero", "masked_select", "nms"):
            self._note(out.shape[0], args[0] if name == "nonzero" else None)
        made = tuple(size for leaf in leaves((out,)) if (size := self._new(leaf)))
        if not views(func):
            self.ops.append((op_name(func), made))
        return out

    def _new(self, value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            return 0
        storage = value.untyped_storage()
        known = storage._cdata in self._there
        self._there[storage._cdata] = storage
        return 0 if known else int(storage.nbytes())

    def _read(self, name: str, args: Any) -> None:
        """Rows of the masks that an index has."""
        if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        if "put" in name and len(masks) == 1 and args[2].dim() == 0 and sum(one is not None for one in args[1]) == 1:
            return  # fills a mask
        for mask in masks:
            self._note(int(mask.count_nonzero()), mask)

    def _note(self, rows: int, mask: Any) -> None:
        """Rows at the line that asks; of one mask once."""
        if torch._C._current_autograd_node() is not None:
            return
        if mask is not None:
            if any(one is mask and version == mask._version for one, version in self._asked):
                return
            self._asked.append((mask, mask._version))
        self.rows.setdefault(_asking(), []).append(rows)


def _asking() -> str:
    """The innermost line that is neither PyTorch's, loadgauge's nor this file's."""
    from loadgauge.pytorch.device.read import of_program, place

    frame: Any = sys._getframe(1)
    while not of_program(frame.f_code.co_filename) or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return place(frame)


def compared(name: str, side: int = SIDE) -> dict[str, Any]:
    """What comparing one model of the library comes to."""
    import loadgauge
    from loadgauge.pytorch.capture.inputs.libraries import _made

    torch.set_num_threads(1)
    vision = torchvision()
    target = f"torchvision:{name}"
    model, _ = _made("torchvision", {"library": "torchvision", "_class_name": name}, name)
    drawn: Any = model.transform
    drawn.min_size = drawn.min_size[len(drawn.min_size) // 2 :][:1]  # a capture takes the one in the middle
    torch.manual_seed(SEED)
    found = against_step(
        lambda rows: loadgauge.capture(target, optimizer="sgd", rows=rows).job,
        model,
        [torch.rand(3, side, side) for _ in range(PICTURES)],
        [target_of(name, side) for _ in range(PICTURES)],
        {"b": PICTURES, "h": side, "w": side, "k": OBJECTS},
    )
    found["parameters"].append(vision.models.get_model_weights(name).DEFAULT.meta["num_params"])
    return found


def against_step(
    job: Callable[[Any], Any], model: torch.nn.Module, pictures: list[Any], targets: list[Any], sizes: dict[str, int]
) -> dict[str, Any]:
    """Compare a capture with a step of the real model. job: the training to capture, from rows as `loadgauge.capture` takes them

    Pairs are of the capture and of the step; `most` has FLOPs and kept bytes of a capture with as many rows as there can be, `peak`
    the peak of both captures [bytes].
    """
    from loadgauge.pytorch.capture.record import record

    most = record(job("most"), sizes)
    asked = {line.partition(": ")[0] for line in most.assumed if "rows" in line}
    real = _step(model, pictures, targets)
    run = record(job({line: numbers for line, numbers in real["rows"].items() if line in asked}), sizes)
    return {
        "parameters": [sum(run.parameters.values()), sum(one.numel() for one in model.parameters())],
        "flops": [_flops(run), real["flops"]],
        "kept": [sum(run.kept), real["kept"]],
        "most": [_flops(most), sum(most.kept)],
        "peak": [max(itertools.accumulate(one.changes)) for one in (run, most)],
        "operations": _differences(_ops(run), real["ops"]),
        "rows": {line.rpartition("/")[2]: numbers for line, numbers in real["rows"].items()},
        "lines": sorted(line.rpartition("/")[2] for line in asked),
        "loss": [line for line in run.assumed if line.startswith("the loss")],
    }  # fmt: skip


def _flops(run: Any) -> int:
    return sum(op.flops for op in run.ops[run.second :] if op.flops)


def _ops(run: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Operations of the first step up to the end of backward, and the bytes of each tensor that they make."""
    seen: set[int] = set()
    found = []
    for op in run.ops[: run.second]:
        seen |= set(op.reads)
        made = tuple(int(run.nbytes[number]) for number in op.makes if number not in seen)
        seen |= set(op.makes)
        if op.phase in ("forward", "backward"):
            found.append((op.name, made))
    return found


def _step(model: torch.nn.Module, pictures: list[Any], targets: list[Any]) -> dict[str, Any]:
    """A step of the real model."""
    model.train()
    given = {one.untyped_storage().data_ptr() for one in (*pictures, *(v for t in targets for v in t.values()))}
    given |= {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    packed: weakref.WeakSet[_Packed] = weakref.WeakSet()

    def pack(tensor: Any) -> Any:
        one = _Packed(tensor)
        packed.add(one)
        return one

    with _as_on_cuda(), FlopCounterMode(display=False) as counter, Step() as step:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            losses = model(pictures, targets)
            loss = sum(losses.values())
        del losses
        storages = {one.tensor.untyped_storage().data_ptr(): one.tensor.untyped_storage().nbytes() for one in packed}
        loss.backward()
    kept = sum(size for place, size in storages.items() if place not in given)
    return {"flops": counter.get_total_flops(), "kept": kept, "ops": step.ops, "rows": step.rows}


class _Packed:
    """A tensor that a node of the graph keeps, for as long as there is the node."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def target_of(name: str, side: int) -> dict[str, Any]:
    """Objects of one picture, at random places and of random sizes."""
    low = torch.rand(OBJECTS, 2) * side * 0.6
    boxes = torch.cat([low, low + side * (0.05 + 0.3 * torch.rand(OBJECTS, 2))], 1)
    found = {"boxes": boxes, "labels": torch.randint(1, 2 if name.startswith("keypoint") else 90, (OBJECTS,))}
    if name.startswith("maskrcnn"):
        found["masks"] = torch.randint(0, 2, (OBJECTS, side, side), dtype=torch.uint8)
    if name.startswith("keypointrcnn"):
        places = boxes[:, None, :2] + torch.rand(OBJECTS, 17, 2) * (boxes[:, None, 2:] - boxes[:, None, :2])
        found["keypoints"] = torch.cat([places, torch.ones(OBJECTS, 17, 1)], 2)
    return found


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Non-maximum suppression of many boxes is one call on CUDA, and one for each class on a CPU: here it is one."""
    boxes: Any = importlib.import_module("torchvision.ops.boxes")
    before = boxes._batched_nms_vanilla
    boxes._batched_nms_vanilla = boxes._batched_nms_coordinate_trick
    try:
        yield
    finally:
        boxes._batched_nms_vanilla = before


ELSEWHERE = ("aten::_to_copy", "aten::scalar_tensor", "profiler::", "aten::_local_scalar_dense", "aten::lift_fresh")
"""What is done between the host and a device, and by a profiler: none of it is on a CPU."""


def _differences(mine: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Where two lists of operations differ, without what only moves numbers: of each other pair how many, as captured and as run.

    A tensor on the host has no bytes in a capture, and is not compared.
    """
    mine, theirs = ([op for op in ops if not op[0].startswith(ELSEWHERE)] for ops in (mine, theirs))
    first, second = ([name for name, _ in ops] for ops in (mine, theirs))
    other: dict[str, int] = {}
    alike = 0

    def note(one: list[Any], two: list[Any]) -> None:
        key = f"{' '.join(map(_shown, one)) or 'none'} | {' '.join(map(_shown, two)) or 'none'}"
        other[key] = other.get(key, 0) + 1

    for what, a, b, c, d in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if what != "equal":
            note(mine[a:b], theirs[c:d])
            continue
        for one, two in zip(mine[a:b], theirs[c:d], strict=True):
            if any(one[1]) and one[1] != two[1]:
                note([one], [two])
            else:
                alike += 1
    return {"alike": alike, "captured": len(mine), "run": len(theirs), "others": other}


def _shown(op: tuple[str, tuple[int, ...]]) -> str:
    return f"{op[0].removeprefix('aten::')}{list(op[1]) if op[1] else ''}"


def small() -> dict[str, Any]:
    """What comparing a Mask R-CNN on two maps of a backbone of three layers comes to, on pictures of 64 x 64."""
    import loadgauge

    vision: Any = torchvision()
    found = vision.models.detection
    anchors, pool = found.anchor_utils.AnchorGenerator, vision.ops.MultiScaleRoIAlign

    class Backbone(torch.nn.Module):
        out_channels = 8

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(3, 8, 3, 4, 1), torch.nn.Conv2d(8, 8, 3, 2, 1)

        def forward(self, x: Any) -> dict[str, Any]:
            first = self.first(x).relu()
            return {"0": first, "1": self.second(first).relu()}

    def build() -> Any:
        return found.MaskRCNN(
            Backbone(), 3, min_size=64, max_size=64, rpn_anchor_generator=anchors(((8,), (16,)), ((0.5, 1.0, 2.0),) * 2),
            rpn_pre_nms_top_n_train=100, rpn_post_nms_top_n_train=60, rpn_batch_size_per_image=32,
            box_batch_size_per_image=24, box_roi_pool=pool(["0", "1"], 3, 2), mask_roi_pool=pool(["0", "1"], 4, 2),
        )  # fmt: skip

    def given(b: int, k: int) -> Any:
        shapes = {"boxes": (k, 4), "labels": (k,), "masks": (k, 64, 64)}
        types = {"boxes": torch.float, "labels": torch.long, "masks": torch.uint8}
        targets = [{name: torch.empty(shape, dtype=types[name]) for name, shape in shapes.items()} for _ in range(b)]
        return [torch.empty(3, 64, 64) for _ in range(b)], targets

    torch.manual_seed(SEED)
    targets = [target_of("maskrcnn", 64) for _ in range(PICTURES)]
    return against_step(
        lambda rows: loadgauge.capture(build, given, optimizer="sgd", rows=rows).job,
        build(),
        [torch.rand(3, 64, 64) for _ in range(PICTURES)],
        [one | {"labels": one["labels"] % 2 + 1} for one in targets],
        {"b": PICTURES, "k": OBJECTS},
    )


if __name__ == "__main__":
    try:
        torchvision()
    except (ImportError, OSError, subprocess.SubprocessError) as missing:
        print(f"torchvision's operators are not here: {missing}", file=sys.stderr)
        sys.exit(77)
    found = small() if sys.argv[1] == "small" else compared(sys.argv[1], *map(int, sys.argv[2:]))
    print(json.dumps(found, indent=1))
