"""Small models of many families, with random weights: the same code paths as the real ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

hf.logging.set_verbosity_error()
torch.set_num_threads(1)  # small tensors: threads only wait for each other

VOCABULARY = 97
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
BERT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_key_value_heads": None}
WINDOW = 7


class Double(TorchFunctionMode):
    """Float64 wherever a model asks for float32: norms, softmax, rotations, routers, states.

    Two ways to the same sum differ in the last digits of float64 by the order in which a CPU's library adds up, which
    depends on the shapes and on the CPU. Where they are rounded to float32 in between, the last digits of float32 differ.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = {torch.float32: torch.float64}
        arguments = [wide.get(one, one) if isinstance(one, torch.dtype) else one for one in arguments]
        named = {
            key: wide.get(one, one) if isinstance(one, torch.dtype) else one for key, one in (keywords or {}).items()
        }
        return function(*arguments, **named)


def _config(kind: str, **changes: Any) -> hf.PreTrainedConfig:
    values = {key: value for key, value in (SHARED | changes).items() if value is not None}
    return getattr(hf, f"{kind}Config")(**values)


def _own(kind: str, **values: Any) -> hf.PreTrainedConfig:
    return getattr(hf, f"{kind}Config")(**({"vocab_size": VOCABULARY, "pad_token_id": 0} | values))


