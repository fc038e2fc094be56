"""The cost of padding, as a table: each way to run a batch of sequences of several lengths."""

from loadgauge.core.base.units import flops, in_gib, seconds
from loadgauge.core.estimate.memory.padding import Forecast, Row
from loadgauge.core.text.table import Column, Paper, draw, points


def padding(target: Paper, forecast: Forecast) -> None:
    """Print the expected micro-batch padded, with FlashAttention, and without padding."""
    timed = any(row.step is not None for row in forecast.rows)
    columns = [
        Column("method"),
        Column("tokens", "right", wide=True),
        Column("layer", "right"),
        Column("all layers", "right"),
        Column("share", "right", style="dim"),
        Column("peak", "right", wide=True),
        Column("FLOPs", "right"),
        *([Column("step", "right"), Column("share", "right", style="dim")] if timed else []),
    ]
    title = f"With and without padding: expected values for a micro-batch of {forecast.micro_batch}, memory in GiB"
    draw(target, columns, [_cells(forecast, row, timed) for row in forecast.rows], title)
    lines = [f"{row.method}: {row.reason}" for row in forecast.rows if row.reason]
    several = forecast.micro_batch > 1
    lines += [
        f"lengths: mean {forecast.mean:,.0f} tokens, at most {forecast.longest:,}; the longest of {forecast.micro_batch} is"
        f" expected to have {forecast.expected_longest:,.0f}"
        + ("" if several else "; a micro-batch of one has no padding"),
        "memory is what is kept for backward; padded, flash: flash_attention_2 with a mask, which leaves the padding out"
        " of attention",
    ]
    if several:
        lines.append(
            f"the peak of a run is set by its largest micro-batch: up to {forecast.worst:,} tokens in every row, unless"
            " batches are filled by tokens (loadgauge.train.TokenBudgetSampler)"
        )
    points(target, [*lines, *forecast.notes])


def _cells(forecast: Forecast, row: Row, timed: bool) -> list[str]:
    def share(quantity: str) -> str:
        value = forecast.share(row, quantity)
        return "-" if value is None else f"{value:.1%}"

    def gib(nbytes: float | None) -> str:
        return "-" if nbytes is None else in_gib(nbytes)

    time = [] if not timed else ["-" if row.step is None else seconds(row.step), share("step")]
    return [
        row.method,
        f"{row.tokens:,.0f}",
        gib(row.layer),
        gib(row.activations),
        share("layer"),
        gib(row.peak),
        "-" if row.flops is None else flops(row.flops),
        *time,
    ]
