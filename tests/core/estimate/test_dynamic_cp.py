"""Groups of context-parallel ranks by length, as Megatron-Core's hybrid context parallelism makes them: sums by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import document, typed

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job

LENGTHS = [1000] * 24 + [3000] * 6 + [4096] + [16384]
"""On ranks of at most 4,096 tokens, the last takes four and all others one each."""
TOKENS, PAIRS = sum(LENGTHS), sum(length**2 for length in LENGTHS)
LLAMA = {
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm5-80gb",
    "gpus": 8,
    "framework": "megatron",
    "zero": 1,
    "global_batch": 32,
}


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    place = tmp_path / "lengths.txt"
    place.write_text("".join(f"{length}\n" for length in LENGTHS))
    return str(place)


def run(lengths: str, **more: Any) -> Any:
    return resolve_job(Job(**{**LLAMA, "lengths": lengths, "dynamic_cp": 4096, **more})).estimate()


def test_groups_are_powers_of_two_of_length_over_the_limit() -> None:
    """`2 ** ceil(log2(length / limit))`, at least 1 (`BalancedCPScheduler.gpus_needed`), by brute force."""
    for most in (512, 1000, 4096, 65536):
        sizes = []
        for length in LENGTHS:
            ranks = 1
            while length > most * ranks:
                ranks *= 2
            sizes.append(ranks)
        found = Lengths.of(LENGTHS).over_ranks(most)
        assert found.largest == max(sizes)
        assert found.mean == pytest.approx(sum(sizes) / len(sizes))
        assert found.held == max(length / size for length, size in zip(LENGTHS, sizes, strict=True))
        passed = sum(length * (size - 1) for length, size in zip(LENGTHS, sizes, strict=True))
        assert found.passed == pytest.approx(passed / TOKENS)


def test_a_ranks_memory_is_bound_by_its_tokens(lengths: str) -> None:
    """The longest part is 4,096 tokens, whatever its sequence: as a static job of 4,096 tokens."""
    result = run(lengths)
    static = resolve_job(Job(**{**LLAMA, "seq_len": 4096, "micro_batch": 1})).estimate()
    layout = result.layout
    assert (layout.dp, layout.cp, layout.at_peak.tokens / layout.cp) == (2, 4, 4096)
    assert result.memory.parts["activations"] == pytest.approx(static.memory.parts["activations"], rel=0.01)
    for part in ("weights", "gradients", "optimizer"):
        assert result.memory.parts[part] == static.memory.parts[part]


def test_a_step_has_the_tokens_and_pairs_of_its_sequences(lengths: str) -> None:
    result = run(lengths)
    layout = result.layout
    # 31 sequences of one rank and one of four: 35 parts on 8 ranks.
    assert layout.num_microbatches == round(35 / 8)
    assert layout.tokens * layout.num_microbatches * layout.dp == pytest.approx(TOKENS, rel=1e-9)
    assert layout.pairs * layout.num_microbatches * layout.dp == pytest.approx(PAIRS, rel=1e-9)
    assert result.time.tokens == pytest.approx(TOKENS, rel=1e-9)


def test_only_long_sequences_are_exchanged(lengths: str) -> None:
    """Keys and values of 8 heads of 128 in 16 bits, of the one long sequence: each rank's quarter goes to the three others."""
    result = run(lengths)
    rows = [row for row in result.network if row.axis == "cp" and "forward" in row.what]
    sent = sum(row.wire * row.calls_per_step for row in rows) * result.layout.gpus
    assert sent == pytest.approx(32 * 2 * 2 * 8 * 128 * 16384 * 3, rel=1e-6)
    fixed = resolve_job(Job(**{**LLAMA, "lengths": lengths, "cp": 4})).estimate()
    assert result.time.parts["cp"] < 0.35 * fixed.time.parts["cp"]


def test_the_command_that_is_printed_says_it(lengths: str) -> None:
    flags = f"--gpu h100-sxm5-80gb --gpus 8 --framework megatron --zero 1 --global-batch 32 --lengths {lengths}"
    given = resolve_job(parse(f"llama-3.1-8b {flags} --dynamic-cp 4096".split()))
    result = given.estimate()
    line = completer(given.job)(result).command()
    assert "--dynamic-cp 4096" in line
    again = document(line.removeprefix("loadgauge "))
    assert again["memory"]["total"] == result.memory.total
    assert again["time"]["step"] == result.time.step
    assert (
        "--max-seqlen-per-dp-cp-rank 4096 as"
        in typed(f"estimate llama-3.1-8b {flags} --max-seqlen-per-dp-cp-rank 4096").err
    )


def test_what_megatron_does_not_run_is_refused(lengths: str) -> None:
    with pytest.raises(ConfigError, match="needs --lengths"):
        resolve_job(Job(**{**LLAMA, "seq_len": 4096, "dynamic_cp": 4096}))
    with pytest.raises(ConfigError, match="takes 16 ranks of at most 1,024 each, and there are 8"):
        run(lengths, dynamic_cp=1024)
    for more in (
        {"pp": 2},
        {"cp_comm": "all_to_all", "cp": 2},
        {"micro_batch": 2},
        {"zero": 3},
        {"framework": "torchtitan"},
    ):
        with pytest.raises(NotModelled, match="--dynamic-cp with"):
            run(lengths, **more)
