"""The file that `loadgauge anchor` writes."""

import tomlkit

from loadgauge.core.base.units import gib
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.job.flag_types import STEP
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.measure.calibrate import Calibration, text
from loadgauge.pytorch.measure.train_steps import MeasuredSteps
from loadgauge.pytorch.trace.torch_run import OPTIMIZERS


def anchor_text(job: Job, layers: int | None, card: Gpu, calibration: Calibration, measured: MeasuredSteps) -> str:
    """Return kernels, and a run with what it took, as TOML, which `core/resolve/rescale.py` reads.

    layers: how many of the model's ran; None: all
    """
    shown = {"allocated": measured.peak, "reserved": measured.reserved, "card": measured.device_total}
    own = {name: getattr(job, name) for name in STEP if getattr(job, name) is not None}
    optimizer = OPTIMIZERS[str(job.optimizer or "adamw")][0]
    run = {
        "model": job.model,
        "step": f"{measured.step}s",
        **({} if layers is None else {"layers": layers}),
        **{name: gib(nbytes, 3) for name, nbytes in shown.items() if nbytes is not None},
        "flags": {"precision": "bf16-pure", **own, "optimizer": optimizer, "framework": "huggingface"},
    }
    about = {"gpu": card.id, "date": calibration.efficiencies.date, "torch": calibration.torch}
    document = about | {"run": run, "kernels": tomlkit.parse(text(calibration))}
    return (
        f"# Made by `loadgauge anchor`; --anchor takes it. Memory is that of this run alone.\n{tomlkit.dumps(document)}"
    )
