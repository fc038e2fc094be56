"""Findings in a job file: what wastes memory, time or money, or will fail, each with what the estimate says without it.

A finding is a change of the one list of changes (`core/plan/advise/changes.py`), tried on this job and this card. It is shown in
the file's own words, as a patch of the user's own text.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from loadgauge.core.answers.post_training import RunOfTask, answered
from loadgauge.core.base import GIB, ConfigError, Error, Needs, gib, lists, seconds
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.estimate.memory.peak import Memory
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.advice import advice
from loadgauge.core.plan.advise.budget import Figures
from loadgauge.core.plan.advise.changes import Change, Kind, Run, changes
from loadgauge.core.plan.advise.try_ import Tried, flags, try_change
from loadgauge.core.post_training.memory import PostMemory
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.job_files.commands.merged import difference, merged, of_file
from loadgauge.job_files.commands.own_words import line_of, own_words, packing, padding
from loadgauge.job_files.dialects import dialect as dialect_of
from loadgauge.job_files.exchange import JobFile, combine, write
from loadgauge.job_files.ideas.facts import FIELDS, Extra
from loadgauge.job_files.job_file import flags_given, names_beside, read_files, read_one
from loadgauge.job_files.reading.argv import at_variables
from loadgauge.job_files.reading.documents import document as of_text, load

Level = Literal["fails", "memory", "host", "time", "note"]
MEMORY, SLOWER, FASTER, EMPTY = 0.05, 0.01, 0.05, 0.5
"""The share of the card that is worth a line, how much slower a step may get for it, the share of a step that is, and the share
of the card up to which less memory is worth nothing by itself."""
SHARES_BATCH = {"micro_batch", "gpus", *MODEL_PARALLEL}
"""Fields by which a global batch that stays the same is shared out in another number of micro-batches."""
FOLLOW = ("global_batch", "gpus", "gpus_per_node", "save")
"""Fields that follow from the flags beside a file, and from the stage of ZeRO."""
UNREAD = [name for name in FIELDS[1:] if name not in FOLLOW]
"""Fields that differ where a text cannot be read."""
ADAPTERS = {"qlora", "lora_rank"}
OTHERWISE = "it trains otherwise than the file says, so it is left to you"
"""Why shorter sequences, and adapters where all weights are trained, are said and not written."""
SIDES = re.compile(r": it means |^it would change |: has no place in it$")
"""Lines of what a text would say instead, which are one line together."""
LAUNCHED = re.compile(r"\b(?:python3?|trl|swift|llamafactory-cli)[ \t]+--(?:nproc_per_node|nnodes|num_gpus)\b")
"""Options of a launcher behind a program that is none."""
ROUNDS = 12
"""The most changes that `fixed` makes one after another."""


class Rule(NamedTuple):
    """Name of a rule, whether it looks for memory or for time, and what is wrong where it fires."""

    name: str
    level: Level
    says: str


RULES = {
    Kind.LOSS: Rule("logits-whole", "memory", "the logits are made whole; in chunks they never are"),
    Kind.ZERO: Rule("states-replicated", "memory", "every rank keeps states that the others have too"),
    Kind.ATTENTION: Rule("eager-attention", "memory", "attention keeps its scores; flash attention makes them again"),
    Kind.SEQUENCE_PARALLEL: Rule("norms-replicated", "memory", "tensor-parallel ranks all keep what norms read"),
    Kind.OPTIMIZER: Rule("optimizer-32-bit", "memory", "optimizer states in 32 bits, where 8 do"),
    Kind.EVALUATION: Rule("evaluation-peak", "memory", "evaluation needs more than training"),
    Kind.PURE_16_BIT: Rule("weights-32-bit", "memory", "weights in 32 bits too (in 16 alone, small updates are lost)"),
    Kind.LARGER_MICRO_BATCH: Rule("small-micro-batch", "time", "small micro-batches on a card with room"),
    Kind.RECOMPUTE_LESS: Rule("needless-recompute", "time", "layers run again in backward, though what they keep fits"),
    Kind.LESS_TP: Rule("tensor-parallel-wide", "time", "tensor parallelism is wider than the memory needs"),
    Kind.PIPELINE: Rule("pipeline-bubble", "time", "stages wait for one another"),
    Kind.LESS_ZERO: Rule("needless-zero-3", "time", "weights are gathered with every micro-batch, though they fit"),
    Kind.OVERLAP: Rule("exposed-communication", "time", "communication that could run beside the computing does not"),
    Kind.EXPERT_PARALLEL: Rule("experts-spread", "time", "experts over another number of ranks take less time"),
}
"""The rules that try a change of the one list, by its kind."""
OWN = {
    "offload": Rule("needless-offload", "time", "states lie on the host, though the card has room"),
    "pin_memory": Rule("pageable-offload", "time", "what is offloaded lies in pageable memory, which is copied twice"),
    "save": Rule("save-gathers", "host", "a checkpoint gathers all weights on one rank"),
    "precision": Rule("float32", "time", "products in 32 bits"),
    "padding": Rule("padding", "time", "micro-batches are padded; end to end only tokens are computed"),
    "tp": Rule("tensor-parallel-across-nodes", "time", "tensor parallelism reaches over the network between nodes"),
    "micro_batch": Rule(
        "few-micro-batches", "time", "fewer than four micro-batches a stage: the pipeline is seldom full"
    ),
    "learned_positions": Rule("unused-context", "note", "positions have weights beyond the longest sequence"),
}
"""The rules that set a field that no change sets, by the field."""
BOTH = {RULES[kind].name for kind in (Kind.ATTENTION, Kind.LOSS)}
"""Rules that look for memory, and for time as well."""
LEAST = GIB / 20
"""Bytes that are worth a word."""
FULL = 4
"""Micro-batches a stage from which on a pipeline's bubble is small (a quarter of the work; 2104.04473, section 2.2)."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a job file that costs, or fails.

    memory: GiB less on the fullest GPU [byte]; step: less time of a step [s]; cost, of the whole run, where it is asked for
    fields: of `Job`, that mend it; keys: of the file, that do (None: goes), where no field says it
    patch: the file's own lines that do, as a unified diff; line: its first line in the file, or that of its words
    flags: the same for `loadgauge estimate`; left_out: what the file's format cannot say of it; then: what it comes to
    """

    rule: str
    level: Level
    says: str
    memory: float = 0.0
    step: float = 0.0
    cost: float = 0.0
    needs: str = ""
    fields: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    flags: str = ""
    words: str = ""
    patch: str = ""
    line: int = 1
    left_out: tuple[str, ...] = ()
    then: str = ""

    @property
    def mends(self) -> bool:
        """Return whether the file's own words say all of it."""
        return bool(self.patch)

    def gain(self) -> str:
        """Return what it saves, in words.

        >>> Finding(rule="x", level="memory", says="", memory=2.0**31, step=-0.25).gain()
        'saves 2.0 GiB, a step takes 250 ms more'
        """
        parts = [f"saves {gib(self.memory, 1)}"] if self.memory > LEAST else []
        parts += [f"saves {seconds(self.step)} a step"] if self.step > 0 else []
        parts += [f"takes {gib(-self.memory, 1)} more"] if self.memory < -LEAST and self.step > 0 else []
        parts += [f"a step takes {seconds(-self.step)} more"] if self.step < 0 else []
        parts += [f"saves {self.cost:,.2f} of the run's price"] if self.cost >= 0.01 else []
        return ", ".join([*parts, self.then] if self.then else parts)


