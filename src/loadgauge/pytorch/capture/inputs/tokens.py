"""How many tokens of a sequence stand for its pictures and sounds, as the model itself counts them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.inputs.pictures import Pictures
from loadgauge.pytorch.capture.inputs.sounds import Heard, keep
from loadgauge.pytorch.capture.symbols.values import KeptValues
from loadgauge.pytorch.device.facts.fact_kinds import Rows, Tokens
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device

_PLACED = "get_placeholder_mask"
"""The method of transformers' models that finds the tokens that vectors of pictures or sounds take the place of."""
_SEEN = "get_image_features"
"""That which makes those vectors, of models without the other."""
_HEARD = "get_audio_features"
"""That which makes vectors of sounds, of models whose processor does not say how many they are."""
_TALLY = "loadgauge_tally"
SOUNDS = "sounds"


class Counted(Exception):
    """The vectors that pictures come to, raised where the model is about to place them."""

    def __init__(self, vectors: int) -> None:
        self.vectors = vectors


class Placing(TorchDispatchMode):
    """Where a model looks for the tokens that vectors take the place of: there are as many as vectors.

    A mask then chooses as many numbers as the vectors have, and a check that it does so holds.
    """

    def __init__(self, numbers: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with known places instead of a mask."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype is torch.bool or 1
        if func is torch.ops.aten.index.Tensor and any(one is not None and one.dtype is torch.bool for one in args[1]):
            mask = args[1][0]
            rows = self.numbers if mask.dim() == args[0].dim() else self.numbers // args[0].shape[-1]
            places = torch.empty((rows, mask.dim()), dtype=torch.long, device=mask.device)
            args = (args[0], list(places.unbind(1)))
        return func(*args, **(kwargs or {}))


class Tally:
    """How many vectors take the place of tokens of all sequences, of pictures and of sounds."""

    def __init__(self, s: Any, b: Any, sounds: int = 0, stop: bool = False) -> None:
        self.s, self.b, self.stop = s, b, stop
        self.vectors: dict[str, Any] = {SOUNDS: sounds * b} if sounds else {}
        self.check()

    def add(self, kind: str, tensors: list[torch.Tensor]) -> None:
        """Count vectors that are about to be placed. Raises ConfigError for shorter sequences, `Counted` to stop at pictures."""
        if tensors:
            self.vectors[kind] = sum(one.numel() // one.shape[-1] for one in tensors)
            if self.stop and kind != SOUNDS:
                raise Counted(int(self.vectors[kind]))
            self.check()

    def check(self) -> None:
        """Raise ConfigError where sequences are shorter than what stands in them. With symbols, that they are not is a guard."""
        vectors = sum(self.vectors.values())
        if not self.stop and vectors > self.b * self.s:
            raise ConfigError(
                f"s: {int(self.s)} is fewer than the {int(vectors) // int(self.b)} tokens of a sequence's pictures or sounds"
            )

    @property
    def of_sound(self) -> int:
        """Tokens of each sequence that stand for its sound."""
        return int(self.vectors.get(SOUNDS, 0) // self.b)


def tally_of(module: Any) -> Tally | None:
    """Return what was counted of a module that is watched; None of any other."""
    return getattr(module, _TALLY, None)


def watch(module: Any, s: Any, b: Any, stop: bool = False, heard: Heard | None = None) -> None:
    """Have a model refuse sequences that are shorter than what stands for their pictures and sounds.

    heard: the sound, where there is one of any length; stop: raise `Counted` at pictures instead
    """
    tally = Tally(s, b, 0 if heard is None else heard.tokens, stop)
    setattr(module, _TALLY, tally)
    name = _PLACED if any(hasattr(one, _PLACED) for one in module.modules()) else _SEEN
    for one in module.modules():
        if callable(getattr(type(one), name, None)) and not (name == _SEEN and one is module):
            setattr(one, name, _counting(getattr(type(one), name).__get__(one), name, tally))
        if heard is not None and heard.seen and callable(getattr(type(one), _HEARD, None)) and one is not module:
            setattr(one, _HEARD, _counting(getattr(type(one), _HEARD).__get__(one), _HEARD, tally))


def _counting(method: Any, name: str, tally: Tally) -> Any:
    def counting(*args: Any, **keywords: Any) -> Any:
        if name == _PLACED:
            named, config = (
                [key for key in keywords if key.endswith("features")],
                getattr(method.__self__, "config", None),
            )
            features = _tensors([keywords[key] for key in named] or list(args[2:]))
            sounds = any("audio" in key for key in named) or getattr(config, "audio_token_id", ()) in args[3:]
            tally.add(SOUNDS if sounds else "pictures", features)
            if not features:
                return method(*args, **keywords)
            with Placing(sum(one.numel() for one in features)):
                return _said(method(*args, **keywords), sum(one.numel() // one.shape[-1] for one in features))
        found = method(*args, **keywords)
        if name == _HEARD:
            tally.add(SOUNDS, _tensors(found.last_hidden_state))
        else:
            tally.add("pictures", _tensors(getattr(found, "pooler_output", found)))
        return found

    return counting


def _said(mask: Any, vectors: Any) -> Any:
    """Say of a mask of tokens that it is true for as many as there are vectors: layers may look there again."""
    if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and (mask.dim() == 2 or mask.shape[-1] == 1):
        keep(mask, Rows(vectors))
    return mask


def count_tokens(ids: Any, counts: tuple[tuple[int, Any], ...]) -> None:
    """Say of ids of tokens how often some of them are there. counts: (id, how many)"""
    if counts:
        keep(ids, Tokens(counts))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor) and one.dtype.is_floating_point]


def vectors_of(job: Any, each: list[Pictures]) -> list[int]:
    """How many tokens stand for pictures, for each entry of `each`; 0: none, as where text attends to the pictures.

    job: of `of_config`
    """
    found = []
    with fake_tensors(), KeptValues():
        place = simulated_device()
        module = job.build(place)
        for pictures in each:
            given, keywords = job.inputs(place, module, b=1, s=8, pictures=pictures, stop=True)
            try:
                with torch.no_grad():
                    module(*given, **keywords)
                found.append(0)
            except Counted as counted:
                found.append(counted.vectors)
    return found
