"""Memory of a step by phase and role: what is on the fullest card of a side while it generates, scores, updates or syncs weights.

Colocated phases take turns, so that a card needs the largest of them, each with what the others leave behind. Residents are the
states of the trained models, the weights of the frozen ones, and the engine, asleep or not.
"""

import functools
import math

import msgspec

from loadgauge.core.base import MIB, Size, Verdict, judge, maximum, sums
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.job.uncounted import Parts, Uncounted
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.tasks import Pass
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.around import evaluated
from loadgauge.core.estimate.memory.counters import Reading
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.estimate.memory.peak import Memory
from loadgauge.core.estimate.memory.phases import Phase, StageAtWork
from loadgauge.core.estimate.memory.question import Question, Unsaid, ask
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.schedule.stages import stages
from loadgauge.core.estimate.states.overhead import Assumed, context
from loadgauge.core.estimate.unsaid import unread_things
from loadgauge.core.estimate.workings import Workings
from loadgauge.core.post_training.engine import Card, on_card
from loadgauge.core.post_training.roles import Member, Run
from loadgauge.core.post_training.segments import Segments, segments, unshared

BUCKET = 2048 * MIB
"""Bytes of weights that are handed over at a time (source: verl, `rollout.yaml`, `update_weights_bucket_megabytes`)."""
HELD = 6 * 4
"""Bytes that a step holds of each token besides: log-probs of actor, reference and engine, advantages, values and masks."""
WHOLE_UNIT = 2
"""Times that a frozen model beside the policy is whole while it runs: FSDP shards it as one unit, whose weights are gathered in a
buffer and copied out of it (source: trl 1.16, `models/utils.py`, `prepare_fsdp`)."""
STORED = 40
"""Bytes of a token in the object store on the host: ids, masks, positions and log-probs."""


class Resident(msgspec.Struct, frozen=True):
    """Bytes of one part of one role, in one phase. role: a role's name, or the engine's"""

    role: str
    part: str
    nbytes: float


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the fullest card of a side in a phase. side: trainer or rollout; low, high: of the whole, by what is assumed

    device: what `nvidia-smi` would show, idle blocks of the allocator included
    """

    name: str
    side: str
    residents: tuple[Resident, ...]
    low: float
    high: float
    device: Reading

    @property
    def total(self) -> float:
        """The sum of all residents [bytes]."""
        return sum(resident.nbytes for resident in self.residents)

    @property
    def parts(self) -> dict[str, float]:
        """Return its bytes by role and part."""
        return sums((f"{held.role} {held.part}", held.nbytes) for held in self.residents)

    def of(self, role: str) -> float:
        """Bytes of a role."""
        return sum(resident.nbytes for resident in self.residents if resident.role == role)


class PostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a step. host: bytes of a node's host memory by what they are; engine: what it holds awake, if there is one

    uncounted: settings of job files that are not counted; parameters: of the trained model, over the trainer's GPUs
    """

    phases: tuple[PhaseMemory, ...]
    uncounted: tuple[Uncounted, ...] = ()
    parameters: float = 0.0
    host: dict[str, float]
    capacity: float | None = None
    engine: Card | None = None

    @property
    def worst(self) -> PhaseMemory:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def decisive(self) -> PhaseMemory:
        """The phase whose upper end is the highest, on which the verdict rests."""
        return max(self.phases, key=lambda phase: phase.high)

    @property
    def verdict(self) -> Verdict:
        """Return whether the GPU holds every phase (see `loadgauge.core.base.verdict`)."""
        things = self.unsaid
        more = math.inf if any(thing.endless for thing in things) else sum(thing.more for thing in things)
        fewer = sum(thing.fewer for thing in things)
        return judge(self.low, self.high, self.capacity, self.high + more, self.low - fewer)

    @property
    def unread(self) -> Parts:
        """The parts of the memory that settings which are not counted may change, of all roles together."""
        held = [
            sums(("loss" if each.part == "log-probs" else each.part, each.nbytes) for each in phase.residents)
            for phase in self.phases
        ]
        largest = {
            part: max(parts.get(part, 0.0) for parts in held) for part in {part for parts in held for part in parts}
        }
        return Parts(held[self.phases.index(self.worst)], largest, self.parameters)

    @property
    def unsaid(self) -> tuple[Unsaid, ...]:
        """The settings of job files that are not counted, with how far each may change the memory."""
        return tuple(unread_things(self.uncounted, self.unread)) if self.uncounted else ()

    @property
    def question(self) -> Question | None:
        """Return the unread key of a job file that decides the verdict, with each of its answers; None where nothing does."""

        def ends(change: float) -> Reading:
            return Reading(self.low + change, self.total + change, self.high + change)

        return ask(self.unsaid, self.verdict, ends, self.capacity)

    @property
    def total(self) -> float:
        """Return the bytes that the fullest phase needs."""
        return self.worst.total

    @property
    def low(self) -> float:
        """The lower end of that: each phase is needed [bytes]."""
        return max(phase.low for phase in self.phases)

    @property
    def high(self) -> float:
        """The upper end of that [bytes]."""
        return self.decisive.high


