"""Registration of this room with the core (`core/base/hooks.py`)."""

COMMANDS = {
    "serve": (17, "the page: the same answers at a glance, recomputed while a slider moves", "loadgauge.page.command"),
    "mcp": (17, "the same answers for assistants, by the Model Context Protocol", "loadgauge.page.mcp"),
}
HTML = "loadgauge.page.single"
WORDS = "loadgauge.page.words"
