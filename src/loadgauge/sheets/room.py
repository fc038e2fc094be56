"""What this room adds to the core."""

FIGURES = "loadgauge.sheets.door"
