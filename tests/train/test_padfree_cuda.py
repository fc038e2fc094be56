"""The CUDA back-ends without a GPU: which is chosen, and that the kernels get what their signatures ask for.

A reference attention stands in for each kernel; it reads nothing but the arguments.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch.nn.functional import softmax

from loadgauge.core.base.errors import ConfigError
from loadgauge.train.layers import attention, boundaries
from loadgauge.train.layers.attention import LayerPlan, backend_for
from loadgauge.train.layers.masks import Reach

LENGTHS = [5, 1, 9, 4]


def query(dtype: torch.dtype = torch.bfloat16, width: int = 64, device: str = "cuda") -> Any:
    return types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 4, 10, width))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "flash_attn_installed", lambda: True)
    return monkeypatch


def chosen(q: Any, reach: Reach = Reach(), backend: str = "auto", **call: Any) -> str:  # noqa: B008
    settings: dict[str, Any] = {"dropout": 0.0, "softcap": None, "sinks": False} | call
    return backend_for(LayerPlan(reach, backend), q, **settings)


def test_choice(gpu: pytest.MonkeyPatch) -> None:
    assert chosen(query(device="cpu")) == "cpu_flash"
    assert chosen(query(device="mps")) == "sdpa"
    assert chosen(query()) == "flash_attn"
    assert chosen(query(), Reach(left=9), softcap=50.0, dropout=0.1) == "flash_attn"
    for unable in ({"sinks": True}, {"reach": Reach(chunk=9)}, {"reach": Reach(function=print)}):  # type: ignore[arg-type]
        assert chosen(query(), **unable) == "sdpa"
    assert chosen(query(torch.float32)) == "sdpa"
    assert chosen(query(width=20)) == "sdpa"
    gpu.setattr(attention, "flash_attn_installed", lambda: False)
    assert chosen(query()) == "varlen"
    assert chosen(query(), softcap=50.0) == "sdpa"
    assert chosen(query(), dropout=0.1) == "sdpa"
    assert chosen(query(), backend="sdpa") == "sdpa"
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen(query()) == "sdpa"
    with pytest.raises(ConfigError, match="varlen cannot run this layer"):
        chosen(query(), backend="varlen")
    # Dropout comes and goes with training: the kernel asked for hands over, and takes back.
    assert chosen(query(device="cpu"), backend="cpu_flash", dropout=0.1) == "sdpa"


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, scale: float,
    window: tuple[int, int], softcap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """(tokens, heads, width) in and out; `window` as the kernels define it: (left, right), -1 without limit."""
    assert ends.dtype == torch.int32
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert longest == int(ends.diff().max())
    repeat = q.shape[1] // k.shape[1]
    outputs = []
    for start, end in zip(ends.tolist(), ends[1:].tolist(), strict=False):
        a, b, c = (t[start:end].transpose(0, 1) for t in (q, k, v))
        scores = a @ b.repeat_interleave(repeat, 0).mT * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        i = torch.arange(end - start)
        step = i[None] - i[:, None]
        hidden = torch.zeros_like(step, dtype=torch.bool)
        hidden |= (step < -window[0]) if window[0] >= 0 else hidden
        hidden |= (step > window[1]) if window[1] >= 0 else hidden
        outputs.append(
            (softmax(scores.masked_fill(hidden, -torch.inf), -1) @ c.repeat_interleave(repeat, 0)).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("reach", [Reach(), Reach(right=-1), Reach(left=3), Reach(2, 2)])
@pytest.mark.parametrize("backend", ["flash_attn", "varlen"])
@pytest.mark.parametrize("of_value", [8, 6])
def test_kernels_are_called_right(backend: str, reach: Reach, of_value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(  # as flash-attn 2 defines it
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert causal == (window_size[1] == 0)
        assert dropout_p == 0.0
        return kernel(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size, softcap)

    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)

    def varlen_attn(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs).arguments
        assert call["enable_gqa"]
        q, k, v = (call[name] for name in ("query", "key", "value"))
        return kernel(q, k, v, call["cu_seq_q"], call["max_q"], call["scale"], call["window_size"])

    module = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    where = boundaries.from_lengths(LENGTHS)
    q = torch.randn(1, 4, 19, 8, dtype=torch.float64)
    k = torch.randn(1, 2, 19, 8, dtype=torch.float64)
    v = torch.randn(1, 2, 19, of_value, dtype=torch.float64)
    softcap = 5.0 if backend == "flash_attn" else None
    found = attention._on_cuda(backend, q, k, v, where, reach, 0.0, 0.3, softcap)
    expected = attention.per_sequence(q, k, v, where, reach, 0.0, 0.3, softcap, None)
    assert found.shape == (1, 19, 4, of_value)
    assert float((found - expected).abs().max()) < 1e-12
