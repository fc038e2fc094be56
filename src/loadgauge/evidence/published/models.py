"""The model of a published run: the sizes of its own columns, in blocks of the family that its name says.

What a row leaves out (norms, biases, activation, positions) is that of a model of the catalogue of the same family; where
all sizes are left out, the row must name a model of the catalogue.
"""

import re

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, LatentAttention, Mlp, ModelSpec, Moe, Norm
from loadgauge.core.families import catalogue
from loadgauge.evidence.published.free_text import Flags
from loadgauge.evidence.published.source_rows import SourceRow

FAMILIES: tuple[tuple[str, str], ...] = (
    # pattern of the lower-case model name, model of the catalogue that stands for the family
    (r"deepseek.?v2", "deepseek-v2"),
    (r"deepseek|moonlight|kimi", "deepseek-v3"),
    (r"mixtral", "mixtral-8x7b"),
    (r"mistral", "mistral-7b-v0.3"),
    (r"qwen3.*-?a\d+b", "qwen3-30b-a3b"),
    (r"qwen1\.5-moe", "qwen1.5-moe-a2.7b"),
    (r"qwen3", "qwen3-8b"),
    (r"qwen", "qwen2.5-7b"),
    (r"llama.?4", "llama-4-scout"),
    (r"llama|internlm|vicuna|(^|[^a-z])yi-|megascale-llama", "llama-3.1-8b"),
    (r"gpt.?oss", "gpt-oss-20b"),
    (r"nemotron", "nemotron-4-15b"),
    (r"stablelm.alpha|neox|pythia", "pythia-1b"),
    (r"phi-?[12]", "phi-1.5"),
    (r"phi-?3", "phi-3-mini"),
    (r"mpt", "mpt-7b"),
    (r"bloom", "bloom-7b1"),
    (r"falcon", "falcon-7b"),
    (r"gemma-?3", "gemma-3-12b"),
    (r"gemma-?2", "gemma-2-9b"),
    (r"gemma", "gemma-7b"),
    (r"opt-", "opt-6.7b"),
    (r"glm-?4\.5", "glm-4.5-air"),
    (r"glm", "glm-4-9b"),
    (r"maxtext", "llama-3.1-8b"),
    (r"gpt", "megatron-gpt-22b"),
)
SUFFIXES = re.compile(r"-(instruct|base|chat|hf|fp8|bf16|2507|thinking|it|v1)$")
MEGATRON_LATENT = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64} | {
    "v_head_dim": 128
}
"""Megatron-LM's defaults of latent attention (its `MLATransformerConfig`)."""
GPT2_VOCABULARY = 50257
MEGATRON_DROPOUT = 0.1
"""Of attention and of the hidden state, Megatron-LM's default (its `TransformerConfig`)."""


class Inexpressible(Exception):
    """A row that cannot be expressed, and why."""


class Described(msgspec.Struct, frozen=True):
    """A model, the model of the catalogue whose blocks it has (`like`), what was assumed for it, and other models that fit
    the row as well, each with what differs."""

    model: ModelSpec
    like: str
    assumed: tuple[str, ...]
    others: tuple[tuple[str, ModelSpec], ...] = ()


def describe(run: SourceRow, framework: str) -> Described:
    """The model of a row; raises `Inexpressible`."""
    flags = Flags.of(run.other_flags)
    if framework == "maxtext":
        run = maxtext_sizes(run, flags)
    catalogued = named(run.model)
    if run.layers is None or run.hidden is None or run.heads is None:
        if catalogued is None:
            missing = [name for name in ("layers", "hidden", "heads") if getattr(run, name) is None]
            raise Inexpressible(
                f"{', '.join(missing)} of {run.model!r}: not stated, and no such model in the catalogue"
            )
        return Described(catalogued, catalogued.name, (f"sizes: those of {catalogued.name} in the catalogue",))
    template, why = family(run)
    assumed = [f"blocks: {why}"]
    vocab, others = _vocabulary(run, catalogued, assumed)
    spec = _spec(run, flags, template, catalogued, framework, vocab, assumed)
    variants = [(f"vocabulary {size}", msgspec.structs.replace(spec, vocab_size=size)) for size in others]
    if any(block.dropout for block in spec.blocks):
        variants.append(("no dropout", undropped(spec)))
    return Described(spec, template.name, tuple(assumed), tuple(variants))


