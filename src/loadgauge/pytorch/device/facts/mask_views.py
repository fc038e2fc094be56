"""Masks of who was chosen, looked at in another way, and of those of them for whom there is room."""

from __future__ import annotations

from typing import Any

from loadgauge.pytorch.device.facts.fact_kinds import Chosen, Rank, share


def axis(ids: Any, numbers: Any) -> int:
    """The dimension of a comparison along which the numbers run, from the back."""
    return next((at for at in range(-1, -numbers.dim() - 1, -1) if numbers.shape[at] != 1), -1)


def limited(mask: Chosen, rank: Rank) -> Any:
    """Of who was chosen, those for whom there is room."""
    if rank.within is None:
        return None
    if share(rank.length, mask.of, 0) <= rank.within:  # of a symbol, this is a guard
        return mask
    return mask._replace(total=mask.total // rank.length * mask.of * rank.within)


def view_of_mask(fact: Any, name: str, args: Any, out: Any) -> Any:
    """Return what is known of a view of a mask, or of a rank in one: where its experts lie then; None where that is lost."""
    mask = fact.of if isinstance(fact, Rank) else fact
    dims, dim = args[0].dim(), mask.dim
    if dim is None:
        return fact if name not in ("select", "slice", "expand", "unfold") else None
    at, to = dim % dims, None
    if name in ("detach", "alias") or (name == "expand" and list(out.shape) == list(args[0].shape)):
        to = at
    elif name == "permute":
        to = [place % dims for place in args[1]].index(at)
    elif name in ("transpose", "t"):
        one, two = (args[1] % dims, args[2] % dims) if name == "transpose" else (0, 1)
        to = two if at == one else one if at == two else at
    elif name == "unsqueeze":
        place = args[1] % (dims + 1)
        to = at + (place <= at)
    elif name == "squeeze" and len(args) > 1 and type(args[1]) is int:
        gone = args[1] % dims
        to = at - (gone < at and out.dim() < dims) if gone != at else at if out.dim() == dims else None
    elif name in ("view", "_unsafe_view"):
        for end in (-1, 0):
            if at == end % dims and type(args[0].shape[at]) is int and out.shape[end] == args[0].shape[at]:
                to = end % out.dim()
                break
    elif name == "select" and type(args[2]) is int and not isinstance(fact, Rank):
        if args[1] % dims == at:
            return mask._replace(dim=None, expert=args[2] % int(args[0].shape[at]))
        return None
    if to is None:
        return None
    mask = mask._replace(dim=to - out.dim())
    return fact._replace(of=mask) if isinstance(fact, Rank) else mask
