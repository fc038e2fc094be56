"""`ModelSpec`: the facts of a `config.json` that decide parameters, FLOPs and memory.

Field names are Hugging Face's keys. Sizes are ints when read from a file; the equations put symbols in their place.
`from_hf` (in `loadgauge.core.families`) reads a `config.json` into a `ModelSpec`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from loadgauge.core.base import ConfigError, Size
from loadgauge.core.definitions.model.own_code import WRITTEN


class Norm(msgspec.Struct, frozen=True):
    """A normalisation. With `_plus_one` the gain is stored as an offset from 1 (Gemma, Nemotron).

    `weight` / `bias`: whether it has a gain and a shift.
    """

    kind: Literal["layernorm", "layernorm_plus_one", "rmsnorm", "rmsnorm_plus_one"] = "rmsnorm"
    weight: bool = True
    bias: bool = False
    arithmetic: Literal["native", "float32", "written"] = "native"
    """Form of a layernorm in transformers' module: with PyTorch's operation, with it on a float32 copy of the input
    (OLMo), or in operations written out in float32 (Cohere)."""
    gain_float32: bool = False
    """transformers' module multiplies by an RMSNorm's gain before it returns to 16 bits (OLMo 2, GPT-OSS, Helium)."""
    root_kept: bool = False
    """It takes the root as a power, which keeps what goes in as well as what comes out (Gemma 4)."""
    gain_copied: bool = False
    """transformers' module makes a float32 copy of the gain first (Nemotron-H)."""


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention: multi-head, grouped-query or multi-query, by `num_key_value_heads`."""

    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    qkv_bias: bool = False
    key_bias: bool = True
    """Where queries and values have biases, keys have one too (Whisper's have none)."""
    output_bias: bool = False
    fused_qkv: bool = False
    """One weight makes queries, keys and values."""
    clip: bool = False
    """Queries, keys and values are clamped after their projections (OLMo, DBRX, MPT)."""
    qk_norm: Norm | None = None
    """A norm of the queries and keys, after their projections."""
    qk_norm_over: Literal["head", "own", "all"] = "head"
    """Over each head, with one gain for all; or each with a gain of its own (Cohere, StableLM); or over all together (OLMo 2)."""
    rotary: bool = True
    rotary_dim: Size | None = None
    """Channels of each head that are rotated; None: all."""
    scores_shifted: bool = False
    """transformers' module takes the largest of each row off written-out scores, and keeps its place (MiMo-V2)."""
    own_tables: int = 0
    """Copies of rotary tables that transformers' module makes in each layer, turning neighbours (GLM, ERNIE 4.5: 2, GPT-J: 4)."""
    tables_float32: bool = False
    """True where the copies of the tables are float32 whatever the dtype (ERNIE 4.5)."""
    query_scale: Literal["none", "native", "float32"] = "none"
    """Queries are multiplied by a factor of their position, and in which dtype (Ministral 3; Llama 4, float32)."""
    repeats_kv: bool = False
    """transformers' module repeats keys and values for all query heads whatever the kernel (Falcon-40B)."""
    alibi: bool = False
    """Distance is a bias on the scores (BLOOM, MPT): recomputed from positions, so nothing of it is kept or counted."""
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax and is then dropped (GPT-OSS)."""
    causal: bool = True
    sliding_window: Size | None = None
    """Keys a query may see, or the length of the chunks it sees whole (Llama 4); None: all."""
    softcap: bool = False
    """Scores pass through tanh (Gemma 2)."""
    output_gate: bool = False
    """The sigmoid of a gate, made by the queries' matrix, multiplies the output of the heads (Qwen3-Next)."""
    gate_matrix: bool = False
    """True where that gate comes from a matrix of its own (AFMoE)."""
    value_norm: Norm | None = None
    """A norm of each head's values (Gemma 4)."""
    keys_are_values: bool = False
    """Values are made of what keys are made of: there is no matrix for them (Gemma 4)."""
    borrowed: bool = False
    """Keys and values are those of an earlier layer (Gemma 4)."""
    value_head_dim: Size | None = None
    """Channels of each head's values; None: those of its keys (MiMo-V2)."""
    softmax_float32: bool = True
    """transformers' module computes written-out probabilities in float32 (all but the families of GPT-2 and BERT)."""
    scores_float32: bool = False
    """transformers' module casts queries and keys to float32 for the written-out scores (GPT-J, GPT-Neo, CodeGen)."""
    scores_floored: bool = False
    """transformers' module holds written-out scores above the lowest number, which keeps them (XGLM)."""
    masked: bool = False
    """transformers gives its fused kernel a mask of all pairs (Gemma 3's pictures see both ways, Qwen2-Audio pads sounds)."""
    heads_first: bool = False
    """Its rotation leaves the queries head by head (GPT-NeoX, Phi-3); most leave them token by token."""
    dropout: float = 0.0
    """Of the attention probabilities."""


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """A small attention that chooses which tokens the large one looks at (DeepSeek-V3.2): `num_heads` heads of queries over
    one key a token, both `head_dim` wide. Its choice is made without gradients.
    """

    num_heads: Size
    head_dim: Size


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek): queries, and keys with values, pass through narrow latents.

    Each head has `qk_nope_head_dim` channels from the latent and `qk_rope_head_dim` rotated ones, which all heads share
    on the side of the keys; values are `v_head_dim` wide. `q_lora_rank` None: queries come straight from the input.
    """

    num_attention_heads: Size
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    bias: bool = False
    """Of the two projections into the latents and of the output projection."""
    norm: Norm = Norm("rmsnorm")
    """Over each latent."""
    rotary: bool = True
    """False where the `qk_rope_head_dim` channels are not rotated (Kimi Linear)."""
    index_topk: Size | None = None
    """Tokens that a query looks at, chosen by the indexer of this layer, or of one before it where it has none (GLM-5).
    transformers' module masks the others; None: all."""
    indexer: Indexer | None = None
    query_scale: bool = False
    """Queries are multiplied by a factor of their position (Mistral 4)."""
    head_gate: bool = False
    """The sigmoid of a number for each head, in float32, multiplies its output (Ling 3)."""
    channel_gate: bool = False
    """The sigmoid of a number for each channel of each head does (Kimi K3)."""
    causal: bool = True
    sliding_window: Size | None = None
    dropout: float = 0.0


class CompressedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention to a window of tokens and to entries that stand for `compress_rate` tokens each (DeepSeek-V4). One head of
    `head_dim` channels is key and value of all query heads, which are made from a latent; each has a sink.

    The output passes `o_groups` matrices, each over its share of the heads and `o_lora_rank` wide, and one that joins them.
    """

    num_attention_heads: Size
    head_dim: Size
    q_lora_rank: Size
    o_groups: Size
    o_lora_rank: Size
    sliding_window: Size
    rotary_dim: Size
    compress_rate: Size | None = None
    """None: the layer sees its window alone."""
    index_topk: Size | None = None
    """Entries that a query looks at, chosen by `indexer`, which overlap by a window; transformers masks the others; None: all."""
    indexer: Indexer | None = None
    norm: Norm = Norm("rmsnorm", gain_float32=True)
    causal: bool = True
    dropout: float = 0.0


class Mamba2(msgspec.Struct, frozen=True, kw_only=True):
    """A Mamba-2 mixer (source: dao2024): a causal convolution, then a scan over the sequence in chunks of `chunk_size`.

    Each of `num_heads` heads has `head_dim` channels and a state of `head_dim` x `state_size`; the heads of one of the
    `n_groups` groups share what writes to their states and reads from them. `hidden_act` is of the convolution.
    `use_bias`: of the input projection; `output_bias`: of the output projection; `use_conv_bias`: of the convolution.
    """

    num_heads: Size
    head_dim: Size
    state_size: Size
    n_groups: Size = 1
    conv_kernel: Size = 4
    chunk_size: Size = 256
    use_bias: bool = False
    output_bias: bool = False
    use_conv_bias: bool = True
    gated_norm: bool = True
    """A norm of each group follows the gate; else the gate alone (Falcon-H1)."""
    norm_before_gate: bool = False
    """True where that norm comes before the gate (Falcon-H1)."""
    hidden_act: str = "silu"


class Mamba1(msgspec.Struct, frozen=True, kw_only=True):
    """A Mamba mixer (source: gu2023): each of `intermediate_size` channels has a state of `state_size`; no heads.

    `time_step_rank`: width of the latent that the step of each channel is made from.
    """

    intermediate_size: Size
    state_size: Size = 16
    time_step_rank: Size
    conv_kernel: Size = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    norm: Norm | None = None
    """Over the latent of the steps, and over what writes to and reads from the state (Jamba)."""
    hidden_act: str = "silu"


class GatedDeltaNet(msgspec.Struct, frozen=True, kw_only=True):
    """A gated delta net (source: yang2024gdn): a causal convolution, then the delta rule in chunks of `chunk_size`.

    `separate_projections`: gate and decays come from matrices of their own (Qwen3.5); else two joint ones make all
    (Qwen3-Next).
    """

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size = 4
    chunk_size: Size = 64
    separate_projections: bool = False
    hidden_act: str = "silu"


class KimiDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Kimi delta attention (source: kimi2025linear): a gated delta net whose decay is of each channel of the keys.

    Keys, queries and values are `linear_num_heads` heads of `linear_head_dim` channels.
    """

    linear_num_heads: Size
    linear_head_dim: Size
    linear_conv_kernel_dim: Size = 4
    chunk_size: Size = 64
    narrow: tuple[str, ...] = ("decay", "gate")
    """Gates made through a latent as wide as a head (Kimi Linear: both; Kimi K3: the decay); the others have a whole matrix."""
    hidden_act: str = "silu"


