"""The flags that describe a training run, shared by every command that asks about one, and their text form."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

import click
import msgspec

from loadgauge.cli.param_types import Positive, Whole
from loadgauge.spec.layout import AXES, SCHEDULES, CpComm
from loadgauge.spec.lora import BASE_FORMATS
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.training import FRAMEWORKS, OPTIMIZERS, PRECISIONS

DEGREE = Whole(1, 10**6)
COUNT = Whole(1, 10**9)


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The flags of `estimate`, as given; None where the user said nothing. `flags` writes them, `parsed` reads them."""

    model: str
    gpu: str | None = None
    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    schedule: str | None = None
    recompute: str | None = None
    stage_layers: str | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    lengths: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    attention: str | None = None
    loss: str | None = None
    framework: str | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    qlora: bool | None = None
    base: str | None = None
    offload: str | None = None
    gpus_per_node: int | None = None
    link_bandwidth: str | None = None
    nic_bandwidth: str | None = None
    cp_comm: str | None = None
    mtp: bool | None = None
    expert_imbalance: float | None = None
    replicas: int | None = None
    order: str | None = None
    overlap: str | None = None
    tokens: str | None = None
    price: float | None = None
    days: float | None = None
    mtbf_hours: float | None = None
    checkpoint_seconds: float | None = None
    restart_seconds: float | None = None
    measured: str | None = None

    def flags(self) -> str:
        """The flags as a shell reads them, without the model.

        >>> Request(model="gpt2", tp=2, sequence_parallel=True, lengths="my data.txt").flags()
        "--tp 2 --sequence-parallel --lengths 'my data.txt'"
        """
        return shlex.join(self.words())

    def words(self) -> list[str]:
        """The flags as words of a command line, without the model.

        >>> Request(model="gpt2", qlora=False, price=2.5).words()
        ['--no-qlora', '--price', '2.5']
        """
        words = []
        for name in self.__struct_fields__[1:]:
            value, flag = getattr(self, name), name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                words += [f"--{flag}", str(value)]
        return words

    def command(self, verb: str = "estimate") -> str:
        """The whole command line, for a shell.

        >>> Request(model="llama-3.1-8b", tp=2).command()
        'loadgauge estimate llama-3.1-8b --tp 2'
        """
        if self.model.startswith("-"):
            return shlex.join(["loadgauge", verb, *self.words(), "--", self.model])
        return shlex.join(["loadgauge", verb, self.model, *self.words()])


Command = TypeVar("Command", bound=Callable[..., Any])

