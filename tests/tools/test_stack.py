"""A sample of the stack matrix (`make stack`): Trainer, TRL, PEFT and accelerate on the simulated device, beside the formula."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgauge.core.definitions.training.optimizers import OPTIMIZERS as KNOWN_OPTIMIZERS
from loadgauge.job_files.ideas.words import TORCH_OPTIMIZERS
from stack.case import Case
from stack.compare import Row
from stack.design import DIMENSIONS, SEED, allowed, covering, design, pairs
from stack.known import named, within

SMALL = {"layers": 2, "hidden": 256, "vocab": 8000, "seq_len": 256}
CHOICES: dict[str, tuple[Any, ...]] = {
    "family": DIMENSIONS["family"], "precision": ("bf16", "bf16+bf16", "fp32+bf16"),
    "optimizer": ("adamw_torch", "adamw_torch_fused", "sgd"), "checkpointing": ("none", "reentrant", "non-reentrant"),
    "wrapper": ("none", "none", "ddp"), "attention": ("sdpa", "eager"), "clip": (1.0, 0.0), "accumulate": (1, 2),
}  # fmt: skip
"""What the sample is drawn from: what transformers and accelerate do alone."""


def drawn(number: int = 8) -> tuple[str, ...]:
    """A draw over the dimensions by the seed of the design, whatever the formula makes of it."""
    draw, found = random.Random(SEED), dict[str, None]()
    while len(found) < number:
        case = Case(**{name: draw.choice(values) for name, values in CHOICES.items()}, **SMALL)
        if not allowed(case):
            found[case.words] = None
    return tuple(found)


SAMPLE = drawn()
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Any]:
    """The rows of every case of the sample, from one process that imports the libraries once."""
    cases = list(SAMPLE)
    paths = [str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "STACK_FOLDER": str(tmp_path_factory.mktemp("stack")),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "stack.run", *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    documents = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {Case(**document["traced"]["case"]): document for document in documents}


OPEN = pytest.mark.xfail(
    strict=True, reason="not explained: forward of checkpointed eager layers over float32 weights, +2.3 %"
)
"""What the drawn sample shows and the formula has not: it must be taken away here when it is mended."""


def marked(words: str) -> Any:
    """A case of the sample, marked where its difference is open."""
    case = Case.of(words)
    open_ = case.precision == "fp32+bf16" and case.checkpointing == "reentrant" and case.attention == "eager"
    return pytest.param(words, marks=OPEN if open_ else ())


@pytest.mark.slow
@pytest.mark.parametrize("words", map(marked, SAMPLE))
@pytest.mark.thorough
def test_within_one_percent(words: str, compared: dict[Case, Any]) -> None:
    """Every phase is within one percent, or a named difference accounts for it by its bytes."""
    case = Case.of(words)
    document = compared[case]
    assert document["formula"] == ""
    rows = [Row(**{name: row[name] for name in ("phase", "traced", "formula")}) for row in document["compared"]]
    assert {"prepared", "forward", "loss", "backward", "step", "kept"} <= {row.phase for row in rows}
    for row in rows:
        assert row.formula is not None
        assert within(row.formula, row.traced) or named(case, row), row


def test_a_name_accounts_for_its_bytes_alone() -> None:
    """A difference of other bytes has no name, and neither has one of a case that the name does not concern."""
    case = Case.of("trainer=sft,seq_len=256,layers=2,hidden=256,vocab=8000")
    missing = 2 * (2 * 512 * 2 * 64 * 2 + 2 * 256**2 * 2)  # keys and values of all heads, and a mask a layer
    traced = 90 * 2**20
    assert named(case, Row("loss", traced, traced - missing)) == "M"
    assert named(case, Row("loss", traced, traced - missing / 20)) == ""
    assert named(case, Row("step", traced, traced - missing)) == ""
    assert named(msgspec.structs.replace(case, trainer="trainer"), Row("loss", traced, traced - missing)) == ""


def test_a_case_is_its_words() -> None:
    for case in design(120):
        assert Case.of(case.words) == case


def test_the_design_covers_every_pair_that_may_be() -> None:
    """What the first 200 cases have not, no random case of another seed has more than seldom."""
    cases = covering(200)
    assert len(set(cases)) == len(cases)
    seen = {pair for case in cases for pair in pairs(case)}
    alone = {(name, value) for name, values in DIMENSIONS.items() for value in values}
    assert alone == {pair[:2] for pair in seen} | {pair[2:] for pair in seen}


def test_optimizers_are_known() -> None:
    assert {TORCH_OPTIMIZERS[name] for name in DIMENSIONS["optimizer"]} <= set(KNOWN_OPTIMIZERS)
