"""Overlap of communication with compute; each framework's defaults are in `frameworks.FRAMEWORKS`."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.errors import ConfigError


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Communication that is hidden under compute, one switch per axis.

    tp: collectives of tensor parallelism overlap their matrix products (Megatron's user buffers, async TP)
    dp: gradients are reduced bucket by bucket during backward (those reduced once a step, during the last one), updated weights
        gathered during the first forward
    prefetch: what FSDP and ZeRO-3 gather and reduce travels while other layers compute
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
    def parse(cls, text: str) -> Overlap:
        """Read switches such as `dp,pp`, or `none` or `all`. Raises `ConfigError`.

        >>> Overlap.parse("dp,pp").tp, Overlap.parse("all").tp
        (False, True)
        """
        known = cls.__struct_fields__
        names = {"none": set(), "all": set(known)}.get(text, {name.strip() for name in text.split(",")})
        if names - set(known):
            raise ConfigError(
                f"unknown {', '.join(sorted(names - set(known)))!r} (known: none, all, {', '.join(known)})",
                key="overlap",
            )
        return cls(**{name: name in names for name in known})

    def text(self) -> str:
        """Return the text that `parse` reads.

        >>> Overlap(tp=True).text(), Overlap.parse("none").text(), Overlap.parse("all").text()
        ('tp,prefetch,cp,pp', 'none', 'all')
        """
        hidden = [name for name in self.__struct_fields__ if getattr(self, name)]
        return "all" if len(hidden) == len(self.__struct_fields__) else ",".join(hidden) or "none"
