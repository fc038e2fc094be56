"""Blocks with several residual streams, and attention to compressed entries: parameters, bytes kept and FLOPs as transformers' own
code has them (DeepSeek-V4, Gemma 3n).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgauge.core.definitions.training.frameworks import TRANSFORMERS  # noqa: E402
from loadgauge.core.families.hf import from_dict  # noqa: E402
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer  # noqa: E402
from loadgauge.core.layers.attention.compressed import compressed_attention  # noqa: E402
from loadgauge.core.layers.operations.builder import Builder  # noqa: E402
from recorded import flops, kept_bytes  # noqa: E402
from torch_models import SIZES, TOKENS, Built  # noqa: E402

SEQ, BATCH, OWN, KEYS, HEAD = 24, 2, 8, 2, 16
V4: dict[str, Any] = {
    **SIZES, **TOKENS, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 20, "moe_intermediate_size": 40, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "index_n_heads": 3, "index_head_dim": 24, "index_topk": 3, "hc_mult": 3, "hc_sinkhorn_iters": 5,
    "sliding_window": 16, "partial_rotary_factor": 0.25, "mlp_layer_types": ["moe"] * 3,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
}  # fmt: skip
V4.pop("intermediate_size", None)
N3: dict[str, Any] = {
    **SIZES, **TOKENS, "num_hidden_layers": 4, "num_key_value_heads": KEYS, "head_dim": HEAD, "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 6,
    "hidden_size_per_layer_input": OWN, "vocab_size_per_layer_input": 96, "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
}  # fmt: skip
CASES = [("deepseek_v4", "eager"), ("gemma3n_text", "eager"), ("gemma3n_text", "sdpa")]


def build(kind: str, attention: str, dtype: torch.dtype) -> Built:
    config = transformers.AutoConfig.for_model(kind, **(V4 if kind == "deepseek_v4" else N3))
    config._attn_implementation, config.use_cache = attention, False
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    return Built(model, config, from_dict(config.to_dict()), attention, dtype)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ():
        yield from tensors(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_blocks(kind: str, attention: str, dtype: torch.dtype) -> None:
    """Each block by itself: tables, the layers' own inputs and borrowed keys and values are kept where they are made."""
    built = build(kind, attention, dtype)
    view = built.view(SEQ, BATCH)
    calls: list[tuple[Any, Any]] = []
    handles = [
        one.register_forward_pre_hook(lambda module, given, named: calls.append((given, named)), with_kwargs=True)
        for one in built.layers
    ]
    ids = built.ids(SEQ, BATCH)
    result = built.model(ids)
    for handle in handles:
        handle.remove()
    for position, (module, (given, named)) in enumerate(zip(built.layers, calls, strict=True)):
        layer = block_layer(built.spec.blocks[built.spec.pattern[position]], built.spec.hidden_size, view)
        assert layer.params == sum(parameter.numel() for parameter in module.parameters())
        elsewhere = list(tensors((given[1:], named)))
        stream = given[0].detach().requires_grad_()
        kept = kept_bytes(
            module, lambda g=given, n=named, m=module, s=stream: m(s, *g[1:], **n), elsewhere, detached=True
        )
        assert sum(kept) == layer.saved(), position
    del result


@pytest.mark.parametrize(("kind", "attention"), [("deepseek_v4", "eager"), ("gemma3n_text", "eager")])
def test_whole(kind: str, attention: str) -> None:
    """FLOPs of a step, and what the ends keep. An indexer's own products run forward only."""
    built = build(kind, attention, torch.float32)
    view, ids = built.view(SEQ, BATCH), built.ids(SEQ, BATCH)
    layers = [block_layer(built.spec.blocks[one], built.spec.hidden_size, view) for one in built.spec.pattern]
    ends = [embedding_layer(built.spec, view), head_layer(built.spec, view)]
    owned = sum(parameter.numel() for parameter in built.model.parameters())
    assert sum(layer.params for layer in (*layers, *ends)) == owned
    forward, backward = flops(lambda: built.model(ids, labels=ids).loss)
    assert sum(layer.forward_flops for layer in (*layers, *ends)) == forward
    assert sum(layer.backward_flops for layer in (*layers, *ends)) == backward


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("axis", ["tp", "tp shared", "cp"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_compressed_attention_over_ranks(position: int, axis: str, attention: str) -> None:
    """What the ranks compute and hold adds up to the whole: parameters, FLOPs of the matrices, and pairs of attention."""
    spec, s, ranks = build("deepseek_v4", "eager", torch.float32).spec, 1024, 2
    mixer = spec.blocks[spec.pattern[position]].attention
    kernels = msgspec.structs.replace(TRANSFORMERS, attention=attention)
    axes = {"tp": {"tp": ranks}, "tp shared": {"tp": ranks, "sequence_parallel": True}, "cp": {"cp": ranks}}[axis]

    def listed(view: View) -> Builder:
        made = Builder(view)
        compressed_attention(made, made.residual("input", 64), mixer, 64)
        return made

    whole = listed(View.of(s, 1, kernels=kernels))
    plain = View.of(s, 1, kernels=kernels)
    share = {"tokens": s // ranks, "positions": s // ranks, "pairs": s * s // ranks} if axis == "cp" else {}
    part = listed(msgspec.structs.replace(plain, **axes, **share))
    assert sum(w.numel * w.shards for each in part.operations for w in each.weights) == sum(
        w.numel for each in whole.operations for w in each.weights
    )
    by_name = {each.name: each for each in part.operations}
    core = {"flash": ("flash",), "eager": ("scores", "context")}[attention]
    for name in ("query_up", "output_groups", "output", *core):
        other = next(each for each in whole.operations if each.name == f"attention.{name}")
        assert by_name[f"attention.{name}"].forward_flops * ranks == pytest.approx(other.forward_flops, rel=1e-9), name
    repeated = {"tp": ranks, "tp shared": 1, "cp": 1}[axis]
    down = next(each for each in whole.operations if each.name == "attention.query_down")
    assert by_name["attention.query_down"].forward_flops * ranks == repeated * down.forward_flops
    keys = (s + (0 if mixer.compress_rate is None else s // mixer.compress_rate)) * mixer.head_dim * 2
    gathers = [one for each in part.operations for one in each.forward_comm if one.kind == "all_gather"]
    sent = [one.nbytes for one in gathers if one.axis == axis.partition(" ")[0]]
    assert (keys in sent) == (axis != "tp")
