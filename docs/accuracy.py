"""Writes `accuracy.md`: `make accuracy`. Takes some minutes, as each source is predicted by a fit to the others."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from accuracy.page import generate

if __name__ == "__main__":
    text = generate("--no-cross-validation" not in sys.argv, say=lambda line: print(line, file=sys.stderr))
    Path(__file__).with_name("accuracy.md").write_text(text, encoding="utf-8")
