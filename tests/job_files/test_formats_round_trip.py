"""What a dialect can say comes back from its file as it went in, and a file that says it already is left alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from job_runs import CAN, LAUNCHED, SUFFIXES, SYNTAXES, runs
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.dialects import FILES
from loadgauge.job_files.exchange import read, write
from loadgauge.job_files.ideas.facts import FIELDS, Fact, facts_of, plainer, solve

PLAIN: dict[str, Any] = {
    "lora_rank": 0, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "zero": 0, "replicas": 1, "sequence_parallel": False,
    "recompute": "none", "loss": "auto", "offload": "none", "offload_to": "cpu",
    "activation_offload": "none", "pin_memory": True, "qlora": False, "attention": "flash", "micro_batch": 1,
    "kernels": "native", "eval_batches": 0, "save": "sharded",
    "optimizer": "adamw", "precision": "bf16", "order": "tp,cp,ep,dp,pp", "overlap": "cp,pp,prefetch",
}  # fmt: skip
"""What a run is that says nothing of it."""
FEWER = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(asked: Job, found: Job) -> dict[str, tuple[Any, Any]]:
    """Fields in which two runs are not the same."""
    pairs = {name: (getattr(asked, name), getattr(found, name)) for name in FIELDS}
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] and (pair[0] or PLAIN.get(name)) != (pair[1] or PLAIN.get(name))
    }


def differs(asked: Job, text: str, name: str, syntax: str) -> dict[str, tuple[Any, Any]]:
    beside = {"gpus": asked.gpus} if (name, syntax) in LAUNCHED else {}
    file = f"job.{SUFFIXES.get(syntax, syntax)}"
    found = read(text, name, file=file, given=beside).job
    pairs = same(asked, found)
    if plainer({"precision": found.precision})["precision"] == asked.precision:
        pairs.pop("precision", None)  # the tool's own recipe of it, which reduces in float32
    if "gpus_per_node" not in CAN[name] or asked.gpus_per_node is None:
        pairs.pop("gpus_per_node", None)
    for name_of in (
        "model",
        "attention",
        "seq_len",
        "loss",
        "precision",
        "weights",
        "optimizer",
        "recompute",
        "schedule",
        "micro_batch",
        "lora_dropout",
        "lora_dtype",
        "kbit_upcast",
        "kernels",
        "activation_offload",
        "eval_batch",
        "eval_batches",
        "save",
        "gradient_sync",
        "overlap",  # NeMo-RL's own recipes have it
        "tower",  # which Qwen-VL-Finetune trains unless told otherwise
    ):
        # Of what the run does not say, the file has the tool's own default.
        if getattr(asked, name_of) in (None, ""):
            pairs.pop(name_of, None)
    if asked.global_batch is None:
        pairs.pop("global_batch", None)
    return pairs


READ = {"areal", "primus", "olmo-core", "xtuner", "diffusers", "finetrainers", "musubi-tuner", "simpletuner"}
"""Dialects that are written in part only: an export lists what it leaves out."""


def test_every_dialect_is_tried() -> None:
    assert {name for name, _ in SYNTAXES} == set(FILES) - READ == set(CAN)


@pytest.mark.parametrize(("name", "syntax"), SYNTAXES)
@FEWER
@given(data=st.data())
def test_import_of_export(name: str, syntax: str, data: st.DataObject) -> None:
    """The file says the run; one that says it already stays as it is; one of another run is patched to say it."""
    asked, other = data.draw(runs(name, syntax)), data.draw(runs(name, syntax))
    for run in (asked, other):
        written = write(run, name, syntax=syntax)
        assert differs(run, written.text, name, syntax) == {}
        rest = [line for line in written.left_out if not line.startswith("--gpus")]
        assert rest == []
        assert write(run, name, written.text, syntax=syntax).text == written.text
    patched = write(asked, name, written.text, syntax=syntax)
    assert differs(asked, patched.text, name, syntax) == {}


@pytest.mark.parametrize(("name", "syntax"), SYNTAXES)
def test_a_new_file_is_recognised(name: str, syntax: str) -> None:
    """However little it says."""
    few = [Job(model="")] + [
        Job(**{"model": "", "gpus": 64, field: values[-1]})
        for field, values in CAN[name].items()
        if isinstance(values, tuple)
        and values[-1] is not None
        and field not in ("tp", "pp", "cp", "replicas", "gpus_per_node", "qlora", "base", "offload")
    ]
    for run in few:
        text = write(run, name, syntax=syntax).text
        assert read(text, file=f"job.{SUFFIXES.get(syntax, syntax)}").dialect == name, text


@FEWER
@given(
    tp=st.sampled_from((1, 2, 8)), pp=st.sampled_from((1, 4)), cp=st.sampled_from((1, 2)), replicas=st.sampled_from((1, 2)),
    shards=st.sampled_from((1, 3, 4)), micro=st.integers(1, 9), accumulation=st.integers(1, 9),
)  # fmt: skip
def test_facts_give_the_run_they_are_of(
    tp: int, pp: int, cp: int, replicas: int, shards: int, micro: int, accumulation: int
) -> None:
    dp = replicas * shards
    run = Job(
        model="", tp=tp, pp=pp, cp=cp, replicas=replicas, gpus=tp * pp * cp * dp, micro_batch=micro,
        global_batch=micro * accumulation * dp,
    )  # fmt: skip
    known = facts_of(run)
    assert (known["dp"], known["shards"], known["accumulation"]) == (dp, shards, accumulation)
    # Any set of facts that decides the run gives it.
    for left in (("gpus",), ("dp", "shards"), ("global_batch",), ("micro_batch",), ("accumulation",), ("gpus", "dp")):
        some = {name: Fact(value, name) for name, value in known.items() if name not in left}
        assert solve(some)[0] == run
