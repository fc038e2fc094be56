"""`--measured`: the ratio of measured to predicted time of a run of the user's own, which rescales other predictions.

The run is in words (`step=12.3s,gpus=64`), or in an anchor file: what a card or node measured of a small run, and what its kernels
achieve. `loadgauge anchor` writes such files, and `loadgauge calibrate` those that tell of kernels alone.
"""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge._version import __version__
from loadgauge.core.base import ConfigError, gib, is_script, parse, refuse, share
from loadgauge.core.definitions.hardware.calibration import Efficiencies, with_own
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.job.job import FILES, POSTTRAIN, WHOLE_RUN, Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.result import Estimate, Time
from loadgauge.core.families.catalogue import names_file
from loadgauge.core.resolve.model import found_model

if TYPE_CHECKING:
    from loadgauge.core.resolve.setup import Setup

MEASURES = ("step", "tokens_per_second_per_gpu", "mfu", "hfu", "tflops")
SHARES = ("mfu", "hfu")
PRODUCT = "gemm"
"""The name of the rate that a long matrix product sustains, which is no run."""


FILE = ".toml"
"""Ends the name of an anchor file."""
KEPT_BACK = frozenset(
    {"gpu", "measured", "lengths", "topology", "inputs", "hub", "memory", *WHOLE_RUN, *FILES, *POSTTRAIN}
)
"""Fields that evidence does not have: those that may name a file, and those that say nothing of a step."""


def sustained(job: Job) -> float | None:
    """The FLOP/s that a long 16-bit matrix product sustains on the user's GPU (`gemm=612TFLOP/s`); None where nobody says.

    >>> sustained(Job(model="gpt2", measured="gemm=612TFLOP/s")), sustained(Job(model="gpt2", measured="gemm=612,step=2s"))
    (612000000000000.0, 612000000000000.0)
    >>> sustained(Job(model="gpt2", measured="step=2s"))
    """
    text = _words(job.measured or "").get(PRODUCT)
    if text is None:
        return None
    try:
        value, unit = (float(text) * 1e12, "FLOP/s") if text[-1:].isdigit() else parse(text)
    except ValueError:
        raise ConfigError(f"cannot read {text!r}", key="measured") from None
    refuse(
        unit != "FLOP/s" or not 0 < value < float("inf"),
        f"{PRODUCT} cannot be {text!r} (such as {PRODUCT}=612TFLOP/s)",
        key="measured",
    )
    return value


def is_run(job: Job) -> bool:
    """Return whether `--measured` states a run on the command line, rather than a matrix product alone or a file."""
    return anchor_of(job) is None and bool(_words(job.measured or "").keys() - {PRODUCT, ""})


def slower(there: Setup, ratio: float) -> tuple[float, float, float]:
    """Return what a measured run tells of cards, inner links and network (`Efficiencies.slower`): its ratio of what ran, else 1.

    One time does not say which of them made it so, and is taken of all that ran; what did not run stays as predicted.
    ratio: measured over predicted seconds of a step
    """
    assert there.cluster is not None
    gpus, domain = there.layout.gpus, there.cluster.links[0].domain
    return ratio, ratio if gpus > 1 else 1.0, ratio if gpus > domain else 1.0


def told(there: Setup, time: Time | None, name: str, text: str) -> tuple[float, float, float]:
    """Return `slower` of a run that is predicted to take `time`, by one of `MEASURES` and its value. Raises `ConfigError`."""
    if time is None:
        raise ConfigError("there is no predicted time to compare a measured one with", key="measured")
    try:
        if name in SHARES:
            value, unit = share(text), ""
        else:
            value, unit = (float(text), "") if text[-1:].isdigit() else parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}", key="measured") from None
    except ValueError:
        raise ConfigError(f"cannot read {text!r}", key="measured") from None
    refuse(
        not 0 < value < float("inf") or unit not in ("", "second") or (unit == "second") != (name == "step"),
        f"{name} cannot be {text!r} (step needs a unit of time, the others none)",
        key="measured",
    )
    predicted = {
        "step": time.step,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "tflops": time.model_flops_per_gpu / 1e12,
    }[name]
    return slower(there, value / predicted if name == "step" else predicted / value)


