"""Compare captured formulas with a trace of the very step at sizes never captured, and write docs/captured-accuracy.md.

python tools/captured_accuracy.py out.json [types ...]      results so far, each type in a process of its own
python tools/captured_accuracy.py out.json --modules        the modules of examples/own_modules.py, in this process
python tools/captured_accuracy.py out.json --page           docs/captured-accuracy.md of them
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captured_models import forked, ready, results, run_each

PAGE = Path(__file__).parents[1] / "docs" / "captured-accuracy.md"
LIMIT = 120
"""Seconds of CPU that a type may take, with all its variants."""
_NAMES = (
    "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe falcon gpt2 gpt_neo gpt_neox gptj "
    "bloom opt codegen mpt stablelm starcoder2 olmo olmo2 olmoe granite granitemoe cohere cohere2 deepseek_v3 glm glm4 "
    "gpt_oss ernie4_5 exaone4 smollm3 nemotron bitnet lfm2 dbrx jetmoe helium persimmon xglm biogpt ctrl mamba mamba2 "
    "bert roberta albert electra distilbert deberta-v2 mpnet modernbert camembert xlm longformer "
    "t5 mt5 bart mbart pegasus blenderbot switch_transformers led whisper "
    "llava paligemma internvl gemma3 got_ocr2 mllama deepseek_v4"
)
TYPES = _NAMES.split()
CAPTURED = {"b": 3, "s": 96, "t": 80, "n": 16_000}
"""Where formulas are captured first."""
VARIANTS: dict[str, tuple[dict[str, str], tuple[dict[str, int], ...]]] = {
    "bf16, SGD": (
        {"precision": "bf16-pure", "optimizer": "sgd"},
        ({"b": 64, "s": 500, "t": 410, "n": 16_000}, {"b": 1, "s": 333, "t": 77, "n": 16_000}),
    ),
    "fp32, AdamW, recomputed per block": (
        {"precision": "fp32", "optimizer": "adamw", "recompute": "full"},
        ({"b": 5, "s": 150, "t": 128, "n": 16_000},),
    ),
}
"""How a type is trained, and at which sizes formulas are compared: none of them is captured before."""


def tried(kind: str) -> dict[str, Any]:
    """What comparing one type comes to: a row for each variant and size."""
    import torch

    from loadgauge.core.base.errors import ConfigError, first_line
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.capture.capture import Captures
    from loadgauge.pytorch.capture.inputs.kinds import of_config
    from loadgauge.pytorch.capture.record import record
    from loadgauge.pytorch.trace.torch_run import TorchRun
    from small_models import precision, small_config

    torch.set_num_threads(1)
    begun = time.process_time()
    out: dict[str, Any] = {}
    for name, (fields, asked) in VARIANTS.items():
        if fields["precision"] == "bf16-pure":
            fields = {**fields, "precision": precision(kind)}
        job = of_config(small_config(kind), TorchRun.of(Job(model="", seq_len=1, **fields)))  # type: ignore[arg-type]
        captures = Captures(job, kind)
        try:
            captures.at(**{size: CAPTURED[size] for size in job.names})
        except ConfigError as error:
            out[name] = [{"sizes": {}, "refused": first_line(error)[:160]}]
            continue
        rows = out[name] = []
        for sizes in asked:
            sizes = {size: sizes[size] for size in job.names}
            try:
                plain = record(job, sizes)
            except Exception as error:  # the code itself refuses the sizes
                rows.append({"sizes": sizes, "refused": first_line(error)[:120]})
                continue
            known = len(captures.known)
            found = captures.at(**sizes)
            rows.append({"sizes": sizes, "again": len(captures.known) > known, **compared(found, plain, sizes)})
    return {"variants": out, "seconds": round(time.process_time() - begun, 1)}


def compared(found: Any, plain: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """How far a capture lies from a plain run: the largest difference of live bytes at an event, of kept bytes and of FLOPs."""
    import numpy as np

    row: dict[str, Any] = {"plain": found.plain, "events": len(plain.changes), "values": len(found.values)}
    if [op.name for op in plain.ops] != [op.name for op in found.operations] or len(plain.changes) != len(found.events):
        return {**row, "live": 1.0, "kept": 1.0, "flops": 1.0, "share": 0.0}
    live, mine = np.cumsum(plain.changes), found.live(**sizes)
    states = {"weights", "gradients", "optimizer"}
    at_peak = found.at_peak(**sizes)
    rest = sum(size for what, size in at_peak.items() if what.split()[0] not in states)
    kept, flops = sum(plain.kept), sum(op.flops for op in plain.ops[found.second :] if op.flops)
    return {
        **row,
        "live": float(np.max(np.abs(live - mine) / np.maximum(live, 1))),
        "kept": abs(found.kept_bytes(**sizes) - kept) / max(1, kept),
        "flops": abs(found.flops(**sizes) - flops) / max(1, flops),
        "share": round(rest / max(1, found.peak(**sizes)), 3),
    }


def worst(one: dict[str, Any]) -> float:
    """The largest relative difference of a type's rows."""
    rows = [row for rows in one["variants"].values() for row in rows if "refused" not in row]
    return max((max(row["live"], row["kept"], row["flops"]) for row in rows), default=0.0)


