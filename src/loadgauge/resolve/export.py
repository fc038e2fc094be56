"""A job in the words of another tool."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.families.catalogue import config, model_sources
from loadgauge.formats.exchange import Written, write
from loadgauge.formats.megatron_model import unsaid
from loadgauge.formats.recompute import spelled
from loadgauge.formats.run import Run
from loadgauge.resolve.setup import Setup
from loadgauge.spec.axes import DEGREES
from loadgauge.spec.lora import ATTENTION_TARGETS, Lora

FLAGS = "flags"
"""loadgauge's own, as if it were a dialect."""


def run_of(given: Setup) -> Run:
    """A job with everything unsaid filled in, as a run that any dialect may be asked to say."""
    job, layout, kind = given.job, given.layout, given.training
    lora = kind.lora
    precision = kind.precision.name
    usual = kind.framework.precision
    batch = int(layout.global_batch)
    stages = layout.stage_layers
    names = (*DEGREES, "zero", "replicas")
    degrees: dict[str, Any] = {name: int(getattr(layout, name)) for name in names}
    return Run(
        model=job.model or given.model.name,
        framework=kind.framework.name,
        gpus=int(layout.gpus),
        gpus_per_node=job.gpus_per_node,
        **degrees,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule if layout.pp > 1 else None,
        stage_layers=None if stages is None else ",".join(str(count) for count in stages),
        recompute=spelled(str(layout.recompute), given.model, kind),
        micro_batch=int(layout.micro_batch),
        global_batch=batch,
        seq_len=int(layout.seq_len),
        precision=precision[:4] if precision == usual or precision == f"fp16{usual[4:]}" else precision,
        optimizer=kind.optimizer.name,
        attention=kind.kernels.attention,
        loss=job.loss,
        lora_rank=0 if lora is None else int(lora.rank),
        lora_targets=None if lora is None else job.lora_targets or _targets(lora),
        qlora=lora is not None and bool(lora.quantised),
        base=None if lora is None or not lora.quantised else job.base or "nf4",
        offload=kind.offload,
        cp_comm=layout.cp_comm if layout.cp != 1 else None,
        order=",".join(layout.order),
        overlap=job.overlap,
    )  # fmt: skip


def _targets(lora: Lora) -> str:
    return "attention" if lora.targets <= ATTENTION_TARGETS else "all"


def known_as(run: Run, dialect: str, *, patched: bool = False) -> Run:
    """With what a tool knows a model of the catalogue by: its repository, or where it takes no names its sizes.

    patched: the user's own file, which has the model already

    >>> known_as(Run(model="qwen3-8b"), "trl").model
    'Qwen/Qwen3-8B'
    """
    name = "" if run.model is None else run.model.lower()
    source = model_sources().get(name)
    if source is None or dialect == "torchtitan":
        return run
    if dialect == "megatron":
        sizes = config(name)
        return run if patched or unsaid(sizes) else msgspec.structs.replace(run, model=None, config=sizes)
    return msgspec.structs.replace(run, model=source.repository or run.model)


def export(given: Setup, dialect: str, template: str | None = None, *, file: str = "") -> Written:
    """A job in the words of a dialect; `template`, the user's own file, is patched. `left_out`: what it cannot say.

    >>> from loadgauge.resolve.resolve import resolve_job
    >>> from loadgauge.spec.job import Job
    >>> written = export(resolve_job(Job(model="llama-3.1-8b", gpus=16, tp=8)), "megatron")
    >>> "--tensor-model-parallel-size 8" in written.text
    True
    """
    return write(known_as(run_of(given), dialect, patched=template is not None), dialect, template, file=file)
