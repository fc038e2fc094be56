"""The formulas that the five articles state are those that `loadgauge equation` prints, at numbers for their letters."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from article_claims import FIGURES, FORMS, LETTERS, NO_FIGURE, Form, tables
from command_line import document, typed


def value(expression: str) -> float:
    """A printed formula in plain Python."""
    plain = re.sub(r"Sum\((.*?), \(k, 1, -1 \+ N\)\)", r"sum(\1 for k in range(1, N))", expression)
    # Letters of its own, before those of Python.
    return float(eval(plain, {"sqrt": math.sqrt, **LETTERS}))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.claim}: {form.command}, {form.part}")
def test_a_formula_is_the_article_s(form: Form) -> None:
    found: list[dict[str, Any]] = document(form.command)["equations"]
    expression = found[0]["parts"][form.part] if isinstance(form.part, str) else found[form.part]["expression"]
    assert value(expression) == pytest.approx(form.value, rel=1e-12)


def test_every_claim_is_judged_by_arithmetic_or_has_none() -> None:
    rows = [row for number in range(1, 6) for table in tables(number) for row in table["rows"]]
    judged = {row["claim"] for row in rows} | {form.claim for form in FORMS} | set(FIGURES)
    claims = {f"{n}.{place}" for n, last in enumerate((23, 17, 45, 17, 17), 1) for place in range(1, last + 1)}
    assert claims == {claim for claim in judged | NO_FIGURE if not claim.startswith("N")}
    assert not judged & NO_FIGURE
    assert len(claims) == 119


# -- claims that the list of 119 leaves out ------------------------------------------------------------------------------


def test_ten_billion_parameters_in_16_bits_run_on_a_v100() -> None:
    """N2: 20 GB are 18.6 GiB, under 32 GiB."""
    out = typed("estimate --size 10B --family gpt --gpu v100-sxm2-32gb --task generate --context 512").out
    weights = float(re.search(r"(?m)^weights\s+([\d.]+)", out)[1])  # type: ignore[index]
    assert weights == pytest.approx(2 * 10e9 / 2**30, rel=0.01)
    assert out.startswith("FITS")


def test_zero_2_is_nearly_as_fast_as_data_parallelism() -> None:
    """N3: it sends as much."""
    job = "--gpu h100-sxm5-80gb --gpus 8 --seq-len 4096"
    steps = [document(f"estimate llama-3.2-1b {job} --zero {zero}")["time"]["step"] for zero in range(3)]
    assert max(steps) / min(steps) < 1.1


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_stages() -> None:
    """N5: 64 against 8 in the first stage; in the last, where GPipe's peak is, as many, with logits beside."""
    job = "megatron-gpt-175b --gpu a100-sxm4-80gb --gpus 1152 --tp 8 --pp 8 --global-batch 1152"
    job += " --zero 0 --no-sequence-parallel --recompute none"
    most = {}
    for schedule in ("gpipe", "1f1b"):
        moments = document(f"estimate {job} --schedule {schedule}")["memory"]["moments"]
        most[schedule] = max(moment["parts"]["activations"] for moment in moments)
    assert most["gpipe"] / most["1f1b"] == pytest.approx(64 / 8, rel=0.02)
