"""Memory of a rollout engine: weights, cache, the profile's peak, graphs; and what stays behind when it sleeps.

vLLM runs one step of its most tokens when it starts, and gives the cache what is left of `utilization` of the card beside the
weights, the peak of that step and what it adds outside PyTorch; what was there before, and CUDA graphs, come on top. While it
serves, the step's tensors are those of the tokens that come, so that it stays below what it was allowed. SGLang's
`static_fraction` is of what is free at its start, and its activations and graphs lie outside it.
(Sources: vllm, `v1/worker/gpu_worker.py`; sglang, `model_executor/model_runner.py`.)
"""

import msgspec

from loadgauge.core.base import GIB, MIB, Size, in_gib, maximum
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.serving.inference import CACHE_FORMATS, Inference
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.overhead import COMMUNICATOR, Assumed, context
from loadgauge.core.layers.attention.cache import kept_by_block
from loadgauge.core.layers.embedding_head import vocabulary
from loadgauge.core.serving.memory import GRAPH, captured, fixed_bytes, stored
from loadgauge.core.serving.passes import of_chunk, parts, split
from loadgauge.core.serving.tower import Tower

PROCESS = Assumed(700 * MIB, 300 * MIB, 1400 * MIB)
"""Libraries' workspaces and the engine's own structures, asleep or awake (source: AgileRL,
`agilerl/memory/formulas.py`, measured on L4 and A100 with vLLM 0.23)."""
SAMPLER = 8
"""Bytes of a column of logits for each sequence that is sampled: float32, and probabilities beside it."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an engine on its fullest rank, awake.

    profile: the peak of the step that it measures at its start; serving: the largest step that the prompts of a batch make
    pool: of the cache; demand: of the cache that all sequences need at their mean context when they run at once
    running: sequences that run at once; outside: context and libraries; graphs: captured
    asleep: what stays on the card when it sleeps; copy: what its sleep moves to host memory
    unstarted: why it does not start, where its share leaves too little for the cache of one sequence, which the pool then is;
        needed: of a card whose share would
    """

    weights: float
    pool: float
    profile: float
    serving: float
    graphs: float
    outside: Assumed
    communicators: float
    demand: float
    token: float
    running: int
    asked: int
    asleep: Assumed
    copy: float
    unstarted: str = ""
    needed: float = 0.0

    @property
    def total(self) -> float:
        """The sum of what is resident while it serves [bytes]."""
        return self.weights + self.pool + self.serving + self.graphs + self.outside.value + self.communicators

    @property
    def preempts(self) -> bool:
        """Return whether sequences that were to run have to wait for others' cache."""
        return self.running < self.asked


