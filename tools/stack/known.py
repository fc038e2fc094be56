"""Differences between the formula and the libraries that are understood: the place that makes each, and its bytes.

A phase is put down to them only where the formula with their bytes added is within one percent of the trace.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import msgspec

from stack.case import Case
from stack.compare import Row, estimate, spec

TOLERANCE = 0.01
SMALLEST = 64 * 1024
"""Bytes below which a difference is none: inputs, generators, counters of steps."""


class Known(msgspec.Struct, frozen=True):
    """A difference with a name. `where`: the file that makes it; `nbytes`: what the formula lacks in a phase of a case
    (0: it does not apply)."""

    letter: str
    what: str
    where: str
    nbytes: Callable[[Case, str], float]


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a case's model: tokens of a micro-batch, hidden size, heads and key heads with their width, and the layers
    whose activations are there at once (one where they are recomputed); bytes of an activation, and of the residual stream."""

    tokens: int
    scores: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    layers: int
    itemsize: int
    residual: int


def sizes(case: Case, phase: str) -> Sizes:
    """The sizes of a case in a phase."""
    model = spec(case)
    mixer = model.blocks[0].attention
    heads, kv, width = (getattr(mixer, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    again = case.checkpointing in ("reentrant", "non-reentrant")
    wide = case.precision == "fp32"
    stream = case.precision.startswith("fp32") or (case.method == "qlora" and case.kbit)
    return Sizes(
        tokens=case.rows * case.seq_len, scores=case.rows * case.seq_len**2, hidden=case.hidden, heads=heads,
        kv_heads=kv, width=width, layers=(phase == "backward") if again else case.layers, itemsize=4 if wide else 2,
        residual=4 if stream else 2,
    )  # fmt: skip


def repeated(of: Sizes) -> float:
    """Keys and values of every head, where there are fewer key heads [bytes of all layers]."""
    return of.layers * 2 * of.tokens * (of.heads - of.kv_heads) * of.width * of.itemsize


def masked(case: Case, phase: str) -> float:
    """What a mask of the batch costs."""
    if not case.trains_by_trl or case.attention != "sdpa" or phase not in ("forward", "loss", "backward"):
        return 0
    of = sizes(case, phase)
    if phase == "forward" and case.trainer == "dpo" and case.adapters:
        of = msgspec.structs.replace(of, layers=of.layers + 1)  # of the reference's pass, which is this model's too
    return repeated(of) + of.layers * of.scores * of.itemsize + (of.scores if phase == "forward" else 0)


def ends(case: Case, phase: str) -> float:
    """What the first checkpoint's input leaves, and in the reentrant form the others' arguments: mask and tables."""
    if case.checkpointing == "none" or phase not in ("clip", "backward"):
        return 0
    of = sizes(case, phase)
    itemsize = 2 if case.wrapper.startswith("fsdp") and "+" in case.precision else of.residual
    held: float = 0
    if phase == "clip" and case.checkpointing == "reentrant":
        mask = itemsize if case.attention == "eager" else 1 if case.trains_by_trl else 0
        rotary = 0 if case.family == "gpt2" else 2 * case.seq_len * of.width * itemsize
        held = case.rows * case.seq_len**2 * mask + rotary
    leaf = case.adapters and case.method != "embeddings"
    return leaf * {"clip": 2, "backward": 1}[phase] * of.tokens * of.hidden * itemsize + held


def variables(case: Case, phase: str) -> float:
    """What GPT-2's block still names while its MLP runs."""
    if phase != "forward" or case.family != "gpt2" or case.checkpointing != "none":
        return 0
    of = sizes(case, phase)
    normed = 4 if "+" in case.precision else of.itemsize
    return of.tokens * of.hidden * (normed + of.residual + of.itemsize) + case.seq_len * of.hidden * of.residual


@functools.cache
def adapters(case: Case) -> float:
    """Elements of the adapters of a case."""
    memory = estimate(case).workings.memory
    return case.layers * max(float(facts.weights.all.trainable) for facts in memory.facts.values())


def cached(case: Case, phase: str) -> float:
    """What autocast remembers of a checkpointed forward, and the formula counts with what layers keep."""
    again = case.checkpointing in ("reentrant", "non-reentrant")
    if phase != "forward" or not (again and case.adapters) or "+" not in case.precision or case.precision[-2:] == "32":
        return 0
    return 2 * adapters(case)


def named_updates(case: Case, phase: str) -> float:
    """What Adafactor's loop still names of the tensor before the largest one."""
    if phase != "step" or case.optimizer != "adafactor" or case.method != "full":
        return 0
    inner = 4 * case.hidden if case.family in ("gpt2", "gpt-neox") else case.hidden * 11 // 4
    return 4 * inner * case.hidden


def not_yet(case: Case, phase: str) -> float:
    """What autocast has not copied when the last layer is at its fullest, and the formula counts from its beginning."""
    again = case.checkpointing in ("reentrant", "non-reentrant")
    if phase != "forward" or not again or case.adapters or case.precision not in ("fp32+bf16", "fp32+fp16"):
        return 0
    plain = case.family in ("gpt2", "gpt-neox")
    inner = case.hidden * (4 * case.hidden if plain else case.hidden * 11 // 4)
    if case.attention == "eager":
        return -2 * (case.hidden**2 + (2 if plain else 3) * inner)
    return -2 * inner


def layer_bytes(case: Case) -> float:
    """Bytes of a layer that FSDP gathers in 16 bits."""
    memory = estimate(case).workings.memory
    return 2 * max(float(facts.weights.total) for facts in memory.facts.values())


def outside_units(case: Case, phase: str) -> float:
    """What TRL's loss does under FSDP2: it runs beside the head's module, and backward begins within it."""
    if phase != "loss" or not (case.wrapper.startswith("fsdp2") and case.trains_by_trl) or "+" not in case.precision:
        return 0
    whole: float = 0
    if case.adapters and not spec(case).tie_word_embeddings:
        wide = case.precision.startswith("fp32")
        whole = case.vocab * case.hidden * ((4 + 2 if wide else 2) - 4)
    return whole + layer_bytes(case)


def on_its_way(case: Case, phase: str) -> float:
    """What FSDP2's offloading still has on the card of the gradient of the head."""
    if phase != "backward" or case.wrapper != "fsdp2-offload" or case.method not in ("full", "embeddings"):
        return 0
    return 4 * case.vocab * case.hidden / case.gpus


KNOWN: tuple[Known, ...] = (
    Known(
        "M",
        "a batch with an attention mask (padding): the memory-efficient kernel, keys and values of every head, a mask a layer",
        "transformers 5.23: integrations/sdpa_attention.py:52, masking_utils.py",
        masked,
    ),
    Known(
        "E",
        "the embedding's output, which checkpointing with adapters makes a leaf, and its gradient, until the step begins",
        "transformers 5.23: modeling_utils.py, enable_input_require_grads",
        ends,
    ),
    Known(
        "V",
        "variables of GPT-2's block and model: the norm's output, the residual stream, the positions",
        "transformers 5.23: models/gpt2/modeling_gpt2.py:282, 304, 574",
        variables,
    ),
    Known(
        "C",
        "16-bit copies of the adapters, which autocast's cache holds until the forward is over",
        "PyTorch 2.13: ATen/autocast_mode.cpp, cached_cast",
        cached,
    ),
    Known(
        "F",
        "the update of the tensor before, which the loop's variable names",
        "transformers 5.23: optimization.py, Adafactor.step",
        named_updates,
    ),
    Known(
        "T",
        "TRL's loss gathers the head by itself, in the dtype of its shards; the last layer is gathered ahead meanwhile",
        "trl 1.16: trainer/utils.py:1637; PyTorch 2.13: distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        outside_units,
    ),
    Known(
        "O",
        "the shard of the head's gradient, until it is on the host",
        "PyTorch 2.13: distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce",
        on_its_way,
    ),
    Known(
        "L",
        "fewer bytes: autocast's copies of the last layer's last matrices, which come after its fullest moment",
        "PyTorch 2.13: ATen/autocast_mode.cpp, cached_cast",
        not_yet,
    ),
)
"""The differences by name."""


def within(formula: float, traced: float) -> bool:
    """Whether a formula is right within one percent (or `SMALLEST`).

    >>> within(101.0e6, 100.0e6), within(101.1e6, 100.0e6)
    (True, False)
    """
    return abs(formula - traced) <= max(TOLERANCE * traced, SMALLEST)


def named(case: Case, row: Row) -> str:
    """The letters of the differences that account for a phase, the fewest that do; "" for none."""
    if row.formula is None:
        return ""
    terms = [(known.letter, nbytes) for known in KNOWN if (nbytes := known.nbytes(case, row.phase))]
    for number in range(1, len(terms) + 1):
        for chosen in itertools.combinations(terms, number):
            if within(row.formula + sum(nbytes for _, nbytes in chosen), row.traced):
                return "".join(letter for letter, _ in chosen)
    return ""
