"""`loadgauge saved`: what a PyTorch expression keeps for backward."""

from typing import Any

import click
import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base import Error, needs_torch, refuse
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.param_types import Read
from loadgauge.core.text.show import BLOCKS
from loadgauge.core.text.table import Lines


def _sizes(text: str) -> tuple[int, ...]:
    """Read sizes, joined by commas or the letter x. Raises `ConfigError`."""
    parts = [part.strip() for part in text.replace("x", ",").split(",") if part.strip()]
    refuse(
        not all(part.isascii() and part.isdecimal() and len(part) < 12 for part in parts),
        f"must be sizes such as 4,1024, got {text[:40]!r}",
    )
    return tuple(int(part) for part in parts)


SHAPE = Read(_sizes, "sizes")


@click.command("saved")
@click.argument("expression", required=False)
@click.option("--shape", type=SHAPE, default="1024,1024", show_default=True, help="Of x, y and z [elements].")
@click.option("--x", "x", type=SHAPE, metavar="SIZES", help="Another shape for x.")
@click.option("--y", "y", type=SHAPE, metavar="SIZES", help="Another shape for y.")
@click.option("--z", "z", type=SHAPE, metavar="SIZES", help="Another shape for z.")
@click.option(
    "--dtype", type=click.Choice(("float64", "float32", "bfloat16", "float16")), default="float32", show_default=True
)
@click.option("--constant", metavar="NAMES", default="", help="Which of x,y,z need no gradient.")
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="Whose kernels decide what is kept (CUDA's dropout: a mask of a byte an element); cuda needs no GPU.",
)
@click.option(
    "--cases", is_flag=True, help="The seven cases of article 5, instead of an expression: kept / peak in tensors."
)
@answering("the bytes that are kept", document="bytes and elements")
def command(expression: str | None, cases: bool, **flags: Any) -> Answer:
    """What does a PyTorch EXPRESSION of x, y, z, torch, nn and F keep for backward, and how much does it hold at once?

    EXPRESSION may also be file.py:name, a function, module or autograd.Function of one to three tensors. Every saved field of
    every node of the graph by its name, what made it, and which storage it lies in: memory is counted once, however many
    fields share it. It is run as Python.

    \b
    loadgauge saved 'torch.nn.Sigmoid()(x)'
    loadgauge saved '(x + 1) * (y + 1)' --constant y
    loadgauge saved 'nn.Linear(1024, 4096)(F.silu(x) * y)' --dtype bfloat16
    loadgauge saved 'F.dropout(x)' --device cuda --dtype float16
    loadgauge saved my_functions.py:Product
    loadgauge saved --cases
    """
    needs_torch("saved")
    if cases == (expression is not None):
        raise click.UsageError("give an EXPRESSION, or --cases.", click.get_current_context())
    if expression is None:
        return _cases()
    import torch

    from loadgauge.pytorch.trace.programs.expression import Inputs, held_by_expression, saved_by_expression

    inputs = Inputs(
        shape=flags["shape"],
        dtype=flags["dtype"],
        constant=tuple(name.strip() for name in flags["constant"].split(",") if name.strip()),
        shapes={name: flags[name] for name in ("x", "y", "z") if flags[name] is not None},
        device=flags["device"],
    )
    saved = saved_by_expression(expression, inputs)
    try:
        held, why = held_by_expression(expression, inputs), ""
    except Error as error:
        held, why = None, str(error)
    torch_version = str(torch.__version__)
    document = {
        "expression": expression,
        "torch": torch_version,
        "total": saved.total,
        "beyond_result": saved.beyond_result,
        "persistent": None if held is None else held.extra[0],
        "peak": None if held is None else held.extra[1],
        "of_one": inputs.of_one,
        "of_parameters": saved.of_parameters,
        "tensors": saved.tensors,
        "storages": saved.storages,
        "made_again": [{"node": node, "field": field} for node, field in saved.made_again],
    }
    return Answer(
        form="saved.expression",
        writer="loadgauge.pytorch.text.saved:write",
        shown=(saved, torch_version, held, inputs.of_one, why),
        document=msgspec.to_builtins(document),
        pivots=(Pivot("Bytes kept", "tensors.nbytes", "node", "field"),),
    )


def _cases() -> Answer:
    """Return the seven cases of article 5."""
    from loadgauge.evidence.articles.autograd import CASES, held

    rows = [
        {"case": case, "what": description, "kept": held(case, peak=False), "peak": held(case, peak=True)}
        for case, description in CASES.items()
    ]
    head = "Tensors beside the inputs and the result: kept until backward / most at once in forward"
    lines = [f"  {row['case']}  {row['kept']:g}/{row['peak']:g}  {row['what']}" for row in rows]
    return Answer(
        form="saved.cases",
        writer=BLOCKS,
        shown=[Lines([head, "", *lines])],
        document={"cases": rows},
        table=rows,
        pivots=(Pivot("Kept, in tensors", "cases.kept", "case", "of"),),
    )
