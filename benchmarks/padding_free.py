"""Padding-free training against padding, on CPU: bytes kept, peak memory, processor time of a step.

    python benchmarks/padding_free.py

Batches of 8 sequences, lengths U{1..N}; a Llama of random weights in float32. Compared: padded with SDPA; the flat batch of
transformers (`DataCollatorWithFlattening`) and that of TRL (`padding_free=True`), both on SDPA as they run on a CPU; and an
enabled model. Bytes kept come from saved-tensor hooks, each storage once. Peak memory is what the resident set of a fresh process
rises above a step on two short sequences. Time is processor time on one thread, the least of several runs of every method in
turn. Writes the table in
docs/padding-free.md between its markers, and benchmarks/padding_free.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "padding-free.md", ROOT / "benchmarks" / "padding_free.json"
BATCH = 8
SIZES = {512: 4, 1024: 3, 2048: 2}  # longest: layers
GROUPS = {512: (8, 2), 1024: (8, 2), 2048: (8,)}  # longest: key-value heads
METHODS = {
    "padded": "padded, SDPA",
    "transformers": "transformers, flat",
    "trl": "TRL, padding_free",
    "loadgauge": "padding-free",
}
MEASURES = ("kept", "peak", "seconds")
VOCABULARY = 2048


def lengths(longest: int, seed: int) -> list[int]:
    source = random.Random(f"{longest} {seed}")
    return [source.randint(1, longest) for _ in range(BATCH)]


def build(longest: int, groups: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=SIZES[longest],
        num_attention_heads=8,
        num_key_value_heads=groups,
        max_position_embeddings=longest,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def batch(method: str, sizes: list[int]) -> dict[str, Any]:
    """The same tokens and targets for every method."""
    import torch

    from loadgauge.train import Collator

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]
    features = [{"input_ids": row, "labels": row} for row in rows]
    if method == "loadgauge":
        return Collator()(features)
    if method == "transformers":
        from transformers import DataCollatorWithFlattening

        return dict(DataCollatorWithFlattening()(features))
    if method == "trl":
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        return dict(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(features))
    longest = max(sizes)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)], labels[i, 1 : len(row)] = torch.tensor(row), 1, torch.tensor(row[1:])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: Any, given: dict[str, Any]) -> float:
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(**given).loss
    loss.backward()
    return time.process_time() - start


def use(model: Any, method: str) -> None:
    """Switch one model between methods."""
    from loadgauge.train import disable, enable, enabled

    if method == "loadgauge" and not enabled(model):
        enable(model)
    elif method != "loadgauge" and enabled(model):
        disable(model)
        model.config.use_cache = False


def measure_kept(longest: int, groups: int, count: int) -> dict[str, float]:
    """Bytes kept, mean over `count` batches."""
    from loadgauge.train import saved_bytes

    model = build(longest, groups)
    found = dict.fromkeys(METHODS, 0.0)
    for method in METHODS:
        use(model, method)
        for seed in range(count):
            given = batch(method, lengths(longest, seed))
            found[method] += saved_bytes(lambda given=given: model(**given), model.parameters()) / count
    return found


def measure_seconds(longest: int, groups: int, count: int, repeats: int) -> dict[str, float]:
    """Processor seconds of forward and backward, summed over batches, the least of `repeats` for each, methods in turn."""
    model = build(longest, groups)
    found = dict.fromkeys(METHODS, 0.0)
    for seed in range(count):
        given = {method: batch(method, lengths(longest, seed)) for method in METHODS}
        best = dict.fromkeys(METHODS, float("inf"))
        for _ in range(repeats):
            for method in METHODS:
                use(model, method)
                best[method] = min(best[method], step(model, given[method]))
        for method in METHODS:
            found[method] += best[method]
    return found


def high_water() -> float:
    """The most memory that the process had [bytes]."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024.0 for line in status.splitlines() if line.startswith("VmHWM"))


