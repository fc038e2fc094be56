"""The optimizer in job files of transformers' family: its name, and the arguments on which its states depend."""

from collections.abc import Callable, Mapping
from typing import Any

from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.job_files.ideas.table import NEAREST, Facts, Idea, Keys

LOW_RANK = {"rank": "rank", "update_proj_gap": "every"}
"""Arguments of GaLore and APOLLO that decide memory or time, and ours."""
HARMLESS = ("scale", "scale_type", "proj", "proj_type")


def optimizer(key: str, words: Mapping[str, str], default: str | Callable[[Keys], str] = "adamw") -> Idea:
    """The idea of the optimizer named by `key`, with its `optim_args` and `optim_target_modules`.

    words: the tool's names and ours; default: what it runs where nothing is said
    """
    section = key.rpartition(".")[0]
    arguments_key, targets = (
        ".".join(filter(None, (section, name))) for name in ("optim_args", "optim_target_modules")
    )
    backward = {ours: theirs for theirs, ours in reversed(list(words.items()))}

    def arguments(keys: Keys) -> dict[str, str]:
        raw = keys.raw(arguments_key)
        if isinstance(raw, Mapping):
            return {str(name): str(value) for name, value in raw.items()}
        pairs = [word.partition("=") for word in str(raw or "").replace(" ", "").split(",") if word]
        return {name: value for name, _, value in pairs}

    def read(keys: Keys) -> Facts:
        name = keys.choice(key, words, NEAREST["optimizer"]) or (default(keys) if callable(default) else default)
        low = OPTIMIZERS[name].low_rank
        values = arguments(keys)
        options = []
        for argument, value in values.items():
            keys.note(
                arguments_key,
                f"gives the optimizer {argument}, which is not read",
                parts="optimizer",
                share=0.5,
                when=low is None or argument not in (*LOW_RANK, *HARMLESS),
            )
            if argument in LOW_RANK:
                keys.refuse(
                    arguments_key,
                    f"{argument}={value}: must be a whole number",
                    when=not (value.isascii() and value.isdecimal()),
                )
                ours = LOW_RANK[argument]
                if low is not None and int(value) != getattr(low, ours):
                    options.append(f"{ours}={int(value)}")
        if low is not None and str(keys.raw(targets)).replace("_", "-") == "all-linear":
            options.append("head")
        elif low is not None and keys.raw(targets) is not None and not _blocks(keys.words(targets) or []):
            keys.note(targets, "projects gradients of some layers alone", "costs", "optimizer", 4)
        return {"optimizer": ":".join(filter(None, (name, ",".join(options))))}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name, _, options = (facts.get("optimizer") or "adamw").partition(":")
        usual = default(keys) if callable(default) else default
        if name == "adamw" and usual == name:
            return dict.fromkeys((key, arguments_key, targets))  # how it runs is left to the release, as it is here
        name = "adamw-fused" if name == "adamw" else name
        if name not in backward or "in-backward" in options:
            return {}
        if OPTIMIZERS[name].low_rank is None:
            return {key: backward[name]} | dict.fromkeys(filter(keys.has, (arguments_key, targets)))
        theirs = {ours: argument for argument, ours in LOW_RANK.items()}
        words = options.split(",")
        pairs = dict(word.split("=") for word in words if "=" in word)
        present = keys.words(targets) or []
        blocks = "'.*(attn|mlp).*'" if keys.document.syntax == "argv" else ["attn", "mlp"]  # a flag takes one word
        listed = present if len(present) > 1 and _blocks(present) else blocks
        return {
            key: backward[name],
            arguments_key: ",".join(f"{theirs[ours]}={value}" for ours, value in pairs.items()) or None,
            targets: "all-linear" if "head" in words else listed,
        }

    return Idea(keys=(key, arguments_key, targets), facts=("optimizer",), read=read, write=write)


def instantiated(
    component: str,
    words: Mapping[str, str],
    *,
    in_backward: str = "",
    harmless: tuple[str, ...] = (),
    arguments: str = "",
) -> Idea:
    """The idea of an optimizer whose class is named by `component`, with its arguments beside it.

    words: classes and ours; in_backward: a switch that steps each parameter in the backward
    harmless: arguments that are read where they are off; arguments: their section, where they are not beside the class

    PyTorch's AdamW runs `foreach` where neither it nor `fused` is given, and a loop where one of them is false
    (torch/optim/adam.py, `_default_to_fused_or_foreach`).
    """
    section = arguments or component.rpartition(".")[0]
    fused, foreach, momentum = (f"{section}.{name}" for name in ("fused", "foreach", "momentum"))
    beside = tuple(f"{section}.{name}" for name in harmless)
    backward = {ours: theirs for theirs, ours in reversed(list(words.items()))}

    def read(keys: Keys) -> Facts:
        name = keys.choice(component, words, NEAREST["optimizer"])
        quick, lists = keys.flag(fused), keys.flag(foreach)
        keys.refuse(foreach, f"contradicts {keys.document.shown(fused)}", when=quick and lists)
        for key in beside:
            keys.note(
                key,
                "runs the optimizer another way",
                parts="optimizer gradients",
                when=keys.raw(key) not in (None, False),
            )
        if name == "adamw":
            name = (
                "adamw-fused" if quick else "adamw-loop" if False in (quick, lists) and not lists else "adamw-foreach"
            )
        elif name == "sgd" and keys.real(momentum):
            name = "sgd-momentum"
        name = name or "adamw"
        return {"optimizer": f"{name}:in-backward" if in_backward and keys.flag(in_backward) else name}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name, _, options = (facts.get("optimizer") or "adamw").partition(":")
        plain = OPTIMIZERS[name].variant_of or name if name in OPTIMIZERS else name
        wanted = {"sgd-momentum": "sgd"}.get(plain, plain)
        present = keys.word(component)
        if wanted not in backward or options not in ("", "in-backward") or (options and not in_backward):
            return {}
        switch = {in_backward: True if options else False if keys.has(in_backward) else None} if in_backward else {}
        return {
            fused: True if name in ("adamw", "adamw-fused") else None,
            foreach: False if name == "adamw-loop" else None,
            momentum: keys.real(momentum) or 0.9 if plain == "sgd-momentum" else None,
            component: present if present is not None and words.get(present) == wanted else backward[wanted],
            **switch,
        }

    return Idea(
        keys=(component, fused, foreach, momentum, *beside, *([in_backward] if in_backward else [])),
        facts=("optimizer",),
        read=read,
        write=write,
    )


def _blocks(names: list[str]) -> bool:
    """Return whether the names or patterns are those of attention and MLP, and so of all linear layers of the blocks."""
    return any("attn" in name for name in names) and any("mlp" in name for name in names)
