"""Kinds of facts about the values of a fake tensor."""

from typing import Any, NamedTuple

import torch

from loadgauge.core.base.errors import NotModelled

_FORMULAS = 32
"""Of so many experts at most the rows are formulas: each adds terms and guards."""


class Same(NamedTuple):
    """All elements have this value, a real tensor with one element."""

    value: torch.Tensor


class Among(NamedTuple):
    """Each element has one of these values, a real tensor of one dimension.

    of: two tensors of one shape with the same `of` go together: where one has its value at a place of `value`, so has the other
    """

    value: torch.Tensor
    of: object = None


class Known(NamedTuple):
    """The values, as a real tensor."""

    value: torch.Tensor


class Ids(NamedTuple):
    """Each element is one of `of` experts, all equally likely."""

    of: int


class Tokens(NamedTuple):
    """Ids of tokens, of which some are there so many times: (id, how many)."""

    counts: tuple[tuple[int, Any], ...]


class Mask(NamedTuple):
    """A mask, or where that is not true: of two with the same `of`, one of them `turned`, each place is true in one."""

    of: object
    turned: bool


class Range(NamedTuple):
    """0, 1, ... along the only dimension that is not 1."""

    size: int


class Chosen(NamedTuple):
    """Not 0 where an expert was chosen, `total` times in all: along `dim` the experts, or one of them alone. `ones`: 1 there"""

    total: Any
    of: int
    dim: int | None
    expert: int | None
    ones: bool


class Rank(NamedTuple):
    """How often an expert was chosen so far, counted along a dimension of `length`; `within`: at most so often is still true."""

    of: Chosen
    length: Any
    within: int | None


class Counts(NamedTuple):
    """How often each expert was chosen, or one of them; `ends`: added up so far"""

    total: Any
    of: int
    expert: int | None
    ends: bool


class Number(NamedTuple):
    """One number, which may be a symbol."""

    value: Any


class Drawn(NamedTuple):
    """One number drawn at random between two, each as likely: it is taken to be in the middle."""

    low: float
    high: float


def share(total: Any, of: int, expert: int) -> Any:
    """How many of `total` choices an expert gets where all are equally busy.

    >>> [share(10, 4, expert) for expert in range(4)]
    [3, 3, 2, 2]
    """
    if isinstance(total, torch.SymInt) and of > _FORMULAS:
        raise NotModelled(f"{of} experts in a loop: numbers only, a formula would have as many terms")
    return (total + (of - 1 - expert)) // of if 0 <= expert < of else 0


class Rows(NamedTuple):
    """A mask of which so many elements are true: as many rows were put where it is, or are stated.

    marked: as many as were marked in it one by one, which is the most there can be
    """

    count: Any
    marked: bool = False


class Tiled(NamedTuple):
    """The values of the first rows, a real tensor; all others are the same again, as each sequence of a batch has them."""

    value: torch.Tensor


class Placed(NamedTuple):
    """Ids of texts, each of which has `tokens` tokens of one kind, one after another."""

    token: int
    tokens: int


class Run(NamedTuple):
    """A mask of which `tokens` places of each row are true, one after another; shift: how many were cut off before them."""

    tokens: int
    shift: int


class Edges(NamedTuple):
    """The differences of a mask's neighbours, of which in each row one is 1, where a run begins, and one -1, where it ends."""


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
        to = [dim % dims for dim in args[1]].index(at)
    elif name in ("transpose", "t"):
        first_dim, second_dim = (args[1] % dims, args[2] % dims) if name == "transpose" else (0, 1)
        to = second_dim if at == first_dim else first_dim if at == second_dim else at
    elif name == "unsqueeze":
        added = args[1] % (dims + 1)
        to = at + (added <= at)
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
