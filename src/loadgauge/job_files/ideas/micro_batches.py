"""Micro-batches that a file says in tokens, or that are no whole parts of a rank's sequences."""

import math
from collections.abc import Mapping

from loadgauge.job_files.ideas.table import Keys


def fitted(keys: Keys, key: str, rows: float, own: int | None, length: int, remark: str, groups: int = 1) -> int:
    """Return the sequences of a micro-batch of `rows` sequences as long as the longest, and notes what is not counted so.

    Tools balance their micro-batches: of the numbers that divide a rank's sequences the one that is nearest counts.

    own: sequences of a rank in a step, None where they are not known; length: of the longest [tokens]; remark: what the key says;
    groups: micro-batches that an interleaved schedule takes at once
    """
    if own is None:
        micro = max(1, int(rows))
    else:
        whole = [rows_of_micro for rows_of_micro in range(1, own + 1) if own % (rows_of_micro * groups) == 0] or [1]
        micro = min(whole, key=lambda micro: abs(math.log(micro / min(rows, own))))
        rows = min(rows, own)
    effect, share = ("costs", rows / micro - 1) if micro < rows else ("saves", 1 - rows / micro)
    keys.note(
        key,
        f"{remark}, counted as {micro} sequences of {length}",
        effect,
        "activations loss transient",
        share,
        when=micro != rows,
    )
    return micro


def in_pieces(keys: Keys, key: str, whole: int | None, ranks: int, machines: Mapping[str, int]) -> None:
    """Notes that a step is several runs of the pipeline, where its schedule takes `key` sequences and a step more of them
    (sources: torch.distributed.pipelining of 2.13, `_PipelineSchedule.step`; torchtitan, `train.py`; AutoModel, `train_ft.py`).

    whole: sequences of a step, None where it is one run; ranks: GPUs of one copy of the model
    machines: nodes, and GPUs of each, where the file says them
    """
    local, gpus = keys.whole(key) or 1, math.prod(machines.values()) if machines else keys.given.get("gpus")
    keys.note(
        key,
        "the pipeline fills and drains for each so many sequences of a rank, where one run through a whole step is counted:"
        " it keeps fewer micro-batches, and takes longer",
        "saves",
        "activations",
        0.5,
        when=whole and whole > local * (1 if gpus is None else max(1, gpus // ranks)),
    )
