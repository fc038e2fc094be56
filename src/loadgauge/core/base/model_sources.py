"""Other ways to a model than its family: what is above `resolve` puts them here, and `resolve` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROADS: list[Callable[[Any, str], Any]] = []
"""Each is called with a `Job` and why no family reads its model, and returns what `families.catalogue.find` does, or raises."""
