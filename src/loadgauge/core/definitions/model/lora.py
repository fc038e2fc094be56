"""Adapters: LoRA on a frozen base, and QLoRA, whose base is quantised to 4 bits."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgauge.core.base import ConfigError, Size
from loadgauge.core.definitions.model.tuners import TUNERS

LATENT_TARGETS = frozenset({"query_down", "query_up", "key_value_down", "key_value_up", "key_value"})
ATTENTION_TARGETS = frozenset({"query", "key", "value", "qkv", "output"}) | LATENT_TARGETS
MIXERS = frozenset({"mamba", "delta", "convolution", "kda", "lightning"})
"""Mixers without softmax, whose linear layers are targets by their whole names, such as `delta.output`."""
ALL_TARGETS = ATTENTION_TARGETS | {"gate", "up", "gate_up", "down"}


FUSED = (frozenset({"query", "key", "value"}), frozenset({"output"}), frozenset({"gate", "up", "down"}))
"""Matrices whose adapters run together, where each of them has one (source: unsloth, `kernels/fast_lora.py`)."""


class BaseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of frozen base matrices. `nbytes`: of an element, scales included; `words`: for a report.

    `experts_only`: only the routed experts' matrices are stored so, and the rest stays in 16 bits.
    `keeps_input`: a product holds its input from forward to backward, though the matrix is frozen; `upcast`: PEFT casts
    what is not quantised to float32; `kernels`: launches that make a matrix in 16 bits (scales first, where they are
    quantised too). `input_moves`, `output_moves`: bytes that forward moves for each element of a product's input and output,
    where it quantises the one and scales the other, instead of making the matrix; `remade`: bytes moved for each element of
    the matrix in backward, where that is more than its reading and writing. `frameworks`: those that train on it; empty: all.
    """

    nbytes: float
    words: str
    source: str
    experts_only: bool = False
    keeps_input: bool = False
    upcast: bool = True
    kernels: int = 1
    input_moves: float = 0.0
    output_moves: float = 0.0
    remade: float = 0.0
    frameworks: frozenset[str] = frozenset()


BASE_FORMATS: dict[str, BaseFormat] = {
    # 4 bits, an 8-bit scale for each block of 64, and a float32 scale for each 256 of those.
    "nf4": BaseFormat(
        nbytes=0.5 + 1 / 64 + 4 / (64 * 256), words="4.127 bits (NF4, scales quantised too)", source="dettmers2023",
        kernels=3,
    ),
    # axolotl's `quantize_moe_experts`, which quantises the experts' tensors as they are loaded.
    "nf4-experts": BaseFormat(
        nbytes=0.5 + 1 / 64 + 4 / (64 * 256), words="4.127 bits (NF4, routed experts too)", source="dettmers2023", kernels=3,
    ),
    "int8-experts": BaseFormat(
        nbytes=1, words="8 bits (LLM.int8, routed experts too)", source="dettmers2022", keeps_input=True, kernels=2,
        input_moves=9, output_moves=12, remade=7,
    ),
    # As bitsandbytes does unless it is to quantise the scales: a float32 scale for each block of 64.
    "nf4-single": BaseFormat(nbytes=0.5 + 4 / 64, words="4.5 bits (NF4, float32 scales)", source="dettmers2023"),
    # bitsandbytes' other 4-bit type: the same bytes as NF4.
    "fp4": BaseFormat(nbytes=0.5 + 4 / 64, words="4.5 bits (FP4, float32 scales)", source="dettmers2023"),
    # LLM.int8(): a byte, and a float32 scale for each row, which is neglected. Forward casts its input to fp16 (4 bytes an element)
    # and quantises it by rows (2 to find the scale, 3 to quantise), multiplies in int8, whose 32-bit result is scaled to fp16 (2
    # more to write it, 4 + 2) and cast back (4); backward makes the matrix in 16 bits (3) and scales it in place (4)
    # (bitsandbytes: autograd/_functions.py, MatMul8bitLt).
    "int8": BaseFormat(
        nbytes=1, words="8 bits (LLM.int8)", source="dettmers2022", keeps_input=True, kernels=2, input_moves=9, output_moves=12,
        remade=7,
    ),
    # 4 bits, and for each group along the input a 16-bit scale and a 4-bit (HQQ, torchao: 16-bit) zero.
    "gptq": BaseFormat(
        nbytes=0.5 + 2.5 / 128, words="4.16 bits (GPTQ, groups of 128)", source="frantar2022", upcast=False,
    ),
    "awq": BaseFormat(nbytes=0.5 + 2.5 / 128, words="4.16 bits (AWQ, groups of 128)", source="lin2023"),
    "hqq": BaseFormat(nbytes=0.5 + 4 / 64, words="4.5 bits (HQQ, groups of 64)", source="badri2023", upcast=False),
    "int4-torchao": BaseFormat(
        nbytes=0.5 + 4 / 128, words="4.25 bits (torchao int4, groups of 128)", source="torchao", upcast=False,
    ),
    # 4 bits and an 8-bit power of two for each block of 32, of the experts that checkpoints hold so.
    "mxfp4": BaseFormat(
        nbytes=0.5 + 1 / 32, words="4.25 bits (MXFP4) for the routed experts", source="openai2025", experts_only=True,
    ),
    # 4 bits and an 8-bit float for each block of 16; the matrix's float32 scale is neglected. One kernel makes 16 bits of it,
    # which needs no GPU with products in 4 bits (unsloth: kernels/nvfp4.py; ModelOpt: NVFP4QTensor).
    "nvfp4": BaseFormat(
        nbytes=0.5 + 1 / 16, words="4.5 bits (NVFP4, 8-bit scales of 16)", source="nvfp4-bases",
        frameworks=frozenset({"huggingface", "unsloth", "deepspeed"}),
    ),
}  # fmt: skip
"""Formats of a frozen base, by name."""

