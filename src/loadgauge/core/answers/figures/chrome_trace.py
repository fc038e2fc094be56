"""The schedule of a step as a trace that Chrome and Perfetto open: every piece of work of every pipeline stage."""

from typing import Any

from loadgauge.core.answers.figures.lanes import lanes
from loadgauge.core.answers.figures.schedule import schedule
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.result import Estimate

KINDS = {
    "F": "forward", "B": "backward of inputs", "W": "gradients of weights", "BW": "backward",
    "PAIR_F": "forward and backward together", "PAIR_BW": "backward and forward together",
}  # fmt: skip
MICROSECONDS = 1e6


def chrome_trace(result: Estimate) -> dict[str, Any]:
    """Return a document of Chrome's trace event format: times in microseconds, and what each stage keeps in bytes.

    A process a stage; the last one has the components of the step on the slowest stage, end to end.
    Raises `ConfigError` where no time is known.

    >>> from loadgauge import estimate
    >>> step = estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, pp=4, tp=2, global_batch=8)
    >>> work = [event for event in chrome_trace(step)["traceEvents"] if event["ph"] == "X" and event["pid"] < 4]
    >>> len(work), work[0]["name"]
    (64, 'forward 0')
    """
    parts = lanes(result)
    if parts is None:
        raise ConfigError(f"time and network are not known: {result.untimed}", key="timeline")
    figure = schedule(result, whole=True)
    events: list[dict[str, Any]] = []
    for index in figure["stages_shown"]:
        events.append({"ph": "M", "pid": index, "name": "process_name", "args": {"name": f"stage {index}"}})
    for stage, start, end, kind, microbatch, chunk, live in figure["cells"]:
        begins, takes = start * MICROSECONDS, (end - start) * MICROSECONDS
        word = KINDS.get(kind, kind)
        name = f"{word} {microbatch}" + (f", chunk {chunk}" if figure["chunks"] > 1 else "")
        events.append({"ph": "X", "pid": stage, "tid": 0, "ts": begins, "dur": takes, "name": name, "cat": word})
        events.append({"ph": "C", "pid": stage, "ts": begins, "name": "kept for backward", "args": {"bytes": live}})
    last = result.layout.pp
    slowest = "components of the step on the slowest stage, laid end to end"
    events.append({"ph": "M", "pid": last, "name": "process_name", "args": {"name": slowest}})
    for number, part in enumerate(parts):
        events.append({"ph": "M", "pid": last, "tid": number, "name": "thread_name", "args": {"name": part["lane"]}})
        for span in part["spans"]:
            begins, takes = span["start"] * MICROSECONDS, (span["end"] - span["start"]) * MICROSECONDS
            name = f"{part['lane']}, hidden" if span["hidden"] else part["lane"]
            events.append({"ph": "X", "pid": last, "tid": number, "ts": begins, "dur": takes, "name": name})
    about = {"schedule": figure["schedule"], "left out": figure["shown"], "basis": "predicted by loadgauge"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
