"""Registration of this room with the core (`core/base/hooks.py`)."""

_AT = "loadgauge.pytorch.commands"
COMMANDS = {
    "trace": (8, "what PyTorch would allocate, save, compute and send, with no GPU", f"{_AT}.trace"),
    "capture": (
        9,
        "any model or module: memory and work as formulas, from its own code, with no GPU",
        f"{_AT}.capture",
    ),
    "measure": (10, "memory, time and FLOP/s of real training steps", f"{_AT}.measure"),
    "compare": (11, "formula, trace and measurement side by side, and why they differ", f"{_AT}.compare"),
    "why": (12, "what held the memory when it ran out", f"{_AT}.why"),
    "calibrate": (13, "the efficiencies of this device, as a data file", f"{_AT}.calibrate"),
    "anchor": (13, "this card's kernels and a step of yours, by which later predictions are moved", f"{_AT}.anchor"),
    "saved": (14, "what a PyTorch expression keeps for backward", f"{_AT}.saved"),
}
MODEL_SOURCES = "loadgauge.pytorch.door"
