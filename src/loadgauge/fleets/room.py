"""Registration of this room with the core (`core/base/hooks.py`)."""

COMMANDS = {
    "fleet": (
        4, "a whole run on a fleet: failures, spares, checkpoints, topology and sites, by simulation", "loadgauge.fleets.command",
    ),
}  # fmt: skip
OBJECTIVES = "loadgauge.fleets.door"
