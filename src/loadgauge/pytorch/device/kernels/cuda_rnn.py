"""Recurrent layers as CUDA runs them: LSTM, GRU and RNN by one kernel of cuDNN, their cells by PyTorch's fused ones.

What cuDNN keeps from forward to backward ("reserve space") is asked of cuDNN at run time (`cudnnGetRNNTempSpaceSizes`); no document
gives its size. It is taken as what PyTorch's own fused cells keep (ATen/native/cuda/RNN.cu): of an LSTM four gates and the cell's
state, of a GRU four numbers, for each unit, position and direction, and the output of each layer but the last.
`untraced.NOT_COUNTED` says so.
Sources: ATen/native/RNN.cpp, ATen/native/cudnn/RNN.cpp, tools/autograd/derivatives.yaml of PyTorch 2.13.
"""

import functools
from typing import Any

import torch

RECURRENT = {"lstm": (2, 5), "gru": (3, 4), "rnn_tanh": (1, 0), "rnn_relu": (0, 0)}
"""By the operation's name: cuDNN's number of it (cudnnRNNMode_t), and the numbers kept for each unit at each position."""
aten = torch.ops.aten


class Recurrent(torch.autograd.Function):
    """One call of cuDNN for all layers, directions and positions: `aten._cudnn_rnn`, which has shapes without CUDA."""

    @staticmethod
    def forward(ctx: Any, name: str, settings: tuple[Any, ...], x: Any, hx: Any, cx: Any, *weights: Any) -> Any:
        """Return (output, hy, cy) of x: (positions, batch, features), batch first, or packed (rows, features).

        settings: (hidden, projection or 0, layers, batch first, dropout, train, bidirectional, packed)
        """
        hidden, projected, layers, batch_first, dropout, train, both, packed = settings
        mode, each = RECURRENT[name]
        sizes = [hx.shape[1]] if packed else []
        ctx.settings = (len(weights) // (layers * (1 + both)), mode, *settings[:-1], sizes)
        out, hy, cy, _, _ = aten._cudnn_rnn(
            x,
            list(weights),
            ctx.settings[0],
            weights[0],
            hx,
            cx,
            mode,
            hidden,
            projected,
            layers,
            batch_first,
            dropout,
            train,
            both,
            sizes,
            None,
        )
        if train:
            rows = x.numel() // x.shape[-1]
            between = (layers - 1) * (projected or hidden)
            kept = rows * (1 + both) * (layers * each * hidden + between) * x.element_size()
            reserve = x.new_empty((kept,), dtype=torch.uint8)
            ctx.save_for_backward(x, hx, cx, out, reserve, *weights)
        return out, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of x, of both states and of every weight."""
        x, hx, cx, out, reserve, *weights = ctx.saved_tensors
        stride, mode, *rest, sizes = ctx.settings
        wanted = [
            ctx.needs_input_grad[2],
            ctx.needs_input_grad[3],
            ctx.needs_input_grad[4],
            any(ctx.needs_input_grad[5:]),
        ]
        dx, dh, dc, dw = aten._cudnn_rnn_backward(
            x, weights, stride, weights[0], hx, cx, out, *grads, mode, *rest, sizes, None, reserve, wanted
        )
        return None, None, dx if wanted[0] else None, dh if wanted[1] else None, dc if wanted[2] else None, *dw


def _backward(x: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, *_: Any) -> Any:
    """The shapes of `aten._cudnn_rnn_backward`, for which PyTorch has none: gradients like what they are of."""
    like = [None if tensor is None else torch.empty_like(tensor) for tensor in (x, hx, cx)]
    return *(torch.empty((0,), device=x.device) if tensor is None else tensor for tensor in like), [
        torch.empty_like(tensor) for tensor in weight
    ]


def _gru_cell(gates: Any, hidden_gates: Any, hx: Any, *_: Any) -> Any:
    """The shapes of `aten._thnn_fused_gru_cell`: the new state, and five numbers a unit for backward."""
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    """The shapes of its backward: gradients of both gates, of the state and of both biases."""
    rows, units = grad.shape
    gates, hidden_gates = (grad.new_empty((rows, 3 * units)) for _ in range(2))
    biases = [grad.new_empty((3 * units,)) for _ in range(2)] if has_bias else [None, None]
    return gates, hidden_gates, torch.empty_like(grad), *biases


def _layers(
    name: str,
    x: Any,
    hx: Any,
    weights: Any,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    first: bool,
) -> Any:
    return _run(name, x, hx, weights, biases, (layers, first, dropout, train, both, False))


def _packed(
    name: str,
    x: Any,
    batch_sizes: Any,
    hx: Any,
    weights: Any,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
) -> Any:
    return _run(name, x, hx, weights, biases, (layers, False, dropout, train, both, True))


def _run(name: str, x: Any, state: Any, weights: Any, biases: bool, rest: tuple[Any, ...]) -> Any:
    hx, cx = state if name == "lstm" else (state, None)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point():
        dtype = torch.get_autocast_dtype(device)
        x, hx, weights = x.to(dtype), hx.to(dtype), [tensor.to(dtype) for tensor in weights]
        cx = None if cx is None else cx.to(dtype)
    each = 2 + 2 * biases
    projected = int(hx.shape[2]) if len(weights) // (rest[0] * (1 + rest[4])) > each else 0
    hidden = int(weights[0].shape[0]) // {"lstm": 4, "gru": 3}.get(name, 1)
    out, hy, cy = Recurrent.apply(name, (hidden, projected, *rest), x, hx, cx, *weights)
    return (out, hy, cy) if name == "lstm" else (out, hy)


def lstm_cell(x: Any, state: Any, of_x: Any, of_h: Any, bias_x: Any = None, bias_h: Any = None) -> Any:
    """Compute `torch.lstm_cell` as CUDA does: two products and one fused kernel; arguments and result are PyTorch's."""
    hx, cx = state
    return aten._thnn_fused_lstm_cell(x.matmul(of_x.t()), hx.matmul(of_h.t()), cx, bias_x, bias_h)[:2]


def gru_cell(x: Any, hx: Any, of_x: Any, of_h: Any, bias_x: Any = None, bias_h: Any = None) -> Any:
    """Compute `torch.gru_cell` as CUDA does: two products and one fused kernel; arguments and result are PyTorch's."""
    return aten._thnn_fused_gru_cell(x.matmul(of_x.t()), hx.matmul(of_h.t()), hx, bias_x, bias_h)[0]


def register_cuda_rnn(library: torch.library.Library) -> None:
    """Give the simulated device CUDA's recurrent layers and cells. library: of `aten`, which lives as long as the process"""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        for name in RECURRENT:
            library.impl(f"{name}.input", functools.partial(_layers, name), key)
            library.impl(f"{name}.data", functools.partial(_packed, name), key)
        library.impl("lstm_cell", lstm_cell, key)
        library.impl("gru_cell", gru_cell, key)
    shapes = {
        "_cudnn_rnn_backward": _backward,
        "_thnn_fused_gru_cell": _gru_cell,
        "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    }
    for name, shape in shapes.items():
        library.impl(name, shape, "Meta")
