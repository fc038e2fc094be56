"""A capture in a process of its own, as `loadgauge capture` asks for it."""

from __future__ import annotations

import gc
from typing import Any

from loadgauge.core.base.files import is_script
from loadgauge.pytorch.capture.call import capture, inputs_of
from loadgauge.pytorch.capture.captured import Captured
from loadgauge.pytorch.capture.inputs.target import ONE, sized
from loadgauge.pytorch.trace.programs.script import function
from loadgauge.pytorch.trace.subprocess import Request
from loadgauge.pytorch.trace.torch_run import TorchRun


def capture_request(
    request: Request,
    inputs: str,
    given: dict[str, int],
    defaults: dict[str, int],
    step: str = "",
    pictures: tuple[tuple[int, int], ...] = (),
    freeze: tuple[str, ...] = (),
    head: str = "",
    rows: tuple[tuple[str, tuple[int, ...] | str], ...] = (),
) -> Captured:
    """Capture the job of a request in this process.

    inputs, step: of a script, script.py:function; given, defaults: see `sized`; pictures, freeze, head, rows: see `capture`

    Raises ConfigError, LayoutError or NotModelled.
    """
    job = request.job
    fields: dict[str, Any] = {
        name: value
        for name in ("precision", "optimizer", "attention", "recompute")
        if (value := getattr(job, name)) is not None
    }
    if job.global_batch is not None:
        fields["global_batch"] = TorchRun.of(job.replace(micro_batch=(defaults | given)[ONE])).accumulate
    target: Any = function(job.model) if is_script(job.model) else job.model
    beside, own = (inputs_of(target, job.model, one) if one else None for one in (inputs, step))
    gc.disable()  # while transformers and the model's code are imported, as in `in_child`
    captures = capture(
        target,
        beside,
        step=own,
        layers=request.layers,
        pictures=pictures,
        freeze=freeze,
        head=head,
        rows=dict(rows),
        **fields,
    )
    gc.freeze()
    gc.enable()
    captures.target = job.model
    return captures.at(**sized(captures.job.names, given, {**captures.job.usual, **defaults}))
