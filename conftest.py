"""Which modules' examples are not collected: those that are about a library that is not installed."""

from importlib.util import find_spec

NEEDS = {"src/loadgauge/notebook.py": "ipywidgets", "src/loadgauge/pytorch/measure/lightning_watch.py": "lightning"}
collect_ignore = [path for path, library in NEEDS.items() if find_spec(library) is None]
