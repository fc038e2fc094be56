"""Seconds of a step of a task, by phase: answers, scores, updates, weights; one after another, or two sides at once.

Trainer and scorers take what the same model takes in training: its forward alone, or the whole step, over the tokens that there
are: packed into micro-batches as long as the longest sequence, or padded where the trainer is one of transformers. Answers take
`tail.generation` on each replica. Where both sides have GPUs of their own and answers may be old, a step takes the slower side:
with answers of up to k updates ago, k batches are on their way at once, and the tail of one is hidden under the next.
"""

import math
from typing import Any

import msgspec

from loadgauge.core.base.errors import NotStated
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.layout.axes import AXES
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.training.tasks import Pass
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.time.step import Time
from loadgauge.core.post_training.memory import PostMemory
from loadgauge.core.post_training.roles import Member, Run
from loadgauge.core.post_training.sync import Sync, sync
from loadgauge.core.post_training.tail import Phase, Step, generation, in_turns
from loadgauge.core.post_training.walk import Sides, Walk, walk
from loadgauge.core.serving.decode import Server

Side = str
"""The GPUs that a phase keeps busy: trainer, rollout, both, or the roles that have their own."""
FILL = 0.95
"""Share of a packed micro-batch that is filled: first-fit of sequences that are a fraction of it long."""
REST = 0.05
"""Seconds outside of all phases over those inside: data, advantages, rewards by rule, logging (verl's columns add up to 93 to 97 %
of its printed steps; source: verl, docs/advance/one_step_off.md and fully_async.md)."""
SPECULATION = 0.61
"""Speed gained over the tokens accepted in a step of speculative decoding (3.32 gave 2.03; source: skyrl, spec_decode.mdx)."""
TURNS = 8
"""Turns at most whose reading is timed; those between are as those beside them."""
SOFTWARE = 1.30
"""Seconds of a phase over those of its kernels, engine and traffic: ranks that wait for the fullest, gathering, tokenising. Of runs
of one source 1.35 in the middle, of another 1.26; each is scored with the other's (docs/rollout.md)."""
LOW, HIGH = 0.77, 1.40
"""Factors on a step between which 80 % of measured ones lie, each source left out (docs/rollout.md)."""


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a phase, 80 % between low and high. side: the GPUs that it keeps busy"""

    name: str
    role: str
    side: Side
    seconds: float
    low: float
    high: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, 80 % between low and high.

    phases: in their order; on one set of GPUs, or with staleness 0, they add up to `step`
    sides: seconds of rollout and of trainer, where they run at once; bound: that which waits less; beside: how both wait
    generation: of the answers, on the replica that ends last; tokens: of prompts and answers of a step, or trained on in one
    """

    step: float
    low: float
    high: float
    phases: tuple[PhaseTime, ...]
    sides: dict[str, float]
    bound: str
    gpus: int
    tokens: float
    generation: Phase | None = None
    sync: Sync | None = None
    prompts: float = 0.0
    preempted: float = 0.0
    beside: Walk | None = None

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of a step over its seconds and all GPUs [tokens/s]: of prompts and answers, or those that are trained on."""
        return self.tokens / self.step / self.gpus

    def days(self, steps: int) -> float:
        """Days of so many steps."""
        return steps * self.step / 86400

    def money(self, steps: int, price: float) -> float:
        """Money for so many steps, at a price of a GPU-hour."""
        return price * self.gpus * 24 * self.days(steps)


Known = dict[Any, Any]
"""Times of parts that were found before, for those who ask for many runs."""


def step_time(
    run: Run, pool: float | None = None, *, software: float = SOFTWARE, cache: Known | None = None, walked: bool = True
) -> StepTime:
    """Return the seconds of a step. Raises `NotStated` where the cluster is not known.

    pool: bytes of a card's cache (`engine.Card.pool`), None: of any size; software: as `SOFTWARE`; cache: filled with the parts
        that are found; walked: not at least, by the slower side alone, but by a walk of both

    >>> from loadgauge.core.resolve.posttrain import resolve_posttrain
    >>> from loadgauge.core.definitions.job.job import Job
    >>> job = Job("qwen2.5-7b", task="grpo", gpu="h100-sxm5-80gb", gpus=8, zero=3, answers="exp:1000,4096")
    >>> found = step_time(resolve_posttrain(job)[0])
    >>> abs(sum(phase.seconds for phase in found.phases) / found.step - 1) < 1e-9
    True
    """
    member = run.trained
    if member.cluster is None:
        raise NotStated(
            "the time of a step needs a --gpu"
            if run.gpu is None
            else f"what joins {run.placement.gpus:,} x {run.gpu.name} is not stated (--nic-bandwidth, --gpus-per-node)"
        )
    phases: list[PhaseTime] = []
    cache = {} if cache is None else cache
    if "answers" not in cache:  # sums over thousands of lengths
        cache["answers"] = moments(run.sequences.answers, 0)
    generated = None if run.engine is None else _answers(run, pool, software, cache)
    if generated is not None:
        phases.append(generated.phase)
    for phase_pass in run.task.passes:
        if phase_pass.does != "generate" and phase_pass.role in run.members:
            phases.append(
                _pass(run, phase_pass, run.members[phase_pass.role], software if run.engine is not None else 1.0, cache)
            )
    moved = None
    if run.engine is not None and not run.engine.inside:
        moved = sync(run)
        phases.append(
            PhaseTime(
                name="weight sync",
                role=member.role.name,
                side="both",
                seconds=moved.seconds,
                low=moved.seconds * moved.low,
                high=moved.seconds * moved.high,
            )
        )
    if run.engine is None:
        tokens = float(cache[member.role.name, member.layout].tokens)
    else:
        tokens = run.sequences.number * (run.sequences.prompt + cache["answers"][0])
    beside, hidden = None, _hidden(run, phases)
    if generated is not None and moved is not None and not run.placement.colocated and run.staleness > 0:
        update = sum(each.seconds for each in phases if each.side not in ("rollout", "both")) - hidden
        asked = msgspec.structs.replace(generated.beside, update=update, sync=moved.seconds)
        beside = generated.paced(asked)
        if asked.walks and walked:
            if asked not in cache:
                cache[asked] = walk(run.sequences.answers, generated.step, asked)
            beside = max(beside, cache[asked], key=lambda each: each.step)
        busy = beside.step - beside.idle - moved.seconds / asked.every
        phases[0] = generated.of(busy)
        phases[-1] = msgspec.structs.replace(
            phases[-1], **{name: getattr(phases[-1], name) / asked.every for name in ("seconds", "low", "high")}
        )
    sides = dict.fromkeys(("rollout", "trainer", *(each.side for each in phases)), 0.0)
    for each in phases:
        sides[each.side] += each.seconds
    inside = sum(sides.values()) - hidden if beside is None else beside.step
    if run.engine is not None:
        rest = REST * inside
        phases.append(PhaseTime(name="rest", role="host", side="both", seconds=rest, low=0.0, high=2 * rest))
        inside += rest
    step = inside
    bound = max(phases, key=lambda phase_pass: phase_pass.seconds).name
    if beside is not None:
        bound = "rollout" if beside.waits > beside.idle else "trainer"
    low, high = (
        (LOW, HIGH)
        if run.engine is not None
        else (phases[0].low / phases[0].seconds, phases[0].high / phases[0].seconds)
    )
    return StepTime(
        step=step,
        low=step * low,
        high=step * high,
        phases=tuple(phases),
        sides={}
        if beside is None and not run.placement.apart
        else {side: took for side, took in sides.items() if side != "both"},
        bound=bound,
        gpus=run.placement.gpus,
        tokens=tokens,
        generation=None if generated is None else generated.generation,
        sync=moved,
        prompts=0.0 if generated is None else generated.prompts,
        preempted=0.0 if generated is None else generated.preempted,
        beside=beside,
    )


def _hidden(run: Run, phases: list[PhaseTime]) -> float:
    """Seconds of passes on GPUs of their own beside which others take longer: all score at once, and then all update at once."""
    hidden = 0.0
    for does in ("forward", "update") if run.placement.apart else ():
        names = {each.phase for each in run.task.passes if each.does == does}
        by_side: dict[str, float] = {}
        for phase in phases:
            if phase.name in names:
                by_side[phase.side] = by_side.get(phase.side, 0.0) + phase.seconds
        hidden += sum(by_side.values()) - max(by_side.values(), default=0.0)
    return hidden


def timed(run: Run, memory: PostMemory) -> tuple[StepTime | None, str]:
    """Return the time of a step with the cache that memory leaves, or why there is none."""
    if memory.engine is not None and memory.engine.unstarted:
        return None, memory.engine.unstarted
    try:
        return step_time(run, None if memory.engine is None or run.gpu is None else memory.engine.pool), ""
    except NotStated as error:
        return None, str(error)


class _Made(msgspec.Struct, frozen=True):
    """Generation by itself: its phase, and beside a trainer its side of a walk, without the trainer's, and an engine's step.

    least: seconds of all its tokens in full slots
    """

    phase: PhaseTime
    generation: Phase
    prompts: float
    preempted: float
    beside: Sides
    step: Step
    least: float

    def paced(self, asked: Sides) -> Walk:
        """Return a step that takes its slower side and what both wait for: at least, or where no answer goes on at a move of
        weights as it is, for then a step asks for its answers and waits until the last of them."""
        busy = self.least if asked.walks else self.phase.seconds
        longer = max(busy, asked.update)
        running = self.generation.running * (1 - self.generation.idle) * asked.replicas
        return Walk(
            longer + asked.sync / asked.every,
            longer - asked.update,
            longer - busy,
            asked.staleness,
            running,
            asked.partial,
        )

    def of(self, seconds: float) -> PhaseTime:
        """Return its phase where it takes other seconds."""
        share = seconds / self.phase.seconds
        return msgspec.structs.replace(
            self.phase, seconds=seconds, low=self.phase.low * share, high=self.phase.high * share
        )


def server_of(run: Run) -> Server:
    """Return a replica of the rollout's engine. Raises `NotStated` where its cluster is not known."""
    engine = run.engine
    assert engine is not None
    if run.rollout_cluster is None:
        raise NotStated(run.apart or "the time of answers needs a --gpu, and what joins its GPUs")
    asked = Inference(
        task="generate",
        context=run.sequences.longest,
        answer=1,
        tp=engine.tp,
        pp=engine.pp,
        ep=engine.ep,
        weight_format=engine.weights,
        cache_format=engine.kv,
    )
    machines = run.rollout_cluster
    if machines.gpus != engine.replica:
        machines = msgspec.structs.replace(machines, gpus=engine.replica)
    return Server(run.trained.model, asked, machines, engine.kind, graphs=engine.graphs, version=engine.version)


