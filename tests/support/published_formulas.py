"""Formulas as they were published, to reproduce published tables with. Where one is wrong, it says what is right.

Legend: B global batch, b micro-batch, l layers, s sequence length, h hidden size, a heads, v vocabulary.
"""

from __future__ import annotations

import math

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    LinearMixer,
    Mamba1,
    Mamba2,
    ModelSpec,
    ShortConvolution,
)
from loadgauge.core.estimate.time.cost import DAY
from loadgauge.core.estimate.time.flops import Flops
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer


def korthikanti_hardware_flops(layers: Size, hidden_size: Size, vocab_size: Size, seq_len: Size, batch: Size) -> Size:
    """72 B l s h^2 (1 + s/3h + v/12hl): FLOPs of a step with selective recomputation [FLOP].

    Source: korthikanti2022, equation 8. Wrong: running the core of attention again costs 4 B s^2 h a layer, as the
    paper's own text says; the equation adds 12. Right: `estimate.compute.microbatch_flops(...).hardware` with selective
    recomputation, 72 B l s h^2 (1 + 2s/9h + v/12hl). The hardware utilisation in table 5 follows the equation.

    >>> korthikanti_hardware_flops(1, 3, 0, 1, 1) == 72 * 9 + 24 * 3
    True
    """
    l, h, v, s = layers, hidden_size, vocab_size, seq_len
    return 72 * batch * l * s * h**2 + 24 * batch * l * s**2 * h + 6 * batch * s * h * v


def korthikanti_selective_overhead(hidden_size: Size, seq_len: Size) -> Size:
    """s/6h: extra FLOPs of selective recomputation, as a share of the model's.

    Source: korthikanti2022, equation 9, an approximation of equation 8 over equation 7. Wrong: three times too large,
    as equation 8 is; and the paper's 2.7 % (GPT-3) and 1.6 % (MT-NLG) are the exact quotient, not this approximation.
    Right: `recompute / model` of `estimate.compute.microbatch_flops`, (s/18h) / (1 + s/6h) for the layers alone.

    >>> round(korthikanti_selective_overhead(12288, 2048), 4)
    0.0278
    """
    return seq_len / (6 * hidden_size)


def square_root_checkpointing(activations_gb: float) -> float:
    """The square root of the activations in GB, taken for what checkpointing leaves of them [GB].

    Source: a post on training memory whose Python code has been copied widely (article 2 of tests/core/paper). Wrong: a root
    of bytes depends on the unit, so the same memory counted in MB or in bytes gives other answers. The square root of
    chen2016 is of the number of layers. Right: `estimate.recompute.checkpointed`.

    >>> square_root_checkpointing(49.0), square_root_checkpointing(49_000.0) / 1000 < 0.3
    (7.0, True)
    """
    return math.sqrt(activations_gb)


def states_with_master(params: Size, itemsize: Size) -> Size:
    """(p + p + 12) bytes a parameter, whatever the precision p [bytes].

    Source: the same post (article 2 of tests/core/paper). Wrong at p = 4: training in float32 has no float32 copy of the
    weights beside them, so it needs 4 + 4 + 8 = 16 bytes, not 20 (megatron-lm). Right: `estimate.states.model_states`.

    >>> states_with_master(10, 2), states_with_master(10, 4)
    (160, 200)
    """
    return (itemsize + itemsize + 12) * params


def zero_activations(layers: Size, hidden_size: Size, seq_len: Size, batch: Size) -> Size:
    """12 h b s l elements of two bytes: activations of a GPT [bytes].

    Source: rajbhandari2019, section 3.2. Wrong: leaves out the attention scores and the dropout masks, and counts 24
    bytes a token and hidden unit where 34 are kept. Right: `layers.block_layer(...).saved()`, s b h (34 + 5as/h) a
    layer.

    >>> zero_activations(48, 1600, 1024, 32) / 1e9
    60.3979776
    """
    return 2 * 12 * hidden_size * batch * seq_len * layers


def padded_flash_activations(hidden_size: Size, heads: Size, padded_tokens: Size, tokens: Size) -> Size:
    """34 h T' + T (h + 2a): a layer whose attention alone runs without padding [bytes].

    T' tokens with padding, T without. Source: padfree2024, M_flash. Wrong: half of the attention's own term is lost;
    the output and the statistics take 2T (h + 2a) bytes, as the post says one formula earlier. Right: 34 h T' + 2h T
    + 4a T, from the list of operations: `layers.block_layer` at T' tokens and no pairs, and the fused kernel's output
    and log-sum-exp at T tokens. PyTorch keeps less: the queries, keys and values of the kernel are copies without padding
    too, 28 h T' + 8h T + 4a T, `View.kernel_tokens`. (Where all of it runs padded: (34h + 4a) T'.)

    >>> padded_flash_activations(6144, 48, 100, 100) == 100 * (35 * 6144 + 2 * 48)
    True
    """
    return 34 * hidden_size * padded_tokens + tokens * (hidden_size + 2 * heads)


