"""Which communication a published run hid, and whether CUDA graphs hid its launches: from its flags and its framework."""

import msgspec

from loadgauge.core.definitions.training.training import Training
from loadgauge.evidence.published.free_text import Flags
from loadgauge.evidence.published.source_rows import SourceRow

OVERLAP_SINCE = 2023
"""The year from which the runs of Megatron-LM and its kin reduce gradients, and send activations, beside compute."""

SAID = {
    "tp": ("async TP", "tp-comm-overlap", "tp_comm_overlap"), "pp": ("PP overlap", "overlap-p2p"),
    "dp": ("overlap grad reduce", "overlap-grad-reduce", "overlap_grad_reduce"),
}  # fmt: skip
"""Words of flags by which communication of an axis is hidden."""
WHOLE = "full_iteration"
"""The graph that holds the whole iteration, with the experts' products."""
PLACEHOLDERS_SINCE = 2025
"""The year from which Transformer Engine keeps placeholders of weights' gradients."""


def with_overlap(run: SourceRow, flags: Flags, training: Training, *, performance_recipe: bool) -> Training:
    """The training with the overlap of the run.

    A run that says it hid nothing did not (but for rings of context parallelism, whose kernels do). NVIDIA's performance
    recipes hide the collectives of tensor and data parallelism, and those of experts where they say so. Else it is the
    framework's habit, and for Megatron's kin, whose scripts switch the overlap of gradients on, that of the year.
    """
    overlap = training.overlap
    if flags.says("no comm overlap"):
        overlap = msgspec.structs.replace(overlap, tp=False, dp=False, ep=False, pp=False, prefetch=False)
    elif performance_recipe:
        a2a = (flags.value("moe_a2a_overlap") or "").lower() == "true"
        graphs = flags.value("cuda_graph_impl") not in (None, "", "none")
        # Graphs of parts of a layer leave the experts out: the host counts their rows and launches their products.
        graphs = graphs and (not run.moe_experts or flags.value("cuda_graph_impl") == WHOLE)
        overlap = msgspec.structs.replace(overlap, tp=True, dp=True, ep=a2a, launch=graphs)
    elif training.framework.scripts_overlap:
        since = run.year is None or run.year >= OVERLAP_SINCE
        overlap = msgspec.structs.replace(overlap, dp=since, pp=since)
    if not flags.says("no comm overlap"):
        switches = {name: True for name, words in SAID.items() if any(flags.says(word) for word in words)}
        overlap = msgspec.structs.replace(overlap, **switches)
    kernels = training.kernels
    before = run.year is None or run.year < PLACEHOLDERS_SINCE
    if before or flags.has("no-gradient-accumulation-fusion") or flags.value("transformer-impl") == "local":
        kernels = msgspec.structs.replace(kernels, gradient_placeholders=False)
    if flags.value("moe_flex_dispatcher_backend") in ("deepep", "hybridep") or flags.says("DeepEP"):
        kernels = msgspec.structs.replace(kernels, dispatch="deduplicated")
    return msgspec.structs.replace(training, overlap=overlap, kernels=kernels)
