"""The loss of verl's actor: logits, kernels and further tokens."""

from typing import Any

from loadgauge.job_files.hugging_face import huggingface
from loadgauge.job_files.ideas import (
    Facts,
    Keys,
    Named,
    reads,
    spec_of,
)
from loadgauge.job_files.rollouts.verl_names import A, W, engine_of, has_actor

LOSS_ENTROPY = (f"{A}entropy_coeff", f"{A}calculate_entropy")


def _loss_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = facts["loss"]
    if wanted == "chunked":
        return {at.fused[0]: True}
    return {key: False for key in at.fused if keys.has(key)} if wanted in ("fused", "compiled", "auto") else {}


@reads(facts="loss", write=_loss_written, fused=(f"{W}use_fused_kernels", f"{A}use_fused_kernels"))
def loss(keys: Keys, at: Named) -> Facts:
    """How log-probabilities are made of the logits.

    With FSDP flash-attention's cross-entropy keeps the 16-bit logits and writes their gradient over them, unless the
    entropy reads them too (`inplace_backward`, workers/actor/dp_actor.py of 0.4 - 0.6, workers/engine/fsdp/transformer_impl.py of
    0.9); with fused kernels the logits are made a chunk at a time. With Megatron it is Megatron's own loss.
    """
    if any(keys.flag(key) for key in at.fused):
        return {"loss": "chunked"}
    older = not has_actor(keys) and not keys.since(0, 7)  # SFT's trainer had a loss of its own
    if engine_of(keys) == "megatron" or older:
        return {}
    return {"loss": "compiled" if keys.real(LOSS_ENTROPY[0]) or keys.flag(LOSS_ENTROPY[1]) else "fused"}


@reads(
    inner=huggingface.liger(f"{W}use_liger"),
    write=lambda facts, keys, at: (
        {} if engine_of(keys) == "megatron" and facts.get("kernels") == "liger" else at.inner.write(facts, keys)
    ),
)
def liger(keys: Keys, at: Named) -> Facts:
    """Liger's norms and MLPs under FSDP; the loss is verl's own."""
    return at.inner.read(keys) if engine_of(keys) == "fsdp" else {"kernels": "native"}


@reads(
    facts="mtp",
    write=lambda facts, keys, at: (
        {at.switch: True, at.trained: True}
        if facts.get("mtp")
        else {at.trained: False if keys.has(at.trained) else None}
    ),
    switch=f"{W}mtp.enable",
    trained=f"{W}mtp.enable_train",
)
def next_tokens(keys: Keys, at: Named) -> Facts:
    """Heads of the next tokens, where they are trained too."""
    if not keys.flag(at.switch) or not keys.flag(at.trained):
        return {}
    spec = spec_of(keys, f"{W}path")
    if spec is not None and spec.num_nextn_predict_layers:
        return {"mtp": True}
    keys.note(at.trained, "heads of the next tokens are trained too, whose number is not known", "costs",
              "weights gradients optimizer activations loss transient", 0.25)  # fmt: skip
    return {}
