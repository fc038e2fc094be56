"""Compare ranks of captured models with dry runs of PyTorch's own DDP, FSDP2 and ZeroRedundancyOptimizer on the simulated device.

The dry run wraps the very module (all layers, the sizes that are asked for) and trains two steps as rank 0 of 4.

python tools/captured_dry_runs.py OUT.json [type ...]     results so far, each type in a process of its own
python tools/captured_dry_runs.py OUT.json --page         docs/captured-dry-runs.md of them
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "captured-dry-runs.md"
GPUS, LAYERS = 4, 3
TYPES = {
    "llama": "decoder", "gpt2": "decoder, tied", "bert": "encoder", "t5": "encoder and decoder", "paligemma": "pictures and text",
    "mixtral": "experts", "vit": "pictures", "dit": "diffusion", "lfm2": "hybrid", "bitnet": "decoder, no family",
    "bart": "encoder and decoder", "deberta-v2": "encoder, no family",
}  # fmt: skip
LONG = {"llava": 700}
WAYS = ("DDP", "ZeRO-1", "FSDP2")
ZERO = dict(zip(WAYS, (0, 1, 3), strict=True))
PRECISIONS = {"bf16-pure": "sgd", "bf16-autocast": "adamw-fused"}
OWN = '''
import torch
from torch import nn


def vit():
    from transformers import ViTConfig, ViTForImageClassification
    config = ViTConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536, num_labels=1000)
    return ViTForImageClassification(config)


def pictures(b, s):
    return {"pixel_values": torch.empty(b, 3, 224, 224), "labels": torch.zeros(b, dtype=torch.long)}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.shift = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x, c):
        a, b, g, d, e, h = self.shift(nn.functional.silu(c)).unsqueeze(1).chunk(6, -1)
        y = self.one(x) * (1 + a) + b
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        x = x + g * self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + h * self.mlp(self.two(x) * (1 + d) + e)


class Dit(nn.Module):
    """Latents in, noise out (Peebles and Xie 2023)."""

    def __init__(self, width=512, depth=4):
        super().__init__()
        self.into, self.time, self.last = nn.Linear(16, width), nn.Linear(256, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, latents, steps):
        x, c = self.into(latents), self.time(steps)
        for block in self.blocks:
            x = block(x, c)
        return (self.last(x) - latents).pow(2).mean()


def dit():
    return Dit()


def latents(b, s):
    return torch.empty(b, s, 16), torch.empty(b, 256)
'''
INPUTS = {"vit": "pictures", "dit": "latents"}


class Wrapped:
    """One rank of a training whose module is wrapped by PyTorch itself."""

    def __init__(self, job: Any, sizes: dict[str, int], zero: int, optimizer: str) -> None:
        self.job, self.sizes, self.zero, self.optimizer = job, sizes, zero, optimizer
        self.target = ""
        self.assumed: dict[str, str] = {}
        self.uneven = 0.0
        """Bytes of states of AdamW that this rank has beside a fourth of all."""
        self._step: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: Any, device: str) -> Iterator[Any]:
        """A context that builds the module, and yields what trains a step."""
        self.device, self.module = device, self.job.build(device)
        self.given = self.job.inputs(device, self.module, **self.sizes)
        yield lambda _: self._step()

    def introduce(self, observer: Any) -> None:
        """Wrap it."""
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.utils._pytree import tree_leaves

        from loadgauge.pytorch.capture.lists.blocks import blocks
        from loadgauge.pytorch.record.allocations import INPUTS as GIVEN

        module, run, tracker = self.module, self.job.run, observer.tracker
        tracker.suspended += 1
        mesh = init_device_mesh(self.device, (GPUS,))
        model = module
        mixed = run.training.precision.autocast
        if self.zero >= 2:
            keywords: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.zero == 3}
            if mixed:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                keywords["mp_policy"] = policy
            for stack in blocks(module, getattr(module, "config", None)).stacks:
                for path in stack.paths:
                    fully_shard(module.get_submodule(path), **keywords)
            fully_shard(module, **keywords)
        tracker.suspended -= 1
        observer.name(module)
        if self.zero < 2:
            model = nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())
        tracker.claim(tree_leaves(self.given), GIVEN)
        trained = [one for one in model.parameters() if one.requires_grad]
        if self.zero == 1:
            kind, more = (torch.optim.SGD, {}) if self.optimizer == "sgd" else (torch.optim.AdamW, {"fused": True})
            optimizer: Any = ZeroRedundancyOptimizer(trained, kind, process_group=mesh.get_group(), lr=1e-3, **more)
            if more:  # whole parameters go to a rank, so that shares of the states differ
                own = sum(one.numel() for group in optimizer.optim.param_groups for one in group["params"])
                self.uneven = 8 * (own - sum(one.numel() for one in trained) / GPUS)
        else:
            optimizer = run.optimizer(trained)
        words, keywords = self.given

        def step() -> None:
            with contextlib.nullcontext() if self.zero >= 2 else run.autocast(self.device):
                loss = self.job.loss(model(*words, **keywords))
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        self._step = step


def tried(kind: str) -> dict[str, Any]:
    """What comparing one type comes to: (estimate, dry run) [bytes] for each precision and way."""
    import loadgauge
    from loadgauge.core.base.errors import Error, NotModelled
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.capture.call import module_of
    from loadgauge.pytorch.capture.inputs.kinds import of_config
    from loadgauge.pytorch.capture.requests import list_request
    from loadgauge.pytorch.trace import subprocess
    from loadgauge.pytorch.trace.programs.script import function
    from loadgauge.pytorch.trace.torch_run import TorchRun
    from loadgauge.pytorch.trace.trace import trace
    from small_models import small_config

    def in_child(work: Any, request: Any, shown: Any = None, **arguments: Any) -> Any:
        return work(request, **arguments)

    def numbers(*_: Any) -> Any:
        raise NotModelled("numbers alone: what formulas say is compared in docs/captured-accuracy.md")

    subprocess.in_child = in_child  # type: ignore[assignment]
    vars(list_request)["recorded"] = numbers
    begun = time.process_time()
    out: dict[str, Any] = {}
    sizes = {"b": 8, "s": LONG.get(kind, 400)}
    sizes["t"] = sizes["s"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "own.py"
        script.write_text(OWN)
        for precision, optimizer in PRECISIONS.items():
            if kind in INPUTS and precision == "bf16-pure":
                precision = "fp32"
            run = TorchRun.of(Job(model="", seq_len=1, precision=precision, optimizer=optimizer))
            asked: dict[str, Any] = {
                "micro_batch": sizes["b"], "seq_len": sizes["s"], "precision": precision, "optimizer": optimizer,
                "framework": "huggingface", "gpus": GPUS,
            }  # fmt: skip
            if kind in INPUTS:
                target, inputs = f"{script}:{kind}", f"{script}:{INPUTS[kind]}"
                asked["inputs"] = inputs
                job = module_of(function(target), function(inputs), run)
            else:
                config = small_config(kind, LAYERS)
                target = str(Path(folder) / f"{kind}.json")
                Path(target).write_text(json.dumps(config.to_dict(), default=str), encoding="utf-8")
                asked["road"] = "captured"
                job = of_config(config, run)
            for way, zero in ZERO.items():
                row: dict[str, Any] = {}
                out[f"{precision}, {way}"] = row
                try:
                    more: dict[str, Any] = {} if zero < 2 else {"end_units": "root"}
                    found = loadgauge.estimate(target, zero=zero, **more, **asked)
                    row["estimate"] = max(
                        float(moment.total) - float(moment.parts["outside"]) for moment in found.workings.phases
                    )
                    own = {name: sizes[name] for name in job.names}
                    wrapped = Wrapped(job, own, zero, optimizer)
                    row["dry run"] = trace(wrapped, "cuda", gpus=GPUS).peak.total - wrapped.uneven
                except Error as error:
                    row["refused"] = str(error)[:200]
                except Exception as error:
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    row["error"] = f"{type(error).__name__}: {str(error)[:160]} ({Path(at.filename).name}:{at.lineno})"
                text = f"{row['estimate'] / row['dry run'] - 1:+.3%}" if "dry run" in row else str(row)
                print(f"  {kind}: {precision}, {way}: {text}", flush=True)
    return {"ways": out, "seconds": round(time.process_time() - begun, 1)}


def page(done: dict[str, Any], releases: str) -> str:
    """docs/captured-dry-runs.md."""
    shares = [
        abs(row["estimate"] / row["dry run"] - 1)
        for one in done.values()
        for row in one["ways"].values()
        if "dry run" in row
    ]
    whole = [
        kind for kind, one in done.items()
        if all("dry run" in row and abs(row["estimate"] / row["dry run"] - 1) <= 0.01 for row in one["ways"].values())
    ]  # fmt: skip
    lines = [
        "# Captured models on several ranks, against dry runs",
        "",
        f"Made by `python tools/captured_dry_runs.py OUT.json`, with {releases}: rank 0 of {GPUS},",
        f"8 sequences of 400 tokens on each, small models of {LAYERS} layers. The estimate takes the captured list; the dry run",
        "wraps the very module, all layers, with `DistributedDataParallel` (ZeRO-1: `ZeroRedundancyOptimizer` beside it) or",
        "`fully_shard` on each layer and on the rest, and trains two steps on the simulated device. Numbers are how far the",
        "estimate's peak of tensors lies from the dry run's. The first three columns are bf16-pure with SGD (modules of one's own:",
        "fp32), where most of the peak is activations; the others bf16-autocast with fused AdamW, which FSDP2 has as",
        "`MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`. Lists are captured as numbers at these sizes.",
        "`ZeroRedundancyOptimizer` gives whole parameters to a rank: what rank 0 has of AdamW's states beside a fourth of all is",
        "taken off the dry run, as the estimate shares equally.",
        "",
        f"{len(shares)} comparisons, {sum(one <= 0.01 for one in shares)} within 1 %;"
        f" {len(whole)} of {len(done)} models within 1 % in all. The largest difference is {max(shares):.2%}.",
        "",
        f"| type | kind | {' | '.join(WAYS)} | {' | '.join(WAYS)} |",
        f"|---|---|{'--:|' * 6}",
    ]
    notes = []
    for kind, one in done.items():
        cells = []
        for name, row in one["ways"].items():
            if "dry run" in row:
                cells.append(f"{row['estimate'] / row['dry run'] - 1:+.2%}")
            else:
                cells.append("-")
                notes.append(f"- `{kind}`, {name}: {row.get('refused') or row.get('error')}")
        lines.append(f"| {kind} | {TYPES[kind]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(["Not compared:", "", *notes] if notes else [])]).rstrip() + "\n"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    import torch
    import transformers

    path, given = Path(sys.argv[1]), sys.argv[2:]
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if given == ["--page"]:
        versions = f"transformers {transformers.__version__} and PyTorch {torch.__version__.partition('+')[0]}"
        PAGE.write_text(page({kind: done[kind] for kind in TYPES if kind in done}, versions))
        sys.exit()
    for kind in given or [kind for kind in TYPES if kind not in done]:
        done[kind] = tried(kind)
        path.write_text(json.dumps(done, indent=0), encoding="utf-8")
