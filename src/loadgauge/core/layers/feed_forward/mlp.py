"""The feed-forward half of a block: two matrices, or three when gated.

Legend: T tokens, h hidden size, f intermediate size on this rank.
Kept for backward by PyTorch: the input, what the activation needs, both factors of the gate, the last matrix's input.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base import NotModelled, Size, shard
from loadgauge.core.definitions.model.model import Mlp
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Operation, Tensor, Weight

KEPT_INSIDE = {
    "silu": 0, "swish": 0, "gelu": 0, "gelu_pytorch_tanh": 0,
    "gelu_new": 3, "gelu_fast": 6, "quick_gelu": 1, "relu2": 1, "relu": 0, "tanh": 0,
}  # fmt: skip
"""Tensors an unfused activation keeps beside its input."""
KEEPS_OUTPUT = frozenset({"relu", "tanh"})
"""Activations whose derivative needs their output only; the next matrix keeps that anyway."""


def activate(build: Builder, name: str, x: Tensor, activation: str) -> Tensor:
    """Adds an activation function, by transformers' name, to the list. Returns its output, which has the shape of `x`.

    Raises NotModelled for a name it does not know.
    """
    if activation == "xielu":
        return _xielu(build, name, x)
    if activation not in KEPT_INSIDE:
        names = ", ".join(sorted((*KEPT_INSIDE, "xielu")))
        raise NotModelled(f"activation {activation!r} is not modelled (known: {names})")
    if activation == "gelu_new" and not build.kernels.written_gelu:
        activation = "gelu"
    if activation == "gelu_new" and build.kernels.activation == "unfused":
        return _gelu_new(build, name, x)
    output = Tensor(name, x.numel, x.itemsize)
    keeps = output if activation in KEEPS_OUTPUT else x
    inside = KEPT_INSIDE[activation] if build.kernels.activation == "unfused" else 0
    extra = tuple(Tensor(f"{name}.inside{index}", x.numel, x.itemsize) for index in range(inside))
    if activation == "relu2" and extra:
        # Autocast squares a float32 copy of what ReLU leaves, and returns float32.
        square = build.float32(f"{name}.float32", x.numel)
        widened = build.autocast and x.itemsize != 4
        output = Tensor(name, x.numel, 4) if widened else output
        return build.elementwise(name, (x,), output, keeps=(*extra, square) if widened else extra)
    return build.elementwise(name, (x,), output, keeps=(keeps, *extra))


def _gelu_new(build: Builder, name: str, x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), as transformers writes it out; autocast takes the power in float32."""
    wide = build.float32 if build.autocast else build.tensor
    copied = build.autocast and x.itemsize != 4
    base = wide(f"{name}.cast", x.numel) if copied else x
    tanh, sum_ = wide(f"{name}.tanh", x.numel), wide(f"{name}.sum", x.numel)
    half = Tensor(f"{name}.half", x.numel, x.itemsize)
    output = wide(name, x.numel)
    # The gradients of the last product and of both its factors are alive together; that of the half is cast to 16 bits.
    workspace = (2 + copied) * output.nbytes + half.nbytes - x.nbytes
    return build.elementwise(name, (x,), output, keeps=(base, tanh, half, sum_), backward_workspace=workspace)


def _xielu(build: Builder, name: str, x: Tensor) -> Tensor:
    """A square to the right of zero and an exponential to its left, each with a learned slope (Apertus)."""
    output = Tensor(name, x.numel, x.itemsize)
    keeps: tuple[Tensor, ...] = (x,)
    if build.kernels.activation == "unfused":
        # The right branch's product, the left one's exponential and, for its slope, what is multiplied by it.
        inside = ("right", "exponential", "left") if build.trains(name) else ("right", "exponential")
        branches = (Tensor(f"{name}.{each}", x.numel, x.itemsize) for each in inside)
        keeps = (x, *branches, build.mask(f"{name}.side", x.numel), Tensor(f"{name}.slopes", 2, x.itemsize))
    slopes = Weight(f"{name}.alpha", 2, 1, "vector", build.trains(name))
    build.operations.append(Operation(name, "elementwise", (x,), (output,), (slopes,), keeps))
    return output