class Linted(msgspec.Struct, frozen=True, kw_only=True):
    """A job file as it is, and what was found in it, the gravest first. setup: None where a task's phases have several"""

    file: str
    tool: str
    setup: Setup | None
    result: Estimate | RunOfTask
    findings: tuple[Finding, ...]


def lint(job: Job, text: str | None = None) -> Linted:
    """Estimate a job file as it is, and with each change that may be worth making.

    job: whose `model` is the file, with the flags of `loadgauge estimate`; text: of the file, where it is not to be opened
    Raises `ConfigError`, `LayoutError` or `NotModelled` where the file itself cannot be estimated.
    """
    source = load(job.model) if text is None else text
    file = _unchanged(job, source).files[0]
    if job.lengths is not None and job.padding is None:
        job = job.replace(padding=padding(source, file.dialect, file.syntax, file.file))
    task = _unchanged(job, source).job.task
    tool = f"{file.dialect} {file.version}".strip()
    if task is None or task == "sft" or TASKS[task].rollout:
        try:
            setup = resolve_job(job)
        except ConfigError as error:  # an engine keeps its memory, or has GPUs of its own
            if error.key != "task":
                raise
        else:
            result = setup.estimate()
            findings = _said((*_findings(setup, result, job), *_words(file, source, setup)), job, source)
            return Linted(file=job.model, tool=tool, setup=setup, result=result, findings=findings)
    job = job.replace(task=task)
    run, trainer = answered(job), resolve_posttrain(job)[1]
    findings = _said((*_of_task(run), *_words(file, source, trainer)), job, source)
    return Linted(file=job.model, tool=tool, setup=None, result=run, findings=findings)