def measured_by(job: Job, setup_of: Callable[[Job], Setup]) -> tuple[float, float, float]:
    """Return `slower` of the run that a job names by a measure. Raises `ConfigError`. setup_of: resolves that run

    The text is a measure (`step=12.3s`, `tokens_per_second_per_gpu=9000`, `mfu=0.41`, `tflops=400`) and, after it, the
    flags in which that run differed from this one (`step=12.3s,gpus=64,tp=4`); `tp=` is a flag that was not given there.
    """
    other, name, text = run(job)
    there = setup_of(other)
    return told(there, there.estimate().time, name, text)


def run(job: Job) -> tuple[Job, str, str]:
    """The measured run as a job, the name of its measure (one of `MEASURES`) and the text of its value. Raises `ConfigError`."""
    assert job.measured is not None
    words = _words(job.measured)
    product = words.pop(PRODUCT, None)
    measures = [name for name in words if name in MEASURES]
    others = {name.replace("-", "_"): value for name, value in words.items() if name not in MEASURES}
    refuse(
        len(measures) != 1,
        f"name one of {', '.join(MEASURES)}, as in step=12.3s, or {PRODUCT}=612TFLOP/s, or a file that ends in {FILE}",
        key="measured",
    )
    unknown = [name for name in others if name not in Job.__struct_fields__ or name in ("model", "gpu", "measured")]
    if unknown:
        raise ConfigError(f"no flag {unknown[0]!r} in which the measured run could differ", key="measured")
    same = {name: getattr(job, name) for name in Job.__struct_fields__[1:] if name not in ("measured", *WHOLE_RUN)}
    try:
        measured = {} if product is None else {"measured": f"{PRODUCT}={product}"}
        there = Job.of(job.model, {**same, **{name: value or None for name, value in others.items()}, **measured})
    except ConfigError as error:
        raise ConfigError(str(error), key="measured") from None
    return there, measures[0], words[measures[0]]


def changed(job: Job, change: dict[str, Any]) -> str:
    """`--measured` for a job after a change, so that it still describes the measured run, without the change.

    >>> changed(Job(model="gpt2", measured="step=12s,gpus=64", zero=1), {"zero": 3, "tp": 2, "gpus": 16})
    'step=12s,gpus=64,zero=1,tp='
    """
    assert job.measured is not None
    if not is_run(job):
        return job.measured
    described = {name.replace("-", "_") for name in _words(job.measured)}
    pinned = {name: getattr(job, name) for name in change if name not in described}
    pins = (f",{name}={'' if value is None else str(value).lower()}" for name, value in pinned.items())
    return job.measured + "".join(pins)


class AnchorRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that was measured: its model and flags, by their names in `Job`, and what it took.

    layers: how many of the model's layers ran, where not all did
    step: of one optimizer step, with its unit; allocated, reserved, card: peak memory by counter, with its unit. Memory is for
    whoever reads the file: one run's does not tell another's (docs/design/tried.md)
    """

    model: str
    step: str
    flags: dict[str, Any] = {}
    layers: int | None = None
    allocated: str = ""
    reserved: str = ""
    card: str = ""


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of an anchor file: the GPU's id, when and with which PyTorch it was made, the run, and what kernels achieve.

    predicted: what was predicted of the run before it, and by which loadgauge, where that is kept (`evidence_text`)
    """

    gpu: str
    date: str = ""
    torch: str = ""
    run: AnchorRun | None = None
    kernels: Efficiencies | None = None
    predicted: dict[str, str] = {}

    def job(self) -> Job:
        """Return its run as a job. Raises `ConfigError`."""
        assert self.run is not None
        return Job.of(self.run.model, {"gpus": 1, **self.run.flags, "gpu": self.gpu})

    def slower(self, setup_of: Callable[[Job, ModelSpec], Setup]) -> tuple[float, float, float]:
        """Return what its run tells of card, links and network; 1 of each without a run. Raises `ConfigError`.

        setup_of: resolves the run that was measured
        """
        if self.run is None:
            return 1.0, 1.0, 1.0
        job = self.job()
        model = found_model(job).spec
        there = setup_of(job, msgspec.structs.replace(model, pattern=model.pattern[: self.run.layers]))
        if there.cluster is not None:
            there = msgspec.structs.replace(there, cluster=msgspec.structs.replace(there.cluster, kernels=self.kernels))
        return told(there, there.as_assumed().time, "step", self.run.step)