BaseName = Literal[
    "nf4", "nf4-experts", "nf4-single", "fp4", "int8", "int8-experts", "gptq", "awq", "hqq", "int4-torchao", "mxfp4", "nvfp4",
]  # fmt: skip

ADAPTER_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an adapter's weight."""
SAVED_MODULES = {"embed_tokens": "embedding", "lm_head": "head", "wte": "embedding", "embed_out": "head"}
"""Modules that may be trained whole beside the adapters, by their names in transformers."""

Upcast = Literal["none", "norms", "all"]


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters of `rank` on the linear layers named in `targets` (source: hu2021).

    Beside linear layers of the blocks, PEFT adapts `embedding`, `head` and the experts' matrices (`experts.gate_up`,
    `experts.down`), where they are named.
    A target of shape (i, o) gets two trainable matrices, (i, rank) and (rank, o); every other parameter is frozen.
    `quantised`: the format that the base matrices of the blocks are stored in (QLoRA, source: dettmers2023), True for
    `nf4`; each is made in 16 bits for as long as its product takes. `mxfp4` is for models whose experts come in it.
    `dropout`: of the adapter's input; above 0, each target keeps a dropped copy and a mask of its own.
    `peft`: PEFT's modules run them, with their casts (`loadgauge.core.layers.adapters.adapters`); `autocast`: inside
    `torch.autocast`, as under Trainer's `bf16`; `itemsize`: bytes of an adapter's weight, None for those of the rest.
    `fused`: they run inside the function of the attention or the MLP, where all its matrices are targets (Unsloth).
    `dora`: each target has a trained magnitude for each of its outputs (source: liu2024dora); `saved`: of embedding and
    head, those that are trained whole, in a copy beside the frozen original (PEFT's `modules_to_save`).
    `upcast`: frozen weights that are held in float32: `all` that are not quantised, which makes the residual stream
    float32 (PEFT's `prepare_model_for_kbit_training`), `norms` only (TRL before 1.0, LLaMA-Factory's
    `upcast_layernorm`), or `none` (axolotl, TRL since 1.0).

    `wide_norms`: the blocks' norms are LayerNorms of PyTorch, which autocast runs in float32.
    `sharded`: FSDP casts adapters as it gathers them, so that autocast has nothing to cast.
    `experts_stay`: routed experts are not quantised.
    `method`: LoRA, or another of PEFT's (`definitions.model.tuners`); `widest`: the widest input and output of what VeRA adapts;
    `virtual`: tokens that a prompt method trains in front of each sequence.
    `keeps_inputs`: 4-bit layers keep their input for backward, as bitsandbytes' did before 0.44.
    `parts_in_one`: the adapters of experts' matrices that hold two have twice the rank, a half for each (PEFT's conversion).
    `branching`: bitsandbytes' kernel that makes 16 bits of 4 is that from before 0.48, which decides bit by bit.
    `joint`: LitGPT's: queries, keys and values are one matrix, whose adapters read one dropped input, and are padded with zeros
    where one of the three has none; a quantised base has the head too. `replaced`: its quantised training puts another token
    table in the first one's place, whose gradient nobody clears. `grouped`: adapters of experts are grouped products of their own
    (Unsloth), where PEFT adds them to a copy of the experts' matrices.

    >>> Lora(rank=8, quantised="mxfp4").stored.nbytes
    0.53125
    """

    rank: Size
    targets: frozenset[str] = ALL_TARGETS
    dropout: float = 0.0
    quantised: bool | BaseName = False
    peft: bool = False
    autocast: bool = False
    itemsize: int | None = None
    upcast: Upcast = "none"
    fused: bool = False
    dora: bool = False
    saved: frozenset[str] = frozenset()
    keeps_inputs: bool = False
    experts_stay: bool = False
    sharded: bool = False
    branching: bool = False
    method: str = "lora"
    widest: tuple[Size, Size] = (0, 0)
    virtual: Size = 0
    wide_norms: bool = False
    parts_in_one: bool = False
    joint: bool = False
    replaced: bool = False
    grouped: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.quantised, bool) and self.quantised not in BASE_FORMATS:
            raise ConfigError(f"unknown format of a base {self.quantised!r} (known: {', '.join(BASE_FORMATS)})")

    @property
    def stored(self) -> BaseFormat | None:
        """The format of the base matrices; None: as the rest of the weights."""
        return base_format(self.quantised)

    def held(self, itemsize: Size) -> Size:
        """Return the bytes of an adapter's weight beside weights of `itemsize` bytes.

        >>> Lora(rank=8).held(2), Lora(rank=8, itemsize=4).held(2)
        (2, 4)
        """
        return itemsize if self.itemsize is None else self.itemsize

    def read(self, itemsize: Size) -> Size:
        """Return the bytes of an adapter's weight as its products read it."""
        return itemsize if self.sharded else self.held(itemsize)

    @property
    def casts(self) -> bool:
        """Return whether autocast casts what the adapters read, and their weights."""
        return self.autocast and not self.sharded

    def fuses(self, target: str) -> bool:
        """Return whether the adapter of a target runs inside the function of its attention or MLP.

        >>> Lora(rank=8, fused=True).fuses("up"), Lora(rank=8, fused=True, targets=frozenset({"up"})).fuses("up")
        (True, False)
        """
        return self.fused and not self.dora and any(target in group and group <= self.targets for group in FUSED)

    def under_peft(self, *, autocast: bool, wide: bool = True) -> Lora:
        """Return the adapters as PEFT and Trainer run them.

        autocast: whether forward runs under autocast
        wide: they are float32 unless `itemsize` says otherwise (PEFT's `autocast_adapter_dtype`), whether it does or not
        """
        itemsize = 4 if (autocast or wide) and self.itemsize is None else self.itemsize
        return msgspec.structs.replace(self, peft=True, autocast=autocast, itemsize=itemsize)

    @property
    def name(self) -> str:
        """The method in a word, with what says its size. ``Lora(rank=8, quantised=True).name == "QLoRA 8"``"""
        if self.method in TUNERS:
            title = TUNERS[self.method].title + (" on a quantised base" if self.quantised else "")
            return f"{title} {self.virtual or self.rank or ''}".rstrip()
        return f"{'QLoRA' if self.quantised else 'LoRA'} {self.rank}"

    @property
    def source(self) -> str:
        """The paper of the method."""
        return TUNERS[self.method].source if self.method in TUNERS else "hu2021"

    @property
    def words(self) -> str:
        """Return the trained part in words. ``Lora(rank=8).words == "adapters of rank 8"``"""
        if self.method not in TUNERS:
            return f"adapters of rank {self.rank}"
        tuner = TUNERS[self.method]
        if tuner.virtual:
            return f"{self.virtual} virtual tokens ({tuner.title})"
        return f"{tuner.title}'s weights{f' ({tuner.size} {self.rank})' if tuner.size else ''}"

    @property
    def wide_residual(self) -> bool:
        """Return whether the residual stream is float32: 4-bit layers return the dtype that a float32 norm made of it."""
        return self.upcast == "all" or (self.upcast == "norms" and self.stored is not None and not self.experts_only)

    @property
    def widens(self) -> bool:
        """Return whether 4-bit layers make the residual stream float32 within the blocks, as autocast's LayerNorms do."""
        return self.wide_norms and self.casts and self.stored is not None and not self.experts_only

    @property
    def experts_only(self) -> bool:
        """Return whether only the matrices of routed experts are quantised."""
        return self.stored is not None and self.stored.experts_only


def base_format(quantised: bool | str) -> BaseFormat | None:
    """Return the format that `Lora.quantised` names; None where the base is not quantised."""
    if isinstance(quantised, bool):
        return BASE_FORMATS["nf4"] if quantised else None
    return BASE_FORMATS[quantised]
