"""Heads other than a language model's: classes, labels of tokens, two texts that belong together, sound (`heads.toml`)."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loadgauge.core.base import ConfigError, closest, read_table, refuse
from loadgauge.pytorch.capture.inputs.inputs import tree
from loadgauge.pytorch.capture.symbols.values import whole

HEADS = ("IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ")
"""Tasks that a model is trained for, in the order in which its class is looked for; names of transformers' tables."""
SCALE = 20.0
"""By which likenesses are multiplied (sentence-transformers' MultipleNegativesRankingLoss)."""


def words() -> tuple[str, ...]:
    """The heads that can be asked for."""
    return tuple(word for word, row in read_table("capture/heads.toml").items() if "table" in row)


def head_class(config: Any, word: str) -> tuple[str, Any] | None:
    """The head that is trained and its class: `word`'s, or that of the first class in the config's `architectures`.

    None where that is a language model's. Of a type that has no such class: the first that the table of words has for it, in which
    models without a head are last. Raises ConfigError for a word, or a model, that has none.
    """
    import transformers

    kind = config.model_type
    if word and word not in words():
        near = closest(word, words())
        raise ConfigError(
            f"no head is called {word[:40]!r}; {'did you mean ' + near[0] if near else 'known: ' + ', '.join(words())}"
        )
    stated = next(iter(getattr(config, "architectures", None) or ()), "")
    spoken = bool(classes_of(HEADS, kind))
    for each in (word,) if word else words():
        row = read_table("capture/heads.toml")[each]
        names = classes_of(row["table"] if isinstance(row["table"], list) else (row["table"],), kind)
        if "main" in row and stated and (stated.endswith("Model") or not (word or spoken)):
            names = (*names, stated)
        wanted = stated if stated in names else names[0] if names and (word or not (stated or spoken)) else ""
        found = getattr(transformers, wanted, None)
        if found is not None and _takes(found, row):
            return each, found
    refuse(word, f"transformers has no {word} head for {kind!r}")
    return None


def _takes(kind: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a class is called with what a word's models without a head are called with."""
    main, taken = getattr(kind, "main_input_name", ""), inspect.signature(kind.forward).parameters
    fits = (main[0] if isinstance(main, list) else main) in row.get("main", (main,))
    return (
        fits and taken.keys() >= set(row.get("takes", ())) and ("main" not in row or "decoder_input_ids" not in taken)
    )


def classes_of(tables: Iterable[str], kind: str) -> tuple[str, ...]:
    """The names of the classes that transformers' tables have for a model type. tables: as in `HEADS`; "": without a head"""
    from transformers.models.auto import modeling_auto

    classes: list[str] = []
    for table in tables:
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES", {})
        own = names.get(kind, ())
        classes += (own,) if isinstance(own, str) else own
    return tuple(classes)


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
    table = read_table("capture/heads.toml")
    rows = {**table[word].get("inputs", {}), **table["of_type"].get(config.model_type, {})}
    if "n" in sizes:
        sounds = table["of_sound"]
        own = sounds.get(config.model_type, {})
        name = next((name for name in ("input_values", "input_features") if name in taken), None)
        if name is None:
            raise ConfigError(
                f"{config.model_type}: takes neither input_values nor input_features: its sound is not known"
            )
        rows[name] = own.get(name, sounds[name])
    number = {"dtype": ""} if getattr(config, "num_labels", 2) == 1 else {}
    return {
        name: tree(row | number if row.get("regression") else row, config, device, dtype, sizes)
        for name, row in rows.items()
        if name in taken
    }


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
