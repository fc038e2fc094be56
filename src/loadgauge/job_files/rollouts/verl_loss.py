"""The loss of verl's actor: logits, kernels and further tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.job_files.hugging_face import huggingface
from loadgauge.job_files.ideas import Facts, Idea, Keys, spec_of
from loadgauge.job_files.rollouts.verl_names import A, W, engine_of, has_actor


def loss() -> Idea:
    """How log-probabilities are made of the logits.

    With FSDP flash-attention's cross-entropy keeps the 16-bit logits and writes their gradient over them, unless the
    entropy reads them too (`inplace_backward`, workers/actor/dp_actor.py of 0.4 - 0.6, workers/engine/fsdp/transformer_impl.py of
    0.9); with fused kernels the logits are made a chunk at a time. With Megatron it is Megatron's own loss.
    """
    fused = (f"{W}use_fused_kernels", f"{A}use_fused_kernels")
    entropy = (f"{A}entropy_coeff", f"{A}calculate_entropy")

    def read(keys: Keys) -> Facts:
        if any(keys.flag(key) for key in fused):
            return {"loss": "chunked"}
        if engine_of(keys) == "megatron":
            return {}
        if not has_actor(keys) and not keys.since(0, 7):  # SFT's trainer had a loss of its own
            return {}
        return {"loss": "compiled" if keys.real(entropy[0]) or keys.flag(entropy[1]) else "fused"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["loss"]
        if wanted == "chunked":
            return {fused[0]: True}
        return {key: False for key in fused if keys.has(key)} if wanted in ("fused", "compiled", "auto") else {}

    return Idea(keys=fused, facts=("loss",), read=read, write=write)


def liger() -> Idea:
    """Liger's norms and MLPs under FSDP; the loss is verl's own."""
    plain = huggingface.liger(f"{W}use_liger")
    return msgspec.structs.replace(
        plain,
        read=lambda keys: plain.read(keys) if engine_of(keys) == "fsdp" else {"kernels": "native"},
        write=lambda facts, keys: (
            {} if engine_of(keys) == "megatron" and facts.get("kernels") == "liger" else plain.write(facts, keys)
        ),
    )


def next_tokens() -> Idea:
    """Heads of the next tokens, where they are trained too."""
    switch, trained = f"{W}mtp.enable", f"{W}mtp.enable_train"

    def read(keys: Keys) -> Facts:
        if not keys.flag(switch) or not keys.flag(trained):
            return {}
        spec = spec_of(keys, f"{W}path")
        if spec is not None and spec.num_nextn_predict_layers:
            return {"mtp": True}
        keys.note(trained, "heads of the next tokens are trained too, whose number is not known", "costs",
                  "weights gradients optimizer activations loss transient", 0.25)  # fmt: skip
        return {}

    return Idea(
        keys=(switch, trained),
        facts=("mtp",),
        read=read,
        write=lambda facts, keys: (
            {switch: True, trained: True} if facts.get("mtp") else {trained: False if keys.has(trained) else None}
        ),
    )
