"""Kernels and formats of the operations: which kernels run, and how many bytes the elements have.

The same layer keeps different bytes for backward in plain PyTorch, in Hugging Face's modules and in Megatron's fused
kernels; the difference is stated here, once.
"""

from typing import Literal

import msgspec

from loadgauge.core.base.algebra import Size, same
from loadgauge.core.definitions.training.tasks import DIVERGENCES


class Dtypes(msgspec.Struct, frozen=True):
    """Bytes per element of what is kept. A statistic is one value per token (norms) or per token and head (softmax).

    The papers neglect norm statistics and ids: 0 for both gives their equations. `residual` is what flows between the
    matrix products; under autocast it is 4 while `activation` is 2 (None: the same as `activation`). `buffer`: of a module's
    buffers of floats, where parameters are cast and buffers are not (None: as the weights).
    """

    activation: Size = 2
    residual: Size | None = None
    buffer: Size | None = None
    norm_statistic: Size = 4
    softmax_statistic: Size = 4
    mask: Size = 1
    index: Size = 8


class LowPrecision(msgspec.Struct, frozen=True, kw_only=True):
    """Low-precision products of the blocks, in 8 or 4 bits; everything else keeps the 16 bits of the recipe.

    format: what the products run in; element, weight_element: bytes of one quantised element of an activation or
        gradient, and of a weight, in one direction, with its share of the scales
    keeps: a product keeps its quantised input for the gradient of its weight (Transformer Engine); else autograd holds
        the 16-bit one, and it is quantised again in backward (torchao)
    shares: where an input is kept in 16 bits for another operation, it is for the product too, without a copy
    weights: where the quantised weights are: `beside` the 16-bit ones, rows and columns, from step to step; `instead`
        of them (FP8 primary weights); made `within` each product
    gathers: ZeRO-3 gathers the weights quantised
    weight_gradient: whether the product that makes the gradient of the weight is quantised too
    """

    format: Literal["fp8", "fp4"]
    element: float
    weight_element: float
    keeps: bool
    shares: bool = False
    weights: Literal["beside", "instead", "within"]
    gathers: bool = False
    weight_gradient: bool = True
    source: str

    @property
    def blocks(self) -> bool:
        """Return whether each block of an operand has a scale of its own, whose bytes count with the element's."""
        return self.format == "fp8" and self.element > 1

    def inside(self, x: Size, y: Size, w: Size, *, trained: bool, kept: bool) -> Size:
        """Return the bytes that exist only inside the backward of y = x w, of `x`, `y` and `w` elements: its quantised copies.

        That is the gradient of y, by rows and, for the gradient of a weight that is `trained`, by columns; the weight,
        where no copy of it is held; and x, unless it is `kept` quantised.
        """
        twice = trained and self.weight_gradient
        gradients = (1 + twice) * self.element * y
        weight = self.weight_element * w if self.weights == "within" else 0
        again = self.element * x if twice and not kept else 0
        return gradients + weight + again


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels: the implementation of each kind of operation.

    attention: `eager` writes the scores; `flash` never does (FlashAttention, cuDNN, PyTorch's flash back-end);
        with `flash`, a ragged batch is padding-free when its tokens are counted without padding.
    flash: which kernel `flash` is (`attention_kernels.FLASH_KERNELS`), which decides time; empty: the framework's own choice.
    sums_over: multiprocessors that FlashAttention-2's deterministic backward spreads the queries' gradient over, each with sums of
        its own; 0: it is not deterministic
    masks: PyTorch's fused kernel is given a mask, as batches are padded: it computes all pairs, and wants a key for each query
    flash_dropout: whether the flash kernel drops probabilities itself, keeping only a random state; where it cannot
        (PyTorch on CPU), attention with dropout is written out.
    norm: `fused` keeps its input and one or two statistics per token; `upcast` is Hugging Face's RMSNorm module, which
        keeps a float32 copy and the normalised value.
    norm_kernel: who made its kernels: `fused` (Transformer Engine, cuDNN, Liger), `compiled` (torch.compile), `eager`
        (PyTorch's one kernel), or `written` out, operation by operation.
    activation: `fused` recomputes the activation's output from its input; `unfused` keeps what PyTorch keeps.
    activation_in_place: its backward writes the gradients of the two factors over them.
    written_gelu: `gelu_new` is written out operation by operation (transformers); else it is PyTorch's one kernel.
    softmax_float32: eager probabilities are computed and kept in float32, in addition to the copy in the compute dtype.
    repeat_kv: eager grouped-query attention expands keys and values to all heads.
    views_pin_storage: with flash attention, values kept as a view of the fused projection hold all of its output, and
        an output laid out head by head is copied for the last matrix.
    keep_gathered: sequence parallelism keeps the gathered input of a matrix product (DTensor) instead of gathering it
        again in backward (Megatron).
    scores_mask: the eager causal mask keeps one byte per score (article 1's optional byte).
    written_mask: eager attention scales the scores and adds a mask, one of each sequence, that lives through the
        forward (and in every checkpoint).
    writes_groups: flash attention in float32 with fewer key heads than heads is written out, as PyTorch has no fused kernel on
        CUDA that takes both.
    recurrence: state-space and linear-attention mixers: `fused` are the kernels of mamba_ssm, causal-conv1d and
        flash-linear-attention, which make most of what their backward needs again; `reference` is transformers' code.
    joint_output: Mamba-2's kernel makes the output projection too, and norms its input again in backward
        (transformers); Megatron's is a layer of its own that keeps its input.
    vocabulary_multiple: the token table is padded to a multiple of this many rows a rank (Megatron: 128).
    products: the recipe of 8 or 4 bits that the matrix products of the blocks run in, if any.
    experts: `grouped` is transformers' grouped_mm form, which weights the experts' outputs and keeps them; `scattered` is
        torchtitan's, which weights them in float32 and adds them to their tokens; `looped` runs expert after expert, and `batched`
        copies an expert's matrices for each row (transformers' `eager` and `batched_mm`); `modules` loops over matrices of
        their own (transformers before 5); `fused` is Megatron's, which weights inside the activation and keeps neither its output
        nor the experts'.
    dispatch: tokens go to their experts by a plain all-to-all, a copy for each, or `deduplicated`: one to each domain of
        fast links, which hands it on (DeepEP, HybridEP); `quantised`: so, and outward in the 8 bits of the products.
    router_aux_loss: a load-balancing loss keeps the scores of all experts (transformers: with `output_router_logits`).
    gradient_placeholders: weights' gradients are added to their float32 buffer inside the product, and autograd is given
        an empty tensor instead: one of each shape, kept for good (Transformer Engine since 2.0), for the head a new one.
    loss: `float32` upcasts the logits and keeps log-probabilities; `inplace` is Megatron's vocabulary-parallel loss,
        which keeps one float32 copy; `jit` is its fused form (`--cross-entropy-fusion-impl native`), which makes a second
        one; `fused` writes the gradient over the 16-bit logits (Transformer Engine, Liger); `compiled` keeps the 16-bit
        logits and makes their gradient from them (torch.compile); `chunked` computes logits and loss a chunk at a time,
        recomputing in backward; `tiled` is TRL's, in tiles of 4096 tokens x 32768 columns, with gradients summed in float32;
        `plain` takes the logits as they are, in 16 bits; `liger`
        is Liger's fused linear cross-entropy: logits a chunk at a time, their gradient written over them, and all
        gradients made in forward.
    loss_pieces: `float32` and `plain` run over the logits in so many pieces (torchtune, LitGPT): each keeps its
        log-probabilities, and only one piece at a time is upcast, or has gradients.
    logprobs: the head makes the log-probability of each token for a loss over sequences (preferences, policies), not a loss over
        tokens; `loss` then says how (`layers.logprobs`). `pairs`: of two sequences each; `slices`: the same of parts of the logits,
        whose gradients are summed; `whole`: of all logits at once; `softmax`: with a log-softmax of
        all, beside logits that the trainer holds meanwhile; `policy`: of answers that were generated; `jsd`, `forward-kl`,
        `reverse-kl`: no log-probability of a token, but the distance of its whole distribution from a teacher's.
    holds_logits: a wrapper around the model copies the logits to float32, and the training loop holds them until the next
        ones are there (Lightning's Fabric under LitGPT).
    chooses: how sparse attention chooses tokens: `written`, every head's scores in float32 and a mask over all pairs
        (transformers); `fused`, scores summed over heads in the kernel, `MOST_SCORES` bytes of them at a time, and attention over
        the latents of the chosen alone (DeepGEMM and FlashMLA in vLLM and SGLang).
    compiled: torch.compile made the layers: casts of one tensor are one, and of a residual sum in float32 the 16-bit branch is
        kept, from which the sum is made again.
    """

    attention: Literal["eager", "flash"] = "flash"
    flash_dropout: bool = True
    flash: str = ""
    sums_over: int = 0
    masks: bool = False
    norm: Literal["fused", "upcast"] = "fused"
    norm_kernel: Literal["fused", "compiled", "eager", "written"] = "eager"
    activation: Literal["fused", "unfused"] = "unfused"
    activation_in_place: bool = False
    written_gelu: bool = True
    softmax_float32: bool = False
    repeat_kv: bool = False
    views_pin_storage: bool = False
    keep_gathered: bool = False
    scores_mask: bool = False
    written_mask: bool = False
    writes_groups: bool = False
    experts: Literal["grouped", "scattered", "looped", "modules", "batched", "fused"] = "grouped"
    dispatch: Literal["all_to_all", "deduplicated", "quantised"] = "all_to_all"
    router_aux_loss: bool = False
    recurrence: Literal["fused", "reference"] = "fused"
    joint_output: bool = False
    gradient_placeholders: bool = False
    loss: Literal["float32", "inplace", "jit", "fused", "compiled", "chunked", "tiled", "plain", "liger"] = "float32"
    logprobs: Literal[
        "", "rows", "pairs", "slices", "whole", "softmax", "policy", "jsd", "forward-kl", "reverse-kl"
    ] = ""
    loss_chunks: int = 8
    loss_pieces: int = 1
    holds_logits: bool = False
    vocabulary_multiple: int = 1
    chooses: Literal["written", "fused"] = "written"
    compiled: bool = False
    products: LowPrecision | None = None
    dtypes: Dtypes = Dtypes()

    @property
    def diverges(self) -> bool:
        """Return whether the head measures how far its distributions are from a teacher's."""
        return self.logprobs in DIVERGENCES


PAPER = Kernels(attention="eager", dtypes=Dtypes(norm_statistic=0, index=0))
"""The accounting of Korthikanti et al.: 16-bit activations, 1-byte masks, norm statistics and ids neglected."""


MOST_SCORES = 512 * 2**20
"""Bytes of the scores that vLLM makes at once of prompts (source: vllm, `VLLM_SPARSE_INDEXER_MAX_LOGITS_MB`)."""

WRITTEN_KERNELS = 7, 14
"""Kernels of a norm that is written out, forward and backward."""


def written_norm_bytes(x: Size, output: Size, *, gain: bool = True, trained: bool = True) -> tuple[Size, Size]:
    """Return the bytes an element that the kernels of an RMSNorm read and write that is written out in PyTorch's operations.

    x, output: bytes of an element of what goes in and comes out; gain: whether it is multiplied by one; trained: which is trained

    Forward: a float32 copy, square, mean, product with the root, the copy back, the product with the gain. Backward: of each of
    them, where the mean's gradient is spread over the row, that of the square takes four kernels, and the two are added.

    >>> written_norm_bytes(2, 2), written_norm_bytes(4, 4, trained=False)
    ((36, 92), (28, 76))
    """
    copy = 0 if same(x, 4) else x + 4
    forward, backward = 20 + 2 * copy, 68 + 2 * copy
    if gain:
        wider = 0 if same(x, output) else x + output
        forward, backward = forward + x + output, backward + 2 * output + wider
    if gain and trained:
        backward = backward + x + 3 * output
    return forward, backward


def with_liger(kernels: Kernels) -> Kernels:
    """Return kernels with Liger's in their place: RMSNorm, SwiGLU and GeGLU that keep their input alone and write its gradient
    over it, rotation in place, and the fused linear cross-entropy.

    Sources: liger, `transformers/monkey_patch.py`, `ops/swiglu.py`; its defaults under Trainer's `use_liger_kernel`.

    >>> with_liger(Kernels(norm="upcast")).norm, with_liger(Kernels()).loss
    ('fused', 'liger')
    """
    return msgspec.structs.replace(
        kernels, norm="fused", norm_kernel="fused", activation="fused", activation_in_place=True, loss="liger"
    )


def with_compile(kernels: Kernels) -> Kernels:
    """Return kernels as torch.compile makes them: what is done element by element is done again in backward, so that norms and
    activations keep their input alone, and so does the loss.

    Source: torch 2.13, `_functorch/partitioners.py`, `min_cut_rematerialization_partition`.

    >>> found = with_compile(Kernels(norm="upcast"))
    >>> found.norm, found.activation, found.loss
    ('fused', 'fused', 'compiled')
    """
    loss = "compiled" if kernels.loss in ("float32", "plain") and kernels.loss_pieces == 1 else kernels.loss
    own = kernels.norm_kernel == "fused"  # a kernel that the compiler does not look into
    return msgspec.structs.replace(
        kernels,
        norm="fused",
        norm_kernel="fused" if own else "compiled",
        activation="fused",
        loss=loss,
        views_pin_storage=False,
        compiled=True,
    )