def padding_free_activations(hidden_size: Size, heads: Size, tokens: Size) -> Size:
    """T (35 h + 2a): a layer that runs without padding throughout [bytes].

    Source: padfree2024, M_padding-free. Wrong twice: the kernel's output is the output projection's input, which the 34
    already holds (counted double), and the same half is lost as with padding. Right: `layers.block_layer(...).saved()`
    with flash attention at T tokens, T (34h + 4a).

    >>> padding_free_activations(6144, 48, 1) - (34 * 6144 + 4 * 48) == 6144 - 2 * 48
    True
    """
    return tokens * (35 * hidden_size + 2 * heads)


def cluster_tensor_elements(micro_batch: Size, seq_len: Size, hidden_size: Size) -> Size:
    """4 b s h a micro-batch: elements that tensor parallelism all-reduces on one rank.

    Source: a post on sizing a cluster (article 3 of tests/core/paper). Wrong: that is one layer; a rank has l/p of them. Right:
    the rows of `estimate.traffic.stage_traffic`.

    >>> cluster_tensor_elements(1, 2048, 12288) == 4 * 2048 * 12288
    True
    """
    return 4 * micro_batch * seq_len * hidden_size


def cluster_pipeline_elements(micro_batch: Size, seq_len: Size, hidden_size: Size) -> Size:
    """2 b s h a step: elements that an inner pipeline stage sends.

    Source: the same post (article 3 of tests/core/paper). Wrong: that is one micro-batch; a step has m of them. Right: the rows
    of `estimate.traffic.stage_traffic`.

    >>> cluster_pipeline_elements(1, 2048, 12288) == 2 * 2048 * 12288
    True
    """
    return 2 * micro_batch * seq_len * hidden_size


def cluster_tensor_bandwidth(ranks: Size, hidden_size: Size, achieved_flops: Size, share: Size) -> Size:
    """(t - 1) X / (6 r h): byte/s that tensor parallelism needs to take a share r of compute's time, 16-bit activations.

    Source: the same post (article 3 of tests/core/paper), whose 100 to 300 GB/s it gives. Wrong: 8 FLOPs a parameter and token
    are those of full recomputation, which runs 2 of the 4 all-reduces of a layer again. Right: (t - 1) X / (4 r h), by
    `estimate.network.bandwidth_needed` of the rows with full recomputation.

    >>> round(cluster_tensor_bandwidth(8, 12288, 150e12, 0.05) / 1e9)
    285
    """
    return (ranks - 1) * achieved_flops / (6 * share * hidden_size)


def rule_of_thumb(params: Size, tokens: Size, *, full_recompute: bool = False) -> Flops:
    """FLOPs by the rule of 2 per parameter and token forward, 4 backward, and 2 again where all is recomputed.

    Holds when s is well below 6 h and the vocabulary below 12 l h (source: narayanan2021, equation 3). Inference is the
    forward alone; training is 6 P T, or 8 P T with full recomputation. `microbatch_flops` is exact.

    >>> flops = rule_of_thumb(175e9, 300e9, full_recompute=True)
    >>> flops.model == 6 * 175e9 * 300e9, flops.hardware == 8 * 175e9 * 300e9
    (True, True)
    """
    forward = 2 * params * tokens
    return Flops(forward, 2 * forward, forward if full_recompute else 0)


def forward_flops_per_token(model: ModelSpec, context: Size) -> Size:
    """FLOPs to infer one token with `context` tokens before it: 2 per matrix parameter and 4 h a layer and token seen.

    >>> from loadgauge.core.families.reference import gpt_model
    >>> forward_flops_per_token(gpt_model(96, 12288, 96, 51200), 0) == 2 * (12 * 96 * 12288**2 + 12288 * 51200)
    True
    """
    view = View(tokens=1, pairs=context)
    counts = model.layer_counts()
    layers = [block_layer(block, model.hidden_size, view) for block in model.blocks]
    inside = sum(count * layer.forward_flops for count, layer in zip(counts, layers, strict=True))
    return inside + embedding_layer(model, view).forward_flops + head_layer(model, view, loss=False).forward_flops


