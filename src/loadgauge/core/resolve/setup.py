"""`Setup`: a resolved job: the model, the layout, how it is trained and on which GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from loadgauge.core.base.lengths import Lengths
from loadgauge.core.base.units import parse_count, seconds
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.definitions.hardware.electricity import grams
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.memory.padding import Forecast, forecast
from loadgauge.core.estimate.memory.question import Alternative, Unsaid
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.cost import Budget, Failures
from loadgauge.core.estimate.unsaid import open_to, overlap_ends, parts_of, unread_things, with_unsaid

FAR, SURELY = 1.25, 1.02
"""Times what a card holds: from which on the leanest try is looked at first, and from which on no milder one can fit. It keeps no
more than a milder one but for the input of a layer."""


SLOWEST_BACKWARD = 1.312
"""Seconds of attention's backward whose sums have one order, over those of the other, at the most: of 230 pairs of cuDNN on GB200
and GB300, half take no longer (source: cudnn-frontend, sdpa_benchmark_training). Other kernels are taken to be alike."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be estimated. `assumed`: the values of flags that were not given, with the reason."""

    job: Job
    model: ModelSpec
    layout: Layout
    training: Training
    gpu: Gpu | None
    lengths: Lengths | None
    assumed: dict[str, str]
    cluster: Cluster | None = None
    untimed: str = ""
    """Why there is no cluster, where a GPU is given."""
    file: str = ""
    """Where the model is another tool's job file: whose, and how its keys were read."""
    others: tuple[Training, ...] = ()
    """Other ways in which the run may train, for what neither the job nor its releases say."""
    uncounted: tuple[Uncounted, ...] = ()
    """Settings of a job file that are not counted."""
    instead: Callable[..., Iterator[Any]] | None = None
    """The same run with what such layouts have where nothing is said of it (`resolve.large_runs.Instead`)."""

    open_layout: bool = False
    """Says whether nothing is said of how its GPUs share the work."""
    running: Callable[[str, Training, int], Training] | None = None
    """A training of this run under a schedule, on so many GPUs: one of two directions hides the exchange of experts."""
    larger: Callable[[], Iterator[Setup]] | None = None
    """The same run with larger micro-batches, the largest first, where nothing is said of them."""
    overlap_open: bool = False
    """Says whether nothing is said of what communication hides, and runs of this size differ in that."""

    def on_host(self, result: Estimate) -> float:
        """Return the bytes in a node's memory: each GPU as much as the fullest rank, and a gathered state while it is saved."""
        per_node = 8 if self.cluster is None else self.cluster.gpus_per_node
        ranks, saving = min(self.layout.gpus, per_node), result.memory.saving
        each = self.training.around.save == "sharded"
        return float(result.memory.host * ranks + saving * (ranks if each else 1))

    def estimate(self) -> Estimate:
        """Return the estimate; widened by settings of a job file that are not counted, and with lengths by the largest batch.

        Where it does not fit, and what nobody said of its layout makes it fit, that is assumed and decides the verdict. Where
        weights are gathered for each of several micro-batches, and recomputing leaves room for larger ones, the faster is.
        """
        if self.instead is None:
            return self._filled()
        own = self.untimed_estimate()
        if own.memory.verdict != "does not fit":
            own = self._filled(own)
            if self.larger is None or own.layout.zero < 3 or own.layout.num_microbatches == 1 or own.time is None:
                return own
            faster: list[Estimate] = [own, *(each.setup._filled() for each in self.instead(failed=False))]
            return min(faster, key=lambda each: math.inf if each.time is None else each.time.step)
        pairs = ((each, each.setup.untimed_estimate()) for each in self.instead())
        tried = list(pairs) if self.open_layout else self._possible(own)
        runs = ((each.setup._filled(its), each.flags) for each, its in tried if its.memory.verdict != "does not fit")
        # Of a layout of which nothing is said the fastest, else the mildest change of the one that is.
        chosen = None if self.open_layout else next(runs, None)
        # So it is where weights are gathered for each of several micro-batches.
        if chosen is None or (chosen[0].layout.zero == 3 and chosen[0].layout.num_microbatches > 1):
            chosen = min((*([chosen] if chosen else ()), *runs), key=lambda run: _speed(run[0]), default=None)
        # A step that was measured is that of the layout as it stands.
        if (
            chosen is None
            and isinstance(tried, list)
            and tried
            and (self.cluster is None or of_cluster(self.cluster).slower[0] == 1)
        ):
            nearest, its = min(tried, key=lambda pair: pair[1].memory.total)
            chosen = nearest.setup._filled(its), nearest.flags
        if chosen is None:
            return self._filled(own)
        there, flags = chosen
        things = (
            Unsaid(flag, value, (Alternative(usual, before.allocated - there.memory.allocated),))
            for flag, value, usual, without in flags
            for before in (own.memory if len(flags) == 1 else without().untimed_estimate().memory,)
        )
        unsaid = (*there.memory.unsaid, *things)
        return _of(there.replace(memory=msgspec.structs.replace(there.memory, unsaid=unsaid)), there.setup)

    def _possible(self, own: Estimate) -> Iterator[tuple[Any, Estimate]]:
        """Yield the tries with their estimates, without those that cannot fit: of a run that needs far more, the leanest of each
        kind is looked at first, which runs everything again, and where it does not fit the milder ones do not either."""
        assert self.instead is not None
        if not own.memory.exceeds(FAR):
            yield from ((each, each.setup.untimed_estimate()) for each in self.instead())
            return
        changed = [(each, {flag: value for flag, value, *_ in each.flags}) for each in self.instead()]
        estimates: dict[int, Estimate] = {}

        def at(index: int) -> Estimate:
            if index not in estimates:
                estimates[index] = changed[index][0].setup.untimed_estimate()
            return estimates[index]

        for index, (each, fields) in enumerate(changed):
            whole = fields | {"--recompute": "full"}
            leanest = next((other for other, (_, most) in enumerate(changed) if most == whole), index)
            least = at(leanest).memory
            if least.verdict == "does not fit" and least.exceeds(SURELY):
                continue
            yield each, at(index)

    def _filled(self, untimed: Estimate | None = None) -> Estimate:
        """Return the estimate with the largest micro-batch that fits, where nothing is said of it."""
        own = self.as_assumed(untimed)
        if self.larger is not None and own.memory.roomy:
            tried = ((setup, setup.untimed_estimate()) for setup in self.larger())
            chosen = next((pair for pair in tried if pair[1].memory.roomy), None)
            own = own if chosen is None else chosen[0].as_assumed(chosen[1])
        return own

    def untimed_estimate(self) -> Estimate:
        """Return the estimate of the layout as it stands without its time."""
        return msgspec.structs.replace(self, cluster=None).as_assumed()

    def as_assumed(self, untimed: Estimate | None = None) -> Estimate:
        """Return the estimate of the layout as it stands. untimed: the same without its time, where it is there"""
        workings = None if untimed is None else untimed.workings
        result = estimate(self.model, self.layout, self.training, self.gpu, self.cluster, shared=workings)
        result = result.replace(assumed=self.assumed, untimed=self.untimed or result.untimed)
        result = open_to(with_unsaid(self.with_uncounted(result), self.others), _towers(result))
        if self.overlap_open and result.time is not None:
            result = self.with_ends(result)
        if self.job.determinism is not None and result.time is not None:
            result = self.with_determinism(result)
        worst = self.worst_case()
        if worst is not None:
            # More long sequences than in the fullest micro-batch to expect may come together, up to the longest alone.
            result = result.replace(memory=result.memory.up_to(worst.memory, "--lengths"))
        return _of(result, self)

    def with_ends(self, result: Estimate) -> Estimate:
        """Return the estimate with the range of its time from all communication hidden to none, as nothing is said of that."""
        wider, ends = overlap_ends(result)
        own = self.assumed.get("--overlap", f"{self.training.overlap.text()} ({self.training.framework.name}'s)")
        more = "; ".join(f"--overlap {word}: {seconds(step)}" for word, step in ends.items())
        return result.replace(time=wider, assumed=result.assumed | {"--overlap": f"{own}; {more}"})

    def with_determinism(self, result: Estimate) -> Estimate:
        """Return the estimate with the range of its time up to the most that sums in one order may take."""
        time, workings = result.timing, result.workings
        machine, blocking = workings.step.machine, self.job.determinism == "blocking"
        rate, more = machine.memory("elementwise").forward, 0.0
        for run in workings.operations:
            operation, again = run.operation, 1 + run.again
            results = again * sum(tensor.nbytes for tensor in operation.outputs)
            filled = (results + operation.gradients * sum(tensor.nbytes for tensor in operation.inputs)) / rate
            waits = (again + operation.gradients) * machine.host if blocking else 0
            slower = (SLOWEST_BACKWARD - 1) * run.seconds.input_gradient if operation.kind == "attention" else 0
            more += float(run.times * (filled + waits + slower))
        more *= float(self.layout.num_microbatches) / time.step
        waited = ", every launch waited for" if blocking else ""
        note = (
            f"{self.job.determinism} (up to {100 * more:.0f} % longer: attention's backward {100 * SLOWEST_BACKWARD - 100:.2g} %,"
            f" results filled before they are written{waited}; sums of experts' rows are not counted)"
        )
        wider = msgspec.structs.replace(time, high=time.high * (1 + more))
        return result.replace(time=wider, assumed=result.assumed | {"--determinism": note})

    def with_uncounted(self, result: Estimate) -> Estimate:
        """Return an estimate of this run with its range widened by settings of a job file that are not counted."""
        return widened(self, result) if self.uncounted else result

    def changing(self, result: Estimate) -> tuple[Uncounted, ...]:
        """Return the settings of a job file that are not counted, those of kernels with how far these change the memory."""
        counted = self.training.kernels
        items: list[Uncounted] = []
        for item in self.uncounted:
            if item.kernels:
                # A kernel that the whole job runs is counted; the key of it alone says nothing more.
                other = {name: word for name, word in item.kernels.items() if getattr(counted, name) != word}
                if not other:
                    continue
                kind = msgspec.structs.replace(self.training, kernels=msgspec.structs.replace(counted, **other))
                there = estimate(self.model, result.layout, kind, self.gpu)
                change = there.memory.allocated - result.memory.allocated
                effect = "saves" if change < 0 else "costs"
                item = msgspec.structs.replace(
                    item, low=max(0.0, -change), high=max(0.0, change), kernels={}, effect=effect
                )
            items.append(item)
        return tuple(items)

    def unread(self, result: Estimate) -> list[dict[str, Any]]:
        """Return the keys of job files that are not counted, as documents have them."""
        parts = parts_of(result)
        return [item.document(parts) for item in self.changing(result) if item.file]

    def budget(self, result: Estimate) -> Budget | None:
        """Return the time, energy and price of the whole run; None without its number of tokens, or without a step time."""
        job = self.job
        if job.tokens is None or result.time is None:
            return None
        took = {
            name: value
            for name in ("checkpoint_seconds", "restart_seconds")
            if (value := getattr(job, name)) is not None
        }
        failed = job.mtbf_hours is not None or took
        failures = Failures(hours_between_failures_per_gpu=job.mtbf_hours or math.inf, **took) if failed else None
        return Budget.of(
            tokens=parse_count(job.tokens, "tokens"),
            gpus=self.layout.gpus,
            step_tokens=result.time.tokens,
            step_seconds=result.time.step,
            price=job.price,
            watts=result.time.tdp,
            failures=failures,
            wanted_days=job.days,
            grid=None if job.electricity is None else grams(job.electricity),
        )

    @property
    def padded(self) -> bool:
        """Return whether ragged micro-batches are padded."""
        if self.job.padding is not None:
            return self.job.padding != "free"
        return self.training.kernels.attention != "flash"

    def worst_case(self) -> Estimate | None:
        """Return the estimate with every sequence of the micro-batch as long as the longest; None without lengths."""
        if self.lengths is None:
            return None
        layout = msgspec.structs.replace(self.layout, tokens=None, pairs=None, kernel_tokens=None, fullest=None)
        return estimate(self.model, layout, self.training, self.gpu)

    def forecast(self) -> Forecast | None:
        """Return memory and time to expect of the lengths, padded and padding-free; None without lengths."""
        if self.lengths is None:
            return None
        return forecast(self.model, self.lengths, self.layout, self.training, self.gpu, self.cluster)


