"""Which cases are traced: every pair of choices that the libraries allow, in as many cases as are wanted.

A greedy covering design (source: Cohen et al., The AETG system, 1997): each case is the best of some random ones, by the
number of pairs that no case before it has. When every pair has been seen, seen once counts as unseen, and so on, so that
any number of cases covers the pairs evenly.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

from stack.case import Case

CASES = 348
SEED = 20
CANDIDATES = 60

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "gpt-neox", "mixtral"),
    "method": ("full", "full", "lora", "lora", "qlora", "qlora", "dora", "embeddings", "frozen"),
    "precision": ("fp32", "bf16", "fp32+bf16", "bf16+bf16", "fp32+fp16", "fp16+fp16"),
    "optimizer": (
        "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd",
        "lion_32bit",
    ),
    "checkpointing": ("none", "reentrant", "non-reentrant", "offloaded"),
    "loss": ("plain", "plain", "chunked", "liger", "inplace"),
    "wrapper": (
        "none", "none", "none", "ddp", "fsdp2", "fsdp2-zero2", "fsdp2-offload", "zero1", "zero2", "zero3", "zero2-offload",
        "zero3-offload",
    ),
    "trainer": ("trainer", "sft"),
    "attention": ("sdpa", "sdpa", "eager"),
    "targets": ("all", "attention"),
    "dropout": (0.0, 0.1),
    "kbit": (True, False),
    "double_quant": (True, False),
    "clip": (1.0, 0.0),
    "accumulate": (1, 2),
    "micro_batch": (1, 2),
}  # fmt: skip
"""The choices of each dimension; one that stands there twice is drawn twice as often."""
SIZE: dict[str, Any] = {"layers": 2, "hidden": 256, "vocab": 8000, "seq_len": 256, "gpus": 4}
"""Large enough that every term of the formula is more than one percent somewhere."""
LIGER = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral")
"""Families that Liger has kernels for."""
PLAIN_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor")


def allowed(case: Case) -> str:
    """Why the libraries refuse a case, or why it says nothing new; "" where they run it."""
    sharded = case.wrapper.startswith(("fsdp", "zero"))
    if case.precision == "fp16+fp16" and not case.adapters:
        return "PyTorch's scaler refuses gradients in float16"
    if case.precision == "bf16" and case.method in ("qlora", "dora"):
        return "without autocast the float32 adapters meet 16-bit products: peft casts, as with it"
    if case.loss in ("liger", "inplace") and case.family not in LIGER:
        return "Liger has no kernels for the family"
    if case.loss == "liger" and case.trainer == "sft":
        return "TRL refuses Liger's fused linear cross entropy beside its own"
    if case.loss == "liger" and case.wrapper.startswith("fsdp"):
        return "Liger's fused loss multiplies with a sharded head"
    if case.precision == "fp16+fp16" and case.method == "embeddings":
        return "PyTorch's scaler refuses gradients in float16"
    if case.trainer == "sft" and case.wrapper.startswith("zero3"):
        return "TRL's fused head under ZeRO 3 is not simulated"
    if case.method == "qlora" and sharded:
        return "the 4-bit weights are not sharded: FSDP needs quant_storage, ZeRO 3 its own loading"
    if sharded and case.optimizer not in PLAIN_OPTIMIZERS:
        return "bitsandbytes' optimizers do not know sharded parameters"
    if case.wrapper.startswith("zero") and case.optimizer in ("adafactor", "sgd"):
        return "DeepSpeed refuses client optimizers that it has not tested"
    if case.wrapper.startswith("zero") and case.precision in ("fp32+fp16", "fp16+fp16"):
        return "DeepSpeed's dynamic loss scale skips the first steps"
    if case.wrapper.startswith("fsdp") and case.optimizer == "adafactor":
        return "transformers' Adafactor does not know DTensor"
    if case.wrapper.startswith("fsdp") and "fp16" in case.precision:
        return "FSDP2 needs a scaler of its own"
    if case.accumulate > 1 and case.wrapper != "none":
        return "accumulation is covered without a wrapper"
    if case.attention == "eager" and case.family == "mixtral":
        return "covered by mistral"
    if case.loss in ("chunked", "inplace", "liger") and case.checkpointing == "offloaded":
        return "TRL's loss is chunked in any case; covered by the others"
    return ""


def excluded(draws: int = 10_000) -> Counter[str]:
    """Why random combinations are left out, and how many are for each reason."""
    draw = random.Random(SEED)
    drawn = (tidy({name: draw.choice(values) for name, values in DIMENSIONS.items()}) for _ in range(draws))
    return Counter(why for case in drawn if (why := allowed(case) or unsimulated(case)))


def tidy(values: dict[str, Any]) -> Case:
    """The case of some choices, without those that mean nothing for it."""
    case = Case(**values, **SIZE)
    if not case.adapters:
        values = {**values, "targets": "all", "dropout": 0.0}
    if case.method != "qlora":
        values = {**values, "kbit": True, "double_quant": True}
    if case.loss == "chunked" or case.checkpointing == "offloaded":
        values = {**values, "trainer": "sft"}
    return Case(**values, **SIZE)


def pairs(case: Case) -> list[tuple[Any, ...]]:
    """Every two choices of a case."""
    chosen = [(name, getattr(case, name)) for name in DIMENSIONS]
    return [(*one, *other) for one, other in itertools.combinations(chosen, 2)]


def singles() -> list[Case]:
    """Every choice alone: the rest as in a plain full fine-tune, and what concerns adapters as in a plain LoRA."""
    plain = {name: values[0] for name, values in DIMENSIONS.items()} | {"precision": "bf16+bf16", "micro_batch": 2}
    plain["optimizer"] = "adamw_torch_fused"
    found: dict[Case, None] = {}
    for method in ("full", "lora", "qlora"):
        start = {**plain, "method": method}
        for name, values in DIMENSIONS.items():
            if method == "full" or name in (
                "precision",
                "checkpointing",
                "targets",
                "dropout",
                "kbit",
                "double_quant",
                "loss",
            ):
                for value in values:
                    case = tidy({**start, name: value})
                    if not allowed(case):
                        found[case] = None
    return list(found)


def design(number: int = CASES) -> list[Case]:
    """The cases, the same ones each time: every choice alone, then the covering design, without what cannot be simulated."""
    alone = singles()
    return [case for case in dict.fromkeys([*alone, *covering(number - len(alone))]) if not unsimulated(case)]


def unsimulated(case: Case) -> str:
    """Why the simulated device cannot run a case that the libraries run; "" where it can."""
    if case.checkpointing == "offloaded":
        return "TRL's activation_offloading fetches tensors inside autograd's hooks, which ends the process on fake tensors"
    return ""


def covering(number: int) -> list[Case]:
    """A greedy covering design of the pairs of choices."""
    draw = random.Random(SEED)
    seen: Counter[tuple[Any, ...]] = Counter()
    cases: list[Case] = []
    while len(cases) < number:
        best: tuple[float, Case] | None = None
        for _ in range(CANDIDATES):
            case = tidy({name: draw.choice(values) for name, values in DIMENSIONS.items()})
            if allowed(case) or case in cases:
                continue
            worth = sum(1 / 4 ** seen[pair] for pair in pairs(case))
            if best is None or worth > best[0]:
                best = worth, case
        if best is not None:
            cases.append(best[1])
            seen.update(pairs(best[1]))
    return cases
