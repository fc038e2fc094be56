"""`loadgauge capture`: what a training step of any model or module takes, as formulas of its sizes."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base import Verdict, exit_code, is_script, needs_torch, refuse
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.options import complete_model
from loadgauge.core.command_line.options.param_types import Read
from loadgauge.core.command_line.options.spoken import Spoken
from loadgauge.core.definitions.job.flag_types import STEP, CaptureFlags
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.capture.inputs.target import SPOKEN, check_script, rows_of
from loadgauge.pytorch.commands.torch_options import job_options

if TYPE_CHECKING:
    from loadgauge.pytorch.capture.captured import Captured

LENGTH = 4096
MOST = 64
"""Pictures of a sequence."""


def _named_size(text: str) -> tuple[str, int]:
    """Read a size by its name. Raises `ConfigError`."""
    name, _, number = text.partition("=")
    refuse(
        not (name.isidentifier() and number.isascii() and number.isdecimal() and len(number) < 10 and int(number)),
        f"must be such as t=512, got {text[:40]!r}",
    )
    return name, int(number)


def _pictures(text: str) -> tuple[tuple[int, int], ...]:
    """Read width and height of pictures [pixels], with commas between. Raises `ConfigError`."""
    matches = [re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", size.strip()) for size in text.split(",")]
    refuse(not all(matches) or len(matches) > MOST, f"must be such as 1024x768,512x512, got {text[:40]!r}")
    return tuple((int(match[1]), int(match[2])) for match in matches if match)


@click.command("capture", cls=Spoken)
@click.argument("target", shell_complete=complete_model)
@click.option(
    "--inputs", metavar="FILE:FUNCTION", default="", help="Of script.py:function: makes what the module is called with."
)
@click.option(
    "--step",
    metavar="FILE:FUNCTION",
    default="",
    help="Of script.py:function: trains once what it made, with its own optimizers.",
)
@job_options(STEP)
@click.option(
    "--size",
    "more",
    type=Read(_named_size, "name=number"),
    multiple=True,
    help="Another size by its name, such as t=512.",
)
@click.option("--picture", type=Read(_pictures), metavar="WxH,...", help="Pictures of each sequence [pixels].")
@click.option("--freeze", metavar="WORD", multiple=True, help="Parameters whose names contain WORD are not trained.")
@click.option(
    "--head",
    metavar="WORD",
    default="",
    help="classification, tokens, answers, embedding, picture, detection or sound.",
)
@click.option(
    "--rows",
    multiple=True,
    callback=lambda ctx, param, texts: tuple(rows_of(",".join(texts)).items()),
    metavar="LINE=ROWS",
    help="Rows that data chooses at a line, such as boxes.py:41=2000; most: as many as there are.",
)
@click.option("--audio", type=click.FloatRange(0.1, 36000), metavar="SECONDS", help="Length of each sound.")
@click.option("--gpu", metavar="GPU", help="A GPU to fit on (`loadgauge gpus` lists them).")
@click.option("--allow-tight", is_flag=True, help="TIGHT is a yes.")
@click.option(
    "--cache/--no-cache", default=True, help="Keep captures of a MODEL on disk, and use those that are there."
)
@answering("the peak or the verdict, and what is alive at it", document="bytes, FLOP and plain counts")
def command(
    target: str,
    inputs: str,
    step: str,
    layers: int | None,
    more: tuple[tuple[str, int], ...],
    gpu: str | None,
    allow_tight: bool,
    picture: tuple[tuple[int, int], ...] | None,
    freeze: tuple[str, ...],
    head: str,
    rows: tuple[tuple[str, tuple[int, ...] | str], ...],
    audio: float | None,
    cache: bool,
    **fields: Any,
) -> Answer:
    """Return what a training step of TARGET takes, as formulas of its sizes, from its own code.

    TARGET is a MODEL (a name in the catalogue, a Hugging Face config.json of any model_type that transformers has, or
    its folder), or script.py:function, which makes a module; --inputs script.py:function then makes what the module is
    called with, and its parameters name the sizes (b: --micro-batch, s: --seq-len, others: --size). The code runs on tensors
    without memory whose sizes stay symbols; a second run with numbers checks every operation. Code that a config.json names
    (auto_map) is never run.

    \b
    loadgauge capture llama-3.1-8b --seq-len 8192 --gpu h100
    loadgauge capture qwen2.5-vl/config.json --picture 1024x768,512x512
    loadgauge capture path/to/config.json --optimizer sgd --recompute full --layers 4
    loadgauge capture train.py:model --inputs train.py:batch --micro-batch 8 --size width=256
    """
    from loadgauge.core.definitions.hardware.hardware import gpu as find_gpu
    from loadgauge.pytorch.capture.answer import answer
    from loadgauge.pytorch.capture.inputs.libraries import is_library, usual_sizes
    from loadgauge.pytorch.capture.inputs.target import config_keys, longest_of, sized, usual_of_heads
    from loadgauge.pytorch.capture.symbols.sizes import SAMPLES, SECONDS

    begun = time.perf_counter()
    card = None if gpu is None else find_gpu(gpu)
    job = Job(model=target, **fields)
    inputs = _inputs_of_script(job, inputs, step, layers)
    if (named := "--picture: is" if picture else "--head, --audio: are" if head or audio else "") and is_script(target):
        raise click.UsageError(f"{named} for a MODEL; a module of one's own has the --inputs that are given")
    asked = {"b": job.micro_batch, "s": job.seq_len}
    defaults = {name: value for name, value in (("b", 1), ("s", LENGTH)) if asked[name] is None}
    sizes = {name: value for name, value in asked.items() if value is not None} | dict(more)
    if audio is not None:
        sizes["n"] = round(audio * SAMPLES)
    sound = sizes.get("n", SAMPLES * SECONDS)
    defaults |= {
        name: value for name, value in (("n", sound), ("u", max(1, SPOKEN * sound // SAMPLES))) if name not in sizes
    }
    if not is_script(target):
        defaults |= {name: value for name, value in usual_of_heads().items() if name not in sizes}
    keys = {} if is_script(target) else config_keys(target)
    if "s" in defaults:
        defaults["s"] = min(LENGTH, longest_of(keys) or LENGTH)
    if is_library(keys):
        usual = {"b": 1} | usual_sizes(keys, target)
        defaults = {name: value for name, value in usual.items() if name not in sizes}
    captured, cached = _captured(job, inputs, step, layers, sizes, defaults, cache, picture or (), freeze, head, rows)
    whole = sized(captured.names, sizes, captured.sizes if is_script(job.model) else defaults)
    seconds = time.perf_counter() - begun
    result = answer(captured, whole, seconds, cached=cached, gpu=card, assumed=_assumed(job, captured, step, freeze))
    verdict: Verdict = "unknown" if result.needed is None else result.needed.verdict
    return Answer(
        form="capture.step",
        writer="loadgauge.pytorch.text.capture:write",
        shown=result,
        document=result.to_dict,
        pivots=(
            Pivot("Alive at the peak", "at_peak", "at_peak", "of"),
            Pivot("Highest, by phase", "phases", "phases", "of"),
        ),
        verdict=verdict,
        code=exit_code(verdict, allow_tight=allow_tight),
        assumed=dict(line.partition(": ")[::2] for line in result.assumed),
        not_counted=result.not_counted,
    )


def _captured(
    job: Job,
    inputs: str,
    step: str,
    layers: int | None,
    own_sizes: dict[str, int],
    defaults: dict[str, int],
    keep: bool,
    pictures: tuple[tuple[int, int], ...] = (),
    freeze: tuple[str, ...] = (),
    head: str = "",
    rows: tuple[tuple[str, tuple[int, ...] | str], ...] = (),
) -> tuple[Captured, bool]:
    """A capture that holds at the sizes, and whether it was kept on disk."""
    from loadgauge.pytorch.capture.captured import Captured
    from loadgauge.pytorch.capture.inputs.libraries import is_library
    from loadgauge.pytorch.capture.inputs.target import config_keys, processor_keys, sized
    from loadgauge.pytorch.capture.lists import store

    file, stored = None, []
    if not is_script(job.model):
        keys = config_keys(job.model)
        if keep:
            # A script may import anything: what it does is not known without running it.
            decide = {name: value for name in CaptureFlags.__annotations__ if (value := getattr(job, name)) is not None}
            if job.global_batch is not None:
                decide["micro_batch"] = own_sizes.get("b", 1)
            if is_library(keys):
                decide["library"] = store.version_of(str(keys.get("library", "diffusers")))
            decide |= {name: value for name, value in (("freeze", freeze), ("head", head), ("rows", rows)) if value}
            if pictures:
                decide |= {"pictures": pictures, "processor": processor_keys(job.model)}
            file = store.place(keys, decide | {"layers": layers})
            stored = store.load(file)
    for capture in stored:
        if capture.holds(**sized(capture.names, own_sizes, defaults)):
            return msgspec.structs.replace(capture, target=job.model), True
    needs_torch("capture")
    from loadgauge.pytorch.trace.subprocess import Request, named_in_child

    request = Request(job, layers=layers)
    # What the script prints is not part of the answer.
    shown = sys.stderr if is_script(job.model) else None
    captured = named_in_child(
        "loadgauge.pytorch.capture.requests.list_request:capture_request",
        Captured,
        request,
        shown,
        inputs=inputs,
        step=step,
        own_sizes=own_sizes,
        defaults=defaults,
        pictures=pictures,
        freeze=freeze,
        head=head,
        rows=rows,
    )
    if file is not None:
        store.save(file, [*stored, captured])
    return captured, False


def _inputs_of_script(job: Job, inputs: str, step: str, layers: int | None) -> str:
    """Return what makes the inputs of a script. Raises click.UsageError for flags that a target cannot have."""
    if not is_script(job.model):
        if inputs or step:
            raise click.UsageError("--inputs, --step: are for script.py:function; those of a MODEL are known")
        return ""
    inputs = check_script(job.model, inputs)
    fixed: dict[str, Any] = {"layers": layers, "attention": job.attention, "recompute": job.recompute}
    if step:
        fixed |= {"optimizer": job.optimizer, "precision": job.precision, "global-batch": job.global_batch}
    if named := [f"--{name}" for name, value in fixed.items() if value is not None]:
        raise click.UsageError(f"{', '.join(named)}: a module of one's own has what its function gives it")
    if job.precision == "bf16-pure":
        raise click.UsageError("--precision bf16-pure: a module of one's own has the dtype that its function gives it")
    return inputs


def _assumed(job: Job, captured: Captured, step: str = "", freeze: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return what was not said, and is taken for granted."""
    from loadgauge.pytorch.capture.inputs.libraries import is_library, usual_precision
    from loadgauge.pytorch.capture.inputs.target import config_keys
    from loadgauge.pytorch.capture.symbols.sizes import SAMPLES, SECONDS

    contrasted = all(name.startswith("model.") for name in captured.parameters) and set(captured.names) == {
        "b",
        "s",
        "t",
    }
    own = is_script(job.model)
    if step:
        return ("step: what --step runs, with the losses and optimizers it makes",)
    keys = {} if own else config_keys(job.model)
    usual = (usual_precision(keys, job.model) if is_library(keys) else None) or "bf16-pure"
    default = {"precision": "as the function makes it" if own else usual, "optimizer": "adamw"}
    if not own:
        default |= {"attention": "flash (PyTorch's own choice of kernel)", "recompute": "none"}
    lines = [f"--{name}: {value}" for name, value in default.items() if getattr(job, name) is None]
    lines.append("gradients: freed after each step")
    if freeze:
        lines.append(f"not trained: parameters whose names contain {' or '.join(freeze)}")
    if own:
        sizes = [name for name in captured.names if name not in ("b", "s")]
        return (*lines, *(f"{name}: {captured.sizes[name]}, unless --size {name}=NUMBER" for name in sizes))
    if "t" in captured.names:
        side = "of the decoder" if not contrasted else "of the second text"
        lines.append(f"t, the tokens {side}: as many as s, unless --size t=NUMBER")
    if "n" in captured.names:
        lines.append(f"n, the samples of a sound: {SAMPLES:,} a second, {SECONDS} s unless --audio SECONDS")
        lines.append("drawn at random: no frames are masked (SpecAugment), no layers skipped (layerdrop)")
    if "u" in captured.names:
        lines.append(f"u, the tokens of a transcript: {SPOKEN} a second, unless --size u=NUMBER")
    return tuple(lines)
