"""Registration of this room with the core (`core/base/hooks.py`)."""

COMMANDS = {
    "article": (
        6,
        "the tables of five articles, as printed and as they are right",
        "loadgauge.evidence.commands.article",
    ),
    "evidence": (7, "a measured run beside its prediction, as a small file", "loadgauge.evidence.commands.evidence"),
    "validate": (7, "predicted against published runs", "loadgauge.evidence.commands.validate"),
}
