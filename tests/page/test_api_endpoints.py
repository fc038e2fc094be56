"""Every other question of the page: each answer is that of the command that asks the same."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import pickle
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import document, typed
from loadgauge.job_files.dialects import OF_TEXT
from loadgauge.job_files.exchange import read
from loadgauge.page.panels import validation
from loadgauge.page.server.errors import Failed, Refused, Replaced
from loadgauge.page.server.worker_pool import Pool, Worker
from serving import LLAMA, SMALL, TOKEN, Served, serving

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 1.15 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated"
    " memory 70.00 GiB is allocated by PyTorch, and 7.50 GiB is reserved by PyTorch but unallocated."
)
PLANNED = {name: LLAMA[name] for name in ("model", "gpu", "gpus", "seq-len", "global-batch")} | {"tp": "8"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


# -- changes and other links -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [LLAMA, {**LLAMA, "tp": "1", "pp": "1", "sequence-parallel": "", "zero": "0"}])
def test_each_change_is_really_estimated(served: Served, state: dict[str, Any]) -> None:
    before = served.answer("/api/estimate", flags=state, want=[])["estimate"]
    rows = served.answer("/api/changes", flags=state)["rows"]
    assert len(rows) >= 5
    assert len({json.dumps(row["flags"], sort_keys=True) for row in rows}) == len(rows)
    for row in rows:
        after = served.answer("/api/estimate", flags={**state, **row["flags"]}, want=[])["estimate"]
        assert row["memory"] == after["memory"]["total"]
        assert row["memory_delta"] == after["memory"]["total"] - before["memory"]["total"]
        assert row["step"] == after["time"]["step"]
        assert row["fits"] == after["memory"]["fits"]
        if after["time"]["tokens_per_step"] == before["time"]["tokens_per_step"]:
            assert row["step_delta"] == pytest.approx(after["time"]["step"] - before["time"]["step"], abs=1e-9)
    if before["memory"]["fits"] is False:
        fits = [row["fits"] for row in rows]
        assert fits == sorted(fits, reverse=True)
        assert any(fits)


def test_what_if_is_the_command_with_other_adapters(served: Served) -> None:
    found = served.answer("/api/what_if", flags=LLAMA, nic=25e9)
    flags = served.answer("/api/estimate", flags={**LLAMA, "nic-bandwidth": "25GB/s"}, want=["network"])
    assert found["step"] == pytest.approx(flags["estimate"]["time"]["step"])
    assert found["rows"] == flags["panels"]["network"]
    here = served.answer("/api/estimate", flags=LLAMA, want=[])["estimate"]["time"]["step"]
    assert found["step_delta"] == pytest.approx(found["step"] - here)
    for nic in (0, -1):
        assert served.ask("/api/what_if", flags=LLAMA, nic=nic).status_code == 422
    assert served.ask("/api/what_if", flags={"model": "gpt2"}, nic=1e9).status_code == 422


# -- after pre-training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            {"task": "grpo", "samples": "4", "answers": "exp:500,2048", "rollout": "vllm:tp=8", "prompts": "16"},
            "--task grpo --samples 4 --prompts 16 --answers exp:500,2048 --rollout vllm:tp=8",
        ),
        ({"task": "dpo", "samples": "4"}, "--task dpo --seq-len 4096"),
    ],
)
def test_post_training_is_that_of_the_command(served: Served, asked: dict[str, str], line: str) -> None:
    found = served.answer("/api/posttrain", flags={**LLAMA, "tokens": "1T", "price": "2"}, asked=asked)
    layout = (
        "--gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 2 --sequence-parallel --zero 1 --micro-batch 1 --global-batch 64"
    )
    same = document(f"estimate llama-3.1-70b {layout} {line}")
    assert document(found["command"].removeprefix("loadgauge ")) == same
    del same["schema"]
    assert {name: found[name] for name in same} == same
    rolls = ["seq-len"] if asked["task"] == "grpo" else []
    assert set(found["left_out"]) == {"tokens", "price", *rolls}
    if rolls:
        seen = found["histogram"]
        assert sum(seen["shares"]) == pytest.approx(1)
        # exp(500): 1 - e^-1 are below 512 / 1.024, and what is left at 2,048 is e^-4.096
        upto = [seen["shortest"] * 2 ** (place / seen["octave"]) for place in range(len(seen["shares"]))]
        assert sum(share for low, share in zip(upto, seen["shares"], strict=True) if low < 512) == pytest.approx(
            1 - math.exp(-511 / 500), abs=2e-3
        )
        assert seen["shares"][upto.index(2048.0)] == pytest.approx(math.exp(-2047 / 500), abs=2e-3)


def test_a_number_of_the_fleet_is_explained(served: Served) -> None:
    flags = {**LLAMA, "gpus": "4096", "global-batch": "2048", "tokens": "5T"}
    whole = served.answer("/api/fleet", flags=flags)
    assert sum(count for count, _ in whole["columns"]) == len(whole["events"]) or not whole["columns"]
    days = served.answer("/api/fleet", flags=flags, why="days")
    assert days["value"] == whole["days"]["p50"]
    goodput = served.answer("/api/fleet", flags=flags, why="goodput")
    assert goodput["value"] == whole["goodput"]["p50"]
    assert sum(step["value"] for step in goodput["steps"]) == pytest.approx(1)
    assert "daly2006" not in {source["text"] for source in goodput["sources"]}
    assert served.ask("/api/fleet", flags=flags, why="x").status_code == 422


def test_post_training_reads_no_file(served: Served, tmp_path: Any) -> None:
    kept = tmp_path / "config.json"
    kept.write_text("{}")
    for name in ("teacher", "reward-model", "critic", "answers"):
        task = "gkd" if name == "teacher" else "ppo"
        refused = served.ask("/api/posttrain", flags=LLAMA, asked={"task": task, name: str(kept)})
        assert refused.status_code == 422
        assert "cannot be named here" in refused.json()["error"]
    assert served.ask("/api/posttrain", flags=LLAMA, asked={"hub": "x"}).status_code == 422


# -- plans -------------------------------------------------------------------------------------------------------------


def test_the_plan_is_that_of_the_command(served: Served) -> None:
    found = served.answer("/api/plan", flags=PLANNED, locks=["tp"])
    words = " ".join(f"--{key}={value}" for key, value in PLANNED.items() if key != "model")
    told = document(f"plan {PLANNED['model']} {words} --top 10")
    assert [found["evaluated"], found["valid"], found["fitting"]] == [told["evaluated"], told["valid"], told["fitting"]]
    columns = found["columns"]
    best = [dict(zip(columns, found["points"][index], strict=True)) for index in found["best"]]
    front = [dict(zip(columns, found["points"][index], strict=True)) for index in found["pareto"]]
    for mine, theirs in ((best, told["layouts"]), (front, told["pareto"])):
        assert [point["step"] for point in mine] == [layout["time"]["step"] for layout in theirs]
        assert [point["memory"] for point in mine] == [layout["memory"]["total"] for layout in theirs]
        assert [point["mfu"] for point in mine] == pytest.approx([layout["time"]["mfu"] for layout in theirs])
    assert len(found["points"]) == found["sampled"] <= 4000
    assert all(dict(zip(columns, point, strict=True))["tp"] == 8 for point in found["points"])
    assert all(point[0] <= found["capacity"] for point in found["points"])
    assert len({tuple(map(str, point[3:])) for point in found["points"]}) == len(found["points"])


def loaded(found: Any, point: list[Any]) -> dict[str, str]:
    """The flags of a point, as the page sets them."""
    row = dict(zip(found["columns"], point, strict=True))
    state = {name: str(row[name]) for name in ("tp", "pp", "cp", "ep", "etp", "zero", "replicas", "recompute")}
    state |= {"micro-batch": str(row["micro_batch"]), "sequence-parallel": str(row["sequence_parallel"]).lower()}
    state |= {
        "vpp": str(row["vpp"]) if row["vpp"] > 1 else "",
        "schedule": row["schedule"],
        "stage-layers": row["stage_layers"],
    }
    state |= {name: "" for name in ("ep", "replicas") if state[name] == "1"}
    return {**state, **found["apply"]}


@pytest.mark.long
def test_every_point_of_the_plan_can_be_loaded(served: Served) -> None:
    """Its estimate says what the point says, which the array reading of the search has found."""
    found = served.answer("/api/plan", flags=PLANNED, locks=[])
    points = found["points"]
    # A flag that is not locked does not hold its axis.
    assert len({point[found["columns"].index("tp")] for point in points}) > 1
    for point in [points[0], points[-1], *points[:: max(1, len(points) // 25)]]:
        told = served.answer("/api/estimate", flags={**PLANNED, **loaded(found, point)}, want=[])["estimate"]
        assert point[0] == pytest.approx(told["memory"]["total"], rel=1e-9), point
        assert point[2] == pytest.approx(told["time"]["step"], rel=1e-9), point
        assert point[1] == pytest.approx(told["time"]["mfu"], rel=1e-9), point
    # The front is one: less memory only for more time.
    front = sorted((points[index][2], points[index][0]) for index in found["pareto"])
    assert all(later[1] < sooner[1] for sooner, later in itertools.pairwise(front))
    for point in points:
        assert any(step <= point[2] * (1 + 1e-9) and memory <= point[0] * (1 + 1e-9) for step, memory in front)


@pytest.mark.long
def test_a_point_of_a_plan_without_a_global_batch_can_be_loaded(served: Served) -> None:
    """The batch that the plan took for granted is loaded too: fewer data-parallel ranks would mean another one."""
    state = {name: value for name, value in PLANNED.items() if name not in ("global-batch", "tp")}
    found = served.answer("/api/plan", flags=state, locks=[])
    points = [found["points"][index] for index in found["best"]]
    assert len({point[found["columns"].index("dp")] for point in points}) > 1
    for point in points:
        told = served.answer("/api/estimate", flags={**state, **loaded(found, point)}, want=[])["estimate"]
        assert (point[0], point[2]) == (told["memory"]["total"], told["time"]["step"])


@pytest.mark.long
def test_where_nothing_fits_the_nearest_is_told(served: Served) -> None:
    state = {"model": "llama-3.1-70b", "gpu": "rtx4090", "gpus": "4", "global-batch": "4", "seq-len": "4096"}
    found = served.answer("/api/plan", flags=state, locks=[])
    told = document(f"plan {' '.join([state['model'], *(f'--{k}={v}' for k, v in state.items() if k != 'model')])}")
    assert found["points"] == []
    assert found["nearest_miss"]["missing"] == told["missing"]
    assert found["nearest_miss"]["point"][0] == told["nearest"]["memory"]["total"]
    assert "no layout" in found["error"]


def test_what_a_plan_cannot_be_is_said(served: Served) -> None:
    for state, word in (({"model": "gpt2"}, "gpu"), ({**PLANNED, "tp": "7"}, "no layout can exist"), ({}, "model")):
        answer = served.ask("/api/plan", flags=state, locks=["tp"])
        assert answer.status_code == 422
        assert word in answer.json()["error"]


def test_an_upload_can_be_planned(served: Served) -> None:
    text = json.dumps({"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024,
                       "num_attention_heads": 8, "vocab_size": 1000})  # fmt: skip
    key = served.answer("/api/drop", name="config.json", text=text)["flags"]["model"]
    found = served.answer("/api/plan", flags={**SMALL, "model": key}, locks=["pp"])
    told = served.answer("/api/estimate", flags={**SMALL, "model": key, **loaded(found, found["points"][0])}, want=[])
    assert found["points"][0][0] == told["estimate"]["memory"]["total"]


def test_a_newer_plan_of_a_page_replaces_the_older_one(served: Served) -> None:
    """While one is worked out, estimates are answered; the older question learns that it was taken back."""
    large = {
        "model": "deepseek-v3",
        "gpu": "h100-sxm5-80gb",
        "gpus": "2048",
        "global-batch": "15360",
        "seq-len": "4096",
    }
    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(served.ask, "/api/plan", flags=large, locks=[], page="mine")
        time.sleep(0.3)
        assert served.answer("/api/estimate", flags=SMALL, want=[])
        assert not older.done()
        newer = served.ask("/api/plan", flags=SMALL, locks=["pp"], page="mine")
        assert newer.status_code == 200
        assert older.result().status_code == 409
        assert older.result().json()["kind"] == "Replaced"


# -- files -------------------------------------------------------------------------------------------------------------


def test_an_error_s_text_is_read(served: Served) -> None:
    for path in ("/api/drop", "/api/why"):
        found = served.answer(path, name="log.txt", text=f"step 3\n{OOM}\nbye")
        assert (found["kind"], found["why"]["cause"]) == ("oom", "fragmentation")
        assert found["why"]["tried"] == 2 * 2**30
        assert "expandable_segments" in found["why"]["remedies"][0]


TRACEBACK = (
    "(WorkerDict pid=7) Traceback (most recent call last):\n"
    '(WorkerDict pid=7)   File "/v/site-packages/transformers/models/qwen3.py", line 90, in forward\n'
    "(WorkerDict pid=7)     logits = logits.float()\n"
    "(WorkerDict pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 23.64"
    " GiB of which 0.80 GiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 0.30 GiB is reserved by PyTorch"
    " but unallocated."
)


def plain(words: list[str]) -> Any:
    """What a command prints as JSON, without the version of its shape."""
    found = json.loads(typed([*words, "--json"]).out)
    del found["schema"]
    return found


@pytest.mark.parametrize("text", [TRACEBACK, "Killed", "CUDA Error: out of memory at /w/cumem_allocator.cpp:62"])
def test_an_error_has_the_command_s_whole_answer(served: Served, text: str) -> None:
    """Cause, place and remedies; and the changes of the page's run are those that the command estimates."""
    flags = {"model": "qwen3-8b", "gpu": "4090", "lora-rank": "16", "seq-len": "4096", "micro-batch": "2"}
    found, printed = (
        served.answer("/api/drop", name="error.txt", text=text),
        plain(["why", text]),
    )
    assert found["why"] == printed
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    yours, run = (
        served.answer("/api/fitting", flags=flags, text=text),
        plain(["why", text, *words]),
    )
    assert yours["changes"] == run["changes"]
    assert run["changes"]
    assert yours["size"] == run.get("place", {}).get("same_size", "")
    assert (yours["micro_batch"], yours["seq_len"]) == (2, 4096)
    assert served.ask("/api/fitting", flags=flags, text="all is well").status_code == 422