class _Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A trained member: its rank with the most, and the memory of its update.

    segments: what the allocator makes of adapters on whole frozen weights; None of other trainings, whose range has it
    """

    member: Member
    rank: StageAtWork
    update: Memory
    segments: Segments | None = None

    @property
    def states(self) -> tuple[float, float, float]:
        """Weights, gradients that stay, and optimizer states on the card [bytes]."""
        parts = {name: float(value) for name, value in self.rank.unchanging.items()} | {
            name: float(value) for name, value in self.rank.offloaded.items()
        }
        gradients = 0.0 if self.rank.memory.frees_gradients else parts["gradients"]
        return parts["weights"], gradients, parts["optimizer"]


_Side = tuple[_Trained, dict[str, _Trained], dict[str, Member]]
"""A set of GPUs: the first role that trains there, all that do, and those that do not."""


def memory(run: Run) -> PostMemory:
    """Return the memory of a run by phase. Raises as `estimate` does.

    >>> from loadgauge.core.resolve.posttrain import resolve_posttrain
    >>> from loadgauge.core.definitions.job.job import Job
    >>> found = memory(resolve_posttrain(Job("llama-3.1-8b", task="dpo", gpus=8, zero=3))[0])
    >>> [phase.name for phase in found.phases]
    ['update', 'reference']
    """
    sides = {name: _side(run, name) for name in dict.fromkeys(run.placement.side(role)[0] for role in run.members)}
    _, trained, frozen = sides["trainer"]
    asleep = engine = None
    if run.engine is not None:
        engine = engine_of(run)
        awake = engine.total if run.engine.sleep == 0 else 0.0
        if run.placement.colocated and not run.engine.inside:
            asleep = Assumed(awake, awake, awake) if awake else engine.asleep
    phases: list[PhaseMemory] = []
    for idle in run.task.passes:
        if idle.does != "generate" and idle.role in run.members:
            side = run.placement.side(idle.role)[0]
            beside, before = (asleep, tuple(phases)) if side == "trainer" else (None, ())
            phases.append(msgspec.structs.replace(_phase(run, idle, *sides[side], beside, before), side=side))
    if engine is not None and run.engine is not None:
        phases.insert(0, _generate(run, engine, trained, frozen))
        if not run.engine.inside:
            phases.append(_sync(run, engine, trained, frozen, asleep))
    return PostMemory(
        phases=tuple(phases),
        host=_host(run, sides, engine),
        engine=engine,
        capacity=None if run.gpu is None else run.gpu.capacity,
        uncounted=run.uncounted,
        parameters=run.trained.params / max(1, run.placement.trainer),
    )


def _side(run: Run, side: str) -> tuple[_Trained, dict[str, _Trained], dict[str, Member]]:
    """Return the roles on a set of GPUs that train, and that do not, after the first of them, as if it trained."""
    there = {name: member for name, member in run.members.items() if run.placement.side(name)[0] == side}
    trained = {name: _trained(run, member) for name, member in there.items() if "train" in member.role.uses}
    main = next(iter(trained.values())) if trained else _trained(run, next(iter(there.values())))
    return main, trained, {name: member for name, member in there.items() if name not in trained}


def _trained(run: Run, member: Member) -> _Trained:
    working = Workings(member.model, filled(run, member, member.layout), member.training, run.gpu)
    training, rank = member.training, working.worst.rank
    adapts = training.lora is not None and not training.lora.quantised
    tensor_by_tensor = training.framework.is_default and member.layout.zero_ranks == 1
    served = segments(rank, frozen_itemsize(member)) if adapts and tensor_by_tensor else None
    return _Trained(member=member, rank=rank, update=working.peak_memory, segments=served)


def filled(run: Run, member: Member, layout: Layout) -> Layout:
    """Return the layout with the tokens of the fullest of many micro-batches of answers, of a trainer that does not pad them.

    One that pads holds the longest sequence that may come; where all answers are as long, so does every one.
    """
    sequences = run.sequences
    answers = sequences.answers
    if not run.task.rollout or run.pads(member) or answers.mean == answers.longest:
        return layout
    most = _fullest(answers, sequences.prompt, int(layout.micro_batch))
    return msgspec.structs.replace(
        layout, tokens=most, pairs=most * sequences.longest, kernel_tokens=None, fullest=None
    )


@functools.lru_cache(64)
def _fullest(answers: Lengths, prompt: int, sequences: int) -> float:
    """Tokens of the fullest micro-batch of so many sequences, each a prompt and an answer."""
    return answers.shifted(prompt).expected_fullest(sequences)


def engine_of(run: Run) -> Card:
    """Return the memory of the engine on a card, for its share of a step's prompts."""
    assert run.engine is not None
    sequences, model = run.sequences, run.trained.model
    unique = -(-sequences.prompts // run.replicas)
    return on_card(
        model,
        run.engine,
        run.gpu,
        sequences=unique * sequences.samples,
        unique=unique,
        prompt=sequences.prompt,
        mean=sequences.prompt + sequences.answers.mean / 2,
        longest=run.engine.context or sequences.longest,
    )


# -- residents ----------------------------------------------------------------------------------------------------------


def weights_held(member: Member, rank: StageAtWork) -> float:
    """Return the bytes of a frozen model's weights on a rank: sharded where the trained one's are, in the dtype as loaded."""
    training, layout = member.training, member.layout
    if member.shares:
        return 0.0
    sharded = layout.zero >= training.framework.weights_stage and not unsharded(member)
    training = msgspec.structs.replace(training, lora=None)  # a second model has none of the policy's adapters
    memory_model = MemoryModel(member.model, layout, training, view_of(layout, training))
    at = min(rank.stage.index, layout.pp - 1)
    count = memory_model.weighed(stages(member.model, layout)[at])[1]
    dense, expert = (layout.zero_ranks, layout.expert_zero_ranks) if sharded else (1, 1)
    return float(frozen_itemsize(member) * (count.dense.total / dense + count.expert.total / expert))


def unsharded(member: Member) -> bool:
    """Return whether a frozen model is whole on every card though FSDP shards the trained one: the teacher of TRL's trainers, which
    accelerate prepares for evaluation (source: trl 1.16, `trainer/distillation_trainer.py`)."""
    return member.role.name == "teacher" and member.training.framework.is_default


def frozen_itemsize(member: Member) -> int:
    """Bytes of an element of a frozen model: 16 bits, or float32 where the models are loaded so; no trainer widens it."""
    if member.loaded is not None:
        return 4 if member.loaded == "float32" else 2
    return 4 if member.training.weights == "float32" or member.training.precision.compute == 4 else 2


def _resting(
    trained: dict[str, _Trained],
    frozen: dict[str, Member],
    busy: str,
    offload: str = "none",
    rank: StageAtWork | None = None,
) -> list[Resident]:
    """Return the tensors of all roles while one works.

    busy: the role whose pass it is, which holds its weights whatever is offloaded
    offload: what the trainer has moved to the host while answers are generated; idle: all that does not work
    rank: that of a set of GPUs; None: of the first that trains
    """
    residents: list[Resident] = []
    for name, trainee in trained.items():
        weights, gradients, optimizer = trainee.states
        gone_states = offload in ("optimizer", "states", "all", "idle")
        gone_weights = offload in ("weights", "all", "idle") and name != busy
        residents.append(Resident(name, "weights", 0.0 if gone_weights else weights))
        residents.append(Resident(name, "gradients", 0.0 if gone_weights or gone_states else gradients))
        residents.append(Resident(name, "optimizer", 0.0 if gone_states else optimizer))
        if trainee.segments is not None and not gone_weights:
            residents.append(Resident(name, "ends of segments", trainee.segments.ends))
    rank = rank or next(iter(trained.values())).rank
    for name, member in frozen.items():
        if name == busy or not (member.offloaded or offload in ("weights", "all", "idle")):
            residents.append(Resident(name, "weights", weights_held(member, rank)))
        if member.second and offload not in ("weights", "all", "idle"):
            residents.append(Resident(name, "adapters", _second_adapters(member, rank)))
    return residents


def _second_adapters(member: Member, rank: StageAtWork) -> float:
    """Bytes of a second set of adapters, which is not trained."""
    count = rank.weights.all
    return float(4 * count.wide + member.training.precision.weight * (count.trainable - count.wide))


def forward_set(run: Run, member: Member, rank: StageAtWork, rows: int, *, whole: bool = False) -> dict[str, float]:
    """Return the bytes alive at the most in a forward that keeps nothing: gathered copies, and a layer or the head.

    rows: sequences of the pass; whole: its model is one unit of FSDP
    """
    layout = evaluated(member.layout, member.training)
    groups = layout.dp * (layout.pp if layout.schedule == "interleaved" else 1)
    layout = msgspec.structs.replace(layout, micro_batch=rows, global_batch=rows * groups)
    if run.logprob_tokens is None:
        layout = filled(run, member, layout)
    model = MemoryModel(member.model, layout, member.training, view_of(layout, member.training))
    every = stages(member.model, layout)
    stage = every[min(rank.stage.index, len(every) - 1)]
    own = StageAtWork(model, stage)
    working: Size = 0
    for key, facts in model.facts.items():
        if key[1]:
            working = maximum(working, forward_peak(facts.layer, facts.recompute, ("input", "mlp.norm")))
    working = working + model.shared + (model.embedding.operations[-1].outputs[0].nbytes if stage.first else 0)
    head: Size = 0
    if stage.last:
        head = forward_peak(model.head, applied(layout.recompute, model.head, frozenset(model.head.names)))
    gathered = own.gathered(own.point("forward", stage.stop - 1))
    if unsharded(member):
        gathered = 0
    elif whole:
        gathered = WHOLE_UNIT * frozen_itemsize(member) * own.weights.all.total
    logits = max(0.0, float(head) - float(working))
    return {"gathered": float(gathered), "activations": float(working), "log-probs": logits}


# -- phases -------------------------------------------------------------------------------------------------------------


def _bounded(
    run: Run, name: str, residents: list[Resident], main: _Trained, engine: Assumed | None, idle: float = 0.0
) -> PhaseMemory:
    """The phase with the trainer's range, and the engine's. idle: what the driver sees, and a full card would be given back"""
    outside = main.update.margins.outside
    fixed = main.update.workspaces
    residents = [*residents, Resident("trainer", "outside", outside.value + fixed)]
    allocated = sum(resident.nbytes for resident in residents) - outside.value
    if engine is not None:
        residents.append(Resident("engine", "asleep" if engine.low != engine.high else "awake", engine.value))
    reading = main.update.margins.needed(allocated)
    more = Assumed(0.0, 0.0, 0.0) if engine is None else engine
    shown = main.update.margins.reading("nvidia-smi", allocated)
    if main.segments is not None:
        value = allocated + outside.value + idle
        shown = Reading(min(reading.low, value), value, max(shown.high, value))
        residents.append(Resident("trainer", "idle segments", idle))
    return PhaseMemory(
        name=name,
        side="trainer",
        residents=tuple(resident for resident in residents if resident.nbytes > 0),
        low=min(reading.low + more.low, sum(resident.nbytes for resident in residents)),
        high=reading.high + more.high,
        device=Reading(shown.low + more.low, shown.value + more.value, shown.high + more.high),
    )


def _phase(
    run: Run,
    run_pass: Pass,
    main: _Trained,
    trained: dict[str, _Trained],
    frozen: dict[str, Member],
    asleep: Assumed | None,
    before: tuple[PhaseMemory, ...],
) -> PhaseMemory:
    """A pass of a set of GPUs: an update, or a forward. main: as of `_side`; before: the passes before it"""
    held = HELD * run.sequences.number / main.member.layout.dp * run.sequences.mean if run.task.rollout else 0.0
    between = "none" if run_pass.within is not None else run.between
    if run_pass.does == "update":
        own = trained[run_pass.role]
        residents = [
            resident
            for resident in _resting(trained, frozen, run_pass.role, between)
            if resident.role != run_pass.role or resident.part == "ends of segments"
        ]
        parts = own.update.parts
        residents += [
            Resident(run_pass.role, part, float(nbytes)) for part, nbytes in parts.items() if part != "outside"
        ]
        residents.append(Resident(run_pass.role, "held", held))
        idle = 0.0
        if own.segments is not None:
            beside = sum(resident.nbytes for resident in residents) - float(
                sum(parts.values()) - parts.get("outside", 0)
            )
            outside = own.update.margins.outside.value + own.update.workspaces + (asleep.value if asleep else 0.0)
            forwards = max((phase.total - outside for phase in before), default=0.0)
            idle = unshared(own.update.moments, own.segments.small, forwards, beside)
        return _bounded(run, run_pass.phase, residents, own, asleep, idle)
    member = run.members[run_pass.role]
    residents = _resting(trained, frozen, run_pass.role, between, main.rank)
    rank = trained.get(run_pass.role, main).rank
    if run_pass.within is not None:
        # Its tensors come on top of what the pass in whose midst it is keeps for its backward.
        # A pipeline's stage without the head keeps the most when its forward is done.
        fullest = max(main.update.moments, key=lambda each: each.parts["activations"])
        moment = next((each for each in main.update.moments if each.phase is Phase.LOSS), fullest)
        residents.append(Resident(main.member.role.name, "kept", float(moment.parts["activations"])))
        residents.append(Resident(main.member.role.name, "logits", _kept_logits(main)))
        residents.append(Resident(main.member.role.name, "gathered", float(moment.parts["gathered"])))
        sharded = main.member.layout.zero >= main.member.training.framework.weights_stage and not member.shares
        whole = (
            sharded
            and member.role.name == "reference"
            and main.rank.memory.by_layer
            and main.member.layout.zero_ranks > 1
        )
        alive = forward_set(run, member, rank, main.member.layout.micro_batch, whole=whole)
        if main.member.layout.zero < main.member.training.framework.weights_stage:
            alive["gathered"] = 0.0  # nothing is gathered; what DDP buckets is the policy's, and counted with it
    else:
        alive = forward_set(run, member, rank, run.logprob_rows)
    residents += [Resident(run_pass.role, part, nbytes) for part, nbytes in alive.items()]
    residents.append(Resident(run_pass.role, "held", held))
    return _bounded(run, run_pass.phase, residents, main, asleep)


def _kept_logits(main: _Trained) -> float:
    """Bytes that the head keeps for its backward; of a student, whose divergence comes after the teacher's pass, its logits; and
    logits that a trainer holds beside what is kept."""
    if not main.rank.stage.last:
        return 0.0
    head = main.rank.memory.head
    kernels = main.rank.memory.view.kernels
    if kernels.diverges:
        return float(head.operations[-1].inputs[0].nbytes)
    if kernels.logprobs == "softmax":
        return float(main.rank.memory.head_kept + head.operations[-1].inputs[0].nbytes)
    return float(main.rank.memory.head_kept)


def _generate(run: Run, card: Card, trained: dict[str, _Trained], frozen: dict[str, Member]) -> PhaseMemory:
    """Generation: the engine awake, and on the same cards what the trainer has not moved away.

    A model that generates in its trainer is whole on each card meanwhile: gathered where it is sharded (source: trl 1.16,
    `models/utils.py`, `unwrap_model_for_generation`). An engine that does not start needs a card whose share holds its cache.
    """
    assert run.engine is not None
    if run.engine.inside:
        main = next(iter(trained.values()))
        layout, framework = main.member.layout, main.member.training.framework
        sharded = layout.zero >= framework.weights_stage and layout.zero_ranks > 1
        residents = [
            Resident("engine", "gathered weights", card.weights if sharded else 0.0),
            Resident("engine", "cache", card.pool),
            Resident("engine", "activations", card.serving),
        ]
        return _bounded(
            run,
            "generate",
            [resident for resident in residents if resident.nbytes] + _resting(trained, frozen, ""),
            main,
            None,
        )
    residents = [
        Resident("engine", "weights", card.weights),
        Resident("engine", "cache", card.pool),
        Resident("engine", "activations", card.serving),
        Resident("engine", "graphs", card.graphs),
        Resident("engine", "outside", card.outside.value + card.communicators),
    ]
    if run.placement.colocated:
        residents += [resident for resident in _resting(trained, frozen, "", run.rollout_offload) if resident.nbytes]
        if not run.engine.suspend:
            kept = next(iter(trained.values())).update.margins.outside.value - context(run.gpu).value
            residents += [Resident("trainer", "communicators", float(kept))] if kept else []
    if (outside := card.needed - sum(resident.nbytes for resident in residents)) > 0:
        residents.append(Resident("engine", "beside its share", outside))
    total = sum(resident.nbytes for resident in residents)
    spread = card.outside.high - card.outside.value, card.outside.value - card.outside.low
    low, high = total - spread[1] - card.graphs / 2, total + spread[0] + card.graphs
    return PhaseMemory(
        name="generate",
        side="rollout",
        residents=tuple(residents),
        low=low,
        high=high,
        device=Reading(low, total, high),
    )


def buckets_of(run: Run) -> int:
    """Return the buckets that a card holds in a hand-over: two of a delta, one read while the next is filled; none of files."""
    return {"delta": 2, "disk": 0, "delta-disk": 0}.get(run.engine.sync or "", 1) if run.engine is not None else 1


def _sync(
    run: Run, card: Card, trained: dict[str, _Trained], frozen: dict[str, Member], asleep: Assumed | None
) -> PhaseMemory:
    """The hand-over of weights: those of both sides and a bucket, the cache asleep."""
    main = next(iter(trained.values()))
    residents = _resting(trained, frozen, main.member.role.name, run.between)
    residents.append(Resident("engine", "bucket", buckets_of(run) * min(BUCKET, card.weights)))
    phase = _bounded(run, "weight sync", residents, main, asleep)
    if not (run.placement.colocated and run.engine is not None and run.engine.sleep):
        return phase
    # What an engine maps again lies beside the trainer's allocator, and is known.
    woken, device = card.weights, phase.device
    return msgspec.structs.replace(
        phase,
        residents=(*phase.residents, Resident("engine", "weights", woken)),
        low=phase.low + woken,
        high=phase.high + woken,
        device=Reading(device.low + woken, device.value + woken, device.high + woken),
    )


def _host(run: Run, sides: dict[str, _Side], card: Card | None) -> dict[str, float]:
    """Bytes of host memory by what they are, of the node that needs the most: sets of GPUs fill nodes one after another."""
    # A set that is smaller than a node says nothing of the node's size.
    sizes = [
        (member.cluster.gpus_per_node, member.layout.gpus)
        for member in run.members.values()
        if member.cluster is not None
    ]
    nodes = run.placement.nodes(max((size for size, gpus in sizes if size < gpus), default=GPUS_PER_NODE))
    return max((_on_node(run, sides, card, there) for there in nodes), key=lambda held: sum(held.values()))


def _on_node(run: Run, sides: dict[str, _Side], card: Card | None, there: dict[str, int]) -> dict[str, float]:
    """The same of one node. there: its GPUs of each set"""
    main = sides["trainer"][0]
    trained = {name: trainee for _, own, _ in sides.values() for name, trainee in own.items()}

    def ranks(role: str) -> int:
        return there.get(run.placement.side(role)[0], 0)

    own = there.get("trainer", 0)
    by_use = {"offloaded states": sum(trainee.update.host * ranks(name) for name, trainee in trained.items())}
    if run.task.rollout and run.placement.colocated and run.rollout_offload != "none":
        moved = 0.0
        for name, trainee in trained.items():
            weights, gradients, optimizer = trainee.states
            moved += ranks(name) * weights if run.rollout_offload in ("weights", "all", "idle") else 0.0
            moved += ranks(name) * (optimizer + gradients) if run.rollout_offload not in ("none", "weights") else 0.0
        by_use["moved while answers are generated"] = moved
    by_use["frozen models"] = sum(
        ranks(name) * weights_held(member, first.rank)
        for first, _, frozen in sides.values()
        for name, member in frozen.items()
        if member.offloaded
    )
    if card is not None and run.engine is not None and own:
        # A delta is of a copy of each shard, or, by files, of every tensor on the rank that writes; files are written from there.
        copies = {"delta": own / main.member.layout.gpus, "disk": 1.0, "delta-disk": 2.0}.get(
            run.engine.sync or "", 0.0
        )
        by_use["weights to hand over"] = 2.0 * main.member.params * copies
        by_use["engine asleep"] = card.copy * own
        by_use["object store"] = float(STORED * run.sequences.number * run.sequences.mean)
    return {name: nbytes for name, nbytes in by_use.items() if nbytes}
