"""The register of figures: the name, the places and the form of each are said once, beside the function of its data."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar

import msgspec

from loadgauge.core.estimate.result import Estimate

Form = Literal["bars", "lines", "areas", "timeline", "treemap", "scatter", "table"]
F = TypeVar("F", bound=Callable[[Estimate], Any])
FIGURES: dict[str, Figure] = {}
"""By their name in `/api/estimate`, filled by the decorators; `figures` imports all of them."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of an estimate, and the decorator of the function that returns its data.

    name, data: of the function, and the function; title, chinese: its heading; order: among all of them; form: how it is
    drawn. What no code draws by its name (`plot/sheet.py`, `text/drawings.py`, a script of the page) is drawn from its data,
    which are None or have `unit` (byte, s, or a word) and `limit` (a number that is usable, or None), and

    - for bars `rows`: the parts of each, in the unit, by their names
    - for lines, and areas upon one another, `x`, the word `along` for it, and `series`: values by name, one for each x

    plot: its name for `--figure`, empty where `--plot` does not draw it; row: of the sheet with all figures; needs: what an
    estimate must have for that; shown: `single` (the single file), `notebook` (below its sliders), and tabs of the page where
    no script has its place
    """

    title: str
    form: Form
    order: int
    name: str = ""
    data: Any = None
    chinese: str = ""
    plot: str = ""
    row: int = 4
    needs: Literal["", "time", "stages"] = ""
    shown: tuple[str, ...] = ()

    def __call__(self, data: F) -> F:
        """Register a function as the figure's data, as its decorator."""
        FIGURES[data.__name__] = msgspec.structs.replace(self, name=data.__name__, data=data)
        return data

    def to_dict(self) -> dict[str, Any]:
        """Return what the page must know to show the figure."""
        title = {"en": self.title, "zh": self.chinese or self.title}
        return {"name": self.name, "title": title, "form": self.form, "needs": self.needs, "shown": self.shown}

    def has(self, result: Estimate) -> bool:
        """Return whether an estimate has what the figure needs."""
        return {"time": result.time is not None, "stages": result.layout.pp > 1, "": True}[self.needs]


@cache
def _imported() -> dict[str, Figure]:
    """Return the register, all of whose own modules are imported."""
    package = import_module("loadgauge.core.answers.figures")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return FIGURES


def figures() -> list[Figure]:
    """Return all figures in their order.

    >>> [each.name for each in figures()][:3]
    ['treemap', 'moments', 'lanes']
    """
    return sorted(_imported().values(), key=lambda each: each.order)


def plotted() -> dict[str, Figure]:
    """Return the figures of `--plot` by their names for `--figure`, in the order of its sheet.

    >>> list(plotted())[:3]
    ['bytes', 'step', 'time']
    """
    return {each.plot: each for each in sorted(figures(), key=lambda each: each.row) if each.plot}