def maxtext_sizes(run: SourceRow, flags: Flags) -> SourceRow:
    """The sizes of a MaxText model, from its scale or from the bases it gives (source: maxtext, `configs/base.yml`, and
    `get_individual_scales` in `configs/types.py`). Of the widths that its releases give a head, and of an MLP with and without
    a gate, those whose parameters are closest to what the model is called: 16.1e9 here, and 15.6e9 with a gate and 128.

    >>> row = maxtext_sizes(SourceRow(id="x", model="MaxText-16B"), Flags.of("global_parameter_scale=16"))
    >>> row.layers, row.hidden, row.heads, row.ffn, row.head_dim, row.gated
    (32, 4096, 64, 28672, 256, 'no')
    """
    scale = flags.number("global_parameter_scale") or 1
    if not flags.has("global_parameter_scale") and not flags.has("base_emb_dim"):
        return run
    base, more = divmod(scale.bit_length() - 1, 3)
    wide, deep, heads = 2 ** (base + (more > 1)), 2**base, 2 ** (base + (more > 0))

    def size(name: str, usual: int, times: int) -> int:
        return (flags.number(name) or usual) * times

    layers, hidden = size("base_num_decoder_layers", 16, deep), size("base_emb_dim", 2048, wide)
    count, ffn = size("base_num_query_heads", 16, heads), size("base_mlp_dim", 7168, heads)
    called = re.search(r"(\d+(?:\.\d+)?)B", run.model)

    def parameters(width: int, gated: bool) -> float:
        return layers * hidden * (4 * count * width + (2 + gated) * ffn)

    shapes = [(width, gated) for width in (128, 256) for gated in (True, False)]
    if called:
        wanted = float(called[1]) * 1e9
        shapes.sort(key=lambda shape: abs(parameters(*shape) - wanted))
    width, gated = shapes[0]
    sizes = {"layers": layers, "hidden": hidden, "heads": count, "ffn": ffn, "head_dim": width, "vocab": 32_000}
    stated = {name: getattr(run, name) for name in sizes if getattr(run, name) is not None}
    return msgspec.structs.replace(run, **{**sizes, **stated}, gated=run.gated or ("yes" if gated else "no"))


def undropped(spec: ModelSpec) -> ModelSpec:
    """The model without dropout."""
    blocks = tuple(
        msgspec.structs.replace(
            block,
            dropout=0.0,
            attention=msgspec.structs.replace(block.attention, dropout=0.0)
            if isinstance(block.attention, Attention | LatentAttention)
            else block.attention,
        )
        for block in spec.blocks
    )
    return msgspec.structs.replace(spec, blocks=blocks, embedding_dropout=0.0)


def named(name: str) -> ModelSpec | None:
    """The model of the catalogue that a name means.

    >>> named("Qwen/Qwen3-30B-A3B-Instruct-2507").name, named("Llama 3.1 8B").name, named("my own")
    ('qwen3-30b-a3b', 'llama-3.1-8b', None)
    """
    text = re.sub(r"\(.*?\)", "", name.lower().rpartition("/")[2])
    text = re.sub(r"[\s_]+", "-", text.strip())
    while SUFFIXES.search(text):
        text = SUFFIXES.sub("", text)
    plain = text.replace("-", "")
    listed = next((listed for listed in catalogue.models() if listed.replace("-", "") == plain), None)
    return None if listed is None else catalogue.model(listed)


def family(run: SourceRow) -> tuple[ModelSpec, str]:
    """A model of the catalogue whose blocks stand for the row's, and why that one."""
    name = run.model.lower().rpartition("/")[2] if "mcore-ci" not in run.model else "gpt"
    if run.attention == "mla":
        return catalogue.model("deepseek-v3"), "DeepSeek-V3's, as attention is latent"
    if Flags.of(run.other_flags).has("squared-relu"):
        return catalogue.model("nemotron-4-15b"), "Nemotron's, as the activation is a squared ReLU"
    gated = run.gated == "yes"
    if "mcore-ci" in run.model and Flags.of(run.other_flags).value("normalization") != "RMSNorm":
        return catalogue.model("megatron-gpt-22b"), "Megatron-LM's GPT, with LayerNorm as it does not say otherwise"
    for pattern, listed in FAMILIES:
        if re.search(pattern, name):
            model = catalogue.model(listed)
            if not run.gated or gated in {_gated(block) for block in model.blocks}:
                return model, f"those of {listed}, by the model's name"
    if gated:
        return catalogue.model("llama-3.1-8b"), "Llama's, as the MLP is gated"
    return catalogue.model("megatron-gpt-22b"), "Megatron-LM's GPT, as the MLP is not gated"


def _gated(block: Block) -> bool:
    return block.mlp is not None and block.mlp.gated