def modules(out: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What comparing the modules of examples/own_modules.py comes to, at sizes never captured, a batch of 1 and odd lengths.

    out: those done already, which gains the others one by one
    """
    import runpy

    import loadgauge
    from loadgauge.pytorch.capture.record import record

    known = runpy.run_path(str(PAGE.parents[1] / "examples" / "own_modules.py"))["MODULES"]
    for name, (make, inputs, step) in known.items():
        if name in out:
            continue
        captures = loadgauge.capture(make, inputs, **({"step": step} if step else {}))
        first, *others = ({size: OWN[size][at] for size in captures.job.names} for at in range(3))
        found = captures.at(**first)
        rows = []
        for sizes in others:
            known_before = len(captures.known)
            there = captures.at(**sizes)
            row = compared(there, record(captures.job, sizes), sizes)
            rows.append({"sizes": sizes, "again": len(captures.known) > known_before, **row})
        said = [one.rpartition("/")[2] for one in (*found.branches, *found.assumed)]
        formula = "" if found.plain else str(found.kept_formula)
        out[name] = {"rows": rows, "kept": formula, "guards": list(found.guards), "said": said}
        yield out


OWN = {
    "b": (5, 1, 7),
    "s": (24, 32, 19),
    "side": (32, 48, 44),
    "nodes": (50, 7, 33),
    "edges": (120, 1, 64),
    "n": (6, 1, 9),
}
"""Sizes of own modules: captured at the first, compared at the others."""


def page(done: dict[str, Any], own: dict[str, Any], releases: str) -> str:
    """docs/captured-accuracy.md."""
    compared_types = {kind: one for kind, one in done.items() if "variants" in one}
    rows = [row for one in compared_types.values() for known in one["variants"].values() for row in known]
    ran = [row for row in rows if "refused" not in row]
    exact = [row for row in ran if max(row["live"], row["kept"], row["flops"]) <= 1e-4]
    lines = [
        "# Captured formulas against the trace",
        "",
        f"Made by `python tools/captured_accuracy.py`, with {releases}. Formulas are captured at b = 3, s = 96 and asked at",
        "sizes that were never captured: other batches and lengths, a length that 16 does not divide, b = 1. The very step is",
        "traced there, and live bytes are compared after every allocation and release, with bytes kept for backward and FLOPs.",
        "Models are small ones of each type (two layers). One tracer is compared with itself: this shows that formulas say what",
        "the trace says.",
        "",
        f"{len(compared_types)} types, {len(ran)} comparisons: {len(exact)} within 0.01 % in all three,",
        f"{len(ran) - len(exact)} not.",
        "",
        "`again`: the sizes lie outside the guards of the first capture (b = 1 always does), so the code was captured once more.",
        "`numbers`: sizes could not stay symbols. The share is that of activations and inputs in the peak.",
        "",
        "| type | variant | sizes | share | live bytes | kept | FLOPs | road |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for kind, one in sorted(compared_types.items()):
        for variant, known in one["variants"].items():
            for row in known:
                at = ", ".join(f"{name}={value}" for name, value in row["sizes"].items())
                if "refused" in row:
                    lines.append(f"| {kind} | {variant} | {at} | | | | | refused: {_cell(row['refused'])} |")
                    continue
                off = " | ".join("exact" if not row[name] else f"{row[name]:.4%}" for name in ("live", "kept", "flops"))
                road = "numbers" if row["plain"] else "again" if row["again"] else "formula"
                lines.append(f"| {kind} | {variant} | {at} | {row['share']:.0%} | {off} | {road} |")
    failed = {kind: one["error"] for kind, one in done.items() if "error" in one}
    if failed:
        lines += ["", "Not compared:", ""] + [f"- `{kind}`: {_cell(text)}" for kind, text in sorted(failed.items())]
    lines += [
        "",
        "## Modules that no library wrote",
        "",
        "Those of `examples/own_modules.py`, compared in the",
        "same way at two other sizes each, one of them with a batch of 1.",
        "",
        "| module | bytes kept for backward | holds where | largest difference | said |",
        "|---|---|---|--:|---|",
    ]
    for name, one in own.items():
        largest = max(max(row["live"], row["kept"], row["flops"]) for row in one["rows"])
        holds = ", ".join(one["guards"][:2]) + (f" and {len(one['guards']) - 2} more" if len(one["guards"]) > 2 else "")
        kept = f"`{_cell(one['kept'])}`" if one["kept"] else "numbers"
        shown = "exact" if not largest else f"{largest:.4%}"
        lines.append(f"| {name} | {kept} | {_cell(holds)} | {shown} | {_cell('; '.join(one['said']))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = re.sub(r"/\S*?/(transformers|torch)/", r"\1/", text).replace("\n", " ").replace("|", "\\|")
    return text if len(text) <= 110 else f"{text[:107]}..."


if __name__ == "__main__":
    versions = ready()
    path, given = Path(sys.argv[1]), sys.argv[2:]
    done = results(path)
    own = done.get("own", {})
    of_types = {kind: one for kind, one in done.items() if kind != "own"}
    if given == ["--page"]:
        PAGE.write_text(page(of_types, own, "transformers {} and PyTorch {}".format(*versions)))
        sys.exit()
    if given == ["--modules"]:
        for so_far in modules(own):
            path.write_text(json.dumps(of_types | {"own": so_far}, indent=0), encoding="utf-8")
        sys.exit()
    missing = [kind for kind in TYPES if kind not in done]
    run_each(
        path, done, given or missing, lambda kind: forked(kind, tried, LIMIT),
        lambda one: f"{one.get('error') or f'{worst(one):.1e}'} {one.get('seconds')}",
    )  # fmt: skip
