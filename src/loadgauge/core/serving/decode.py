"""Time of a step of an engine: one more token of each sequence that runs, and prompts that are read meanwhile.

A step reads the matrices once (of experts those that a token goes to), and of every sequence its cache; it multiplies, launches
kernels from a CUDA graph, sums over ranks, and waits for the host. What engines reach of the card is in `definitions/serving`.

Legend: B sequences that run, c tokens in the cache of each, n ranks of a replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.base import NotModelled, Size, both_count, minimum, refuse
from loadgauge.core.definitions.hardware.calibration import chip_of, of_cluster
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.serving.inference import CACHE_FORMATS, Inference
from loadgauge.core.definitions.serving.releases import age_of
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.serving.serving import EngineRates, Serving, serving
from loadgauge.core.definitions.training.software import host_seconds
from loadgauge.core.estimate.time.collectives import Fabric, Group, groups, seconds
from loadgauge.core.layers.attention.cache import kept_by_block
from loadgauge.core.serving.loop import Load, closed_loop
from loadgauge.core.serving.memory import CONVOLUTION, STATE, Drafted, bare, memory, stored
from loadgauge.core.serving.passes import of_prompts, of_token, parts, split
from loadgauge.core.serving.time import Clock
from loadgauge.core.serving.tower import Tower

RANK = 0.15
"""Time that each rank beyond two adds to a small all-reduce, as a share of the time between two ranks."""
RING = 2
"""Bytes that a rank sends in an all-reduce over those of the tensor, in a large group."""


SUMS = ("dense", "dense_flops", "experts", "expert_flops", "head", "head_flops", "moved", "cache", "kernels")
"""Fields of `Work` that sum over the operations of a pass."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one rank in a decoding step: bytes of matrices, of experts that are reached and of the head; FLOPs of each; bytes
    between kernels, and of caches; kernels; sequences of the replica; all-reduces, bytes that a rank sends in each, and seconds
    of what leaves a node.
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
    link; whether its chip is a Blackwell; host: bytes a second at which experts come from host memory, 0: they are on the card."""

    bandwidth: Size
    flops: Size
    usual: Size
    link: Size
    blackwell: Size
    host: Size = 0.0

    @classmethod
    def of(cls, gpu: Gpu, link: float, weight_format: str) -> Card:
        """Read a card. Raises `NotStated` where it lacks a figure."""
        usual = (gpu.peaks.bf16 or gpu.peaks.fp16).value  # type: ignore[union-attr]
        peaks = {"fp8": gpu.peaks.fp8, "nvfp4": gpu.peaks.fp4 or gpu.peaks.fp8}
        own = peaks.get(weight_format)
        return cls(
            bandwidth=gpu.memory_bandwidth,
            flops=usual if own is None else own.value,
            usual=usual,
            link=link,
            blackwell=float(chip_of(gpu) == "10"),
        )


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of prompts at the rates of training: products of matrices that all tokens meet, attention and the rest; and at the
    whole rate of the card and its link: reading experts, their FLOPs, all-reduces, and those that leave a node.

    Experts have few tokens each: their matrices are read in a prompt of any length, and their FLOPs are far from the rate of
    training, whose micro-batches fill them.
    """

    dense: Size
    experts: Size
    expert_flops: Size
    attention: Size
    rest: Size
    wire: Size
    beyond: Size = 0.0


def reading(kernels: Kernels, card: Card, shares: Serving, engine: EngineRates) -> Size:
    """Return the seconds in which an engine reads prompts. All sizes may be arrays."""
    took = (
        shares.prompt_dense * kernels.dense
        + both_count(kernels.experts / shares.experts, shares.prompt_experts * kernels.expert_flops)
        + shares.prompt_attention * kernels.attention
        + shares.prompt_rest * kernels.rest
        + kernels.wire / shares.sent
        + kernels.beyond
    )
    return engine.age * engine.prefill * (1 + (shares.blackwell - 1) * card.blackwell) * took


def beside(
    token: Size, prompt: Size, requests: Size, ranks: Size, shares: Serving, engine: EngineRates
) -> tuple[Size, Size]:
    """Return the seconds of a first token beside its queue: steps that are waited for, and the host's. All sizes may be arrays.

    requests: at once, of all ranks with batches of their own
    """
    apart = 1 + (shares.apart - 1) * minimum(1, ranks - 1)
    return engine.steps * apart * token, engine.first + engine.request * requests + shares.read * prompt


