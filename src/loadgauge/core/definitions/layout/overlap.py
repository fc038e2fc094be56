"""Overlap of communication with compute; each framework's defaults are in `frameworks.FRAMEWORKS`."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.errors import ConfigError


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Communication that is hidden under compute, one switch per axis.

    tp: collectives of tensor parallelism overlap their matrix products (Megatron's user buffers, async TP)
    dp: gradients are reduced bucket by bucket during backward (those reduced once a step, during the last one), updated weights
        gathered during the first forward
    prefetch: what FSDP and ZeRO-3 gather and reduce travels while other layers compute; what Megatron's column-parallel matrices
        gather and sum in backward travels beside their own products
    cp: keys and values of the next ring step travel while one computes
    ep: dispatch and combine of one half of a micro-batch overlap the other half (DualPipe, batch-level overlap)
    pp: activations travel between stages while they compute
    launch: kernels are launched ahead of time, by CUDA graphs
    """

    tp: bool = False
    dp: bool = False
    prefetch: bool = True
    cp: bool = True
    ep: bool = False
    pp: bool = True
    launch: bool = False

    @classmethod
    def parse(cls, text: str, base: Overlap | None = None) -> Overlap:
        """Read switches such as `dp,pp`, or `none` or `all`. Raises `ConfigError`.

        base: what is hidden already, to which the switches add; `none,dp` is dp alone

        >>> Overlap.parse("dp,pp").tp, Overlap.parse("all").tp
        (False, True)
        >>> Overlap.parse("dp", Overlap(tp=True)).text(), Overlap.parse("none,dp", Overlap(tp=True)).text()
        ('tp,dp,prefetch,cp,pp', 'dp')
        """
        fields = cls.__struct_fields__
        words = {name.strip() for name in text.split(",")}
        names = set(fields) if words == {"all"} else words - {"none"}
        if names - set(fields):
            raise ConfigError(
                f"unknown {', '.join(sorted(names - set(fields)))!r} (known: none, all, {', '.join(fields)})",
                key="overlap",
            )
        if base is not None and "none" not in words:
            names |= {name for name in fields if getattr(base, name)}
        return cls(**{name: name in names for name in fields})

    def text(self) -> str:
        """Return the text that `parse` reads.

        >>> Overlap(tp=True).text(), Overlap.parse("none").text(), Overlap.parse("all").text()
        ('tp,prefetch,cp,pp', 'none', 'all')
        """
        hidden = [name for name in self.__struct_fields__ if getattr(self, name)]
        return "all" if len(hidden) == len(self.__struct_fields__) else ",".join(hidden) or "none"

    def alone(self) -> str:
        """Return the text that means this and nothing more, whatever a framework hides by itself.

        >>> Overlap(tp=True).alone(), Overlap.parse("all").alone()
        ('none,tp,prefetch,cp,pp', 'all')
        """
        text = self.text()
        return text if text in ("none", "all") else f"none,{text}"
