"""The plan of a server: the layout, the batch and the number of GPUs with which requests are answered fastest, or with fewest GPUs.

Every layout of a replica is estimated with batches of powers of two and the largest that its memory and the limits allow. Memory
and both times grow with the batch and the context, so the largest of each is found by halving.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from loadgauge.core.base.errors import ConfigError, Error, NothingFits, NotStated
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE, domain_of
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import FORMATS, Task
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.resolve import resolve
from loadgauge.core.resolve.inference import resolve_inference
from loadgauge.core.serving.result import Answer

Sought = Literal["seq-len", "batch", "gpus", "gpu"]
ANSWER = 512
"""Tokens of an answer, where nothing is said."""
MOST_BATCH, MOST_CONTEXT = 65_536, 10**7


FURTHER = 9
"""Batches beyond the largest by halving that are looked at one by one, where the first token has a limit."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a server: of a first token and of each further one [s], and the requests that come [1/s]."""

    first: float | None = None
    token: float | None = None
    requests: float | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of replicas with a batch, estimated."""

    job: Job
    request: dict[str, Any]
    answer: Answer

    @property
    def batch(self) -> int:
        """Requests at a time, of all replicas."""
        asked = self.answer.asked
        return asked.batch * asked.replicas * asked.attentions

    @property
    def first(self) -> float:
        """Seconds to a first token: of a server, its queue included."""
        answer = self.answer
        if answer.served is not None:
            return answer.served.first
        return 0.0 if answer.first is None else answer.first.seconds * answer.software

    @property
    def tokens(self) -> float:
        """Generated tokens a second, of all replicas; of a score, those that are read."""
        if self.answer.asked.task == "forward":
            return self.batch * self.answer.asked.context / self.first if self.first else 0.0
        return self.answer.tokens_per_second or 0.0

    @property
    def per_gpu(self) -> float:
        """The same a GPU."""
        return self.tokens / self.answer.gpus

    @property
    def requests(self) -> float:
        """Requests that are answered a second, of all replicas."""
        asked = self.answer.asked
        return self.tokens / (asked.context if asked.task == "forward" else asked.answer)

    @property
    def hourly(self) -> float:
        """Price of an hour of all its GPUs; 0 without a price."""
        return (self.answer.price or 0.0) * self.answer.gpus

    @property
    def command(self) -> str:
        """The command that estimates it."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self.request.items() if value is not None]
        return " ".join([self.job.command(), f"--task {self.answer.asked.task}", *words])

    def within(self, limits: Limits) -> bool:
        """Return whether it fits and keeps the limits of time; where times are not known, none is kept."""
        if self.answer.first is None and limits != Limits():
            return False
        token = self.answer.token or 0.0
        late = limits.first is not None and self.first > limits.first
        slow = limits.token is not None and token > limits.token
        return self.answer.memory.verdict == "fits" and not late and not slow

    def lacks(self, limits: Limits) -> tuple[bool, float, float]:
        """Return how far it is from what is asked: whether memory is short, times over their limits, and bytes; less is nearer."""
        late = self.first / limits.first if limits.first else 0.0
        slow = (self.answer.token or 0.0) / limits.token if limits.token else 0.0
        short = self.answer.memory.verdict != "fits"
        return short, 0.0 if short else max(late, slow), self.answer.memory.high


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Servers that read prompts, and servers that generate: a replica of each, how many, and seconds in which a prompt's cache goes
    from one to the other."""

    reading: Choice
    generating: Choice
    readers: int
    generators: int
    handing: float

    @property
    def gpus(self) -> int:
        """GPUs of all."""
        return self.readers * self.reading.answer.gpus + self.generators * self.generating.answer.gpus

    @property
    def requests(self) -> float:
        """Requests that are answered a second: the slower side's."""
        return min(self.readers * self.reading.requests, self.generators * self.generating.requests)

    @property
    def first(self) -> float:
        """Seconds to a first token, the cache's way included."""
        return self.reading.first + self.handing + self.generating.first


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a search: the choices that keep the limits, the best first; nearest: of none, the one that lacks least.

    front: those of which no other has more tokens a second both a GPU and a user; assumed: what nobody said
    longest: tokens that the model has positions for; apart: servers that only read beside such as only generate, if asked for
    left_out: kinds of GPU without a choice, each with the reason
    """

    choices: tuple[Choice, ...]
    front: tuple[Choice, ...]
    looked: int
    assumed: dict[str, str]
    longest: int
    nearest: Choice | None = None
    apart: Apart | None = None
    left_out: tuple[str, ...] = ()


def layouts(job: Job, gpus: int, axes: dict[str, tuple[int, ...]], *, experts: bool) -> Iterator[Job]:
    """Yield every layout of whole replicas on some GPUs. axes: values of tp, pp and ep that are locked or narrowed

    >>> [(layout.tp, layout.pp) for layout in layouts(Job("llama-3.1-8b"), 4, {}, experts=False)]
    [(1, None), (None, 2), (None, 4), (2, None), (2, 2), (4, None)]
    """
    sizes = tuple(size for size in range(1, gpus + 1) if gpus % size == 0)
    for tp in axes.get("tp", tuple(size for size in sizes if size <= GPUS_PER_NODE)):
        for pp in axes.get("pp", sizes):
            for ep in axes.get("ep", sizes if experts else (1,)):
                whole = not max(tp, ep) % min(tp, ep) and not gpus % (pp * max(tp, ep))
                if whole:
                    degrees = {
                        axis: size if size > 1 else None for axis, size in {"tp": tp, "pp": pp, "ep": ep}.items()
                    }
                    # Where none is said, a layout is looked for that holds the model.
                    alone = {"tp": 1} if gpus > 1 and not any(degrees.values()) else {}
                    yield job.replace(gpus=gpus, **degrees | alone)


def plan_serving(
    job: Job,
    request: dict[str, Any],
    axes: dict[str, tuple[int, ...]],
    limits: Limits,
    sought: Sought | None = None,
    task: Task = "generate",
) -> Plan:
    """Return the layouts and batches that answer most, or what is sought. Raises `ConfigError` without --gpu.

    request: fields of `Inference` as flags say them, formats with commas between. Without a `batch`, each layout has the one that
    answers most.

    >>> job = Job("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=2)
    >>> plan = plan_serving(job, {"context": 4096, "answer": 512}, {}, Limits(token=0.02))
    >>> plan.choices[0].answer.memory.verdict, plan.choices[0].answer.token <= 0.02
    ('fits', True)
    """
    if job.gpu is None:
        raise ConfigError("is missing: a plan is for a kind of GPU (`loadgauge gpus` lists them)", key="gpu")
    usual: dict[str, Any] = {"server": "vllm", "answer": ANSWER} if task == "generate" else {}
    assumed = {f"--{name.replace('_', '-')}": str(value) for name, value in usual.items() if request.get(name) is None}
    request = usual | {name: value for name, value in request.items() if value is not None}
    if job.gpus is None and sought is None and limits.requests is None:
        sought, assumed["--find"] = "gpus", "gpus (no --gpus is said)"
    fewest = limits.requests is not None or sought == "gpus"
    if job.gpus is None and not fewest:
        raise ConfigError("is missing; give it, or --find gpus", key="gpus")
    several = [[(name, each) for each in request[name].split(",")] for name in FORMATS if name in request]
    rows: list[Choice] = []
    searches = [_Search(job, request | dict(each), limits, task) for each in itertools.product(*several)]
    for search in searches:
        every = layouts(job, job.gpus or 1, axes, experts=search.experts)
        rows += search.fewest(axes) if fewest else search.of_layouts(every, sought)
    choices = tuple(sorted((row for row in rows if row.within(limits)), key=_order(sought, limits)))
    looked = [row for search in searches for row in search.tried.values()]
    search = searches[0]
    return Plan(
        choices=choices, front=_front(choices), looked=len(looked), longest=search.longest,
        assumed={name: value for name, value in (search.assumed | assumed).items() if name not in search.open},
        nearest=None if choices or not looked else min(looked, key=lambda row: row.lacks(limits)),
    )  # fmt: skip


def plan_apart(job: Job, request: dict[str, Any], axes: dict[str, tuple[int, ...]], limits: Limits) -> Plan:
    """Return a plan of servers that do both, and beside it the replicas for prompts and for answers that answer most on the GPUs,
    or with the fewest GPUs the requests; no such where no two of them keep the limits. Raises `ConfigError` and `NotStated`.

    >>> job = Job("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=2)
    >>> split = plan_apart(job, {"context": 4096, "answer": 256}, {}, Limits(token=0.02)).apart
    >>> split.gpus, split.generating.answer.token <= 0.02, split.readers, split.generators
    (2, True, 1, 1)
    """
    if limits.requests is None and job.gpus is None:
        raise ConfigError("is missing; give it, or --requests", key="gpus")
    together = plan_serving(job, request, axes, limits)
    usual: dict[str, Any] = {"server": "vllm", "answer": ANSWER}
    request = usual | {name: each for name, each in request.items() if each is not None}
    request["context"] = request.get("context") or _Search(job, request, limits, "generate").asked.context
    prompt = request["context"] - request["answer"]
    handed = Engine.parse(f"{request['server']}{',' if ':' in request['server'] else ':'}handed=true", "server").text()
    sides = []
    for changes, limit in (
        ({"context": prompt + 1, "answer": 1}, Limits(first=limits.first)),
        ({"server": handed}, Limits(first=limits.first, token=limits.token)),
    ):
        search = _Search(job.replace(gpus=None), request | changes, limit, "generate")
        sides.append(list(search.replicas(axes, lambda: job.gpus or 8 * GPUS_PER_NODE)))
    card = gpu(str(job.gpu))
    machines, why = resolve.cluster_of(job, card, job.gpus or 2 * domain_of(card, job.gpus_per_node))
    if machines is None:
        raise NotStated(why)
    link = machines.links[-1].bandwidth
    splits: list[Apart] = []
    for reading, generating in itertools.product(*sides):
        held = generating.answer.memory.cache / generating.answer.asked.batch * prompt / request["context"]
        own, other = reading.answer.gpus, generating.answer.gpus
        handing = held * other / min(own, other) / link
        split = Apart(reading=reading, generating=generating, readers=1, generators=1, handing=handing)
        if limits.first is not None and split.first > limits.first:
            continue
        if limits.requests is not None:
            counts = [(math.ceil(limits.requests / reading.requests), math.ceil(limits.requests / generating.requests))]
        else:
            counts = [(many, ((job.gpus or 0) - many * own) // other) for many in range(1, (job.gpus or 0) // own + 1)]
        splits += [msgspec.structs.replace(split, readers=a, generators=b) for a, b in counts if b > 0]
    by = (lambda each: (each.gpus, -each.requests)) if limits.requests else (lambda each: (-each.requests, each.gpus))
    return msgspec.structs.replace(together, apart=min(splits, key=by, default=None))


def cheapest_gpu(
    job: Job,
    request: dict[str, Any],
    axes: dict[str, tuple[int, ...]],
    limits: Limits,
    prices: dict[str, float],
    task: Task = "generate",
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return the cheapest choices of each kind of GPU: an hour of the GPUs that answer the requests, or without those a request.

    prices: of one GPU-hour, by GPU; the rest as of `plan_serving`, and without --gpus each kind has as few as hold a replica

    >>> job, prices = Job("llama-3.1-8b"), {"h100-sxm5-80gb": 2.5, "l4": 0.7, "gtx1080ti": 0.1}
    >>> plan = cheapest_gpu(job, {"context": 4096, "answer": 512}, {}, Limits(token=0.02, requests=2.0), prices)
    >>> [(row.answer.gpu.id, row.hourly) for row in plan.choices[:1]]
    [('h100-sxm5-80gb', 2.5)]
    """
    plans, left_out = [], []
    for name, price in prices.items():
        progress(name)
        try:
            plan = plan_serving(job.replace(gpu=name, price=price), request, axes, limits, task=task)
        except Error as error:
            left_out.append(f"{name}: {error}")
            continue
        plans.append(plan)
        if not plan.choices:
            miss = plan.nearest
            short = miss is None or miss.answer.memory.verdict != "fits"
            left_out.append(f"{name}: {'it does not fit' if short else 'nothing keeps the limits'}")
    if not plans:
        raise NothingFits("; ".join(left_out))
    choices = tuple(sorted((row for plan in plans for row in plan.choices), key=_order("gpu", limits)))
    misses = () if choices else tuple(plan.nearest for plan in plans if plan.nearest is not None)
    return msgspec.structs.replace(
        plans[0],
        choices=choices,
        front=_front(choices, money=True),
        looked=sum(plan.looked for plan in plans),
        left_out=tuple(left_out),
        nearest=min(misses, key=lambda row: row.lacks(limits), default=None),
    )


def _order(sought: Sought | None, limits: Limits) -> Callable[[Choice], tuple[Any, ...]]:
    if sought == "seq-len":
        return lambda row: (-row.answer.asked.context, row.answer.token or 0.0)
    if sought == "batch":
        return lambda row: (-row.batch, row.answer.token or 0.0)
    if sought == "gpu" and limits.requests is None:
        return lambda row: (row.hourly / row.requests if row.requests else math.inf, row.answer.token or 0.0)
    if sought == "gpu":
        return lambda row: (row.hourly, -row.requests)
    if sought == "gpus" or limits.requests is not None:
        return lambda row: (row.answer.gpus, -row.requests)
    return lambda row: (-row.per_gpu, row.answer.token or 0.0)


def _front(choices: tuple[Choice, ...], *, money: bool = False) -> tuple[Choice, ...]:
    front: list[Choice] = []
    by = _order("gpu" if money else None, Limits())
    for row in sorted(choices, key=by):
        if not front or (row.answer.token or 0.0) < (front[-1].answer.token or 0.0):
            front.append(row)
    return tuple(front)


class _Search:
    """Estimates of layouts, each once."""

    def __init__(self, job: Job, request: dict[str, Any], limits: Limits, task: Task) -> None:
        self.job, self.request, self.limits, self.task = job, request, limits, task
        self.tried: dict[tuple[Job, int | None, int | None], Choice] = {}
        self.refused = ""
        self.open = {"--batch"} if "batch" not in request else set()
        alone = job.replace(gpus=None, tp=None, pp=None, ep=None)
        answer, self.assumed = resolve_inference(alone, task, request)
        self.experts = answer.model.has_experts
        self.asked, self.longest = answer.asked, answer.model.max_position_embeddings or MOST_CONTEXT

    def look(self, layout: Job, **changes: int) -> Choice | None:
        """Return the estimate of a layout; None where there is none."""
        request = self.request | changes
        key = (layout, request.get("batch"), request.get("context"))
        if key not in self.tried:
            try:
                answer, _ = resolve_inference(layout, self.task, request)
            except Error as error:
                self.refused = str(error)
                return None
            self.tried[key] = Choice(job=layout, request=request, answer=answer)
        return self.tried[key]

    def of_layouts(self, every: Iterator[Job], sought: Sought | None) -> list[Choice]:
        """Return the candidates of each layout: with the batch that is given, the largest, or those between."""
        rows: list[Choice] = []
        looked = []
        for layout in every:
            looked.append(layout)
            if sought == "seq-len":
                self.open = {"--context"}
                rows += self.largest(layout, "context", self.asked.answer + 1, self.longest)
            elif sought == "batch":
                rows += self.largest(layout, "batch", 1, MOST_BATCH)
            elif self.request.get("batch") is not None:
                rows += filter(None, [self.look(layout)])
            else:
                rows += self.batches(layout)
        if not self.tried:  # nowhere does the least fit: which lacks least?
            least = (
                {"context": self.asked.answer + 1} if sought == "seq-len" else {"batch": self.request.get("batch") or 1}
            )
            for layout in looked:
                self.look(layout, **least)
        if not self.tried:
            raise ConfigError(self.refused or "no layout of these GPUs is one of whole replicas", key="gpus")
        return rows

    def batches(self, layout: Job) -> list[Choice]:
        """Return a layout with batches of powers of two within the limits, and the largest there is."""
        top = self.largest(layout, "batch", 1, MOST_BATCH)
        size, rows = 1, []
        while top and size < top[0].answer.asked.batch:
            rows.append(self.look(layout, batch=size))
            size *= 2
        every = [*(row for row in rows if row is not None), *top]
        best = max(every, key=lambda row: row.per_gpu, default=None)
        # What prompts take of a round goes in steps, so that a batch a little smaller may answer more.
        while best is not None and best.answer.asked.batch > 1:
            less = self.look(layout, batch=best.answer.asked.batch - 1)
            if less is None or not less.within(self.limits) or less.per_gpu <= best.per_gpu:
                break
            every.append(best := less)
        return every

    def largest(self, layout: Job, name: str, low: int, high: int) -> list[Choice]:
        """Return a layout with the largest batch or context within the limits, by halving; nothing where the least is not."""

        def within(value: int) -> bool:
            if self.limits.first is None and self.limits.token is None:
                try:
                    answer, _ = resolve_inference(layout, self.task, self.request | {name: value}, whole=False)
                except Error as error:
                    self.refused = str(error)
                    return False
                return answer.memory.verdict == "fits"
            row = self.look(layout, **{name: value})
            return row is not None and row.within(self.limits)

        if not within(low):
            return []
        step = low
        while step < high and within(min(2 * step, high)):
            step = min(2 * step, high)
        low, high = step, min(2 * step, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        best = high if within(high) else low
        if name == "batch" and self.limits.first is not None:
            # How prompts share the pieces of a pass makes a first token wait less with some larger batches.
            best = max((size for size in range(best + 1, best + FURTHER) if within(size)), default=best)
        last = self.look(layout, **{name: best})
        return [] if last is None else [last]

    def replicas(self, axes: dict[str, tuple[int, ...]], most: Callable[[], int]) -> Iterator[Choice]:
        """Yield each layout of one replica with its batches within the limits, of 1, 2, 4, ... GPUs up to a node's eight times."""
        size = 1
        while size <= min(8 * GPUS_PER_NODE, most()):
            for layout in layouts(self.job, size, axes, experts=self.experts):
                if size != (layout.pp or 1) * max(layout.tp or 1, layout.ep or 1):
                    continue  # more replicas of a smaller layout, which was looked at
                alone = [self.look(layout)] if self.request.get("batch") is not None else self.batches(layout)
                yield from (row for row in alone if row is not None and row.within(self.limits))
            size *= 2

    def fewest(self, axes: dict[str, tuple[int, ...]]) -> list[Choice]:
        """Return of each layout of one replica the fewest replicas that answer the requests; without requests, one."""
        rows: list[Choice] = []

        def most() -> int:
            return min((row.answer.gpus for row in rows), default=8 * GPUS_PER_NODE)

        for row in self.replicas(axes, most):
            needed = 1
            if self.limits.requests is not None:
                needed = -int(-self.limits.requests // row.requests) if row.requests else MOST_BATCH
            many = self.look(row.job.replace(gpus=row.answer.gpus * needed), batch=row.answer.asked.batch)
            rows += [] if many is None else [many]
        return rows
