"""Time of a step of an engine: one more token of each sequence that runs, and prompts that are read meanwhile.

A step reads the matrices once (of experts those that a token goes to), and of every sequence its cache; it multiplies, launches
kernels from a CUDA graph, sums over ranks, and waits for the host. What engines reach of the card is in `spec/serving.py`.

Legend: B sequences that run, c tokens in the cache of each, n ranks of a replica.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.algebra import Size, both_count, maximum, minimum
from loadgauge.estimate.time.collectives import Fabric, Group, groups, seconds
from loadgauge.inference.memory import CONVOLUTION, STATE, stored
from loadgauge.inference.passes import of_token, parts, split
from loadgauge.inference.time import Clock
from loadgauge.layers.cache import kept_by_block
from loadgauge.spec.calibration import chip_of, efficiencies
from loadgauge.spec.hardware import Cluster, Gpu
from loadgauge.spec.inference import CACHE_FORMATS, Inference
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.serving import EngineRates, Serving, serving
from loadgauge.spec.software import host_seconds

RANK = 0.15
"""What each rank beyond two adds to an all-reduce of few bytes, of what it takes between two."""
RING = 2
"""Bytes that a rank sends in an all-reduce over those of the tensor, in a large group."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does in a step: bytes of matrices, of experts that are reached and of the head; FLOPs of each; bytes between
    kernels, and of caches; kernels; sequences of the replica; all-reduces, bytes that a rank sends in each, and seconds of what
    leaves a node.
    """

    dense: Size
    dense_flops: Size
    experts: Size
    expert_flops: Size
    head: Size
    head_flops: Size
    moved: Size
    cache: Size
    kernels: Size
    sequences: Size
    calls: Size
    sent: Size
    ranks: Size
    beyond: Size = 0.0


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as a step sees it: bytes and FLOPs a second, of products in the weights' format and in 16 bits; bytes a second of its
    link; whether its chip is a Blackwell."""

    bandwidth: Size
    flops: Size
    usual: Size
    link: Size
    blackwell: Size

    @classmethod
    def of(cls, gpu: Gpu, link: float, weight_format: str) -> Card:
        """Read a card. Raises `NotStated` where it lacks a figure."""
        usual = (gpu.peaks.bf16 or gpu.peaks.fp16).value  # type: ignore[union-attr]
        peaks = {"fp8": gpu.peaks.fp8, "nvfp4": gpu.peaks.fp4 or gpu.peaks.fp8}
        own = peaks.get(weight_format)
        return cls(
            bandwidth=gpu.memory_bandwidth, flops=usual if own is None else own.value, usual=usual, link=link,
            blackwell=float(chip_of(gpu) == "10"),
        )  # fmt: skip


def lanes(work: Work, card: Card, known: Serving, engine: EngineRates) -> dict[str, Size]:
    """Return the seconds of a step by what takes them. All sizes may be arrays."""
    read = card.bandwidth * known.bandwidth
    dense = both_count(work.dense / read, work.dense_flops / (known.flops * card.flops))
    experts = both_count(
        work.experts / (known.experts * card.bandwidth), work.expert_flops / (known.flops * card.flops)
    )
    head = both_count(work.head / read, work.head_flops / (known.flops * card.usual))
    start = engine.collective * (1 + RANK * (work.ranks - 2))
    return {
        "matrices": dense + head,
        "experts": experts,
        "cache": work.cache / (known.cache * card.bandwidth),
        "kernels": work.kernels * engine.kernel + work.moved / (known.moved * card.bandwidth),
        "all-reduce": work.calls * (start + work.sent / (known.link * card.link)) + work.beyond,
        "host": engine.host + engine.sequence * work.sequences,
    }


