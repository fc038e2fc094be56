"""Runs layers of experts of transformers, torchtitan and Megatron-Core: what each keeps and takes, beside the list of operations.

`python -m experts.run` writes docs/experts.md and the rows that the tests read (tests/data/experts.csv), in an environment with
PyTorch, transformers, and, without what they ask for, torchtitan and megatron-core (`make experts`).
`python -m experts.run torchtitan,alltoall,qwen3_moe,8,4096,4` prints one: library, way, model, top k, tokens, ranks.
"""

from __future__ import annotations

import csv
import datetime
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from experts.case import FIGURES, SHAPES, Case, predicted
from experts.record import Measured, measure

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "tests/data/experts.csv", ROOT / "docs/experts.md"
LIBRARIES = "torch", "transformers", "torchtitan", "megatron-core"
WAYS = {
    "transformers": {
        "grouped_mm": "one product for all experts",
        "eager": "one expert after another",
        "batched_mm": "a copy of an expert's matrices for each row",
    },
    "torchtitan": {"local": "one product for all experts", "alltoall": "tokens sent to the experts' ranks"},
    "megatron": {
        "grouped": "Transformer Engine's grouped linear and permutes",
        "grouped unfused": "its grouped linear, Megatron's own permutes",
        "sequential": "one expert after another",
    },
}


def grid() -> Iterator[Case]:
    """The combinations: each library's ways, models and ranks, and numbers of chosen experts and tokens."""
    for way, tokens in (("grouped_mm", 4096), ("eager", 4096), ("batched_mm", 256)):
        for model in SHAPES:
            yield Case.of("transformers", way, model, tokens=tokens)
        for chosen in (1, 2, 4):
            yield Case.of("transformers", way, "qwen3_moe", chosen=chosen, tokens=tokens)
    for model in ("mixtral", "qwen3_moe", "deepseek_v3"):
        yield Case.of("transformers", "grouped_mm", model, tokens=32768)
        for ranks in (1, 2, 4):
            yield Case.of("torchtitan", "local" if ranks == 1 else "alltoall", model, ranks=ranks)
        yield Case.of("torchtitan", "local", model, chosen=1)
        yield Case.of("torchtitan", "alltoall", model, tokens=32768, ranks=4)
    for way in WAYS["megatron"]:
        for model in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"):
            for ranks in (1, 2, 4):
                yield Case.of("megatron", way, model, ranks=ranks)
    for model in ("mixtral", "qwen3_moe"):
        yield Case.of("megatron", "grouped", model, chosen=4, ranks=4)
        yield Case.of("megatron", "grouped", model, tokens=32768, ranks=4)
    yield Case.of("megatron", "grouped", "mixtral", ranks=8)


def main() -> int:
    """The command line."""
    if sys.argv[1:]:
        held: list[str] | None = [] if "-v" in sys.argv else None
        for words in sys.argv[1:]:
            if words != "-v":
                library, way, model, chosen, tokens, ranks = words.split(",")
                case = Case.of(library, way, model, chosen=int(chosen), tokens=int(tokens), ranks=int(ranks))
                print(_line(case, measure(case, held)), *(held or ()), sep="\n")
        return 0
    outcomes = []
    for case in grid():
        outcomes.append((case, measure(case)))
        print(_line(*outcomes[-1]), flush=True)
    releases = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    with ROWS.open("w") as file:
        file.write(f"# {datetime.datetime.now(datetime.UTC).date()}, {releases}; written by python -m experts.run\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Case.__struct_fields__, *FIGURES))
        writer.writerows((*msgspec.structs.astuple(case), *msgspec.structs.astuple(seen)) for case, seen in outcomes)
    PAGE.write_text(page(outcomes, releases))
    return 0


def _line(case: Case, seen: Measured) -> str:
    return f"{case.words}:  " + "  ".join(
        f"{name} {true / 2**20:.1f} MiB {100 * (said / true - 1):+.2f} %"
        for name, true, said in zip(FIGURES, msgspec.structs.astuple(seen), predicted(case), strict=True)
    )


def page(outcomes: list[tuple[Case, Measured]], releases: str) -> str:
    """The page of documentation: how many combinations agree within 1 %, and every one of them."""
    rows = []
    within = 0
    for case, seen in outcomes:
        true, said = msgspec.structs.astuple(seen), predicted(case)
        errors = [100 * (mine / theirs - 1) for theirs, mine in zip(true, said, strict=True)]
        within += max(map(abs, errors)) <= 1
        figures = " | ".join(
            f"{nbytes / 2**20:,.0f} ({error:+.2f})" for nbytes, error in zip(true, errors, strict=True)
        )
        size = f"{case.experts} of {case.width}, top {case.chosen}"
        rows.append(
            f"| {case.library} | {case.way} | {case.model} | {size} | {case.tokens} | {case.ranks} | {figures} |"
        )
    ways = "\n".join(f"- {library}, `{way}`: {words}" for library, own in WAYS.items() for way, words in own.items())
    return f"""# Experts beside their libraries' code

Layers of experts of transformers, torchtitan and Megatron-Core, run by their own code on the simulated device: forward, backward
and under a checkpoint, in bfloat16 with even routing. Of **{len(outcomes)} combinations, {within} agree within 1 %** in all four
figures: bytes kept after the forward, the peak of the forward, the peak of the backward (gradients of the weights included), and
the peak where the layer runs again in backward. In MiB, and how far the list of operations is off in percent.

{ways}

Of Transformer Engine there are no kernels here: what stands in for its grouped linear, its permutes and the functions that
`torch.compile` fuses makes and keeps the tensors that its source does. Padding to tiles of 8-bit recipes, DeepEP and HybridEP are
not among them. Releases: {releases}. Written by `make experts`.

| library | way | router | experts | tokens | ranks | kept | forward | backward | run again |
|---|---|---|---|--:|--:|--:|--:|--:|--:|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
