"""`loadgauge equation`: the closed form of a quantity, with its legend and source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.equations.equation import QUANTITIES
from loadgauge.core.answers.equations.run_forms import FORMS
from loadgauge.core.base import ConfigError, days_words, gib, suggest
from loadgauge.core.command_line.options.answering import answering, refuse
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.definitions.layout.axes import AXES, RANK_AXES, STAGE_AXES
from loadgauge.core.text.show import BLOCKS
from loadgauge.core.text.table import Block, Column, Lines, Notes, Table

if TYPE_CHECKING:
    from loadgauge.core.answers.equations.equation import Equation


@click.command("equation")
@click.argument("quantity", metavar="[QUANTITY]", default="")
@click.argument("model", metavar="[MODEL]", default="")
@click.option(
    "--layer", help="gpt, llama, mixtral (or moe), deepseek (or mla): sizes open; or a MODEL of the catalogue. [gpt]"
)
@click.option("--tp", is_flag=False, flag_value="t", help="Tensor parallelism: alone for the letter t, or a number.")
@click.option("--sequence-parallel", is_flag=True, help="Shard norms and dropouts over tp as well; implies --tp.")
@click.option("--cp", is_flag=False, flag_value="c", help="Context parallelism: alone for the letter c, or a number.")
@click.option("--ep", is_flag=False, flag_value="e", help="Expert parallelism: alone for the letter e, or a number.")
@click.option(
    "--etp", is_flag=False, flag_value="t_e", help="Tensor parallelism of one expert: the letter t_e, or a number."
)
@click.option("--recompute", metavar="WHAT", help="none, selective, full, or names of operations.")
@click.option(
    "--attention", type=click.Choice(("eager", "flash")), help="eager keeps the scores, flash does not. [eager]"
)
@click.option(
    "--experts", type=click.Choice(("grouped", "fused")), help="What experts keep: as transformers or as Megatron-LM."
)
@click.option("--padding-free", is_flag=True, help="Letters for the tokens T and query-key pairs P of a ragged batch.")
@click.option("--precision", metavar="NAME", help="bf16, fp16 or fp32; for states also a recipe of `estimate`.")
@click.option("--optimizer", metavar="NAME", help="For states. [adamw]")
@click.option("--zero", type=Whole(0, 3), help="For states: one ZeRO stage; all of them without it.")
@click.option(
    "--numbers",
    metavar="LETTER=VALUE,...",
    help="Numbers for letters: P=175B,N=300B,n=1024,X=140TFLOP/s; of --solve the quantity's too: duration=24d.",
)
@click.option("--solve", metavar="LETTER", help="The number of this letter; the quantity's own is given in --numbers.")
@click.option("--latex", is_flag=True, help="Print LaTeX and nothing else.")
@answering(document="each form as text and LaTeX, with its letters")
def command(quantity: str, numbers: str | None, solve: str | None, latex: bool, **flags: Any) -> Answer:
    """Print the closed form of QUANTITY, read off the list of operations; of a MODEL with its sizes (--layer MODEL).

    \b
    params, model-params                 parameters of a layer, of the model
    active-params, model-active-params   of them, those a token passes through
    forward-flops, backward-flops        FLOPs of a layer
    training-flops, recompute-flops      FLOPs of a layer
    model-flops                          FLOPs of the model
    activations                          bytes a layer keeps for backward
    wire                                 bytes a rank sends for a layer
    states, partitioned                  model states, bytes a parameter; ZeRO-R's inputs of layers
    bandwidth, traffic, collectives      what tensor, pipeline, data, context and expert parallelism need, and send
    bubble, checkpoints, amdahl          of a pipeline, the best number of, and the limit to speed
    duration, gpus, utilisation, gamma   of a run; with a share of the layers run again
    parameter-servers                    of data parallelism without an all-reduce, waiting or not
    kv-cache, mask                       bytes of keys and values, and with the mask of the scores
    padded-flash, longest                of batches whose sequences differ

    \b
    loadgauge equation activations --layer gpt --tp --sequence-parallel --recompute selective
    loadgauge equation activations --layer moe --tp --sequence-parallel --ep --attention flash
    loadgauge equation params --layer deepseek-v3
    loadgauge equation amdahl --numbers serial=1h,total=20h,n=64
    loadgauge equation duration --numbers P=175B,N=300B,X=140TFLOP/s,duration=24d --solve n
    """
    if latex:
        params = click.get_current_context().params
        refuse(
            {name: params[name] or None for name in ("json", "csv", "markdown")},
            "excludes --latex; --json has the LaTeX too",
        )
    if not quantity:
        return _catalogue()
    from loadgauge.core.answers.equations.equation import equations
    from loadgauge.core.answers.equations.numbers import read_numbers, unread, with_numbers
    from loadgauge.core.answers.equations.run_forms import run_forms

    quantity, together = quantity.replace("_", "-"), f"{quantity}-{flags.get('model')}"
    if together in (*QUANTITIES, *FORMS, *MEANT):  # two words: kv cache
        quantity, flags["model"] = together, ""
    quantity = MEANT.get(quantity, quantity)
    params = arguments(quantity, flags)
    forms = run_forms(quantity) if quantity in FORMS else equations(quantity, **params)
    values = read_numbers(numbers) if numbers else {}
    own = values.pop(quantity, None)
    if nameless := unread(forms, values):
        letters = dict.fromkeys(letter for form in forms for letter in form.legend)
        raise ConfigError(
            f"{quantity} has no letter {nameless[0]!r} (its letters: {', '.join(letters)})", key="--numbers"
        )
    forms = tuple(with_numbers(form, values) for form in forms)
    if solve:
        return _solved(forms, solve, own)
    if latex:
        shown: list[Block] = [Lines([form.latex for form in forms])]
    else:
        parts = _states(forms) if quantity == "states" else [block for form in forms for block in _show(form)]
        shown = [*parts, *_ending(forms[0])]
    return _answer(shown, [form.to_dict() for form in forms])


def _answer(shown: list[Block], forms: list[dict[str, Any]]) -> Answer:
    """Return the answer that closed forms are; in CSV without their parts and letters."""
    flat = [
        {name: value for name, value in form.items() if not isinstance(value, dict | list | tuple)} for form in forms
    ]
    return Answer(form="equation.forms", writer=BLOCKS, shown=shown, document={"equations": forms}, table=flat)


SUBJECTS = {
    "A layer and a model (article 1)": (
        "params",
        "active-params",
        "forward-flops",
        "backward-flops",
        "training-flops",
        "recompute-flops",
        "activations",
        "model-params",
        "model-active-params",
        "model-flops",
        "gamma",
        "checkpoints",
        "kv-cache",
    ),
    "Model states (article 2)": ("states", "partitioned"),
    "A cluster (article 3)": (
        "duration",
        "gpus",
        "utilisation",
        "amdahl",
        "bubble",
        "wire",
        "traffic",
        "collectives",
        "parameter-servers",
        "bandwidth",
    ),
    "Batches without padding (article 4)": ("padded-flash", "mask", "longest"),
}
"""Every quantity by its subject, and the article that has it."""
_AXES = {name: AXES[name].symbol for name in STAGE_AXES}
_OF_A_LAYER = frozenset({"layer", *STAGE_AXES, "sequence_parallel", "attention", "padding_free", "recompute"})
_APPLY = {
    "params": frozenset({"layer", *STAGE_AXES}) - {"cp"},
    "active-params": frozenset({"layer"}),
    "forward-flops": _OF_A_LAYER - {"recompute"},
    "backward-flops": _OF_A_LAYER - {"recompute"},
    "training-flops": _OF_A_LAYER,
    "recompute-flops": _OF_A_LAYER,
    "activations": _OF_A_LAYER | {"precision", "experts"},
    "wire": _OF_A_LAYER | {"precision"},
    "model-params": frozenset({"layer"}),
    "model-active-params": frozenset({"layer"}),
    "model-flops": frozenset({"layer", "attention", "padding_free", "recompute"}),
    "states": frozenset({"precision", "optimizer", "zero"}),
}
"""The flags that change each quantity."""


MEANT = {
    **dict.fromkeys(("zero", "zero-1", "zero-2", "zero-3", "fsdp", "ddp", "optimizer", "gradients"), "states"),
    **dict.fromkeys(("zero-r", "partition-activations", "partitioned-activations"), "partitioned"),
    **dict.fromkeys((*RANK_AXES, "tensor-parallel", "pipeline-parallel", "context-parallel", "expert-parallel",
                     "data-parallel", "tensor-parallelism", "pipeline-parallelism", "data-parallelism"), "traffic"),
    **dict.fromkeys(("activation", "activation-memory"), "activations"),
    **dict.fromkeys(("mfu", "hfu", "utilization"), "utilisation"), "flops": "training-flops",
    **dict.fromkeys(("gather", "scatter", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "busbw", "algbw"),
                    "collectives"),
    **dict.fromkeys(("parameter-server", "asynchronous", "async", "hogwild"), "parameter-servers"),
    **dict.fromkeys(("days", "time", "run"), "duration"), **dict.fromkeys(("speedup", "scaling"), "amdahl"),
}  # fmt: skip
"""Words that people type, and the quantity that has them."""


def arguments(quantity: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return what the user gave, as arguments of `equations`; a flag that does not apply is an error."""
    quantities = (*QUANTITIES, *FORMS)
    if quantity not in quantities:
        wrong = f"unknown quantity {quantity!r}" if quantity else "name a quantity"
        raise ConfigError(f"{wrong} (known: {', '.join(quantities)}){suggest(quantity, quantities)}")
    fields = {name: value for name, value in flags.items() if value not in (None, "") and value is not False}
    if model := fields.pop("model", ""):
        if "layer" not in _APPLY.get(quantity, ()):
            asked = (
                f"{model} --task generate --explain memory" if quantity == "kv-cache" else f"{model} --explain TOPIC"
            )
            raise ConfigError(f"{quantity} has letters alone; `loadgauge {asked}` has the numbers of a model")
        fields["layer"] = model
    for name in fields:
        if name not in _APPLY.get(quantity, frozenset()):
            raise ConfigError(f"--{name.replace('_', '-')} does not change {quantity}")
    if fields.get("sequence_parallel") and "tp" not in fields:
        fields["tp"] = "t"
    for axis in _AXES.keys() & fields.keys():
        fields[axis] = _ranks(axis, fields[axis])
    return fields