class Server:
    """One replica of a model in an engine. Raises `LayoutError`, `NotStated` or `ConfigError`.

    engine: `vllm`, `sglang`, `trtllm` or `hf`; asked: formats, tp, pp and ep of a replica

    >>> from loadgauge.families.catalogue import model
    >>> from loadgauge.spec.cluster import cluster
    >>> from loadgauge.spec.hardware import gpu
    >>> one = Server(model("llama-3.1-8b"), Inference(task="generate", context=2), cluster(gpu("h100-sxm5-80gb"), 1), "vllm")
    >>> 0.005 < one.step(1, 1024) < one.step(64, 1024) < one.step(64, 8192) < 0.05
    True
    """

    def __init__(
        self, model: ModelSpec, asked: Inference, machines: Cluster, engine: str, *, graphs: bool = True
    ) -> None:
        self.model, self.asked, self.machines = model, asked, machines
        self.known = serving()
        self.engine = self.known.engines[engine]
        if not graphs:
            self.engine = msgspec.structs.replace(
                self.engine, kernel=max(self.engine.kernel, host_seconds("eager") / 2)
            )
        self.card = Card.of(machines.gpu, machines.links[0].bandwidth, asked.weight_format)
        self.fabric = Fabric.of(machines, efficiencies(machines.gpu.id))
        self.stages = split(model, asked)
        self.mixtures = sum(isinstance(model.blocks[kind].mlp, Moe) for one in self.stages for kind in one.pattern)
        self.layers = sum(len(one.pattern) for one in self.stages)
        self._steps: dict[tuple[int, float], dict[str, float]] = {}
        self._prompts: dict[tuple[int, int], float] = {}

    def work(self, batch: int, context: Size) -> Work:
        """Return what a rank does for one more token of `batch` sequences of its attention, all stages together."""
        asked = msgspec.structs.replace(self.asked, batch=batch)
        sums = dict.fromkeys(
            ("dense", "dense_flops", "experts", "expert_flops", "head", "head_flops", "moved", "cache", "kernels"), 0.0
        )
        view = of_token(self.model, asked, context)
        for stage in self.stages:
            for part in parts(self.model, stage, view, batch, asked.attentions):
                for operation in part.layer:
                    _add(sums, operation, part.times, asked.weight_format, head=part.name == "head")
            own = (kept_by_block(self.model.blocks[kind], self.model.hidden_size, asked.tp) for kind in stage.pattern)
            sums["cache"] += 2 * batch * sum(STATE * one.state + CONVOLUTION * one.convolution for one in own)
        ranks = asked.tp * asked.attentions
        return Work(
            **sums, sequences=batch * asked.attentions, calls=self._calls, ranks=float(ranks),
            sent=self._sent(batch), beyond=self._beyond(batch),
        )  # fmt: skip

    @property
    def _calls(self) -> int:
        """All-reduces of a pass: after attention and after the MLP; of ranks with batches of their own, to experts and back."""
        if self.asked.tp > 1:
            return 2 * self.layers
        return 2 * self.mixtures if self.asked.attentions > 1 else 0

    def _sent(self, tokens: Size) -> Size:
        """Bytes that a rank sends in each of them, all ranks' tokens to everyone where batches are their own."""
        ranks, width = self.asked.tp * self.asked.attentions, 2 * self.model.hidden_size
        if self.asked.tp > 1:
            return RING * tokens * width * (ranks - 1) / ranks
        return tokens * self.asked.attentions * width * (ranks - 1) / ranks

    def _beyond(self, tokens: Size) -> float:
        """Seconds of all-reduces of ranks in more than one node, which take the place of what is counted inside one."""
        ranks = self.asked.tp * self.asked.attentions
        pipe = 0.0
        if len(self.stages) > 1:
            nbytes = 2 * tokens * self.model.hidden_size
            made = groups({"tp": ranks, "pp": self.asked.pp})["pp"]
            pipe = float((len(self.stages) - 1) * seconds("send_recv", nbytes, made, self.fabric))
        if ranks <= self.fabric.domain:
            return pipe
        own = Group("tp", ranks, 1)
        return pipe + float(self._calls * seconds("all_reduce", 2 * tokens * self.model.hidden_size, own, self.fabric))

    def lanes(self, batch: int, context: float) -> dict[str, float]:
        """Return the seconds of a step by what takes them."""
        found = self._steps.get((batch, context))
        if found is None:
            made = lanes(self.work(batch, context), self.card, self.known, self.engine)
            found = self._steps[batch, context] = {name: float(value) for name, value in made.items()}
        return found

    def step(self, batch: int, context: float) -> float:
        """Return the seconds of one more token of `batch` sequences, `context` tokens in the cache of each."""
        return sum(self.lanes(batch, context).values())

    def prompts(self, tokens: int, batch: int = 1) -> float:
        """Return the seconds in which `batch` prompts of so many tokens are read at once."""
        found = self._prompts.get((tokens, batch))
        if found is None:
            found = self._prompts[tokens, batch] = self._read(tokens, batch)
        return found

    def _read(self, tokens: int, batch: int) -> float:
        few = self.asked.weight_format == "nvfp4"
        asked = msgspec.structs.replace(
            self.asked, context=tokens + 1, answer=1, batch=batch,
            weight_format="fp8" if few else self.asked.weight_format,
        )  # fmt: skip
        clock = Clock(self.model, asked, self.stages, self.machines)
        own = clock.prompts().lanes
        known = clock.machine.efficiencies
        faster = (
            self.card.flops * known.fp4_matmul / (self.machines.gpu.peak("fp8") * known.fp8_matmul)
            if few and self.machines.gpu.peaks.fp4
            else 1
        )
        ranks, width = self.asked.tp * self.asked.attentions, 2 * self.model.hidden_size
        sent = RING * tokens * batch * width * (ranks - 1) / ranks
        wire = 2 * self.layers * sent / (self.known.link * self.card.link) if ranks > 1 else 0.0
        if ranks > self.fabric.domain:
            wire = self._beyond(tokens * batch)
        kernels = own["products"] / faster + own["attention"] + own["rest"] + wire
        chip = self.known.blackwell if self.card.blackwell else 1.0
        return float(self.engine.prefill * chip * kernels)

    def cache(self, context: float) -> float:
        """Return the bytes that a rank of the fullest stage keeps of a sequence of so many tokens."""
        itemsize = CACHE_FORMATS[self.asked.cache_format]
        return max(
            float(sum(
                kept.elements(context) * itemsize + kept.state * STATE + kept.convolution * CONVOLUTION
                for kept in (
                    kept_by_block(self.model.blocks[kind], self.model.hidden_size, self.asked.tp) for kind in stage.pattern
                )
            ))
            for stage in self.stages
        )  # fmt: skip


