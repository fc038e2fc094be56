"""The estimate of inference: memory of the fullest rank, the pass of the prompts, and passes of one more token."""

from functools import cached_property
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, NotModelled, NotStated, needs, read_table, refuse
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.model.model import Attention, LatentAttention, ModelSpec
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.definitions.serving.releases import Age, age_of
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.serving.serving import serving
from loadgauge.core.definitions.training.software import bounds, factor, kind_of
from loadgauge.core.families.encoders.pictures import Seen
from loadgauge.core.serving.decode import Server, Steady, serve, slots_of
from loadgauge.core.serving.draft import Draft, Speculating, speculated
from loadgauge.core.serving.memory import UNAIDED, Drafted, Memory, largest_batch, memory
from loadgauge.core.serving.passes import split
from loadgauge.core.serving.quantise import quantising
from loadgauge.core.serving.time import Clock, Pass
from loadgauge.core.serving.tower import Tower

NOT_COUNTED = (
    "a server: queues, prompts that come while others generate, paged blocks, prefix caches, sampling",
    "host time between tokens: the upper end of the range holds what engines were measured to take",
)

OF_SERVER = "paged blocks, prefixes in the cache beyond `cached`, how requests arrive, servers that only read prompts"
"""Costs that the times of a server leave out."""


class Range(msgspec.Struct, frozen=True):
    """Factors on the seconds of kernels, between which 80 % of measured ones lie. source: where they are from"""

    first_low: float
    first_high: float
    token_low: float
    token_high: float
    points: int
    source: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The result of an inference estimate.

    first: of all prompts; last: of one more token at the whole context; token: seconds of a token in the mean over the answer
    untimed: why there is no time
    served: the times of a server, where one is asked for; pool: bytes that its engine leaves for the cache on a rank, and tokens
        that these hold; draft: what proposes tokens; tower: what sees the pictures of prompts
    """

    model: ModelSpec
    asked: Inference
    params: int
    active_params: int
    memory: Memory
    first: Pass | None = None
    last: Pass | None = None
    token: float | None = None
    gpu: Gpu | None = None
    untimed: str = ""
    price: float | None = None
    host_memory: str | None = None
    served: Steady | None = None
    pool: tuple[float, int] | None = None
    draft: Draft | None = None
    tower: Tower | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine that serves, with its options."""
        return None if self.asked.server is None else Engine.parse(self.asked.server, "server")

    @cached_property
    def largest(self) -> int | None:
        """The most sequences that fit on a replica; None without a GPU, and of quantising."""
        if self.gpu is None or self.asked.task == "quantise":
            return None
        return largest_batch(self.model, self.asked, split(self.model, self.asked), self.gpu, self.held)

    def held(self, asked: Inference) -> Drafted:
        """Return what lies beside the model: a draft, and towers of pictures."""
        return beside(self.draft, self.tower, asked)

    @property
    def age(self) -> Age:
        """Return what the release of the engine takes over those that were measured."""
        return Age() if self.engine is None else age_of(self.engine.kind, self.engine.version)

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        asked = self.asked
        return asked.replica * asked.replicas

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens a second, of all replicas, while the batch is full; of a server by Little's law, its waits included."""
        if self.token is None:
            return None
        asked = self.asked
        whole = asked.replicas * asked.attentions * asked.batch
        if self.served is not None:
            return whole * asked.answer / (self.served.first + (asked.answer - 1) * self.served.token)
        return whole / self.token

    @property
    def money_per_million(self) -> float | None:
        """Price of a million generated tokens, prompts included; None without a price."""
        if self.price is None or self.token is None or self.first is None:
            return None
        if self.served is not None and self.tokens_per_second:
            return self.price * self.gpus / 3600 / self.tokens_per_second * 1e6
        whole = self.first.seconds + self.asked.answer * self.token
        tokens = self.asked.replicas * self.asked.attentions * self.asked.batch * self.asked.answer
        return self.price * self.gpus * whole / 3600 / tokens * 1e6

    @property
    def first_range(self) -> tuple[float, float]:
        """Factors on the seconds of the prompts' pass: of a first token in a server; of a score, those of a training step."""
        if self.asked.task == "generate":
            return known_range().first_low, known_range().first_high
        low, high = bounds(kind_of(experts=self.model.has_experts))
        return self.software * low, self.software * high

    @property
    def software(self) -> float:
        """Factor of what software adds to the pass of a score, as to a training step; engines' kernels are rated with it."""
        return factor(experts=self.model.has_experts).factor if self.asked.task == "forward" else 1.0

    @property
    def token_range(self) -> tuple[float, float]:
        """Factors on the seconds of a token."""
        if self.served is None:
            return known_range().token_low, known_range().token_high
        return self._aged(serving().token_low, serving().token_high)

    @property
    def served_range(self) -> tuple[float, float]:
        """Factors on the seconds of a server's first token."""
        return self._aged(serving().first_low, serving().first_high * self.unsaid)

    @property
    def unsaid(self) -> float:
        """Factor on the upper end of a first token of a server of which nobody says how prompts wait."""
        engine = self.engine
        return 1.0 if engine is None or engine.queues else serving().engines[engine.kind].unsaid

    def _aged(self, low: float, high: float) -> tuple[float, float]:
        """Factors of measured releases, as wide as what is not known of this one makes them."""
        return low * self.age.least / self.age.taken, high * self.age.most / self.age.taken

    @property
    def not_counted(self) -> tuple[str, ...]:
        """Return the costs that the times leave out."""
        if self.asked.task == "quantise":
            return ("time, embedding and head, which stay in 16 bits off the card, and what is read of the disk",)
        return NOT_COUNTED if self.served is None else (OF_SERVER,)

    @property
    def on_host(self) -> float:
        """Bytes that a replica's ranks on one node have in its host memory."""
        return self.memory.host * min(self.asked.replica, 8)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `estimate --task --json`: bytes, seconds, FLOP."""
        asked, measured = self.asked, known_range()
        servers = asked.task == "generate"
        document: dict[str, Any] = {
            "model": {"name": self.model.name, "params": self.params, "active_params": self.active_params},
            "task": asked.task,
            "layout": {name: value for name, value in msgspec.to_builtins(asked).items() if name != "task"}
            | {"gpus": self.gpus},
            "gpu": None if self.gpu is None else self.gpu.id,
            "memory": needs(self.memory) | {"rank": {"stage": self.memory.stage}, "parts": self.memory.parts},
            "largest_batch": self.largest,
            **({} if self.draft is None else {"draft": self.draft.to_dict()}),
            "not_counted": list(self.not_counted),
        }
        for name, timed, factors in (
            ("first", self.first, self.first_range),
            ("token", self.last, (measured.token_low, measured.token_high)),
        ):
            if timed is not None:
                # A server's first token takes no less than its kernels, and up to what servers were measured to take.
                least = min(factors[0], self.software) if servers else factors[0]
                document[name] = {
                    "flops": timed.flops,
                    "bytes": timed.moved,
                    "seconds": timed.seconds * self.software,
                    "low": timed.seconds * least,
                    "high": timed.seconds * factors[1],
                    "lanes": timed.lanes,
                    "traffic": [msgspec.structs.asdict(row) for row in timed.traffic],
                }
        if self.token is not None:
            document["mean_token"] = self.token
            document["mean_token_range"] = [self.token * factor for factor in self.token_range]
            document["tokens_per_second"] = self.tokens_per_second
            document["money_per_million"] = self.money_per_million
        if self.served is not None:
            document["served"] = msgspec.structs.asdict(self.served) | {
                "token_range": document["mean_token_range"],
                "first_range": [self.served.first * factor for factor in self.served_range],
            }
        if self.pool is not None:
            document["pool"] = {"bytes": self.pool[0], "tokens": self.pool[1]}
        if self.untimed:
            document["untimed"] = self.untimed
        return document


def beside(draft: Draft | None, tower: Tower | None, asked: Inference) -> Drafted:
    """Return what lies beside a model: a draft, and towers of pictures."""
    own = UNAIDED if draft is None else draft.held(asked)
    return own if tower is None else tower.held(asked, own)


def known_range() -> Range:
    """Return the range of times, from measured points of serving (`data/inference.toml`).

    >>> known_range().token_low < 1 < known_range().token_high
    True
    """

    return msgspec.convert(read_table("inference.toml"), Range)


def infer(
    model: ModelSpec,
    asked: Inference,
    gpu: Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    params: int,
    active_params: int,
    price: float | None = None,
    untimed: str = "",
    whole: bool = True,
    draft: Draft | None = None,
    seen: Seen | None = None,
) -> Answer:
    """Estimate a forward pass, or generation. Raises `ConfigError`, `LayoutError` or `NotModelled`.

    params, active_params: of the whole model; untimed: why there is no cluster; whole: with the times
    draft: what proposes tokens; seen: the model with the towers that pictures of prompts need
    """
    asked.check()
    tower = None if seen is None else Tower.of(seen)
    if tower is not None and tower.tokens > asked.prompt:
        raise ConfigError(f"are {tower.tokens:,} tokens of each prompt, which has {asked.prompt:,}", key="pictures")
    refuse(
        asked.task == "generate" and model.head.kind != "lm",
        f"generation of {model.name}, which has no language-model head",
        NotModelled,
    )
    refuse(
        asked.task == "generate"
        and not all(
            block.attention.causal for block in model.blocks if isinstance(block.attention, Attention | LatentAttention)
        ),
        f"generation of {model.name}, whose tokens see those that follow",
        NotModelled,
    )
    if (
        model.max_position_embeddings is not None
        and model.learned_positions
        and asked.context > model.learned_positions
    ):
        raise ConfigError(
            f"{model.name} has {model.learned_positions:,} positions, got {asked.context:,}", key="context"
        )
    if asked.task == "quantise":
        return Answer(
            model=model,
            asked=asked,
            params=params,
            active_params=active_params,
            gpu=gpu,
            price=price,
            memory=quantising(model, asked, gpu),
            untimed="of --task quantise the memory alone is counted",
        )
    stages = split(model, asked)
    answer = Answer(
        model=model,
        asked=asked,
        params=params,
        active_params=active_params,
        gpu=gpu,
        price=price,
        untimed=untimed,
        memory=memory(model, asked, stages, gpu, beside(draft, tower, asked)),
        draft=draft,
        tower=tower,
    )
    if cluster is None or not whole:
        return answer
    try:
        clock = Clock(model, asked, stages, cluster)
        first = clock.prompts() if tower is None else clock.prompts().after("pictures", tower.passed(asked, cluster))
        if asked.task == "forward":
            return msgspec.structs.replace(answer, first=first)
        last = clock.token(asked.context)
        # Seconds grow with the context in a line, but for windows: the mean of both ends and the middle.
        ends = asked.prompt + 1, asked.prompt + (asked.answer + 1) / 2, asked.context
        if draft is None:
            begin, half, end = (clock.token(context).seconds for context in ends)
        else:
            begin, half, end = (speculated(clock, draft, asked, cluster, context) for context in ends)
        mean = (begin + 4 * half + end) / 6
    except NotStated as error:
        return msgspec.structs.replace(answer, untimed=str(error))
    served = left = None
    if (engine := answer.engine) is not None:
        alone = msgspec.structs.replace(asked, replicas=1)
        refuse(
            (engine.cached or 0) >= asked.prompt,
            f"cached={engine.cached} must be below the prompt of {asked.prompt:,} tokens",
            key="server",
        )
        graphs = engine.graphs and asked.batch <= (
            engine.captured or asked.batch
        )  # a larger batch is launched by the host
        options: dict[str, Any] = {"graphs": graphs, "version": engine.version, "tower": tower}
        replica = Server(model, alone, cluster, engine.kind, **options)
        if draft is not None:
            replica = Speculating(model, alone, cluster, engine.kind, draft, **options)
        own, held = answer.held(asked), answer.held
        weights = answer.memory.weights + own.weights + own.tower
        pool, fits = slots_of(replica, engine, weights, asked.prompt, asked.answer, held)
        left = pool, int(pool * asked.context / replica.cache(asked.context))
        served = serve(replica, asked.batch, asked.prompt, asked.answer, fits, engine)
        mean = served.token
        answer = msgspec.structs.replace(answer, memory=msgspec.structs.replace(answer.memory, starts=fits is not None))
    return msgspec.structs.replace(answer, first=first, last=last, token=mean, served=served, pool=left)
