"""A view of an estimate with sliders, in a notebook: the verdict, the memory through a step and the time of a step.

    from loadgauge.sheets.notebook import view
    view("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3)

Needs the extra `notebook`.
"""

from html import escape
from pathlib import Path
from typing import Any

try:
    import ipywidgets
except ImportError:
    raise ImportError("loadgauge.sheets.notebook needs ipywidgets: pip install 'loadgauge[notebook]'") from None

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.text import drawings
from loadgauge.sheets.text.notebook import html

__all__ = ["View", "view"]

CONTROLS: dict[str, tuple[Any, ...]] = {
    "gpus": tuple(2**power for power in range(13)),
    "micro_batch": tuple(2**power for power in range(8)),
    "seq_len": tuple(2**power for power in range(8, 18)),
    "zero": (0, 1, 2, 3),
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8, 16),
    "recompute": ("none", "selective", "full"),
}
"""Fields of a job that have a slider, and their values; the job's own is put in between where it is none of them."""


class View(ipywidgets.VBox):  # type: ignore[misc,unused-ignore]
    """Sliders over an estimate. `job`: as the sliders say it; `result`: its estimate, None where it cannot be.

    `controls`: the sliders, by field of the job; setting a `value` moves one.
    """

    def __init__(self, job: Job) -> None:
        self.asked = self.job = job
        self.result: Estimate | None = None
        layout = resolve_job(job).estimate().layout
        self.controls = {name: _slider(name, getattr(job, name), getattr(layout, name)) for name in CONTROLS}
        self._shown = ipywidgets.HTML()
        for control in self.controls.values():
            control.observe(self._moved, names="value")
        self._moved(None)
        super().__init__([ipywidgets.VBox(list(self.controls.values())), self._shown])

    @property
    def text(self) -> str:
        """The HTML that is shown below the sliders."""
        return str(self._shown.value)

    def _moved(self, change: object) -> None:
        values = {name: control.value for name, control in self.controls.items()}
        # What was not asked and has not been moved stays open, so that it follows the others, as on the command line.
        own = {
            name: value
            for name, value in values.items()
            if getattr(self.asked, name) is not None or value != self.controls[name].initial
        }
        self.job = self.asked.replace(**own)
        try:
            self.result = resolve_job(self.job).estimate()
        except Error as error:
            self.result = None
            self._shown.value = f"<p style='color:#c23b2e'>{escape(str(error))}</p>"
            return
        command = f"<pre style='white-space:pre-wrap'>{escape(self.job.command())}</pre>"
        self._shown.value = f"{html(self.result)}{drawings.drawn(self.result)}{command}"


def view(model: str | Path | Job, **flags: Any) -> View:
    """Return a view with sliders of a job, to be shown by a notebook.

    model: as `loadgauge.estimate` takes it, with the flags of the job; or a `Job`

    Raises `ConfigError` for flags that cannot be read, `LayoutError` for a layout that cannot exist.
    """
    return View(model.replace(**flags) if isinstance(model, Job) else Job.of(str(model), flags))


class _Slider(ipywidgets.SelectionSlider):  # type: ignore[misc,unused-ignore]
    """A slider that knows where it began."""

    initial: Any = None


def _slider(name: str, asked: Any, resolved: Any) -> _Slider:
    """A slider of a field, at the job's own value or at the one that follows from the others."""
    begin = asked if asked is not None else str(resolved) if name == "recompute" else resolved
    values = [*CONTROLS[name], *([begin] if begin not in CONTROLS[name] else [])]
    if name != "recompute":
        values.sort()
    slider = _Slider(
        options=values,
        value=begin,
        description=name.replace("_", " "),
        continuous_update=True,
        tooltip=fields()[name].help,
        layout=ipywidgets.Layout(width="28em"),
    )
    slider.initial = begin
    return slider
