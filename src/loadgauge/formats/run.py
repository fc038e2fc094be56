"""A training run in words that no tool owns, and the arithmetic by which tools say the same run differently.

A dialect's table turns the keys of a file into facts: `tp`, or `accumulation`, or `shards`. `solve` makes a `Run` of them,
and finds where two of them contradict; `facts` is the way back.

letters: N GPUs, t p c tensor, pipeline and context parallel ranks, d data parallel ranks, b sequences of a micro-batch,
a micro-batches of a step on one data parallel rank, B sequences of a step.  N = t p c d, B = d b a.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.spec.axes import FACTORS


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The flags of `loadgauge estimate` as a file says them; None: it says nothing.

    config: of the model as a Hugging Face `config.json`, where the file has the sizes instead of a name
    accumulation: micro-batches of a step on one data parallel rank, where how many ranks there are is not known
    lora_rank: 0 where the file says that no adapters are trained
    recompute: as on the command line, or `per-op` (torchtitan), or `modules:...` (Megatron), which depend on the model
    """

    model: str | None = None
    config: dict[str, Any] | None = None
    framework: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    zero: int | None = None
    replicas: int | None = None
    sequence_parallel: bool | None = None
    schedule: str | None = None
    stage_layers: str | None = None
    recompute: str | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    attention: str | None = None
    loss: str | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    qlora: bool | None = None
    base: str | None = None
    offload: str | None = None
    cp_comm: str | None = None
    order: str | None = None
    overlap: str | None = None

    @property
    def within(self) -> int:
        """GPUs of one replica of the model: t p c."""
        return (self.tp or 1) * (self.pp or 1) * (self.cp or 1)


class Said(msgspec.Struct, frozen=True):
    """A value, the key that says it as the file writes it, and whether it is only the tool's default."""

    value: Any
    key: str
    default: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {self.value}"


FIELDS = Run.__struct_fields__
SOLVED = ("gpus", "gpus_per_node", "micro_batch", "global_batch", "accumulation", "replicas")


def merge(first: Mapping[str, Said], second: Mapping[str, Said], file: str = "") -> dict[str, Said]:
    """The facts of two files of one job. What only a tool's default says gives way; two that differ are an error."""
    found = dict(first)
    for name, said in second.items():
        other = found.get(name)
        if other is None or (other.default and not said.default):
            found[name] = said
        elif not said.default and other.value != said.value:
            raise ConfigError(f"{said} contradicts {other}", file=file)
    return found


def solve(facts: Mapping[str, Said], file: str = "") -> Run:
    """The run that facts mean; two that contradict raise `ConfigError`.

    >>> facts = {"global_batch": Said(64, "train_batch_size"), "micro_batch": Said(2, "micro"),
    ...          "accumulation": Said(4, "accumulation"), "tp": Said(2, "autotp_size")}
    >>> solve(facts).gpus
    16
    """
    values = {name: said.value for name, said in facts.items() if name in FIELDS and name not in SOLVED}
    if "weights" in facts:
        values |= _weights(facts["weights"], values, facts, file)
    degrees = Run(**values)
    gpus = _gpus(facts, file)
    replicas, dp = _data_parallel(facts, degrees, gpus, file)
    micro, accumulation, batch = (_value(facts, name) for name in ("micro_batch", "accumulation", "global_batch"))
    if batch is not None and micro is not None and accumulation is not None and not facts["accumulation"].default:
        ranks, left = divmod(batch, micro * accumulation)
        if left or ranks == 0 or (dp is not None and dp != ranks):
            known = "" if dp is None else f" x {dp} data-parallel ranks"
            raise ConfigError(
                f"{facts['global_batch']} contradicts {facts['micro_batch']} x {facts['accumulation']}{known}",
                file=file,
            )
        dp = ranks
    elif batch is None and micro is not None and accumulation is not None and dp is not None:
        batch = micro * accumulation * dp
    elif batch is not None and micro is None and accumulation is not None and dp is not None:
        micro, left = divmod(batch, accumulation * dp)
        if left or not micro:
            raise ConfigError(
                f"{facts['global_batch']} contradicts {facts['accumulation']} x {dp} data-parallel ranks", file=file
            )
    if gpus is None and dp is not None:
        gpus = degrees.within * dp
    return msgspec.structs.replace(
        degrees,
        gpus=gpus,
        gpus_per_node=_value(facts, "gpus_per_node"),
        replicas=replicas,
        micro_batch=micro,
        global_batch=batch,
        accumulation=accumulation if batch is None else None,
    )