class ShortConvolution(msgspec.Struct, frozen=True, kw_only=True):
    """A gated short convolution (LFM2): gate, causal convolution over `conv_L_cache` tokens, gate."""

    conv_L_cache: Size = 3
    conv_bias: bool = False
    """Of the convolution and of both projections."""


class LightningAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Linear attention with a fixed decay for each head, in blocks of `block_size` tokens (MiniMax-Text-01).

    The output passes a norm over all heads together and is gated by a projection of the input.
    """

    num_attention_heads: Size
    head_dim: Size
    block_size: Size = 256
    norm: Norm = Norm("rmsnorm")
    hidden_act: str = "silu"


LinearMixer: TypeAlias = Mamba2 | Mamba1 | GatedDeltaNet | KimiDelta | ShortConvolution | LightningAttention
"""Token mixers whose work and memory grow with the sequence, not with its square."""
Mixer: TypeAlias = Attention | LatentAttention | CompressedAttention | LinearMixer


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward network: two matrices, or three when gated."""

    intermediate_size: Size
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    fused_gate_up: bool = False
    """One weight makes gate and up."""
    dropout: float = 0.0
    """Inside the MLP, before its last matrix (ModernBERT)."""
    cut_off: bool = False
    """Gate channels that do not stand out from the others of their token are set to 0 (Gemma 3n)."""


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: a router sends each token to `num_experts_per_tok` of `num_experts` MLPs.

    activation: transformers' name, or `clamped_swiglu`, GPT-OSS's, or `clamped_silu`, DeepSeek-V4's
    router_score: a softmax, sigmoid or root of a softplus (DeepSeek-V4) over all experts, or a softmax over the chosen ones only
    (GPT-OSS); scores_float32: that is in float32 (not in GPT-OSS)
    norm_topk_prob: the chosen scores are divided by their sum
    router_float32: the router's product is in float32, which copies its input and its matrix (DeepSeek); weights_float32: experts'
    outputs are weighted in float32 (Mixtral, DeepSeek)
    shared: an MLP that every token passes through as well (all shared experts together are one wide one); shared_gate: a sigmoid
    gate on it, from a vector of its own (Qwen2-MoE)
    router_bias: the router's matrix has a bias that is a parameter; expert_bias: so have the experts' (GPT-OSS)
    correction_bias: a frozen bias on the choice of experts is a parameter (ERNIE 4.5); elsewhere it is a buffer
    own_norms: shared and routed experts have norms of their own around them, and the router one without a gain, a scale of
    each channel and one of each expert (Gemma 4)
    latent_size: None, or the width of a latent of the tokens on which the experts work (Nemotron 3 Super); latent_norm: of their
    sum in it (Kimi K3)
    everywhere: transformers' module gives every token to every expert, weighted before by what is zero for most (Llama 4)
    zero_experts: choices more that compute nothing (LongCat), taken to get an even share of the tokens
    capacity_factor: None: no token is dropped; else each expert takes at most this many times its fair share
    groups: of experts, and to how many of them a token may go (DeepSeek's device- and node-limited routing)
    """

    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    gated: bool = True
    activation: str = "silu"
    expert_bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_of_chosen"] = "softmax"
    scores_float32: bool = True
    norm_topk_prob: bool = True
    router_float32: bool = False
    weights_float32: bool = False
    shared: Mlp | None = None
    shared_gate: bool = False
    own_norms: bool = False
    everywhere: bool = False
    latent_size: Size | None = None
    latent_norm: Norm | None = None
    zero_experts: Size = 0
    capacity_factor: float | None = None
    groups: tuple[int, int] = (1, 1)

    @property
    def computed_per_tok(self) -> Size:
        """Experts that compute something for a token, on average."""
        if isinstance(self.zero_experts, int) and not self.zero_experts:
            return self.num_experts_per_tok
        return self.num_experts_per_tok * self.num_experts / (self.num_experts + self.zero_experts)


class HyperConnections(msgspec.Struct, frozen=True, kw_only=True):
    """The residual stream is `count` streams, mixed around each half of a block by matrices that are made of them and
    normalised `iterations` times (DeepSeek-V4)."""

    count: Size
    iterations: int = 20


class AltUp(msgspec.Struct, frozen=True, kw_only=True):
    """The residual stream is `count` streams, of which a block computes one and predicts the others; a product of rank
    `laurel_rank` runs beside its attention (Gemma 3n). `scaled`: the computed one has a gain where it meets the layer's input."""

    count: Size
    laurel_rank: Size
    scaled: bool = True


class Step(msgspec.Struct, frozen=True):
    """A step of what stands before or after the blocks of a tower, in the words of `core.layers.tower`."""

    kind: str
    width: int = 0
    output: int = 0
    """The widths of what goes in and comes out; of a vector its elements, of a table its rows, of a pool the tokens made one."""
    bias: bool = False


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Where a block lies in a tower: its tokens are patches, and it is `width` wide."""

    width: int
    steps: tuple[Step, ...] = ()
    scaled: bool = False
    """`steps`: run in place of attention and an MLP; `scaled`: the outputs of both halves are multiplied by a vector (InternVL)."""
    projects: bool = False
    """Joins the tower to the language model; with `own` it ends the tower itself."""
    own: bool = False
    beside: bool = False
    unused: bool = False
    """`beside`: the next block reads what goes in as well, and keeps it; `unused`: nothing reads what comes out (LLaVA's last)."""
    tiles: int = 0
    patches: int = 0
    pairs: int = 0
    padded: int = 0
    """Of a sequence: sets that attend to themselves, patches, pairs, and patches where all pictures are as large as the largest."""
    whole: bool = False
    """Its weights are trained where the model has adapters."""
    hooked: bool = False
    """transformers gives patches a gradient where layers run again beside adapters (`enable_input_require_grads`)."""
    enters: str = ""
    """Under autocast: `normed` to float32 before all blocks; `narrow`: nothing as wide as weights is added; `first` block."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One transformer block.

    `placement`: where the norms are: before each half (pre), after each residual sum (post), after each half and before the sum
    (after), both before each half and after it (sandwich), or before two halves that run side by side (parallel).
    """

    attention: Mixer | None
    """Mixer of tokens; None in a block that is an MLP alone (Nemotron-H)."""
    mlp: Mlp | Moe | None
    """None in a block that is a mixer alone (Mamba-2, Nemotron-H)."""
    norm: Norm
    placement: Literal["pre", "post", "after", "sandwich", "parallel"] = "pre"
    shared_norm: bool = False
    """One norm serves both halves that run side by side (GPT-J, Cohere); else each has its own."""
    dropout: float = 0.0
    """Of the output of each half, before the residual sum."""
    dropout_after_attention: bool = True
    """False where only the MLP half's output is dropped (StableLM, Persimmon)."""
    dropout_after_mlp: bool = True
    """False where only the attention half's output is dropped (ModernBERT, XLM-RoBERTa-XL)."""
    first_norm: bool = True
    """False where the first norm is left out (the first block of ModernBERT)."""
    beside: Mamba2 | None = None
    """A mixer in parallel to attention: each reads its own scaled copy of the input; outputs are summed (Falcon-H1)."""
    residual_in_fp32: bool = False
    """transformers' module keeps the residual stream in float32 (Mamba-2)."""
    per_layer_input: Size = 0
    """Channels of an embedding of the layer's own that gates its output (Gemma 4)."""
    streams: HyperConnections | AltUp | None = None
    """Way that several residual streams are mixed; None: there is one."""
    residual_bank: int = 0
    """Earlier values of the residual stream whose weighted sum with it each half reads in its place (Kimi K3): at most."""
    shares_weights: bool = False
    """Its weights are those of an earlier layer (ALBERT), and counted there."""
    trained: frozenset[str] | None = None
    """The operations whose weights get gradients, where not all do (`loadgauge.core.resolve.trained`)."""
    reached: bool = True
    """True where its input needs a gradient, as something before it is trained."""
    adapted: bool = True
    """False where it has no adapters in a model that is trained by adapters (PEFT's `layers_to_transform`)."""
    listed: Any = None
    """Writer of its operations, where they were captured from its code (`capture.road.Kind`)."""
    tower: Part | None = None
    """Where it lies in a tower of pictures; None: in the language model."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Cutting of pictures: into `tile` x `tile` pixels or as a whole, then into patches, of which merge x merge are a token; of
    sounds: into `tile` frames. low, high: the fewest and most pixels, tiles or tokens of a picture, or its longest edge; grids:
    sizes it may be made; spare: patches of a tile that stand for no pixels; marks, each: tokens of a picture, of a tile, beside
    its patches'; frames: of a video in one patch; pool: patches along a side of a frame that are averaged; volume: the fewest and
    most pixels of all frames; head: `inner`, of that `shifted`, as of `Head`; masks: attention sees all pairs with pictures"""

    kind: str
    patch: int
    merge: int = 1
    tile: int = 0
    low: int = 0
    high: int = 0
    spare: int = 0
    marks: int = 0
    each: int = 0
    frames: int = 1
    pool: int = 1
    volume: tuple[int, int] = (0, 0)
    head: str = ""
    masks: bool = False
    grids: tuple[tuple[int, int], ...] = ()


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The head after the last block: of a language model, a pooler, or a classifier."""

    kind: Literal["lm", "pooler", "classifier", "none"] = "lm"
    transform: bool = False
    """A dense layer and activation of width `hidden_size` before the last matrix (masked language models)."""
    transform_bias: bool = True
    transform_norm: Norm | None = None
    activation: str = "gelu"
    bias: bool = False
    num_labels: Size = 0
    per_token: bool = False
    """The classifier reads every token (ELECTRA's detector), not one of each sequence."""
    softcap: bool = False
    """Logits pass through tanh (Gemma 2)."""
    loss_float32: bool = True
    inner: bool = False
    """`loss_float32`: transformers' module has the loss in float32 (not the family of BERT, Qwen2-Audio); `inner`: it is called by
    the class that has the loss: the norm's result is gone by then, and 16-bit logits are shifted in a copy."""


class Tower(msgspec.Struct, frozen=True):
    """A tower of images or sounds beside a language model, by its key in the config: its parameters, with what joins it to the
    language model, None where they are not known; its blocks, in order, empty where they are not modelled."""

    name: str
    parameters: int | None = None
    layers: tuple[Block, ...] = ()
    rule: Rule | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The whole model. `blocks` holds each distinct block once; `pattern` says which block each layer is."""

    name: str
    model_type: str
    hidden_size: Size
    vocab_size: Size
    blocks: tuple[Block, ...]
    pattern: tuple[int, ...]
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    """The longest sequence the model is made for; None when its config does not say."""
    learned_positions: Size = 0
    """Rows of the position table; 0 with rotary positions."""
    rotary_tables: int = 1
    """Pairs of rotary tables: 2 where local layers turn by angles of their own (Gemma 3, ModernBERT)."""
    token_types: Size = 0
    embedding_size: Size | None = None
    """Width of the token table where it differs from `hidden_size` (OPT-350m); a matrix widens what it gives."""
    factorised_embedding: bool = False
    """The tables of positions and types and the embeddings' norm are `embedding_size` wide too, and the widening matrix
    has a bias (ALBERT, ELECTRA). Otherwise that matrix comes first, and the last block's output is narrowed (OPT)."""
    per_layer_vocab: Size = 0
    """Rows of the table of the embeddings that the layers have of their own (`Block.per_layer_input`)."""
    embedding_norm: Norm | None = None
    embedding_dropout: float = 0.0
    final_norm: Norm | None = None
    head: Head = Head()
    num_nextn_predict_layers: int = 0
    """Published modules of multi-token prediction, not among the blocks, as transformers does not build them."""
    mtp_layers: int = 0
    """Of such modules, how many are trained with the model, and so counted (`with_mtp`)."""
    unused_keys: tuple[str, ...] = ()
    """Keys of the config that were not read and could matter."""
    towers: tuple[Tower, ...] = ()
    """Towers that were published with the model; `left_out` are in no numbers."""
    defaults: tuple[tuple[str, int], ...] = ()
    """Sizes that the config does not state, by key, and the default of transformers' class taken for each."""
    dtype: str = ""
    """The dtype of the published checkpoint's weights, as its config states it; "" where it does not."""
    source: str = ""
    trained: frozenset[str] | None = None
    """Of the embedding's and the head's operations, those whose weights get gradients, where not all do."""
    reached: bool = True
    """True where the head's input needs a gradient."""
    listed: Any = None
    """Writer of the operations around the blocks, where they were captured from its code (`capture.road.OnDemand`)."""

    @property
    def partly(self) -> bool:
        """Return whether only a part of the layers is trained, or has adapters, or runs on tokens of another kind."""
        return self.trained is not None or any(
            not (block.reached and block.adapted) or block.tower is not None for block in self.blocks
        )

    @property
    def left_out(self) -> tuple[Tower, ...]:
        """Towers that are not among the blocks."""
        stems = {block.tower.steps for block in self.blocks if block.tower is not None}
        return tuple(
            tower
            for tower in self.towers
            if not (tower.layers and tower.layers[0].tower.steps in stems)  # type: ignore[union-attr]
        )

    @property
    def tower_layers(self) -> int:
        """Layers of a tower, which come before its own."""
        return sum(self.pattern.count(kind) for kind, block in enumerate(self.blocks) if block.tower is not None)

    @property
    def streams(self) -> Size:
        """Residual streams, each `hidden_size` wide."""
        first_streams = self.blocks[0].streams if self.blocks else None
        return 1 if first_streams is None else first_streams.count

    @property
    def stream_size(self) -> Size:
        """Channels of a token between two blocks."""
        return self.streams * self.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return len(self.pattern)

    @property
    def own(self) -> Any:
        """Return the features that its layers support: as a family writes them, or as they were captured (`own_code.Written`)."""
        return WRITTEN if self.listed is None else self.listed

    @property
    def has_experts(self) -> bool:
        """Return whether any block is a mixture of experts."""
        return self.own.has_experts or any(isinstance(block.mlp, Moe) for block in self.blocks)

    def within_experts(self, tp: int, ep: int) -> int:
        """Return over how many ranks an expert is split where a job does not say it.

        Without expert parallelism frameworks split it as they split a layer (source: megatron-core,
        `ModelParallelConfig.expert_tensor_parallel_size`). With it launchers and recipes differ: it stays whole.
        """
        if self.own.states_splits:
            return int(self.own.within_experts(tp, ep))
        widths = {block.mlp.moe_intermediate_size for block in self.blocks if isinstance(block.mlp, Moe)}
        return tp if widths and ep == 1 and not any(width % tp for width in widths) else 1

    def with_mtp(self, layers: int | None = None) -> ModelSpec:
        """Return the model with its multi-token prediction modules, or with a given number; each predicts one token more.

        A module is a block like the last layer, behind a matrix that joins the hidden state and the next token's
        embedding; embedding and head are the model's own (source: deepseek2024v3, section 2.2). Raises `ConfigError`
        where the model came with none and no number is given.
        """
        count = self.num_nextn_predict_layers if layers is None else layers
        if count < 1:
            text = f"{self.name} has no multi-token prediction layers; --draft eagle or ngram instead"
            raise ConfigError(text, key="num_nextn_predict_layers")
        if self.head.kind != "lm":
            raise ConfigError(f"{self.name} has no language-model head to predict tokens with", key="head")
        unread = tuple(text for text in self.unused_keys if not text.startswith("num_nextn_predict_layers"))
        return msgspec.structs.replace(self, mtp_layers=count, unused_keys=unread)

    def layer_counts(self, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """Return the number of layers of each distinct block in `start:stop`."""
        part = self.pattern[start:stop]
        return tuple(part.count(index) for index in range(len(self.blocks)))
