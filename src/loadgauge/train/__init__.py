"""Padding-free training: no token of padding is computed or kept, with any transformers model, on any device.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from loadgauge.train import Collator, check, enable
>>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
>>> model = enable(LlamaForCausalLM(config))
>>> batch = Collator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10]}])
>>> loss = model(**batch).loss
>>> print(check(model, batch).leak)
Leak(worst=0.0, pair=None)
"""

try:
    from loadgauge.train.batches import TokenBudgetDataset, TokenBudgetSampler
    from loadgauge.train.check import Check, check
    from loadgauge.train.collator import Collator, sequence_log_probs, target_count
    from loadgauge.train.enable import describe, disable, enable, enabled, paused
    from loadgauge.train.leak_probe import Leak
    from loadgauge.train.report import Report, report
    from loadgauge.train.saved import saved_bytes
except ImportError as missing:
    if not isinstance(missing, ModuleNotFoundError) and missing.name == "transformers":
        raise ImportError(
            "loadgauge.train needs transformers 4.53 or newer: it puts its attention and masks behind AttentionInterface and"
            " AttentionMaskInterface, and older models have attention of their own"
        ) from None
    if missing.name not in ("torch", "transformers"):
        raise
    raise ImportError(f"loadgauge.train needs {missing.name}: pip install 'loadgauge[torch]'") from None

__all__ = [
    "Check",
    "Collator",
    "Leak",
    "Report",
    "TokenBudgetDataset",
    "TokenBudgetSampler",
    "check",
    "describe",
    "disable",
    "enable",
    "enabled",
    "paused",
    "report",
    "saved_bytes",
    "sequence_log_probs",
    "target_count",
]
