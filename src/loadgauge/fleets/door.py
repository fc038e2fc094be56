"""The door of this room: what others use of fleets. Each name is imported at its first use."""

from loadgauge.core.base.hooks import lazily

NAMES = {
    "FINDS": "loadgauge.fleets.what_if:FINDS",
    "options": "loadgauge.fleets.options:options",
    "replica": "loadgauge.fleets.fleet:replica",
    "replicas_left": "loadgauge.fleets.fleet:replicas_left",
    "steady": "loadgauge.fleets.fleet:steady",
    "report": "loadgauge.fleets.text.fleet:find_planned",
    "Options": "loadgauge.fleets.fleet:Options",
    "fleet": "loadgauge.fleets.fleet:fleet",
    "verdict": "loadgauge.fleets.text.fleet:verdict",
    "reason": "loadgauge.fleets.text.fleet_reasons:reason",
}
"""Names that others may use, and where each is."""
__getattr__ = lazily(NAMES, __name__)
