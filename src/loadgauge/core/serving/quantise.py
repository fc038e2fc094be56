"""Memory of quantising a model layer by layer, as GPTQ and AWQ do: one block is on the card, the model waits in host memory.

The inputs and outputs of a block for all calibration sequences stay on the card. GPTQ has, of every matrix that reads the same
tensor, a float32 Hessian of its inputs; and of the matrix that it solves, a float32 copy, the rounded weights and the losses, and
the Hessian's inverse with one more copy (sources: frantar2022, section 3.3; gptq, `gptq.py` and `llama.py`). AWQ has the inputs of
all products of a block for all sequences, and a copy of the block's weights to try scales on (source: autoawq,
`quantize/quantizer.py`).
"""

from loadgauge.core.base.errors import refuse
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.states.overhead import non_pytorch_memory
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.serving.memory import Memory
from loadgauge.core.serving.passes import of_chunk, parts, split

METHODS = ("gptq", "awq")


def quantising(model: ModelSpec, asked: Inference, gpu: Gpu | None) -> Memory:
    """Return the memory at the block that needs the most. Raises `ConfigError` for a format that no such method makes.

    >>> from loadgauge.core.families.catalogue import model
    >>> asked = Inference(task="quantise", context=2048, weight_format="gptq")
    >>> found = quantising(model("llama-3.1-8b"), asked, None)
    >>> found.beside["calibration"] == 2 * 128 * 2048 * 4096 * 2
    True
    """
    refuse(
        asked.weight_format not in METHODS,
        f"must be {' or '.join(METHODS)} for --task quantise, got {asked.weight_format}",
        key="weight_format",
    )
    refuse(
        max(asked.tp, asked.pp, asked.ep) > 1,
        "quantising runs on one GPU",
        key="tp" if asked.tp > 1 else "pp" if asked.pp > 1 else "ep",
    )
    view, stage = of_chunk(model, asked), split(model, asked)[0]
    every = list(parts(model, stage, view, asked.batch))
    blocks = [part.layer for part in every if part.name not in ("embedding", "head")]
    whole = 2 * sum(part.times * sum(weight.numel for weight in part.layer.weights) for part in every)
    calibration = 2.0 * 2 * asked.calibration * asked.context * model.hidden_size
    outside = non_pytorch_memory(Layout(seq_len=1), gpu)

    def of(layer: Layer) -> Memory:
        own = 2.0 * sum(weight.numel for weight in layer.weights)
        alive = forward_peak(layer, applied(RecomputePolicy(mode="full"), layer, layer.names), ("input",))
        solving, statistics = gptq(layer) if asked.weight_format == "gptq" else awq(layer, asked)
        beside = {"calibration": calibration, "statistics": statistics}
        # A block runs forward to gather the statistics, and is solved afterwards.
        working = max(alive, solving)
        inside = own + calibration + statistics + working
        return Memory(
            weights=own,
            cache=0.0,
            activations=working,
            beside=beside,
            outside=outside.value,
            stage=0,
            host=whole,
            low=inside + outside.low,
            high=inside + outside.high,
            capacity=None if gpu is None else gpu.capacity,
        )

    return max((of(layer) for layer in blocks), key=lambda memory: memory.total)


def gptq(layer: Layer) -> tuple[float, float]:
    """Return the most bytes that solving a matrix of a layer takes, and those of the Hessians of matrices with the same input."""
    solving = 0.0
    hessians: dict[str, float] = {}
    for operation in layer:
        for weight in operation.weights:
            if weight.kind == "matrix" and operation.gemms and operation.kind != "router":
                square = 4.0 * operation.gemms[0].k ** 2
                source = operation.inputs[0].name
                hessians[source] = hessians.get(source, 0.0) + square * weight.copies
                solving = max(solving, 3 * 4.0 * weight.numel / weight.copies + 2 * square)
    return solving, max(hessians.values())


def awq(layer: Layer, asked: Inference) -> tuple[float, float]:
    """Return the bytes of the copy of a layer's weights, and those of the inputs of its products for all calibration sequences."""
    inputs = {reads.inputs[0].name: reads.inputs[0].nbytes for reads in layer if reads.gemms and reads.weights}
    shown = asked.calibration / asked.batch
    return 2.0 * sum(weight.numel for weight in layer.weights), shown * sum(inputs.values())