def _said(findings: Iterable[Finding], job: Job, source: str) -> tuple[Finding, ...]:
    """Return the findings that the file's format can mend, with the lines that do; of what fails, also others."""
    kept: list[Finding] = []
    for each in sorted((_with_patch(finding, job, source) for finding in findings), key=_gravest):
        fails = next((other for other in kept if other.level == "fails"), None)
        told = fails is not None and set(each.fields) <= {
            "global_batch",
            *fails.fields,
        }  # what makes it fit says the rest
        wanted = {"fails": fails is None, "note": True}.get(each.level, each.mends and not told)
        kept += [each] if wanted else []
    return tuple(kept)


def _gravest(finding: Finding) -> tuple[int, int, float]:
    order = ("fails", "time", "memory", "host", "note").index(finding.level)
    gain = 0 if finding.level == "fails" else -finding.step - finding.memory / 2**40
    return order, bool(finding.left_out), gain


def _findings(setup: Setup, result: Estimate, job: Job) -> Iterator[Finding]:
    """Yield what changes of a run save. job: as it is asked for, whose model is the file"""
    memory = result.memory
    yield from _depends(memory)
    if memory.verdict not in ("fits", "depends") and memory.capacity is not None:
        trials = (_as_read(job, each, setup) for each in advice(setup) if _runs(setup, each.fields))
        tried = [own for own in trials if own is not None and _helps(own[0].result)]
        says = f"{memory.verdict}: {gib(memory.total, 1)} of {gib(memory.capacity, 1)}"
        rule = Rule("does-not-fit", "fails", says)
        mends = [
            msgspec.structs.replace(_found(rule, setup, result, *own), then=_comes_to(own[0].result.memory))
            for own in tried
        ]
        yield from mends or [Finding(rule="does-not-fit", level="fails", says=says)]
    best: dict[str, Finding] = {}
    for rule, fields, why in _tries(setup):
        trial = try_change(setup, fields, why)
        if trial is None or not _worth(rule, result, trial):
            continue
        own = _as_read(job, trial, setup)
        if own is None or not _worth(rule, result, own[0]):
            continue
        finding = _found(rule, setup, result, *own)
        if rule.name not in best or finding.step > best[rule.name].step:
            best[rule.name] = finding
    yield from best.values()
    yield from _unread(setup, result)


def _depends(memory: Memory | PostMemory) -> Iterator[Finding]:
    if memory.verdict == "depends" and memory.question is not None:
        yield Finding(rule="depends", level="note", says=f"the verdict depends: {memory.question.words()}")


