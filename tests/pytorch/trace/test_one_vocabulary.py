"""The flags of estimate in trace, measure and compare; the function `loadgauge.trace`."""

from __future__ import annotations

import json

import pytest
import torch

import loadgauge
from command_line import typed
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.command_line.main import commands
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.pytorch.trace.programs.jobs import of_module
from loadgauge.pytorch.trace.torch_run import TorchRun, parse_flags
from loadgauge.pytorch.trace.trace import trace
from torch_runs import torch_run

SMALL = "trace gpt2 --layers 1 --seq-len 16 --optimizer sgd --device cpu --json"


@pytest.mark.parametrize("name", ["trace", "measure", "compare"])
def test_options_have_the_names_and_bounds_of_a_job(name: str) -> None:
    command = commands.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    options = {option.name: option for option in command.params}
    shared = set(options) & set(fields())
    assert {"seq_len", "micro_batch", "global_batch", "precision", "optimizer", "attention", "recompute"} <= shared
    for field in shared - {"model"}:
        assert f"--{field.replace('_', '-')}" in options[field].opts


@pytest.mark.long
def test_words_of_other_tools_are_read_with_a_line() -> None:
    old = typed(f"{SMALL} --gradient-checkpointing --attention sdpa --batch-size 2 --precision bf16-autocast")
    new = typed(f"{SMALL} --precision bf16-autocast --recompute full --attention flash --micro-batch 2")
    assert (old.code, new.code, new.err) == (0, 0, "")
    before, after = json.loads(old.out), json.loads(new.out)
    assert (before["peak"], before["flops"], before["assumed"]) == (after["peak"], after["flops"], after["assumed"])
    assert len(old.err.splitlines()) == 1
    assert "--gradient-checkpointing as --recompute full" in old.err


@pytest.mark.parametrize("command", ["trace", "measure", "compare"])
def test_the_word_that_changed_its_meaning_is_refused(command: str) -> None:
    """`bf16` is float32 master weights in estimate, and was all of bfloat16 here."""
    outcome = typed(f"{command} gpt2 --precision bf16")
    assert outcome.code == 2
    assert "master weights" in outcome.err
    assert "bf16-pure" in outcome.err


def test_zero_is_that_of_estimate_and_says_so() -> None:
    outcome = typed(f"{SMALL} --world 2")
    assert "--world 2 as --gpus 2" in outcome.err
    assert "--zero is 0 (DDP) by default" in outcome.err
    assert json.loads(outcome.out)["assumed"]["data parallel"].startswith("DDP")


def test_settings_of_a_document_are_read_again() -> None:
    """As `trace --json` writes them."""
    text = (
        "--optimizer adamw --precision bf16-pure --recompute full --attention flash --seq-len 128 --micro-batch 2"
        " --global-batch 8 --keep mm --layers 3"
    )
    job, keep, layers = parse_flags(text)
    run = TorchRun.of(job, keep=keep)
    assert (run.training.precision.name, run.keep, layers) == ("bf16-pure", ("mm",), 3)
    assert (run.accumulate, run.layout.micro_batch, run.layout.recompute.mode) == (4, 2, "full")
    again, kept, number = parse_flags(run.flags(3))
    assert (TorchRun.of(again, keep=kept), number) == (run, 3)
    for wrong in ("--gpus 8", "--model x", "--seq-len 0", "--micro-batch x"):
        with pytest.raises(ConfigError):
            parse_flags(wrong)


def test_what_pytorch_cannot_run_is_refused() -> None:
    for field in ({"cp": 2}, {"lora_rank": 8}, {"framework": "megatron"}, {"recompute": "selective"}, {"zero": 1}):
        with pytest.raises(NotModelled):
            torch_run(**field)
    assert torch_run(cp=1, framework="huggingface", offload="none") == torch_run()


def test_the_function_traces_what_the_command_and_the_job_do() -> None:
    module, x = torch.nn.Linear(64, 64), torch.empty(8, 64)
    assert loadgauge.trace(module, x, optimizer="sgd").peak == trace(of_module(module, x, optimizer="sgd")).peak
    job = Job(model="gpt2", seq_len=16, optimizer="sgd")
    result = loadgauge.trace(job, layers=1, device="cpu")
    document = json.loads(typed(SMALL).out)
    assert result.to_dict()["peak"] == document["peak"]
    assert str(result).startswith("PEAK ")
    with pytest.raises(ConfigError, match="cannot trace int"):
        loadgauge.trace(5)
