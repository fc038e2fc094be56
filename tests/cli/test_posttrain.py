"""`loadgauge estimate --task` of what comes after pre-training, as typed."""

from __future__ import annotations

import json

import pytest
from typed import typed  # noqa: F401