def _vocabulary(run: SourceRow, spec: ModelSpec | None, assumed: list[str]) -> tuple[int, tuple[int, ...]]:
    if run.vocab is not None:
        return run.vocab, ()
    published = _paper(run) or spec
    if published is not None:
        assumed.append(f"vocabulary: that of {published.name}")
        return int(published.vocab_size), ()
    if "mcore-ci" in run.model:
        assumed.append(f"vocabulary: GPT-2's {GPT2_VOCABULARY}, which Megatron-LM's tests use where they state none")
        return GPT2_VOCABULARY, ()
    match = next((listed for pattern, listed in FAMILIES if re.search(pattern, run.model.lower())), "")
    if match and not match.startswith("megatron"):
        model = catalogue.model(match)
        assumed.append(f"vocabulary: that of {model.name}")
        return int(model.vocab_size), ()
    assumed.append(f"vocabulary: GPT-2's {GPT2_VOCABULARY}, which the row does not state")
    return GPT2_VOCABULARY, (32000,)


def _paper(run: SourceRow) -> ModelSpec | None:
    """The published GPT of the catalogue that has these very sizes."""
    models = (catalogue.model(f"megatron-gpt-{size}") for size in ("22b", "175b", "530b", "1t"))
    sizes = run.hidden, run.layers
    return next((model for model in models if (model.hidden_size, model.num_hidden_layers) == sizes), None)


def _spec(
    run: SourceRow,
    flags: Flags,
    template: ModelSpec,
    listed: ModelSpec | None,
    framework: str,
    vocab: int,
    assumed: list[str],
) -> ModelSpec:
    assert run.layers is not None
    assert run.hidden is not None
    first = template.blocks[0]
    norm = _norm(run, flags, first.norm)
    megatron_gpt = (
        framework in ("megatron", "megatron-deepspeed") and first.norm.kind == "layernorm" and norm.kind == "layernorm"
    )
    dropout = MEGATRON_DROPOUT if megatron_gpt and not _undropped(run) else 0.0
    if megatron_gpt:
        assumed.append(f"dropout: {dropout:g}{' (the default of Megatron-LM)' if dropout else ''}")
    attention = _attention(run, flags, template, listed, dropout, assumed)
    dense = _dense(run, flags, template, listed, assumed)
    common = {"norm": norm, "attention": attention, "dropout": dropout, "residual_in_fp32": False}
    if run.moe_experts is None:
        blocks: tuple[Block, ...] = (msgspec.structs.replace(first, mlp=dense, **common),)
        pattern = (0,) * run.layers
    else:
        experts = msgspec.structs.replace(first, mlp=_moe(run, flags, template, listed), **common)
        leading = min(run.moe_first_dense_layers or 0, run.layers)
        if leading:
            blocks = (msgspec.structs.replace(first, mlp=dense, **common), experts)
            pattern = (0,) * leading + (1,) * (run.layers - leading)
        else:
            blocks, pattern = (experts,), (0,) * run.layers
    positions = template.learned_positions
    if predicts_further(run, flags):
        pattern = (*pattern, pattern[-1])
        assumed.append("multi-token prediction: counted as one more layer, without its own projection and loss")
    return msgspec.structs.replace(
        template,
        name=run.model,
        hidden_size=run.hidden,
        vocab_size=vocab,
        blocks=blocks,
        pattern=pattern,
        tie_word_embeddings=_tied(run, template, assumed),
        max_position_embeddings=None,
        learned_positions=(run.seq_len or 0) if positions else 0,
        embedding_dropout=dropout,
        final_norm=norm,
        unused_keys=(),
        num_nextn_predict_layers=0,
        source=run.source,
    )


def predicts_further(run: SourceRow, flags: Flags) -> bool:
    """Return whether a multi-token prediction layer is trained along."""
    layout = flags.value("pipeline-model-parallel-layout") or flags.value("pp_layout") or ""
    return (
        "(w/ MTP)" in run.model
        or "m" in layout
        or bool(flags.number("mtp-num-layers"))
        or flags.has("mtp-loss-scaling-factor")
        or flags.says("with MTP")
    )


def _undropped(run: SourceRow) -> bool:
    """NeMo's recipes, and gated models of Megatron-LM's users, train without dropout."""
    return "NeMo" in run.framework or (run.gated == "yes" and "mcore-ci" not in run.model)


