"""Models of which a part is trained: what autograd keeps, to the byte, and what is trained, to the parameter.

The truth is transformers' own model with `requires_grad` set by its parameters' names, which the words of `--train` are
compared with.
"""

from __future__ import annotations

import bisect
import itertools
import re

import pytest
import torch
from test_whole_model import B, S, measured
from torch import nn

from loadgauge import Layout, RecomputePolicy, estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.layers import block_layer, embedding_layer, head_layer, rotary_layer
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.resolve.trained import train_only
from torch_models import NO_SDPA, Built, build
from torch_peak import CPU_GENERATOR, measured_peak

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYER = r"(model\.layers|transformer\.h|gpt_neox\.layers|model\.decoder\.layers)\."
TABLE = r"(model\.embed_tokens|transformer\.wte|gpt_neox\.embed_in|model\.decoder\.embed_tokens)\."
HEAD = r"(lm_head|embed_out)\."
WORDS = {
    "layers.1:": LAYER + "[12]",
    "layers.-1": LAYER + "2",
    "layers.0": LAYER + "0",
    "layers.1,lm_head": f"{LAYER}1|{HEAD}",
    "layers.*.mlp": LAYER + r"\d\.(mlp|fc)",
    "layers.1:.self_attn": LAYER + r"[12]\.(self_attn|attn|attention)\.",
    "embed_tokens": TABLE,
    "lm_head": HEAD,
    "norm,lm_head": rf"{HEAD}|model\.norm|.*ln_f|(gpt_neox|model\.decoder)\.final_layer_norm",
    "layers.2.mlp,lm_head": rf"{HEAD}|{LAYER}2\.(mlp|fc)",
}
"""Words of `--train`, and the same as a regular expression on the names of transformers' parameters."""
FAMILIES = ("llama-gqa", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gpt2", "gpt-neox", "opt")


def freeze(built: Built, pattern: str) -> int:
    """Freezes all parameters but those that fit; returns the number of elements that are trained."""
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_(re.match(pattern, name) is not None)
    return sum(parameter.numel() for parameter in built.model.parameters() if parameter.requires_grad)


def layers_of(built: Built, spec: ModelSpec) -> list[Layer]:
    view = built.view(S, B)
    blocks = [block_layer(spec.blocks[kind], spec.hidden_size, view) for kind in spec.pattern]
    return [embedding_layer(spec, view), *blocks, head_layer(spec, view)]


def on_a_cpu(built: Built, layers: list[Layer]) -> int:
    """The scalar of the loss; statistics of layer norms that run backward are in the input's dtype on a CPU."""
    kinds = [tensor for layer in layers for tensor in layer.kept() if tensor.name.endswith((".mean", ".rstd"))]
    layer_norms = any(isinstance(module, nn.LayerNorm) for module in built.model.modules())
    narrower = sum(int(tensor.numel) for tensor in kinds) * (built.dtype.itemsize - 4) if layer_norms else 0
    return narrower + 4


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_kept_and_trained(name: str, words: str, dtype: torch.dtype) -> None:
    built = build(name, "eager" if name in NO_SDPA else "sdpa", dtype, tie_word_embeddings=False)
    if built.spec.tie_word_embeddings:
        pytest.skip("its tables are one")
    spec = train_only(built.spec, words)
    trained = freeze(built, WORDS[words])
    layers = layers_of(built, spec)
    weights = [weight for layer in layers for weight in layer.weights if weight.trainable]
    assert sum(int(weight.numel) for weight in weights) == trained
    rotates = any(one.name == "attention.rotary_q" and one.gradients for layer in layers for one in layer)
    tables = rotary_layer(spec, built.view(S, B)).saved() if rotates else 0
    listed = sum(int(layer.saved()) for layer in layers) + int(tables)
    assert measured(built) == listed + on_a_cpu(built, layers)


WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_hidden_layers": 4}
TOLERANCE = 1e-3


# Each word with checkpoints in the one model and without in the other. CPUs without 16-bit instructions are ten times as
# slow in bfloat16, so it is taken once.
PEAKS = [
    ("llama-gqa", "layers.1:", 64, False, "bfloat16"), ("qwen3", "layers.1:", 3000, True, "float32"),
    ("llama-gqa", "layers.*.mlp", 64, True, "float32"), ("qwen3", "layers.*.mlp", 3000, False, "float32"),
    ("llama-gqa", "embed_tokens", 64, False, "float32"), ("qwen3", "embed_tokens", 3000, True, "float32"),
    ("llama-gqa", "layers.1,lm_head", 64, True, "float32"), ("qwen3", "layers.1,lm_head", 3000, False, "float32"),
    ("llama-gqa", "lm_head", 64, False, "float32"), ("qwen3", "lm_head", 3000, True, "float32"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "vocab", "checkpointed", "dtype"), PEAKS)
def test_peaks(name: str, words: str, vocab: int, checkpointed: bool, dtype: str) -> None:
    """Two steps on PyTorch's real allocator, against the estimate: within 0.1 %, but for the checkpoints' generators."""
    built = build(name, "sdpa", DTYPES[dtype], vocab_size=vocab, tie_word_embeddings=False, **WIDE)
    pattern = {"layers.1:": LAYER + "[1-3]", "layers.*.mlp": LAYER + r"\d\.mlp"}.get(words) or WORDS[words]
    spec = train_only(built.spec, words)
    freeze(built, pattern)
    if checkpointed:
        built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layout = Layout(
        micro_batch=2, global_batch=2, seq_len=128, recompute=RecomputePolicy(mode="full" if checkpointed else "none")
    )
    memory = estimate(spec, layout, built.training()).memory
    trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    states = memory.parts["weights"] + memory.parts["optimizer"] + sum(one.nbytes for one in trained)
    want = max(memory.allocated, states + 2 * max(one.nbytes for one in trained))
    got = measured_peak(built, 128, 2, "adamw")
    generators = CPU_GENERATOR * built.spec.num_hidden_layers if checkpointed else 0
    assert want * (1 - TOLERANCE) <= got <= want * (1 + TOLERANCE) + generators, f"{got / want - 1:+.4%}"


SAME = {
    r"^lm_head.weight$,model.layers.2[0-9]*.mlp": "lm_head,layers.2.mlp",
    r"model\.layers\.[12]\.": "layers.1:",
    r"^model.embed_tokens.weight$[:32000]": "embed_tokens",
    "model.layers.*.self_attn.q_proj": "layers.*.q_proj",
    "layers.0,layers.1,layers.2,norm": "layers,norm",
    r"but:(.*\.)?embed_tokens\.": "layers,norm,lm_head",
    r"but:model\.layers\.0\.,but:lm_head": "embed_tokens,layers.1:,norm",
    "layers,but:layers.*.mlp,norm": "layers.*.self_attn,layers.*.input_layernorm,layers.*.post_attention_layernorm,norm",
}


@pytest.mark.parametrize("words", SAME)
def test_other_words(words: str) -> None:
    """A tool's regular expressions name what the words do."""
    spec = build("llama-gqa", "sdpa", torch.bfloat16, tie_word_embeddings=False).spec
    assert train_only(spec, words) == train_only(spec, SAME[words])


@pytest.mark.parametrize(
    "words", ["layers.3", "nothing", "layers.0,", "[", "frozen:1", "layers.0.mlp.experts", "but:x", "but:(.*)"]
)
def test_words_that_name_nothing(words: str) -> None:
    spec = build("llama-gqa", "sdpa", torch.bfloat16).spec
    with pytest.raises(ConfigError):
        train_only(spec, words)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_first_share_is_frozen(share: float) -> None:
    """ms-swift's rule, which counts parameters in the order of the model."""
    built = build("llama-gqa", "sdpa", torch.bfloat16, tie_word_embeddings=False)
    sizes = [parameter.numel() for parameter in built.model.parameters()]
    ends = list(itertools.accumulate(sizes))
    left = sum(sizes[bisect.bisect_right(ends, int(sum(sizes) * share)) :])
    layers = layers_of(built, train_only(built.spec, f"frozen:{share}"))
    assert sum(int(weight.numel) for layer in layers for weight in layer.weights if weight.trainable) == left
