"""`Case`: one combination of model, method and libraries, as a person would train it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Method = Literal["full", "lora", "qlora", "dora", "embeddings", "frozen"]
Precision = Literal["fp32", "bf16", "fp32+bf16", "bf16+bf16", "fp32+fp16", "fp16+fp16"]
Checkpointing = Literal["none", "reentrant", "non-reentrant", "offloaded"]
Loss = Literal["plain", "chunked", "liger", "inplace"]
Wrapper = Literal[
    "none", "ddp", "fsdp2", "fsdp2-zero2", "fsdp2-offload", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"
]


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the real libraries are asked for. `words` names it; `Case.of` reads that name.

    family: a key of `stack.models.CONFIGS`
    precision: dtype that the weights are loaded in, and after the plus what Trainer is told (`bf16=True`, `fp16=True`)
    method: `embeddings` trains adapters and the embedding and head whole (`modules_to_save`), `frozen` the last half of
        the layers and the head
    optimizer: Trainer's `optim`
    checkpointing: `offloaded` is TRL's `activation_offloading`, without checkpointing
    loss: `plain` is the model's own, `chunked` TRL's, `liger` Liger's fused linear cross entropy, `inplace` Liger's
        cross entropy, which writes the gradient over the logits
    wrapper: what accelerate wraps the model with, over `gpus` ranks of which the first is traced
    kbit: whether `prepare_model_for_kbit_training` runs (qlora); clip: `max_grad_norm`; layers, hidden, vocab: of the model
    trainer: `sft` and what follows are TRL's; reference: of the preference trainers, where its log-probs come from
    likelihood: `cpo_alpha` of TRL's CPOTrainer, the weight of the chosen answers' own loss; 0: it is not computed
    mixture: `beta` of TRL's GKDTrainer: 0 and 1 are a divergence from one side alone; shifted: whether KTO compares with answers
        to other prompts, which `loss_type="apo_zero_unpaired"` does not
    bucket: `reduce_bucket_size` and `allgather_bucket_size` of DeepSpeed, in elements; 0: its own

    >>> Case(family="gpt2", method="lora").words
    'family=gpt2,method=lora'
    >>> Case.of("family=gpt2,rank=8") == Case(family="gpt2", rank=8)
    True
    """

    family: str = "llama"
    method: Method = "full"
    precision: Precision = "bf16+bf16"
    optimizer: str = "adamw_torch_fused"
    checkpointing: Checkpointing = "none"
    loss: Loss = "plain"
    wrapper: Wrapper = "none"
    trainer: Literal["trainer", "sft", "dpo", "kto", "rm", "orpo", "simpo", "cpo", "gkd", "grpo"] = "trainer"
    reference: Literal["model", "adapter-off", "precomputed"] = "model"
    likelihood: float = 1.0
    mixture: float = 0.5
    shifted: bool = True
    attention: Literal["sdpa", "eager"] = "sdpa"
    rank: int = 16
    targets: Literal["all", "attention"] = "all"
    dropout: float = 0.0
    kbit: bool = True
    double_quant: bool = True
    clip: float = 1.0
    seq_len: int = 512
    micro_batch: int = 2
    accumulate: int = 1
    layers: int = 4
    hidden: int = 512
    vocab: int = 16000
    gpus: int = 4
    bucket: int = 0

    @classmethod
    def of(cls, words: str) -> Case:
        """Reads `field=value,field=value`. Raises msgspec.ValidationError."""
        pairs = (word.partition("=") for word in words.split(",") if word)
        return msgspec.convert({name: _value(text) for name, _, text in pairs}, cls, strict=False)

    @property
    def words(self) -> str:
        """The fields that differ from the defaults, as `Case.of` reads them."""
        given: dict[str, Any] = msgspec.to_builtins(self)
        return ",".join(f"{name}={value}" for name, value in given.items()) or "family=llama"

    @property
    def ranks(self) -> int:
        """Ranks of the world that is simulated."""
        return 1 if self.wrapper == "none" else self.gpus

    @property
    def trains_by_trl(self) -> bool:
        """Whether the script calls SFTTrainer."""
        return self.trainer != "trainer" or self.loss == "chunked" or self.checkpointing == "offloaded"

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch: a pair is two."""
        return self.micro_batch * (2 if self.trainer in ("dpo", "rm", "orpo", "simpo", "cpo") else 1)

    @property
    def adapters(self) -> bool:
        """Whether PEFT wraps the model."""
        return self.method in ("lora", "qlora", "dora", "embeddings")


def _value(text: str) -> Any:
    return {"True": True, "False": False}.get(text, text)
