"""`make gpu`: calibrates this GPU, and runs a fixed list of trainings on it, each by formula, trace and measurement.

One JSON comes of it, with device, versions and date. `runs` in it are rows as those of `data/runs`, so that
`loadgauge validate --runs FILE.json` predicts what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch

from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.hardware.hardware import Gpu, gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.catalogue import find_model
from loadgauge.pytorch.compare.compare import Comparison, compare_request
from loadgauge.pytorch.measure.benchmarks import Sizes
from loadgauge.pytorch.measure.calibrate import Calibration, calibrate, text
from loadgauge.pytorch.measure.train_steps import MeasuredSteps
from loadgauge.pytorch.trace.subprocess import Request, in_child
from loadgauge.pytorch.trace.torch_run import OPTIMIZERS

TIMED = 5


class Case(msgspec.Struct, frozen=True):
    """A training: a model of the catalogue, its number of layers, and how it is trained."""

    job: Job
    layers: int

    @property
    def name(self) -> str:
        """Everything that distinguishes it from the others."""
        job = self.job
        parts = [job.model, f"{self.layers} layers", job.precision, job.optimizer, job.attention]
        parts += [f"{job.micro_batch} x {job.seq_len}", *(["checkpointed"] if job.recompute == "full" else [])]
        return ", ".join(map(str, parts))


def case(model: str, layers: int, seq_len: int = 2048, micro_batch: int = 1, **more: Any) -> Case:
    """A case; `more`: fields of its `Job` instead of the defaults of the list."""
    defaults = {"optimizer": "adamw-fused", "precision": "bf16-pure", "attention": "flash", "recompute": "none"}
    batch = {"seq_len": seq_len, "micro_batch": micro_batch, "global_batch": micro_batch}
    return Case(Job(model=model, **{**defaults, **batch, **more}), layers)


CASES = (
    case("gpt2", 12, 1024, 8), case("gpt2", 12, 1024, 8, attention="eager"),
    case("gpt2-xl", 48, 1024, 2), case("gpt2-xl", 48, 1024, 1, precision="bf16-autocast"),
    case("gpt2-xl", 48, 1024, 2, recompute="full"),
    case("llama-3.2-1b", 16, 4096), case("llama-3.2-1b", 16, 4096, recompute="full"),
    case("llama-3.2-1b", 16, 4096, optimizer="adamw"), case("llama-3.2-1b", 16, 1024, 4, attention="eager"),
    case("llama-3.2-1b", 8, 16384, recompute="full"), case("llama-3.2-1b", 8, 2048, precision="fp32"),
    case("llama-3.1-8b", 4, 4096), case("llama-3.1-8b", 8, 8192, recompute="full", optimizer="sgd"),
    case("llama-3.1-8b", 4, 4096, precision="bf16-autocast"), case("qwen3-4b", 8, 4096),
    case("qwen3-4b", 8, 4096, recompute="full"), case("mistral-7b-v0.3", 4, 4096),
    case("gemma-2b", 18, 2048, attention="eager"), case("gemma-3-1b", 12, 2048), case("phi-2", 32, 2048),
    case("mixtral-8x7b", 1, 2048), case("qwen3-30b-a3b", 2, 2048), case("deepseek-v2-lite", 4, 2048),
    case("bert-large", 24, 512, 16), case("bert-large", 24, 512, 16, attention="eager"),
    case("opt-1.3b", 24, 2048, 1),
)  # fmt: skip
"""Trainings that fit on 40 GB: dense, mixtures of experts, latent attention and encoders; both attentions; checkpointed
or not; three precisions, three optimizers."""

ON_CPU = (
    case("electra-small", 1, 64, precision="fp32"), case("electra-small", 1, 64, precision="fp32", attention="eager"),
    case("electra-small", 2, 64, precision="fp32", recompute="full", optimizer="sgd"),
)  # fmt: skip
"""What `--device cpu` trains."""


class Outcome(msgspec.Struct, frozen=True):
    """The comparison of a training, or the error that stopped it."""

    name: str
    comparison: Comparison | None = None
    error: str = ""


class Report(msgspec.Struct, frozen=True):
    """The document that `make gpu` writes."""

    device: str
    gpu: str
    torch: str
    transformers: str
    cuda: str
    date: str
    calibration: Calibration
    outcomes: tuple[Outcome, ...]
    runs: tuple[dict[str, Any], ...]


def report(
    card: Gpu | None,
    device: str = "cuda",
    cases: Sequence[Case] = CASES,
    sizes: Sizes | None = None,
    timed: int = TIMED,
) -> Report:
    """Calibrates the device, then runs every case in a process of its own.

    card: the GPU; None on a CPU. timed: steps of each case that are timed
    """
    import transformers

    calibration = calibrate(device, card, sizes)
    outcomes, runs = [], []
    for number, case in enumerate(cases):
        outcome = _ran(case, device, timed)
        outcomes.append(outcome)
        print(f"{case.name}: {outcome.error or 'done'}", file=sys.stderr, flush=True)
        taken = None if outcome.comparison is None else outcome.comparison.real
        if taken is not None and card is not None:
            runs.append(row(case, taken, card, number))
    return Report(
        device=calibration.device,
        gpu="" if card is None else card.id,
        torch=str(torch.__version__),
        transformers=str(transformers.__version__),
        cuda=str(torch.version.cuda or ""),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        calibration=calibration,
        outcomes=tuple(outcomes),
        runs=tuple(runs),
    )


def _ran(case: Case, device: str, timed: int) -> Outcome:
    request = Request(case.job, device, case.layers)
    try:
        return Outcome(case.name, in_child(compare_request, request, measure=device, timed=timed))
    except Error as error:
        return Outcome(case.name, error=str(error))


def row(case: Case, taken: MeasuredSteps, card: Gpu, number: int) -> dict[str, Any]:
    """Return a measured training as a row of `data/runs` (its README explains them). number: of the row among this GPU's"""
    optimizer = OPTIMIZERS[str(case.job.optimizer)][0]
    job = case.job.replace(optimizer=optimizer, gpu=card.id, gpus=1, gpus_per_node=1, framework="huggingface")
    pattern = find_model(job.model).pattern[: case.layers]
    return {
        "id": f"T-OWN-{number + 1:03}",
        "quality": "A",
        "source": "loadgauge make gpu",
        "model": job.model,
        "hardware": card.id,
        "layout": f"1 GPU, recompute {job.recompute}",
        "job": msgspec.to_builtins(job),
        "overrides": {"model": {"pattern": [[kind, len(list(layers))] for kind, layers in groupby(pattern)]}},
        "measured": {"step_time_s": taken.step, "peak_memory_gib": taken.peak / GIB},
        "counter": {"kind": "allocated"},
    }


