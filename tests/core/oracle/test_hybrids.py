"""Linear mixers and the layers of hybrids against transformers' code (5.23): parameters, bytes kept, and FLOPs.

Reference kernels: what autograd keeps and PyTorch counts of transformers' own code. Fused kernels run on GPUs only: in
their place stand functions that save what the kernels' sources say (`stand_ins`), and compute nothing.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hybrid_models import CASES, CLASSES, Hybrid
from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import (
    Attention,
    GatedDeltaNet,
    LightningAttention,
    LinearMixer,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.mixers.mixers import linear_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Layer
from published_formulas import kv_cache_bytes
from recorded import flops, kept_bytes, stored
from stand_ins import DELTA_CHUNK

transformers.logging.set_verbosity_error()

BATCH, HIDDEN = 2, 64
BF16, FP32 = torch.bfloat16, torch.float32

SPECS: dict[str, LinearMixer] = {
    "mamba2": Mamba2(num_heads=8, head_dim=16, state_size=24, n_groups=2, chunk_size=32),
    "mamba2, biased": Mamba2(
        num_heads=4, head_dim=32, state_size=16, n_groups=1, chunk_size=16, conv_kernel=3, use_bias=True,
        output_bias=True, use_conv_bias=False,
    ),
    "delta": GatedDeltaNet(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=24, linear_value_head_dim=16
    ),
    "delta, separate": GatedDeltaNet(
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
        separate_projections=True,
    ),
    "convolution": ShortConvolution(),
    "convolution, biased": ShortConvolution(conv_L_cache=4, conv_bias=True),
    "lightning": LightningAttention(num_attention_heads=4, head_dim=24, block_size=32),
}  # fmt: skip


def module_of(spec: LinearMixer) -> nn.Module:
    """transformers' module of a mixer."""
    if isinstance(spec, Mamba2):
        config = transformers.Mamba2Config(
            hidden_size=HIDDEN, num_heads=spec.num_heads, head_dim=spec.head_dim, state_size=spec.state_size,
            n_groups=spec.n_groups, conv_kernel=spec.conv_kernel, chunk_size=spec.chunk_size, use_bias=spec.use_bias,
            use_conv_bias=spec.use_conv_bias, num_hidden_layers=1,
        )  # fmt: skip
        return Mamba2Mixer(config, 0)
    if isinstance(spec, GatedDeltaNet):
        sizes = {key: value for key, value in vars_of(spec).items() if key.startswith("linear_")}
        keys = {**sizes, "hidden_size": HIDDEN, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
        if spec.separate_projections:
            return Qwen3_5GatedDeltaNet(transformers.Qwen3_5TextConfig(**keys), 0)
        return Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**keys), 0)
    heads = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
    if isinstance(spec, ShortConvolution):
        return Lfm2ShortConv(transformers.Lfm2Config(**heads, **vars_of(spec), layer_types=["conv"] * 32), 0)
    assert isinstance(spec, LightningAttention)
    config = transformers.MiniMaxConfig(
        **heads, head_dim=spec.head_dim, block_size=spec.block_size, num_hidden_layers=2
    )
    return MiniMaxLightningAttention(config, 1)


def vars_of(spec: LinearMixer) -> dict[str, object]:
    return {field: getattr(spec, field) for field in spec.__struct_fields__}


def listed(spec: LinearMixer, s: int, dtype: torch.dtype) -> Layer:
    kernels = Kernels(norm="upcast", recurrence="reference", dtypes=Dtypes(activation=dtype.itemsize))
    build = Builder(View.of(s, BATCH, kernels=kernels))
    linear_mixer(build, build.residual("input", HIDDEN), spec, HIDDEN)
    return build.layer("mixer")


def not_counted(spec: LinearMixer, s: int) -> tuple[int, int]:
    """What the list counts, and PyTorch's counter does not: of the forward and of the backward.

    It knows no triangular solve. And transformers leaves out gradients that nobody needs: of the state before the first
    chunk, which is no result of anything, and of the state after the last one, which is dropped.
    """
    if isinstance(spec, GatedDeltaNet):
        chunk, key, value = spec.chunk_size, spec.linear_key_head_dim, spec.linear_value_head_dim
        rows = BATCH * -(-s // chunk) * chunk * spec.linear_num_value_heads
        solves = rows * chunk * (key + value)
        one = 2 * BATCH * chunk * spec.linear_num_value_heads * key * value
        return solves, solves + 2 * one + 2 * one
    if isinstance(spec, LightningAttention):
        first, last = min(s, spec.block_size), (s - 1) % spec.block_size + 1
        one = 2 * BATCH * spec.num_attention_heads * spec.head_dim**2
        return 0, first * one + 2 * last * one
    return 0, 0


def convolution_flops(layer: Layer) -> int:
    return sum(operation.forward_flops for operation in layer if operation.kind == "convolution")


# -- the mixers alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "dtype"), [*((s, BF16) for s in (96, 80, 200, 32, 20)), (200, FP32)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_mixers_of_transformers(name: str, s: int, dtype: torch.dtype) -> None:
    """Lengths that fill the chunks, that do not, and that are one chunk or less."""
    spec = SPECS[name]
    if isinstance(spec, GatedDeltaNet) and dtype == torch.float32:
        with pytest.raises(NotModelled, match="float32"):
            listed(spec, s, dtype)
        return
    module = module_of(spec).to(dtype).train()
    x = torch.randn(BATCH, s, HIDDEN, dtype=dtype, requires_grad=True)

    def call() -> torch.Tensor:
        result = module(x, None, None) if isinstance(spec, LightningAttention) else module(x)
        return result[0] if isinstance(result, tuple) else result

    layer = listed(spec, s, dtype)
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())
    assert layer.saved() == sum(stored(layer)) == sum(kept_bytes(module, call))
    forward, backward = flops(call)
    of_forward, of_backward = not_counted(spec, s)
    assert layer.forward_flops == forward + of_forward
    # The counter takes the backward of a convolution by groups for one over all channels.
    module.zero_grad()
    products = backward - grouped_convolutions(call)
    assert layer.backward_flops == products + of_backward + 2 * convolution_flops(layer)


