"""A model shared out by flags: what each rank of a pipeline holds and sends, what selective checkpointing makes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from command_line import typed
from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled
from loadgauge.pytorch.parallel.parallel import ParallelJob
from loadgauge.pytorch.record import tracker
from loadgauge.pytorch.trace.programs.jobs import ConfigJob
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.subprocess import DEFAULT_KEEP
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.trace import Trace, trace
from torch_runs import torch_run

S, H = 64, 64
HIDDEN = 4 * S * H
"""Bytes that go from stage to stage for one micro-batch."""
NUMBERS = 64
"""Bytes of single numbers, as the loss."""
KEYS: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": 176, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "num_hidden_layers": 8, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def llama() -> LlamaConfig:
    return LlamaConfig(**KEYS, architectures=["LlamaForCausalLM"])


def settings(rank: int = 0, keep: tuple[str, ...] = (), **fields: Any) -> TorchRun:
    return torch_run(rank, keep, optimizer="adamw-loop", precision="fp32", seq_len=S, **fields)


def played(size: int, rank: int = 0, accumulate: int = 1, config: Any = None, **shared: Any) -> Trace:
    dp = size // (shared.get("tp", 1) * shared.get("pp", 1))
    fields = {"zero": 3, "gpus": size, "global_batch": accumulate * dp, **shared}
    return trace(ParallelJob(config or llama(), settings(rank, **fields)), "cpu", gpus=size, rank=rank)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_1f1b_has_as_many_micro_batches_in_flight_as_stages_follow() -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: stage r of p has p - r in flight, whatever their number."""
    stages, batches = 4, 8
    peaks = [played(stages, rank, batches, pp=stages) for rank in (1, 2)]
    # Two stages of the same layers: the earlier has one micro-batch more.
    one = peaks[0].saved_nbytes
    assert peaks[0].peak.total - peaks[1].peak.total == pytest.approx(one, abs=NUMBERS)
    more = played(stages, 1, batches + 1, pp=stages)
    # PyTorch makes room for what is received for every micro-batch beforehand, in both directions.
    assert more.peak.total - peaks[0].peak.total == pytest.approx(2 * HIDDEN, abs=NUMBERS)
    every = [played(stages, 1, number, pp=stages, schedule="gpipe").peak.total for number in (batches, batches + 1)]
    assert every[1] - every[0] == pytest.approx(one + 2 * HIDDEN, abs=NUMBERS)


@pytest.mark.parametrize(("rank", "ways"), [(0, 1), (1, 2), (3, 1)])
def test_stages_send_hidden_states_on_and_gradients_back(rank: int, ways: int) -> None:
    sent = {one.kind: one for one in played(4, rank, 6, pp=4).collectives}
    assert set(sent) == {"send", "recv"}
    for one in sent.values():
        assert (one.calls, one.payload) == (6 * ways, 6 * ways * HIDDEN)


@pytest.mark.long
def test_stages_hold_all_layers_together() -> None:
    whole = trace(ConfigJob(llama(), settings(global_batch=4)), "cpu")
    shared = [played(4, rank, 4, pp=4, stage_layers="1,3,3,1") for rank in range(4)]
    rotary = 16  # of which every stage has its own
    assert sum(one.peak.categories["weights"] for one in shared) == whole.peak.categories["weights"] + 3 * 2 * rotary
    assert sum(one.flops.total for one in shared) == whole.flops.total
    layers = [{name.split(".")[2] for name in one.kept if ".layers." in name} for one in shared]
    assert layers == [{"0"}, {"1", "2", "3"}, {"4", "5", "6"}, {"7"}]


def test_sequence_parallel_stages_send_their_part() -> None:
    found = played(4, 0, 2, pp=2, tp=2, sequence_parallel=True)
    assert {one.kind: one.payload for one in found.collectives if one.kind in ("send", "recv")} == {
        "send": 2 * HIDDEN // 2,
        "recv": 2 * HIDDEN // 2,
    }


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.long
def test_tensor_parallel_ranks_share_products_and_activations(kind: Any, sequence_parallel: bool) -> None:
    config = kind(**KEYS, architectures=[kind.__name__.replace("Config", "ForCausalLM")])
    alone = trace(ConfigJob(config, settings()), "cpu")
    found = played(4, 0, tp=4, sequence_parallel=sequence_parallel, config=config)
    assert found.flops.total * 4 == alone.flops.total
    assert found.saved_nbytes < alone.saved_nbytes / (3 if sequence_parallel else 2)
    sent = {one.kind: one for one in found.collectives}
    layers = KEYS["num_hidden_layers"]
    if sequence_parallel:
        # Megatron's g and g-bar (Korthikanti et al. 2022): twice a layer each way, at both ends, and in backward.
        assert sent["reduce_scatter"].calls == 4 * layers + 2
        assert {one.payload for one in found.collectives if one.kind == "reduce_scatter"} == {(4 * layers + 2) * HIDDEN}
        assert sent["all_gather"].calls == sent["reduce_scatter"].calls
        assert sent["all_reduce"].calls >= 2 * layers + 1  # gradients of norms, which saw a part of the sequence each
    else:
        assert "reduce_scatter" not in sent
        assert "all_gather" not in sent