def test_a_snapshot_is_read(served: Served) -> None:
    frame = {"name": "forward", "filename": "model.py", "line": 3}
    blocks = [{"address": 0, "size": 100, "state": "active_allocated", "frames": [frame]},
              {"address": 100, "size": 50, "state": "inactive"}]  # fmt: skip
    content = {"segments": [{"device": 0, "address": 0, "total_size": 150, "blocks": blocks}], "device_traces": [[]]}
    for protocol in (2, 5):
        found = served.client.post("/api/snapshot", content=pickle.dumps(content, protocol=protocol)).json()
        assert found["kind"] == "snapshot"
        assert [found["why"][name] for name in ("peak", "allocated", "idle")] == [100, 100, 50]
        assert found["why"]["holders"][0]["where"] == "forward (model.py:3)"
    empty = served.client.post("/api/snapshot?device=x", content=b"")
    assert empty.status_code == 400


JOBS = {
    "megatron": "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --tensor-model-parallel-size 4"
                " --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 256 --seq-length 4096"
                " --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --bf16"
                " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
                " --untie-embeddings-and-output-weights --max-position-embeddings 4096 --padded-vocab-size 32000"
                " --lr 1e-4",
    "axolotl": "base_model: NousResearch/Meta-Llama-3.1-8B\nsequence_len: 4096\nmicro_batch_size: 2\n"
               "gradient_accumulation_steps: 4\nadapter: lora\nlora_r: 16\nbf16: true\nflash_attention: true\n",
    "torchtitan": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
                  "[parallelism]\ntensor_parallel_degree = 2\n",
}  # fmt: skip
NAMES = {"megatron": "run.sh", "axolotl": "job.yaml", "torchtitan": "train.toml"}


