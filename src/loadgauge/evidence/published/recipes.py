"""Runs of torchtune's recipes: what the recipe's own configuration says where the source does not.

Read off torchtune 0.6.1, `recipes/configs`: full fine-tuning on one GPU runs `PagedAdamW8bit` in the backward
(`*_full_single_device.yaml`); on several GPUs it runs AdamW as a loop, with embedding and head as FSDP units of their own
(`70B_full.yaml`, `custom_sharded_layers`); adapters are trained with `AdamW(fused=True)`, on all matrices but that of the keys
(`*_lora*.yaml`, `*_qlora*.yaml`).
A source that names its techniques one by one ("Baseline; + ...") runs those, and no other one.
"""

import msgspec

from loadgauge.evidence.published.free_text import Flags
from loadgauge.evidence.published.source_rows import SourceRow

TARGETS = frozenset({"query", "value", "output", "gate", "up", "down"})
"""`lora_attn_modules: [q_proj, v_proj, output_proj]` and `apply_lora_to_mlp: True`."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a recipe trains, in the words of `loadgauge.core.definitions.training.training.training`."""

    optimizer: str
    loss: str = "auto"
    compiled: bool = False
    offload: str = "none"
    activations: str = "none"
    ends_apart: bool = False


def recipe(run: SourceRow, flags: Flags, optimizer: str) -> Recipe:
    """Return the recipe of a row. optimizer: the one that the row names, `adamw` where it names none."""
    named = ladder(flags)
    if run.task != "full-ft":
        optimizer = "adamw-fused"
    elif named:
        optimizer = "adamw-fused" if optimizer == "adamw" else optimizer
        if flags.says("fuse optimizer step into backward"):
            optimizer = f"{optimizer}:in-backward"
    elif (run.gpus or 1) == 1 and optimizer == "adamw":
        optimizer = "paged-adamw-8bit:in-backward"
    else:
        optimizer = "adamw-fused" if flags.says("fused optimizer") else "adamw-loop"
    return Recipe(
        optimizer=optimizer,
        loss="float32:1" if named and not flags.says("chunked cross entropy") else "auto",
        compiled=flags.says("compile"),
        offload="all" if flags.says("CPU offload") else "none",
        activations="all" if flags.says("activation offloading") else "none",
        ends_apart=run.task == "full-ft" and (run.gpus or 1) > 1,
    )


def ladder(flags: Flags) -> bool:
    """Return whether a row names every technique it runs with."""
    return flags.says("baseline")


SAMPLES = {"SQuAD": 200}
"""Tokens of a sample of a data set: SQuAD's paragraphs have 500 characters and more (rajpurkar2016), a question and an answer."""


def sample(flags: Flags) -> int | None:
    """Return the tokens of each of the samples that are packed into a sequence, where they attend to themselves alone."""
    return next((tokens for name, tokens in SAMPLES.items() if flags.says(f"packed {name}")), None)


def packed(flags: Flags) -> bool:
    """Return whether sequences are packed to their full length."""
    return flags.says("packed dataset") and not flags.says("unpacked")
