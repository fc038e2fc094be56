"""The figures of the page, each drawn from an estimate's own records: nothing is worked out a second way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgauge.show.panels.lanes import lanes
from loadgauge.show.panels.links import network
from loadgauge.show.panels.roofline import roofline
from loadgauge.show.panels.schedule import schedule
from loadgauge.show.panels.shown import Shown
from loadgauge.show.panels.through_step import moments
from loadgauge.show.panels.treemap import treemap

PANELS: dict[str, Callable[[Shown], Any]] = {
    "treemap": treemap,
    "moments": moments,
    "lanes": lanes,
    "schedule": schedule,
    "network": network,
    "roofline": roofline,
}
"""By their name in `/api/estimate`."""

__all__ = ["PANELS", "Shown"]
