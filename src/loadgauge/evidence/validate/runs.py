"""Measured runs, one a row: what ran, as the fields of a `Job`, and what was measured.

The published ones are in `data/runs/*.jsonl`, written by `tools/published_runs` from tables in their sources' words.

From a measured run to a `Setup`: its job is resolved, then its overrides are applied.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from loadgauge.core.base import ConfigError, read_data, refuse
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.definitions.job.job_text import positive_number
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.validate.counters import UNKNOWN, Counter
from loadgauge.evidence.validate.overrides import UNCHANGED, Changes, Overrides, apply

Row = TypeVar("Row")
LARGEST_FILE = 100_000_000
"""Bytes; the largest file that is read."""
FILES = ("throughput.jsonl", "memory.jsonl")
"""The published runs, in `data/runs`."""
SHARDINGS = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp2": 3}
"""Words of the column `sharding`, as ZeRO stages."""
WORDS = {"yes": "true", "no": "false"}
"""Words of switches."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a source measured, None where it did not; rates and utilisations are per GPU.

    step_time_s: of one optimizer step [s]; *_tflops_per_gpu: [10^12 FLOP/s]; mfu, hfu: shares of the 16-bit peak
    model_tflops_per_gpu, mfu: useful FLOPs alone; hw_tflops_per_gpu, hfu: with those of recomputation
    peak_memory_gib: [GiB]
    """

    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    hw_tflops_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_memory_gib: float | None = None

    @property
    def timed(self) -> bool:
        """Return whether anything of it is a step time in other words."""
        return any(getattr(self, name) is not None for name in self.__struct_fields__ if name != "peak_memory_gib")


class Variant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Another plausible value of something that a source does not state, as changes of the job and its overrides."""

    knob: str
    value: str
    job: Changes = {}
    overrides: Overrides = UNCHANGED


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One measured run.

    model, hardware, layout: in the source's words, by which runs of one configuration are told from others
    job: None where the run cannot be expressed, for a `reason`; untimed: why its time cannot be predicted
    variants: other jobs that it may be; assumed: None where the resolver says what it assumed
    counter: of the peak memory; miscounted: why that peak is comparable with no prediction
    causal_flops: the source counts half of the query-key pairs in its model FLOPs
    """

    id: str
    quality: str = ""
    source: str = ""
    model: str = ""
    hardware: str = ""
    layout: str = ""
    job: Job | None = None
    overrides: Overrides = UNCHANGED
    variants: tuple[Variant, ...] = ()
    assumed: tuple[str, ...] | None = None
    reason: str = ""
    untimed: str = ""
    measured: Measured = Measured()
    counter: Counter = UNKNOWN
    miscounted: str = ""
    causal_flops: bool = False

    @property
    def series(self) -> str:
        """The prefix of the source: the second part of the id, or the id itself where it has no parts.

        >>> Run(id="T-KOR-001").series, Run(id="mine").series
        ('KOR', 'mine')
        """
        parts = self.id.split("-")
        return parts[1] if len(parts) > 2 else self.id

    @property
    def configuration(self) -> tuple[str, ...]:
        """Return what makes two rows measurements of one thing: source, model, hardware, and number of GPUs with the layout.

        Precision, sequence length and batch are not part of it, so a sweep over them weighs as much as one run.
        """
        return (self.series, self.model, self.hardware, self.layout)


class Rejected(msgspec.Struct, frozen=True):
    """A row that could not be read: its id, its line, and why."""

    id: str
    line: int
    reason: str


class Runs(msgspec.Struct, frozen=True):
    """The rows of one or several files. `ignored`: columns that have no meaning here."""

    runs: tuple[Run, ...]
    rejected: tuple[Rejected, ...] = ()
    ignored: tuple[str, ...] = ()

    def __add__(self, other: Runs) -> Runs:
        ignored = tuple(dict.fromkeys(self.ignored + other.ignored))
        return Runs(self.runs + other.runs, self.rejected + other.rejected, ignored)


def published() -> Runs:
    """Return the runs that come with loadgauge.

    >>> len(published().runs) > 1500
    True
    """
    timed, weighed = (of_lines(read_data(f"runs/{name}")) for name in FILES)
    return timed + weighed


def of_lines(text: str) -> Runs:
    """The runs in JSON, one a line."""
    decode = msgspec.json.Decoder(Run).decode
    runs: list[Run] = []
    rejected: list[Rejected] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            runs.append(decode(line))
        except msgspec.DecodeError as error:
            rejected.append(Rejected(f"line {number}", number, str(error)))
    return Runs(tuple(runs), tuple(rejected))


def read_rows(
    text: str, file: str, make: Callable[[str, dict[str, str]], Row]
) -> tuple[tuple[str, ...], tuple[Row, ...], tuple[Rejected, ...]]:
    """Read a CSV: its columns, what `make(id, cells)` makes of each row, and the rows for which that raises `ConfigError`.

    A row without an id gets its line as one. Raises `ConfigError` where the text is no CSV with a column `id`.
    """
    refuse("\0" in text, "has a zero byte in it, so it is no CSV", file=file)
    records: list[Row] = []
    rejected: list[Rejected] = []
    try:
        lines = csv.DictReader(text.splitlines(keepends=True), strict=True)
        header = tuple(name.strip() for name in lines.fieldnames or ())
        lines.fieldnames = header
        refuse("id" not in header, "its first line must name the columns, and one of them must be id", file=file)
        twice = [name for name in dict.fromkeys(header) if header.count(name) > 1]
        if twice:
            raise ConfigError(f"the column {twice[0]} appears twice", file=file)
        seen: set[str] = set()
        for row in lines:
            name = (row["id"] or "").strip() or f"line {lines.line_num}"
            try:
                refuse(name in seen, "the id appears twice", key="id")
                seen.add(name)
                refuse(row.pop(None, None), "has more cells than there are columns")
                records.append(make(name, {key: (cell or "").strip() for key, cell in row.items() if key != "id"}))
            except ConfigError as error:
                rejected.append(Rejected(name, lines.line_num, str(error)))
    except csv.Error as error:
        raise ConfigError(f"is not a valid CSV: {error}", file=file) from None
    return header, tuple(records), tuple(rejected)


OWN = ("id", "quality", "source", "hardware", "sharding", "memory_kind", *Measured.__struct_fields__)
"""Columns of a CSV that are no fields of a `Job`: `hardware` says what `gpu` does, and `sharding` what `zero` does."""


def parse(text: str, file: str = "") -> Runs:
    r"""Read the runs in a CSV. A cell may hold several values, such as `none | full`: the first is the job's, each other
    one widens the range.

    >>> runs = parse("id,model,tp,colour\nT-X-1,gpt2,2,red\nT-X-2,gpt2,many,blue\n")
    >>> runs.runs[0].job.tp, runs.rejected[0].reason, runs.ignored
    (2, "tp: must be a whole number from 1 to 1000000, got 'many'", ('colour',))
    """
    header, runs, rejected = read_rows(text, file, _run)
    ignored = tuple(name for name in header if name not in OWN and name not in fields())
    return Runs(runs, rejected, ignored)


def _run(name: str, cells: dict[str, str]) -> Run:
    stated = {key: cell for key, cell in cells.items() if key in fields() and cell}
    if cells.get("hardware"):
        stated.setdefault("gpu", cells["hardware"])
    if cells.get("sharding"):
        stated.setdefault("zero", str(SHARDINGS.get(cells["sharding"], cells["sharding"])))
    values = {key: [WORDS.get(part.strip(), part.strip()) for part in cell.split("|")] for key, cell in stated.items()}
    model = values.pop("model", [""])[0]
    refuse(not model, "not stated", key="model")
    job = Job.of(model, {key: parts[0] for key, parts in values.items()})
    variants = tuple(
        Variant(knob=key, value=part, job={key: getattr(Job.of(model, {key: part}), key)})
        for key, parts in values.items()
        for part in parts[1:]
    )
    swept = dict.fromkeys(("gpu", "precision", "seq_len", "micro_batch", "global_batch", "lengths"))
    return Run(
        id=name,
        quality=cells.get("quality", ""),
        source=cells.get("source", ""),
        model=model,
        hardware=job.gpu or "",
        layout=job.replace(**swept).flags(),
        job=job,
        variants=variants,
        measured=Measured(
            **{key: _positive(key, cell) for key in Measured.__struct_fields__ if (cell := cells.get(key))}
        ),
        counter=Counter.parse(cells.get("memory_kind", "")),
    )


def _positive(key: str, cell: str) -> float:
    try:
        return positive_number(cell)
    except ConfigError as error:
        raise ConfigError(str(error), key=key) from None


NIC = "50GB/s"
"""Bandwidth of one GPU to other nodes where no source states it: 400 Gbit/s, the usual adapter since 2022."""


def setup_of(run: Run) -> Setup:
    """Resolve the job of a run, with its overrides. Raises an `Error` where that is not possible; the run must have a job.

    >>> from loadgauge.evidence.validate.runs import published
    >>> kor = next(run for run in published().runs if run.id == "T-KOR-002")
    >>> setup_of(kor).layout.tp, setup_of(kor).model.num_hidden_layers
    (8, 48)
    """
    assert run.job is not None
    return resolve(run.job, run.overrides)


def variant_setups(run: Run) -> Iterator[tuple[str, Setup]]:
    """Yield the setups of a run's variants, each with its open question (knob); variants that are refused are left out."""
    assert run.job is not None
    for variant in run.variants:
        try:
            setup = resolve(run.job.replace(**variant.job), run.overrides, variant.overrides)
        except Error:
            continue  # a value that this job cannot have is not plausible
        yield variant.knob, setup


def resolve(job: Job, *overrides: Overrides) -> Setup:
    """Resolve a job and apply overrides in order. A node has at most the job's GPUs; a network adapter whose bandwidth no
    source states has that of `NIC`."""
    model = find_model(job.model)
    for changes in overrides:
        model = apply(model, changes.model)
    if job.gpu is not None:
        if job.nic_bandwidth is None and gpu(job.gpu).nic.bandwidth is None:
            job = job.replace(nic_bandwidth=NIC)
        if job.gpus_per_node is not None and job.gpus is not None:
            job = job.replace(gpus_per_node=min(job.gpus_per_node, job.gpus))
    setup = resolve_job(job, model)
    layout, training = setup.layout, setup.training
    for changes in overrides:
        layout, training = apply(layout, changes.layout), apply(training, changes.training)
    return msgspec.structs.replace(setup, layout=layout, training=training)