def _unread(setup: Setup, result: Estimate) -> Iterator[Finding]:
    """Yield keys that are not read and may move a share of the card that is worth a line; those that decide are said elsewhere."""
    memory, least = result.memory, MEMORY * (result.memory.capacity or result.memory.total)
    asked = "" if memory.question is None else memory.question.words()
    keys = [
        key
        for key in setup.unread(result)
        if key["key"] not in asked
        and (key["high_bytes"] is None or max(key["low_bytes"] or 0.0, key["high_bytes"]) >= least)
    ]
    if keys:
        alike = lists((_why(key), key["key"]) for key in keys)
        says = "; ".join(f"{', '.join(names)}: {why}" for why, names in alike.items())
        yield Finding(rule="key-not-read", level="note", says=f"not counted: {says}", words=keys[0]["key"])


def _why(key: dict[str, Any]) -> str:
    """Return why a key is not counted, and what it may change.

    >>> _why({"why": "its matrices are in nvfp4", "effect": "saves", "low_bytes": 2.0**31, "high_bytes": 0.0})
    'its matrices are in nvfp4 (up to 2.0 GiB less)'
    """
    may = {"saves": "less", "costs": "more", "either": "more or less"}[key["effect"]]
    most = None if key["high_bytes"] is None else max(key["low_bytes"] or 0.0, key["high_bytes"])
    return f"{key['why']} ({'by how much is not known' if most is None else f'up to {gib(most, 1)} {may}'})"


def _runs(setup: Setup, fields: dict[str, Any]) -> bool:
    """Return whether a trainer has a change: bitsandbytes' states are neither DTensors nor parts of a flat buffer."""
    sharded = fields.get("zero", setup.layout.zero) or 0
    return "framework" not in fields and not (sharded and str(fields.get("optimizer", "")).endswith("8bit"))


def _as_read(job: Job, trial: Tried, setup: Setup) -> tuple[Tried, Setup] | None:
    """Return a tried change as the job file has it, if it can: words of the file may count beside it that did not before."""
    batch = {"global_batch": int(setup.layout.global_batch)} if trial.fields.keys() & SHARES_BATCH else {}
    for fields in (batch | trial.fields, trial.fields):
        try:
            after = resolve_job(job.replace(**fields))
            if "global_batch" in fields:  # every GPU has a sequence at least
                fields = fields | {"global_batch": int(after.layout.global_batch)}
            return msgspec.structs.replace(trial, fields=fields, result=after.estimate()), after
        except Error:
            continue
    return None


def _of_task(run: RunOfTask) -> Iterator[Finding]:
    """Yield what fails in a run after pre-training, with what makes it fit; its other rules are those of training alone."""
    memory = run.memory
    yield from _depends(memory)
    for words, after in run.alternatives() or ([("", memory)] if memory.verdict in ("tight", "does not fit") else []):
        says = f"{memory.verdict}: {gib(memory.total, 1)} of {gib(memory.capacity or 0, 1)}"
        changed = flags_given(parse([run.job.model, *shlex.split(words)]))
        fields = {name: value for name, value in changed.items() if name != "model"}
        then, less = _comes_to(after) if words else "", memory.total - after.total
        yield Finding(rule="does-not-fit", level="fails", says=says, memory=less, flags=words, fields=fields, then=then)


def _helps(result: Estimate) -> bool:
    """Return whether a run that did not fit is a step on: one that depends is, where it fits as assumed."""
    memory = result.memory
    return memory.verdict != "depends" or memory.total <= (memory.capacity or 0)


def _comes_to(memory: Needs) -> str:
    return f"then {memory.verdict.upper()}, {gib(memory.total, 1)} of {gib(memory.capacity or 0, 1)}"