@pytest.mark.long
def test_optimizers_on_parts_are_as_dtensor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> Trace:
        run = torch_run(3, precision="fp32", seq_len=S, gpus=8, tp=2, sequence_parallel=True, zero=3)
        return trace(ParallelJob(llama(), run), "cuda", gpus=8, rank=3)

    fast = both()
    original = tracker.Tracker.__init__

    def asking(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        self.parts = False

    monkeypatch.setattr(tracker.Tracker, "__init__", asking)
    slow = both()
    assert (fast.peak, fast.step_peaks, fast.phases) == (slow.peak, slow.step_peaks, slow.phases)
    assert (fast.collectives, fast.events) == (slow.collectives, slow.events)


# -- checkpointing -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_is_kept_is_not_computed_again() -> None:
    none, full, kept, products = (
        trace(ConfigJob(llama(), settings(**given)), "cpu")
        for given in (
            {},
            {"recompute": "full"},
            {"recompute": "full", "keep": DEFAULT_KEEP},
            {"recompute": "full", "keep": ("aten::mm",)},
        )
    )
    assert none.flops.total == kept.flops.total < products.flops.total < full.flops.total
    again = full.flops.total - none.flops.total
    attention = sum(flops for op, flops in none.flops.by_op.items() if op.endswith("flash_attention_for_cpu"))
    assert products.flops.total - none.flops.total == attention
    # The last product of a layer is needed by nothing that is made again.
    assert again == none.flops.by_phase["forward"] - 2 * S * H * (512 + 8 * 176)
    assert full.phases["backward"] < kept.phases["backward"] < none.phases["backward"]


def test_operations_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="no operation 'softmox'"):
        trace(ConfigJob(llama(), settings(recompute="full", keep=("mm", "softmox"))), "cpu")


# -- scripts -----------------------------------------------------------------------------------------------------------


def test_a_script_finds_itself_on_its_own_gpu() -> None:
    """Local ranks, objects that ranks exchange, and devices by number."""

    def ddp() -> Any:
        dist.init_process_group("nccl")
        rank = dist.get_rank() % torch.cuda.device_count()
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(nn.Linear(H, H).to(rank), device_ids=[rank])
        optimizer = torch.optim.AdamW(model.parameters())
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, {"rank": rank})
        assert everybody[5] is not None
        x = torch.ones(8, H, device=f"cuda:{rank}")

        def step() -> None:
            model(x.to(rank)).sum().backward()
            total = torch.ones(3, device="cuda")
            dist.all_reduce(total)
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = trace(FunctionJob(ddp), "cuda", gpus=8, rank=3)
    assert [(one.kind, one.calls, one.payload) for one in found.collectives] == [
        ("all_reduce", 2, 4 * (H * H + H) + 12)
    ]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(
        json.dumps({**KEYS, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}), encoding="utf-8"
    )
    return str(path)


@pytest.mark.long
def test_flags_share_a_model_out(file: str) -> None:
    line = f"trace {file} --seq-len 64 --gpus 8 --rank 5 --tp 2 --pp 2 --zero 3 --global-batch 4 --optimizer adamw-loop --json"
    found = json.loads(typed(f"{line} --device cpu --precision fp32").out)
    same = played(8, 5, 2, tp=2, pp=2)
    assert found["peak"]["total"] == pytest.approx(same.peak.total, abs=NUMBERS)
    assert [(one["kind"], one["payload"]) for one in found["collectives"]] == [
        (one.kind, one.payload) for one in same.collectives
    ]
    assert found["assumed"]["rank"] == "5 of 8: tp 1, data 0, pp 1"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--gpus 8 --tp 3", "does not divide by tp x pp = 3"),
        ("--tp 2", "--tp: need --gpus above 1"),
        ("--gpus 4 --rank 4", "--rank 4 is not one of 4"),
        ("--gpus 8 --zero 1", "PyTorch's DDP is 0"),
        ("--gpus 8 --tp 2 --zero 0", "use --zero 3"),
        ("--gpus 8 --pp 8 --vpp 2 --schedule 1f1b", "one chunk on each stage"),
        ("--gpus 2 --pp 2 --vpp 2 --schedule zb-v", "two chunks by itself"),
        ("--gpus 2 --pp 2 --schedule zigzag", "'zigzag' is not one of"),
        ("--gpus 2 --pp 2 --schedule zb-h1", "schedule: must be one of"),
        ("--gpus 2 --pp 2 --stage-layers 1,2", "add up to 8"),
        ("--gpus 2 --pp 2 --stage-layers 4,x", "counts of layers such as"),
        ("--gpus 4 --pp 4 --global-batch 2", "Number of microbatches (2) must be greater"),
        ("--gpus 3 --pp 3", "say how many each has"),
        ("--gpus 16 --tp 16", "num_attention_heads = 8 does not divide"),
        ("--gpus 2 --sequence-parallel", "needs tp above 1"),
        ("--gpus 4 --replicas 3", "do not divide by 3 replicas"),
        ("--keep mm", "needs recompute full"),
        ("--recompute selective", "whole layers"),
        ("--recompute full:every=2", "whole layers"),
        ("--precision bf16", "bf16-pure"),
        ("--precision mxfp8", "precision: must be one of"),
    ],
)
def test_what_cannot_be_shared_is_one_line(file: str, flags: str, said: str) -> None:
    found = typed(f"trace {file} --seq-len 64 {flags}")
    assert found.code == 2
    assert said in found.err.replace("\n", " ")
    assert "Traceback" not in found.err


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_models_without_a_plan_are_refused(name: str) -> None:
    from loadgauge.pytorch.trace.programs.target import find_job

    with pytest.raises(NotModelled):
        trace(find_job(name, torch_run(seq_len=64, gpus=2, tp=2), 1), "cpu", gpus=2)


def test_layers_that_do_not_divide() -> None:
    with pytest.raises(LayoutError):
        ParallelJob(llama(), settings(gpus=3, pp=3))
