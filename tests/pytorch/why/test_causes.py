"""Eight faults that run out of memory in practice, traced from code that has them: each is named first."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import faults
from command_line import typed
from loadgauge.core.base.errors import NothingFits
from loadgauge.pytorch.record.caching_allocator import Allocator, replay
from loadgauge.pytorch.trace import subprocess
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import Recorded, record
from loadgauge.pytorch.why import remedies
from loadgauge.pytorch.why.diagnose import Parts, causes, of_snapshot, of_trace
from loadgauge.pytorch.why.remedies import Replay
from loadgauge.pytorch.why.viewer import snapshot

every_fault = pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda one: str(one.__name__))
Fault = Callable[[], None]


@functools.cache
def traced(fault: Fault) -> Recorded:
    gpus, rank = (8, 3) if fault is faults.in_one_piece else (None, 0)
    return record(FunctionJob(fault), "cuda", gpus=gpus, rank=rank, stacks=True)


def out_of_memory(fault: Fault, share: float) -> dict[str, object]:
    """The snapshot of a GPU that has so much of what is needed, when an allocation fails."""
    found = traced(fault)
    needed = replay(found.stream).result()
    # Gaps need no more than the buffers; what has them runs out where memory is reserved, not allocated.
    whole = needed.reserved if fault is faults.gaps else needed.allocated
    allocator = Allocator(limit=int(share * whole))
    with pytest.raises(NothingFits):
        replay(found.stream, allocator)
    return snapshot(found.stream, allocator)


@every_fault
@pytest.mark.parametrize("share", [0.7, 0.97])
def test_the_cause_is_named_first(fault: Fault, share: float) -> None:
    found = of_snapshot(out_of_memory(fault, share))
    assert found.causes[0].name == faults.FAULTS[fault], found
    assert found.causes[0].frees > 0


@pytest.mark.parametrize(
    "fault", [one for one in faults.FAULTS if one is not faults.gaps], ids=lambda one: one.__name__
)
def test_the_cause_is_named_first_by_a_trace(fault: Fault) -> None:
    """Gaps are the allocator's; all others show in a trace."""
    found = of_trace(traced(fault).trace)
    assert found.causes[0].name == faults.FAULTS[fault], found
    assert sum(found.parts.values()) == pytest.approx(traced(fault).trace.peak.total, abs=64)


@every_fault
def test_all_that_was_held_is_put_to_a_purpose(fault: Fault) -> None:
    content = out_of_memory(fault, 0.9)
    found = of_snapshot(content)
    events = content["device_traces"][0]  # type: ignore[index]
    live = sum({"alloc": 1, "free_completed": -1}.get(one["action"], 0) * one["size"] for one in events)
    failed = next(one["size"] for one in events if one["action"] == "oom")
    assert sum(found.parts.values()) == live + failed
    if fault is not faults.gaps:
        assert found.parts.get("other", 0) < 0.01 * live


