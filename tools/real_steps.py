"""Train one step of the small model of every type on a real CPU: which types can be trained at all as they are stated.

python tools/real_steps.py out.json [types ...]      results so far, each type in a process of its own

The model, its inputs and their shapes are those that are captured; values are random, and as many tokens stand for a picture as the
model itself asks for.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from captured_models import forked

LARGEST = 400_000_000
"""Parameters of a model that is built with values."""
TIMES = 4
"""How often a step is tried, as errors say how many tokens a picture needs, of each kind."""


def trained(kind: str) -> dict[str, Any]:
    """One forward and backward pass with values: the loss, or why there is none."""
    import torch

    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.capture.inputs.kinds import model_class, of_config
    from loadgauge.pytorch.trace.torch_run import TorchRun
    from small_models import small_config

    config = small_config(kind)
    with torch.device("meta"):
        count = sum(one.numel() for one in model_class(config)._from_config(config).parameters())
    if count > LARGEST:
        return {"parameters": count, "large": True}
    config = small_config(kind)  # anew: building fills it in
    job = of_config(config, TorchRun.of(Job(model="", seq_len=1, optimizer="sgd", precision="fp32")))
    module = job.build("cpu")
    model: Any = module
    model.init_weights()
    sizes = {name: {"b": 2, "s": 96, "t": 80, "n": 16_000}[name] for name in job.names}
    stands: dict[int, int] = {}
    for _ in range(TIMES):
        _, given = job.inputs("cpu", module, **sizes)
        given = {name: _filled(name, one, config, stands) for name, one in given.items()}
        if "labels" in given and "input_ids" in given and "decoder_input_ids" not in given:
            given["labels"] = given["input_ids"].clamp(0, _vocabulary(config) - 1)
        elif "labels" in given:
            given["labels"] = given["decoder_input_ids"]
        try:
            loss = job.loss(module(**given))
            break
        except ValueError as error:
            needed = re.search(r"tokens: \d+, (?:features|image_features|image features):? (\d+)", str(error))
            token = next((found for name in ("image_token_id", "image_token_index", "media_placeholder_token_id")
                          if isinstance(found := getattr(config, name, None), int)), None)  # fmt: skip
            if needed is None or token is None or token in stands:
                raise
            rows = int(needed[1])
            width = config.get_text_config().hidden_size
            stands[token] = -(-(rows if rows < 10**5 else rows // width) // 2)  # some count numbers, not vectors
            sizes["s"] = max(sizes["s"], stands[token] + 16)
    loss.backward()
    found = sum(one.numel() for one in module.parameters())
    return {"parameters": found, "same": found == count, "loss": float(loss), "finite": math.isfinite(float(loss))}


def _vocabulary(config: Any) -> int:
    own = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(own, "vocab_size", None) or getattr(config, "vocab_size", None) or 30)


def _filled(name: str, given: Any, config: Any, stands: dict[int, int]) -> Any:
    import torch

    if not isinstance(given, torch.Tensor):
        return given
    if (value := getattr(given, "_loadgauge_value", None)) is not None:
        return value
    if given.dtype.is_floating_point:
        return torch.randn_like(given).clamp(-1, 1)
    if "mask" in name or given.dtype is torch.bool:
        return torch.ones_like(given)
    if name == "position_ids":
        return torch.arange(given.shape[-1]).expand(given.shape).clone()
    if name not in ("input_ids", "decoder_input_ids"):
        return torch.ones_like(given)
    given = torch.randint(min(3, _vocabulary(config) - 1), min(1000, _vocabulary(config)), given.shape)
    if name == "input_ids":
        for token, count in stands.items():
            given[given == token] = 3
            given[:, 4 : 4 + count] = token
    return given


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    importlib.import_module("transformers")
    importlib.import_module("loadgauge.pytorch.capture.capture")
    from small_models import model_types

    path, given = Path(sys.argv[1]), sys.argv[2:]
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for kind in given or [kind for kind in model_types() if kind not in done]:
        done[kind] = forked(kind, trained)
        print(kind, done[kind], flush=True)
        path.write_text(json.dumps(done, indent=0), encoding="utf-8")
