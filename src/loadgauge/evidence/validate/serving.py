"""Measured points of servers (`data/serving.csv.gz`) beside what `core/serving/decode.py` predicts.

Time of a token, and to the first one, of engines under a fixed number of requests at once (source: aiconfigurator).
"""

import csv
import functools
import gzip
import io
from collections.abc import Iterator

import msgspec

from loadgauge.core.base import Error, read_bytes
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.families.catalogue import model
from loadgauge.core.serving.decode import Server, serve, slots_of
from loadgauge.core.serving.memory import memory

_BLACKWELL = ("b200-sxm-180gb", "b300-sxm-288gb", "gb200-nvl72", "gb300-nvl72")
EIGHT_BITS = {
    "trtllm": ("h100-sxm5-80gb", "h200-sxm-141gb", *_BLACKWELL), "vllm": ("h200-sxm-141gb", *_BLACKWELL), "sglang": _BLACKWELL,
}  # fmt: skip
"""Cards on which an engine's servers with weights in 8 bits keep a cache in 8 bits."""


class Point(msgspec.Struct, frozen=True):
    """A measured server. requests: at once, of all attentions; options: of its queue, as its launch names them; first, token:
    measured [s]"""

    engine: str
    model: str
    gpu: str
    weights: str
    prompt: int
    answer: int
    requests: int
    tp: int
    ep: int
    attentions: int
    options: str
    first: float
    token: float

    @property
    def launched(self) -> Engine:
        """The engine with the options of its launch."""
        return Engine.parse(f"{self.engine}:{self.options.replace(' ', ',')}", "engine")

    @property
    def asked(self) -> Inference:
        """The replica, and the requests of each of its attentions.

        Checkpoints in NVFP4, and TensorRT-LLM's in 8 bits, say that the cache has 8 bits (source: nvidia modelopt's
        `hf_quant_config.json`, `kv_cache_quant_algo`). Of other servers with weights in 8 bits the table does not say it; how many
        of their requests wait shows 8 bits on Blackwell, and in vLLM on the H200, 16 elsewhere.
        """
        eight = self.weights == "nvfp4" or (self.weights == "fp8" and self.gpu in EIGHT_BITS[self.engine])
        return Inference(
            task="generate",
            context=self.prompt + self.answer,
            answer=self.answer,
            batch=max(1, round(self.requests / self.attentions)),
            prefill_tokens=self.launched.max_batched_tokens,
            tp=self.tp,
            ep=self.ep,
            weight_format=self.weights,
            cache_format="fp8" if eight else "bf16",
        )


@functools.cache
def points() -> tuple[Point, ...]:
    """Return all points.

    >>> len(points()) > 1800
    True
    """
    rows = csv.DictReader(io.StringIO(gzip.decompress(read_bytes("serving.csv.gz")).decode()))
    return tuple(_point(row) for row in rows)


def _point(row: dict[str, str]) -> Point:
    times = {name: float(row.pop(f"{name}_ms")) / 1e3 for name in ("first", "token")}
    return msgspec.convert(row | times, Point, strict=False)


def server(point: Point) -> Server:
    """Return the replica of a point. Raises `LayoutError` where its ranks cannot share the model."""
    spec, asked = model(point.model), point.asked
    return Server(spec, asked, cluster(gpu(point.gpu), asked.replica), point.engine)


def slots(point: Point, engine: Server) -> float | None:
    """Return the sequences whose cache fits."""
    held = memory(engine.model, msgspec.structs.replace(point.asked, batch=1, prefill_tokens=1), engine.stages, None)
    return slots_of(engine, point.launched, held.weights, point.prompt, point.answer)[1]


def predicted(every: int = 1) -> Iterator[tuple[Point, float, float]]:
    """Yield every point that is a layout, with the seconds predicted for a token and for a first one. every: of so many, one"""
    for point in points()[::every]:
        try:
            engine = server(point)
        except Error:
            continue
        steady = serve(engine, point.asked.batch, point.prompt, point.answer, slots(point, engine), point.launched)
        yield point, steady.token, steady.first