@pytest.mark.parametrize("fault", [faults.all_kept, faults.large_vocabulary], ids=lambda f: f.__name__)
def test_a_memory_viewers_file(fault: Fault, tmp_path: Path) -> None:
    """The command reads what it would read of a real run, and the lines of the program are there."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(out_of_memory(fault, 0.9)))
    said = typed(["why", str(path)])
    assert said.code == 0, said.err
    assert said.out.startswith(f"CAUSE  {faults.FAULTS[fault]}\n")
    assert "faults.py:" in said.out
    document = json.loads(typed(["why", str(path), "--json"]).out)
    assert document["causes"][0]["name"] == faults.FAULTS[fault]


def test_the_same_without_stacks() -> None:
    """A snapshot that a trace wrote without stacks has categories instead."""
    stream = copy.copy(traced(faults.wide_moments).stream)
    stream.stacks = {}
    allocator = Allocator(limit=int(0.97 * replay(stream).result().allocated))
    with pytest.raises(NothingFits):
        replay(stream, allocator)
    assert of_snapshot(snapshot(stream, allocator)).causes[0].name == "optimizer states"


@pytest.mark.long
def test_a_healthy_run_has_no_fault_of_the_program() -> None:
    """Training that just needs more than there is: nothing is called a leak, an evaluation or a gap."""
    for fault in (faults.all_kept, faults.too_long, faults.large_vocabulary, faults.wide_moments):
        for share in (0.5, 0.8):
            found = of_snapshot(out_of_memory(fault, share))
            wrong = {
                "graphs of earlier steps are kept",
                "evaluation without torch.no_grad",
                "weights gathered unsharded",
            }
            assert not wrong & {one.name for one in found.causes}


def test_remedies_free_no_more_than_is_held() -> None:
    parts = Parts(weights=7, gradients=5, optimizer=30, loss=11, scores=3, working=2, older=9, gathered=8, gathers=3)
    parts.kept.update({("a",): 20, ("b",): 20, ("c",): 1})
    for one in causes(parts):
        assert 0 < one.frees <= one.nbytes
    kept = next(one for one in causes(parts) if "without checkpointing" in one.name)
    assert kept.frees == 41 - 41 // 2  # of two tensors of a layer one stays; what is small does not count


def test_changes_are_estimated(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(traced(faults.large_vocabulary).trace))
    flags = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm5-80gb", "--gpus", "8", "--seq-len", "8192"]
    document = json.loads(typed(["why", str(path), *flags, "--json"]).out)
    assert document["causes"][0]["name"] == "logits and loss"
    assert document["changes"]
    for change in document["changes"]:
        again = json.loads(typed(["estimate", "llama-3.1-8b", *flags[2:], *change["flags"].split(), "--json"]).out)
        assert again["memory"]["total"] == pytest.approx(change["memory"]["total"])
        assert again["memory"]["verdict"] != "does not fit"
    assert "Estimated:" in typed(["why", str(path), *flags]).out


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"at_peak": 3}')
    assert "is no trace" in typed(["why", str(path)]).err
    assert "needs --model" in typed(["why", str(path), "--tp", "2"]).err
    assert "needs --gpu or --memory" in typed(["why", "CUDA error: out of memory", "--model", "gpt2"]).err


# -- remedies ----------------------------------------------------------------------------------------------------------


def leaves(fault: Fault, cause: str) -> int:
    """The peak with the remedy of a cause, replayed; of a GPU on which the fault fails at its very end."""
    found = of_snapshot(out_of_memory(fault, 0.97))
    return next(one.leaves or 0 for one in found.causes if one.name == cause)


def peak_of(mended: Fault) -> int:
    """The peak of the mended program."""
    return replay(record(FunctionJob(mended), "cuda").stream).result().allocated


def losses_not_kept() -> None:
    model, ids, losses = faults.made(), faults.ids_of(1024), []
    optimizer = faults.torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(12):
        loss = faults.compute_loss(model, ids)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def evaluated_without_graph() -> None:
    model = faults.made()
    faults.train(model, faults.ids_of(1024), 1)
    with faults.torch.no_grad():
        faults.evaluate(model, faults.ids_of(16384))


def half_as_long() -> None:
    faults.train(faults.made(checkpointed=True, layers=16), faults.ids_of(32_768))


def all_checkpointed() -> None:
    faults.train(faults.made(checkpointed=True), faults.ids_of(8192))


@pytest.mark.parametrize(
    ("fault", "mended", "tolerance"),
    [
        (faults.losses_kept, losses_not_kept, 0.1),
        (faults.too_long, half_as_long, 0.1),
        # What an operation of the evaluation needs while it runs is not told by what was held.
        (faults.after_training, evaluated_without_graph, 0.2),
        (faults.all_kept, all_checkpointed, 0.1),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.long
def test_a_replay_is_near_the_mended_program(fault: Fault, mended: Fault, tolerance: float) -> None:
    """What is predicted from the snapshot of a failure, against a trace of the program with the remedy in it."""
    predicted, true = leaves(fault, faults.FAULTS[fault]), peak_of(mended)
    assert abs(predicted / true - 1) <= tolerance


@every_fault
def test_the_first_remedy_serves_the_failing_request(fault: Fault) -> None:
    first = of_snapshot(out_of_memory(fault, 0.9)).causes[0]
    assert first.fits is True
    assert first.leaves is not None


def test_nothing_is_served_by_changing_nothing() -> None:
    """The replay fails where the run did."""
    content = out_of_memory(faults.all_kept, 0.9)
    again = Replay(content, 0, lambda block: "all", {})
    assert again.peak({})[1] is False
    assert again.peak({"all": 0.5})[1] is True


@pytest.mark.long
def test_a_model_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change has the peak that `trace` has with its flags typed."""
    settings = ["gpt2", "--layers", "2", "--seq-len", "64", "--attention", "eager"]
    said = typed(["trace", *settings, "--json"])
    path = tmp_path / "trace.json"
    path.write_text(said.out)
    with monkeypatch.context() as patched:  # one after another in this process: a process each takes seconds to start
        patched.setattr(remedies, "TOGETHER", 1)
        patched.setattr(subprocess, "in_child", lambda call, request: call(request))
        document = json.loads(typed(["why", str(path), "--json"]).out)
    assert document["retraced"]
    change = document["retraced"][0]
    again = json.loads(typed(["trace", *settings, *change["flags"].split(), "--json"]).out)
    assert again["allocated"] == change["peak"] < json.loads(said.out)["allocated"]