@pytest.mark.parametrize("dialect", JOBS)
def test_a_job_file_becomes_flags(served: Served, dialect: str) -> None:
    found = served.answer("/api/drop", name=NAMES[dialect], text=JOBS[dialect])
    run = read(JOBS[dialect], file=NAMES[dialect])
    assert (found["kind"], found["dialect"]) == ("job", run.dialect) == ("job", dialect)
    for name in ("tp", "pp", "micro_batch", "seq_len", "lora_rank"):
        value = getattr(run.job, name)
        assert found["flags"].get(name.replace("_", "-")) == (None if value is None else str(value))
    assert found["unread"] == list(run.unread)
    for key in run.unread:
        assert key in found["message"]
    if "model" in found["flags"]:
        answer = served.answer("/api/estimate", flags={"gpu": "h100-sxm5-80gb", **found["flags"]}, want=[])
        assert answer["estimate"]["layout"]["micro_batch"] == run.job.micro_batch


@pytest.mark.parametrize("card", ["", "--gpus 8", "--gpu a100-sxm4-80gb --gpus 16"])
def test_a_job_file_is_read_with_the_card_that_was_chosen(served: Served, card: str, tmp_path: Path) -> None:
    """As by the command: the number of GPUs goes before what the file says, and without a GPU its nodes say nothing."""
    model, file = "llama-3.1-8b", tmp_path / "job.yaml"
    text = f"{JOBS['axolotl']}deepspeed: null\n".replace("NousResearch/Meta-Llama-3.1-8B", "NousResearch/Llama-3.1-8B")
    file.write_text(text)
    words = card.split()
    chosen = dict(zip([word.removeprefix("--") for word in words[::2]], words[1::2], strict=True))
    found = served.answer("/api/drop", name=file.name, text=text, flags=chosen)
    answer = served.answer("/api/estimate", flags={**chosen, **found["flags"], "gpus-per-node": "8"}, want=[])[
        "estimate"
    ]
    want = document(f"estimate {file} {card} {'--gpus-per-node 8' if '--gpu ' in card else ''}")
    assert found["flags"]["model"] == model
    assert answer["layout"] == want["layout"]
    assert answer["memory"]["total"] == want["memory"]["total"]
    assert answer["layout"]["global_batch"] == 2 * 4 * int(chosen.get("gpus", 1))