def _ranks(axis: str, text: str) -> int | str:
    letter = _AXES[axis]
    if text == letter:
        return text
    if not (text.isascii() and text.isdecimal() and int(text[:9]) >= 1 and len(text) < 8):
        raise ConfigError(
            f"must be a number of ranks, or nothing for the letter {letter}, got {text!r}", key=f"--{axis}"
        )
    return int(text)


def _catalogue() -> Answer:
    """Return the quantities by subject, with the article that has them."""
    from loadgauge.core.answers.equations.run_forms import run_forms

    subjects = {
        title: [[name, QUANTITIES[name][0] if name in QUANTITIES else run_forms(name)[0].what] for name in names]
        for title, names in SUBJECTS.items()
    }
    rows = [
        dict(zip(("subject", "quantity", "what"), (title, *row), strict=True))
        for title in subjects
        for row in subjects[title]
    ]
    tables = [
        Table([Column("quantity", whole=True), Column("what", wrap=True)], rows, title)
        for title, rows in subjects.items()
    ]
    names = ", ".join(name for title in SUBJECTS.values() for name in title)
    hint = "`loadgauge equation NAME` prints one; with --numbers letter=value,... and --solve LETTER"
    return Answer(
        form="equation.catalogue",
        writer=BLOCKS,
        shown=[Notes([f"{hint}: {names}."], mark=""), *tables],
        document={"quantities": rows},
        table=rows,
    )