def mlp(build: Builder, x: Tensor, spec: Mlp, hidden_size: Size, prefix: str = "mlp", held: bool = False) -> Tensor:
    """Adds the MLP to the list; `x` is its (normed) input. Returns the last matrix's output.

    `prefix`: what its operations' names begin with, where a block has more than one MLP; `held`: another operation keeps
    `x` in 16 bits.
    """
    view, tokens = build.view, build.view.tokens
    inside = view.lora is not None and view.lora.fuses("up")  # the function of the adapters makes the activation too
    fused = inside or build.kernels.activation == "fused"
    width = shard(spec.intermediate_size, view.tp, "intermediate_size")
    source, kept, reduced, workspace = build.enter(f"{prefix}.gather", x, hidden_size)

    def column(name: str, columns: Size, first: bool) -> Tensor:
        return build.linear(
            f"{prefix}.{name}",
            source,
            tokens,
            hidden_size,
            columns,
            bias=spec.bias,
            kept_input=kept,
            shards=view.tp,
            adapter=name,
            held=held,
            backward_comm=reduced if first else (),
            workspace=workspace,
        )

    if not spec.gated:
        inner = activate(build, f"{prefix}.activation", column("up", width, True), spec.activation)
    elif not fused and not spec.fused_gate_up and not spec.activation.startswith("clamped"):
        # In the order of `act(gate(x)) * up(x)`, which backward goes through the other way.
        gate = column("gate", width, True)
        gate = _cut_off(build, gate, tokens, prefix) if spec.cut_off else gate
        active = activate(build, f"{prefix}.activation", gate, spec.activation)
        inner = multiplied(build, active, column("up", width, False), prefix)
    else:
        if spec.fused_gate_up:
            both = column("gate_up", 2 * width, True)
            gate, up = (Tensor(f"{prefix}.{name}", tokens * width, both.itemsize) for name in ("gate", "up"))
            build.operations.append(Operation(f"{prefix}.split", "view", (both,), (gate, up)))
        else:
            gate, up = column("gate", width, True), column("up", width, False)
            gate = _cut_off(build, gate, tokens, prefix) if spec.cut_off else gate
        inner = gated(build, gate, up, spec.activation, prefix, inside=inside)
    inner = build.dropout(f"{prefix}.inner_dropout", inner, spec.dropout)
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        f"{prefix}.down",
        inner,
        tokens,
        width,
        hidden_size,
        bias=spec.bias,
        shards=view.tp,
        bias_shards=1,
        adapter="down",
        around=(x,),
        output=build.hidden(f"{prefix}.down", hidden_size),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )


def _cut_off(build: Builder, gate: Tensor, tokens: Size, prefix: str) -> Tensor:
    """Return the gate above its threshold: the token's mean plus a multiple of the deviation (Gemma 3n). Keeps input and output."""
    output = Tensor(f"{prefix}.cut_off", gate.numel, gate.itemsize)
    deviation, multiple = build.tensor(f"{prefix}.deviation", tokens), build.tensor(f"{prefix}.multiple", 1)
    return build.elementwise(output.name, (gate,), output, keeps=(gate, deviation, multiple, output))


def gated(
    build: Builder, gate: Tensor, up: Tensor, activation: str, prefix: str = "mlp", *, inside: bool = False
) -> Tensor:
    """activation(gate) * up: one fused operation that keeps its two inputs, or two that keep the product's factors.

    inside: the function that runs the adapters of both, and of the last matrix, makes it
    """

    def made(name: str) -> Tensor:
        return Tensor(f"{prefix}.{name}", gate.numel, gate.itemsize)

    output = made("multiply")
    if inside or build.kernels.activation == "fused":
        build.elementwise(output.name, (gate, up), output, keeps=(gate, up))
        if build.kernels.activation_in_place:
            build.operations[-1] = msgspec.structs.replace(build.operations[-1], overwrites=True)
        return output
    if activation == "clamped_silu":
        clamped, active, above = (made(name) for name in ("clamped", "activation", "above"))
        build.elementwise(clamped.name, (gate,), clamped, keeps=(gate,))
        build.elementwise(above.name, (up,), above, keeps=(up,))
        build.elementwise(active.name, (clamped,), active, keeps=(clamped,))
        return build.elementwise(output.name, (active, above), output, keeps=(active, above))
    if activation == "clamped_swiglu":
        # GPT-OSS: (up + 1) g sigmoid(1.702 g), both clamped, in seven operations.
        clamped, sigmoid, active, above = (made(name) for name in ("clamped", "sigmoid", "activation", "above"))
        build.elementwise(clamped.name, (gate,), clamped, keeps=(gate,))
        build.elementwise(active.name, (clamped,), active, keeps=(clamped, sigmoid))
        build.elementwise(above.name, (up,), above, keeps=(up,))
        return build.elementwise(output.name, (active, above), output, keeps=(active, above))
    return multiplied(build, activate(build, f"{prefix}.activation", gate, activation), up, prefix)


def multiplied(build: Builder, active: Tensor, up: Tensor, prefix: str) -> Tensor:
    """Adds the product of what a gate's activation gave and `up`, which keeps both. Returns it."""
    output = Tensor(f"{prefix}.multiply", up.numel, up.itemsize)
    return build.elementwise(output.name, (active, up), output, keeps=(active, up))