def _answers(run: Run, pool: float | None, software: float, cache: Known) -> _Made:
    """The phase in which answers are generated: prompts once each where their blocks are shared, then a token at a time."""
    engine, sequences = run.engine, run.sequences
    assert engine is not None
    own = (engine.kind, engine.tp, engine.pp, engine.ep, engine.weights, engine.kv, engine.graphs, engine.version)
    if own not in cache:
        cache[own] = server_of(run)
    server: Server = cache[own]
    groups = server.asked.attentions
    replicas = run.replicas * groups
    each = sequences.number / replicas
    most = engine.max_num_seqs or engine.batch or each
    # Sequences that run are, in the mean over time, as long as the mean age of what is renewed: E[X^2] / 2 E[X].
    mean, square = cache["answers"]
    age = sequences.prompt + square / (2 * mean)
    if ("cache", own) not in cache:
        cache["cache", own] = server.cache(age)
    held = math.inf if pool is None else pool / cache["cache", own]
    slots = max(1.0, min(most, each, held))
    key = (own, each, slots, replicas)
    batch: dict[str, Any] = {"sequences": each, "slots": slots, "prompt": sequences.prompt, "replicas": replicas}

    def step(running: float, context: float) -> float:
        return server.step(max(1, round(running)), context)

    if key not in cache:
        cache[key] = generation(sequences.answers, step, **batch)
    phase: Phase = cache[key]
    faster = 1.0 if engine.accepted is None else max(1.0, engine.accepted * SPECULATION)
    unique = max(1.0, (sequences.prompts if engine.prefix else sequences.number) / replicas)
    read = unique * server.prompts(sequences.prompt)
    # An engine takes in what fits as it is; what grows out of the cache is dropped, and read again.
    taken = slots if pool is None else min(each, most, pool / server.cache(sequences.prompt + 1))
    preempted = max(0.0, taken - slots)
    again = preempted * server.prompts(round(age)) if preempted >= 1 else 0.0
    decoded = 1 - engine.seen / mean  # what an environment says is read, not made
    tool = (engine.turns - 1) * (engine.tool or 0.0)
    scale = software / faster * decoded
    if tool:
        at = (key, tool / scale)
        if at not in cache:
            cache[at] = in_turns(phase, sequences.answers, step, away=tool / scale, **batch)
        phase = cache[at]
    again += each * _turns(server, engine, sequences.prompt, mean)
    software, scale = software * run.on_policy, scale * run.on_policy
    tool, verify = tool * run.on_policy, (engine.verify or 0.0) * run.on_policy
    seconds = scale * phase.seconds + software * (read + again) + verify
    rates = server.known
    beside = Sides(
        sequences=sequences.number,
        update=0.0,
        sync=0.0,
        slots=replicas * max(1.0, min(engine.max_num_seqs or math.inf, held)),
        prompt=sequences.prompt,
        staleness=run.staleness,
        replicas=replicas,
        inflight=engine.inflight or math.inf,
        scale=scale,
        reads=software * (read + again) * replicas / sequences.number,
        tool=tool + verify,
        partial=run.staleness > 1 if engine.partial is None else engine.partial,
        every=engine.every,
    )
    full = max(1.0, min(beside.slots / replicas, beside.depth * each))
    least = beside.scale * each * mean * step(full, age) / full + software * (read + again)
    return _Made(
        PhaseTime(  # of a step that generates, in the mean over all
            name="generate",
            role=run.trained.role.name,
            side="both" if run.placement.colocated else "rollout",
            seconds=seconds,
            low=seconds * rates.token_low,
            high=seconds * rates.token_high,
        ),
        phase,
        read,
        preempted,
        beside,
        step,
        least,
    )


