"""Why rows are far off: each cause once, with the rule that finds its rows.

The first rule that holds is the cause of a row. A rule looks at the row's configuration, never at its error; a sentence is
written only where the cause is known, and what is left is said to be unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from loadgauge.core.definitions.hardware.calibration import chip_of, efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.evidence.published.free_text import Flags, named
from loadgauge.evidence.published.source_rows import SourceRow
from loadgauge.evidence.validate.validate import Record

FAR = 0.20
"""Absolute error from which a row gets a line that says why."""


class Cause(msgspec.Struct, frozen=True):
    """A known reason for a large error. `quantity`: of what; empty: of both."""

    name: str
    sentence: str
    holds: Callable[[SourceRow, Record, Flags], bool]
    quantity: str = ""


def _open(run: SourceRow, record: Record, flags: Flags) -> bool:
    if record.low is None or record.high is None or record.measured is None or record.predicted is None:
        return False
    wide = record.high > 1.2 * record.predicted or record.low < record.predicted / 1.2
    return wide and record.low <= record.measured <= record.high


def _bubble(run: SourceRow) -> float:
    """The share of a step that is the bubble of a pipeline that is not interleaved; 0 where the row does not state it."""
    ranks = (run.tp or 1) * (run.pp or 1) * (run.cp or 1)
    if not (run.gpus and run.global_batch):
        return 0.0
    waiting = ((run.pp or 1) - 1) * run.gpus * (run.micro_batch or 1) / ranks / run.global_batch
    return waiting / (1 + waiting)


CAUSES: tuple[Cause, ...] = (
    Cause(
        "one recipe, two cards",
        "The source prints two peaks for one recipe, model, length and batch, of two cards; what differed is not stated. The"
        " peak on the larger card is that of the recipe without activation checkpointing.",
        lambda run, record, flags: "Memory and training speed" in run.source and "A6000" in run.hardware,
        "memory",
    ),
    Cause(
        "unsharded gradients while accumulating",
        "LitGPT accumulates gradients under FSDP without synchronising, which keeps the gradients of all parameters, frozen"
        " ones too, whole on each rank until the last micro-batch. Not modelled.",
        lambda run, record, flags: "LitGPT" in run.framework and run.sharding == "fsdp",
        "memory",
    ),
    Cause(
        "4-bit base in LitGPT",
        "bitsandbytes of that time keeps the input of every quantised matrix product for backward, though the matrix is"
        " frozen. Not modelled.",
        lambda run, record, flags: "LitGPT" in run.framework and run.task == "qlora",
        "memory",
    ),
    Cause(
        "number of GPUs not stated",
        "The optimizer is sharded over data-parallel ranks whose number the source does not state.",
        lambda run, record, flags: run.gpus is None,
    ),
    Cause(
        "widths of latent attention not stated",
        "The row says that attention is latent, and no column how wide; Megatron-LM's defaults stand in.",
        lambda run, record, flags: run.attention == "mla" and (run.hidden or 0) < 4096,
    ),
    Cause(
        "activations moved to the host",
        "Activations are offloaded piece by piece, which is not modelled.",
        lambda run, record, flags: "offloading" in run.model or flags.has("cpu_offloading_num_layers"),
    ),
    Cause(
        "deferred gradient of the head",
        "The gradient of the head's matrix is computed at the end of the step, which keeps every micro-batch's gradient"
        " of the logits until then. Not modelled.",
        lambda run, record, flags: flags.has("defer-embedding-wgrad-compute"),
        "memory",
    ),
    Cause(
        "experts' tokens gathered",
        "Megatron-LM's `allgather` dispatcher gathers the tokens of all expert ranks on each; an all-to-all is modelled.",
        lambda run, record, flags: flags.value("moe-token-dispatcher-type") == "allgather",
    ),
    Cause(
        "layers of the stages not stated",
        "The row's name says that the stages are uneven, and no column how.",
        lambda run, record, flags: "uneven" in run.model,
    ),
    Cause(
        "Megatron-LM without Transformer Engine",
        "Its own softmax and norms keep float32 copies that the fused kernels do not.",
        lambda run, record, flags: "uninstall_te" in run.model,
        "memory",
    ),
    Cause(
        "captured CUDA graphs",
        "Graphs keep the buffers of everything they captured, apart from the allocator's other blocks.",
        lambda run, record, flags: "cudagraph" in run.model,
        "memory",
    ),
    Cause(
        "multi-token prediction",
        "A further layer and a further loss, which the row names and whose details it does not state.",
        lambda run, record, flags: flags.has("mtp-loss-scaling-factor") or "MTP" in run.model.replace("w/o MTP", ""),
    ),
    Cause(
        "1F1B of torchtitan at 405B",
        "Stages of PyTorch's pipelines have a buffer for every micro-batch that they receive, and one for its gradient, 2 GiB here,"
        " which is not modelled; the same run with interleaved stages is 9 % low.",
        lambda run, record, flags: (
            named(run.framework, "torchtitan") and flags.says("schedule 1F1B") and (run.cp or 1) == 1
        ),
        "memory",
    ),
    Cause(
        "context parallelism in torchtitan's pipeline",
        "Four rows differ in context parallelism alone, with the same tokens on each rank, and peak from 75 to 85 GiB: what grows"
        " with its ranks is not modelled.",
        lambda run, record, flags: named(run.framework, "torchtitan") and (run.pp or 1) > 1 and (run.cp or 1) >= 8,
        "memory",
    ),
    Cause(
        "Megatron's FSDP",
        "Megatron-FSDP holds its shards, buckets and double buffers otherwise than FSDP2, whose rules are used.",
        lambda run, record, flags: "megatron-fsdp" in run.sharding or flags.value("use_megatron_fsdp") == "True",
    ),
    Cause(
        "counter not stated",
        "The source does not say which counter it read: the prediction is between allocated and what the driver shows.",
        lambda run, record, flags: record.quantity == "memory" and run.memory_kind.startswith(("unknown", "per GPU")),
        "memory",
    ),
    Cause(
        "kernels compiled for that source alone",
        "float8nocompile quantises without fusion into the products, which costs several passes over memory.",
        lambda run, record, flags: "nocompile" in run.precision,
        "time",
    ),
    Cause(
        "tokens dropped",
        "The run drops tokens that exceed an expert's capacity; which share is not stated.",
        lambda run, record, flags: flags.says("token-drop") or "tokendrop" in run.model,
    ),
    Cause(
        "card not calibrated",
        "No operation was measured on this card: what its chip or its watts say stands in, with a wide range.",
        lambda run, record, flags: bool(record.gpu) and efficiencies(record.gpu).basis == "assumed",
        "time",
    ),
    Cause(
        "recipe not matched",
        "No recipe of the release matches the row: dispatcher, grouped products, graphs and host time of its experts are not"
        " known. Rows of the same model that state them are nearer.",
        lambda run, record, flags: run.moe_experts is not None and not run.sharding,
        "time",
    ),
    Cause(
        "host time of small experts",
        "Experts without CUDA graphs: the GPU waits for the launches of dispatch, permutation and grouped products, which no table"
        " of operators holds. Megatron-Bridge's rows with graphs are 3 % too slow in the median, those without 14 % too fast.",
        lambda run, record, flags: (
            (run.moe_experts or 0) >= 16
            and (flags.value("cuda_graph_impl") in (None, "", "none") or flags.says("['moe_router', 'moe_preprocess']"))
        ),
        "time",
    ),
    Cause(
        "heads that tensor cores do not like",
        "The width of a head is no multiple of 8 elements, so that the batched products of written-out attention are not aligned"
        " for tensor cores; the tables of operators have no such widths. All ten such rows are 26 to 30 % too fast, those of the"
        " same source with other widths 2 to 8 %.",
        lambda run, record, flags: (
            bool(run.heads) and bool(run.hidden) and (run.head_dim or (run.hidden or 0) // (run.heads or 1)) % 8 != 0
        ),
        "time",
    ),
    Cause(
        "interleaving not stated",
        "A pipeline of few micro-batches for each stage, whose virtual stages the row does not state: without any the bubble is a"
        " tenth of the step and more. Rows of the same model, GPUs and releases that state five are 1 to 7 % off.",
        lambda run, record, flags: run.vpp is None and _bubble(run) >= 0.1,
        "time",
    ),
    Cause(
        "row-wise scales",
        "A scale for each row of an operand, whose products and copies are counted as those of one scale. In the source's own"
        " table one scale makes training 25 % faster than bf16, one for each row 10 %; no table of operators has such products.",
        lambda run, record, flags: "rowwise" in run.precision,
        "time",
    ),
    Cause(
        "one scale for a tensor on Blackwell",
        "Products with one scale reach more in these runs than in the tables of operators: the same models on the same GPUs are 4 %"
        " off at most with a scale for each block (MXFP8), and 18 to 32 % too slow with one scale or in NVFP4, whose shares come"
        " from tables of shorter products.",
        lambda run, record, flags: (
            chip_of(gpu(record.gpu)) == "10"
            and ("fp4" in run.precision or run.precision in ("fp8", "fp8-current-scaling"))
        ),
        "time",
    ),
    Cause(
        "little work on eight ranks",
        "Tensor parallelism over eight GPUs with one or two sequences in a micro-batch, or four with one. All such rows"
        " are 8 to 28 % too fast, those with twice as much in a micro-batch 4 % off; each is one reading of the second step. What"
        " takes the time is not stated.",
        lambda run, record, flags: (
            named(run.framework, "Megatron-DeepSpeed")
            and bool(run.micro_batch)
            and (run.tp or 1) >= 4 * (run.micro_batch or 9)
        ),
        "time",
    ),
    Cause(
        "graphs of a whole step",
        "Graphs of a whole step leave the host nothing to do, and software adds next to nothing: without the factor that is common"
        " to all runs, rows of models with experts are 11 % too fast to 2 % too slow. One source alone has such rows.",
        lambda run, record, flags: flags.value("cuda_graph_impl") == "full_iteration",
        "time",
    ),
    Cause(
        "dispatch beyond a node",
        "Experts over 32 and 64 GPUs, whose tokens DeepEP's and HybridEP's own kernels carry; the tables of collectives have NCCL's"
        " all-to-all, which alone is 30 % of the predicted step and more. Rows of the same model with experts over 8 GPUs are 1 to"
        " 8 % off.",
        lambda run, record, flags: (
            (run.ep or 1) > 8 and flags.value("moe_flex_dispatcher_backend") in ("hybridep", "deepep")
        ),
        "time",
    ),
    Cause(
        "one kernel of seconds",
        "Over 131,072 tokens and more attention is one kernel of seconds, to which software adds nothing, though the common"
        " factor is on it. The error grows with the length, from 7 % at 8,192 to 28 %, of which the factor is 16.",
        lambda run, record, flags: (run.seq_len or 0) >= 131072,
        "time",
    ),
    Cause(
        "attention of 2023 on Hopper",
        "Before FlashAttention-2 LLM Foundry ran Triton's kernel, which no table has on H100: the ratio of the two on A100"
        " stands in. The error grows with the length, from 3 to 8 % up to 2,048 to 20 to 24 % at 32,768; on A100 it does not.",
        lambda run, record, flags: (
            (named(run.framework, "LLM Foundry") or named(run.framework, "llm-foundry"))
            and "H100" in run.hardware
            and (run.seq_len or 0) >= 16384
        ),
        "time",
    ),
    Cause(
        "a host of 30 us a launch",
        "The source takes 30 us a launch for its machine; over eight ranks the kernels of this model are not longer. With four"
        " times the width the rows of eight ranks are 7 to 11 % off.",
        lambda run, record, flags: "SimuMax" in run.source and (run.tp or 1) >= 8,
        "time",
    ),
    Cause(
        "ZeRO 1 of InternEvo over all ranks",
        "The error grows with the ranks that share the optimizer (from 8 % to 45 %), while rows that share it among 8 keep theirs:"
        " how InternEvo sends updated weights is not modelled, but Megatron-LM's gathering, which hides.",
        lambda run, record, flags: named(run.framework, "InternEvo") and flags.says("zero1 group all"),
        "time",
    ),
    Cause(
        "a small batch on many GPUs of InternEvo",
        "With one or two micro-batches on 512 GPUs and more, what is sent once a step has little to hide under: on that machine it"
        " takes longer than its adapters' bandwidth says.",
        lambda run, record, flags: named(run.framework, "InternEvo") and (run.gpus or 0) >= 512,
        "time",
    ),
    Cause(
        "one measurement among several",
        "The source ran the same configuration on another server of the same cards, or prints it twice, and gets another time.",
        lambda run, record, flags: "artifact re-run" in run.notes or "may be stale" in run.other_flags,
        "time",
    ),
    Cause(
        "continuous tests",
        "A continuous test of a few steps with logging, not a benchmark.",
        lambda run, record, flags: "mcore-ci" in run.model,
        "time",
    ),
    Cause(
        "what the row leaves open decides",
        "The measured value lies inside the range over the values that the row does not state.",
        _open,
    ),
)


def cause(run: SourceRow, record: Record) -> Cause | None:
    """The cause of a row's error, or None where it is not known."""
    flags = Flags.of(run.other_flags)
    for candidate in CAUSES:
        if candidate.quantity in ("", record.quantity) and candidate.holds(run, record, flags):
            return candidate
    return None