def kv_cache_bytes(model: ModelSpec, sequences: Size, length: Size, itemsize: Size = 2) -> Size:
    """Bytes of keys and values kept for decoding: 2 k d a layer, sequence and token; a window bounds the length.

    Multi-head latent attention keeps the latent and the rotated part of the keys instead (source: deepseek2024v2), and a
    linear mixer a state that does not grow.

    >>> from loadgauge.core.families.reference import gpt_model
    >>> kv_cache_bytes(gpt_model(96, 12288, 96, 50257), 64, 512 + 32)
    164282499072
    """
    total: Size = 0
    for block, count in zip(model.blocks, model.layer_counts(), strict=True):
        mixer = block.attention
        if isinstance(mixer, LatentAttention):
            width = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        elif isinstance(mixer, Attention):
            width = 2 * mixer.num_key_value_heads * mixer.head_dim
        else:
            total = total + count * _state_bytes(mixer, model.hidden_size, itemsize)
            continue
        held = length if mixer.sliding_window is None else min(length, mixer.sliding_window)
        total = total + count * (width * held * itemsize + _state_bytes(block.beside, model.hidden_size, itemsize))
    return total * sequences


def _state_bytes(mixer: LinearMixer | None, hidden_size: Size, itemsize: Size) -> Size:
    """Bytes that a linear mixer keeps of one sequence, however long: the last inputs of its convolution, and its state.

    As transformers' cache holds them: the state in float32, but for lightning attention.
    """
    if isinstance(mixer, Mamba2):
        inner = mixer.num_heads * mixer.head_dim
        channels = inner + 2 * mixer.n_groups * mixer.state_size
        return itemsize * channels * mixer.conv_kernel + 4 * inner * mixer.state_size
    if isinstance(mixer, Mamba1):
        return mixer.intermediate_size * (itemsize * mixer.conv_kernel + 4 * mixer.state_size)
    if isinstance(mixer, GatedDeltaNet):
        keys = mixer.linear_num_key_heads * mixer.linear_key_head_dim
        values = mixer.linear_num_value_heads * mixer.linear_value_head_dim
        state = values * mixer.linear_key_head_dim
        return itemsize * (2 * keys + values) * mixer.linear_conv_kernel_dim + 4 * state
    if isinstance(mixer, ShortConvolution):
        return itemsize * hidden_size * mixer.conv_L_cache
    if isinstance(mixer, LightningAttention):
        return itemsize * mixer.num_attention_heads * mixer.head_dim**2
    return 0  # no mixer, no state


def training_days(flops: Size, gpus: Size, flops_per_gpu: Size) -> Size:
    """Days to carry out `flops` at an achieved rate per GPU [FLOP/s] (source: narayanan2021, equation 4).

    >>> round(training_days(8 * 450e9 * 1.008e12, 3072, 163e12))
    84
    """
    return flops / (gpus * flops_per_gpu) / DAY


def gpus_needed(flops: Size, days: Size, flops_per_gpu: Size) -> Size:
    """GPUs to carry out `flops` in so many days at an achieved rate per GPU [FLOP/s]; not rounded.

    >>> round(gpus_needed(6 * 300e9 * 175e9, 23, 150e12))
    1057
    """
    return flops / (days * DAY * flops_per_gpu)


def utilisation(flops: Size, seconds: Size, gpus: Size, peak_flops: Size) -> Size:
    """Share of the peak: MFU of model FLOPs, HFU of hardware FLOPs (source: korthikanti2022, section 6.3).

    >>> utilisation(312e12, 2, 1, 312e12)
    0.5
    """
    return flops / (seconds * gpus * peak_flops)


def matrix_parameters(model: ModelSpec) -> Size:
    """Parameters in the blocks' matrices: without norms, biases and tables. 12 l h^2 for a GPT (source: narayanan2021).

    >>> from loadgauge.core.families.reference import gpt_model
    >>> matrix_parameters(gpt_model(96, 12288, 96, 51200)) == 12 * 96 * 12288**2
    True
    """
    view = View(tokens=1, pairs=1, kernels=Kernels())
    total: Size = 0
    for block, count in zip(model.blocks, model.layer_counts(), strict=True):
        weights = block_layer(block, model.hidden_size, view).weights
        total = total + count * sum(weight.numel for weight in weights if weight.kind == "matrix")
    return total


def training_seconds_by_flops(model_flops: Size, gpus: Size, achieved_flops: Size) -> Size:
    """Seconds for so many FLOPs on n GPUs that achieve so many FLOP/s each (source: narayanan2021, equation 4).

    >>> round(training_seconds_by_flops(8 * 175e9 * 300e9, 1024, 140e12) / DAY, 1)  # layers run again: 8 P T FLOPs
    33.9
    """
    return model_flops / (gpus * achieved_flops)


def speedup(serial: Size, processors: Size) -> Size:
    """1 / (f + (1 - f)/n): how much faster n processors are where a share f of the work runs on one (source: amdahl1967).

    A share of 0.05 % leaves 512 processors 408 times as fast as one, and no number of them more than 2000 times.

    >>> round(speedup(0.0005, 512), 1), round(speedup(0.0005, 512) / 512, 3), round(speedup(0.0005, 1e12))
    (407.8, 0.796, 2000)
    """
    return 1 / (serial + (1 - serial) / processors)
