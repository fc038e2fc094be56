"""Writes docs/capture-agreement.md: families that are written by hand, captured from transformers' code, and traced.

python tools/capture_agreement.py [type ...]
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import loadgauge
from loadgauge.core.base.errors import Error
from loadgauge.core.estimate.result import Estimate
from loadgauge.pytorch.capture import road
from loadgauge.pytorch.trace import subprocess
from small_models import small_config

PAGE = Path(__file__).parents[1] / "docs" / "capture-agreement.md"
TYPES = ("llama", "gpt2", "bert", "qwen3_moe", "mixtral", "deepseek_v3", "gemma3_text")
LAYERS = {"deepseek_v3": 5, "gemma3_text": 7}
ASKED: dict[str, Any] = {"micro_batch": 16, "seq_len": 400, "precision": "bf16-pure", "optimizer": "sgd"}
EAGER = ("gpt_oss", "bloom")
"""Types whose classes have no other attention."""


def peak(result: Estimate) -> float:
    """Bytes of tensors at the peak."""
    return max(float(moment.total) - float(moment.parts["outside"]) for moment in result.workings.phases)


def share(one: float, two: float) -> str:
    """How far one number is from another."""
    return "equal" if one == two else f"{100 * (one / two - 1):+.4f} %"


def row(kind: str) -> str:
    """The row of a type: captured against written, and against the trace of the step."""
    config = small_config(kind, LAYERS.get(kind, 3))
    if kind == "bert":
        config.architectures = ["BertForMaskedLM"]
    more: dict[str, Any] = {"attention": "eager"} if kind in EAGER else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kind}.json"
        file.write_text(json.dumps(config.to_dict(), default=str))
        own = loadgauge.estimate(str(file), framework="huggingface", road="captured", **ASKED, **more)
        try:
            written = loadgauge.estimate(str(file), framework="huggingface", road="written", **ASKED, **more)
        except Error as error:
            return f"| {kind} | | | | | | {str(error)[:80]} |"
    traced = loadgauge.trace(copy.deepcopy(config), **ASKED, **more)
    parameters = "equal" if own.params == written.params else f"{own.params - written.params:+,}"
    cells = [
        kind, parameters, share(own.flops.hardware, written.flops.hardware), share(peak(own), peak(written)),
        share(own.flops.hardware, traced.flops.total), share(peak(own), traced.peak.total),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(types: list[str]) -> None:
    """Write the page, or print the rows of some types."""

    def in_child(work: Any, request: Any, shown: Any = None, **arguments: Any) -> Any:
        return work(request, **arguments)

    subprocess.in_child = in_child  # type: ignore[assignment]
    rows = []
    for kind in types or TYPES:
        try:
            rows.append(row(kind))
        except Exception as error:
            rows.append(f"| {kind} | | | | | {type(error).__name__}: {str(error)[:100]} |")
        road._FAMILIES.clear()
        print(rows[-1], flush=True)
    if types:
        return
    PAGE.write_text(
        f"""# Captured and written

Made by `python tools/capture_agreement.py`. Small models of families that are also written by hand, captured from their code,
against what the family says and against the trace of the very step: 16 sequences of 400 tokens, bf16-pure, SGD, so that most of the
peak is activations. Attention is flash where the class has it, else eager.

| type | parameters | FLOPs, written | peak, written | FLOPs, traced | peak, traced |
|---|---|---|---|---|---|
{chr(10).join(rows)}

Where captured and written differ, the trace agrees with the captured one to the byte.
Written families leave out the model's buffers and single numbers of the loss, which is what differences below 0.001 % are.
"""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