def lanes(work: Work, card: Card, shares: Serving, engine: EngineRates) -> dict[str, Size]:
    """Return the seconds of a step by what takes them. All sizes may be arrays."""
    read = card.bandwidth * shares.bandwidth
    dense = both_count(work.dense / read, work.dense_flops / (shares.flops * card.flops))
    # Arrays of cards have no truth of their own.
    streamed = card.host + (card.host == 0) * shares.experts * card.bandwidth
    experts = both_count(work.experts / streamed, work.expert_flops / (shares.flops * card.flops))
    head = both_count(work.head / read, work.head_flops / (shares.flops * card.usual))
    start = engine.collective * (1 + RANK * (work.ranks - 2))
    on_card = {
        "matrices": dense + head,
        "experts": experts,
        "cache": work.cache / (shares.cache * card.bandwidth),
        "kernels": work.kernels * engine.kernel + work.moved / (shares.moved * card.bandwidth),
        "all-reduce": work.calls * (start + work.sent / (shares.link * card.link)) + work.beyond,
    }
    slower = {name: engine.age * took for name, took in on_card.items()}
    return slower | {"host": engine.host + engine.sequence * work.sequences}


def of_release(engine: str, version: str | None) -> EngineRates:
    """Return the overheads of an engine in a release; None: of those that were measured.

    >>> now, then = of_release("vllm", None), of_release("vllm", "0.6")
    >>> now.age, 1 < then.age < 1.4, then.host == now.host, then.sequence
    (1.0, True, True, 5e-05)
    """
    own, age = serving().engines[engine], age_of(engine, version)
    return msgspec.structs.replace(own, age=age.taken, sequence=own.sequence if age.sequence is None else age.sequence)