def grouped_convolutions(call: object) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call().sum().backward()  # type: ignore[operator]
    return counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution_backward, 0)


# -- whole layers ------------------------------------------------------------------------------------------------------


def router_bytes(name: str, layer: Layer, dtype: torch.dtype) -> int:
    """Router scores that transformers holds in another dtype than the list: LFM2's in 16 bits."""
    routed = any(operation.name == "mlp.router" for operation in layer)
    if not routed or dtype == torch.float32:
        return 0
    tokens, experts, chosen = BATCH * 96, 4, 2
    return -2 * tokens * (experts + chosen + 1) if name == "lfm2, experts" else 0


@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    [
        (name, *how)
        for name in CASES
        for how in (("sdpa", BF16), ("eager", BF16 if name.startswith(("qwen3", "olmo")) else FP32))
    ],
    ids=str,
)
def test_layers_in_reference_code(name: str, attention: str, dtype: torch.dtype) -> None:
    hybrid = Hybrid(name, dtype, attention)
    for position, (kept, forward) in enumerate(hybrid.measured(96, BATCH)):
        mixer = hybrid.spec.blocks[hybrid.spec.pattern[position]].attention
        if isinstance(mixer, Mamba1) or (isinstance(mixer, GatedDeltaNet) and dtype == torch.float32):
            with pytest.raises(NotModelled, match=r"reference code|loop of a Mamba mixer"):
                hybrid.listed(position, 96, BATCH)
            continue
        layer = hybrid.listed(position, 96, BATCH)
        assert sum(stored(layer)) + router_bytes(name, layer, dtype) == kept
        solves = not_counted(mixer, 96)[0] if isinstance(mixer, GatedDeltaNet) else 0
        assert layer.forward_flops == forward + solves


