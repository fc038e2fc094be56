"""The cost of padding: memory, FLOPs and time of a batch with it, with FlashAttention, and without it.

Sequences are drawn independently from a distribution of lengths (source: padfree2024). Bytes and FLOPs of the operations
are linear in tokens and query-key pairs, so those of the expected tokens and pairs are the expected ones. Exact, with three
exceptions: a sliding window (the smaller of window and length is not linear), the highest of several moments at the peak,
and time, where an operation takes as long as the slower of arithmetic and memory; each is that of the expected batch.

Legend: b sequences in a micro-batch, s a length, K the longest of the batch.
"""

import functools
from enum import StrEnum
from typing import Any

import msgspec

from loadgauge.core.base.errors import NotModelled
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import Attention, ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import default_training, estimate
from loadgauge.core.estimate.result import Estimate


class Method(StrEnum):
    """Ways to put sequences of unequal lengths in a micro-batch."""

    PADDED_EAGER = "padded, eager"
    """Computes and keeps all the padding, and writes the scores: what shares are of."""
    PADDED_FLASH = "padded, flash"
    """Attention alone runs without padding (flash_attention_2 given a mask)."""
    PADDING_FREE = "padding-free"
    """No padding anywhere."""


METHODS: tuple[Method, ...] = tuple(Method)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast for one method; values are None where `reason` says why it is not modelled.

    tokens, pairs: of one micro-batch, as its layers and its attention compute them
    layer: bytes that a layer keeps for one micro-batch, the mean over the layers of the fullest stage
    activations: the most bytes kept at a moment, of all layers and micro-batches in flight; peak: all memory of the worst rank
    flops: of the model, for one step over all GPUs; hardware_flops: including recomputation
    step: seconds of one optimizer step; None without a cluster
    """

    method: Method
    tokens: float
    pairs: float
    layer: float | None = None
    activations: float | None = None
    peak: float | None = None
    flops: float | None = None
    hardware_flops: float | None = None
    step: float | None = None
    reason: str = ""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each of `METHODS`. `micro_batch`: sequences of one; `worst`: tokens when all are the longest there is,
    where padding-free needs what padding does."""

    micro_batch: int
    mean: float
    longest: int
    expected_longest: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> int:
        """Tokens of the largest possible micro-batch: every sequence the longest, nothing padded."""
        return self.micro_batch * self.longest

    def share(self, row: Row, quantity: str) -> float | None:
        """Return a row's `layer`, `activations`, `peak`, `flops` or `step` over that of padded eager attention.

        None where either is not modelled, and where that one has none: a layer may keep nothing on the card.
        """
        naive, own = (getattr(each, quantity) for each in (self.rows[0], row))
        return None if not naive or own is None else own / naive

    def to_dict(self) -> dict[str, Any]:
        """Return the `forecast` of `estimate --json`: bytes, FLOPs, seconds and plain counts."""
        return {
            "micro_batch": self.micro_batch,
            "mean": self.mean,
            "longest": self.longest,
            "expected_longest": self.expected_longest,
            "worst_tokens": self.worst,
            "rows": [
                {**msgspec.structs.asdict(row), "share_of_naive": {key: self.share(row, key) for key in SHARES}}
                for row in self.rows
            ],
            "notes": list(self.notes),
        }


SHARES = ("layer", "activations", "peak", "flops", "step")


def forecast(
    model: ModelSpec,
    lengths: Lengths,
    layout: Layout,
    training: Training | None = None,
    gpu: Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    efficiencies: Efficiencies | None = None,
) -> Forecast:
    """Forecast micro-batches of `layout.micro_batch` sequences of these lengths, by method; see `estimate` for the rest.

    The layout's own `seq_len`, `tokens` and `pairs` are replaced. The smallest GPT-2, lengths from U{1..1024}, batches of 8:

    >>> from loadgauge import Layout, model
    >>> found = forecast(model("gpt2"), Lengths.uniform(1024), Layout(micro_batch=8, global_batch=8, seq_len=1))
    >>> [round(found.share(row, "layer"), 2) for row in found.rows]
    [1.0, 0.45, 0.26]
    """
    chosen = training or default_training(layout)
    b = layout.micro_batch
    rows = []
    for method in METHODS:
        expected, how = of_method(method, lengths, layout, chosen)
        assert expected.tokens is not None
        assert expected.pairs is not None
        row = Row(method=method, tokens=expected.tokens, pairs=expected.pairs)
        try:
            result = estimate(model, expected, how, gpu, cluster, efficiencies=efficiencies)
        except NotModelled as error:
            rows.append(msgspec.structs.replace(row, reason=str(error)))
            continue
        rows.append(_filled(row, result))
    return Forecast(
        micro_batch=b,
        mean=lengths.mean,
        longest=lengths.longest,
        expected_longest=lengths.expected_max(b),
        rows=tuple(rows),
        notes=_notes(model, lengths),
    )


def _notes(model: ModelSpec, lengths: Lengths) -> tuple[str, ...]:
    """Return the parts of this forecast that are not exact."""
    mixers = [block.attention for block in model.blocks if isinstance(block.attention, Attention)]
    windows = {mixer.sliding_window for mixer in mixers if mixer.sliding_window is not None}
    if not any(window < lengths.longest for window in windows):
        return ()
    cut = ", ".join(str(window) for window in sorted(windows))
    return (f"attention within a window ({cut}) is that of the mean pairs: its FLOPs and time are an upper bound",)


def of_method(method: Method, lengths: Lengths, layout: Layout, training: Training) -> tuple[Layout, Training]:
    """Return the layout of the expected micro-batch of a method, and the training with its attention kernel.

    With K the longest of b sequences of length s. Padded: b E[K] tokens and b E[K^2] query-key pairs; padding-free: E[sum s]
    and E[sum s^2].
    """
    (tokens, pairs), (real, real_pairs) = _expected(lengths, layout.micro_batch)
    within = None
    if method is Method.PADDING_FREE:
        tokens, pairs = real, real_pairs
    elif method is Method.PADDED_FLASH:
        pairs = real_pairs
        # Without padding there is no mask, and no copies are made.
        within = real if layout.micro_batch > 1 and len(lengths.values) > 1 else None
    attention = "eager" if method is Method.PADDED_EAGER else "flash"
    kernels = msgspec.structs.replace(training.kernels, attention=attention)
    return (
        msgspec.structs.replace(
            layout, seq_len=lengths.longest, tokens=tokens, pairs=pairs, kernel_tokens=within, fullest=None
        ),
        msgspec.structs.replace(training, kernels=kernels),
    )


@functools.lru_cache(1)
def _expected(lengths: Lengths, b: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Tokens and pairs with and without padding; all methods need them, and there may be a million lengths."""
    return lengths.padded(b), lengths.unpadded(b)


def _filled(row: Row, result: Estimate) -> Row:
    memory, stage = result.workings.memory, result.workings.worst.rank.stage
    layers = stage.stop - stage.start
    kept = memory.of_layers(memory.counts(stage, stage.start, stage.stop)).kept
    return msgspec.structs.replace(
        row,
        layer=kept / layers if layers else 0.0,
        activations=max(moment.parts["activations"] for moment in result.memory.moments),
        peak=result.memory.total,
        flops=result.flops.model,
        hardware_flops=result.flops.hardware,
        step=None if result.time is None else result.time.step,
    )
