"""Why a part of a run after pre-training is as large as it is: the formula, the run's numbers in it, the source."""

from typing import Any

from loadgauge.core.answers.why.reason import Line, Reason
from loadgauge.core.base import ConfigError, gib, refuse
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.layers.embedding_head import vocabulary
from loadgauge.core.post_training.memory import BUCKET, PhaseMemory, PostMemory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import SOFTWARE, StepTime
from loadgauge.core.post_training.tail import expected_longest

TOPICS = ("kv", "logprobs", "sync", "tail")
"""Topics of a run with a rollout or log-probabilities."""


class OfTask(Reason, frozen=True, kw_only=True):
    """A reason of a run of a task; its formulas are in words."""

    form: str = "estimate.posttrain.explain"

    def to_dict(self) -> dict[str, Any]:
        lines = [
            {
                "what": row.what,
                "formula": row.letters,
                "numbers": row.numbers,
                "value": _amount(row.value, row.unit),
                "amount": row.value,
                "unit": row.unit,
            }
            for row in self.lines
        ]
        return {"part": self.topic, "lines": lines, "source": "; ".join(self.sources)}


def explain(run: Run, memory: PostMemory, topic: str, time: StepTime | None = None) -> Reason:
    """Return the reason of one of `TOPICS`. Raises `ConfigError` where the run has no such part.

    time: of a step, None where it is not known
    """
    if topic == "logprobs":
        return _logprobs(run, memory)
    if run.engine is None or memory.engine is None:
        raise ConfigError(f"--task {run.task.name} generates nothing, so it has no {topic}", key="explain")
    if topic == "tail":
        return _tail(run, time)
    return _kv(run, memory) if topic == "kv" else _sync(run, memory, time)


def _reason(
    topic: str, value_of: str, lines: list[Line], *sources: str, rule: str, notes: tuple[str, ...] = ()
) -> Reason:
    last = lines[-1]
    return OfTask(
        topic=topic,
        what=value_of,
        value=last.value,
        unit=last.unit,
        basis="derived",
        rule=rule,
        lines=tuple(lines),
        notes=notes,
        sources=sources,
    )


def _line(name: str, value: float, unit: str = "byte", formula: str = "", numbers: str = "") -> Line:
    return Line(what=name, letters=formula, numbers=numbers, value=float(value), unit=unit)


def _amount(value: float, unit: str) -> str:
    """A value with its unit.

    >>> _amount(2**31, "byte"), _amount(0.25, "share"), _amount(12, "sequences")
    ('2.00 GiB', '25%', '12 sequences')
    """
    if unit == "byte":
        return gib(value, 2) if value >= 2**20 else f"{value:,.0f} B"
    return f"{value:.0%}" if unit == "share" else f"{value:,.1f} s" if unit == "s" else f"{value:,.6g} {unit}"


def _tail(run: Run, time: StepTime | None) -> Reason:
    if time is None or time.generation is None:
        raise ConfigError("the tail is a time, which needs a --gpu", key="explain")
    answers, phase, sequences = run.sequences.answers, time.generation, run.sequences
    number = f"n = {sequences.number:,}"
    lines = [
        _line("an answer, in the mean", answers.mean, "tokens"),
        _line("the longest allowed", answers.longest, "tokens"),
        _line(
            "the longest of a step",
            expected_longest(answers, sequences.number),
            "tokens",
            "v_m - sum of F_i^n (v_i+1 - v_i)",
            number,
        ),
        _line(
            "steps until the last answer",
            phase.steps,
            "steps",
            "sum of 1 - prod (1 - S(t - u))^s(u)",
            f"{run.replicas:,} replicas",
        ),
        _line("slots that are empty", phase.idle, "share", "1 - sequences that run, in the mean / at first"),
        _line(
            "prompts",
            time.prompts,
            "s",
            "each read once, its answers share its cache",
            f"{sequences.prompts:,} x {sequences.prompt:,} tokens",
        ),
        _line("software", SOFTWARE, "factor", "seconds of a run over those of its kernels and engine"),
        _line(
            "decoding",
            phase.seconds,
            "s",
            "sum over steps of a step's seconds",
            f"{phase.running:,.0f} sequences of a replica at first",
        ),
        _line("its share that is the tail", phase.tail / phase.seconds, "share"),
        _line("the tail", phase.tail, "s", "while less than a tenth of them run"),
    ]
    rule = "answers of a batch end one after the other, and slots stay empty until the last one has ended"
    return _reason("tail", "seconds at the end of decoding", lines, "docs/rollout.md", "docs/decode.md", rule=rule)


