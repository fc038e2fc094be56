"""The answer of `loadgauge estimate --task generate` or `forward`."""

from typing import Any

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.why.reason import Reason, summed
from loadgauge.core.base import NO, NotStated, exit_code, host_holds
from loadgauge.core.serving.result import Answer as Inferred

TOPICS = ("memory", "first", "token")
"""Topics of inference."""


def served(inferred: Inferred, *, allow_tight: bool = False, **more: Any) -> Answer:
    """Return the answer that a result of inference is. more: what was assumed, and the keys of a job file that are not counted"""
    unread = {"unread": more["unread"]} if "unread" in more else {}
    held = host_holds(inferred.on_host, inferred.host_memory)
    return Answer(
        form="estimate.inference",
        writer="loadgauge.core.text.inference:write",
        topics=TOPICS,
        explains=lambda topic: _explained(inferred, topic),
        pivots=(Pivot("Traffic", "first.traffic.wire", "axis", "collective"),),
        shown=inferred,
        document=lambda: inferred.to_dict() | {"assumed": more.get("assumed", {})} | unread,
        verdict=inferred.memory.verdict,
        code=exit_code(inferred.memory.verdict, allow_tight=allow_tight) if held else NO,
        not_counted=inferred.not_counted,
        **more,
    )


def _explained(inferred: Inferred, topic: str) -> Reason:
    if topic == "memory":
        parts, total, unit = inferred.memory.parts, inferred.memory.total, "byte"
        rule = (
            "weights, the cache of all sequences, what lives at once in a layer, logits, and what lies outside PyTorch"
        )
    else:
        run = inferred.first if topic == "first" else inferred.last
        if run is None:
            raise NotStated(f"--explain {topic} is of the time: {inferred.untimed or 'a forward pass has none'}")
        parts = {**run.lanes, "traffic": sum(row.seconds for row in run.traffic)}
        total, unit = run.seconds, "s"
        rule = "each operation takes the longer of computing and moving its bytes; traffic is added"
    quantity = {
        "memory": "bytes of the fullest rank",
        "first": "seconds of the prompts",
        "token": "seconds of a token",
    }[topic]
    lines = (summed(quantity, parts, total, unit),)
    return Reason(topic=topic, what=quantity, value=total, unit=unit, basis="derived", rule=rule, lines=lines)