def _speed(result: Estimate) -> tuple[bool, float]:
    """A key that puts what fits before what may, and the faster before the slower."""
    time = result.time
    return not result.memory.fits, math.inf if time is None else time.step / time.tokens


def _of(result: Estimate, setup: Setup) -> Estimate:
    """Return an estimate that knows the run it is of."""
    result.__dict__["setup"] = setup
    return result


def worst_routing(setup: Setup, result: Estimate) -> Estimate | None:
    """Return the estimate with the worst possible imbalance of experts; None where that changes nothing.

    result: the own estimate; memory, time and traffic are those of the other routing, all else is taken from it
    """
    setup = result.setup or setup
    worst = setup.layout.worst_imbalance(setup.model)
    if worst <= setup.layout.expert_imbalance:
        return None
    workings = result.workings.rerouted(worst)
    time, network = (None, ()) if result.time is None else workings.timed
    routed = msgspec.structs.replace(
        result, layout=workings.layout, memory=workings.peak_memory, time=time, network=network
    ).keep(workings)
    return setup.with_uncounted(routed)


def widened(setup: Setup, result: Estimate) -> Estimate:
    """Return an estimate whose range and notes include the settings of a job file that are not counted."""
    items = setup.changing(result)
    notes = tuple(item.note for item in items if item.note)
    return open_to(result.replace(unmodelled=notes), unread_things(items, parts_of(result)))


def _towers(result: Estimate) -> Iterator[Unsaid]:
    """The towers that the numbers leave out: a card must hold at least their weights, sharded as the others are.

    Where the whole language model is trained they may be too, with gradients and optimizer states in the same proportion.
    """
    layout, memory = result.layout, result.memory
    whole = result.training.lora is None and not result.model.partly
    states = {part: memory.largest(part).parts[part] for part in ("weights", "gradients", "optimizer")}
    ranks = layout.zero_ranks if layout.zero >= result.training.framework.weights_stage else 1
    for name, _, nbytes in result.towers_left_out:
        if nbytes and states["weights"]:  # else they are in host memory, as all others
            ways = {"its weights alone": states["weights"], "trained whole": sum(states.values())}
            each = nbytes / ranks / states["weights"]
            others = [Alternative(way, each * size) for way, size in ways.items()][: 1 + whole]
            yield Unsaid(name, "left out", tuple(others), key=True)
