"""The quantities of the articles' tables, from the list of operations and the functions of estimates; none is typed in.

Each takes the sizes that a row of `data/articles` states, in the letters of the articles: l layers, h width, a heads, V
vocabulary, s sequence length, b micro-batch, B global batch, t, p, d degrees of parallelism, P parameters, T tokens, X
FLOP/s of a GPU, n GPUs.
"""

from collections.abc import Callable
from typing import Any

from loadgauge.core.base import GB, GIB, Size, ceil_div, shard
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.kernels import PAPER, Dtypes, Kernels
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.states.states import model_states
from loadgauge.core.estimate.time.bandwidth_needs import bandwidth_needed
from loadgauge.core.estimate.time.collectives import bus_factor
from loadgauge.core.estimate.time.cost import DAY
from loadgauge.core.estimate.time.flops import microbatch_flops
from loadgauge.core.families.reference import gpt_block, gpt_model, llama_ffn, llama_model
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.evidence.articles.autograd import held

YEAR = 365 * DAY
SHARE = 0.05
"""Of compute's time, what communication may take in article 3."""
FLOAT32 = Kernels(attention="eager", dtypes=Dtypes(activation=4, norm_statistic=0))
EAGER, FLASH = (Kernels(attention=kind, dtypes=Dtypes(norm_statistic=0)) for kind in ("eager", "flash"))
ONE_TOKEN = View(tokens=1, pairs=0, kernels=PAPER)
"""A token without its attention to others: what so many FLOPs a parameter count."""


def _model(family: str, l: int, h: int, a: int = 0, V: int = 0, tied: bool = True) -> ModelSpec:
    heads = a or h // 128
    if family == "gpt":
        return gpt_model(l, h, heads, V)
    return llama_model(l, h, heads, V, tie_word_embeddings=tied)


def _layer(model: ModelSpec, s: int, b: int, **how: Any) -> Layer:
    return block_layer(model.blocks[0], model.hidden_size, View.of(s, b, **{"kernels": PAPER, **how}))


# -- parameters ----------------------------------------------------------------------------------------------------------


def ffn_width(h: int) -> Size:
    """Llama's feed-forward width."""
    return llama_ffn(h)


def billions(family: str, l: int, h: int, V: int, tied: bool = True) -> Size:
    """Parameters of a model [10^9]."""
    return parameters(_model(family, l, h, V=V, tied=tied)).total / GB


def short_form_billions(l: int, h: int, V: int) -> Size:
    """Weights of a GPT's matrices and its table alone, 12 l h^2 + V h [10^9]."""
    return (l * _matrices(_model("gpt", 1, h)) + V * h) / GB


def _matrices(model: ModelSpec) -> Size:
    """Elements of the matrices of a layer."""
    return sum(weight.numel for weight in _layer(model, 1, 1).weights if weight.kind == "matrix")


def matrix_elements(name: str, h: int) -> Size:
    """Elements of one matrix of a Llama layer."""
    layer = _layer(_model("llama", 1, h, V=1), 1, 1)
    return next(weight.numel for weight in layer.weights if weight.name == name)


# -- model states --------------------------------------------------------------------------------------------------------


def bytes_per_parameter(precision: str, optimizer: str = "adamw", zero: int = 0, d: int = 1) -> Size:
    """Model states [bytes a parameter]."""
    many = 64 * 10**6
    return model_states(many, PRECISIONS[precision], OPTIMIZERS[optimizer], zero=zero, dp=d).total / many


def optimizer_states(optimizer: str) -> Size:
    """Return what an optimizer keeps of float32 weights, times their size."""
    states = model_states(10**6, PRECISIONS["fp32"], OPTIMIZERS[optimizer])
    return states.optimizer / states.weights


def model_states_gib(l: int, h: int, V: int) -> Size:
    """Model states of a Llama in mixed precision [GiB]."""
    return model_states(parameters(_model("llama", l, h, V=V)).total, PRECISIONS["bf16-mixed-16"]).total / GIB


def states_gb(P: float, precision: str, what: str = "total", zero: int = 0, d: int = 1) -> Size:
    """Model states of so many parameters, or one of them [GB]."""
    return float(getattr(model_states(int(P), PRECISIONS[precision], zero=zero, dp=d), what)) / GB


def gpus_for_states(P: float, gpu: float, node: int = 1) -> Size:
    """GPUs of so many bytes that hold the states of a replica, in whole nodes."""
    return node * ceil_div(ceil_div(model_states(int(P), PRECISIONS["fp16-mixed-20"]).total, gpu), node)


# -- activations ---------------------------------------------------------------------------------------------------------


def _activations(family: str, l: int, h: int, a: int, s: int, b: int, kernels: Kernels = PAPER) -> Size:
    return l * _layer(_model(family, l, h, a), s, b, kernels=kernels).saved()


def activations_gib(family: str, l: int, h: int, a: int, s: int, b: int) -> Size:
    """Return what all layers keep for backward [GiB]."""
    return _activations(family, l, h, a, s, b) / GIB


