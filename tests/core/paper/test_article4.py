"""Article 4: padding-free layers. Expected bytes of one layer, lengths from U{1..N}, batch 8; its GB are GiB.

The article's table follows two of its formulas as printed, which are wrong (`loadgauge.published`); what is right comes
from the list of operations, whose kept bytes are linear in tokens and pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import published_formulas as published
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.families.reference import gpt_block
from loadgauge.core.layers import View, block_layer
from theory import CASES, cases, refutes, reproduces

EAGER, FLASH = (Kernels(attention=kind, dtypes=Dtypes(norm_statistic=0)) for kind in ("eager", "flash"))
H, A, B = 6144, 48, 8
BLOCK = gpt_block(H, A)
ONE_LOW = {"A4-FLASH-8192": 0.002, "A4-PADFREE-4096": 0.002}
"""Two of the 21 cells (11.52456 as 11.524, 3.28352 as 3.283) are printed one unit of the last digit low, so they are
met to a whole unit instead of half of one."""


def naive(lengths: Lengths) -> float:
    """All padded, scores written out [bytes]."""
    padded = View(tokens=B * lengths.expected_max(B), pairs=B * lengths.expected_max_square(B), kernels=EAGER)
    return block_layer(BLOCK, H, padded).saved()


def padded_flash(lengths: Lengths) -> float:
    """Padded, but for the attention kernel, which keeps its own output and log-sum-exp [bytes]."""
    padded = block_layer(BLOCK, H, View(tokens=B * lengths.expected_max(B), pairs=0, kernels=EAGER))
    real = block_layer(BLOCK, H, View(tokens=lengths.expected_sum(B), pairs=0, kernels=FLASH))
    (kernel,) = (op for op in real if op.name == "attention.flash")
    made = [tensor for tensor in kernel.keeps if tensor not in kernel.inputs]
    assert {tensor.name for tensor in made} == {"attention.context", "attention.lse"}
    return padded.saved() + sum(tensor.nbytes for tensor in made)


def kept_flash(lengths: Lengths) -> float:
    """Padded, and without padding what the kernel is given, too: what PyTorch keeps (tests/core/oracle) [bytes]."""
    tokens, pairs = lengths.unpadded(B)
    view = View(tokens=B * lengths.expected_max(B), pairs=pairs, kernel_tokens=tokens, kernels=FLASH)
    return block_layer(BLOCK, H, view).saved()


def padding_free(lengths: Lengths) -> float:
    """No padding anywhere [bytes]."""
    real = View(tokens=lengths.expected_sum(B), pairs=lengths.expected_sum_square(B), kernels=FLASH)
    return block_layer(BLOCK, H, real).saved()


def printed_flash(lengths: Lengths) -> float:
    return published.padded_flash_activations(H, A, B * lengths.expected_max(B), lengths.expected_sum(B))


def printed_padding_free(lengths: Lengths) -> float:
    return published.padding_free_activations(H, A, lengths.expected_sum(B))


def lengths_of(case: dict[str, Any]) -> Lengths:
    i = case["inputs"]
    assert (i["b"], i.get("h", H), i.get("a", A)) == (B, H, A)
    return Lengths.uniform(i["N"])


@cases("A4-NAIVE-*")
def test_naive(case: dict[str, Any]) -> None:
    reproduces(case, naive(lengths_of(case)) / GIB)


@cases("A4-FLASH-*")
def test_flash_loses_half_of_its_own_term(case: dict[str, Any]) -> None:
    lengths = lengths_of(case)
    printed, right = printed_flash(lengths), padded_flash(lengths)
    reproduces(case, printed / GIB, unit=ONE_LOW.get(case["id"]))
    lost = lengths.expected_sum(B) * (H + 2 * A)
    assert right - printed == pytest.approx(lost)
    assert right / printed > 1.01
    # The post counts queries, keys and values with padding; the kernel keeps its own copies, without.
    padding = B * lengths.expected_max(B) - lengths.expected_sum(B)
    assert right - kept_flash(lengths) == pytest.approx(6 * H * padding)


@cases("A4-PADFREE-*")
def test_padding_free_counts_the_output_twice(case: dict[str, Any]) -> None:
    lengths = lengths_of(case)
    printed, right = printed_padding_free(lengths), padding_free(lengths)
    reproduces(case, printed / GIB, unit=ONE_LOW.get(case["id"]))
    assert printed - right == pytest.approx(lengths.expected_sum(B) * (H - 2 * A))
    assert printed / right - 1 == pytest.approx(0.0289, abs=1e-4)


@cases("A4-CORRECTED-PADFREE")
def test_padding_free_corrected(case: dict[str, Any]) -> None:
    lengths = lengths_of(case)
    refutes(case, padding_free(lengths) / GIB, by=-0.0281)
    assert printed_padding_free(lengths) / GIB == pytest.approx(case["published"], abs=5e-4)


@cases("A4-SAVING")
def test_saving(case: dict[str, Any]) -> None:
    lengths = lengths_of(case)
    reproduces(case, 1 - printed_padding_free(lengths) / printed_flash(lengths))
    # Of what PyTorch keeps it is smaller; against a wholly padded layer it is the share of padding.
    assert 1 - padding_free(lengths) / kept_flash(lengths) == pytest.approx(0.4113, abs=5e-5)
    padded = block_layer(BLOCK, H, View(tokens=B * lengths.expected_max(B), pairs=0, kernels=FLASH)).saved()
    share = 1 - lengths.expected_sum(B) / (B * lengths.expected_max(B))
    assert 1 - padding_free(lengths) / padded == pytest.approx(share)


@pytest.mark.parametrize("kind", ["NAIVE", "FLASH", "PADFREE"])
def test_only_batch_eight_fits_the_table(kind: str) -> None:
    case, lengths = CASES[f"A4-{kind}-8192"], Lengths.uniform(8192)
    for b in (4, 16):
        padded, tokens = b * lengths.expected_max(b), lengths.expected_sum(b)
        pairs = b * lengths.expected_max_square(b)
        nbytes = {
            "NAIVE": block_layer(BLOCK, H, View(tokens=padded, pairs=pairs, kernels=EAGER)).saved(),
            "FLASH": published.padded_flash_activations(H, A, padded, tokens),
            "PADFREE": published.padding_free_activations(H, A, tokens),
        }[kind]
        assert not 0.6 < nbytes / GIB / case["published"] < 1.6


def test_all_lengths_alike_nothing_is_saved() -> None:
    lengths = Lengths.of([4096])
    assert printed_flash(lengths) == printed_padding_free(lengths)
    # Put right, the padded layer keeps the kernel's output once more, as the copy that is padded again.
    assert padded_flash(lengths) - padding_free(lengths) == 2 * lengths.expected_sum(B) * H


def test_the_table_of_the_documentation() -> None:
    """docs/padding-free.md prints each of these beside the others."""
    page = (Path(__file__).parents[3] / "docs" / "padding-free.md").read_text(encoding="utf-8")
    table = page.partition("<!-- article -->")[2].partition("<!-- end of article -->")[0]
    _, _, _, *rows = (line for line in table.splitlines() if line)
    columns = (naive, printed_flash, kept_flash, printed_padding_free, padding_free)
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    expected = [
        [f"{n:,}", *(f"{nbytes(Lengths.uniform(n)) / GIB:,.3f}" for nbytes in columns)]
        for n in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    ]
    assert found == expected
    lengths = Lengths.uniform(8192)
    printed, kept = (
        f"{1 - free(lengths) / flash(lengths):.0%}"
        for free, flash in ((printed_padding_free, printed_flash), (padding_free, kept_flash))
    )
    plain = page.replace(" %", "%")
    assert f"Its {printed} saving at N = 8192 is {kept} (`loadgauge article 4`)." in plain
    head = plain.partition("```python")[0]
    assert f"keeps {kept} less for backward" in " ".join(head.split())
