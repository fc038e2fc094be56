"""DeepSpeed configurations that come with a tool, known by name where the file itself is not at hand.

They are in `data/deepspeed_files.toml`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base import read_table, read_text

if TYPE_CHECKING:
    from loadgauge.job_files.ideas.table import Keys

# All of them leave these to the trainer.
_AUTO: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
}  # fmt: skip
LARGEST = 1_000_000
HERE = re.compile(r"^(?:\$\(pwd\)|`pwd`|\$\{?PWD\}?)/")


def beside(name: str, keys: Keys) -> str | None:
    """The text of a file that a job file names: one that its script writes, else one beside it; None where it is not there."""
    file = keys.file
    written: dict[str, str] = getattr(getattr(keys.document, "shell", None), "documents", {})
    if name in written:
        return written[name]
    plain = HERE.sub("", name)
    places = [Path(file).parent / plain, Path(plain)] if file else [Path(plain)]
    position = next((position for position in places if os.path.isfile(position)), None)
    if position is not None and not keys.alone:
        return read_text(position, LARGEST)
    told = known_file(name)
    return None if told is None else told.content


class KnownFile(msgspec.Struct, frozen=True):
    """A configuration of a tool: its content as JSON, whose dialect it is, the tool, and where it is published."""

    content: str
    tool: str
    source: str
    dialect: str = "deepspeed"


def known_file(path: str) -> KnownFile | None:
    """Return the configuration that a path names; None for one that no tool is known to come with.

    A name such as zero2.json, which anybody may have given, counts only with its folder.

    >>> known_file("examples/deepspeed/ds_z3_config.json").tool, known_file("zero2.json")
    ('LLaMA-Factory', None)
    """
    words = path.replace("\\", "/")
    for tool in read_table("deepspeed_files.toml").values():
        for name, content in tool["files"].items():
            if f"/{words}".endswith(f"/{name}"):
                if "distributed_type" in content:
                    return KnownFile(json.dumps(content), tool["tool"], tool["source"], "accelerate")
                auto = (
                    _AUTO if "fp16" in content or content.get("bf16") is None else {**_AUTO, "fp16": {"enabled": False}}
                )
                return KnownFile(json.dumps({**auto, **content}), tool["tool"], tool["source"])
    return None