def listed(groups: dict[Group, list[Record]]) -> dict[str, dict[str, str]]:
    """Causes for `data/runs/causes.json`: the sentence of each, and the cause of each row by its id."""
    known = {
        group.cause.name: (group.cause.sentence, rows) for group, rows in groups.items() if group.cause is not None
    }
    return {
        "causes": {name: sentence for name, (sentence, _) in sorted(known.items())},
        "rows": dict(sorted((record.id, name) for name, (_, rows) in known.items() for record in rows)),
    }


class Group(NamedTuple):
    """Rows of one quantity that are far off for the same cause; where it is not known (None), of the same source."""

    quantity: str
    cause: Cause | None
    source: str

    @property
    def name(self) -> str:
        """The name of the cause."""
        return f"unexplained: {self.source}" if self.cause is None else self.cause.name


def far_off(records: Sequence[Record], runs: Sequence[SourceRow]) -> dict[Group, list[Record]]:
    """Rows with an error above `FAR`, by cause; of each quantity the largest group first, what is not explained last."""
    by_id = {run.id: run for run in runs}
    groups: dict[Group, list[Record]] = {}
    for record in records:
        if record.error is not None and abs(record.error) > FAR:
            why = cause(by_id[record.id], record)
            group = Group(record.quantity, why, "" if why else record.source)
            groups.setdefault(group, []).append(record)
    return dict(sorted(groups.items(), key=lambda item: (item[0].quantity, item[0].cause is None, -len(item[1]))))