def on_card(
    model: ModelSpec,
    engine: Engine,
    gpu: Gpu | None,
    *,
    sequences: int,
    unique: int,
    prompt: int,
    mean: float,
    longest: int,
    adapters: float = 0.0,
) -> Card:
    """Return the memory of an engine on its fullest rank.

    sequences: of one replica in a step, unique: prompts among them; prompt, longest: tokens of a prompt and of the longest
        sequence; mean: of a sequence
    adapters: bytes of adapters that it serves
    """
    # All of a batch's prompts come at once; the profile's step is of as many tokens as one step may have.
    most = engine.max_batched_tokens or sequences * prompt
    model, tower = Tower.parted(model, prompt)
    running = min(engine.max_num_seqs or engine.batch or sequences, sequences)
    asked = _asked(engine, running, longest, most)
    stages = split(model, asked)
    heaviest = max((_stage(model, engine, asked, stage) for stage in stages), key=lambda part: part[0] + part[1])
    weights, profile, stage = heaviest
    # Blocks of a prompt that another sequence has are taken from it, in the same step too.
    tokens = min(unique * prompt, most)
    serving = _stage(model, engine, _asked(engine, running, longest, tokens), stage)[1]
    if tower is not None:  # The step that is measured sees pictures first, and holds what they make.
        seen = tower.held(_asked(engine, unique, prompt, most))
        weights, profile = weights + seen.tower, max(profile + seen.seen, seen.seeing)
        serving = max(serving + seen.seen, seen.seeing)
    sampler = (
        SAMPLER * (engine.max_num_seqs or running) * vocabulary(model, of_chunk(model, asked)) if stage.last else 0
    )
    own = context(gpu)
    outside = Assumed(own.value + PROCESS.value, own.low + PROCESS.low, own.high + PROCESS.high)
    groups = sum(1 for ranks in (engine.tp, engine.pp, engine.ep) if ranks > 1) * COMMUNICATOR.value
    token, fixed = _kept(model, engine, stage, longest)
    each = token * mean + fixed
    graphs = GRAPH.value * captured(engine.max_num_seqs or running) if engine.graphs else 0.0
    workspace = _workspace(model, engine, most)
    weights, profile, serving = weights + adapters, profile + sampler + workspace, serving + sampler + workspace
    demand = running * (token * longest + fixed)
    left = None if gpu is None else engine.cache_room(gpu.capacity, weights, profile, outside.value + groups)
    pool = demand if left is None else left
    unstarted, needed, least = "", 0.0, token * longest + fixed
    if gpu is not None and pool < least:
        digits = 1 if least >= GIB / 10 else 3
        unstarted = (
            f"{engine.text()} leaves {in_gib(max(pool, 0), digits)} GiB of {gpu.name} for the cache, and one sequence of"
            f" {longest:,} tokens needs {in_gib(least, digits)} GiB: it does not start"
        )
        # With a larger card its share grows, and the cache is what its share grows by.
        needed = gpu.capacity + (least - pool) / (engine.utilization or engine.static_fraction or 1.0)
        pool = least
    fitting = int(pool // each) if each else running
    if engine.kind == "vllm" and fitting < running:
        # What was dropped is read again from its start, together, as far as the cache holds it.
        again = min(most, max(tokens, int((pool - fitting * fixed) // token) if token else 0))
        serving = _stage(model, engine, _asked(engine, running, longest, again), stage)[1] + sampler + workspace
    return Card(
        weights=weights,
        pool=pool,
        profile=profile,
        serving=serving,
        graphs=graphs,
        outside=outside,
        communicators=groups,
        demand=demand,
        token=token,
        running=max(1, min(running, fitting)),
        asked=running,
        asleep=Assumed(
            *(part + groups * (not engine.suspend) + workspace for part in msgspec.structs.astuple(PROCESS))
        ),
        copy=weights if engine.sleep == 1 else 0.0,
        unstarted=unstarted,
        needed=needed,
    )


def _asked(engine: Engine, batch: int, longest: int, tokens: int) -> Inference:
    """A step of so many tokens, as inference reckons it."""
    whole = -(-(longest + 1) // engine.tp) * engine.tp
    return Inference(
        task="generate",
        context=whole,
        answer=1,
        batch=max(1, batch),
        prefill_tokens=max(1, tokens),
        weight_format=engine.weights,
        cache_format=engine.kv,
        tp=engine.tp,
        pp=engine.pp,
        ep=engine.ep,
    )


def _stage(model: ModelSpec, engine: Engine, asked: Inference, stage: Stage) -> tuple[float, float, Stage]:
    """Weights of a rank of a stage, and the most alive in a layer's forward of `prefill_tokens` tokens [bytes]."""
    view = of_chunk(model, asked)
    chunk = asked.prefill_tokens or 1
    view = msgspec.structs.replace(view, tokens=chunk if isinstance(view.tokens, int) else float(chunk))
    weights: Size = 0
    alive: Size = 0
    nothing = RecomputePolicy(mode="full")
    for part in parts(model, stage, view, asked.batch, asked.attentions):
        weights += part.times * sum(weight.numel * stored(weight, engine.weights) for weight in part.layer.weights)
    for part in parts(_dense(model) if engine.kind == "vllm" else model, stage, view, asked.batch, asked.attentions):
        if part.name.startswith("layers"):
            alive = maximum(alive, forward_peak(part.layer, applied(nothing, part.layer, part.layer.names), ("input",)))
    return float(weights), float(alive), stage


def _dense(model: ModelSpec) -> ModelSpec:
    """The model without its experts, whose tensors are in a workspace of their own."""
    blocks = tuple(
        msgspec.structs.replace(block, mlp=None)
        if isinstance(block.mlp, Moe) and block.attention is not None and block.placement in ("pre", "sandwich")
        else block
        for block in model.blocks
    )
    return msgspec.structs.replace(model, blocks=blocks)


def _workspace(model: ModelSpec, engine: Engine, tokens: int) -> float:
    """Bytes of vLLM's workspace of experts: inputs and outputs of the two products of each token's experts, and their sum.

    It is made for the largest step and stays, asleep too (source: vllm, `layers/fused_moe/fused_moe.py`, `workspace_shapes`).
    """
    if engine.kind != "vllm":
        return 0.0
    largest = 0.0
    for block in model.blocks:
        if isinstance(block.mlp, Moe):
            chosen, inner = (
                block.mlp.num_experts_per_tok,
                block.mlp.moe_intermediate_size / max(1, engine.tp // engine.ep),
            )
            width, wide = model.hidden_size, (2 if block.mlp.gated else 1) * inner
            largest = max(largest, 2.0 * (chosen * (max(inner, width) + max(wide, width)) + width))
    return tokens * largest


def _kept(model: ModelSpec, engine: Engine, stage: Stage, tokens: int) -> tuple[float, float]:
    """Bytes of the cache of a token on a rank, at this context; and those of a sequence whatever its length."""
    token = fixed = 0.0
    for kind in stage.pattern:
        kept = kept_by_block(model.blocks[kind], model.hidden_size, engine.tp)
        token += kept.elements(tokens) / tokens * CACHE_FORMATS[engine.kv]
        fixed += fixed_bytes(kept)
    return token, fixed
