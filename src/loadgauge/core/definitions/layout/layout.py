"""How a run is spread over GPUs: parallel degrees, ZeRO stage, recomputation, batch and pipeline schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from loadgauge.core.base import ConfigError, LayoutError, Size, ceil_div, maximum, minimum, shard
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.layout.axes import RANK_ORDER, SIZES
from loadgauge.core.definitions.model.model import (
    Attention,
    CompressedAttention,
    GatedDeltaNet,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    ShortConvolution,
)

Schedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev"]
CpComm = Literal["ring", "all_gather", "all_to_all"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
LEAST = "least"
"""In the place of what runs again, or is off the card: as little as fits."""
UNSPLIT = ("1f1b", "gpipe", "interleaved")
"""Schedules that do not split the backward."""
V_SHAPED = ("zb-v", "dualpipev")
"""Each stage holds two parts of the model, one on the way down and one on the way up: the first holds both ends."""
TWO_CHUNKS = (*V_SHAPED, "dualpipe")


class RecomputePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Recomputation policy: the layers that run again in backward, and which of their operations.

    mode: `none`, `selective` (the core of attention), `full` (whole layers), or `ops` (the operations named)
    every: only every n-th layer; layers: only the first n of each stage (None: all); group: layers between checkpoints
    word: what says these operations in short, such as `per-op` or `memory_budget=0.5`
    partitioned: each tensor-parallel rank keeps its part of a layer's input, and gathers it before the layer runs again (ZeRO-R)
    """

    mode: Literal["none", "selective", "full", "ops"] = "none"
    ops: frozenset[str] = frozenset()
    every: int = 1
    layers: int | None = None
    group: int = 1
    word: str = ""
    partitioned: bool = False

    @classmethod
    def parse(cls, text: str) -> RecomputePolicy:
        """Read none, selective, full, full:every=2, full:layers=5, full:group=4, these with :partitioned, or names of operations,
        of all layers or of those without or with experts (`mlp@dense`, `mlp@experts`). Raises `ConfigError`.

        >>> RecomputePolicy.parse("full:every=2").every
        2
        >>> sorted(RecomputePolicy.parse("mlp.activation,attention.norm").ops)
        ['attention.norm', 'mlp.activation']
        """
        if (plain := text.removesuffix(":partitioned")) != text and plain.startswith("full"):
            return msgspec.structs.replace(cls.parse(plain), partitioned=True)
        mode, _, option = text.partition(":")
        if mode not in ("none", "selective", "full"):
            names = frozenset(name.strip() for name in text.split(","))
            if (
                "" in names
                or ":" in text
                or any(name.partition("@")[2] not in ("", "dense", "experts") for name in names)
            ):
                raise ConfigError(
                    f"cannot read {text!r}; known: none, selective, full, names of operations", key="recompute"
                )
            return cls(mode="ops", ops=names)
        if not option:
            return cls(mode=mode)  # type: ignore[arg-type]
        key, _, number = option.partition("=")
        if key not in ("every", "layers", "group") or not number.isdecimal() or not 1 <= int(number) <= 100_000:
            raise ConfigError(f"cannot read {text!r}; known options: every=N, layers=N, group=N", key="recompute")
        if mode != "full":
            raise ConfigError(f"{key}= needs full, not {mode}", key="recompute")
        return cls(mode="full", **{key: int(number)})  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.mode == "ops":
            return self.word or ",".join(sorted(self.ops))
        options = [f"every={self.every}"] if self.every > 1 else []
        options += [f"layers={self.layers}"] if self.layers is not None else []
        options += [f"group={self.group}"] if self.group > 1 else []
        options += ["partitioned"] if self.partitioned else []
        return ":".join([self.mode, *options])

    @property
    def every_layer(self) -> bool:
        """Return whether it applies to all layers, and so to those of multi-token prediction too."""
        return self.mode != "none" and self.every == 1 and self.layers is None


FULL_PIPE = 8
"""Micro-batches a stage with which a pipeline is full enough where no batch is stated: its bubble is below an eighth."""

Padding = Literal["free", "dynamic", "max-length"]
"""Ways to put sequences of unequal lengths in a micro-batch: without padding, padded to the longest of the micro-batch (the
collators of transformers), or to the longest of all."""


class Filled(msgspec.Struct, frozen=True):
    """Tokens and query-key pairs of one ragged micro-batch; kernel_tokens: those its flash kernel sees, where they are fewer."""

    tokens: Size
    pairs: Size
    kernel_tokens: Size | None = None


