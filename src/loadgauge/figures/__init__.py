"""The figures of the page, each drawn from the estimate's own records, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgauge.estimate.result import Estimate
from loadgauge.figures.lanes import lanes
from loadgauge.figures.memory_phases import moments
from loadgauge.figures.network import network
from loadgauge.figures.roofline import roofline
from loadgauge.figures.schedule import schedule
from loadgauge.figures.treemap import treemap

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