def _add(sums: dict[str, Any], operation: Any, times: int, weight_format: str, *, head: bool) -> None:
    """Adds an operation of the list to the sums of a step."""
    if operation.kind in ("view", "lookup"):
        return
    if operation.kind != "collective":
        sums["kernels"] += times
    tensors = sum(tensor.nbytes for tensor in (*operation.inputs, *operation.outputs))
    if operation.kind == "attention":
        sums["cache"] += times * tensors
        return
    sums["moved"] += times * tensors
    matrices = [weight for weight in (*operation.weights, *operation.borrows) if weight.kind == "matrix" or head]
    if not operation.gemms or not matrices:
        return
    read = sum(weight.numel * stored(weight, weight_format) for weight in matrices)
    flops = sum(product.flops for product in operation.gemms)
    experts = [weight for weight in matrices if weight.expert]
    if experts:
        read *= operation.gemms[0].batch / experts[0].copies
        kind = "experts"
    else:
        kind = "head" if head or operation.kind == "router" else "dense"
        if kind == "head":
            read = sum(2 * weight.numel for weight in matrices)
    sums[kind] += times * read
    sums["expert_flops" if experts else f"{kind}_flops"] += times * flops


class Steady(msgspec.Struct, frozen=True):
    """A server under a fixed number of requests.

    running: of them, on one attention; token, first: seconds of a token, and until the first one; step, prompt: seconds of a step
    and of a prompt, alone
    """

    running: float
    token: float
    first: float
    step: float
    prompt: float


def steady(
    step: Size, prompt: Size, running: Size, requests: Size, answer: Size, attentions: Size, known: Serving, engine: EngineRates
) -> tuple[Size, Size]:  # fmt: skip
    """Return the seconds of a token and of a first token, where `requests` for each attention are answered, `running` at once.

    While an answer is made every other slot turns over once, so running / answer prompts come with a step. A first token waits for
    prompts before it (a share of the time is theirs), for those that arrived with it at the start, and, where not all requests run,
    for the answers of those that do.
    """
    token = step + running / answer * prompt
    busy = minimum(0.95, running * prompt / (answer * token))
    queue = known.queue * busy / (2 * (1 - busy))
    waiting = maximum(0, requests - running) / running * answer * token
    first = engine.first + known.steps * step + prompt * engine.prompt * (1 + queue + engine.burst * running / 2)
    return token, first + engine.request * requests * attentions + waiting


def serve(server: Server, requests: int, prompt: int, answer: int, slots: float | None = None) -> Steady:
    """Return the times of a server under `requests` for each attention. slots: sequences whose cache fits; None: all"""
    running = min(float(requests), max(1.0, slots)) if slots is not None else float(requests)
    step = server.step(max(1, round(running)), prompt + answer / 2)
    once = server.prompts(prompt)
    token, first = steady(step, once, running, requests, answer, server.asked.attentions, server.known, server.engine)
    return Steady(running, float(token), float(first), step, once)


def slots_of(server: Server, weights: float, context: float, utilization: float = 0.9, beside: float = 2e9) -> float:
    """Return how many sequences of so many tokens the cache holds, on a card of which `utilization` may be used.

    weights: bytes of a rank; beside: bytes of activations and of what lies outside PyTorch
    """
    pool = utilization * server.machines.gpu.capacity - weights - beside
    return max(1.0, pool / server.cache(context))
