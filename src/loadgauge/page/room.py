"""What this room adds to the core."""

COMMANDS = {
    "serve": (17, "the page: the same answers at a glance, recomputed while a slider moves", "loadgauge.page.command"),
}