def _worded(value: float, unit: str) -> str:
    """Return a value with its unit, and in the words of people where it is large.

    >>> _worded(2073600.0, "s"), _worded(12.5e9, "byte/s"), _worded(3, "GPUs")
    ('2,073,600 s, 24.0 days', '12,500,000,000 byte/s, 12.5 GB/s', '3 GPUs')
    """
    plain = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.6g}"
    larger = {
        "s": (3600, days_words(value / 86400)),
        "byte/s": (1e9, f"{value / 1e9:,.4g} GB/s"),
        "byte": (1e6, gib(value)),
    }
    least, words = larger.get(unit, (float("inf"), ""))
    return f"{plain} {unit}, {words}" if value >= least else f"{plain} {unit}"


def _solved(forms: tuple[Equation, ...], letter: str, value: float | None) -> Answer:
    """Return the number of a letter with which each form has the value."""
    from loadgauge.core.answers.equations.numbers import solved

    if value is None:
        raise ConfigError(f"give the value as {forms[0].quantity}=... in --numbers", key="--solve")
    complete = [form for form in forms if letter in form.legend and form.legend.keys() <= {*form.numbers, letter}]
    having = complete or [form for form in forms if letter in form.legend][:1] or forms[:1]
    answers = [(form, solved(form, letter, value)) for form in having if form.unit == having[0].unit]
    shown = [
        Lines(
            [
                f"{form.what}: {form.text} = {_worded(value, form.unit)}",
                f"  {letter} = {number:,.6g}    {form.legend[letter]}",
                "",
            ]
        )
        for form, number in answers
    ]
    return _answer([*shown], [form.to_dict() | {"solved": {letter: number}} for form, number in answers])


def _show(form: Equation) -> list[Block]:
    from loadgauge.core.estimate.symbols import text

    lines = [f"  {line}" for line in form.lines]
    value = form.substitute if form.numbers else ""
    legend = [
        f"{name}: {meaning}" + (f" = {form.numbers[name]:,.12g}" if name in form.numbers else "")
        for name, meaning in form.legend.items()
    ]
    return [
        Lines([f"{form.what} [{form.unit}]"], "bold"),
        # Formulas are never broken inside a part: they are there to be copied.
        Lines(
            ["", *(lines if form.is_long else [f"  {form.text}", *([f"  = {form.factored}"] if form.factored else [])])]
        ),
        Lines(
            [f"  = {_worded(value, form.unit) if isinstance(value, int | float) else text(value)}"]
            if form.numbers
            else []
        ),
        Lines([] if form.is_long or len(form.parts) < 2 else ["", "  part by part:", "", *lines]),
        Lines([""]),
        Notes(legend, mark="  "),
        Lines([""] if legend else []),
    ]


def _states(forms: tuple[Equation, ...]) -> list[Block]:
    rows = [[form.what.rpartition(" ")[2], form.text] for form in forms]
    return [
        Lines([f"{forms[0].what.rpartition(',')[0]} [{forms[0].unit}]"], "bold"),
        Lines([""]),
        Table([Column("ZeRO stage", "right"), Column("bytes a parameter")], rows),
        Lines(["", "  d: data-parallel ranks", ""]),
    ]


def _ending(form: Equation) -> list[Block]:
    """Where it holds, and who says so."""
    holds = [f"Holds for: {'; '.join(form.validity)}."] if form.validity else []
    return [Notes([*holds, f"Source: {form.source}."], mark="")]
