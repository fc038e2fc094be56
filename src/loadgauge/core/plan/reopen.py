"""The same plan for a job of another size or kind, with its axes as open as the user leaves them."""

import msgspec

from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.plan.search import Case
from loadgauge.core.plan.space.axis_values import space_for


def reopen(
    case: Case,
    *,
    gpus: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    training: Training | None = None,
) -> Case:
    """Return the case with another size or training; additional GPUs are of the same kind and have the same links.

    >>> from loadgauge import cluster, gpu, model, training
    >>> kind, locks = training("megatron"), {"tp": (2,)}
    >>> space = space_for(model("llama-3.1-8b"), kind, 8, 8, 4096, locks=locks)
    >>> small = Case(space=space, training=kind, cluster=cluster(gpu("h100-sxm5-80gb"), 8), locks=locks)
    >>> large = reopen(small, gpus=16, global_batch=32)
    >>> large.space.tp, large.space.pp, large.space.micro_batch, large.cluster.gpus
    ((2,), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), 16)
    """
    space, kind = case.space, training or case.training
    machines = case.cluster if gpus in (None, space.gpus) else _resize(case.cluster, gpus or 1)
    sizes = {name: value for name, value in (("global_batch", global_batch), ("seq_len", seq_len)) if value is not None}
    if case.locks is None and gpus is None:
        return msgspec.structs.replace(case, space=msgspec.structs.replace(space, **sizes), training=kind)
    space = space_for(
        space.model,
        kind,
        machines.gpus,
        global_batch or space.global_batch,
        seq_len or space.seq_len,
        locks=case.locks,
        stage_layers=space.stage_layers,
        lengths=space.lengths,
        padded=space.padded,
        base=space.base,
    )
    return msgspec.structs.replace(case, space=space, training=kind, cluster=machines)


def _resize(old: Cluster, gpus: int) -> Cluster:
    """Another number of GPUs of the same kind, with the same links."""
    if old.topology is not None:
        return cluster(old.gpu, gpus, topology=old.topology)
    inner = old.links[0].bandwidth if old.links[0].domain > 1 else None
    outer = old.links[-1].bandwidth if len(old.links) > 1 else None
    usual = old.gpus_per_node if old.gpus > old.gpus_per_node else None
    return cluster(old.gpu, gpus, usual if usual and gpus % usual == 0 else None, inner, outer)