def activations_gb(l: int, h: int, a: int, s: int, b: int) -> Size:
    """Return what all layers of a GPT keep for backward [GB]."""
    return _activations("gpt", l, h, a, s, b) / GB


def float32_activations(l: int, h: int, a: int, s: int) -> Size:
    """Activations in float32 over those in 16 bits."""
    return _activations("gpt", l, h, a, s, 1, FLOAT32) / _activations("gpt", l, h, a, s, 1)


def checkpoints_gb(l: int, h: int, a: int, s: int, b: int, every: int = 1) -> Size:
    """Activations with a checkpoint at every so many whole layers, and all that one such group keeps while it runs again [GB]."""
    layer = _layer(_model("gpt", l, h, a), s, b)
    inputs = layer.saved(applied(RecomputePolicy(mode="full"), layer))
    return (ceil_div(l, every) * inputs + every * layer.saved()) / GB


def memory_gb(P: float, zero: int, d: int, l: int, h: int, a: int, s: int, b: int, checkpointing: bool) -> Size:
    """Article 2's memory of a GPU: states and activations [GB]."""
    kept = checkpoints_gb(l, h, a, s, b) if checkpointing else activations_gb(l, h, a, s, b)
    return states_gb(P, "fp16-mixed-16", zero=zero, d=d) + kept


# -- FLOPs, time and GPUs ------------------------------------------------------------------------------------------------


def step_teraflops(l: int, h: int, V: int, s: int, again: int) -> Size:
    """FLOPs of one sequence with some layers run again [TFLOP]."""
    policy = RecomputePolicy(mode="full", layers=again) if again else RecomputePolicy()
    return microbatch_flops(_model("gpt", l, h, V=V), View.of(s, 1, kernels=PAPER), policy).hardware / 1e12


def flops_per_parameter(what: str) -> Size:
    """FLOPs a matrix parameter and token: forward, model (with backward), hardware (all run again)."""
    model = gpt_model(96, 12288, 96, 0)
    flops = getattr(microbatch_flops(model, ONE_TOKEN, RecomputePolicy(mode="full")), what)
    return float(flops) / (96 * _matrices(model))


def recomputed_percent(mode: str, h: int, s: int) -> Size:
    """FLOPs of recomputation over those of the model [%]."""
    flops = microbatch_flops(_model("gpt", 1, h), View.of(s, 1, kernels=PAPER), RecomputePolicy(mode=mode))  # type: ignore[arg-type]
    return 100 * flops.recompute / flops.model


def run_seconds(P: float, T: float, n: float, X: float, again: bool = False) -> Size:
    """Seconds of a run, attention and logits not counted."""
    return flops_per_parameter("hardware" if again else "model") * P * T / (n * X)


def years(P: float, T: float, n: float, X: float) -> Size:
    """Years of a run."""
    return run_seconds(P, T, n, X) / YEAR


def days(P: float, T: float, n: float, X: float) -> Size:
    """Days of a run whose layers are run again."""
    return run_seconds(P, T, n, X, again=True) / DAY


def days_exactly(l: int, h: int, a: int, V: int, s: int, T: float, n: int, X: float) -> Size:
    """The same, with attention and logits."""
    flops = microbatch_flops(_model("gpt", l, h, a, V), View.of(s, 1, kernels=PAPER), RecomputePolicy(mode="full"))
    return flops.hardware * T / s / (n * X) / DAY


def gpus(P: float, T: float, within: float, X: float, more: float = 1.0) -> Size:
    """GPUs that finish within so many days; `more`: for every so much more work."""
    return round(run_seconds(P, T, 1, X) / (within * DAY)) * more


def gpus_of(t: int, p: int, d: int) -> Size:
    """GPUs of a layout."""
    return Layout(tp=t, pp=p, dp=d, seq_len=1).gpus


def amdahl(serial: float, n: int) -> Size:
    """How much faster n processors are where a share of the work runs on one (source: amdahl1967)."""
    return 1 / (serial + (1 - serial) / n)


def amdahl_efficiency(serial: float, n: int) -> Size:
    """That, over the processors."""
    return amdahl(serial, n) / n


# -- a layout's memory and traffic ---------------------------------------------------------------------------------------


def rank_memory_gb(
    P: float, l: int, h: int, a: int, s: int, b: int, t: int, p: int, d: int, B: int, saving: bool
) -> Size:
    """States and activations of a GPU of the first stage, with ZeRO 1, selective recomputation and sequence parallelism or
    without [GB]."""
    policy = RecomputePolicy(mode="selective" if saving else "none")
    layout = Layout(
        tp=t, pp=p, dp=d, seq_len=s, micro_batch=b, global_batch=B, recompute=policy, sequence_parallel=saving
    )
    model = _model("gpt", l, h, a)
    layer = _layer(model, s, b, tp=t, sequence_parallel=saving)
    kept = layout.layers_of(model)[0] * layout.in_flight(0) * layer.saved(applied(policy, layer))
    states = model_states(
        shard(int(P), t * p, "parameters"), PRECISIONS["fp16-mixed-20"], zero=1 if saving else 0, dp=d
    )
    return (states.total + kept) / GB


