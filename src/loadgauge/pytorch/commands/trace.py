"""`loadgauge trace`: what PyTorch itself would allocate, save, compute and send, with no GPU."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.optional_deps import needs_torch
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.options import complete_model
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.command_line.options.spoken import Spoken
from loadgauge.core.definitions.job.flag_types import SPLIT, STEP
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.commands.torch_options import job_options, script_output


class OfScript(Spoken):
    """A command whose target may be a script; what comes after `--` is the script's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments up to `--`."""
        own = args[: args.index("--")] if "--" in args else args
        ctx.meta["arguments"] = tuple(args[len(own) + 1 :])
        if (script := next((word for word in own if word.endswith(".py")), None)) is None:
            return super().parse_args(ctx, own)
        try:
            return click.Command.parse_args(self, ctx, own)  # words of other tools are the script's
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"no such option {error.option_name!r}; arguments of {script} go after --", ctx
            ) from None


@click.command("trace", cls=OfScript)
@click.argument("target", shell_complete=complete_model)
@click.option(
    "--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True, help="Device to simulate."
)
@job_options((*STEP, "gpus", *SPLIT))
@click.option(
    "--keep", metavar="OP,OP", help="Operations whose results --recompute full keeps; default: products and attention."
)
@click.option("--rank", type=Whole(0, 10**6), default=0, help="Rank to simulate.")
@click.option("--viewer", metavar="FILE", default="", help="Write a snapshot for pytorch.org/memory_viz.")
@answering("the peak, and what is alive at it", document="bytes, FLOP and plain counts")
def command(
    target: str, device: str, layers: int | None, viewer: str, rank: int, keep: str | None, **fields: Any
) -> Answer:
    """Run two training steps of TARGET on tensors without memory, and report what they would take.

    TARGET is a MODEL (a name in the catalogue, a Hugging Face config.json, or its folder), a script.py, which is run until
    it has trained two steps, or script.py:function: a function that trains, or that returns a function which trains one
    step. Nothing is allocated and no GPU is needed; operations take the decisions that CUDA would take. With --gpus this
    process simulates one rank: a script is parallel by itself, a MODEL is split by the flags, with PyTorch's own tools.

    \b
    loadgauge trace llama-3.1-8b --seq-len 8192 --recompute full
    loadgauge trace path/to/config.json --optimizer adamw-fused --viewer memory.pickle
    loadgauge trace train.py -- --batch-size 8
    loadgauge trace train.py:main --json
    loadgauge trace llama-3.1-405b --gpus 1024 --tp 8 --sequence-parallel --zero 3 --recompute full
    loadgauge trace llama-3.1-70b --gpus 64 --tp 8 --pp 4 --zero 3 --global-batch 32 --rank 63
    """
    needs_torch("trace")
    from loadgauge.core.base.files import is_script
    from loadgauge.pytorch.text.trace import answer_of
    from loadgauge.pytorch.trace import subprocess
    from loadgauge.pytorch.trace.programs.call_job import trace_on_cpu, traced
    from loadgauge.pytorch.trace.result import Trace

    if viewer and not Path(viewer).resolve().parent.is_dir():
        raise click.UsageError(f"--viewer: no such folder: {Path(viewer).parent}")
    arguments = click.get_current_context().meta["arguments"]
    if (whole := subprocess.with_whole_script(target)) == target and arguments:
        raise click.UsageError(f"{' '.join(arguments)}: only a script.py that is run whole has arguments")
    target = whole
    job, kept = Job(model=target, **fields), subprocess.kept_operations(keep)
    gpus = job.gpus or 1
    of_model = (*SPLIT, *STEP) if is_script(target) else SPLIT
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in of_model if getattr(job, name) not in (None, False))
    if flags and is_script(target):
        raise click.UsageError(
            f"{flags}: of a MODEL; a script trains as it is written, and its own arguments go after --"
        )
    if flags and gpus == 1:
        raise click.UsageError(f"{flags}: need --gpus above 1")
    if rank >= gpus:
        raise click.UsageError(f"--rank {rank} is not one of {gpus}")
    request = subprocess.Request(job, device, layers, rank, kept, arguments)
    output = script_output(target)
    if viewer:
        work = "loadgauge.pytorch.why.viewer:trace_for_viewer"
        trace = subprocess.named_in_child(work, Trace, request, output, path=viewer)
    else:
        trace = traced(request, output)
    if gpus > (job.tp or 1) * (job.pp or 1) and job.zero is None and not is_script(target):
        click.echo(
            "loadgauge: --zero is 0 (DDP) by default, as in `loadgauge estimate`; it was 3 here until 0.1", err=True
        )
    if not trace.events:
        typed = click.get_current_context().get_parameter_source("device") is ParameterSource.COMMANDLINE
        trace = trace_on_cpu(request, trace, not typed)
    return answer_of(trace, viewer)
