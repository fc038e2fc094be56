"""An answer is worked out once: how many models it makes, what its ledger adds up to, what it keeps."""

from __future__ import annotations

import copy
import pickle
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import pytest

import loadgauge
from loadgauge import Layout
from loadgauge.core.base.errors import Error
from loadgauge.core.command_line.main import run
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.time.step import StepModel
from loadgauge.core.families.catalogue import models
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import worst_routing
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.server.handlers import OfBlock, Question, WhatIf, estimate, explain, what_if

ONCE = {"MemoryModel": 1, "StepModel": 1}
JOB = "llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3"
STATE = {"model": "llama-3.1-8b", "gpu": "h100-sxm5-80gb", "gpus": "8", "zero": "3"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many models were made, by their class."""
    numbers: Counter[str] = Counter()
    for kind in (MemoryModel, StepModel):

        def counting(
            self: object, *given: object, kind: type = kind, init: Callable[..., None] = kind.__init__
        ) -> None:
            numbers[kind.__name__] += 1
            init(self, *given)

        monkeypatch.setattr(kind, "__init__", counting)
    return numbers


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    kept = Uploads()
    yield kept
    kept.close()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--json --tokens 1T --explain activations", ONCE),
        ("--explain gradients --at backward", ONCE),
        # Padded batches, and one in which every sequence is the longest, are other layouts; so are the `outcomes` of what is
        # not said, of which each widens the range of each of these; and another kernel of attention is tried.
        ("--lengths uniform:4096 --json", {"MemoryModel": 22, "StepModel": 9}),
    ],
)
def test_a_command_makes_one_model_of_memory_and_one_of_time(
    words: str, expected: dict[str, int], made: Counter[str]
) -> None:
    assert run(["estimate", *shlex.split(JOB), *words.split()]) == 0
    assert made == expected


def test_an_answer_of_the_page_makes_one_model_of_each(made: Counter[str], uploads: Uploads) -> None:
    answer = estimate(Question(flags=STATE), uploads)
    assert answer["panels"]["network"]
    assert made == ONCE
    made.clear()
    explain(OfBlock(flags=STATE, id="activations"), uploads)
    assert made == ONCE
    made.clear()
    what_if(WhatIf(flags=STATE, nic=1e10), uploads)
    assert made == {"MemoryModel": 1, "StepModel": 2}  # the other network has other times


def random_jobs(count: int) -> Iterator[Job]:
    draw = random.Random(5)
    while count:
        pp, tp = draw.choice((1, 2, 4)), draw.choice((1, 2))
        job = Job(
            model=draw.choice(sorted(models())), gpus=pp * tp * draw.choice((1, 4)), pp=pp, tp=tp,
            framework=draw.choice((None, "megatron", "torchtitan", "deepspeed")), zero=draw.choice((0, 1, 2, 3)),
            global_batch=draw.choice((16, 32)), seq_len=1024, recompute=draw.choice(("none", "selective", "full")),
            schedule=draw.choice((None, "zb-h1", "zb-v", "gpipe")) if pp > 1 else None, mtp=draw.random() < 0.2,
            offload=draw.choice((None, None, "optimizer", "all")), lora_rank=draw.choice((None, None, 8)),
        )  # fmt: skip
        try:
            resolve_job(job).estimate()
        except Error:
            continue
        count -= 1
        yield job


@pytest.mark.parametrize("job", random_jobs(25), ids=lambda job: f"{job.model} {job.flags()}"[:90])
def test_the_ledger_adds_up_at_every_phase(job: Job) -> None:
    result = resolve_job(job).estimate()
    memory = result.memory
    assert sum(entry.nbytes for entry in result.ledger) == pytest.approx(memory.total, rel=1e-9)
    for index, phase in enumerate(memory.moments):
        ledger = result.workings.ledger(index)
        for part in PARTS:
            total = sum(entry.nbytes for entry in ledger.entries(part))
            assert total == pytest.approx(phase.parts[part], rel=1e-9, abs=1e-9 * memory.total), (phase.name, part)
        tensors = sum(entry.nbytes for entry in ledger.tensors())
        assert tensors == pytest.approx(phase.parts["activations"], rel=1e-9, abs=1e-9 * memory.total)


def test_an_estimate_is_compared_copied_and_pickled_without_its_workings() -> None:
    layout = Layout(dp=8, zero=3, global_batch=8, seq_len=1024)
    first, second = (loadgauge.estimate("gpt2", layout, gpu="h100-sxm5-80gb") for _ in range(2))
    assert first.workings is first.workings is not second.workings
    assert first == second
    other = first.replace(assumed={"gpus": "8"})
    assert other.workings is first.workings
    assert other != first
    for copied in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        assert copied == first
        assert copied.ledger == first.ledger
        assert copied.explain("outside") == first.explain("outside")
    assert "workings" not in msgspec.to_builtins(first)
    assert "workings" not in first.to_dict()


MOE_JOBS = [
    Job(model="mixtral-8x7b", gpu="h100-sxm5-80gb", gpus=16, pp=2, ep=8, zero=1, global_batch=32, seq_len=2048),
    Job(
        model="deepseek-v3",
        gpu="h800-sxm5-80gb",
        gpus=61 * 8,
        pp=61,
        ep=8,
        mtp=True,
        seq_len=2048,
        global_batch=488,
        overlap="none",
    ),
    Job(model="qwen3-30b-a3b", gpu="h100-sxm5-80gb", gpus=16, ep=16, recompute="full", zero=1, seq_len=2048),
]


@pytest.mark.parametrize("job", MOE_JOBS, ids=lambda job: job.model)
def test_the_worst_routing_shares_all_but_the_experts_and_is_the_estimate_of_its_own_layout(
    job: Job, made: Counter[str]
) -> None:
    given = resolve_job(job)
    result = given.estimate()
    given = result.setup  # with sequence parallelism or recomputation, where only that fits
    made.clear()
    routed = worst_routing(given, result)
    assert routed is not None
    assert made["MemoryModel"] == 0
    alone = msgspec.structs.replace(given, layout=routed.layout, instead=None).estimate()
    assert routed == alone
    assert routed.memory.total > result.memory.total
    assert routed.ledger == alone.ledger


def test_what_does_not_change_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of equal views are made once; a fabric is itself alone."""
    from loadgauge.core.layers import block

    numbers: Counter[str] = Counter()
    make = block.block_layer
    monkeypatch.setattr(block, "block_layer", lambda *values: numbers.update(["block"]) or make(*values))
    runs = [
        resolve_job(
            Job("qwen3-8b", gpu="h100-sxm5-80gb", gpus=8, seq_len=1111, recompute="none", global_batch=batch)
        ).estimate()
        for batch in (8, 16)
    ]
    assert numbers["block"] == 2  # as a rank has it, and as one rank has all of it
    assert runs[0].timing.step < runs[1].timing.step
    fabric = runs[0].workings.fabric
    assert fabric is runs[0].workings.step.fabric
    assert len({fabric, copy.copy(fabric)}) == 2
