"""Kernels of fused attention: their names, and which one a framework runs on a card with its releases of libraries."""

from typing import NamedTuple

from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.training.stacks import NEWEST_STACK, Release, Stack

FLASH_KERNELS: dict[str, str] = {
    "fa1": "FlashAttention-1, Triton's of its time, or PyTorch's memory-efficient kernel",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3 (Hopper)",
    "fa4": "FlashAttention-4 (Blackwell)",
    "cudnn": "cuDNN's, which Transformer Engine runs",
    "aiter": "AMD's own (AITER, Composable Kernel)",
    "vendor": "the vendor's own, on what is neither NVIDIA's nor AMD's",
}
"""Kernels that never write the scores, by the name that `--attention` takes."""

ATTENTIONS = ("flash", "eager", *FLASH_KERNELS)
"""Values of `--attention`: fused, written out, or a named fused kernel."""

HOPPER, BLACKWELL = "9", "10"
"""Compute capabilities (major) of the data-centre cards that have kernels of their own."""


class Choice(NamedTuple):
    """A kernel, the cards it is chosen on (major compute capability; all where there are none) and since which releases."""

    kernel: str
    source: str
    cards: tuple[str, ...] = ()
    since: tuple[tuple[str, Release], ...] = ()


TRANSFORMER_ENGINE = (
    Choice("cudnn", "transformer-engine: dot_product_attention/utils.py, get_attention_backend", (HOPPER, BLACKWELL)),
    Choice("fa2", "transformer-engine: dot_product_attention/utils.py, get_attention_backend"),
)
"""Transformer Engine prefers cuDNN's kernel on Hopper and later, and FlashAttention-2 before."""

SDPA = (
    Choice(
        "cudnn", "transformers, pull request 48163: check_prefer_cudnn_attention, with the cuDNN of the wheels",
        (HOPPER, BLACKWELL), (("torch", (2, 11)),),
    ),
    Choice("fa2", "pytorch: aten/native/transformers/cuda/sdp_utils.cpp"),
)  # fmt: skip
"""PyTorch's `scaled_dot_product_attention`: cuDNN from 2.11 on, whose wheels bring the release of it that is trusted."""

TORCHTITAN = (Choice("cudnn", "torchtitan: models/attention.py, set_priority", (BLACKWELL,)), *SDPA)
"""torchtitan asks for cuDNN on Blackwell itself."""


CARDS: dict[str, tuple[str, ...]] = {"fa3": (HOPPER,), "fa4": (HOPPER, BLACKWELL)}
"""Kernels that run on some cards only, by major compute capability (source: dao2023, the library's own README)."""


def runs_on(kernel: str, card: Gpu) -> bool:
    """Return whether a kernel of attention runs on a card.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [runs_on("fa3", gpu(id)) for id in ("a100-sxm4-80gb", "h100-sxm5-80gb")], runs_on("aiter", gpu("mi300x"))
    ([False, True], True)
    >>> from loadgauge.core.definitions.hardware.hardware import card_of
    >>> runs_on("fa2", card_of("80GiB"))
    True
    """
    if card.vendor == "other":  # of which only the memory is known
        return True
    if card.vendor != "nvidia":
        return kernel in ("fa2", "aiter") if card.vendor == "amd" else kernel == "vendor"
    if kernel in ("aiter", "vendor"):
        return False
    if kernel in ("fa2", "cudnn") and not card.flash_attention:
        return False
    return kernel not in CARDS or card.compute_capability.partition(".")[0] in CARDS[kernel]


def flash_kernel(choices: tuple[Choice, ...], card: Gpu | None, stack: Stack = NEWEST_STACK) -> str:
    """Return the kernel that is chosen on a card.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [flash_kernel(SDPA, gpu(id)) for id in ("t4", "a100-sxm4-80gb", "h100-sxm5-80gb", "mi300x", "tpu-v5p")]
    ['fa1', 'fa2', 'cudnn', 'aiter', 'vendor']
    >>> flash_kernel(SDPA, gpu("h100-sxm5-80gb"), Stack.parse("torch=2.4"))
    'fa2'
    """
    if card is not None and card.vendor == "amd":
        return "aiter"
    if card is not None and not card.flash_attention:
        return "fa1"
    if card is not None and not card.compute_capability and card.vendor != "nvidia":
        return "vendor"
    major = "" if card is None else card.compute_capability.partition(".")[0]
    for choice in choices:
        fits = not choice.cards or major in choice.cards
        if fits and all(stack.at_least(library, *release) for library, release in choice.since):
            return choice.kernel
    raise AssertionError("the last choice has neither cards nor releases")
