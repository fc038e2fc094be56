"""What is advised when a run does not fit."""

from __future__ import annotations

from loadgauge.advise.advice import advice
from loadgauge.resolve.resolve import resolve_job
from loadgauge.spec.job import Job


def test_zero_shards_over_context_parallel_ranks_too() -> None:
    """One replica whose ranks share the sequence: they hold the same weights, so ZeRO can share those out."""
    given = resolve_job(Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, cp=8, seq_len=32768, loss="chunked"))
    assert given.layout.dp == 1
    assert given.estimate().memory.fits is False
    found = {change.flags: change.result for change in advice(given)}
    assert {"--zero 1", "--zero 3"} <= set(found)
    assert all(result.memory.fits for result in found.values())


def test_what_fits_precedes_what_is_tight() -> None:
    given = resolve_job(Job(model="mixtral-8x7b", gpu="h100-sxm5-80gb", gpus=64, ep=8, tp=2, sequence_parallel=True, pp=2,
                            vpp=2, schedule="interleaved", global_batch=128))  # fmt: skip
    verdicts = [change.result.memory.verdict for change in advice(given)]
    assert set(verdicts) == {"fits", "tight"}
    assert verdicts == sorted(verdicts)
