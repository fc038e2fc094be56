"""Inference requests: scoring sequences, or generating from them."""

from functools import cache
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.package_data import read_table
from loadgauge.core.definitions.job.job_field import Field
from loadgauge.core.definitions.model.lora import BASE_FORMATS

Task = Literal["forward", "generate", "quantise"]
TASKS: tuple[str, ...] = get_args(Task)
FORMATS = ("weight_format", "cache_format")
"""Fields of which a plan compares several values."""

PREFILL = 8192
"""Tokens of prompts that engines read at once (vLLM's `max_num_batched_tokens`, SGLang's `chunked_prefill_size`)."""
WHOLE_FORMATS: dict[str, float] = {
    name: bits / 8 for family in read_table("whole_formats.toml").values() for name, bits in family.items()
}
"""Bytes of an element of copies that are stored whole, embedding and head too (GGUF, MLX)."""
WEIGHT_FORMATS: dict[str, float] = (
    {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "mxfp8": 1 + 1 / 32}
    | {name: kept.nbytes for name, kept in BASE_FORMATS.items()}
    | WHOLE_FORMATS
)
"""Bytes of an element of a block's matrix, scales included. Embedding, head and vectors stay in 16 bits (fp32: 32), but for
`WHOLE_FORMATS`."""
CACHE_FORMATS: dict[str, float] = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1 + 4 / 64, "int4": 0.5 + 4 / 64, "int2": 0.25 + 4 / 64,
}  # fmt: skip
"""Bytes of a cached element; int: with a 16-bit scale and zero for each 64 (source: transformers, `QuantizedCacheConfig`)."""


def _field(kind: str, help: str, **more: object) -> msgspec.Meta:
    return msgspec.Meta(extra={"field": Field(kind=kind, group="batch", help=help, **more)})  # type: ignore[arg-type]


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """A forward pass, or generation, of `batch` sequences at once on each replica.

    context: tokens of a sequence, prompt and answer together; answer: of these, how many are generated
    prefill_tokens: tokens of prompts that run through the model at once; None: all prompts of the batch
    ep: expert-parallel ranks, over the tp ranks first and then over copies of attention that have batches of their own
    draft, draft_tokens, acceptance: of speculative decoding (`serving.draft`)
    experts_from: bytes a second at which experts' matrices come from host memory; 0: they are on the card
    weight_format, cache_format: names in `WEIGHT_FORMATS` and `CACHE_FORMATS`

    >>> Inference(task="generate", context=4096, answer=512).prompt
    3584
    """

    task: Task
    context: Annotated[
        int,
        _field(
            "whole",
            "With --task generate or forward: tokens of a sequence, prompt and answer together.",
            low=1,
            high=10**9,
        ),
    ]
    answer: Annotated[
        int,
        _field("whole", "With --task generate: how many of the context's tokens are generated (1).", low=1, high=10**9),
    ] = 1
    batch: Annotated[
        int, _field("whole", "With --task: sequences that each replica runs at once (1).", low=1, high=10**7)
    ] = 1
    prefill_tokens: Annotated[
        int | None,
        _field("whole", "With --task: tokens of prompts that run at once (all of the batch).", low=1, high=10**9),
    ] = None
    weight_format: Annotated[
        str,
        _field(
            "choice",
            "With --task: how matrices are stored (bf16): fp8, nvfp4, mxfp4, awq, gptq, nf4, ...; types of GGUF; mlx4, ...",
            choices=tuple(WEIGHT_FORMATS),
            metavar="bf16|fp8|awq|q4_k_m|...",
        ),
    ] = "bf16"
    cache_format: Annotated[
        str,
        _field("choice", "With --task generate: how keys and values are stored (bf16).", choices=tuple(CACHE_FORMATS)),
    ] = "bf16"
    server: Annotated[
        str | None,
        _field(
            "text",
            "With --task generate: an engine that has --batch requests at a time, with its options (version, utilization,"
            " static_fraction, max_num_seqs, max_batched_tokens, graphs, captured, cached, handed, polls, patience, company,"
            " balance); the times are then a server's.",
            metavar="vllm:version=0.6,utilization=0.9",
            values=("vllm", "sglang", "trtllm"),
        ),
    ] = None
    draft: Annotated[
        str | None,
        _field(
            "text",
            "With --task generate: what proposes tokens: a MODEL, eagle (one block beside the model's own embedding and head) or"
            " ngram; --mtp takes the model's own modules.",
            metavar="MODEL",
            values=("ngram", "eagle"),
        ),
    ] = None
    draft_tokens: Annotated[
        int | None, _field("whole", "With --draft or --mtp: tokens proposed in a step (3; --mtp: 1).", low=1, high=1000)
    ] = None
    acceptance: Annotated[
        float | None,
        _field("positive", "With --draft or --mtp: share of the proposed tokens that is accepted.", metavar="SHARE"),
    ] = None
    calibration: Annotated[
        int, _field("whole", "With --task quantise: sequences of --context tokens (128).", low=1, high=10**6)
    ] = 128
    experts_from: float = 0.0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    replicas: int = 1

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.context - self.answer if self.task == "generate" else self.context

    @property
    def attentions(self) -> int:
        """Groups of tp ranks that share the experts between them, each with a batch of its own."""
        return max(1, self.ep // self.tp)

    @property
    def etp(self) -> int:
        """Ranks that share one expert."""
        return max(1, self.tp // self.ep)

    @property
    def replica(self) -> int:
        """GPUs that hold the model once.

        >>> [Inference(task="forward", context=1, tp=tp, ep=ep).replica for tp, ep in ((8, 1), (8, 8), (1, 8), (2, 8))]
        [8, 8, 8, 8]
        """
        return self.tp * self.attentions * self.pp

    @property
    def at_once(self) -> int:
        """Tokens of prompts that run through the model at once."""
        whole = self.prompt * self.batch
        return whole if self.prefill_tokens is None else min(self.prefill_tokens, whole)

    def check(self) -> None:
        """Raises `ConfigError` where nothing is left for a prompt, or ranks of experts and of tensors do not go together."""
        if max(self.ep, self.tp) % min(self.ep, self.tp):
            raise ConfigError(f"must be a multiple or a divisor of --tp {self.tp}, got {self.ep}", key="ep")
        if self.prompt < 1:
            raise ConfigError(f"must be below --context {self.context:,}, got {self.answer:,}", key="answer")


@cache
def fields() -> dict[str, Field]:
    """Return the metadata of the fields that are flags of their own, by name.

    >>> list(fields())[:4]
    ['context', 'answer', 'batch', 'prefill_tokens']
    """
    hints = get_type_hints(Inference, include_extras=True)
    return {
        name: hints[name].__metadata__[0].extra["field"]
        for name in Inference.__struct_fields__
        if hasattr(hints[name], "__metadata__")
    }