def saving_factor(h: int, a: int, s: int, t: int) -> Size:
    """How much less a layer keeps with selective recomputation and sequence parallelism."""
    model = _model("gpt", 1, h, a)
    plain, both = _layer(model, s, 1, tp=t), _layer(model, s, 1, tp=t, sequence_parallel=True)
    return plain.saved() / both.saved(applied(RecomputePolicy(mode="selective"), both))


def sequence_parallel_traffic(h: int, t: int) -> Size:
    """Bytes that tensor parallelism sends with sequence parallelism over those without."""
    model = _model("gpt", 1, h)
    return _layer(model, 2048, 1, tp=t, sequence_parallel=True).wire / _layer(model, 2048, 1, tp=t).wire


def tensor_gbps(P: float, l: int, h: int, s: int, t: int, p: int, d: int, B: int, X: float) -> Size:
    """GB/s that a GPU must send for tensor parallelism to take `SHARE` of compute's time."""
    nbytes = _layer(_model("gpt", 1, h), s, 1, tp=t).wire * (l // p) * (B // d)
    return bandwidth_needed(nbytes, run_seconds(P, B * s, t * p * d, X), SHARE) / GB


def rate_for(gbps: float, **sizes: Any) -> Size:
    """FLOP/s of a GPU at which tensor parallelism needs so many GB/s [TFLOP/s]."""
    return gbps / tensor_gbps(**sizes, X=1e12)


def data_gbits(P: float, s: int, t: int, p: int, d: int, B: int, X: float) -> Size:
    """Gbit/s that a GPU must send for the reduction of 16-bit gradients to take `SHARE` of compute's time."""
    # In chunks of equal size, whatever does not divide.
    nbytes = 2 * P / (t * p) * bus_factor("all_reduce", d)
    return 8 * bandwidth_needed(nbytes, run_seconds(P, B * s, t * p * d, X), SHARE) / GB


# -- ragged batches ------------------------------------------------------------------------------------------------------

H, A, BATCH = 6144, 48, 8
"""Article 4's layer, and the only batch that its table fits."""


def ragged_gib(N: int, way: str) -> Size:
    """Expected bytes a layer keeps of lengths from U{1..N}: naive, flash (attention alone without padding) or free [GiB]."""
    lengths = Lengths.uniform(N)
    (tokens, pairs), (real, real_pairs) = lengths.padded(BATCH), lengths.unpadded(BATCH)
    views = {
        "naive": View(tokens=tokens, pairs=pairs, kernels=EAGER),
        "flash": View(tokens=tokens, pairs=real_pairs, kernel_tokens=real, kernels=FLASH),
        "free": View(tokens=real, pairs=real_pairs, kernels=FLASH),
    }
    return block_layer(gpt_block(H, A), H, views[way]).saved() / GIB


def ragged_saving(N: int) -> Size:
    """Share of the flash layer's bytes that padding-free saves [%]."""
    return 100 * (1 - ragged_gib(N, "free") / ragged_gib(N, "flash"))


# -- small tensors -------------------------------------------------------------------------------------------------------


def tensor_elements(elements: int) -> Size:
    """Elements of a tensor [10^6]."""
    return elements / 1e6


# -- whole jobs ----------------------------------------------------------------------------------------------------------


def estimated_gib(**job: Any) -> Size:
    """Return the most that `loadgauge estimate` has a job keep for backward [GiB]."""
    return max(moment.parts["activations"] for moment in resolve_job(Job(**job)).estimate().memory.moments) / GIB


def estimated_step(**job: Any) -> Size:
    """Return what `loadgauge estimate` has a step of a job take [s]."""
    return resolve_job(Job(**job)).estimate().timing.step


def ratio(by: str, of: dict[str, Any], to: dict[str, Any], **both: Any) -> Size:
    """Return one quantity over itself at other sizes. both: sizes that the two share"""
    return QUANTITIES[by](**both, **of) / QUANTITIES[by](**both, **to)


QUANTITIES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        ffn_width, billions, short_form_billions, matrix_elements, bytes_per_parameter, optimizer_states, model_states_gib,
        states_gb, gpus_for_states, activations_gib, activations_gb, float32_activations, checkpoints_gb,
        memory_gb, step_teraflops, flops_per_parameter, recomputed_percent, years, days, days_exactly, gpus, gpus_of,
        amdahl, amdahl_efficiency, rank_memory_gb, saving_factor, sequence_parallel_traffic, tensor_gbps, rate_for, data_gbits,
        ragged_gib, ragged_saving, tensor_elements, bus_factor, held, estimated_gib, estimated_step, ratio,
    )
}  # fmt: skip
"""Every quantity by the name that rows give."""
