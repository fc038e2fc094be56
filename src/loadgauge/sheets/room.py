"""Registration of this room with the core (`core/base/hooks.py`)."""

FIGURES = "loadgauge.sheets.door"
