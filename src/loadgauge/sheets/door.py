"""The door of this room: plots and sweeps. Each name is imported at its first use."""

from loadgauge.core.base.hooks import lazily

NAMES = {
    "plot": "loadgauge.sheets.plot.sheet:plot",
    "plot_sweep": "loadgauge.sheets.plot.sweep:plot_sweep",
    "plot_tables": "loadgauge.sheets.plot.tables:plot_tables",
    "sweep": "loadgauge.sheets.sweep.text:answer",
    "Processes": "loadgauge.sheets.sweep.workers:Processes",
    "OnRay": "loadgauge.sheets.sweep.workers:OnRay",
}
"""Names that others may use, and where each is."""
__getattr__ = lazily(NAMES, __name__)
