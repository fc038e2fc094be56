"""PEFT's configurations of the methods of `--adapter`, for the same modules as loadgauge names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import peft

Make = Callable[[Sequence[str], int], peft.PeftConfig]


def ia3(targets: Sequence[str], _: int) -> peft.PeftConfig:
    down = [name for name in targets if name in ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h")]
    return peft.IA3Config(target_modules=list(targets), feedforward_modules=down, task_type="CAUSAL_LM")


def low_rank(kind: Any) -> Make:
    return lambda targets, rank: kind(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")


CONFIGS: dict[str, Make] = {
    "ia3": ia3,
    "vera": low_rank(peft.VeraConfig),
    "adalora": lambda targets, rank: peft.AdaLoraConfig(
        init_r=rank, target_modules=list(targets), total_step=10, task_type="CAUSAL_LM"
    ),
    "loha": low_rank(peft.LoHaConfig),
    "lokr": low_rank(peft.LoKrConfig),
    "oft": lambda targets, size: peft.OFTConfig(
        oft_block_size=size, target_modules=list(targets), task_type="CAUSAL_LM"
    ),
    "prompt": lambda _, tokens: peft.PromptTuningConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM"),
    "p-tuning": lambda _, tokens: peft.PromptEncoderConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM"),
}
"""By the word of `--adapter`: names of linear layers, and the rank (block size, number of tokens)."""
