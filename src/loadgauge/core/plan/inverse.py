"""Inverse questions: the longest sequence, the fewest GPUs, the slowest network that suffices. Each answer is a plan.

Whether something fits is asked of the memory of every layout, without its time. Where an answer is sought by halving, it
rests on what is longer never needing less memory, which tests check.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loadgauge.core.base import days_words
from loadgauge.core.base.errors import ConfigError, Error, LayoutError, NothingFits
from loadgauge.core.base.verdict import RANK
from loadgauge.core.definitions.hardware.hardware import gpu as kind_of_gpu
from loadgauge.core.definitions.layout.axes import COMMUNICATION
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.schedule.stages import stages
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.states.states import model_states
from loadgauge.core.estimate.time import cost as money
from loadgauge.core.estimate.workings import view_of
from loadgauge.core.plan.batch.types import Batch, untimed
from loadgauge.core.plan.reopen import reopen
from loadgauge.core.plan.search import Case, Objective, cost_per_billion_tokens, search
from loadgauge.core.plan.space.axis_values import space_for
from loadgauge.core.plan.space.space import divisors

STEP = 1024
"""Tokens that a sequence length is found to."""
NICS = (25, 50, 100, 200, 400, 800, 1600, 3200)
"""Gbit/s of network adapters that are sold, per GPU."""
LINKS = (32, 64, 100, 200, 300, 450, 900)
"""GB/s of links inside a node that are sold, per GPU and direction: PCIe 4 and 5, NVLink from the P100 to Blackwell."""
MOST_BATCH = 2**16
"""Sequences of the largest batch that is tried."""


Progress = Callable[[str], None]


def quiet(text: str) -> None:
    """Report no progress."""


class Answer(NamedTuple):
    """An answer in words, its value, and the best layout with it.

    Of the largest micro-batch also: curve: the best layout with each of several sizes, the smallest first; tight: the
    largest that the card holds as predicted; dividing: the largest that divides the global batch
    """

    text: str
    value: Any
    best: Estimate
    curve: tuple[Estimate, ...] = ()
    tight: int | None = None
    dividing: int | None = None


def best_of(case: Case, objective: Objective, margin: float) -> Estimate | None:
    """Return the best layout of a case; None where none is valid or fits. margin: memory to be left free [bytes]."""
    try:
        return search([case], objective=objective, margin=margin, top=1, front=False).layouts[0]
    except (NothingFits, LayoutError):
        return None


End = Literal["high", "total"]
"""Memory that must fit: the upper end of the range, or the predicted total."""


def surest(ask: Callable[[End], Answer]) -> Answer:
    """Return the answer with layouts that fit; where there is none, the one with TIGHT layouts. Raises `NothingFits`."""
    try:
        return ask("high")
    except NothingFits:
        return ask("total")


def leanest(case: Case, end: End = "high") -> tuple[float, Layout | None]:
    """Return the least memory of all layouts [bytes] and the layout that needs it; no times are computed.

    end: whether of the upper end of the range, or of the memory as predicted

    >>> from loadgauge import cluster, gpu, model, training
    >>> kind = training("torchtitan")
    >>> space = space_for(model("llama-3.1-8b"), kind, 8, 8, 4096, locks={"pp": (1,)})
    >>> least, layout = leanest(Case(space=space, training=kind, cluster=cluster(gpu("h100-sxm5-80gb"), 8)), "total")
    >>> layout.tp, layout.zero, str(layout.recompute)
    (8, 0, 'full')
    """
    import numpy

    least, where = float("inf"), None
    for batch in case.batches(None, untimed):
        needed = _needed(batch, end)
        cheapest = int(numpy.argmin(needed))
        if needed[cheapest] < least:
            least, where = float(needed[cheapest]), (batch.grid, batch.structure, int(batch.places[cheapest]))
    return least, None if where is None else where[0].layout(*where[1:])


def _needed(batch: Batch, end: End) -> Any:
    return batch.high if end == "high" else batch.memory


def room(case: Case, limit: float) -> tuple[bool, bool]:
    """Return whether a layout needs at most `limit` [bytes] at the upper end of the range, and as predicted: `leanest` of either.

    Layouts that lower bounds rule out are not looked at, and none after one that fits for sure.
    """
    may = False
    for batch in case.batches(None, untimed, lambda low, _: low <= limit):
        if (batch.high <= limit).any():
            return True, True
        may = may or bool((batch.memory <= limit).any())
    return False, may


def with_space(case: Case, **changes: Any) -> Case:
    """Return the case with fields of its space replaced; the other axes keep their values."""
    return msgspec.structs.replace(case, space=msgspec.structs.replace(case.space, **changes))


def largest_sequence(
    case: Case, objective: Objective = "time", margin: float = 0.0, progress: Progress = quiet
) -> Answer:
    """Find the longest sequence with which a layout fits, in steps of `STEP` tokens; raises `NothingFits` below one step."""
    model, limit = case.space.model, case.cluster.gpu.capacity - margin
    longest = model.max_position_embeddings if model.learned_positions else None

    def ask(end: End) -> Answer:
        lean: list[Layout] = []

        def fits(steps: int) -> bool:
            tokens = steps * STEP
            if longest is not None and tokens > longest:
                return False
            progress(f"{tokens:,} tokens")
            for layout in lean[-1:]:  # which most often is the one that needs least here too
                longer = msgspec.structs.replace(layout, seq_len=tokens)
                if not longer.valid(model) and getattr(case.estimate(longer).memory, end) <= limit:
                    return True
            least, new = leanest(reopen(case, seq_len=tokens), end)
            lean.extend([new] if new is not None else [])
            return least <= limit

        steps = _most(fits)
        best = best_of(reopen(case, seq_len=steps * STEP), objective, margin) if steps else None
        if best is None:
            raise NothingFits(f"not even {STEP} tokens of {model.name} fit")
        return Answer(f"the longest sequence that {_fits(best)}: {steps * STEP:,} tokens", steps * STEP, best)

    return surest(ask)


def _fits(best: Estimate) -> str:
    """The verdict of the best layout, as a verb."""
    return {"fits": "fits", "depends": "fits as assumed"}.get(best.memory.verdict, "is TIGHT")


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, by doubling and halving; 0 where not even 1 does.

    >>> _most(lambda number: number <= 1000), _most(lambda number: False)
    (1000, 0)
    """
    low, high = 0, 1
    while high <= 2**16 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_micro_batch(
    case: Case, objective: Objective = "time", margin: float = 0.0, progress: Progress = quiet, batch: int | None = None
) -> Answer:
    """Find the largest micro-batch [sequences] with which a layout fits, and the best layouts of smaller ones.

    A micro-batch of n is planned with the least global batch of at least `batch` that suits every layout, a multiple of
    n x GPUs; where n divides `batch` and a layout fits with it, with `batch` itself. batch: what the user gave, if any
    """
    name, limit, wanted = case.space.model.name, case.cluster.gpu.capacity - margin, batch or 1
    unit = case.space.gpus * (2 if {"dualpipe", "dualpipev"} & set(case.space.schedule) else 1)
    rooms: dict[tuple[int, int], tuple[bool, bool]] = {}

    def sized(n: int, least: int) -> Case:
        return with_space(case, micro_batch=(n,), global_batch=n * unit * max(1, -(-least // (n * unit))))

    def fits(n: int, least: int, end: End) -> bool:
        at_size = sized(n, least)
        key = n, at_size.space.global_batch
        if key not in rooms:
            progress(f"micro-batch {n}")
            rooms[key] = room(at_size, limit)
        return rooms[key][end == "total"]

    def at(n: int) -> Estimate | None:
        progress(f"micro-batch {n}")
        exact = None
        if batch is not None and batch % n == 0:
            exact = best_of(with_space(case, micro_batch=(n,), global_batch=batch), objective, margin)
        return exact or best_of(sized(n, wanted), objective, margin)

    def largest(end: End) -> tuple[int, int]:
        """The largest that fits, and of those that divide the global batch."""
        # With the fewest micro-batches a layout needs least. If that leaves room for fewer sequences than the global batch has,
        # every size runs several micro-batches, and needs a little more.
        most = _most(lambda n: fits(n, 1, end))
        if most * unit < wanted:
            most = _most(lambda n: n <= most and fits(n, wanted, end))
        dividing = _largest_divisor(with_space(case, global_batch=batch), limit, end) if batch is not None else 0
        return max(most, dividing), dividing

    most, dividing = largest("high")
    tight, dividing_tight = largest("total")
    most, dividing = (most, dividing) if most else (tight, dividing_tight)
    best = at(most) if most else None
    if best is None:
        search([sized(1, wanted)], objective=objective, margin=margin)  # says what the nearest needs
        raise NothingFits(f"not even one sequence of {name} fits")
    sizes = {most, tight, dividing, *(2**power for power in range(most.bit_length()))} - {0}
    curve = {n: best if n == most else at(n) for n in sorted(sizes)}
    text = f"the largest micro-batch that {_fits(best)}: {most:,}, with a global batch of {_batches(best)}"
    if tight > most:
        text += f"; up to {tight:,} it is TIGHT"
    if batch is not None:
        text += f"; the largest that divides the global batch of {batch:,}: {dividing or 'none'}"
    points = tuple(point for point in curve.values() if point is not None)
    return Answer(text, most, best, points, tight, dividing or None)


def _batches(best: Estimate) -> str:
    """The global batch of a layout, and what it must be a multiple of."""
    multiple, batch = best.layout.dp * best.layout.micro_batch, best.layout.global_batch
    return f"{batch:,}" if multiple == batch else f"{batch:,} (any multiple of {multiple:,} will do)"


def _largest_divisor(case: Case, limit: float, end: End) -> int:
    """The largest micro-batch that fits in some layout with the global batch of the case; 0 where none does."""
    most = 0
    opened = with_space(case, micro_batch=divisors(case.space.global_batch))
    for batch in opened.batches(None, untimed, lambda low, _: low <= limit):
        rows = batch.places[_needed(batch, end) <= limit] // batch.grid.shape[1]
        if rows.size:
            most = max(most, int(batch.grid.columns["micro_batch"][rows].max()))
    return most


def sizes(most: int, node: int) -> Iterator[int]:
    """Yield the numbers of GPUs to try: divisors of a node, then whole nodes, up to `most`.

    >>> list(sizes(32, 8))
    [1, 2, 4, 8, 16, 24, 32]
    """
    yield from (size for size in divisors(node) if size <= most)
    yield from range(2 * node, most + 1, node)


def fewest_gpus(
    case: Case, objective: Objective = "time", margin: float = 0.0, progress: Progress = quiet, any_batch: bool = False
) -> Answer:
    """Find the fewest GPUs on which a layout fits, at most those of the case, and whether fewer are TIGHT. Raises `NothingFits`.

    any_batch: no global batch is said, so that each number has the multiple of it nearest to the case's
    """
    limit, batch = case.cluster.gpu.capacity - margin, case.space.global_batch
    tight: Case | None = None
    best, beside = None, ""
    for size in sizes(case.space.gpus, case.cluster.gpus_per_node):
        progress(f"{size} GPUs")
        try:
            fewer = reopen(case, gpus=size, global_batch=max(1, round(batch / size)) * size if any_batch else None)
        except Error:
            continue
        sure, may = room(fewer, limit)
        if sure and (best := best_of(fewer, objective, margin)) is not None:
            break
        tight = tight or (fewer if may and not sure else None)
    if best is not None and tight is not None:
        beside = f"; on {tight.space.gpus:,} it is TIGHT"
    elif tight is not None:
        best = best_of(tight, objective, margin)
    if best is None:
        raise NothingFits(f"{case.space.model.name} does not fit {case.space.gpus} x {case.cluster.gpu.name}")
    size = best.layout.gpus
    if any_batch:
        beside += f"; with a global batch of {best.layout.global_batch:,}, as none is said"
    return Answer(f"the fewest GPUs on which it {_fits(best)}: {size:,}{beside}", size, best)


def smallest_nic(
    case: Case, share: float, objective: Objective = "time", margin: float = 0.0, progress: Progress = quiet
) -> Answer:
    """Find the slowest network adapter with which exposed communication takes at most `share` of the step.

    Raises `NothingFits` where no adapter is enough, with what takes the most of the step then, and over which link.
    """
    if len(case.cluster.links) < 2:
        raise ConfigError("the GPUs are all in one domain, and need no adapter", key="find")
    speeds = [(f"{gigabits} Gbit/s", gigabits * 1e9 / 8) for gigabits in NICS]
    return _slowest_link(case, -1, "adapter", speeds, share, objective, margin, progress)


def smallest_link(
    case: Case, share: float, objective: Objective = "time", margin: float = 0.0, progress: Progress = quiet
) -> Answer:
    """Find the slowest link inside a node with which exposed communication takes at most `share` of the step; as `smallest_nic`."""
    if case.cluster.links[0].domain < 2:
        raise ConfigError("each GPU is a node of its own, without a link inside", key="find")
    speeds = [(f"{gigabytes} GB/s", gigabytes * 1e9) for gigabytes in LINKS]
    return _slowest_link(case, 0, "link", speeds, share, objective, margin, progress)


def _slowest_link(
    case: Case,
    tier: int,
    noun: str,
    speeds: Sequence[tuple[str, float]],
    share: float,
    objective: Objective,
    margin: float,
    progress: Progress,
) -> Answer:
    """Tries speeds of the link at `place`, the slowest first."""
    if case.cluster.topology is not None:
        raise ConfigError("asks for a link that --topology states", key="find")
    best = None
    for words, bandwidth in speeds:
        progress(words)
        links = list(case.cluster.links)
        links[tier] = msgspec.structs.replace(links[tier], bandwidth=bandwidth)
        slower = msgspec.structs.replace(case, cluster=msgspec.structs.replace(case.cluster, links=tuple(links)))
        best = best_of(slower, objective, margin)
        if best is not None and exposed(best) <= share:
            kept = f"{words} for each GPU keep exposed communication at {exposed(best):.1%} of the step"
            return Answer(f"the smallest {noun}: {kept}", bandwidth, best)
        if best is None:
            break  # no link makes room
    if best is None:
        where = f"{case.space.gpus} x {case.cluster.gpu.name}"
        raise NothingFits(f"no layout of {case.space.model.name} fits {where}, whatever the {noun}")
    raise NothingFits(
        f"not even {speeds[-1][0]} for each GPU keep exposed communication under {100 * share:g}% of the step: with the best"
        f" layout it is {exposed(best):.1%}; {_dominant(best, noun)}"
    )


def smallest_batch(
    case: Case, share: float, objective: Objective = "time", margin: float = 0.0, progress: Progress = quiet
) -> Answer:
    """Find the smallest global batch, of powers of two times the GPUs' divisors, that keeps exposed communication and idle time
    under `share` of the step. Raises `NothingFits` where none does, with the cause."""
    gpus, best, batch = case.space.gpus, None, 1
    if gpus == 1:
        answer = largest_micro_batch(case, objective, margin, progress)
        return answer._replace(text=f"one GPU waits for no other, so any global batch will do; {answer.text}")
    odd = gpus // (gpus & -gpus)
    while batch <= MOST_BATCH:
        for size in sorted({batch, batch * odd}):
            progress(f"{size} sequences")
            choice = best_of(reopen(case, global_batch=size), objective, margin)
            if choice is None:
                continue
            best = choice
            lost = _lost(choice)
            if lost <= share:
                words = f"{size:,} sequence{'s' * (size > 1)}: {lost:.1%} of the step is communication in the open, or waiting"
                return Answer(f"the smallest global batch: {words}", size, choice)
        batch *= 2
    if best is None:
        raise NothingFits(
            f"no layout of {case.space.model.name} fits {gpus} x {case.cluster.gpu.name}, whatever the batch"
        )
    raise NothingFits(
        f"no batch up to {MOST_BATCH:,} keeps communication and waiting under {100 * share:g}% of the step: with the best layout"
        f" it is {_lost(best):.1%}; {_dominant(best, 'batch')}"
    )


def _lost(best: Estimate) -> float:
    """Communication in the open, and the pipeline's bubble, as a share of the step."""
    assert best.time is not None
    return exposed(best) + best.time.parts["bubble"] / best.time.step


def _dominant(best: Estimate, changed: str = "adapter") -> str:
    """Return the largest exposed communication of a step and its link, in words."""
    assert best.time is not None
    parts = best.time.parts
    component = max(COMMUNICATION, key=parts.__getitem__)
    rows = [row for row in best.network if row.lane == component]
    outer, inner = (sum(row.exposed_seconds for row in rows if row.link == link) for link in ("outer", "inner"))
    there = "over the network" if outer > inner else "inside a node"
    helps = (changed == "adapter") == (outer > inner)
    why = f"{there}, latency included" if helps or changed == "batch" else f"{there}, where no {changed} changes it"
    return f"most of it is {component}, {parts[component] / best.time.step:.1%} of the step, {why}"


def exposed(best: Estimate) -> float:
    """Return exposed communication as a share of the step time (0 to 1)."""
    assert best.time is not None
    return sum(best.time.parts[component] for component in COMMUNICATION) / best.time.step


def largest_model(
    case: Case,
    models: Sequence[ModelSpec],
    objective: Objective = "time",
    margin: float = 0.0,
    progress: Progress = quiet,
) -> Answer:
    """Find the model with the most parameters that fits; models that cannot be estimated are skipped. Raises `NothingFits`."""
    return surest(lambda end: _largest_model(case, models, objective, margin, progress, end))


def _largest_model(
    case: Case, models: Sequence[ModelSpec], objective: Objective, margin: float, progress: Progress, end: End
) -> Answer:
    limit, space = case.cluster.gpu.capacity - margin, case.space
    for model in sorted(models, key=lambda model: -parameters(model).total):
        try:
            if held_bytes(model, case.training) > limit * space.gpus:
                continue
            progress(model.name)
            other = space_for(
                model,
                case.training,
                space.gpus,
                space.global_batch,
                space.seq_len,
                locks=case.locks,
                lengths=space.lengths,
                padded=space.padded,
                base=space.base,
            )
            larger = msgspec.structs.replace(case, space=other)
            if not room(larger, limit)[end == "total"]:
                continue
            best = best_of(larger, objective, margin)
        except Error:
            continue
        if best is not None:
            return Answer(
                f"the largest model that {_fits(best)}: {model.name}, {best.params:,} parameters", model.name, best
            )
    raise NothingFits("none of the models fits")


def held_bytes(model: ModelSpec, kind: Training) -> float:
    """Return the least bytes of model states that all GPUs together hold, whatever the layout: as if nothing were held twice.

    Without gradients, which may wait; of the optimizer's states none that are on the host or depend on how tensors are cut.

    >>> from loadgauge import model, training
    >>> round(held_bytes(model("llama-3.1-8b"), training("megatron")) / 8_030_261_248, 3)
    14.0
    """
    if kind.offload == "all":
        return 0.0
    whole = Layout(seq_len=1)
    memory = MemoryModel(model, whole, kind, view_of(whole, kind))
    weights = memory.weighed(stages(model, whole)[0])[1].all
    quantised = kind.lora is not None and kind.lora.quantised
    states = model_states(weights, kind.precision, kind.optimizer, zero=3, quantised=quantised)
    elsewhere = kind.offload != "none" or kind.optimizer.by_tensor or kind.optimizer.one_block
    return float(states.weights + (0 if elsewhere else states.optimizer))


def days_for(best: Estimate, tokens: float, price: float | None = None) -> float:
    """Return the days that a layout takes for so many tokens. price: whose instances may be taken away (`progress`)"""
    assert best.time is not None
    share, _ = money.progress(price, best.layout.gpus)
    return float(money.training_seconds(tokens, best.time.tokens, best.time.step)) / money.DAY / share


def cheapest_gpu(
    on: Callable[[str], Sequence[Case]],
    prices: dict[str, float],
    margin: float = 0.0,
    progress: Progress = quiet,
    timely: Callable[[Sequence[Case]], Estimate] | None = None,
    tokens: float | None = None,
) -> tuple[list[Answer], list[str]]:
    """Rank kinds of GPU by the cost of a billion tokens, those that fit first, each on the best number of GPUs of its cases.

    on: the cases on a kind of GPU, which has kernels of its own; prices: of one GPU-hour, by GPU; timely: the best that meets a
    date; tokens: of the whole run, whose days and cost are said with it. Returns the answers, and for kinds
    without one the reason. Raises `NothingFits`.
    """
    answers, rest = [], []
    for name, price in prices.items():
        card = kind_of_gpu(name)
        progress(card.name)
        try:
            there = [msgspec.structs.replace(case, price=price) for case in on(name)]
            if timely is None:
                best = search(there, objective="money", margin=margin, top=1, front=False).layouts[0]
            else:
                best = timely(there)
        except Error as error:
            rest.append(f"{card.name}: {error}")
            continue
        cost = cost_per_billion_tokens(price, best)
        many = "" if timely is None else f"{best.layout.gpus:,} x "
        taken = f", taken away every {hours:g} h" if (hours := getattr(price, "hours", None)) else ""
        words = f"{cost:,.2f} for a billion tokens"
        if tokens is not None:
            words += f", {cost * tokens / 1e9:,.0f} for all, in {days_words(days_for(best, tokens, price))}"
        answers.append(Answer(f"{many}{card.name} at {price:g} a GPU-hour{taken}: {words}", cost, best))
    if not answers:
        raise NothingFits(f"it fits none of {', '.join(prices)}: {'; '.join(rest)}")
    return sorted(answers, key=lambda answer: (RANK[answer.best.memory.verdict], answer.value)), rest


def in_time(cases: Sequence[Case], tokens: float, days: float, margin: float) -> Estimate:
    """Return the cheapest of the layouts that are the fastest on their numbers of GPUs and see the tokens in time.

    Raises `NothingFits` where none does: at once where a forward of all tokens alone takes longer at the peak.
    """
    card, most = cases[0].cluster.gpu, max(case.space.gpus for case in cases)
    peak = max(card.peak(name) for name in ("bf16", "fp16", "fp8") if getattr(card.peaks, name) is not None)
    least = 2 * parameters(cases[0].space.model).active * tokens / (most * peak) / money.DAY
    if least > days:
        raise NothingFits(f"takes {days_words(least)} and more, {days:g} are allowed")
    fastest = [layout for case in cases for layout in search([case], margin=margin, top=1, front=False).layouts]
    price = cases[0].price
    timely = [layout for layout in fastest if days_for(layout, tokens, price) <= days]
    if not timely:
        least = min(days_for(layout, tokens, price) for layout in fastest)
        raise NothingFits(f"takes {days_words(least)}, more than {days:g}")
    return min(timely, key=lambda layout: cost_per_billion_tokens(price or 1.0, layout))
