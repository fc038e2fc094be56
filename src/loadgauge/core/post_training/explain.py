"""Why a part of a run is as large as it is: the formula, the run's numbers in it, the source."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.units import gib
from loadgauge.core.layers.embedding_head import vocabulary
from loadgauge.core.post_training.memory import BUCKET, PostMemory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import SOFTWARE, StepTime
from loadgauge.core.post_training.tail import expected_longest


class Line(msgspec.Struct, frozen=True):
    """A quantity: its formula in words, the numbers in their places, and what it comes to [bytes, or a count]."""

    what: str
    formula: str
    numbers: str
    value: str


class Explained(msgspec.Struct, frozen=True):
    """Lines about one part, and where they are from."""

    part: str
    lines: tuple[Line, ...]
    source: str


def explain(run: Run, memory: PostMemory, part: str, time: StepTime | None = None) -> Explained:
    """Return the reasons of `kv`, `logprobs`, `sync` or `tail`. Raises `ConfigError` where the run has no such part.

    time: of a step, None where it is not known
    """
    if part == "logprobs":
        return _logprobs(run, memory)
    if run.engine is None or memory.engine is None:
        raise ConfigError(f"--task {run.task.name} generates nothing, so it has no {part}", key="explain")
    if part == "tail":
        return _tail(run, time)
    return _kv(run, memory) if part == "kv" else _sync(run, memory, time)


def _tail(run: Run, time: StepTime | None) -> Explained:
    if time is None or time.generation is None:
        raise ConfigError("the tail is a time, which needs a --gpu", key="explain")
    answers, phase, number = run.sequences.answers, time.generation, run.sequences.number
    lines = (
        Line("an answer", "mean, and the longest allowed", "", f"{answers.mean:,.0f} and {answers.longest:,} tokens"),
        Line(
            "the longest of a step",
            "v_m - sum of F_i^n (v_i+1 - v_i)",
            f"n = {number:,}",
            f"{expected_longest(answers, number):,.0f} tokens",
        ),
        Line(
            "steps until the last answer",
            "sum of 1 - prod (1 - S(t - u))^s(u)",
            f"{run.replicas:,} replicas",
            f"{phase.steps:,.0f}",
        ),
        Line(
            "decoding",
            "sum over steps of a step's seconds",
            f"{phase.running:,.0f} sequences of a replica at first",
            f"{phase.seconds:,.1f} s",
        ),
        Line(
            "the tail",
            "while less than a tenth of them run",
            f"{phase.tail / phase.seconds:.0%} of the decoding",
            f"{phase.tail:,.1f} s",
        ),
        Line("slots that are empty", "1 - sequences that run, in the mean / at first", "", f"{phase.idle:.0%}"),
        Line(
            "prompts",
            "each read once, its answers share its cache",
            f"{run.sequences.prompts:,} x {run.sequences.prompt:,} tokens",
            f"{time.prompts:,.1f} s",
        ),
        Line("software", "seconds of a run over those of its kernels and engine", "", f"x {SOFTWARE}"),
    )
    return Explained("tail", lines, "docs/rollout.md; docs/decode.md")


def _kv(run: Run, memory: PostMemory) -> Explained:
    engine, card = run.engine, memory.engine
    assert engine is not None
    assert card is not None
    share = engine.utilization if engine.utilization is not None else engine.static_fraction
    of = "" if run.gpu is None else gib(run.gpu.capacity, 1)
    pool = (
        "no card is given: as large as all sequences that run need"
        if run.gpu is None
        else (
            f"{share} x {of} - {gib(card.weights, 2)} - {gib(card.profile, 2)}"
            if engine.utilization is not None
            else f"{share} x ({of} - {gib(card.outside.value, 2)}) - {gib(card.weights, 2)}"
        )
    )
    formula = (
        "share of the card - weights - peak of the profile"
        if engine.utilization is not None
        else "share of what is free - weights"
    )
    mean = run.sequences.prompt + run.sequences.answers.mean / 2
    lines = (
        Line(
            "a token",
            "keys and values, latents or windows of all layers of a rank",
            f"in {engine.kv}",
            f"{card.token:,.0f} B",
        ),
        Line("the cache", formula, pool, gib(card.pool, 2) if not card.unstarted else "less than a sequence needs"),
        Line(
            "what all sequences need",
            "sequences x tokens of the longest",
            f"{card.asked:,} x {run.sequences.longest:,}",
            gib(card.demand, 2),
        ),
        Line(
            "sequences at once",
            "cache / (a token x tokens in the mean)",
            f"{gib(card.pool, 2)} / ({card.token:,.0f} B x {mean:,.0f})",
            f"{card.running:,} of {card.asked:,}",
        ),
    )
    return Explained("kv", lines, "vllm, v1/worker/gpu_worker.py; sglang, model_executor/model_runner.py")


def _logprobs(run: Run, memory: PostMemory) -> Explained:
    member = run.trained
    kernels, layout = member.training.kernels, member.layout
    from loadgauge.core.estimate.estimate import view_of

    view = view_of(layout, member.training)
    columns, rows = vocabulary(member.model, view), layout.micro_batch
    lines = [
        Line(
            "logits",
            "sequences x tokens x vocabulary x 2 B",
            f"{rows:,} x {layout.seq_len:,} x {columns:,.0f} x 2",
            gib(2 * rows * layout.seq_len * columns, 2),
        ),
        Line("how", "--loss", kernels.loss + (f":{kernels.loss_chunks}" if kernels.loss == "chunked" else ""), ""),
    ]
    for phase in memory.phases:
        for one in phase.residents:
            if one.part in ("loss", "log-probs", "logits"):
                lines.append(Line(f"{one.part} of the {one.role}", f"in {phase.name}", "", gib(one.nbytes, 2)))
    return Explained("logprobs", tuple(lines), "trl, trainer/utils.py; verl, workers/actor/dp_actor.py")


def _sync(run: Run, memory: PostMemory, time: StepTime | None) -> Explained:
    if run.engine is not None and run.engine.inside:
        raise ConfigError("the trained model itself generates: no weights are handed over", key="explain")
    phase = next(phase for phase in memory.phases if phase.name == "weight sync")
    lines = tuple(
        Line(
            f"{one.role}: {one.part}",
            "the smaller of the weights and a bucket" if one.part == "bucket" else "",
            f"at most {gib(BUCKET, 1)}" if one.part == "bucket" else "",
            gib(one.nbytes, 2),
        )
        for one in phase.residents
    )
    moved = (
        ()
        if time is None or time.sync is None
        else (
            Line("route", "", f"{time.sync.rate / 1e9:.1f} GB/s", time.sync.route),
            Line("bytes that a card gets", "2 B x parameters / GPUs of a replica", "", gib(time.sync.received, 2)),
            *(Line(f"seconds: {what}", "", "", f"{took:.1f} s") for what, took in time.sync.parts.items()),
        )
    )
    return Explained(
        "sync",
        (*lines, Line("together", "", "", gib(phase.total, 2)), *moved),
        "verl, rollout.yaml; vllm, sleep mode; docs/rollout.md",
    )
