"""`loadgauge calibrate`: this device's efficiencies, as a data file."""

from pathlib import Path

import click
import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.definitions.hardware.hardware import gpu as find_gpu
from loadgauge.core.text.show import BLOCKS
from loadgauge.core.text.table import Lines
from loadgauge.pytorch.commands.torch_options import calibrated


@click.command("calibrate")
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True)
@click.option(
    "--gpu",
    metavar="GPU",
    help="Which GPU it is (`loadgauge gpus` lists them); efficiencies are shares of its datasheet.",
)
@click.option("--output", metavar="FILE.toml", help="Where to write the file; default: the terminal.")
@answering(document="every timing in it")
def command(device: str, gpu: str | None, output: str | None) -> Answer | None:
    """Time matrix products (cool and sustained), attention, copies, norms, AdamW and, under torchrun, collectives; and fit
    the efficiencies that `estimate` reads. Takes a minute or two; one that was stopped goes on where it was.

    \b
    loadgauge calibrate --gpu h100-sxm5-80gb --output h100-sxm5-80gb.toml
    torchrun --nproc-per-node 8 -m loadgauge calibrate --gpu h100-sxm5-80gb --output h100-sxm5-80gb.toml
    """
    calibration = calibrated("calibrate", device, None if gpu is None else find_gpu(gpu), output)
    if calibration is None:
        return None
    from loadgauge.pytorch.measure.calibrate import text

    if output is not None:
        Path(output).write_text(text(calibration), encoding="utf-8")
    lines = text(calibration).splitlines() if output is None else []
    document = msgspec.to_builtins(calibration)
    return Answer(
        form="calibrate.device", writer=BLOCKS, shown=[Lines(lines)], document=document, table=document["timings"]
    )