def _tries(setup: Setup) -> Iterator[tuple[Rule, dict[str, Any], str]]:
    run = Run.of_setup(setup)
    for change in changes(run, RULES):
        apart = change.kind is Kind.ZERO and setup.training.framework.fsdp_apart and change.fields["zero"] > 1
        wide = setup.layout.tp > (setup.job.gpus_per_node or run.node)  # a rule of its own
        if apart or (change.kind is Kind.LESS_TP and wide):
            continue
        yield from (
            (RULES[change.kind], fields, change.why) for fields in _sizes(change, setup) if _runs(setup, fields)
        )
    for name, fields in _own(run, setup):
        yield OWN[name], fields, OWN[name].says


def _words(file: JobFile, source: str, setup: Setup) -> Iterator[Finding]:
    """Yield what the file's own words say in vain, and what it is read as that its keys do not say."""
    whole = of_file(file.file, source, source)
    nvlink = setup.gpu is not None and "nvlink" in (setup.gpu.interconnect.kind or "").lower()
    for own in own_words(source, file.dialect, file.syntax, file.file, nvlink=nvlink):
        yield Finding(rule=own.rule, level="note", says=own.says, line=line_of(whole, own.text), keys=own.keys)
    if "config" not in file.facts:
        return  # the positions of a checkpoint stay
    rows, longest = setup.model.learned_positions, int(setup.layout.seq_len)
    if rows > longest:
        less = resolve_job(setup.job, msgspec.structs.replace(setup.model, learned_positions=longest))
        saved = setup.estimate().memory.total - less.estimate().memory.total
        if saved > LEAST:
            says = f"{rows:,} positions have weights, and no sequence is longer than {longest:,} tokens"
            yield Finding(rule=OWN["learned_positions"].name, level="note", says=says, memory=saved)


