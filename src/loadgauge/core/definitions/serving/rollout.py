"""`Engine`: what generates answers, and its options as each engine means them.

vLLM's `gpu_memory_utilization` is a share of the card's whole memory, in which everything but the CUDA graphs has to be; SGLang's
`mem_fraction_static` is a share of what is free when it starts, for weights and cache alone. (Sources: vllm,
`v1/worker/gpu_worker.py`, `determine_available_memory`; sglang, `model_executor/model_runner.py`; verl, docs/perf/perf_tuning.rst.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import msgspec

from loadgauge.core.base.errors import ConfigError, suggest
from loadgauge.core.base.units import above_zero, rate
from loadgauge.core.definitions.job.job_text import choice, positive_number, switch, whole_number
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.serving.inference import CACHE_FORMATS, PREFILL, WEIGHT_FORMATS
from loadgauge.core.definitions.serving.releases import numbered

Kind = Literal["vllm", "sglang", "trtllm", "hf"]


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """An engine: its options that have defaults, and which others it has none of.

    share: the option that says how much of a card it may use; missing: options that mean nothing to it
    inside: the trained model itself generates, in the trainer's process; answers: it generates for trainers
    waits: the option that makes prompts wait
    """

    title: str
    share: str = ""
    utilization: float | None = None
    static_fraction: float | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    graphs: bool = True
    sleeps: bool = True
    missing: frozenset[str] = frozenset()
    inside: bool = False
    answers: bool = True
    waits: str = ""
    source: str


QUEUES = ("polls", "patience", "company", "balance")
"""Options of how prompts wait, each of one engine."""
OF_SERVERS = ("cached", "captured", "handed")
"""Options of an engine that answers requests, where a rollout has its own."""
BESIDE = ("partial", "every", "inflight")
"""Options of an engine that generates beside a trainer on other GPUs, whose answers may be old."""
HANDED = ("sync", "changed", "disk", "suspend")
"""Options of how a trainer hands weights over, and of what both sides keep meanwhile."""
SYNCS = {
    "ipc": "same card", "nccl": "broadcast", "reshard": "shard to shard", "delta": "delta", "disk": "disk",
    "delta-disk": "delta on disk",
}  # fmt: skip
"""Words of `sync`, and the ways they are."""
ENGINES: dict[str, Defaults] = {
    "vllm": Defaults(
        title="vLLM", share="utilization", utilization=0.9, max_num_seqs=256, max_batched_tokens=8192,
        missing=frozenset({"static_fraction", "batch", *QUEUES}), source="vllm",
    ),
    "sglang": Defaults(
        title="SGLang", share="static_fraction", static_fraction=0.85, max_num_seqs=256, max_batched_tokens=8192,
        missing=frozenset({"utilization", "batch", *QUEUES} - {"polls"}), waits="scheduler_recv_interval", source="sglang",
    ),
    "trtllm": Defaults(
        title="TensorRT-LLM", share="static_fraction", static_fraction=0.9, max_num_seqs=2048, max_batched_tokens=8192,
        missing=frozenset({"utilization", "batch", "polls", *BESIDE, *HANDED}), answers=False,
        waits="batch_wait_timeout_iters", source="trtllm",
    ),
    "hf": Defaults(
        title="transformers' generate", graphs=False, sleeps=False, inside=True,
        missing=frozenset({"utilization", "static_fraction", "max_num_seqs", "max_batched_tokens", "graphs", "sleep", "pp", "ep",
                           "accepted", "version", *QUEUES, *OF_SERVERS, *BESIDE, *HANDED}),
        source="transformers",
    ),
}  # fmt: skip
ROLLOUTS = tuple(name for name, engine in ENGINES.items() if engine.answers)
"""Engines that generate for trainers."""
SERVERS = tuple(name for name, engine in ENGINES.items() if not engine.inside)
"""Engines that serve requests."""
FLAGS_OF_A_SERVER = {name: f"--{name}" for name in MODEL_PARALLEL} | {
    "dp": "--gpus", "kv": "--cache-format", "weights": "--weight-format",
    "context": "--context", "batch": "--batch", "sleep": "", "prefix": "", "accepted": "--acceptance", "turns": "", "tool": "",
    **dict.fromkeys(("observed", "verify", *BESIDE, *HANDED), ""),
}  # fmt: skip
"""Options that a server has flags for, or no use."""
ALIASES = {
    "max_cudagraph_capture_size": "captured", "cuda_graph_max_bs": "captured", "cuda_graph_max_batch_size": "captured",
    "gpu_memory_utilization": "utilization", "mem_fraction_static": "static_fraction", "mem_fraction": "static_fraction",
    "max_num_batched_tokens": "max_batched_tokens", "chunked_prefill_size": "max_batched_tokens",
    "max_running_requests": "max_num_seqs", "kv_cache_dtype": "kv", "kv_dtype": "kv", "tensor_parallel_size": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline_parallel_size": "pp", "data_parallel_size": "dp", "expert_parallel_size": "ep", "sleep_level": "sleep",
    "max_model_len": "context", "context_length": "context", "dtype": "weights", "quantization": "weights",
    "free_gpu_memory_fraction": "static_fraction", "kv_cache_free_gpu_memory_fraction": "static_fraction",
    "max_num_tokens": "max_batched_tokens", "max_batch_size": "max_num_seqs", "scheduler_recv_interval": "polls",
    "batch_wait_timeout_iters": "patience", "batch_wait_max_tokens_ratio": "company", "timeout_iters": "balance",
}  # fmt: skip
"""The engines' own words for options."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout engine and its options.

    tp, pp, ep: ranks of one replica; dp: replicas (None: as many as the GPUs allow)
    utilization: of the card's memory, weights, cache and activations included (vLLM)
    static_fraction: of the memory free at the start, weights and cache (SGLang)
    max_num_seqs: sequences that run at once; max_batched_tokens: tokens of one pass; context: the longest sequence [tokens]
    kv, weights: formats of cache and matrices (`spec.inference`); graphs: CUDA graphs are captured
    sleep: 0 stays on the card, 1 its weights go to host memory and its cache is dropped, 2 both are dropped
    prefix: answers to one prompt share what is read of it; accepted: tokens of a step with speculative decoding
    turns, tool: of an answer, and seconds between two of them, in which a tool or an environment runs; observed: tokens of an
    answer that each of those adds, which are not trained on; verify: seconds that an answer's reward takes on a host
    batch: sequences of a batch, where the engine has no cache of its own (transformers)
    version: its release (None: not named)
    polls: steps from one look for requests to the next (SGLang); of TensorRT-LLM, patience: steps that prompts wait for others,
    company: share of `max_batched_tokens` that ends the wait; balance: steps until each rank with a batch of its own has a prompt
    (None: not said, and the engine's own: no wait)
    partial: answers that run when weights move go on with new ones, where others end first (None: where they may be older than an
    update); every: updates between two moves
    inflight: answers that are begun and not ended, of all replicas
    sync: the way weights come (`SYNCS`; None: as the trainer hands them over); changed: share of the weights that an update
    changes, of those ways that hand over no others; disk: bytes a second of the storage on the way, to write or to read
    suspend: communicators of the side that rests are given back
    cached: tokens of each prompt that the cache of prefixes holds, of a server; captured: the largest batch of a CUDA graph
    handed: prompts come with their cache from servers that only read

    >>> Engine.parse("vllm:tp=2,gpu_memory_utilization=0.6,sleep=2").utilization
    0.6
    """

    kind: Kind
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int | None = None
    utilization: float | None = None
    static_fraction: float | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    context: int | None = None
    kv: str = "bf16"
    weights: str = "bf16"
    graphs: bool = True
    sleep: int = 0
    batch: int | None = None
    prefix: bool = True
    accepted: float | None = None
    turns: int = 1
    tool: float | None = None
    observed: int | None = None
    verify: float | None = None
    version: str | None = None
    polls: int | None = None
    patience: int | None = None
    company: float | None = None
    balance: int | None = None
    partial: bool | None = None
    every: int = 1
    inflight: int | None = None
    sync: str | None = None
    changed: float | None = None
    disk: float | None = None
    suspend: bool = False
    cached: int | None = None
    captured: int | None = None
    handed: bool = False

    def queue(self, prompt: int, ranks: int) -> dict[str, Any]:
        """Return how prompts of so many tokens wait, as `serving.loop.Load` has it. ranks: with batches of their own

        >>> Engine.parse("trtllm:batch_wait_timeout_iters=20,batch_wait_max_tokens_ratio=0.5", "engine").queue(1024, 1)
        {'budget': 8192, 'polls': 1, 'patience': 20, 'company': 4096.0}
        """
        budget = self.max_batched_tokens or PREFILL
        alone = self.patience, (self.company or 0.0) * budget
        patience, company = (self.balance, float(ranks * prompt)) if ranks > 1 else alone
        return {"budget": budget, "polls": self.polls or 1, "patience": patience or 0, "company": company}

    @property
    def queues(self) -> bool:
        """Return whether an option says how prompts wait."""
        return any(getattr(self, name) is not None for name in QUEUES)

    @property
    def inside(self) -> bool:
        """Return whether the trained model itself generates, so that nothing of an engine stays and no weights are handed over."""
        return ENGINES[self.kind].inside

    @property
    def replica(self) -> int:
        """GPUs of one replica."""
        return max(self.tp, self.ep) * self.pp

    @property
    def seen(self) -> int:
        """Tokens of an answer that tools or an environment have added.

        >>> Engine.parse("vllm:turns=5,observed=200").seen
        800
        """
        return (self.turns - 1) * (self.observed or 0)

    def cache_room(self, capacity: float, weights: float, profile: float, outside: float) -> float | None:
        """Return the bytes that the engine leaves for the cache, as it means its share; None where it has none.

        profile: all else that it takes in its first step; outside: what is there when it starts. vLLM's share is of the card and
        holds everything; SGLang's is of what is free at the start, for weights and cache; TensorRT-LLM's of what weights and the
        step leave.

        >>> [Engine.parse(name, "engine").cache_room(80.0, 16.0, 4.0, 0.0) for name in ("vllm", "sglang", "trtllm", "hf")]
        [52.0, 52.0, 54.0, None]
        """
        if self.utilization is not None:
            return self.utilization * capacity - weights - profile
        if self.static_fraction is None:
            return None
        if self.kind == "trtllm":
            return self.static_fraction * (capacity - outside - weights - profile)
        return self.static_fraction * (capacity - outside) - weights

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str, key: str = "rollout") -> Engine:
        """Read `NAME:option=value,...`. Raises `ConfigError` for an engine or an option that is unknown. key: the flag it is of

        >>> Engine.parse("hf:batch=8").graphs, Engine.parse("sglang").static_fraction
        (False, 0.85)
        >>> Engine.parse("vllm==0.6.3", "server").version
        '0.6.3'
        """
        name, _, rest = text.replace("==", ":version=", 1).partition(":")
        name, those = name.strip(), {"rollout": ROLLOUTS, "server": SERVERS}.get(key, tuple(ENGINES))
        if name not in those:
            raise ConfigError(
                f"no engine {name[:40]!r}{suggest(name[:40], those)} (known: {', '.join(those)})", key=key
            )
        server = ENGINES[name]
        options_of: dict[str, object] = {
            option: value
            for option in ("utilization", "static_fraction", "max_num_seqs", "max_batched_tokens", "graphs")
            if (value := getattr(server, option)) is not None
        }
        seen: set[str] = set()
        for item in filter(None, (field.strip() for field in rest.split(","))):
            word, equals, value = item.partition("=")
            option = ALIASES.get(word.strip().replace("-", "_"), word.strip().replace("-", "_"))
            if word.strip() == "enforce_eager" and equals:
                option, value = "graphs", "false" if _switched(value) else "true"
            if not equals and option in cls.__struct_fields__[1:]:
                raise ConfigError(f"{word.strip()} needs a value, as in tp=2", key=key)
            if not equals or option not in cls.__struct_fields__[1:]:
                out = {*server.missing, *(FLAGS_OF_A_SERVER if key == "server" else ())}
                options = [field for field in cls.__struct_fields__[1:] if field not in out]
                raise ConfigError(
                    f"{server.title} has no option {item[:40]!r}{suggest(option[:40], options)} (known: {', '.join(options)})",
                    key=key,
                )
            if option in server.missing:
                raise ConfigError(f"{word.strip()} is no option of {server.title}", key=key)
            if key == "rollout" and option in OF_SERVERS:
                raise ConfigError(f"{word.strip()} is an option of --server", key=key)
            if key == "server" and option in FLAGS_OF_A_SERVER:
                own = FLAGS_OF_A_SERVER[option]
                raise ConfigError(f"{word.strip()} is no option of --{key}; it is {own or 'of a rollout'}", key=key)
            if option in seen:
                raise ConfigError(f"{option} is given twice", key=key)
            seen.add(option)
            try:
                options_of[option] = _value(option, value.strip())
            except ConfigError as error:
                raise ConfigError(f"{word.strip()}: {error}", key=key) from None
        engine = cls(kind=name, **options_of)  # type: ignore[arg-type]
        for option, meaning in (("tool", "the time"), ("observed", "what is read")):
            if getattr(engine, option) is not None and engine.turns < 2:
                raise ConfigError(f"{option}= is {meaning} between turns, which needs turns=2 or more", key=key)
        for option, ending in (("changed", "delta"), ("disk", "disk")):
            ways = [word for word in SYNCS if ending in word]
            if getattr(engine, option) is not None and engine.sync not in ways:
                raise ConfigError(f"{option}= needs sync={' or sync='.join(ways)}", key=key)
        if max(engine.tp, engine.ep) % min(engine.tp, engine.ep):
            raise ConfigError(f"ep={engine.ep} must be a multiple or a divisor of tp={engine.tp}", key=key)
        return engine

    def text(self) -> str:
        """Return the engine as `parse` reads it, defaults left out.

        >>> Engine.parse("vllm:tp=2,kv=fp8").text()
        'vllm:tp=2,kv=fp8'
        """
        plain = Engine.parse(self.kind, "engine")
        stated = {
            name: value for name in self.__struct_fields__[1:] if (value := getattr(self, name)) != getattr(plain, name)
        }
        words = ",".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else rate(value) if name == 'disk' else value}"
            for name, value in stated.items()
        )
        return f"{self.kind}:{words}" if words else self.kind


def said_of(text: str) -> set[str]:
    """Return the options that a text of an engine names.

    >>> said_of("vllm:gpu_memory_utilization=0.9,tp=2") == {"utilization", "tp"}
    True
    """
    words = (item.partition("=")[0].strip().replace("-", "_") for item in text.partition(":")[2].split(","))
    return {ALIASES.get(word, word) for word in words}


def _switched(text: str) -> bool:
    return switch({"1": "true", "0": "false"}.get(text.strip().lower(), text.strip().lower()))


def _value(option: str, text: str) -> object:
    """An option's value. Raises `ConfigError`."""
    if option in ("utilization", "static_fraction", "company", "changed"):
        share = positive_number(text)
        if share > 1:
            raise ConfigError(f"must be a share, at most 1, got {text}")
        return share
    if option == "version":
        numbered(text)
        return text
    if option in ("accepted", "tool", "verify"):
        return positive_number(text)
    if option == "sync":
        return choice(text, tuple(SYNCS))
    if option == "disk":
        return above_zero(text, option, "byte/s", "a bandwidth such as 5GB/s")
    if option in ("graphs", "prefix", "partial", "suspend", "handed"):
        return _switched(text)
    if option in ("kv", "weights"):
        return choice(text, tuple(CACHE_FORMATS if option == "kv" else WEIGHT_FORMATS))
    least = 0 if option in ("sleep", "patience", "balance") else 1
    return whole_number(text, least, 2 if option == "sleep" else 10**9)