RUN = (
    click.option(
        "--gpu",
        metavar="GPU",
        help="The kind of GPU (`loadgauge gpus` lists them); without it nothing is said of fitting.",
    ),
    click.option("--gpus", type=Whole(1, 10**7), help="GPUs in all; dp is what tp, pp and cp leave of them."),
    click.option("--tp", type=DEGREE, help="Tensor-parallel ranks."),
    click.option("--pp", type=DEGREE, help="Pipeline stages."),
    click.option("--vpp", type=DEGREE, help="Chunks of each pipeline stage (interleaved schedule)."),
    click.option("--cp", type=DEGREE, help="Context-parallel ranks."),
    click.option("--ep", type=DEGREE, help="Expert-parallel ranks."),
    click.option("--etp", type=DEGREE, help="Tensor-parallel ranks of one expert."),
    click.option("--zero", type=Whole(0, 3), help="ZeRO stage; 3 is fully sharded (FSDP)."),
    click.option(
        "--sequence-parallel/--no-sequence-parallel", default=None, help="Share norms and dropouts over tp as well."
    ),
    click.option("--schedule", type=click.Choice(SCHEDULES), help="Pipeline schedule."),
    click.option(
        "--recompute",
        metavar="WHAT",
        help="none, selective, full, full:every=N, full:layers=N, full:group=N, or names of operations.",
    ),
    click.option("--stage-layers", metavar="7,8,8,7", help="Layers of each pipeline stage, where they are not equal."),
    click.option("--micro-batch", type=Whole(1, 10**6), help="Sequences in one forward on one rank."),
    click.option("--global-batch", type=COUNT, help="Sequences in one optimizer step, over all GPUs."),
    click.option("--seq-len", type=COUNT, help="Tokens of a sequence."),
    click.option(
        "--lengths",
        metavar="FILE",
        help="Sequence lengths instead of --seq-len: a file, FILE:COLUMN of a data set, or uniform:N; with and without"
        " padding.",
    ),
    click.option(
        "--precision", metavar="NAME", help=f"bf16, fp16 (the framework's recipe), or {', '.join(PRECISIONS)}."
    ),
    click.option("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)}."),
    click.option("--attention", type=click.Choice(("flash", "eager")), help="How attention is computed."),
    click.option(
        "--loss", metavar="HOW", help="auto (the framework's), float32, inplace, fused, chunked or chunked:N."
    ),
    click.option(
        "--framework",
        metavar="NAME",
        help=f"{', '.join(FRAMEWORKS)}: its defaults apply (megatron where tp, pp, cp or ep split the model, else huggingface).",
    ),
    click.option("--lora-rank", type=Whole(1, 10**5), help="Train adapters of this rank on a frozen model."),
    click.option("--lora-targets", metavar="NAMES", help="all, attention, or linear layers such as q_proj,v_proj."),
    click.option(
        "--qlora/--no-qlora", "--quantised", "--quantized", "qlora", default=None, help="Adapters on a 4-bit base."
    ),
    click.option(
        "--base", type=click.Choice(list(BASE_FORMATS)), help="How the 4-bit base of --qlora is stored (nf4)."
    ),
    click.option("--offload", type=click.Choice(("none", "optimizer", "all")), help="What moves to host memory."),
    click.option("--gpus-per-node", type=DEGREE, help="GPUs of one node; the fast link joins them (or a whole rack)."),
    click.option("--link-bandwidth", metavar="GB/s", help="Of the link inside a node, per GPU and direction."),
    click.option("--nic-bandwidth", metavar="GB/s", help="Of the network adapter, per GPU and direction."),
    click.option("--cp-comm", type=click.Choice(get_args(CpComm)), help="How cp ranks exchange keys and values."),
    click.option("--replicas", type=DEGREE, help="Data-parallel groups that hold the same ZeRO shards (HSDP)."),
    click.option("--order", metavar=",".join(AXES), help="Order in which axes number the ranks, the fastest first."),
    click.option("--mtp/--no-mtp", default=None, help="Train the model's multi-token prediction modules too."),
    click.option(
        "--expert-imbalance",
        type=Positive(),
        metavar="X",
        help="Tokens of the busiest expert rank over the mean (1: balanced); the worst case is shown beside it.",
    ),
    click.option(
        "--overlap",
        metavar="WHAT",
        help=f"Communication hidden under compute: none, all, or some of {', '.join(Overlap.__struct_fields__)}"
        " (else the framework's habit).",
    ),
    click.option(
        "--measured",
        metavar="step=12.3s",
        help="What a run of yours took (step, mfu, tflops or tokens_per_second_per_gpu), and after commas the flags in"
        " which it differed; predicted times are rescaled by it.",
    ),
)
"""What `Request` knows, as options."""

WHOLE_RUN = (
    click.option("--tokens", metavar="15T", help="Tokens of the whole run: days, GPU-hours, energy."),
    click.option("--price", type=Positive(), metavar="MONEY", help="Of one GPU-hour, in your currency."),
    click.option("--days", type=Positive(), help="How many GPUs would do it in so many days."),
    click.option(
        "--mtbf-hours", type=Positive(), help="Hours between failures of one GPU, with its share of the node."
    ),
    click.option("--checkpoint-seconds", type=Positive(), help="To write a checkpoint (60)."),
    click.option("--restart-seconds", type=Positive(), help="To be running again after a failure (600)."),
)


def run_options(command: Command) -> Command:
    """Gives a command the flags of a run."""
    for option in reversed(RUN):
        command = option(command)
    return command


def whole_run_options(command: Command) -> Command:
    """Gives a command the flags of a whole training run."""
    for option in reversed(WHOLE_RUN):
        command = option(command)
    return command


@cache
def _reader() -> click.Command:
    """A command that takes the flags of a run and does nothing."""
    return run_options(whole_run_options(click.Command("run", params=[click.Argument(["model"])])))


def parsed(words: Sequence[str]) -> Request:
    """The request of a command line's words, the model among them; the other direction of `Request.words`.

    >>> parsed(["gpt2", "--tp", "2"]) == Request(model="gpt2", tp=2)
    True
    """
    return Request(**_reader().make_context("run", list(words)).params)