def _turns(server: Server, engine: Engine, prompt: int, mean: float) -> float:
    """Seconds in which a sequence's later turns are read: what came in between, after what is kept, or all from the start."""
    later = engine.turns - 1
    total, points = 0.0, min(later, TURNS)
    for index in range(points):
        at = prompt + round(((index + 0.5) * later / points + 0.5) * mean / engine.turns)
        fresh = engine.observed or 0
        if not engine.prefix:
            total += server.prompts(at + fresh)
        elif fresh:
            total += server.prompts(at + fresh) - server.prompts(at)
    return total * later / max(1, points)


def _pass(run: Run, run_pass: Pass, member: Member, software: float, cache: Known) -> PhaseTime:
    """A forward or an update of a role over a step's sequences."""
    side = run.placement.side(run_pass.role)[0]
    if side == "trainer" and (run.placement.colocated or run.engine is None):
        side = "both"
    if run_pass.does == "update":
        layout, times = packed(
            run, member, member.layout.micro_batch * member.layout.seq_len, cache["answers"], updates=True
        )
        times *= run.sequences.epochs
    else:
        rows = max(1, run.logprob_rows) * member.layout.seq_len
        layout, times = packed(run, member, run.logprob_tokens or rows, cache["answers"], updates=False)
    key = (run_pass.role, layout)
    if key not in cache:
        cache[key] = estimate(member.model, layout, member.training, run.gpu, member.cluster).time
    timed: Time | None = cache[key]
    if timed is None:
        raise NotStated(f"the time of {member.model.name} on {run.gpu.name if run.gpu else 'no card'}")
    share = 1.0 if run_pass.does == "update" else forward_share(timed)
    seconds = software * timed.step * share * times * run_pass.times
    return PhaseTime(
        name=run_pass.phase,
        role=run_pass.role,
        side=side,
        seconds=seconds,
        low=seconds * timed.low / timed.step,
        high=seconds * timed.high / timed.step,
    )


