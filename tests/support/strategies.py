"""Random but valid models, views and layouts for the property tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hypothesis import assume, strategies as st

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import Block, ModelSpec, Moe, Norm
from loadgauge.core.families import models
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.families.reference import gpt_block, llama_block
from loadgauge.core.resolve.resolve import resolve_job

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


def one_of_each_family() -> list[str]:
    """A model of the catalogue for each of its families."""
    text = resources.files("loadgauge").joinpath("data/models")
    found: dict[str, str] = {}
    for name in models():
        config = json.loads(text.joinpath(f"{name}.json").read_text(encoding="utf-8"))
        found.setdefault(config["model_type"], name)
    return sorted(found.values())


FAMILIES = one_of_each_family()
FRAMEWORKS = ("huggingface", "deepspeed", "torchtitan", "megatron")
PIPELINES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev")


@st.composite
def runs(draw: st.DrawFn) -> Job:
    """The flags of a run with a time, of any family, framework and parallelism; most of them valid as they are drawn.

    Those that are not are assumed away. Every GPU is given its links, as some files do not state them.
    """

    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    name, framework = draw(st.sampled_from(FAMILIES)), draw(st.sampled_from(FRAMEWORKS))
    spec = find_model(name)
    experts = any(isinstance(block.mlp, Moe) for block in spec.blocks)
    tp, cp, dp = some(1, 1, 2, 4), some(1, 1, 1, 2), some(1, 2, 4, 8)
    pp = some(1, 1, *(each for each in (2, 4) if spec.num_hidden_layers % (2 * each) == 0))
    flags: dict[str, Any] = {}
    if pp > 1:
        flags["schedule"] = some(*PIPELINES)
        flags["vpp"] = 2 if flags["schedule"] == "interleaved" else None
    if experts:
        flags["ep"] = some(1, *(each for each in (2, 4) if tp * cp * dp % each == 0))
        flags["expert_imbalance"] = some(1.0, 1.5)
    if spec.head.kind == "lm":
        flags["loss"] = some(None, "float32", "inplace", "chunked")
    micro = some(1, 1, 2)
    job = Job(
        model=name, framework=framework, gpu=draw(st.sampled_from(gpu_ids())), gpus=tp * pp * cp * dp,
        tp=tp, pp=pp, cp=cp, micro_batch=micro, global_batch=micro * dp * pp * some(2, 4),
        seq_len=some(256, 512, 1024), zero=some(0, 1, 2, 3), sequence_parallel=tp > 1 and (experts or some(True, False)),
        recompute=some("none", "selective", "full", "full:every=2"), optimizer=some("adamw", "adamw-8bit", "muon", "sgd"),
        precision=some("bf16", "bf16", "fp32", "bf16-pure"), attention=some("flash", "flash", "eager"),
        lora_rank=some(None, None, None, 16), offload=some("none", "none", "none", "optimizer", "all"),
        replicas=some(1, 1, 1, 2), overlap=some(None, "none", "all", "dp,tp"),
        cp_comm=some("ring", "all_gather") if cp > 1 else None,
        gpus_per_node=some(4, 8), link_bandwidth="300GB/s", nic_bandwidth=some("12.5GB/s", "50GB/s"), **flags,
    )  # fmt: skip
    try:
        assume(resolve_job(job).estimate().time is not None)
    except Error:
        assume(False)
    return job
