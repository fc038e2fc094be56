"""PyTorch and transformers are the oracle here; without them these tests are left out."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["*.py"]

if not collect_ignore_glob:
    import torch

    torch.set_num_threads(1)  # the sizes are small, and other processes may be testing too
