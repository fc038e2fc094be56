"""The door of this room: models from their own code, traces, and errors of memory. Each name is imported at its first use."""

from typing import Any

from loadgauge.core.base.hooks import lazily

NAMES = {
    "model": "loadgauge.pytorch.capture.road:road",
    "may_be_known": "loadgauge.pytorch.capture.requests.world:may_be_known",
    "tells_of_memory": "loadgauge.pytorch.why.message:tells_of_memory",
    "of_snapshot": "loadgauge.pytorch.why.answer:of_snapshot",
    "of_recording": "loadgauge.pytorch.why.answer:of_recording",
    "answer": "loadgauge.pytorch.why.answer:answer",
    "changes": "loadgauge.pytorch.why.answer:changes",
    "describe_change": "loadgauge.pytorch.why.answer:describe_change",
    "Trace": "loadgauge.pytorch.trace.result:Trace",
    "of_library": "loadgauge.pytorch.capture.inputs.libraries:of_library",
    "check_keys": "loadgauge.pytorch.capture.inputs.target:check_keys",
    "Regime": "loadgauge.pytorch.capture.requests.regime:Regime",
    "Tuned": "loadgauge.pytorch.capture.requests.regime:Tuned",
    "WHOLE": "loadgauge.pytorch.capture.requests.regime:WHOLE",
    "OnDemand": "loadgauge.pytorch.capture.road:OnDemand",
    "taken": "loadgauge.pytorch.capture.road:taken",
    "MOST_CAPTURES": "loadgauge.pytorch.capture.road:MOST",
    "OPTIMIZERS": "loadgauge.pytorch.trace.torch_run:OPTIMIZERS",
    "TorchRun": "loadgauge.pytorch.trace.torch_run:TorchRun",
    "parse_flags": "loadgauge.pytorch.trace.torch_run:parse_flags",
}
"""Names that others may use, and where each is."""
__getattr__ = lazily(NAMES, __name__)


def survey() -> Any:
    """Return the module that knows which model types there are, and what takes each."""
    from loadgauge.pytorch.capture.requests import world

    return world
