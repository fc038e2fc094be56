"""How a captured list is asked for: the dtypes and kernels that decide what the code does, and what is known of the model."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.layers.operations.rank_view import View
from loadgauge.pytorch.capture.lists.listed import Listing
from loadgauge.pytorch.capture.requests.tuned import WHOLE, Tuned
from loadgauge.pytorch.capture.symbols.splits import Splits

OWN = "is captured from its own code"


class Regime(msgspec.Struct, frozen=True):
    """The key of a recording: everything beside the sizes that decides which operations run.

    weight: bytes of an element of the weights; autocast: whether products run in 16 bits under autocast
    buffer: bytes of an element of buffers, where FSDP casts the weights to 16 bits and leaves those as they are; 0: as the weights
    tp, ep: tensor-parallel and expert-parallel ranks, of which the first is captured
    tuned: what is trained; adapters: bytes of an element of the adapters' weights, as they are read and as they are held
    input_gradients: the embedding's output gets a gradient though nothing below is trained
    gathered: frozen weights that are held in float32 are read in 16 bits, as FSDP gathers them
    """

    weight: int = 2
    autocast: bool = False
    attention: str = "flash"
    tp: int = 1
    ep: int = 1
    tuned: Tuned = Tuned()
    adapters: tuple[int, int] = (0, 0)
    input_gradients: bool = False
    buffer: int = 0
    gathered: bool = False

    @property
    def whole(self) -> Regime:
        """The same on one rank."""
        return msgspec.structs.replace(self, tp=1, ep=1)

    @property
    def wide(self) -> bool:
        """Return whether adapters are held in float32, which is more than the weights are. ``Regime(2, adapters=(2, 4)).wide``"""
        return self.adapters[1] > self.weight

    @classmethod
    def of(cls, view: View, name: str, tuned: Tuned = WHOLE) -> Regime:
        """The regime of a view. Raises NotModelled for kernels that replace the model's own code."""
        kernels = view.kernels
        for why in _replaced(kernels):
            raise NotModelled(f"{name} {OWN}, which {why} replaces: --framework huggingface, or a written family")
        if kernels.logprobs:  # the code that ran has a language model's loss over tokens
            raise NotModelled(f"{name} {OWN}, with its own loss, not that of a post-training task: a written family")
        dtypes = kernels.dtypes
        lora = view.lora
        base = "" if lora is None or not lora.quantised else "nf4" if lora.quantised is True else lora.quantised
        if (lora is not None) != tuned.adapts or base != tuned.base:
            how = "adapters on 4 bits" if tuned.base else "adapters" if tuned.adapts else "whole"
            raise NotModelled(f"{name} {OWN}, as it trains {how}: ask for it by its flags")
        # What is cast to float32 before training makes the residual stream wide, not autocast over float32 weights.
        upcast = lora is not None and lora.wide_residual
        autocast = dtypes.residual is not None and not upcast
        weight = 4 if dtypes.activation == 4 or (dtypes.residual == 4 and not upcast) else 2
        adapters = (0, 0) if lora is None else (int(lora.read(weight)), int(lora.held(weight)))
        autocast = autocast or (lora is not None and lora.casts)
        gathered = False
        if lora is not None and base:
            if lora.keeps_inputs:
                raise NotModelled(f"{name} {OWN}, with the bitsandbytes that is installed, whose layers keep no input")
            tuned = msgspec.structs.replace(tuned, upcast=lora.upcast)
            gathered = lora.sharded and lora.upcast != "none"
        inputs = view.input_gradients and not tuned.whole
        buffer = 0 if autocast or weight == 4 else int(dtypes.buffer or 0)
        return cls(
            weight, autocast, kernels.attention, int(view.tp), int(view.ep), tuned, adapters, inputs, buffer, gathered
        )


def _replaced(kernels: Kernels) -> list[str]:
    """Return what of the kernels is not transformers' own code, in words."""
    found = []
    if kernels.compiled:
        found.append("torch.compile")
    if kernels.products is not None:
        found.append("a recipe of 8 or 4 bits")
    if kernels.activation_in_place or kernels.experts != "grouped" or kernels.vocabulary_multiple != 1:
        found.append("a framework with kernels of its own")
    elif kernels.loss != "float32" or kernels.holds_logits or kernels.loss_pieces != 1:
        pieces = "" if kernels.loss_pieces == 1 else f" in {kernels.loss_pieces} pieces"
        found.append(f"the loss {kernels.loss}{pieces}")
    return found


class Document(msgspec.Struct):
    """Facts of a captured model: its facts, its listings, and for each of its blocks which recorded one it is like."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    pattern: tuple[int, ...]
    listings: list[Listing]
    parameters: int
    longest: int | None = None
    tied: bool = False
    torch: str = ""
    transformers: str = ""
    dtype: str = ""
    splits: Splits = Splits()
    given: str = ""
    """What the model is called with beside tokens, of one sequence."""
    files: dict[str, str] = {}
    """Of a script: the files of its own that it read, with what must not change of them (`files_read`)."""
