"""Registration of this room with the core (`core/base/hooks.py`)."""

COMMANDS = {
    "convert": (15, "one tool's job file into another's", "loadgauge.job_files.commands.convert"),
    "check": (
        16,
        "whether jobs still fit and stay within a budget, for a pull request",
        "loadgauge.job_files.commands.check",
    ),
    "lint": (
        16.5,
        "what wastes memory, time or money in a job file, with what each change saves",
        "loadgauge.job_files.commands.lint",
    ),
}
DIALECTS = "loadgauge.job_files.door"