def _weights(loaded: Said, values: Mapping[str, Any], facts: Mapping[str, Said], file: str) -> dict[str, Any]:
    """The recipe where it is said what the weights are loaded as.

    With FSDP accelerate casts them to float32, DeepSpeed keeps a float32 copy, and frozen weights have no optimizer, so
    it matters only where whole weights are trained on every GPU: those of 16 bits are trained in 16 bits throughout.
    """
    plain = values.get("framework", "huggingface") == "huggingface" and not values.get("zero")
    if values.get("lora_rank") and (values.get("qlora") or loaded.value != "fp32"):
        return {}
    if not plain or values.get("precision") not in ("bf16", "fp16") or facts["precision"].key.startswith("--"):
        return {}
    if loaded.value == "auto":
        raise ConfigError(
            "auto is whatever the checkpoint has; give --precision bf16-pure for a checkpoint of 16 bits, or"
            " --precision bf16-autocast for one of float32", key=loaded.key, file=file,
        )  # fmt: skip
    if loaded.value == "fp16" and values["precision"] == "fp16":
        raise ConfigError(
            "weights of float16 cannot be trained with fp16's scaled gradients", key=loaded.key, file=file
        )
    if loaded.value == "fp16" or (loaded.value == "bf16" and values["precision"] == "fp16"):
        raise ConfigError(f"{loaded.value} contradicts {facts['precision']}", key=loaded.key, file=file)
    return {"precision": "bf16-pure" if loaded.value == "bf16" else f"{values['precision']}-autocast"}


def _value(facts: Mapping[str, Said], name: str) -> Any:
    said = facts.get(name)
    return None if said is None else said.value


def _gpus(facts: Mapping[str, Said], file: str) -> int | None:
    gpus, nodes, each = (facts.get(name) for name in ("gpus", "nodes", "gpus_per_node"))
    if nodes is None or each is None:
        return None if gpus is None else int(gpus.value)
    product = int(nodes.value * each.value)
    if gpus is not None and gpus.value != product:
        raise ConfigError(f"{gpus} contradicts {nodes} x {each}", file=file)
    return product


def _data_parallel(facts: Mapping[str, Said], run: Run, gpus: int | None, file: str) -> tuple[int | None, int | None]:
    """Replicas of ZeRO's shards, and data-parallel ranks, where they are known."""
    replicas, shards, dp = (facts.get(name) for name in ("replicas", "shards", "dp"))
    ranks = _value(facts, "dp")
    if replicas is not None and shards is not None:
        ranks = replicas.value * shards.value
        if dp is not None and dp.value != ranks:
            raise ConfigError(f"{dp} contradicts {replicas} x {shards}", file=file)
    if gpus is not None:
        whole, left = divmod(gpus, run.within)
        given = [facts[name] for name in ("gpus", "nodes", "gpus_per_node", *FACTORS) if name in facts and name != "dp"]
        if left or whole == 0:
            raise ConfigError(f"{_joined(given)}: {gpus} GPUs do not share out over {run.within}", file=file)
        if ranks is not None and ranks != whole:
            given += [said for said in (dp, replicas, shards) if said is not None]
            raise ConfigError(f"{_joined(given)}: {run.within} x {ranks} GPUs are not {gpus}", file=file)
        ranks = whole
    if shards is not None and replicas is None and ranks is not None:
        if ranks % shards.value:
            raise ConfigError(f"{shards} does not divide the {ranks} data-parallel ranks", file=file)
        return ranks // shards.value, ranks
    if replicas is not None and ranks is not None and ranks % replicas.value:
        raise ConfigError(f"{replicas} does not divide the {ranks} data-parallel ranks", file=file)
    return _value(facts, "replicas"), ranks


def _joined(given: list[Said]) -> str:
    return ", ".join(str(said) for said in given if not said.default)


def facts(run: Run) -> dict[str, Any]:
    """What a dialect's table may be asked to say of a run; without a number of GPUs, of one replica.

    >>> found = facts(Run(gpus=16, tp=2, micro_batch=2, global_batch=64, replicas=2))
    >>> found["dp"], found["shards"], found["accumulation"]
    (8, 4, 4)
    """
    found = {name: value for name in FIELDS if (value := getattr(run, name)) is not None}
    if run.gpus is not None and run.gpus % run.within:
        raise ConfigError(f"{run.gpus} GPUs do not share out over tp x pp x cp = {run.within}", key="gpus")
    dp = 1 if run.gpus is None else run.gpus // run.within
    if run.gpus is not None:
        found["dp"] = dp
        if dp % (run.replicas or 1):
            raise ConfigError(f"{run.replicas} replicas do not divide {dp} data-parallel ranks", key="replicas")
        found["shards"] = dp // (run.replicas or 1)
        each = run.gpus_per_node
        if each is not None:
            found["gpus_per_node"] = min(each, run.gpus)
            found["nodes"] = max(1, run.gpus // each)
    micro = run.micro_batch or 1
    if run.global_batch is not None:
        accumulation, left = divmod(run.global_batch, micro * dp)
        if left or not accumulation:
            raise ConfigError(
                f"{run.global_batch} sequences do not share out over {dp} data-parallel ranks x {micro}",
                key="global_batch",
            )
        found["accumulation"] = accumulation
    return found