CAUSAL: dict[str, Any] = {
    "llama": lambda: _config("Llama"),
    "qwen2": lambda: _config("Qwen2"),
    "qwen3": lambda: _config("Qwen3", head_dim=8),
    "mistral": lambda: _config("Mistral", sliding_window=WINDOW),
    "ministral": lambda: _config("Ministral", sliding_window=WINDOW, head_dim=8),
    "gemma": lambda: _config("Gemma", head_dim=8),
    "gemma2": lambda: _config("Gemma2", head_dim=8, sliding_window=WINDOW),
    "gemma3": lambda: _config(
        "Gemma3Text", head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: _config("Phi", embd_pdrop=0.0, resid_pdrop=0.0),
    "phi3": lambda: _config("Phi3", embd_pdrop=0.0, resid_pdrop=0.0),
    "glm": lambda: _config("Glm", head_dim=8),
    "glm4": lambda: _config("Glm4", head_dim=8),
    "olmo": lambda: _config("Olmo"),
    "olmo2": lambda: _config("Olmo2"),
    "olmo3": lambda: _config("Olmo3", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "granite": lambda: _config("Granite"),
    "smollm3": lambda: _config("SmolLM3"),
    "cohere": lambda: _config("Cohere"),
    "cohere2": lambda: _config("Cohere2", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "exaone4": lambda: _config("Exaone4", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "stablelm": lambda: _config("StableLm", hidden_dropout=0.0),
    "starcoder2": lambda: _config("Starcoder2", sliding_window=WINDOW, residual_dropout=0.0, embedding_dropout=0.0),
    "gpt2": lambda: hf.GPT2Config(**GPT2),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**GPT2, multi_query=True),
    "gpt_neox": lambda: _config("GPTNeoX", num_key_value_heads=None, hidden_dropout=0.0),
    "opt": lambda: _own(
        "OPT",
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.0,
    ),
    "biogpt": lambda: _config(
        "BioGpt", num_key_value_heads=None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "xglm": lambda: _own(
        "XGLM",
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=128,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "mixtral": lambda: _config("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: _config("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: _config("Qwen3Moe", **EXPERTS, head_dim=8),
    "granitemoe": lambda: _config("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: _config("Olmoe", num_experts=4, num_experts_per_tok=2),
    "deepseek_v2": lambda: _config(
        "DeepseekV2",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_shared_experts=1,
        head_dim=4,
    ),
    "deepseek_v3": lambda: _config(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_shared_experts=1,
    ),
    "llama4": lambda: _config(
        "Llama4Text",
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
    ),
    "gpt_oss": lambda: _config(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "afmoe": lambda: _config(
        "Afmoe", **EXPERTS, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "granite_swa": lambda: _config("GraniteSWA", sliding_window=WINDOW),
    "gemma4": lambda: _config(
        "Gemma4Text",
        head_dim=8,
        global_head_dim=8,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "apertus": lambda: _config("Apertus"),
    "arcee": lambda: _config("Arcee"),
    "ernie4_5": lambda: _config("Ernie4_5", head_dim=8),
    "seed_oss": lambda: _config("SeedOss", head_dim=8, residual_dropout=0.0),
    "hunyuan": lambda: _config("HunYuanDenseV1", head_dim=8),
    "glm4_moe": lambda: _config("Glm4Moe", head_dim=8, **ROUTED),
    "minimax_m2": lambda: _config("MiniMaxM2", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_5": lambda: _config(
        "Qwen3_5Text",
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "falcon": lambda: _own("Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False),
    "falcon_alibi": lambda: _own(
        "Falcon",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "falcon_40b": lambda: _own(
        "Falcon",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "bloom": lambda: _own("Bloom", hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: _own("Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
    "gptj": lambda: hf.GPTJConfig(**GPT2, rotary_dim=4),
    "codegen": lambda: hf.CodeGenConfig(**GPT2, rotary_dim=4),
    "gpt_neo": lambda: _own(
        "GPTNeo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=128,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "mamba": lambda: _own("Mamba", hidden_size=32, num_hidden_layers=2, state_size=8),
    "mamba2": lambda: _own(
        "Mamba2", hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8
    ),
    "falcon_mamba": lambda: _own("FalconMamba", hidden_size=32, num_hidden_layers=2, state_size=8),
    "bamba": lambda: _config("Bamba", attn_layer_indices=[1], **MAMBA),
    "jamba": lambda: _config(
        "Jamba",
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "falcon_h1": lambda: _config("FalconH1", head_dim=8, mamba_d_ssm=64, **MAMBA),
    "granitemoehybrid": lambda: _config(
        "GraniteMoeHybrid",
        layer_types=["mamba", "attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        shared_intermediate_size=32,
        **MAMBA,
    ),
    "lfm2": lambda: _config("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
    "qwen3_next": lambda: _config(
        "Qwen3Next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **EXPERTS,
        shared_expert_intermediate_size=32,
    ),
    "zamba2": lambda: _config(
        "Zamba2",
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_ngroups=1,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        chunk_size=8,
        num_key_value_heads=4,
        num_mem_blocks=1,
        use_mem_rope=True,
        attention_head_dim=16,
        attention_hidden_size=64,
        adapter_rank=4,
    ),
    "nemotron_h": lambda: _config(
        "NemotronH",
        num_hidden_layers=3,
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        head_dim=8,
    ),
    "minimax": lambda: _config(
        "MiniMax",
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=8,
        head_dim=8,
    ),
    "deepseek_v32": lambda: _config(
        "DeepseekV32",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_shared_experts=1,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=64,
    ),
    "recurrent_gemma": lambda: _config(
        "RecurrentGemma",
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
        lru_width=32,
        head_dim=8,
    ),
}

MASKED: dict[str, Any] = {
    "bert": lambda: _config("Bert", **BERT),
    "roberta": lambda: _config("Roberta", **BERT, type_vocab_size=1),
    "xlm_roberta": lambda: _config("XLMRoberta", **BERT, type_vocab_size=1),
    "electra": lambda: _config("Electra", **BERT, embedding_size=16),
    "albert": lambda: _config("Albert", **BERT, embedding_size=16, inner_group_num=1),
    "distilbert": lambda: _own(
        "DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=128, dropout=0.0,
        attention_dropout=0.0,
    ),
    "esm": lambda: _config("Esm", **BERT, position_embedding_type="rotary", mask_token_id=4),
    "modernbert": lambda: _config(
        "ModernBert", num_key_value_heads=None, local_attention=8, global_attn_every_n_layers=2, cls_token_id=3,
        sep_token_id=4,
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> torch.nn.Module:
    """The model of a family in training mode, always with the same weights."""
    torch.manual_seed(0)
    config = (CAUSAL | MASKED)[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    kind = hf.AutoModelForCausalLM if name in CAUSAL else hf.AutoModelForMaskedLM
    model = kind.from_config(config)
    if "@use_experts_implementation" in _source(model):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.to(dtype).train()


def _source(model: torch.nn.Module) -> str:
    import inspect
    import sys

    return inspect.getsource(sys.modules[type(model).__module__])


def ragged(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Random sequences of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 90, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], side: str = "right", shifted: bool = True) -> dict[str, torch.Tensor]:
    """The padded batch of the same sequences, with the same targets: the reference."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, at], mask[i, at], labels[i, at] = torch.tensor(row), 1, torch.tensor(row)
        if shifted:
            labels[i, at.start] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if side == "left":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch
