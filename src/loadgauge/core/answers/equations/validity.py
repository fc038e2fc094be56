"""Under which assumptions an equation holds, and its sources."""

from loadgauge.core.answers.equations.options import WEIGHTS, Choice
from loadgauge.core.base.sources import cite

READ_OFF = "read off the list of operations"


def validity(choice: Choice) -> tuple[str, ...]:
    """Return the assumptions of an equation, a sentence each."""
    quantity, flash = choice.quantity, choice.attention == "flash"
    batch = quantity not in WEIGHTS and "params" not in quantity
    kept, work = quantity == "activations", quantity.endswith("flops")
    again = work and flash and quantity not in ("forward-flops", "backward-flops")
    recomputed = quantity in ("activations", "wire", "training-flops", "recompute-flops", "model-flops")
    notes = {
        f"{choice.itemsize} bytes an activation, 1 byte an element of a dropout mask": kept,
        "statistics of norms and ids of tokens and experts neglected, as the papers do": kept,
        "FlashAttention: no scores are kept, one float32 log-sum-exp a token and head is": kept and flash,
        "attention written out (eager): the scores are kept": kept and not flash,
        _EXPERTS[choice.experts]: kept and choice.has_experts,
        f"ring collectives, {choice.itemsize} bytes an activation": quantity == "wire",
        "matrix products only; a multiply-add is 2 FLOPs; every query-key pair counts, causal or not": work,
        "the scores that FlashAttention's backward makes again are counted": again,
        "balanced routing, no token dropped": choice.has_experts and batch,
        f"recomputation: {choice.policy}": recomputed,
        "exact: the final norm is counted, which papers leave out; a tied table counts once": quantity
        == "model-params",
        "the experts a token goes to, all else, and both tables whole": quantity == "model-active-params",
        "sequence parallelism: the ranks share the tokens of norms and dropouts too": choice.sequence_parallel
        and batch,
        **{f"{axis} = {count}": True for axis, count in choice.ranks.items() if isinstance(count, int)},
        f"context parallelism: the ranks share the tokens, {choice.of.exchanged_over_cp}": "cp" in choice.ranks,
    }
    return tuple(note for note, holds in notes.items() if holds)


_EXPERTS = {
    "grouped": "experts as one grouped product, weighted behind it (transformers): what they put out is kept",
    "fused": "experts weighted inside their activation (Megatron-LM): its output and theirs are not kept",
}
_PLACES = {
    "params": ("narayanan2021", "equation 2, per layer"),
    "active-params": ("narayanan2021", "equation 2, per layer"),
    "forward-flops": ("korthikanti2022", "appendix A, per layer"),
    "backward-flops": ("korthikanti2022", "appendix A, per layer"),
    "model-params": ("narayanan2021", "equation 2"),
    "model-active-params": ("narayanan2021", "equation 2"),
}
_TRAINING = {"none": ("korthikanti2022", "equation 7"), "full": ("narayanan2021", "equation 3")}
_ACTIVATIONS = {  # recomputation, tensor parallelism, sequence parallelism
    ("none", False, False): "equation 1",
    ("none", True, False): "equation 2",
    ("none", True, True): "equation 4",
    ("selective", True, True): "equation 6",
}
_ARCHITECTURES = {
    "llama": (("touvron2023", "section 2.2"),),
    "mixtral": (("jiang2024", "section 2"),),
    "deepseek": (("deepseek2024v3", "section 2.1"), ("deepseek2024v2", "section 2.1")),
}


def origin(choice: Choice) -> tuple[str, tuple[str, ...]]:
    """Return the source of the equation in words, and the citation keys (`data/sources.toml`) of the works named.

    A paper is named as the equation's source only where it prints that very equation; else it is the architecture's.
    """
    if not choice.of.is_open:
        source = choice.of.model.source
        return (f"{READ_OFF}; architecture: {source}" if source else READ_OFF), ()
    if choice.of.name != "gpt":
        places, sent = _ARCHITECTURES[choice.of.name], ("megatron-lm",) if choice.quantity == "wire" else ()
        traffic = "".join(f"; traffic as in {cite(key)}" for key in sent)
        return f"{READ_OFF}; architecture: {_cited(places)}{traffic}", (*dict(places), *sent)
    places = _of_gpt(choice)
    if not places:
        return f"{READ_OFF}, for the layer and with the counting of {cite('korthikanti2022')}", ("korthikanti2022",)
    return _cited(places), tuple(dict(places))


def _cited(places: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{cite(key)}, {section}" if section else str(cite(key)) for key, section in places)


def _of_gpt(choice: Choice) -> tuple[tuple[str, str], ...]:
    """Where the papers print the equation of a GPT layer: citation keys and places; empty where none does."""
    quantity, mode = choice.quantity, choice.policy.mode
    if "cp" in choice.ranks:
        return ()
    if quantity == "wire":
        sharing = choice.sequence_parallel
        return (("korthikanti2022", "section 4.2.2") if sharing else ("narayanan2021", "section 3.2"),)
    if quantity in ("training-flops", "model-flops"):
        if mode not in _TRAINING or choice.attention != "eager" or choice.ranks:
            return ()
        key, section = _TRAINING[mode]
        return ((key, section + (", per layer" if quantity == "training-flops" else "")),)
    if quantity in _PLACES:
        return () if choice.ranks else (_PLACES[quantity],)
    if quantity != "activations" or choice.itemsize != 2 or mode == "ops":
        return ()
    if choice.attention == "flash":
        return (("padfree2024", "the attention output counted once"), ("dao2022", ""))
    return (("korthikanti2022", _ACTIVATIONS.get((mode, "tp" in choice.ranks, choice.sequence_parallel), "table 2")),)