def _tied(run: SourceRow, template: ModelSpec, assumed: list[str]) -> bool:
    if run.tied_embeddings:
        return run.tied_embeddings == "yes"
    assumed.append(f"head: {'tied' if template.tie_word_embeddings else 'not tied'} to the embedding, as in its family")
    return template.tie_word_embeddings


def _norm(run: SourceRow, flags: Flags, norm: Norm) -> Norm:
    if flags.value("normalization") == "RMSNorm" and not norm.kind.startswith("rmsnorm"):
        return Norm("rmsnorm")
    return norm


def _attention(
    run: SourceRow, flags: Flags, template: ModelSpec, listed: ModelSpec | None, dropout: float, assumed: list[str]
) -> Attention | LatentAttention:
    assert run.hidden is not None
    assert run.heads is not None
    own = template.blocks[0].attention
    if run.attention == "mla":
        base = listed or template
        latent = base.blocks[0].attention
        if not isinstance(latent, LatentAttention):
            latent = catalogue.model("deepseek-v3").blocks[0].attention
        assert isinstance(latent, LatentAttention)
        latent = msgspec.structs.replace(latent, num_attention_heads=run.heads, dropout=dropout)
        if run.hidden < 4096:
            assumed.append("latent attention: Megatron-LM's default widths, which the row does not state")
            latent = msgspec.structs.replace(latent, **MEGATRON_LATENT)
        return latent
    if not isinstance(own, Attention):
        own = Attention(num_attention_heads=1, num_key_value_heads=1, head_dim=1)
    if run.head_dim is None and run.hidden % run.heads:
        raise Inexpressible(
            f"head_dim is not stated, and {run.hidden} channels over {run.heads} heads is no whole number"
        )
    bias = not flags.has("disable-bias-linear")
    return msgspec.structs.replace(
        own,
        num_attention_heads=run.heads,
        num_key_value_heads=run.kv_heads or (1 if run.attention == "mqa" else run.heads),
        head_dim=run.head_dim or run.hidden // run.heads,
        qkv_bias=own.qkv_bias and bias,
        output_bias=own.output_bias and bias,
        dropout=dropout,
        rotary_dim=None,
        sliding_window=128 if "sliding-window 128" in run.attention else None,
    )


def _dense(run: SourceRow, flags: Flags, template: ModelSpec, listed: ModelSpec | None, assumed: list[str]) -> Mlp:
    assert run.hidden is not None
    own = next((block.mlp for block in template.blocks if isinstance(block.mlp, Mlp)), None)
    if own is None or (run.gated and own.gated != (run.gated == "yes")):
        own = Mlp(intermediate_size=1, gated=run.gated != "no")
    width = run.ffn
    if width is None and run.moe_experts is None:
        if run.gated == "yes":
            raise Inexpressible("ffn: the width of the MLP is not stated")
        assumed.append("ffn: 4 x hidden, which the row does not state")
        width = 4 * run.hidden
    return msgspec.structs.replace(
        own, intermediate_size=width or 4 * run.hidden, bias=own.bias and not flags.has("disable-bias-linear")
    )


def _moe(run: SourceRow, flags: Flags, template: ModelSpec, listed: ModelSpec | None) -> Moe:
    own = next((block.mlp for block in template.blocks if isinstance(block.mlp, Moe)), None)
    gated = run.gated == "yes" if run.gated else True
    width = run.moe_expert_ffn or run.ffn
    if width is None or run.moe_topk is None:
        raise Inexpressible("moe_expert_ffn and moe_topk: not stated")
    assert run.moe_experts is not None
    if own is None or own.gated != gated:
        own = Moe(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=1, gated=gated)
        if not gated:
            own = msgspec.structs.replace(own, activation="gelu")
    shared = flags.number("moe-shared-expert-intermediate-size")
    if shared is None and run.moe_shared:
        shared = run.moe_shared * width
    expert = None
    if shared:
        base = own.shared or Mlp(intermediate_size=1, gated=gated, activation=own.activation)
        expert = msgspec.structs.replace(base, intermediate_size=shared)
    # Experts one after another, token after token: those of a token are neighbours (source: nemo-automodel,
    # `components/moe/layers.py`, FakeBalancedGate).
    groups = (run.moe_experts // run.moe_topk, 1) if flags.says("fake balanced gate") else own.groups
    dropped = flags.says("capacity factor 1") or flags.says("token-drop") or "tokendrop" in run.model
    return msgspec.structs.replace(
        own,
        num_experts=run.moe_experts,
        num_experts_per_tok=run.moe_topk,
        moe_intermediate_size=width,
        shared=expert,
        capacity_factor=1.0 if dropped else None,
        groups=groups,
    )
