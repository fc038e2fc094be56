"""`loadgauge plan`: the best layout of all there are, the Pareto front, or the nearest miss."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from loadgauge.cli.options import options
from loadgauge.cli.param_types import Positive, Whole
from loadgauge.cli.sweep import handed_over, sweep_options
from loadgauge.errors import ConfigError, Error, LayoutError, NotStated
from loadgauge.families.catalogue import find_model
from loadgauge.resolve.resolve import JOB_FILES, resolve_job
from loadgauge.resolve.setup import Setup
from loadgauge.spec.axes import AXES, DEGREES, MODEL_PARALLEL
from loadgauge.spec.frameworks import default_framework
from loadgauge.spec.job import WHOLE_RUN, Job, fields
from loadgauge.spec.layout import SCHEDULES, RecomputePolicy
from loadgauge.spec.model import Moe
from loadgauge.units import GIB

OPEN = (
    *DEGREES,
    "zero",
    "micro_batch",
    "replicas",
    "schedule",
    "recompute",
    "sequence_parallel",
)
"""Axes that the search walks; a flag locks one, or narrows it down to several values."""
MOST_GPUS = 1024
"""On which the fewest are looked for, where the user says nothing."""
ASKED = (
    *(
        "objective",
        "margin",
        "price",
        "top",
        "what_next",
        "why_not",
        "find",
        "exposed",
        "prices",
        "export",
        "onto",
        "out",
    ),
)
"""Flags that say what is asked of a plan, and nothing of the run."""
FINDS = {"seq-len": ("seq_len", "lengths"), "micro-batch": ("micro_batch", "lengths"), "nic": ("nic_bandwidth",)}
"""What is asked for, and the flags that would say it already."""


class Values(click.ParamType):  # type: ignore[type-arg]
    """One value, or several with commas between them."""

    name = "values"

    def __init__(self, kind: str, known: tuple[str, ...] = ()) -> None:
        self.kind, self.known = kind, known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """The values that the text names, each once."""
        words = [word.strip() for word in str(value).split(",")]
        if self.kind == "number":
            number = Whole(0, 10**7)
            return tuple(dict.fromkeys(number.convert(word, param, ctx) for word in words))
        unknown = [word for word in words if self.known and word not in self.known]
        if unknown:
            self.fail(f"unknown {unknown[0]!r} (known: {', '.join(self.known)})", param, ctx)
        return tuple(dict.fromkeys(words))


NUMBERS = {
    "tp": "Tensor-parallel ranks", "pp": "Pipeline stages", "vpp": "Chunks of a pipeline stage",
    "cp": "Context-parallel ranks", "ep": "Expert-parallel ranks", "etp": "Tensor-parallel ranks of one expert",
    "zero": "ZeRO stage", "micro_batch": "Sequences in one forward on one rank",
    "replicas": "Groups that hold the same ZeRO shards (HSDP)",
}  # fmt: skip


def _options(command: Any) -> Any:
    """The flags of a run; those of the open axes take several values."""
    own = [
        click.option(
            f"--{name.replace('_', '-')}", name, type=Values("number"), metavar="N,N,...", help=f"{text}: only these."
        )
        for name, text in NUMBERS.items()
    ]
    own += [
        click.option("--gpus", type=Values("number"), metavar="N,N,...", help="GPUs in all; several sizes are compared."),
        click.option(
            "--schedule", type=Values("word", (*SCHEDULES, "all")), metavar="NAME,...",
            help="Pipeline schedules (those of the framework; all: every one).",
        ),
        click.option("--recompute", metavar="WHAT;WHAT", help="Recomputation: none, selective, full:every=2, ...; with ; between."),
        click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="Only with it, or only without."),
    ]  # fmt: skip
    replaced = {*NUMBERS, *WHOLE_RUN, "model", "gpus", "schedule", "recompute", "sequence_parallel", "measured"}
    for option in reversed(own):
        command = option(command)
    return options(command, [name for name in fields() if name not in replaced])


@click.command("plan")
@click.argument("model", required=False)
@_options
@click.option(
    "--objective",
    type=click.Choice(("time", "throughput", "money", "gpus", "headroom", "network")),
    default="time",
    show_default=True,
    help="What the best layout has the least (or most) of; network: of those within 5 % of the fastest.",
)
@click.option("--margin", type=Positive(), metavar="GiB", help="Memory to be left free on each GPU.")
@click.option("--price", type=Positive(), metavar="MONEY", help="Of one GPU-hour, in your currency.")
@click.option("--top", type=Whole(1, 100), default=5, show_default=True, help="How many layouts to print.")
@click.option(
    "--find",
    type=click.Choice(("seq-len", "micro-batch", "gpus", "gpu", "nic", "model")),
    help="The other way round: the longest sequence, the largest micro-batch, the fewest GPUs, the cheapest kind of GPU"
    " (--prices), the smallest adapter (--exposed), the largest model (MODEL: any, or how names begin).",
)
@click.option("--exposed", type=Positive(), metavar="SHARE", help="Of the step, what communication may take (0.1).")
@click.option("--prices", metavar="GPU=2.5,GPU=1.8", help="Kinds of GPU with the price of their hours, for --find gpu.")
@click.option("--why-not", metavar="tp=16,pp=4", help="Why no layout with these values is the best.")
@click.option("--what-next", is_flag=True, help="What each change of the job would bring, every one planned anew.")
@click.option(
    "--export", metavar="DIALECT", help="Write the best layout as another tool's job file (see `convert`), or flags."
)
@click.option("--onto", metavar="FILE", help="The user's own file, which --export patches; its comments stay.")
@click.option("--out", metavar="FILE", help="Where --export writes, if not to the terminal.")
@sweep_options
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document: layouts (best first), pareto, evaluated, valid."
)
def command(model: str | None, as_json: bool, **flags: Any) -> int:
    """The fastest (cheapest, smallest, ...) of all layouts of MODEL that can exist, proven by looking at every one.

    A flag of a layout (--tp 8) locks it, or narrows it down (--tp 4,8); all others are open. Exit code: 0 there is a
    layout, 1 none fits (the nearest miss is printed), 2 cannot tell.

    \b
    loadgauge plan llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --seq-len 8192 --global-batch 512
    loadgauge plan llama-3.1-8b --gpu rtx4090 --gpus 1 --qlora --global-batch 16 --margin 2
    loadgauge plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --find seq-len
    loadgauge plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --global-batch 512 --export megatron
    loadgauge plan axolotl.yaml --gpu h100-sxm5-80gb --gpus 8 --export axolotl --out faster.yaml
    loadgauge plan mixtral-8x7b --gpu h100-sxm5-80gb --gpus 32,64,128 --objective money --global-batch 512
    loadgauge plan --sweep sweep.toml --output results
    """
    handed = handed_over(model, flags, as_json=as_json)
    if handed is not None:
        return handed
    assert model is not None
    given, found, asked = cases(model, flags)
    if asked["find"] is not None:
        from loadgauge.report import inverse

        return inverse.found(given, found, asked, as_json=as_json)
    from loadgauge.report.plan import answer

    return answer(given, found, asked, as_json=as_json)


def cases(model: str, flags: dict[str, Any]) -> tuple[Setup, list[Any], dict[str, Any]]:
    """The clusters to plan for, the job that they share, and what was asked of the plan."""
    from loadgauge.plan.axis_values import space_for
    from loadgauge.plan.plan import Case

    asked = {name: flags.pop(name, None) for name in ASKED}
    asked |= {"model": model, "as_given": None, "why_not_locks": {}}
    locks = _locks(flags)
    _agree(asked, flags, locks)
    if asked["why_not"] is not None:
        asked["why_not_locks"] = _pairs(asked["why_not"])
    if flags["gpu"] is None:
        raise ConfigError("is needed: a plan is for a kind of GPU (`loadgauge gpus` lists them)", key="gpu")
    sizes = flags.pop("gpus") or ((MOST_GPUS,) if asked["find"] == "gpus" else None)
    if sizes and min(sizes) < 1:
        raise ConfigError("at least 1 is needed", key="gpus")
    if asked["find"] is not None and asked["find"] != "gpu" and len(sizes or ()) > 1:
        raise ConfigError(f"--find {asked['find']} asks about one number of GPUs", key="gpus")
    name = model
    if asked["find"] == "model":
        from loadgauge.report.inverse import named

        name = named(model)[0]
    if _is_file(name):
        flags, sizes, asked["as_given"] = _of_file(name, flags, sizes)
    elif flags["framework"] is None:
        flags["framework"] = asked["assumed_framework"] = _framework(
            name, flags, locks, max(sizes or (1,)), asked["export"]
        )
    given: Setup | None = None
    found = []
    travel = flags.pop("cp_comm")
    for gpus in sizes or (1,):
        given = resolve_job(Job(model=name, gpus=gpus, **flags))
        _possible(locks, given, travel)
        if travel is not None:
            given = msgspec.structs.replace(given, layout=msgspec.structs.replace(given.layout, cp_comm=travel))
        if given.cluster is None:
            raise NotStated(given.untimed)
        layers = None if asked["as_given"] is not None and flags["stage_layers"] is None else given.layout.stage_layers
        space = space_for(
            given.model, given.training, gpus, given.layout.global_batch, given.layout.seq_len, locks=locks,
            stage_layers=layers, lengths=given.lengths, base=given.layout,
        )  # fmt: skip
        found.append(
            Case(space=space, training=given.training, cluster=given.cluster, price=asked["price"], locks=locks)
        )  # fmt: skip
    assert given is not None
    hidden = {f"--{name.replace('_', '-')}" for name in OPEN}
    assumed = {flag: value for flag, value in given.assumed.items() if flag not in hidden}
    if asked["find"] == "seq-len":
        assumed.pop("--seq-len", None)
    if "assumed_framework" in asked:
        assumed["--framework"] = asked.pop("assumed_framework")
    asked["margin"] = (asked["margin"] or 0.0) * GIB
    return given, found, {**asked, "assumed": assumed}


def _possible(locks: dict[str, tuple[Any, ...]], given: Setup, travel: str | None) -> None:
    """Refuses locks that no layout of the model can have, or that contradict each other."""

    def only(name: str, value: int) -> bool:
        return locks.get(name) == (value,)

    model, layers = given.model, given.layout.stage_layers
    if not any(isinstance(block.mlp, Moe) for block in model.blocks):
        for name in ("ep", "etp"):
            if min(locks.get(name, (1,))) > 1:
                raise ConfigError(f"{model.name} has no experts to share out", key=name)
    if travel is not None and only("cp", 1):
        raise ConfigError("goes with --cp above 1", key="cp_comm")
    if min(locks.get("vpp", (1,))) > 1:
        if only("pp", 1):
            raise ConfigError("chunks of a stage need --pp above 1", key="vpp")
        if "schedule" in locks and not {"interleaved", "all"} & set(locks["schedule"]):
            raise ConfigError("goes with the interleaved schedule", key="vpp")
    if layers is not None:
        if sum(layers) != model.num_hidden_layers:
            raise ConfigError(
                f"are {sum(layers)} layers, and {model.name} has {model.num_hidden_layers}", key="stage_layers"
            )
        if len(layers) not in locks.get("pp", (len(layers),)):
            raise ConfigError(f"are {len(layers)} stages, and --pp is {locks['pp'][0]}", key="stage_layers")


def _is_file(model: str) -> bool:
    """Whether a MODEL is another tool's job file."""
    if os.path.splitext(model)[1].lower().lstrip(".") not in JOB_FILES:
        return False
    from loadgauge.resolve.job_file import is_job_file  # only then are dialects read

    return is_job_file(model)