def of_lengths(lengths: Lengths, micro_batch: int, padded: bool) -> dict[str, Any]:
    """Return the tokens and query-key pairs of the expected micro-batch, and the `fullest`: values of a layout's fields.

    A micro-batch that pads holds at some point of an epoch the longest sequence of all. Without padding it is the fullest of
    the epoch's micro-batches; its pairs are an upper bound, on which flash attention's memory does not depend.

    >>> of_lengths(Lengths.of([10, 20, 1000]), 1, True)["fullest"]
    Filled(tokens=1000.0, pairs=1000000.0, kernel_tokens=None)
    """
    tokens, pairs = lengths.padded(micro_batch) if padded else lengths.unpadded(micro_batch)
    most = float(micro_batch * lengths.longest) if padded else lengths.expected_fullest(micro_batch)
    return {"tokens": tokens, "pairs": pairs, "fullest": Filled(most, most * lengths.longest)}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel degrees (`dp tp pp cp ep vpp`), ZeRO stage, batch and schedule.

    micro_batch, global_batch: sequences in one forward of one rank, and in one step; seq_len: tokens of each (no default)
    stage_layers: layers of each pipeline stage, where they are not equal; shared evenly by the stage's chunks
    expert_imbalance: rows the busiest expert rank computes, over the mean: 1 where routing is balanced
    cp_comm: how context-parallel ranks exchange keys and values: around a ring, gathered, or heads for tokens (Ulysses)
    replicas: data-parallel groups that hold the same ZeRO shards (HSDP, Megatron's optimizer instances); 1: none
    order: in which the axes number the ranks, the fastest first
    tokens, pairs: of a ragged micro-batch (None: micro_batch x seq_len); kernel_tokens: those its flash kernel sees
    fullest: the ragged micro-batch that makes the peak of memory, where it is not that one
    ranks_each: ranks of a sequence in the mean, where each runs alone on a group of its own; cp is then the largest group
    exchanged: the share of keys and values that travel then, of those that would in the largest group
    """

    dp: Size = 1
    tp: Size = 1
    pp: int = 1
    cp: Size = 1
    ep: Size = 1
    etp: Size = 1
    cp_comm: CpComm = "ring"
    vpp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: RecomputePolicy = RecomputePolicy()
    micro_batch: Size = 1
    global_batch: Size = 1
    seq_len: Size
    schedule: Schedule = "1f1b"
    stage_layers: tuple[int, ...] | None = None
    expert_imbalance: Size = 1.0
    replicas: Size = 1
    order: tuple[str, ...] = RANK_ORDER
    tokens: Size | None = None
    pairs: Size | None = None
    kernel_tokens: Size | None = None
    fullest: Filled | None = None
    ranks_each: float | None = None
    exchanged: float = 1.0

    @property
    def at_peak(self) -> Layout:
        """The layout with the micro-batch that makes the peak of memory."""
        full = self.fullest
        if full is None:
            return self
        return msgspec.structs.replace(
            self, tokens=full.tokens, pairs=full.pairs, kernel_tokens=full.kernel_tokens, fullest=None
        )

    @property
    def gpus(self) -> Size:
        """Number of GPUs: dp x tp x pp x cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def zero_ranks(self) -> Size:
        """Number of ranks that ZeRO shards over: dp over replicas, times cp."""
        return shard(self.dp, self.replicas, "dp over replicas") * self.cp

    @property
    def expert_dp(self) -> Size:
        """Number of ranks that hold the same experts: dp x cp x tp over ep x etp."""
        return shard(self.dp * self.cp * self.tp, self.ep * self.etp, "dp x cp x tp")

    @property
    def expert_zero_ranks(self) -> Size:
        """Number of ranks that ZeRO shards experts over: `expert_dp` over replicas."""
        return shard(self.expert_dp, self.replicas, "ranks with the same experts over replicas")

    def played(self, rounds: int) -> int:
        """Return how many micro-batches to play a schedule through: so many for each stage, as the rest repeats them, or all."""
        batches = self.num_microbatches
        uneven = self.schedule == "interleaved" and batches % self.pp
        return int(batches) if uneven else min(int(batches), rounds * self.pp)

    @property
    def num_microbatches(self) -> Size:
        """Number of micro-batches that each pipeline runs in one step."""
        if self.ranks_each is not None:
            return maximum(1, round(self.global_batch * self.ranks_each / (self.dp * self.cp)))
        each = shard(self.global_batch, self.dp, "global_batch")
        if isinstance(each, int) and isinstance(self.micro_batch, int) and each % self.micro_batch:
            raise LayoutError(
                f"{each} sequences of a data-parallel rank are not whole micro-batches of {self.micro_batch}",
                dimension="global_batch",
                size=each,
                ranks=self.micro_batch,
            )
        return shard(each, self.micro_batch, "global_batch")

    @property
    def chunks(self) -> int:
        """Number of parts of the model that each pipeline stage holds."""
        return 2 if self.schedule in TWO_CHUNKS else self.vpp

    @property
    def copies(self) -> int:
        """Copies of the model in the pipeline: twice with DualPipe, once in each direction."""
        return 2 if self.schedule == "dualpipe" else 1

    def layers_of(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of layers of each pipeline stage, in one direction."""
        if self.stage_layers is not None:
            return self.stage_layers
        return (shard(model.num_hidden_layers, self.pp, "num_hidden_layers"),) * self.pp

    @property
    def splits_backward(self) -> bool:
        """Return whether the gradients of the weights are made apart from that of the input (zero-bubble schedules)."""
        return self.schedule not in UNSPLIT

    @property
    def ends_together(self) -> bool:
        """Return whether one stage holds both the embedding and the head."""
        return self.pp == 1 or self.schedule in TWO_CHUNKS

    @property
    def routes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (stage, chunk) pairs that a micro-batch passes, from the embedding to the head: two routes with DualPipe.

        Interleaved, it goes round through all stages for each chunk; in a V down chunk 0 and up chunk 1 (source:
        narayanan2021, qi2024v, deepseek2024).

        >>> Layout(pp=2, schedule="zb-v", seq_len=1).routes, Layout(pp=2, schedule="dualpipe", seq_len=1).routes
        ((((0, 0), (1, 0), (1, 1), (0, 1)),), (((0, 0), (1, 0)), ((1, 1), (0, 1))))
        """
        stages = range(self.pp)
        if self.schedule in V_SHAPED:
            return (tuple((stage, 0) for stage in stages) + tuple((stage, 1) for stage in reversed(stages)),)
        if self.schedule == "dualpipe":
            return tuple((stage, 0) for stage in stages), tuple((stage, 1) for stage in reversed(stages))
        return (tuple((stage, chunk) for chunk in range(self.chunks) for stage in stages),)

    def chunks_of(self, model: ModelSpec) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The layers `start:stop` of the model that each chunk of each pipeline stage holds.

        >>> from loadgauge.core.families.reference import llama_model
        >>> model = llama_model(8, 512, 8, 1000)
        >>> [Layout(pp=2, schedule=name, seq_len=1).chunks_of(model) for name in ("1f1b", "zb-v", "dualpipe")]
        [(((0, 4),), ((4, 8),)), (((0, 2), (6, 8)), ((2, 4), (4, 6))), (((0, 4), (4, 8)), ((4, 8), (0, 4)))]
        """
        layers, parts = self.layers_of(model), self.chunks // self.copies
        held: dict[tuple[int, int], tuple[int, int]] = {}
        for route in self.routes:
            start = 0
            for hop, (stage, chunk) in enumerate(route):
                # With DualPipe a stage of the other direction holds what the stage at the same place holds.
                whole, left = divmod(layers[hop if self.copies == 2 else stage], parts)
                size = whole + int(chunk % parts < left)
                held[stage, chunk] = (start, start + size)
                start += size
        return tuple(tuple(held[stage, chunk] for chunk in range(self.chunks)) for stage in range(self.pp))

    def in_flight(self, stage: int) -> Size:
        """Return the most micro-batches whose activations a stage holds at once, in units of a stage of the model (1/p of it).

        Counted to the end of backward, the weights' part of it included (`estimate.flight` says what waits for that).
        With m micro-batches, p stages and r this stage:

        | schedule    | micro-batches                                                        | source                  |
        |-------------|----------------------------------------------------------------------|-------------------------|
        | 1f1b        | min(m, p - r)                                                        | narayanan2021, 2.2.1    |
        | gpipe       | m                                                                    | huang2018               |
        | interleaved | 2(p - r - 1) + (v - 1)p + 1 chunks of 1/v each, at most m v          | korthikanti2022, 4.2.3  |
        | zb-h1       | min(m, p)                                                            | qi2024, table 1         |
        | zb-2p       | min(m, 2p - 1)                                                       | qi2024, table 1 (ZB-H2) |
        | zb-v        | p; with few micro-batches at most m and (m + 1 + r) / 2              | qi2024v; ours           |
        | dualpipe    | p + 1 of the two directions together                                 | deepseek2024, table 2   |
        | dualpipev   | 2p + 1 chunks of 1/2 each                                            | dualpipe                |

        >>> [Layout(pp=4, global_batch=8, seq_len=1).in_flight(stage) for stage in range(4)]
        [4, 3, 2, 1]
        >>> Layout(pp=4, vpp=2, global_batch=8, schedule="interleaved", seq_len=1).in_flight(0)
        5.5
        """
        batches, p = self.num_microbatches, self.pp
        if self.schedule == "gpipe":
            return batches
        if self.schedule == "interleaved":
            chunks = 2 * (p - stage - 1) + (self.vpp - 1) * in_group(batches, p) + 1
            return minimum(batches * self.vpp, chunks) / self.vpp
        if self.schedule == "zb-v":
            return minimum(minimum(batches, p), (batches + 1 + stage) / 2)
        if self.schedule in ("dualpipe", "dualpipev"):
            return p + self.copies / 2
        most = {"1f1b": p - stage, "zb-h1": p, "zb-2p": 2 * p - 1}[self.schedule]
        return minimum(batches, most)

    def worst_imbalance(self, model: ModelSpec) -> Size:
        """Return the largest possible `expert_imbalance`: every token sends all it can to the experts of one rank.

        A rank has E / e of the E experts, so a token sends it at most min(K, E / e) of its K copies, where K / e is the
        mean: min(e, E / K) times that. (A capacity factor bounds it as well.)

        >>> from loadgauge.core.families.reference import mixtral_block
        >>> from loadgauge.core.definitions.model.model import ModelSpec
        >>> block = mixtral_block(64, 4, 4, 16, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=32)
        >>> model = ModelSpec(name="", model_type="", hidden_size=64, vocab_size=9, blocks=(block,), pattern=(0,))
        >>> [Layout(dp=ranks, ep=ranks, seq_len=1).worst_imbalance(model) for ranks in (1, 4, 8, 64)]
        [1, 4, 8, 8.0]
        """
        worst: Size = 1
        for mixture in (block.mlp for block in model.blocks if isinstance(block.mlp, Moe)):
            worst = maximum(worst, minimum(self.ep, mixture.num_experts / mixture.num_experts_per_tok))
        return worst

    def valid(self, model: ModelSpec) -> list[str]:
        """Return why this layout is invalid for a model, one line per reason; empty where it is valid."""
        return _violations(self, model)

    def check(self, model: ModelSpec) -> None:
        """Raise `LayoutError` with all reasons why the layout is invalid."""
        problems = self.valid(model)
        if problems:
            raise LayoutError("; ".join(problems))


def in_group(batches: Size, stages: int) -> int:
    """Return how many micro-batches in a row go through one chunk of an interleaved schedule: as many as there are stages, or the
    next number that leaves none or a whole pipeline's (megatron-core, `schedules.py`, `microbatch_group_size_per_vp_stage`).

    >>> in_group(16, 8), in_group(18, 8), in_group(9, 8)
    (8, 9, 9)
    """
    if not isinstance(batches, int):
        return stages
    groups = (group for group in range(stages, batches) if not 0 < batches % group < stages)
    return next(groups, max(batches, stages))


def shared_out(layers: int, pp: int, parts: int = 1, mtp: int = 0) -> tuple[int, ...]:
    """Return the layers of each stage where they do not divide: the embedding and the loss each count as a layer.

    So Megatron-LM (`account-for-embedding-in-pipeline-split`) and Llama 3 shared theirs out (source: dubey2024, 3.3.2). What is
    left over goes to the chunks in the middle.

    layers: of the model; parts: chunks of each stage; mtp: further layers beside the loss

    >>> shared_out(126, 16, 8), shared_out(61, 16, mtp=1), shared_out(10, 4)
    ((7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7), (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2), (2, 3, 3, 2))
    """
    chunks = pp * parts
    each, left = divmod(layers + 2 + mtp, chunks)
    sizes = [each] * chunks
    for extra in range(left):
        sizes[(chunks - left) // 2 + extra] += 1
    first, last = min(1, sizes[0]), min(1 + mtp, sizes[-1])
    sizes[0] -= first
    sizes[-1] -= last
    for _ in range(2 + mtp - first - last):  # ends with less than they would give up
        sizes[sizes.index(max(sizes))] -= 1
    return tuple(sum(sizes[stage::pp]) for stage in range(pp))


_COUNTS = (*SIZES, "replicas", "micro_batch", "global_batch", "seq_len")


def _violations(layout: Layout, model: ModelSpec) -> list[str]:
    problems = [
        f"{name} must be a whole number of at least 1, got {value}"
        for name in _COUNTS
        if not isinstance(value := getattr(layout, name), int) or value < 1
    ]
    if not problems:
        for rules in (_of_stages, _of_blocks, _of_experts, _of_sequences, _of_schedule):
            problems += rules(layout, model)
    return list(dict.fromkeys(problems))


MOST_LISTED = 10**5
"""Ranks up to which it is said which numbers divide a size."""


def _uneven(size: int, ranks: int, text: str) -> Iterator[str]:
    """The line that says that a size does not divide, where it does not, and which numbers of ranks do.

    >>> list(_uneven(160, 64, "num_experts over ep"))
    ['num_experts over ep: 160 over 64 leaves 32; 40 or 80 divides it']
    """
    if size % ranks:
        low = [each for each in range(1, math.isqrt(size) + 1) if size % each == 0]
        divide = sorted(each for each in {*low, *(size // each for each in low)} if each <= MOST_LISTED)
        near = [max(each for each in divide if each < ranks), *[each for each in divide if each > ranks][:1]]
        yield f"{text}: {size} over {ranks} leaves {size % ranks}; {' or '.join(map(str, near))} divides it"


def _of_stages(layout: Layout, model: ModelSpec) -> Iterator[str]:
    if layout.zero not in (0, 1, 2, 3):
        yield f"zero must be 0, 1, 2 or 3, got {layout.zero}"
    if layout.replicas > 1 and layout.zero == 0:
        yield f"replicas = {layout.replicas}: without ZeRO all data-parallel ranks are replicas"
    yield from _uneven(layout.dp, layout.replicas, "dp over replicas")
    layers, parts = model.num_hidden_layers, layout.chunks // layout.copies
    counts = layout.stage_layers
    if counts is None:
        over = "2 pp" if layout.schedule in V_SHAPED else "pp x vpp"
        yield from _uneven(
            layers, layout.pp * parts, f"num_hidden_layers over {over} (or give the layers of each stage)"
        )
    elif len(counts) != layout.pp or sum(counts) != layers or min(counts) < 0:
        yield f"stage layers {counts} must be {layout.pp} counts that add up to {layers}"
    if layout.pp > 1 and any(block.shares_weights for block in model.blocks):
        yield f"pp = {layout.pp}: the layers share one set of weights, which more than one stage would have to hold"
    if layout.pp > 1 and model.partly:
        yield f"pp = {layout.pp}: which stages run backward where only some layers are trained is not modelled"
    if layout.recompute.layers is not None and layout.recompute.layers > layers:
        yield f"recompute asks for {layout.recompute.layers} layers of {layers}"


_SHARDED: dict[type, tuple[str, ...]] = {
    Attention: ("num_attention_heads",),
    LatentAttention: ("num_attention_heads",),
    LightningAttention: ("num_attention_heads",),
    CompressedAttention: ("num_attention_heads", "o_groups"),
    Mamba1: ("intermediate_size",),
    Mamba2: ("num_heads", "n_groups"),
    KimiDelta: ("linear_num_heads",),
    GatedDeltaNet: ("linear_num_value_heads", "linear_num_key_heads"),
}
"""Fields of token mixers that tensor parallelism divides; of a short convolution, the stream's channels."""


def _of_blocks(layout: Layout, model: ModelSpec) -> Iterator[str]:
    if layout.pp > 1 and any(
        not isinstance(block.per_layer_input, int)
        or block.per_layer_input
        or (isinstance(block.attention, Attention) and block.attention.borrowed)
        for block in model.blocks
    ):
        yield f"pp = {layout.pp}: layers that read what the first stages made are not modelled"
    yield from model.own.problems(layout)
    for block in model.blocks:
        for mixer in (block.attention, block.beside):
            for name in _SHARDED.get(type(mixer), ()):
                # Megatron's mixer refuses the same (megatron-core, `ssm/mamba_mixer.py`).
                instead = " (--zero 3 or --pp shares such a model out)" if name == "n_groups" else ""
                yield from _uneven(getattr(mixer, name), layout.tp, f"{name} over tp{instead}")
            if mixer is not None and not isinstance(mixer, Attention | LatentAttention):
                kind = type(mixer).__name__
                if isinstance(mixer, ShortConvolution):
                    yield from _uneven(model.hidden_size, layout.tp, "channels of the convolution over tp")
                if layout.cp > 1 and isinstance(mixer, Mamba1 | LightningAttention | ShortConvolution):
                    yield f"cp = {layout.cp}: {kind} over cp is not modelled; --recompute full makes room for long sequences"
        if isinstance(block.attention, Attention):
            keys = block.attention.num_key_value_heads
            if keys % layout.tp and layout.tp % keys:
                yield f"num_key_value_heads and tp must divide one another: {keys} and {layout.tp}"
        if isinstance(block.mlp, Mlp):
            yield from _uneven(block.mlp.intermediate_size, layout.tp, "intermediate_size over tp")


def _of_experts(layout: Layout, model: ModelSpec) -> Iterator[str]:
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, Moe)]
    if not model.has_experts and layout.ep * layout.etp > 1:
        yield f"ep = {layout.ep}, etp = {layout.etp}: the model has no experts"
    for mixture in mixtures:
        yield from _uneven(mixture.num_experts, layout.ep, "num_experts over ep")
        yield from _uneven(mixture.moe_intermediate_size, layout.etp, "moe_intermediate_size over etp")
        if (shared := mixture.shared) is not None:
            yield from _uneven(shared.intermediate_size, layout.tp, "width of the shared experts over tp")
        # Without it every tensor-parallel rank would route the same tokens; Megatron-LM refuses that too.
        if layout.tp > 1 and not layout.sequence_parallel:
            yield "experts with tp above 1 need sequence parallelism"
    if model.has_experts:
        ranks = layout.dp * layout.cp * layout.tp
        yield from _uneven(ranks, layout.ep * layout.etp, "dp x cp x tp over ep x etp")
        yield from _uneven(ranks // (layout.ep * layout.etp), layout.replicas, "ranks of an expert over replicas")
    imbalance, worst = layout.expert_imbalance, layout.worst_imbalance(model)
    if not 1 <= imbalance <= worst:
        yield f"expert_imbalance must be from 1, balanced, to {worst:g}, all that one rank can get; got {imbalance:g}"


def _of_sequences(layout: Layout, model: ModelSpec) -> Iterator[str]:
    if layout.cp > 1:
        if layout.cp_comm not in get_args(CpComm):
            yield f"unknown cp_comm {layout.cp_comm!r} (known: {', '.join(get_args(CpComm))})"
        # A causal ring is balanced by giving each rank one piece from either end.
        pieces = layout.cp if layout.cp_comm == "all_to_all" else 2 * layout.cp
        yield from _uneven(layout.seq_len, pieces, f"seq_len over {'cp' if pieces == layout.cp else '2 cp'}")
        for block in model.blocks:
            if layout.cp_comm == "all_to_all" and isinstance(block.attention, Attention | LatentAttention):
                heads = block.attention.num_attention_heads
                yield from _uneven(heads, layout.tp * layout.cp, "num_attention_heads over tp x cp")
    if layout.sequence_parallel:
        if layout.tp == 1:
            yield "sequence parallelism shards over tp, which is 1"
        yield from _uneven(layout.seq_len, layout.tp * layout.cp, "seq_len over tp x cp (sequence parallelism)")
    rows = model.max_position_embeddings
    if model.learned_positions and rows is not None and layout.seq_len > rows:
        yield f"seq_len {layout.seq_len} is longer than the model's table of {rows} positions"


def _of_schedule(layout: Layout, model: ModelSpec) -> Iterator[str]:
    replicas = layout.dp * layout.micro_batch
    yield from _uneven(layout.global_batch, replicas, "global_batch over dp x micro_batch")
    name, stages, batches = layout.schedule, layout.pp, ceil_div(layout.global_batch, replicas)
    if name not in SCHEDULES:
        yield f"unknown schedule {name!r} (known: {', '.join(SCHEDULES)})"
    elif name == "interleaved":
        if stages == 1 or layout.vpp == 1:
            yield "the interleaved schedule needs pp > 1 and vpp > 1"
        if batches < stages:
            yield f"the interleaved schedule needs at least {stages} micro-batches, one a stage, got {batches}"
    elif layout.vpp > 1:
        yield f"vpp = {layout.vpp} needs the interleaved schedule, not {name}"
    if name == "dualpipe" and (stages % 2 or batches % 2):
        yield f"dualpipe needs an even number of stages and of micro-batches, got {stages} and {batches}"
    if name in ("dualpipe", "dualpipev") and batches < 2 * stages:
        yield f"{name} needs at least 2 micro-batches a stage: {2 * stages}, got {batches}"