def write(document: Report, path: Path) -> None:
    """Writes the JSON, which `validate --runs` reads, and next to it the efficiencies as a file for `data/calibration`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    path.with_suffix(".toml").write_text(text(document.calibration), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python tools/gpu_runs.py --gpu NAME FILE.json`; `--device cpu` tries it with less work."""
    parser = argparse.ArgumentParser(prog="gpu_runs.py", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", help="which GPU it is (`loadgauge gpus` lists them); default: by its name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    try:
        if not given.file.resolve().parent.is_dir():
            raise ConfigError("no such folder", file=str(given.file.parent))
        if given.device == "cpu":
            document = report(None, "cpu", ON_CPU, timed=1)
        elif not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device here; --device cpu tries the whole way out, with less")
        else:
            document = report(gpu(given.gpu) if given.gpu else find_gpu_by_name(torch.cuda.get_device_name()))
        write(document, given.file)
    except Error as error:
        print(f"loadgauge: {error}", file=sys.stderr)
        return 2
    return 0


def find_gpu_by_name(name: str) -> Gpu:
    """The catalogue's GPU of a device name, where only one fits.

    >>> find_gpu_by_name("NVIDIA A100-SXM4-80GB").id
    'a100-sxm4-80gb'
    """
    from loadgauge.core.definitions.hardware.gpu_names import names_one
    from loadgauge.core.definitions.hardware.hardware import gpus

    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("-", " ").split() or [name]
    # An id begins with the name's first word: a GH200 is no H200.
    fitting = [card for card in gpus() if card.id.startswith(words[0]) and all(word in card.id for word in words)]
    # Drivers say NVL and PCIe, and leave SXM out.
    fitting = [card for card in fitting if ("nvl" in card.id.split("-")) == ("nvl" in words)]
    fitting = [card for card in fitting if names_one(name, card.id)] or fitting
    if len(fitting) != 1:
        raise ConfigError(f"{name!r}: name it with --gpu (fitting: {', '.join(one.id for one in fitting) or 'none'})")
    return fitting[0]


if __name__ == "__main__":
    sys.exit(main())