def measure_peak(method: str, longest: int, groups: int, count: int) -> float:
    """What a step needs on top of a step on two short sequences [bytes]: the resident set at its highest."""
    model = build(longest, groups)
    use(model, method)
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    step(model, batch(method, [5, 4]))
    before = high_water()
    for seed in range(count):
        step(model, batch(method, lengths(longest, seed)))
    return high_water() - before


def fresh(what: str, **settings: Any) -> Any:
    """A measurement in a process of its own. Memory freed stays in the process for time, and is given back for memory."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if what == "seconds":
        environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
    command = [sys.executable, __file__, "--one", what, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def everything(sizes: list[int], measures: list[str], counts: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One row a size, as it is measured."""
    for longest in sizes:
        for groups in GROUPS[longest]:
            tokens = sum(sum(lengths(longest, seed)) for seed in range(counts))
            padded = sum(BATCH * max(lengths(longest, seed)) for seed in range(counts))
            row = {"longest": longest, "layers": SIZES[longest], "groups": groups, "batches": counts}
            row |= {"token_ratio": tokens / padded}
            how = {"longest": longest, "groups": groups, "count": counts}
            if "kept" in measures:
                row["kept"] = fresh("kept", **how)
            if "peak" in measures:
                row["peak"] = {method: fresh("peak", method=method, **how) for method in METHODS}
            if "seconds" in measures:
                row["seconds"] = fresh("seconds", repeats=repeats, **how)
            yield row


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown: every figure as a share of padded SDPA."""
    lines = [
        found["heading"],
        "",
        "| N, layers, key-value heads | token ratio | | " + " | ".join(METHODS.values()) + " |",
        "|---|---|---|" + "---|" * len(METHODS),
    ]
    names = {"kept": "kept for backward", "peak": "peak memory", "seconds": "time"}
    for row in found["rows"]:
        for i, (key, name) in enumerate(names.items()):
            base = row[key]["padded"]
            first = f"{row['longest']}, {row['layers']}, {row['groups']} | {row['token_ratio']:.3f}" if not i else " | "
            if key == "peak":
                batches = [lengths(row["longest"], seed) for seed in range(row["batches"])]
                largest = max(map(sum, batches)) / (BATCH * max(map(max, batches)))
                first = f" | {largest:.3f}, largest batch"
            unit = f"{base / 2**20:.0f} MiB" if key != "seconds" else f"{base:.1f} s"
            shares = [f"1 ({unit})", *(f"{row[key][m] / base:.3f}" for m in list(METHODS)[1:])]
            lines.append(f"| {first} | {name} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def write(found: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split("<!-- table -->")
    tail = rest.split("<!-- end of table -->")[1]
    PAGE.write_text(f"{head}<!-- table -->\n{table(found)}\n<!-- end of table -->{tail}", encoding="utf-8")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--longest", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="measured anew")
    arguments.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES), help="taken anew")
    arguments.add_argument("--batches", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.one:
        what, settings = chosen.one
        measure = {"kept": measure_kept, "peak": measure_peak, "seconds": measure_seconds}[what]
        print(json.dumps(measure(**json.loads(settings))))
        return
    import torch
    import transformers
    import trl

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    heading = (
        f"{datetime.date.today()}, commit {commit}, {platform.machine()}, one thread, PyTorch {torch.__version__}, "
        f"transformers {transformers.__version__}, TRL {trl.__version__}, float32."
    )
    known = json.loads(DATA.read_text(encoding="utf-8"))["rows"] if DATA.exists() else []
    rows = {(row["longest"], row["groups"]): row for row in known}
    for row in everything(chosen.longest, chosen.measures, chosen.batches, chosen.repeats):
        key = row["longest"], row["groups"]
        rows[key] = rows.get(key, {}) | row
        found: dict[str, Any] = {
            "heading": heading,
            "rows": [rows[key] for key in sorted(rows, key=lambda k: (k[0], -k[1]))],
        }
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write(found)
        print(table(found), flush=True)


if __name__ == "__main__":
    main()
