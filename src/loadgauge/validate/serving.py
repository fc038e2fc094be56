"""Measured points of servers (`data/serving.csv.gz`) beside what `inference/decode.py` predicts.

Time of a token, and to the first one, of engines under a fixed number of requests at once (source: aiconfigurator).
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
from collections.abc import Iterator

import msgspec

from loadgauge.errors import Error
from loadgauge.families.catalogue import model
from loadgauge.inference.decode import Server, serve, slots_of
from loadgauge.inference.memory import memory
from loadgauge.package_data import read_bytes
from loadgauge.spec.cluster import cluster
from loadgauge.spec.hardware import gpu
from loadgauge.spec.inference import Inference


class Point(msgspec.Struct, frozen=True):
    """A measured server. requests: at once, of all attentions; first, token: measured [s]"""

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
    first: float
    token: float

    @property
    def asked(self) -> Inference:
        """The replica, and the requests of each of its attentions.

        Checkpoints in NVFP4, and TensorRT-LLM's in 8 bits, say that the cache has 8 bits (source: nvidia modelopt's
        `hf_quant_config.json`, `kv_cache_quant_algo`).
        """
        eight = self.weights == "nvfp4" or (self.engine == "trtllm" and self.weights == "fp8")
        return Inference(
            task="generate", context=self.prompt + self.answer, answer=self.answer,
            batch=max(1, round(self.requests / self.attentions)), tp=self.tp, ep=self.ep, weight_format=self.weights,
            cache_format="fp8" if eight else "bf16",
        )  # fmt: skip


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


def slots(point: Point, one: Server) -> float:
    """Return the sequences whose cache fits, half of each answer made."""
    found = memory(one.model, msgspec.structs.replace(point.asked, batch=1, prefill_tokens=1), one.stages, None)
    return slots_of(one, found.weights, point.prompt + point.answer / 2)


def predicted() -> Iterator[tuple[Point, float, float]]:
    """Yield every point that is a layout, with the seconds predicted for a token and for a first one."""
    for point in points():
        try:
            one = server(point)
        except Error:
            continue
        found = serve(one, point.asked.batch, point.prompt, point.answer, slots(point, one))
        yield point, found.token, found.first