def _of_file(
    file: str, flags: dict[str, Any], sizes: tuple[int, ...] | None
) -> tuple[dict[str, Any], tuple[int, ...], Any]:
    """Of another tool's job file: its run as flags, its layout left open, and the estimate of its own layout."""
    try:
        own = resolve_job(Job(model=file, gpus=None if sizes is None else sizes[0], **flags))
    except (LayoutError, ConfigError):
        if sizes is None:
            raise
        own = resolve_job(Job(model=file, **flags))  # of as many GPUs as its own layout has
    open_axes: dict[str, Any] = dict.fromkeys((*DEGREES, "micro_batch", "replicas"), 1)
    flags = {**flags, **open_axes, "zero": 0, "recompute": "none", "global_batch": own.layout.global_batch}
    flags["framework"] = own.training.framework.name
    try:
        estimate = own.estimate()
    except Error:
        estimate = None
    return flags, sizes or (own.layout.gpus,), estimate


def _agree(asked: dict[str, Any], flags: dict[str, Any], locks: dict[str, Any]) -> None:
    """Refuses what is asked where it does not go together."""
    find = asked["find"]
    if find is None and asked["prices"] is not None:
        find = asked["find"] = "gpu"
    if find == "gpu" and asked["prices"] is None:
        raise ConfigError("goes with --prices GPU=2.5,GPU=1.8", key="find")
    for name, needs in (("exposed", "nic"), ("prices", "gpu")):
        if asked[name] is not None and find != needs:
            raise ConfigError(f"goes with --find {needs}", key=name)
    for name in FINDS.get(find or "", ()):
        if flags.get(name) is not None or name in locks:
            raise ConfigError(f"is what --find {find} asks for", key=name)
    if find is not None:
        for name in ("what_next", "why_not", "export"):
            if asked[name]:
                raise ConfigError(f"does not go with --find {find}", key=name)
    if asked["export"] is None:
        for name in ("onto", "out"):
            if asked[name] is not None:
                raise ConfigError("goes with --export", key=name)
    elif asked["export"] != "flags":
        from loadgauge.formats.dialects import dialect

        asked["export"] = dialect(asked["export"]).name
    elif asked["onto"] is not None:
        raise ConfigError("flags are no file to patch", key="onto")


