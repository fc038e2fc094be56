"""The parts of a setup that reports share: its layout in words, and the assumptions."""

from collections.abc import Mapping

from loadgauge.core.definitions.layout.axes import SIZES
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.text.language import said
from loadgauge.core.text.table import GLUE, Paper, section

UNBROKEN = 60
"""Characters of a flag and its value that stay on one line."""


def layout_words(layout: Layout, more: tuple[str, ...] = ()) -> str:
    """Return a layout in words: data parallelism, every other degree above 1, the ZeRO stage. more: further fields

    >>> layout_words(Layout(dp=4, tp=2, seq_len=1, sequence_parallel=True))
    'dp 4, tp 2, ZeRO 0, sequence parallel'
    """
    degrees = {name: getattr(layout, name) for name in (*SIZES, *more)}
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "dp"]
    return ", ".join([*words, f"ZeRO {layout.zero}", *(["sequence parallel"] if layout.sequence_parallel else [])])


def length_words(model: ModelSpec, length: int) -> str:
    """Return what a sequence has, in words. length: its tokens

    >>> from loadgauge import model
    >>> length_words(model("gpt2"), 1024)
    '1,024 tokens'
    """
    beside = model.own.besides(length)
    return f"{length:,} {model.own.unit}{f' and {beside}' if beside else ''}"


def unit(model: ModelSpec) -> str:
    """Return what a run counts: tokens, what a model has in their place, or its samples.

    >>> from loadgauge import model
    >>> unit(model("gpt2"))
    'tokens'
    """
    return str(model.own.unit if model.own.has_length else model.own.sample)


def rate(value: float) -> str:
    """Return how many a second, with the digits of a slow one.

    >>> rate(20235.4), rate(0.0803)
    ('20,235', '0.08')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def batch_words(model: ModelSpec, rows: int, length: int, up_to: bool = False) -> str:
    """Return what a batch has, in words: its sequences and their tokens, or its samples where the model has none.

    >>> from loadgauge import model
    >>> batch_words(model("gpt2"), 8, 1024), batch_words(model("gpt2"), 1, 1024, up_to=True)
    ('8 sequences of 1,024 tokens', '1 sequence of up to 1,024 tokens')
    """
    several = "s" if rows > 1 else ""
    if not model.own.has_length:
        return f"{rows:,} {model.own.sample.removesuffix('s')}{several}"
    return f"{rows:,} sequence{several} of {'up to ' if up_to else ''}{length_words(model, length)}"


def print_assumed(target: Paper, assumed: Mapping[str, str]) -> None:
    """Print what the user did not give: flags with the values assumed for them."""
    flags = (f"{flag} {said(value)}" for flag, value in assumed.items())
    # Short ones are not broken.
    line = ", ".join(text.replace(" ", GLUE) if len(text) < UNBROKEN else text for text in flags)
    section(target, "Assumptions (flags not given)", [line] if assumed else [], "")