def anchor_of(job: Job, card: Gpu | None = None) -> Anchor | None:
    """Return the file that `--anchor` names; None where a measure is named. Raises `ConfigError`, also where it is of another GPU.

    >>> anchor_of(Job(model="gpt2", measured="step=2s"))
    """
    if job.measured is None or not job.measured.endswith(FILE):
        return None
    anchor = read_anchor(job.measured)
    if card is not None and anchor.gpu != card.id:
        raise ConfigError(f"{job.measured} was measured on {anchor.gpu}, and the job runs on {card.id}", key="anchor")
    return anchor


def evidence_text(result: Estimate, measured: Mapping[str, str], torch: str = "") -> str:
    """Return a run as measured and as predicted, as an anchor file that others may have: no paths, names or data.

    measured: `step`, and memory by counter (`allocated`, `reserved`, `card`), each with its unit; torch: its version
    Raises `ConfigError` for a model that is not in the catalogue, or without a card.

    >>> from loadgauge import estimate
    >>> text = evidence_text(estimate("gpt2", gpu="h100-sxm5-80gb", zero=1), {"step": "80ms"})
    >>> [line for line in text.splitlines() if line.startswith(("gpu", "model", "zero"))]
    ['gpu = "h100-sxm5-80gb"', 'model = "gpt2"', 'zero = 1']
    """
    import tomlkit  # the other commands start without it

    assert result.setup is not None
    job = result.setup.job
    refuse(
        names_file(job.model) or is_script(job.model),
        f"{job.model} is a file of yours, and evidence names models of the catalogue",
        key="model",
    )
    refuse(result.gpu is None, "is missing: evidence is about a card", key="gpu")
    flags = {name: getattr(job, name) for name in Job.__struct_fields__[1:] if name not in KEPT_BACK}
    run = {"model": job.model, **measured, "flags": {name: value for name, value in flags.items() if value is not None}}
    predicted = {
        "loadgauge": __version__,
        "allocated": gib(result.memory.allocated, 3),
        "card": gib(result.memory.total, 3),
        **({} if result.time is None else {"step": f"{result.time.step:.4g}s"}),
    }
    about = {"gpu": result.gpu, "date": datetime.date.today().isoformat(), "torch": torch}
    return tomlkit.dumps(about | {"run": run, "predicted": predicted})


@functools.lru_cache
def read_anchor(name: str) -> Anchor:
    """Return the content of an anchor file, or of one of `calibrate`. Raises `ConfigError`."""
    try:
        content = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        if "matmul" in content:  # all of the file is kernels
            content = {"gpu": content.get("gpu", ""), "kernels": content}
        kernels = content.pop("kernels", None)
        anchor = msgspec.convert(content, Anchor)
        return anchor if kernels is None else msgspec.structs.replace(anchor, kernels=with_own(anchor.gpu, kernels))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}", key="anchor") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{name} is not a file of `loadgauge anchor` or `calibrate`: {error}", key="anchor") from None


def _words(text: str) -> dict[str, str]:
    """Names and values, with commas between them; a value may have commas too (`stage_layers=7,8,8,7`)."""
    return dict(word.strip().partition("=")[::2] for word in re.split(r",(?=[^,=]*=)", text))