def packed(
    run: Run, member: Member, capacity: float, lengths: tuple[float, float], *, updates: bool
) -> tuple[Layout, float]:
    """Return the layout of a step over the sequences that there are, and how many such steps a step of the task has.

    capacity: tokens of a micro-batch, as long sequences fill it; lengths: means of an answer and of its square; updates: split
        into mini-batches, one update each
    """
    layout, sequences = member.layout, run.sequences
    if run.engine is None:
        return layout, 1.0
    batch = int(layout.global_batch)
    times = sequences.number / batch if updates else 1.0
    number = batch if updates else sequences.number
    # An interleaved schedule takes micro-batches in groups as large as its stages.
    groups = layout.dp * (layout.pp if layout.schedule == "interleaved" else 1)
    answers, prompt = sequences.answers, sequences.prompt
    mean, square = prompt + lengths[0], prompt**2 + 2 * prompt * lengths[0] + lengths[1]
    if run.pads(member):
        rows = max(1, round(capacity / layout.seq_len))
        rows = max(1, min(rows, number // int(layout.dp)))
        batches = math.ceil(number / (rows * groups)) * groups
        longest = prompt + answers.expected_max(rows)
        tokens, pairs = rows * longest, rows * longest**2
    else:
        batches = math.ceil(number * mean / (capacity * FILL) / groups) * groups
        tokens, pairs = number * mean / batches, number * square / batches
    # Towers see the pictures of each sequence, of which tokens and pairs alone are elsewhere.
    rows = max(1, round(number / batches)) if member.model.tower_layers else 1
    own = {"micro_batch": rows, "global_batch": int(batches) * rows, "tokens": tokens, "pairs": pairs}
    return msgspec.structs.replace(layout, **own, kernel_tokens=None, fullest=None), times


def moments(answers: Lengths, prompt: int) -> tuple[float, float]:
    """Return the means of a sequence's tokens and of their square.

    >>> moments(Lengths.of([1, 3]), 10)
    (12.0, 145.0)
    """
    return prompt + answers.mean, prompt**2 + 2 * prompt * answers.mean + answers.mean_square


def forward_share(time: Time) -> float:
    """Return the share of a training step that its forward alone takes: kernels, half of the traffic of layers, a third of ZeRO's.

    Of the loss a third: the log-probabilities without their gradient. With recomputation the layers' traffic is in three passes.
    """
    parts = time.parts
    again = 3 if parts.get("recompute", 0) > 0 else 2
    own = parts.get("forward", 0) + parts.get("loss", 0) / 3 + parts.get("zero", 0) / 3
    own += sum(parts.get(axis, 0) for axis, record in AXES.items() if record.stage) / again + parts.get("pp", 0) / 2
    own += parts.get("host", 0) / 3
    busy = sum(parts.get(name, 0) for name in ("forward", "backward", "recompute"))
    own += parts.get("bubble", 0) * (parts.get("forward", 0) / busy if busy else 0)
    return own / time.step
