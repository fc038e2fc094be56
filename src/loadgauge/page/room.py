"""Registration of this room with the core (`core/base/hooks.py`)."""

COMMANDS = {
    "serve": (17, "the page: the same answers at a glance, recomputed while a slider moves", "loadgauge.page.command"),
}
HTML = "loadgauge.page.single"