@pytest.mark.parametrize("dialect", [*OF_TEXT, "flags"])
def test_a_run_is_exported_as_by_the_library(served: Served, dialect: str) -> None:
    found = served.answer("/api/export", flags=SMALL, dialect=dialect)
    if dialect == "flags":
        command = served.answer("/api/estimate", flags=SMALL, want=[])["command"]
        assert found["text"].strip() == command
        return
    from loadgauge.job_files.export import export
    from loadgauge.page.inputs.flags import job_of
    from loadgauge.page.inputs.uploads import Uploads

    kept = Uploads()
    written = export(job_of(SMALL, kept), dialect)
    kept.close()
    assert (found["text"], found["not_expressed"]) == (written.text, list(written.left_out))
    back = read(found["text"], dialect, file=found["filename"])
    assert back.job.micro_batch in (None, 1)


def test_an_unknown_dialect_is_said(served: Served) -> None:
    answer = served.ask("/api/export", flags=SMALL, dialect="word")
    assert answer.status_code == 422
    assert "megatron" in answer.json()["error"]


# -- predicted against measured ----------------------------------------------------------------------------------------


def test_validation_comes_piece_by_piece(served: Served) -> None:
    from loadgauge.evidence.validate.validate import validate

    first = served.client.get("/api/validation").json()
    assert 0 < first["done"] < first["of"]
    second = served.client.get("/api/validation", params={"since": len(first["rows"])}).json()
    assert second["done"] > first["done"]
    assert second["since"] == len(first["rows"])
    rows = [*first["rows"], *second["rows"]]
    told = [
        record.to_dict() | validation.about(record.id)
        for run in validation.order()[: second["done"]]
        for record in validate([run])
    ]
    assert rows == json.loads(msgspec.json.encode(told))
    # A row opens to what ran, where it is written and, where it is far off, why.
    row = first["rows"][0]
    assert row["link"].startswith("https://")
    assert row["link"].split("/")[2] in ("github.com", "arxiv.org")
    assert row["name"] in row["where"]
    assert "--gpus" in row["flags"]
    far = validation.about("T-BS-063")
    assert "no multiple of 8" in str(far["cause"])
    assert 0.7 < first["left_out"]["covered"] < 0.95
    assert len({run.id for run in validation.order()}) == first["of"]
    assert second["summary"]["time"]["all"]["rows"] == sum(row["quantity"] == "time" for row in rows)
    # The first rows are of many sources.
    assert len({run.source for run in validation.order()[:20]}) > 5
    assert served.client.get("/api/validation?since=x").status_code == 400


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_takes_too_long_is_ended() -> None:
    async def check() -> None:
        worker = Worker(600)
        assert json.loads(bytes(await worker.ask("text", "", name="x.txt", text=OOM)))["kind"] == "oom"
        process = worker.process
        assert process is not None
        worker.seconds = 0.2
        with pytest.raises(TimeoutError):
            await worker.ask("plan", "", flags=PLANNED, locks=[], uploads={})
        await process.wait()
        assert process.returncode == -9
        # The next question has a process of its own, and its own answer.
        worker.seconds = 600
        assert json.loads(bytes(await worker.ask("text", "", name="x.txt", text=OOM)))["kind"] == "oom"
        await worker.close()

    asyncio.run(check())


