"""Heads other than a language model's: classes, labels of tokens, two texts that belong together, sound (`heads.toml`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loadgauge.core.base import ConfigError, closest, read_table
from loadgauge.pytorch.capture.inputs.inputs import tree
from loadgauge.pytorch.capture.symbols.values import whole

SCALE = 20.0
"""By which likenesses are multiplied (sentence-transformers' MultipleNegativesRankingLoss)."""


def words() -> tuple[str, ...]:
    """The heads that can be asked for."""
    return tuple(word for word, row in read_table("capture/heads.toml").items() if "table" in row)


def head_class(config: Any, word: str) -> tuple[str, Any] | None:
    """The head that is trained and its class: `word`'s, or that of the first class in the config's `architectures`.

    None where that is a language model's, or none is named. Raises ConfigError for a word, or a model, that has none.
    """
    import transformers

    kind = config.model_type
    if word and word not in words():
        near = closest(word, words())
        raise ConfigError(
            f"no head is called {word[:40]!r}; {'did you mean ' + near[0] if near else 'known: ' + ', '.join(words())}"
        )
    stated = next(iter(getattr(config, "architectures", None) or ()), "")
    for one in (word,) if word else words():
        names = _classes(one, kind)
        if (word and names) or stated in names:
            found = getattr(transformers, stated if stated in names else names[0], None)
            if found is not None:
                return one, found
    if word:
        raise ConfigError(f"transformers has no {word} head for {kind!r}")
    return None


def _classes(word: str, kind: str) -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    table = read_table("capture/heads.toml")[word]["table"]
    names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES", {}).get(
        kind, ()
    )
    return (names,) if isinstance(names, str) else tuple(names)


def sizes_of(word: str) -> tuple[str, ...]:
    """The names of the sizes of a head's inputs."""
    return tuple(read_table("capture/heads.toml")[word]["sizes"])


def contrasts(word: str) -> bool:
    """Return whether two texts are compared with all others of the batch."""
    return bool(read_table("capture/heads.toml")[word].get("loss") == "contrastive")


def rate() -> int:
    """Samples of sound in a second."""
    return int(read_table("capture/heads.toml")["of_sound"]["rate"])


def head_inputs(
    word: str, config: Any, taken: Mapping[str, Any], device: str, dtype: torch.dtype, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a model with a head, other than tokens. taken: parameters of its `forward`

    Raises ConfigError for a model that takes none of what is known.
    """
    rows = dict(read_table("capture/heads.toml")[word].get("inputs", {}))
    if "n" in sizes:
        sounds = read_table("capture/heads.toml")["of_sound"]
        own = sounds.get(config.model_type, {})
        name = next((name for name in ("input_values", "input_features") if name in taken), None)
        if name is None:
            raise ConfigError(
                f"{config.model_type}: takes neither input_values nor input_features: its sound is not known"
            )
        rows[name] = own.get(name, sounds[name])
    given: dict[str, Any] = {}
    for name, row in rows.items():
        if name in taken:
            one = row | {"dtype": ""} if row.get("regression") and getattr(config, "num_labels", 2) == 1 else row
            given[name] = tree(one, config, device, dtype, sizes)
    return given


class Towers(nn.Module):
    """One model for two texts: the mean of its vectors, of length 1, and the loss of each first text against all second ones.

    Runs as sentence-transformers does: the model twice, tokens of padding masked out of the mean.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, masks: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The loss, a scalar. first: (b, s), second: (b, t) token ids, masks: of the same shapes"""
        left, right = (self._vector(ids, mask) for ids, mask in zip((first, second), masks, strict=True))
        likeness = torch.mm(left, right.transpose(0, 1)) * SCALE
        return functional.cross_entropy(likeness, torch.arange(left.shape[0], device=left.device))

    def _vector(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.model(input_ids=ids, attention_mask=mask)[0]
        wide = mask.unsqueeze(-1).expand(states.size()).to(states.dtype)
        return functional.normalize((states * wide).sum(1) / wide.sum(1).clamp(min=1e-9), dim=-1)


def two_texts(device: str, b: Any, s: Any, t: Any) -> dict[str, Any]:
    """Return what `Towers` is called with: b texts of s tokens and b of t, without padding."""
    ids = {
        name: torch.empty((b, size), dtype=torch.long, device=device) for name, size in (("first", s), ("second", t))
    }
    masks = tuple(whole(torch.ones((b, size), dtype=torch.long, device=device)) for size in (s, t))
    return {**ids, "masks": masks}
