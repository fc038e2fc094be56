"""Memory of a rank off its card: host memory, of it page-locked, and NVMe.

Sources: pytorch, `fully_shard` with `CPUOffloadPolicy` (shards are pinned, and so are gradients that are copied beside the
computing); deepspeed, `stage_1_and_2.py`, `stage3.py` and `swap_tensor` (`HostBuffers` of the framework's record).
PyTorch rounds each page-locked allocation up to a power of two, which is not counted: it may be up to twice as much.
"""

from operator import mul

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.hardware.host import OffCard
from loadgauge.core.definitions.layout.zero_engine import ZeroEngine
from loadgauge.core.estimate.memory.in_flight import peak_candidates
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.optimizer_step import staying


def off_card(memory: MemoryModel, stage: Stage) -> OffCard:
    """Return the bytes of one rank of a stage in host memory, page-locked and on NVMe."""
    training, layout = memory.training, memory.layout
    precision, buffers, host = training.precision, training.framework.host, training.host
    weights = memory.weights(memory.counts(stage, stage.start, stage.stop)) + memory.ends(stage)
    states = memory.states(weights)
    held = activations(memory, stage)
    total, pinned = states.paged + held, held
    nvme: Size = 0
    ranks = (layout.zero_ranks, layout.expert_zero_ranks) if layout.zero else (1, 1)
    elements = weights.dense.trainable / ranks[0] + weights.expert.trainable / ranks[1]
    total = total + training.optimizer.average_away * elements
    if training.offload == "states":
        total, pinned = total + states.optimizer, pinned + states.optimizer
    elif training.offload != "none":
        stays = staying(memory, stage)
        away = 1 - stays
        parts = {name: getattr(states, name) for name in memory.offloaded}
        parts["optimizer"] = away * parts["optimizer"]
        if buffers.copies is None:
            alone = "weights" not in parts
            parts["copies"] = (precision.weight + precision.gradient) * elements if alone else 0
        else:
            # Of the gradients, only these copies leave the card.
            all_of = 0 if parts.pop("gradients", None) is None else precision.gradient * stays
            parts["copies"] = (buffers.copies * away + all_of) * elements
        locked = {*buffers.pinned, "copies"}
        pinned = pinned + sum(nbytes for name, nbytes in parts.items() if name in locked)
        if layout.zero < buffers.pinned_below:
            pinned = pinned + away * precision.master * elements
            if buffers.largest:
                parts["largest"] = precision.compute * memory.largest_trained
                pinned = pinned + parts["largest"]
            if layout.num_microbatches > 1:
                parts["accumulated"] = buffers.accumulates * elements
                pinned = pinned + parts["accumulated"]
        if host.nvme:
            nvme = parts.pop("optimizer")
            engine = training.framework.engine or ZeroEngine()
            parts["swapped"] = engine.state_buffers * 4 * min(elements, engine.step_elements)
            pinned = pinned + parts["swapped"]
            if "weights" in parts:
                nvme, pinned = nvme + parts["weights"], pinned - parts["weights"]
                parts["weights"] = engine.param_buffers * engine.param_buffer * precision.compute
                pinned = pinned + parts["weights"]
        total = total + sum(parts.values())
    return OffCard(total, pinned if host.pinned else 0, nvme)


def activations(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes of activations in host memory that all micro-batches in flight keep on a stage."""
    if memory.training.host.activations == "none":
        return 0
    chunks = [
        sum(count * memory.facts[key].hosted for key, count in memory.counts(stage, chunk.start, chunk.stop).items())
        for chunk in stage.chunks
    ]
    works = peak_candidates(memory.layout, stage.index, memory.make_up(stage), memory.put_off)
    return max(sum(map(mul, work.flight.whole, chunks)) for work in works)
