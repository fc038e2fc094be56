"""Random but valid models, views and layouts for the property tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from loadgauge.families.paper import gpt_block, llama_block
from loadgauge.spec.kernels import Dtypes, Kernels
from loadgauge.spec.model import Block, ModelSpec, Norm

TP = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one block and micro-batch; every dimension divides over tp."""

    s: int
    b: int
    h: int
    a: int
    k: int
    d: int
    f: int
    t: int

    def block(self, kind: str) -> Block:
        if kind == "gpt":
            return gpt_block(self.h, self.a)
        return llama_block(self.h, self.a, self.k, self.d, self.f)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    t = draw(st.sampled_from(TP))
    k = t * draw(st.integers(1, 4))
    a = k * draw(st.integers(1, 8))
    d = draw(st.sampled_from([64, 80, 128]))
    return Sizes(
        s=8 * draw(st.integers(1, 2048)), b=draw(st.integers(1, 16)), h=a * d, a=a, k=k, d=d,
        f=256 * draw(st.integers(1, 256)), t=t,
    )  # fmt: skip


kernels = st.builds(
    Kernels,
    attention=st.sampled_from(["eager", "flash"]),
    norm=st.sampled_from(["fused", "upcast"]),
    activation=st.sampled_from(["fused", "unfused"]),
    softmax_float32=st.booleans(),
    repeat_kv=st.booleans(),
    views_pin_storage=st.booleans(),
    keep_gathered=st.booleans(),
    loss=st.sampled_from(["float32", "inplace", "chunked"]),
    dtypes=st.builds(Dtypes, activation=st.sampled_from([2, 4])),
)
kinds = st.sampled_from(["gpt", "llama"])


@st.composite
def small_models(draw: st.DrawFn) -> ModelSpec:
    """Models of few layers, whose dimensions divide over tp 1, 2 and 4."""
    heads = 4 * draw(st.integers(1, 4))
    keys = draw(st.sampled_from([4, heads]))
    heads = heads if heads % keys == 0 else keys
    hidden = heads * 64
    kind = draw(kinds)
    block = gpt_block(hidden, heads) if kind == "gpt" else llama_block(hidden, heads, keys, 64, 4 * hidden)
    return ModelSpec(
        name="random", model_type=kind, hidden_size=hidden, vocab_size=draw(st.integers(100, 100_000)),
        blocks=(block,), pattern=(0,) * (8 * draw(st.integers(1, 4))), tie_word_embeddings=draw(st.booleans()),
        final_norm=Norm("rmsnorm"),
    )  # fmt: skip