def _kv(run: Run, memory: PostMemory) -> Reason:
    engine, card, longest = run.engine, memory.engine, run.sequences.longest
    assert engine is not None
    assert card is not None
    mean = run.sequences.prompt + run.sequences.answers.mean / 2
    formula, pool = "no card is given: as large as all sequences that run need", ""
    if run.gpu is not None:
        weights, of = gib(card.weights, 2), gib(run.gpu.capacity, 1)
        if engine.utilization is not None:
            formula = "share of the card - weights - peak of the profile"
            pool = f"{engine.utilization} x {of} - {weights} - {gib(card.profile, 2)}"
        else:
            formula = "share of what is free - weights"
            pool = f"{engine.static_fraction} x ({of} - {gib(card.outside.value, 2)}) - {weights}"
    kept = "keys and values, latents or windows of all layers of a rank"
    at_once = f"{gib(card.pool, 2)} / ({card.token:,.0f} B x {mean:,.0f})"
    lines = [
        _line("a token", card.token, "byte", kept, f"in {engine.kv}"),
        _line(
            "what all sequences need",
            card.demand,
            "byte",
            "sequences x tokens of the longest",
            f"{card.asked:,} x {longest:,}",
        ),
        _line("sequences at once", card.running, "sequences", "cache / (a token x tokens in the mean)", at_once),
        _line("the cache", card.pool, "byte", formula, pool),
    ]
    sources = ("vllm, v1/worker/gpu_worker.py", "sglang, model_executor/model_runner.py")
    notes: tuple[str, ...] = (f"{card.running:,} of {card.asked:,} sequences of a replica run at once",)
    if card.unstarted:
        notes = (*notes, "the cache is less than a sequence needs")
    return _reason(
        "kv", "bytes of an engine's cache", lines, *sources, rule="what the engine leaves to its cache", notes=notes
    )


def _logprobs(run: Run, memory: PostMemory) -> Reason:
    member = run.trained
    kernels, layout = member.training.kernels, member.layout
    columns, rows = vocabulary(member.model, view_of(layout, member.training)), layout.micro_batch
    numbers = f"{rows:,} x {layout.seq_len:,} x {columns:,.0f} x 2"
    lines = [
        _line(f"{resident.part} of the {resident.role} in {phase.name}", resident.nbytes)
        for phase in memory.phases
        for resident in phase.residents
        if resident.part in ("loss", "log-probs", "logits")
    ]
    lines.append(
        _line("logits", 2 * rows * layout.seq_len * columns, "byte", "sequences x tokens x vocabulary x 2 B", numbers)
    )
    how = kernels.loss + (f":{kernels.loss_chunks}" if kernels.loss == "chunked" else "")
    sources = ("trl, trainer/utils.py", "verl, workers/actor/dp_actor.py")
    return _reason(
        "logprobs", "bytes of logits", lines, *sources, rule="whole, or in chunks (--loss)", notes=(f"--loss {how}",)
    )


def _sync(run: Run, memory: PostMemory, time: StepTime | None) -> Reason:
    refuse(
        run.engine is not None and run.engine.inside,
        "the trained model itself generates: no weights are handed over",
        key="explain",
    )
    phase: PhaseMemory = next(phase for phase in memory.phases if phase.name == "weight sync")
    smaller, most = "the smaller of the weights and a bucket", f"at most {gib(BUCKET, 1)} each"
    lines = []
    notes: tuple[str, ...] = ()
    if time is not None and time.sync is not None:
        notes = (f"route: {time.sync.route}, {time.sync.rate / 1e9:.1f} GB/s",)
        formula: tuple[str, ...] = ("2 B x parameters / GPUs of a replica",)
        if "delta" in time.sync.route:
            formula = (
                "share that changed x (4 B + 2 B) x parameters",
                f"{time.sync.received / 6 / run.trained.params:g} x 6 x {run.trained.params:,}",
            )
        lines = [_line("bytes that a card gets", time.sync.received, "byte", *formula)]
        lines += [_line(f"seconds: {step}", took, "s") for step, took in time.sync.parts.items()]
    lines += [
        _line(
            f"{resident.role}: {resident.part}",
            resident.nbytes,
            "byte",
            *((smaller, most) if resident.part == "bucket" else ()),
        )
        for resident in phase.residents
    ]
    lines.append(_line("together", phase.total))
    sources = ("verl, rollout.yaml", "verl, checkpoint_engine", "vllm, sleep mode", "docs/rollout.md")
    rule = "both copies of the weights, and what hands them over, lie on a card at once"
    return _reason("sync", "bytes of a card while weights are handed over", lines, *sources, rule=rule, notes=notes)
