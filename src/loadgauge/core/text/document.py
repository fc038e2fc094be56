"""The JSON document of an estimate."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.why.of_estimate import TOPICS, reason
from loadgauge.core.base.verdict import needs
from loadgauge.core.estimate.result import Estimate, When
from loadgauge.core.plan.advise.assumptions import assumptions
from loadgauge.core.resolve.setup import Setup, worst_routing


def estimate_document(
    given: Setup, result: Estimate, part: str | None = None, at: When = "largest", *, outcomes: bool = False
) -> dict[str, Any]:
    """Return the document of `loadgauge estimate --json`: the estimate, the assumptions, and what else the job asks for.

    outcomes: with what each assumption's alternative comes to, an estimate each
    part, at: with `--explain`, the part of the memory to explain and the moment of the step. Bytes, seconds and FLOP.
    """
    document = result.to_dict()
    document["assumed"] = given.assumed
    if outcomes and part is None:
        document["outcomes"] = [
            {
                "name": one.name,
                "value": one.value,
                "alternative": one.alternative,
                "total": result.memory.total + one.memory,
                "step": None if one.step is None or result.time is None else result.time.step + one.step,
            }
            for one in assumptions(given, result)
        ]
    if given.file:
        document["file"] = given.file
        document["unread"] = given.unread(result)
    budget = given.budget(result) if given.job.tokens else None
    if document["time"] is not None and budget is not None:
        document["time"].update(budget.to_dict())
    worst = given.worst_case()
    if worst is not None and given.lengths is not None:
        document["lengths"] = {
            "mean": given.lengths.mean,
            "longest": given.lengths.longest,
            "expected_tokens": given.layout.tokens,
            "expected_pairs": given.layout.pairs,
            "fullest_tokens": None if given.layout.fullest is None else given.layout.fullest.tokens,
            "worst_case": needs(worst.memory),
        }
    expected = given.forecast()
    if expected is not None:
        document["forecast"] = expected.to_dict()
    routed = worst_routing(given, result)
    if routed is not None:
        document["experts"] = {
            "imbalance": given.layout.expert_imbalance,
            "worst_imbalance": routed.layout.expert_imbalance,
            "worst_case": needs(routed.memory) | {"step": None if routed.time is None else routed.time.step},
        }
    if part in TOPICS:
        document["explain"] = reason(result, part, budget).to_dict()
    elif part is not None:
        document["explain"] = result.explain(part, at).to_dict()
    return document
