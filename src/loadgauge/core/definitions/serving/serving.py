"""Speed of inference engines, and what they add to a step: `data/serving.toml`, which `make serving` writes.

No figure belongs to a model or a source: shares of the bandwidth and of the peak are those of every engine and card, the rest is of
an engine (its kernels, its host, its all-reduce) or of a kind of chip.
"""

import functools

import msgspec

from loadgauge.core.base.package_data import read_table


class EngineRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overheads of an engine beside the bytes and the FLOPs of a pass.

    kernel: of each kernel, in a CUDA graph [s]; host, sequence: of a step on the host, and of each of its sequences [s]
    collective: of an all-reduce of few bytes between two ranks [s]; prefill: time of prompts over that of their kernels
    steps, first, request: what a first token waits for beside its queue: steps of those that run, seconds, and seconds for each
    request that is there
    mixed: whether a step reads prompts and makes tokens; reserved: share of an answer whose cache is held from its start on
    unsaid: of first tokens, how much further the range goes up where nobody says how prompts wait
    age: time of its kernels and links over that of the releases that were measured
    """

    kernel: float
    host: float
    sequence: float
    collective: float
    prefill: float
    steps: float
    first: float
    request: float
    mixed: bool
    reserved: float
    unsaid: float = 1.0
    age: float = 1.0


class Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `data/serving.toml`.

    bandwidth, experts, cache: shares of the memory bandwidth at which matrices, those of experts, and caches are read
    moved: that at which what lies between kernels is; flops: share of the peak; link: of the link, in an all-reduce
    prompt_dense, prompt_attention, prompt_rest: of prompts, time over that of the kernels in training: products that all tokens
    meet, attention, the rest; prompt_experts: of experts' FLOPs, over that at the card's peak
    sent: share of the link in all-reduces of prompts; blackwell: time of prompts on chips of compute capability 10, over that on
    others
    read: a token of a prompt on the host [s]; apart: steps that a first token waits for where ranks have batches of their own,
    over those where they share one
    """

    date: str
    source: str
    points: int
    bandwidth: float
    experts: float
    cache: float
    moved: float
    flops: float
    link: float
    prompt_dense: float
    prompt_experts: float
    prompt_attention: float
    prompt_rest: float
    sent: float
    blackwell: float
    read: float
    apart: float
    token_low: float
    token_high: float
    first_low: float
    first_high: float
    engines: dict[str, EngineRates]


@functools.cache
def serving() -> Serving:
    """Return the figures.

    >>> sorted(serving().engines), 0.5 < serving().bandwidth < 1
    (['hf', 'sglang', 'trtllm', 'vllm'], True)
    """
    return msgspec.convert(read_table("serving.toml"), Serving)
