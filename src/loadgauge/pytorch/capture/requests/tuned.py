"""Trainable parameters of a captured model: adapters beside frozen weights, or a part of its own."""

from __future__ import annotations

import re

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.tuners import TUNERS
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.resolve.adapters import LORA_RANK, usual_upcast

ALL = ("all", "all-linear")
"""Words for every linear layer but that of the logits, as PEFT takes `all-linear`."""
FOUR_BITS = {"nf4": ("nf4", True), "nf4-single": ("nf4", False), "fp4": ("fp4", False)}
"""Formats of a base that bitsandbytes' 4-bit layers have: its name for the type, and whether scales are quantised too."""


class Tuned(msgspec.Struct, frozen=True):
    """Trainable parameters, as a job says it. rank: of adapters, 0 without; train: words of `--train`, "" without.

    targets: `all`, `attention`, names with commas, or a regular expression on whole names of modules; saved: modules that are
    trained whole beside the adapters; layers: those that have adapters, "" for all; base: how the frozen base is stored, ""
    where it is as the model was loaded; upcast: what else is cast to float32 before (`Lora.upcast`); loaded: bytes
    of an element of the weights that were put in 4 bits
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

    @classmethod
    def of(cls, job: Job) -> Tuned:
        """Return what a job trains. Raises ConfigError or NotModelled for what is not known of captured models.

        >>> Tuned.of(Job(model="gpt2", lora_rank=8)).rank, Tuned.of(Job(model="gpt2", train="lm_head")).adapts
        (8, False)
        """
        if not job.adapts:
            return cls(train=job.train or "")
        if job.train is not None:
            raise ConfigError("trains weights of the model itself; beside adapters: --modules-to-save", key="train")
        if job.adapter in TUNERS:
            raise NotModelled(f"{TUNERS[job.adapter].title} on captured layers (lora is modelled)")
        base = (job.base or "nf4") if job.qlora else ""
        if base and base not in FOUR_BITS:
            raise NotModelled(f"a base of captured layers in {base} (known: {', '.join(FOUR_BITS)})")
        if not base and (job.kbit_upcast or "none") != "none":
            raise NotModelled("frozen weights of captured layers that are cast to float32 without --qlora")
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
        )

    @property
    def adapts(self) -> bool:
        """Return whether adapters are trained, and no weights of the model's own but `saved` ones."""
        return self.rank > 0

    @property
    def by_layer(self) -> bool:
        """Return whether layers of one kind may be trained in different ways."""
        return bool(self.layers or self.train)

    @property
    def whole(self) -> bool:
        """Return whether all of the model is trained. ``Tuned().whole``"""
        return not (self.adapts or self.train)


WHOLE = Tuned()
"""All of a model is trained."""


def _wide(job: Job) -> bool:
    return job.weights == "float32" or (job.precision or "").startswith(("fp32", "bf16-autocast", "fp16-autocast"))


def _upcast(job: Job, base: str) -> str:
    """Return what is cast to float32 in a job before its framework is looked at (`resolve.adapters`)."""
    framework = FRAMEWORKS.get(job.framework or "huggingface")
    if framework is None or not framework.peft:
        return "none"
    if job.weights == "float32":
        return "all"
    return job.kbit_upcast or usual_upcast(Lora(rank=1, quantised=base), framework)  # type: ignore[arg-type]


def names_in(text: str) -> list[str]:
    """The names in a list with commas.

    >>> names_in("q_proj, v_proj")
    ['q_proj', 'v_proj']
    """
    return [name for name in (one.strip() for one in text.split(",")) if name]


def is_pattern(text: str) -> bool:
    """Return whether targets are one regular expression, which PEFT fits to whole names of modules, and no list of names.

    >>> is_pattern(r".*\\.(q|v)_proj"), is_pattern("q_proj,mlp.fc1")
    (True, False)
    """
    return re.fullmatch(r"[\w.\-, ]*", text) is None
