"""The figures of the page, each drawn from an estimate's own records: nothing is worked out a second way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgauge.show.web.panels.lanes import lanes
from loadgauge.show.web.panels.links import network
from loadgauge.show.web.panels.roofline import roofline
from loadgauge.show.web.panels.schedule import schedule
from loadgauge.show.web.panels.shown import Shown
from loadgauge.show.web.panels.through_step import moments
from loadgauge.show.web.panels.treemap import treemap

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