def _sizes(change: Change, setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield the fields of a change; of a larger micro-batch, of all that divide the batch; of a lower stage, of both."""
    moved = change.kind is Kind.RECOMPUTE_LESS and setup.job.activation_offload == "checkpoints"
    yield change.fields | ({"activation_offload": "none"} if moved else {})
    if change.kind is Kind.LARGER_MICRO_BATCH:
        size, batches = int(setup.layout.micro_batch), int(setup.layout.num_microbatches)
        yield from ({"micro_batch": size * factor} for factor in (4, 8, 16) if batches % factor == 0)
    if change.kind is Kind.LESS_ZERO:
        yield {"zero": 2}


def _own(run: Run, setup: Setup) -> Iterator[tuple[str, dict[str, Any]]]:
    kind, job, layout = setup.training, setup.job, setup.layout
    if kind.offload != "none":
        beside = {name: None for name in ("pin_memory", "offload_to") if getattr(job, name) is not None}
        yield "offload", {"offload": "none", **beside}
        if not kind.host.pinned:
            yield "pin_memory", {"pin_memory": True}
    if job.save == "full":
        yield "save", {"save": "sharded"}
    if kind.precision.name == "fp32" and setup.gpu is not None and setup.gpu.bf16:
        yield "precision", {"precision": "bf16"}
    if setup.lengths is not None and setup.padded:
        yield "padding", {"padding": "free"} | ({} if kind.kernels.attention == "flash" else {"attention": "flash"})
    node, tp = job.gpus_per_node or run.node, int(layout.tp)
    if tp > node and tp % node == 0:
        yield from (("tp", {"tp": node, "pp": layout.pp * rest}) for rest in (1, tp // node))
    size = int(layout.micro_batch)
    if layout.pp > 1 and layout.num_microbatches < FULL * layout.pp:
        yield from (("micro_batch", {"micro_batch": part}) for part in range(1, size) if size % part == 0)


def _worth(rule: Rule, before: Estimate, trial: Tried) -> bool:
    after, capacity = trial.result, before.memory.capacity
    slower = 0.0 if before.time is None or after.time is None else after.time.step / before.time.step - 1
    if rule.level == "time":
        return -slower >= FASTER and after.memory.verdict == "fits"
    if rule.level == "host":
        return before.memory.saving - after.memory.saving > GIB
    less = before.memory.total - after.memory.total
    if rule.name in BOTH and -slower >= FASTER and less >= 0:
        return True
    filled = capacity is None or before.memory.total > EMPTY * capacity
    return filled and slower <= SLOWER and less >= MEMORY * (capacity or before.memory.total)


def _found(rule: Rule, setup: Setup, before: Estimate, trial: Tried, after: Setup) -> Finding:
    now = Figures.of(setup, before).values
    then = Figures.of(after, trial.result).values
    less = {name: now[name] - then[name] for name in now.keys() & then.keys()}
    step = less.get("step", 0.0)
    saving = before.memory.saving - trial.result.memory.saving
    of_host = f"{gib(saving, 1)} less of host memory on the first rank while saving" if rule.level == "host" else ""
    return Finding(
        rule=rule.name, level=rule.level, says=rule.says, memory=less["memory"], cost=less.get("cost", 0.0), needs=trial.note,
        step=step if abs(step) > SLOWER * now.get("step", 0.0) else 0.0, fields=trial.fields, flags=flags(trial.fields),
        then=of_host,
    )  # fmt: skip


def _with_patch(finding: Finding, job: Job, source: str) -> Finding:
    if finding.rule == OWN["padding"].name:
        finding = msgspec.structs.replace(finding, keys=packing(_unchanged(job, source).files[0].dialect))
    if not (finding.fields or finding.keys):
        words = re.escape(finding.words.rpartition(".")[2].lstrip("-"))
        return (
            msgspec.structs.replace(finding, line=line_of(of_file(job.model, source, source), words))
            if words
            else finding
        )
    if "seq_len" in finding.fields or (ADAPTERS & finding.fields.keys() and not _unchanged(job, source).job.lora_rank):
        return msgspec.structs.replace(finding, left_out=(OTHERWISE,))
    try:
        text, left_out = patched(job, finding.fields, source, finding.keys)
        own = [of_file(job.model, source, each) for each in (source, text)]
    except Error as error:
        return msgspec.structs.replace(finding, left_out=(str(error),))
    if left_out and not (left_out := tuple(line for line in left_out if not SIDES.search(line))):
        left_out = ("the file has no words of its own for it that change nothing else",)
    diff = difference(own[0], own[1], job.model, 0)
    start = re.search(r"^@@ -(\d+)", diff, re.MULTILINE)
    line = max(1, int(start[1]) if start else 1)
    return msgspec.structs.replace(finding, patch="" if left_out else diff, line=line, left_out=left_out)


def patched(
    job: Job, fields: dict[str, Any], source: str, keys: dict[str, Any] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the text of a job file with fields of its job changed, and a line for each that its format cannot say.

    keys: of the file, that are set or (None) taken out beside them. Comments and all other lines stay as they are, and the text is
    read again: it is the job with the fields. Raises `ConfigError` where the format cannot be written.
    """
    was = _unchanged(job, source)
    asked = was.own | {name: value for name, value in fields.items() if name in FIELDS}
    wanted, extra = combine(read_files([job.model, *names_beside(job)], job, asked), asked)
    first = was.files[0]
    text, left_out = source, tuple[str, ...]()
    tried: list[tuple[int, int, str, tuple[str, ...]]] = []
    before: tuple[Job, Extra] | None = (was.job, was.extra)
    while any(name in FIELDS for name in fields):
        written = write(wanted, first.dialect, source, extra=extra, file=job.model, before=before)
        for own in (merged(source, was.plain, written.text), written.text):
            off = was.unlike(own, wanted, job)
            others = [name for name in off if name not in FOLLOW]
            beside = [f"it would change {name} too" for name in others]
            beside = ["another file contradicts it too"] if others == UNREAD else beside
            tried.append((len(off), len(tried), own, (*written.left_out, *beside)))
        if before is None or not min(tried)[0]:
            few, _, text, left_out = min(tried)
            left_out = left_out if few else ()
            break
        # What followed from a field that changes is said, and then all is.
        before = (was.job.replace(**dict.fromkeys(off)), was.extra) if len(tried) == 2 else None
    if first.syntax == "argv" and (told := at_variables(source, text)) != text and not was.unlike(told, wanted, job):
        text = told
    if keys:
        target = of_text(text, first.syntax, dialect_of(first.dialect), job.model)
        for key, value in keys.items():
            target.drop(key) if value is None else target.put(key, value)
        text = merged(text, was.plain if text == source else text, target.text())
    text = text if source.endswith("\n") else text.removesuffix("\n")
    mine = (name for name in fields if (name not in FIELDS and not keys) or (name == "gpus" and name in was.own))
    beyond = (f"--{name.replace('_', '-')}: has no place in it" for name in mine)
    flags_of = [f"--{name.replace('_', '-')}" for name in fields if name != "global_batch" or len(fields) == 1]
    if LAUNCHED.search(text) and not LAUNCHED.search(source):
        left_out = (*left_out, "its command has no launcher that takes GPUs too")
    clash = was.clashes(text, job.model) - was.clashes(source, job.model)
    return text, (
        *beyond,
        *sorted(clash),
        *(line for line in left_out if any(flag in line for flag in flags_of) or "too" in line),
    )


class Unchanged(NamedTuple):
    """A job file as it is: flags beside it, what it and the files that it names say, its job, and its text as it is written."""

    own: dict[str, Any]
    files: tuple[JobFile, ...]
    job: Job
    extra: Extra
    plain: str

    def clashes(self, text: str, file: str) -> set[str]:
        """Return what a text of the file says against itself."""
        first = self.files[0]
        every = own_words(text, first.dialect, first.syntax, file)
        return {words.says for words in every if words.rule == "keys-contradict"}

    def unlike(self, text: str, wanted: Job, job: Job) -> list[str]:
        """Return the fields in which another text of the file is not the job that is wanted."""
        try:
            again = read_one(job.model, job, self.own, [job.model, *names_beside(job)], text)
            read_as = combine((again, *self.files[1:]), self.own)[0]
        except Error:
            return list(FIELDS[1:])
        return [name for name in FIELDS if getattr(read_as, name) != getattr(wanted, name)]


@lru_cache(maxsize=4)
def _unchanged(job: Job, source: str) -> Unchanged:
    own = {name: value for name, value in flags_given(job).items() if name in FIELDS}
    files = read_files([job.model, *names_beside(job)], job, own)
    plain = of_text(source, files[0].syntax, dialect_of(files[0].dialect), job.model).text()
    return Unchanged(own, files, *combine(files, own), plain)


def fixed(linted: Linted, job: Job, text: str, rules: frozenset[str] = frozenset()) -> tuple[str, tuple[Finding, ...]]:
    """Return a file's text with what was found mended, one change after another, and the findings that were.

    After each change the job is estimated again, since two may want the same memory. rules: those to follow; empty: all
    """
    fields: dict[str, Any] = {}
    mended = [each for each in linted.findings if each.mends and not each.fields and (not rules or each.rule in rules)]
    keys = {key: value for each in mended for key, value in each.keys.items()}
    setup, findings = linted.setup, linted.findings
    for _ in range(ROUNDS):
        rest = [each for each in findings if each.mends and each.fields and (not rules or each.rule in rules)]
        if not rest:
            break
        mended.append(rest[0])
        fields, keys = fields | rest[0].fields, keys | rest[0].keys
        if setup is None:
            break
        setup = resolve_job(job.replace(**fields))
        now = (
            each
            for each in _findings(setup, setup.estimate(), job.replace(**fields))
            if each.fields.keys() - fields.keys()
        )
        findings = _said(now, job, text)
    return (patched(job, fields, text, keys)[0] if fields or keys else text), tuple(mended)
