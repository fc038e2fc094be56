"""The same job on several kinds of GPU, side by side: does it fit, how long, and what it costs at the user's own prices."""

from collections import OrderedDict
from typing import Annotated, Any, NamedTuple

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.hardware import gpu as gpu_of
from loadgauge.core.estimate.time.cost import Budget
from loadgauge.page.inputs.flags import State, job_of, written
from loadgauge.page.inputs.uploads import Uploads

OF_A_CLUSTER = ("nic-bandwidth", "link-bandwidth", "gpus-per-node", "memory", "measured")
"""Flags that belong to the GPUs they were said of, and not to the job."""
TOKENS = "1B"
"""What is compared where the run's tokens are not said."""
MOST_KEPT = 300
Price = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Cards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kinds of GPU to compare.

    cards: the flags of the job that differ on a GPU, such as its own best layout, by its id; prices: of a GPU-hour there, one
    for each cloud
    """

    flags: State
    cards: Annotated[dict[str, State], msgspec.Meta(max_length=40)]
    prices: dict[str, Annotated[list[Price | None], msgspec.Meta(max_length=12)]] = {}


class Known(NamedTuple):
    """A job on one GPU: its row without prices; the budgets of its step, and of its fastest and slowest one."""

    row: dict[str, Any]
    budgets: tuple[Budget, ...] = ()


_known: OrderedDict[bytes, Known] = OrderedDict()
"""By flags: a price that is typed asks again for all that is estimated already."""


def cards(question: Cards, uploads: Uploads) -> dict[str, Any]:
    """Estimate the job on each GPU: a row each with bytes, seconds, GPU-hours of the run and the cost at each price.

    cheapest: id of the GPU and place of the price; close: ids of others whose cheapest may be less, within the ranges
    """
    state = dict(question.flags)
    tokens_set = bool(written("tokens", state.get("tokens", "")))
    rows = [_priced(_on(state, id, own, uploads), question.prices.get(id, [])) for id, own in question.cards.items()]
    every = [
        {"gpu": row["gpu"], "price": price, "cost": cost}
        for row in rows
        if row["verdict"] != "does not fit"
        for price, cost in enumerate(row["costs"])
        if cost is not None
    ]
    cheapest = min(every, key=lambda card: card["cost"], default=None)
    return {"rows": rows, "tokens": None if tokens_set else 1e9, "cheapest": cheapest, "close": _close(rows, cheapest)}


def _on(state: State, id: str, own: State, uploads: Uploads) -> Known:
    """The job on one kind of GPU, as estimated before where it was."""
    others = {name: value for name, value in state.items() if name != "price"}
    if id != state.get("gpu"):
        others = {name: value for name, value in others.items() if name not in OF_A_CLUSTER}
    asked = {"tokens": TOKENS, **others, **own, "gpu": id}
    key = msgspec.json.encode(asked, order="deterministic")
    if key not in _known:
        _known[key] = _estimated(id, asked, uploads)
        if len(_known) > MOST_KEPT:
            _known.popitem(last=False)
    return _known[key]


def _estimated(id: str, asked: State, uploads: Uploads) -> Known:
    row: dict[str, Any] = dict.fromkeys(
        ("memory", "capacity", "verdict", "step", "mfu", "days", "gpu_hours", "low", "high")
    )
    row |= {"gpu": id, "name": id, "error": ""}
    try:
        row["name"] = gpu_of(id).name
        setup = job_of(asked, uploads)
        result = setup.estimate()
    except Error as error:
        return Known({**row, "error": str(error)})
    memory, time = result.memory, result.time
    row |= {"memory": memory.total, "capacity": memory.capacity, "verdict": memory.verdict}
    if time is None:
        return Known({**row, "error": result.untimed})
    budgets = [
        setup.budget(msgspec.structs.replace(result, time=msgspec.structs.replace(time, step=step)))
        for step in (time.step, time.low, time.high)
    ]
    known_budgets = tuple(budget for budget in budgets if budget is not None)
    row |= {"step": time.step, "mfu": time.mfu, "days": known_budgets[0].days, "gpu_hours": known_budgets[0].gpu_hours}
    row |= {"low": known_budgets[1].gpu_hours, "high": known_budgets[2].gpu_hours}
    return Known(row, known_budgets)


def _priced(card: Known, prices: list[float | None]) -> dict[str, Any]:
    """A row with the cost at each price, and its range at the lowest one."""
    row = {**card.row, "costs": [None] * len(prices), "cost_low": None, "cost_high": None}
    set_prices = [price for price in prices if price is not None]
    if not card.budgets or not set_prices:
        return row

    def cost(budget: Budget, price: float) -> float | None:
        return msgspec.structs.replace(budget, price=price).cost

    usual, fast, slow = card.budgets
    row["costs"] = [None if price is None else cost(usual, price) for price in prices]
    row["cost_low"], row["cost_high"] = cost(fast, min(set_prices)), cost(slow, min(set_prices))
    return row


def _close(rows: list[dict[str, Any]], cheapest: dict[str, Any] | None) -> list[str]:
    """GPUs that may be as cheap: their range begins below the end of the cheapest one's."""
    if cheapest is None:
        return []
    end = next(row["cost_high"] for row in rows if row["gpu"] == cheapest["gpu"])
    others = [row for row in rows if row["gpu"] != cheapest["gpu"] and row["verdict"] != "does not fit"]
    return [row["gpu"] for row in others if row["cost_low"] is not None and row["cost_low"] < end]
