"""The share of its datasheet that a GPU achieves, by kind of operation: `data/calibration/<gpu>.toml`, read on demand.

A calibration is data with its source and date, one file per kind of GPU; no constant belongs to a run, a model or a
source. A GPU without a file gets the stated default, and a wider range.
"""

from __future__ import annotations

import functools
import tomllib

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.package_data import read_data


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Efficiencies of one GPU: shares of its datasheet, unless a unit is given.

    matmul: share of the peak that a large matrix product reaches
    wave: how much of the loss by partial waves of tiles shows (0: none, 1: all)
    small_k: inner width at which a product reaches half of that [elements]
    attention, attention_backward: share of the peak in the vendor's fused attention (cuDNN, as Transformer Engine and so
        Megatron use), of the pairs that are not masked; flash2, flash2_backward: in FlashAttention-2 (PyTorch, transformers)
    memory: share of the memory bandwidth; traffic: memory traffic of element-wise operations over the unfused count
    launch: exposed launch overhead of an operation [s]
    inner_link, outer_link: achieved share of the link inside a domain, and of the network adapter
    inner_latency, outer_latency: latency of one step of a collective [s]
    contention: share of hidden communication's time that the overlapping compute loses
    fp8_matmul, fp4_matmul: as `matmul`, of the 8-bit and the 4-bit peak
    routing: time that an expert layer's routing adds in each direction [s]: many small kernels, and a host that waits for
        the number of tokens of each expert
    multiprocessors: how many tiles of a matrix product are computed at a time
    low, high: factors on a predicted time that span 80 % of the rows that were not used to fit it
    low_measured, high_measured: the same once a measured run of the same model and machine has rescaled it
    """

    gpu: str
    matmul: float
    wave: float
    small_k: float
    attention: float
    attention_backward: float
    memory: float
    traffic: float
    launch: float
    inner_link: float
    outer_link: float
    inner_latency: float
    outer_latency: float
    low: float
    high: float
    basis: str
    date: str
    rows: tuple[str, ...]
    fp8_matmul: float = 0.5
    fp4_matmul: float = 0.4
    routing: float = 3e-4
    flash2: float = 0.45
    flash2_backward: float = 0.35
    contention: float = 0.2
    multiprocessors: int = 132
    low_measured: float = 0.9
    high_measured: float = 1.1


DEFAULT = Rates(
    gpu="", matmul=0.70, wave=0.5, small_k=50, attention=0.55, attention_backward=0.45, memory=0.82, traffic=1.0,
    launch=4e-6, inner_link=0.78, outer_link=0.85, inner_latency=3.4e-6, outer_latency=1.4e-5, low=0.75, high=1.4,
    basis="assumed", date="", rows=(),
)  # fmt: skip
"""For GPUs that no run in the calibration covers: round figures in the middle of those that are covered. Latencies: those
of a step of a ring in NCCL's own tables (source: nccl)."""


@functools.cache
def rates(gpu: str) -> Rates:
    """Return the calibration of a GPU by its id, or `DEFAULT` (whose `basis` is assumed). Raises `ConfigError`.

    >>> rates("no-such-gpu").basis
    'assumed'
    """
    try:
        return msgspec.convert(tomllib.loads(read_data(f"calibration/{gpu}.toml")), Rates)
    except FileNotFoundError:
        return msgspec.structs.replace(DEFAULT, gpu=gpu)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(error), file=f"data/calibration/{gpu}.toml") from None
