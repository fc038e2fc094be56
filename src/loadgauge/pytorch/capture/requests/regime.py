"""How a captured list is asked for: the dtypes and kernels that decide what the code does, and what is known of the model."""

from __future__ import annotations

import re

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse
from loadgauge.core.base.files import is_script
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.tuners import TUNERS
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.layers import View
from loadgauge.core.resolve.adapters import LORA_RANK, usual_upcast
from loadgauge.pytorch.capture.lists.listed import Listing
from loadgauge.pytorch.capture.symbols.splits import Splits

ALL = ("all", "all-linear")
"""Words for every linear layer but that of the logits, as PEFT takes `all-linear`."""
FOUR_BITS = {"nf4": ("nf4", True), "nf4-single": ("nf4", False), "fp4": ("fp4", False)}
"""Formats of a base that bitsandbytes' 4-bit layers have: its name for the type, and whether scales are quantised too."""


class Tuned(msgspec.Struct, frozen=True):
    """Trainable parameters, as a job says it. rank: of adapters, 0 without; train: words of `--train`, "" without.

    targets: `all`, `attention`, names with commas, or a regular expression on whole names of modules; saved: modules that are
    trained whole beside the adapters; layers: those that have adapters, "" for all; base: how the frozen base is stored, ""
    where it is as the model was loaded; upcast: what else is cast to float32 before (`Lora.upcast`); loaded: bytes
    of an element of the weights that were put in 4 bits; tower: what of what sees pictures is trained (`Job.tower`), "" where
    there are none of stated sizes
    """

    rank: int = 0
    targets: str = "all"
    dropout: float = 0.0
    dora: bool = False
    saved: tuple[str, ...] = ()
    layers: str = ""
    base: str = ""
    upcast: str = "none"
    loaded: int = 2
    train: str = ""
    tower: str = ""

    @classmethod
    def of(cls, job: Job) -> Tuned:
        """Return what a job trains. Raises ConfigError or NotModelled for what is not known of captured models.

        >>> Tuned.of(Job(model="gpt2", lora_rank=8)).rank, Tuned.of(Job(model="gpt2", train="lm_head")).adapts
        (8, False)
        """
        tower = (job.tower or ("frozen" if job.adapts else "trained")) if job.pictures or job.audio else ""
        refuse(tower == "adapters" and not job.adapts, "adapters: needs --lora-rank or --qlora", key="tower")
        if not job.adapts:
            return cls(train=job.train or "", tower=tower if tower != "trained" else "")
        refuse(
            job.train is not None, "trains weights of the model itself; beside adapters: --modules-to-save", key="train"
        )
        if job.adapter in TUNERS:
            raise NotModelled(f"{TUNERS[job.adapter].title} on captured layers (lora is modelled)")
        base = (job.base or "nf4") if job.qlora else ""
        refuse(
            base and base not in FOUR_BITS,
            f"a base of captured layers in {base} (known: {', '.join(FOUR_BITS)})",
            NotModelled,
        )
        refuse(
            not base and (job.kbit_upcast or "none") != "none",
            "frozen weights of captured layers that are cast to float32 without --qlora",
            NotModelled,
        )
        if (job.lora_dropout or 0) >= 1:
            raise ConfigError(f"must be below 1, got {job.lora_dropout:g}", key="lora_dropout")
        return cls(
            rank=job.lora_rank or LORA_RANK,
            targets=job.lora_targets or "all",
            dropout=job.lora_dropout or 0.0,
            dora=bool(job.use_dora),
            saved=tuple(names_in(job.modules_to_save or "")),
            layers=job.lora_layers or "",
            base=base,
            upcast=_upcast(job, base) if base else "none",
            loaded=4 if base and _wide(job) else 2,
            tower=tower if tower != "adapters" else "",
        )

    @property
    def adapts(self) -> bool:
        """Return whether adapters are trained, and no weights of the model's own but `saved` ones."""
        return self.rank > 0

    @property
    def by_layer(self) -> bool:
        """Return whether layers of one kind may be trained in different ways."""
        return bool(self.layers or self.train or (self.tower and not self.rank))

    @property
    def whole(self) -> bool:
        """Return whether all of the model is trained. ``Tuned().whole``"""
        return not (self.adapts or self.train or self.tower)


WHOLE = Tuned()
"""All of a model is trained."""


OWN = "is captured from its own code"
COMPILED = "torch.compile: the code runs eagerly, compiled it keeps less"


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
        for why in _replaced(kernels, is_script(name)):
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
            refuse(
                lora.keeps_inputs,
                f"{name} {OWN}, with the bitsandbytes that is installed, whose layers keep no input",
                NotModelled,
            )
            tuned = msgspec.structs.replace(tuned, upcast=lora.upcast)
            gathered = lora.sharded and lora.upcast != "none"
        inputs = view.input_gradients and not tuned.whole
        buffer = 0 if autocast or weight == 4 else int(dtypes.buffer or 0)
        return cls(
            weight, autocast, kernels.attention, int(view.tp), int(view.ep), tuned, adapters, inputs, buffer, gathered
        )


def _replaced(kernels: Kernels, eager: bool = False) -> list[str]:
    """Return what of the kernels is not transformers' own code, in words. eager: what is compiled stands for what it compiles"""
    reasons = []
    if eager and kernels.compiled and kernels.loss == "compiled":
        return []
    if kernels.compiled:
        reasons.append("torch.compile")
    if kernels.products is not None:
        reasons.append("a recipe of 8 or 4 bits")
    if kernels.activation_in_place or kernels.experts != "grouped" or kernels.vocabulary_multiple != 1:
        reasons.append("a framework with kernels of its own")
    elif kernels.loss != "float32" or kernels.holds_logits or kernels.loss_pieces != 1:
        pieces = "" if kernels.loss_pieces == 1 else f" in {kernels.loss_pieces} pieces"
        reasons.append(f"the loss {kernels.loss}{pieces}")
    return reasons


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
    optimizer: str = ""
    """The word of `--optimizer` for the one that a LightningModule configures."""
    sample: str = "samples"
    """The word for samples of a batch, where it has no sequences."""
    rows: str = ""
    """The first table whose gradient is the rows that were looked up."""
    files: dict[str, str] = {}
    """Of a script: the files of its own that it read, with what must not change of them (`store.seals`)."""


def _wide(job: Job) -> bool:
    return job.weights == "float32" or (job.precision or "").startswith(("fp32", "bf16-autocast", "fp16-autocast"))


def _upcast(job: Job, base: str) -> str:
    """Return what is cast to float32 in a job before its framework is looked at (`resolve.adapters`)."""
    framework = FRAMEWORKS.get(job.framework or "huggingface")
    if framework is None or not framework.peft:
        return "none"
    if job.weights == "float32":
        return "all"
    return job.kbit_upcast or usual_upcast(
        Lora(rank=1, quantised=base),  # type: ignore[arg-type]
        framework,
        job.precision,
        job.zero,
    )


def names_in(text: str) -> list[str]:
    """The names in a list with commas.

    >>> names_in("q_proj, v_proj")
    ['q_proj', 'v_proj']
    """
    return [name for name in (piece.strip() for piece in text.split(",")) if name]


def is_pattern(text: str) -> bool:
    """Return whether targets are one regular expression, which PEFT fits to whole names of modules, and no list of names.

    >>> is_pattern(r".*\\.(q|v)_proj"), is_pattern("q_proj,mlp.fc1")
    (True, False)
    """
    return re.fullmatch(r"[\w.\-, ]*", text) is None