class Server:
    """One replica of a model in an engine. Raises `LayoutError`, `NotStated` or `ConfigError`.

    engine: `vllm`, `sglang`, `trtllm` or `hf`, version: its release; asked: formats, tp, pp and ep of a replica
    step, prompts: seconds of one more token of so many sequences at a context, and of so many prompts of a length read at once

    >>> from loadgauge.core.families.catalogue import model
    >>> from loadgauge.core.definitions.hardware.cluster import cluster
    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> one = Server(model("llama-3.1-8b"), Inference(task="generate", context=2), cluster(gpu("h100-sxm5-80gb"), 1), "vllm")
    >>> 0.005 < one.step(1, 1024) < one.step(64, 1024) < one.step(64, 8192) < 0.05
    True
    """

    def __init__(
        self,
        model: ModelSpec,
        asked: Inference,
        machines: Cluster,
        engine: str,
        *,
        graphs: bool = True,
        version: str | None = None,
        tower: Tower | None = None,
    ) -> None:
        refuse(
            model.tower_layers,
            "answers to pictures: without --pictures and --video the language model alone generates",
            NotModelled,
        )
        self.model, self.asked, self.machines, self.tower = model, asked, machines, tower
        self.known, self.engine = serving(), of_release(engine, version)
        if not graphs:
            self.engine = msgspec.structs.replace(
                self.engine, kernel=max(self.engine.kernel, host_seconds("eager") / 2)
            )
        self.card = Card.of(machines.gpu, machines.links[0].bandwidth, asked.weight_format)
        self.card = msgspec.structs.replace(self.card, host=asked.experts_from)
        self.fabric = Fabric.of(machines, of_cluster(machines))
        self.stages = split(model, asked)
        self.mixtures = sum(isinstance(model.blocks[kind].mlp, Moe) for stage in self.stages for kind in stage.pattern)
        self.layers = sum(len(stage.pattern) for stage in self.stages)
        self.step = functools.cache(self._step)
        self.prompts = functools.cache(self._read)

    def work(self, batch: int, context: Size) -> Work:
        """Return the work of a rank for one more token of `batch` sequences of its attention, all stages together."""
        asked = msgspec.structs.replace(self.asked, batch=batch)
        sums = dict.fromkeys(SUMS, 0.0)
        view = of_token(self.model, asked, context)
        for stage in self.stages:
            for part in parts(self.model, stage, view, batch, asked.attentions):
                for operation in part.layer:
                    _add(sums, operation, part.times, asked.weight_format, head=part.name == "head")
            own = (kept_by_block(self.model.blocks[kind], self.model.hidden_size, asked.tp) for kind in stage.pattern)
            sums["cache"] += 2 * batch * sum(STATE * member.state + CONVOLUTION * member.convolution for member in own)
        ranks = asked.tp * asked.attentions
        return Work(
            **sums,
            sequences=batch * asked.attentions,
            calls=self._calls,
            ranks=float(ranks),
            sent=self._sent(batch),
            beyond=self._beyond(batch),
        )

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
            pipeline = groups({"tp": ranks, "pp": self.asked.pp})["pp"]
            pipe = float((len(self.stages) - 1) * seconds("send_recv", nbytes, pipeline, self.fabric))
        if ranks <= self.fabric.domain:
            return pipe
        own = Group("tp", ranks, 1)
        return pipe + float(self._calls * seconds("all_reduce", 2 * tokens * self.model.hidden_size, own, self.fabric))

    def lanes(self, batch: int, context: float) -> dict[str, float]:
        """Return the seconds of a step by what takes them."""
        times = lanes(self.work(batch, context), self.card, self.known, self.engine)
        return {name: float(value) for name, value in times.items()}

    def _step(self, batch: int, context: float) -> float:
        """Seconds of one more token of `batch` sequences, `context` tokens in the cache of each."""
        return sum(self.lanes(batch, context).values())

    def _read(self, tokens: int, batch: int = 1, cached: int = 0) -> float:
        """Seconds in which `batch` prompts of so many tokens are read at once, behind those that the cache holds."""
        own = self.kernels(tokens, batch)
        if cached:
            # Each new token meets those before it.
            whole, held = (self.kernels(size, batch).attention for size in (cached + tokens, cached))
            own = msgspec.structs.replace(own, attention=whole - held)
        if self.tower is not None:
            own = self._seeing(own, batch)
        return float(reading(own, self.card, self.known, self.engine))

    def _seeing(self, own: Kernels, batch: int) -> Kernels:
        """The kernels of prompts with those of their pictures, which no cache of prefixes is taken to hold."""
        assert self.tower is not None
        seen = self.tower.passed(msgspec.structs.replace(self.asked, batch=batch), self.machines)
        far = self.asked.tp > self.fabric.domain
        return msgspec.structs.replace(
            own,
            dense=own.dense + seen.lanes["products"],
            attention=own.attention + seen.lanes["attention"],
            rest=own.rest + seen.lanes["rest"],
            wire=own.wire + (0.0 if far else sum(row.wire for row in seen.traffic) / self.card.link),
            beyond=own.beyond + (sum(row.seconds for row in seen.traffic) if far else 0.0),
        )

    def together(self, tokens: int) -> float:
        """Return the share of experts in the seconds of a prompt, which ranks with batches of their own do for one another."""
        own = self.kernels(tokens)
        without = msgspec.structs.replace(own, experts=0.0, expert_flops=0.0)
        return 1 - float(reading(without, self.card, self.known, self.engine)) / self.prompts(tokens)

    def kernels(self, tokens: int, batch: int = 1) -> Kernels:
        """Return the seconds that kernels of `batch` prompts take at the rates of training, and those of their wires."""
        few = self.asked.weight_format == "nvfp4"
        asked = msgspec.structs.replace(
            self.asked,
            context=tokens + 1,
            answer=1,
            batch=batch,
            weight_format="fp8" if few else self.asked.weight_format,
        )
        clock = Clock(self.model, asked, self.stages, self.machines)
        own = clock.kernels()
        measured = clock.machine.efficiencies
        faster = (
            self.card.flops * measured.fp4_matmul / (self.machines.gpu.peak("fp8") * measured.fp8_matmul)
            if few and self.machines.gpu.peaks.fp4
            else 1
        )
        sums = self._sums(msgspec.structs.replace(asked, weight_format=self.asked.weight_format))
        experts = float(sums["experts"])
        ranks, width = self.asked.tp * self.asked.attentions, 2 * self.model.hidden_size
        sent = RING * tokens * batch * width * (ranks - 1) / ranks
        far = ranks > self.fabric.domain
        return Kernels(
            dense=own["dense"] / faster,
            attention=own["attention"],
            rest=own["rest"],
            experts=experts * self.known.experts / self.card.host if self.card.host else experts / self.card.bandwidth,
            expert_flops=float(sums["expert_flops"]) / self.card.flops,
            wire=2 * self.layers * sent / self.card.link if ranks > 1 and not far else 0.0,
            beyond=self._beyond(tokens * batch) if far else 0.0,
        )

    def _sums(self, asked: Inference) -> dict[str, Any]:
        """Sums of a rank over the operations of prompts."""
        sums = dict.fromkeys(SUMS, 0.0)
        view = of_prompts(self.model, asked)
        for stage in self.stages:
            for part in parts(self.model, stage, view, asked.batch, asked.attentions):
                for operation in part.layer:
                    _add(sums, operation, part.times, asked.weight_format, head=part.name == "head")
        return sums

    def cache(self, context: float) -> float:
        """Return the bytes that a rank of the fullest stage keeps of a sequence of so many tokens."""
        itemsize = CACHE_FORMATS[self.asked.cache_format]
        return max(
            float(
                sum(
                    kept.elements(context) * itemsize + kept.state * STATE + kept.convolution * CONVOLUTION
                    for kept in (
                        kept_by_block(self.model.blocks[kind], self.model.hidden_size, self.asked.tp)
                        for kind in stage.pattern
                    )
                )
            )
            for stage in self.stages
        )


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

    running: of them, on one attention; token, first: seconds of a token, and until the first one; where answers are of one token,
    `token` is a step in which nothing is read; step, prompt: seconds of a step and of a prompt, alone; queue, place, waited,
    host: parts of `first`: its prompt and those before it, a place in the cache, steps that pass before it is seen or its token
    is sent, and the host
    """

    running: float
    token: float
    first: float
    step: float
    prompt: float
    queue: float = 0.0
    place: float = 0.0
    waited: float = 0.0
    host: float = 0.0


def serve(
    server: Server, requests: int, prompt: int, answer: int, slots: float | None = None, options: Engine | None = None
) -> Steady:
    """Return the times of a server under `requests` for each attention. slots: sequences whose cache fits; None: all

    options: of its queue; None: as the engine has them

    Its queue is followed (`serving/loop.py`); what a first token waits for beside it is in `definitions/serving`.
    """
    shares, engine, ranks = server.known, server.engine, server.asked.attentions
    load = load_of(server, requests, prompt, answer, slots, options)
    running = min(float(requests), load.slots / ranks)
    loop = closed_loop(load)
    queue, turn = loop.first, 0.0
    if running < requests:
        queue = min(queue, closed_loop(msgspec.structs.replace(load, slots=float(load.requests))).first)
        turn = loop.first - queue
    waited, host = beside(loop.token, prompt, load.requests, ranks, shares, engine)
    step = load.idle + load.each * running
    first = loop.first + float(waited) + float(host)
    return Steady(
        running,
        loop.token if answer > 1 else step,
        first,
        step,
        load.reading,
        queue,
        turn,
        float(waited),
        float(host),
    )


def load_of(
    server: Server, requests: int, prompt: int, answer: int, slots: float | None = None, options: Engine | None = None
) -> Load:
    """Return the load of a server. A step's time is taken as a line through that of all that run and that of half of them."""
    ranks, options = server.asked.attentions, options or Engine(kind="vllm")
    running = max(1, round(min(float(requests), slots or requests)))
    context = prompt + answer / 2
    step, half = server.step(running, context), server.step(max(1, running // 2), context)
    cached = options.cached or 0
    prompt -= cached
    queue = options.queue(prompt, ranks)
    alone, many = server.prompts(prompt, 1, cached), max(1, queue["budget"] // prompt)
    more = alone if many == 1 else min(alone, (server.prompts(prompt, many, cached) - alone) / (many - 1))
    if options.handed:
        alone, more, prompt = 0.0, 0.0, 1
    each = max(0.0, (step - half) / (running - running // 2)) if running > 1 else 0.0
    return Load(
        requests=requests * ranks,
        prompt=prompt,
        answer=answer,
        reading=alone,
        more=more,
        idle=step - each * running,
        each=each,
        slots=ranks * (float(requests) if slots is None else slots),
        mixed=server.engine.mixed,
        ranks=ranks,
        together=server.together(prompt) if ranks > 1 and not options.handed else 0.0,
        **queue,
    )


def slots_of(
    server: Server,
    engine: Engine,
    weights: float,
    prompt: int,
    answer: int,
    held: Callable[[Inference], Drafted] = bare,
) -> tuple[float, float | None]:
    """Return the bytes that an engine leaves for the cache of a rank, and the sequences whose cache they hold; None below one, with
    which no server starts.

    weights: bytes of a rank; held: what lies beside the model. Its first step is of as many tokens as one may have, whatever the
    requests. Some engines hold back the cache of whole answers, others that of what is there, half an answer in the mean
    (`EngineRates.reserved`).
    """
    asked, gpu = server.asked, server.machines.gpu
    first = msgspec.structs.replace(asked, batch=-(-(asked.prefill_tokens or 1) // prompt))
    drawn = memory(server.model, first, server.stages, gpu, held(first))
    profile = drawn.activations + drawn.logits + drawn.outside
    pool = max(0.0, engine.cache_room(gpu.capacity, weights, profile, drawn.outside) or 0.0)
    shared = server.cache(engine.cached) - server.cache(0) if engine.cached else 0.0
    each = server.cache(prompt + server.engine.reserved * answer) - shared
    return pool, (pool - shared) / each if pool >= each + shared else None
