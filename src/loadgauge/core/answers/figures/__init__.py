"""The figures of the page, each drawn from the estimate's own records, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgauge.core.answers.figures.lanes import lanes
from loadgauge.core.answers.figures.memory_phases import moments
from loadgauge.core.answers.figures.network import network
from loadgauge.core.answers.figures.roofline import roofline
from loadgauge.core.answers.figures.schedule import schedule
from loadgauge.core.answers.figures.treemap import treemap
from loadgauge.core.estimate.result import Estimate

PANELS: dict[str, Callable[[Estimate], Any]] = {
    "treemap": treemap,
    "moments": moments,
    "lanes": lanes,
    "schedule": schedule,
    "network": network,
    "roofline": roofline,
}
"""By their name in `/api/estimate`."""

__all__ = ["PANELS"]