@pytest.mark.parametrize(("s", "dtype"), [(96, BF16), (40, FP32)], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] != "minimax"])
def test_layers_with_fused_kernels(name: str, s: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assumption as far as the kernels go: they keep what their sources say. All around them is PyTorch's truth."""
    hybrid = Hybrid(name, dtype, patch=monkeypatch)
    for position, (kept, _) in enumerate(hybrid.measured(s, BATCH)):
        layer = hybrid.listed(position, s, BATCH)
        assert sum(stored(layer)) + router_bytes(name, layer, dtype) * s // 96 == kept


# -- fused kernels: the products of the algorithm by chunks ------------------------------------------------------------


def test_fused_products_are_those_of_the_algorithm() -> None:
    """Of the reference code's products, the fused kernels leave out B and C of every head but one of a group."""
    s, spec = 128, SPECS["mamba2"]
    assert isinstance(spec, Mamba2)
    fused = flops_of(spec, s)
    tokens, inner, chunk = BATCH * s, spec.num_heads * spec.head_dim, spec.chunk_size
    channels = inner + 2 * spec.n_groups * spec.state_size
    matrices = 2 * tokens * HIDDEN * (inner + channels + spec.num_heads) + 2 * tokens * inner * HIDDEN
    scan = 2 * tokens * (chunk * spec.n_groups * spec.state_size + chunk * inner + 2 * inner * spec.state_size)
    assert fused == matrices + scan + 2 * tokens * channels * spec.conv_kernel
    delta = SPECS["delta"]
    assert isinstance(delta, GatedDeltaNet)
    heads, key, value = delta.linear_num_value_heads, delta.linear_key_head_dim, delta.linear_value_head_dim
    keys = delta.linear_num_key_heads * key
    matrices = 2 * tokens * HIDDEN * (2 * keys + 3 * heads * value + 2 * heads)
    rule = 2 * tokens * heads * (DELTA_CHUNK * (3 * key + 2 * value) + 3 * key * value)
    assert flops_of(delta, s) == matrices + rule + 2 * tokens * (2 * keys + heads * value) * 4


def flops_of(spec: LinearMixer, s: int) -> int:
    build = Builder(View.of(s, BATCH))
    linear_mixer(build, build.residual("input", HIDDEN), spec, HIDDEN)
    return build.layer("mixer").forward_flops


# -- what decoding keeps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if "experts" not in name])
def test_states_of_the_cache(name: str) -> None:
    model_type, keys = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **keys)
    if model_type == "minimax":
        config._experts_implementation = "grouped_mm"
    model = getattr(transformers, CLASSES[model_type])(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        result = model(torch.randint(3, 90, (BATCH, 48)), use_cache=True)
    found = getattr(result, "past_key_values", None) or result.cache_params
    held: dict[int, int] = {}
    stack: list[object] = [found]
    seen: set[int] = set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            held[one.data_ptr()] = one.numel() * one.itemsize if one.numel() else 0
        elif isinstance(one, dict):
            stack.extend(one.values())
        elif isinstance(one, list | tuple):
            stack.extend(one)
        elif type(one).__module__.startswith("transformers") and not isinstance(one, transformers.PreTrainedConfig):
            stack.extend(vars(one).values())
    assert kv_cache_bytes(from_dict({"model_type": model_type, **keys}), BATCH, 48) == sum(held.values())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "jamba"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_channels_of_a_scan_are_shared_out(name: str, ranks: int) -> None:
    """A rank keeps and computes its share of all but the parameters of a token, which are a sum over the ranks."""
    model_type, keys = CASES[name]
    spec = from_dict({"model_type": model_type, **keys})
    block = next(block for block in spec.blocks if isinstance(block.attention, Mamba1))
    whole, share = (block_layer(block, spec.hidden_size, View.of(96, 1, tp=tp)) for tp in (1, ranks))
    scans = [next(each for each in layer.operations if each.name == "mamba.scan") for layer in (whole, share)]
    assert scans[1].forward_flops * ranks == scans[0].forward_flops
    assert share.forward_flops < whole.forward_flops / ranks * 1.1
    (summed,) = (one for each in share.operations if each.name == "mamba.parameters" for one in each.forward_comm)
    mixer = block.attention
    assert isinstance(mixer, Mamba1)
    assert (summed.kind, summed.axis) == ("all_reduce", "tp")
    assert summed.nbytes == 2 * 96 * (mixer.time_step_rank + 2 * mixer.state_size)


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next", "lfm2", "minimax", "jamba"])
def test_context_parallelism_without_heads_and_autocast_are_refused(name: str) -> None:
    model_type, keys = CASES[name]
    spec = from_dict({"model_type": model_type, **keys})
    block = next(block for block in spec.blocks if not isinstance(block.attention, Attention))
    if name not in ("mamba2", "qwen3-next"):
        with pytest.raises(NotModelled, match="context parallelism"):
            block_layer(block, spec.hidden_size, View.of(64, 1, cp=2))
    how = Kernels(recurrence="reference", dtypes=Dtypes(residual=4))
    with pytest.raises(NotModelled, match=r"autocast|loop"):
        block_layer(block, spec.hidden_size, View.of(64, 1, kernels=how))


@pytest.mark.parametrize("name", ["mamba2", "qwen3-next"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_sequence_exchange_tokens_for_heads(name: str, ranks: int) -> None:
    """A rank keeps and computes its share, and sends and gets what the projection made and the rule gives, both ways."""
    model_type, keys = CASES[name]
    spec = from_dict({"model_type": model_type, **keys})
    block = next(block for block in spec.blocks if not isinstance(block.attention, Attention))
    whole = block_layer(block, spec.hidden_size, View.of(1024, 1))
    share = block_layer(block, spec.hidden_size, View.of(1024 // ranks, 1, cp=ranks))
    assert share.saved() * ranks == pytest.approx(whole.saved(), rel=0.01)
    assert share.forward_flops * ranks == pytest.approx(whole.forward_flops, rel=1e-3)
    sent = [one for operation in share.operations for one in operation.forward_comm if one.axis == "cp"]
    assert [one.kind for one in sent] == ["all_to_all"] * 2
    mixer = block.attention
    if isinstance(mixer, GatedDeltaNet):
        values = mixer.linear_num_value_heads * mixer.linear_value_head_dim
        both = 2 * mixer.linear_num_key_heads * mixer.linear_key_head_dim + 2 * (values + mixer.linear_num_value_heads)
        widths = [both, values]
    else:
        values = mixer.num_heads * mixer.head_dim
        widths = [2 * values + 2 * mixer.n_groups * mixer.state_size + mixer.num_heads, values]
    assert [one.nbytes for one in sent] == [2 * 1024 // ranks * width for width in widths]
    back = [one.nbytes for operation in share.operations for one in operation.backward_comm if one.axis == "cp"]
    assert sorted(back) == sorted(one.nbytes for one in sent)