async def stopped(worker: Worker, killed: int = 0) -> int:
    """Stops the process of a worker as soon as it has a question, long before it can answer it; its number.

    killed: the number of one before it
    """
    while not worker.handed or worker.process is None or worker.process.pid == killed:
        await asyncio.sleep(0)
    os.kill(worker.process.pid, signal.SIGSTOP)
    return worker.process.pid


def ended_by(pid: int, how: signal.Signals) -> None:
    os.kill(pid, how)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def told(worker: Worker) -> str:
    """The kind of an answer."""
    return str(json.loads(bytes(await worker.ask("text", "", name="x.txt", text=OOM)))["kind"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_costs_no_question(how: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        worker = Worker(60)
        question = asyncio.create_task(told(worker))
        ended_by(await stopped(worker), how)
        assert await question == "oom"
        await worker.close()

    asyncio.run(check())
    assert "Unknown child process" not in caplog.text


def test_a_worker_killed_while_it_is_idle_or_begins_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        worker = Worker(60)
        assert await told(worker) == "oom"
        assert worker.process is not None
        before = worker.process
        os.kill(before.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # asyncio's own thread may have been first.
            os.waitid(os.P_PID, before.pid, os.WEXITED | os.WNOWAIT)
        question = asyncio.create_task(told(worker))
        while worker.process is None or worker.process is before:
            await asyncio.sleep(0)
        os.kill(worker.process.pid, signal.SIGKILL)  # as it begins
        ended_by(await stopped(worker), signal.SIGKILL)  # and with the question in hand
        assert await question == "oom"
        await worker.close()

    asyncio.run(check())
    assert "Unknown child process" not in caplog.text


@pytest.mark.parametrize("how", [(signal.SIGKILL, signal.SIGKILL), (signal.SIGSEGV,)])
def test_a_question_that_kills_workers_is_given_up(how: tuple[signal.Signals, ...]) -> None:
    async def check() -> None:
        worker, killed = Worker(60), 0
        question = asyncio.create_task(told(worker))
        for each in how:
            killed = await stopped(worker, killed)
            ended_by(killed, each)
        with pytest.raises(Refused, match="broke off"):
            await question
        with pytest.raises(Failed, match="cannot be read"):
            await worker.ask("text", "", name="x.txt", text="CUDA out of memory. Tried to allocate nothing")
        await worker.close()

    asyncio.run(check())


def test_nothing_begins_again_as_the_server_closes() -> None:
    async def check() -> None:
        worker = Worker(60)
        question = asyncio.create_task(told(worker))
        await stopped(worker)
        await worker.close()
        with pytest.raises(Refused, match="broke off"):
            await question
        assert worker.process is None

    asyncio.run(check())


def test_a_file_that_takes_long_holds_up_no_other() -> None:
    async def check() -> None:
        readers = Pool(2, 60)
        slow = asyncio.create_task(readers.ask("text", "", name="x.txt", text=OOM))
        pid = await stopped(readers.workers[0])
        for _ in range(3):
            assert json.loads(bytes(await readers.ask("text", "", name="x.txt", text=OOM)))["kind"] == "oom"
        assert not slow.done()
        os.kill(pid, signal.SIGCONT)
        assert json.loads(bytes(await slow))["kind"] == "oom"
        await readers.close()

    asyncio.run(check())


def test_questions_of_other_pages_wait_in_line() -> None:
    async def check() -> None:
        worker = Worker(600)
        asked = [worker.ask("text", f"page {n}", name="x.txt", text=OOM) for n in range(5)]
        answers = await asyncio.gather(*asked)
        assert {json.loads(bytes(answer))["kind"] for answer in answers} == {"oom"}
        again = [worker.ask("text", "one page", name="x.txt", text=OOM) for _ in range(5)]
        outcomes = await asyncio.gather(*again, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[:-1]] == [Replaced] * 4
        assert json.loads(bytes(outcomes[-1]))["kind"] == "oom"
        assert not worker.newest
        await worker.close()

    asyncio.run(check())


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_serves_until_it_is_interrupted() -> None:
    import subprocess
    import sys
    from pathlib import Path

    import httpx

    import loadgauge

    home = str(Path(loadgauge.__file__).parents[1])
    words = [sys.executable, "-m", "loadgauge", "serve", "--port", "0", "--no-browser"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": home}
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("loadgauge: ").strip()
        try:
            assert url.startswith("http://127.0.0.1:")
            token = url.rpartition("=")[2]
            assert len(token) >= 43
            assert token != TOKEN
            page = httpx.get(url, timeout=600)
            assert page.status_code == 200
            assert token in page.text
            port = httpx.URL(url).port
            taken = typed(f"serve --port {port} --no-browser")
            assert taken.code == 2
            assert taken.err.count("\n") == 1
            assert f"{port} cannot be used" in taken.err
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgauge.core.base.optional_deps.find_spec", lambda name: None)
    found = typed("serve --no-browser")
    assert found.code == 2
    assert "pip install 'loadgauge[web]'" in found.err
