"""The answer of `loadgauge estimate --task generate` or `forward`."""

from __future__ import annotations

from typing import Any, ClassVar

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.why.reason import Reason, summed
from loadgauge.core.base.errors import NotStated
from loadgauge.core.base.verdict import exit_code
from loadgauge.core.serving.result import Answer as Inferred


class Served(Answer, frozen=True, kw_only=True):
    """A forward pass, or generation."""

    form: str = "estimate.inference"
    writer: str = "loadgauge.core.text.inference:write"
    TOPICS: ClassVar[tuple[str, ...]] = ("memory", "first", "token")
    TABLES: ClassVar[tuple[Pivot, ...]] = (Pivot("Traffic", "first.traffic.wire", "axis", "collective"),)
    result: Inferred

    @classmethod
    def of(cls, found: Inferred, *, allow_tight: bool = False, **more: Any) -> Served:
        """Return the answer that a result of inference is."""
        verdict = found.memory.verdict
        code = exit_code(verdict, allow_tight=allow_tight)
        return cls(result=found, verdict=verdict, code=code, not_counted=found.not_counted, **more)

    def why(self, topic: str) -> Answer:
        if topic not in self.TOPICS:
            return super().why(topic)
        if topic == "memory":
            parts, total, unit = self.result.memory.parts, self.result.memory.total, "byte"
            rule = "weights, the cache of all sequences, what lives at once in a layer, logits, and what lies outside PyTorch"
        else:
            run = self.result.first if topic == "first" else self.result.last
            if run is None:
                raise NotStated(f"--explain {topic} is of the time: {self.result.untimed or 'a forward pass has none'}")
            parts = {**run.lanes, "traffic": sum(row.seconds for row in run.traffic)}
            total, unit = run.seconds, "s"
            rule = "each operation takes the longer of computing and moving its bytes; traffic is added"
        what = {
            "memory": "bytes of the fullest rank",
            "first": "seconds of the prompts",
            "token": "seconds of a token",
        }[topic]
        lines = (summed(what, parts, total, unit),)
        return Reason(topic=topic, what=what, value=total, unit=unit, basis="derived", rule=rule, lines=lines)

    def to_dict(self) -> dict[str, Any]:
        unread = {"unread": self.unread} if isinstance(self.unread, list) else {}
        return self.result.to_dict() | {"assumed": self.assumed} | unread