def _pairs(text: str) -> dict[str, tuple[Any, ...]]:
    """Values of axes, as in `tp=16,pp=4`."""
    flags: dict[str, Any] = dict.fromkeys(OPEN)
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in OPEN or not value:
            raise ConfigError(f"must be axis=value pairs such as tp=16,pp=4, got {word!r}", key="why_not")
        kind = {"schedule": Values("word", (*SCHEDULES, "all"))}.get(name, Values("number"))
        if name == "recompute":
            flags[name] = value
        elif name == "sequence_parallel":
            if value not in ("true", "false", "yes", "no"):
                raise ConfigError(f"must be yes or no, got {value!r}", key="why_not")
            flags[name] = value in ("true", "yes")
        else:
            try:
                flags[name] = kind.convert(value, None, None)
            except click.BadParameter as error:
                raise ConfigError(error.message, key="why_not") from None
    return _locks(flags)


def _locks(flags: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The axes that the user has locked, taken out of the flags."""
    locks: dict[str, tuple[Any, ...]] = {}
    for name in OPEN:
        values = flags.pop(name)
        if values is None:
            continue
        if name == "recompute":
            values = tuple(RecomputePolicy.parse(text.strip()) for text in values.split(";"))
        elif name == "sequence_parallel":
            values = (values,)
        elif name != "schedule" and min(values) < (0 if name == "zero" else 1):
            raise ConfigError(f"must be at least {0 if name == 'zero' else 1}, got {min(values)}", key=name)
        elif name == "zero" and max(values) > 3:
            raise ConfigError(f"must be 0, 1, 2 or 3, got {max(values)}", key=name)
        locks[name] = values
    return locks


def _framework(
    model: str, flags: dict[str, Any], locks: dict[str, tuple[Any, ...]], gpus: int, export: str | None
) -> str:
    """The framework of the file to write; else the default of a run whose open axes may have any degree."""
    if export not in (None, "flags"):
        from loadgauge.formats.dialects import dialect

        return dialect(export).framework
    experts = any(isinstance(block.mlp, Moe) for block in find_model(model).blocks)
    free = [axis for axis in MODEL_PARALLEL if experts or not AXES[axis].experts]
    degrees = {axis: locks.get(axis, (1, gpus) if axis in free else (1,)) for axis in MODEL_PARALLEL}
    return default_framework(degrees, adapters=flags["lora_rank"] is not None or bool(flags["qlora"]))
