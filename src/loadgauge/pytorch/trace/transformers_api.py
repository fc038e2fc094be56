"""Differences between releases of transformers, by feature: from 4.44 on."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from loadgauge.core.base.errors import ConfigError, NotModelled

OWN_KERNELS = {
    "rwkv": "RWKV's CUDA kernel runs, as with `pip install kernels ninja`; without it every token is a step of a loop"
}
"""Model types of which a kernel is simulated that transformers takes where further packages are installed, and that in words."""


def text_config(config: Any) -> Any:
    """Return the config of the language model in a config: its own part where there is one, else the config itself.

    config: of transformers, `PretrainedConfig`

    >>> class OfImages:
    ...     text_config = "of the text"
    >>> text_config(OfImages())
    'of the text'
    """
    own = getattr(config, "get_text_config", None)  # since transformers 4.45
    return own() if own is not None else getattr(config, "text_config", None) or config


SEEN = {"pixel_values": "picture", "input_features": "sound", "input_values": "sound"}
"""Parts of the names of inputs that hold what a tower sees or hears."""


def subject(config: Any, inputs: Iterable[str]) -> str:
    """Return what a model with towers runs on, by the names of its inputs; "" for a model of text alone.

    config: of transformers, or None

    >>> class OfImages:
    ...     vision_config = "of the tower"
    >>> subject(OfImages(), ["input_ids", "pixel_values"]), subject(OfImages(), ["input_ids"]), subject(object(), ["input_ids"])
    ('text with one picture', 'text alone', '')
    """
    if all(getattr(config, key, None) is None for key in ("vision_config", "audio_config", "thinker_config")):
        return ""
    seen = dict.fromkeys(word for name in inputs for part, word in SEEN.items() if part in name)
    return "text with " + " and ".join(f"one {word}" for word in seen) if seen else "text alone"


def without_initial_values() -> Any:
    """Return the context in which transformers leaves the weights of new models as they come: its `no_init_weights`."""
    try:
        from transformers.initialization import no_init_weights  # since transformers 5
    except ImportError:
        from transformers.modeling_utils import no_init_weights  # type: ignore[no-redef,attr-defined,unused-ignore]
    return no_init_weights()


def with_kernels(make: Any, config: Any, attention: str) -> Any:
    """Return the model that a class of transformers makes of a config, with an attention implementation.

    make: its `_from_config`, or an auto class's `from_config`. A class that has none but the eager one takes that, as transformers
    does where none is asked for; RWKV its CUDA kernel. Raises what transformers raises.
    """
    if config.model_type in OWN_KERNELS:
        from loadgauge.pytorch.device.kernels.cuda_rwkv import use_cuda_rwkv
        from loadgauge.pytorch.device.simulated import simulated_device

        use_cuda_rwkv(simulated_device())
    try:
        return make(config, attn_implementation=attention)
    except ValueError as error:
        if attention == "eager" or "scaled_dot_product_attention" not in str(error):
            raise
        return make(config, attn_implementation="eager")


def contexts(names: Iterable[str]) -> Callable[[], Any]:
    """A `context_fn` for `torch.utils.checkpoint` that keeps the results of operations with these names, as PyTorch
    dispatches them (`mm`, `aten::mm`). Raises ConfigError for a name that no operation has.

    >>> first, again = contexts(["mm"])()
    """
    try:
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    except ImportError:
        raise NotModelled(
            f"keep: PyTorch {torch.__version__} has no selective checkpointing by a policy; 2.5 and newer have"
        ) from None

    kept = {_operation(name) for name in names}

    def policy(_: Any, op: Any, *args: Any, **keywords: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op._overloadpacket in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _operation(name: str) -> Any:
    space, _, short = name.strip().rpartition("::")
    for where in (space,) if space else ("aten", "_c10d_functional"):
        result = getattr(getattr(torch.ops, where), short, None)
        if result is not None:
            return result
    raise ConfigError(f"keep: PyTorch has no operation {name!r}")
