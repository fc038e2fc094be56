"""`loadgauge trace` on the command line, on configs and on scripts that know nothing of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import loadgauge
from command_line import typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.trace.programs.jobs import of_module
from loadgauge.pytorch.trace.programs.script import FunctionJob, function
from loadgauge.pytorch.trace.trace import trace

SCRIPT = """
import torch, torch.nn as nn
torch.cuda.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

def main():
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
    ).to(device)
    head = nn.Linear(64, 100).cuda()
    opt = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=1e-4)
    for _ in range(2):
        x = torch.randn(8, 32, 64).cuda(non_blocking=True)
        y = torch.randint(0, 100, (8, 32), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = head(net(x))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert loss.item() == 1.0

def stepwise():
    layer = nn.Linear(256, 256, bias=False, device="cuda")
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.ones(32, 256, device="cuda")
    def step():
        layer(x).mean().backward()
        opt.step()
        opt.zero_grad()
    return step

def broken():
    raise ValueError("as it must")

number = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    return path


def run_on_cuda_names(script: Path, name: str, device: str) -> Any:
    from loadgauge.pytorch.trace.programs.call import where
    from loadgauge.pytorch.trace.programs.script import redirect_cuda

    with redirect_cuda(where(device)):
        job = FunctionJob(function(f"{script}:{name}"), name)
    return trace(job, device)


def test_a_script_for_cuda_runs_as_it_stands(script: Path) -> None:
    found = run_on_cuda_names(script, "main", "cuda")
    assert found.steps == 2
    parameters = 2 * (4 * 64 * 64 + 4 * 64 + 2 * 64 * 128 + 128 + 64 + 4 * 64) + 64 * 100 + 100
    categories = found.phases and found.peak.categories
    assert categories["weights"] == 4 * parameters
    assert categories["optimizer states"] >= 8 * parameters
    assert found.flops.total > 0
    assert any(name.startswith("layers.0") for name in found.flops.by_module)
    assert torch.nn.Module.to.__module__.startswith("torch")  # everything is as it was
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


def test_a_function_that_returns_its_step(script: Path) -> None:
    found = run_on_cuda_names(script, "stepwise", "cuda")
    assert found.steps == 2
    same = trace(of_module(torch.nn.Linear(256, 256, bias=False), torch.empty(32, 256), optimizer="sgd"), "cuda")
    assert found.flops.total == same.flops.total == 2 * 2 * 32 * 256 * 256
    assert found.peak.categories["weights"] == same.peak.categories["weights"] == 4 * 256 * 256
    assert found.saved_nbytes == same.saved_nbytes


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("{script}:missing", "has no function 'missing'"),
        ("{script}:number", "has no function 'number'"),
        ("{script}:broken", "ValueError: as it must"),
        ("{script}:", "is not script.py:function"),
        ("nowhere.py:main", "no such file"),
    ],
)
def test_what_is_wrong_with_a_script(script: Path, target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trace(FunctionJob(function(target.format(script=script))), "cpu")


@pytest.mark.long
def test_the_command(script: Path, tmp_path: Path) -> None:
    """In a process of its own, which may end as it likes."""
    viewer = tmp_path / "memory.pickle"
    found = typed(["trace", "qwen3-0.6b", "--layers", "2", "--seq-len", "128", "--viewer", str(viewer), "--json"])
    assert not found.err
    said = json.loads(found.out)
    assert said["peak"]["categories"]["weights"] == 2 * (151936 * 1024 + 1024 + 2 * (
        1024 * (16 * 128 + 2 * 8 * 128) + 16 * 128 * 1024 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024
    )) + 2 * 4 * 64  # fmt: skip
    assert said["steps"] == 2
    assert viewer.stat().st_size > 1000
    text = typed(["trace", f"{script}:main"])
    assert text.code == 0, text.err
    assert text.out.startswith("PEAK")
    assert "torch.nn" not in text.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trace no-such-model", "is neither a model in the catalogue nor a file"),
        ("trace gpt2 --seq-len 5000", "more than the model's"),
        ("trace gpt2 --optimizer lion", "optimizer: must be one of"),
        ("trace gpt2 --precision fp4", "precision: must be one of"),
        ("trace nowhere.py:main", "no such file"),
        ("trace gpt2 --viewer /no/such/folder/x", "no such folder"),
    ],
)
def test_what_goes_wrong_is_one_line(line: str, says: str) -> None:
    found = typed(line)
    assert found.code == 2
    assert not found.out
    assert says in found.err
    assert found.err.count("\n") == 1


WHOLE = """
import argparse, torch
from torch import nn
from beside import WIDTH
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
rows = parser.parse_args().batch_size
if __name__ == "__main__":
    critic, maker = nn.Linear(WIDTH, 1, bias=False).cuda(), nn.Linear(64, WIDTH, bias=False).cuda()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0, momentum=0.9) for each in (critic, maker)]
    for _ in range(1_000_000):
        try:
            for optimizer in optimizers:
                critic(maker(torch.ones(rows, 64, device="cuda"))).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except Exception:
            pass
    raise ValueError("it was not stopped")
"""


def test_a_script_is_run_whole_until_each_optimizer_made_two_steps(tmp_path: Path) -> None:
    """Its own arguments go after `--`; no handler of its own keeps it running."""
    script = tmp_path / "train.py"
    script.write_text(WHOLE)
    (tmp_path / "beside.py").write_text("WIDTH = 256\n")
    found = typed(["trace", str(script), "--json", "--", "--batch-size", "4096"])
    assert found.code == 0, found.err
    said = json.loads(found.out)
    weights = 4 * (256 + 64 * 256)
    assert said["steps"] == 4
    assert said["peak"]["categories"]["weights"] == weights
    assert said["peak"]["categories"]["optimizer states"] == weights
    assert said["peak"]["total"] > 4 * 4096 * 256
    assert loadgauge.trace(str(script)).peak.total < said["peak"]["total"]


EVERYDAY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = torch.compile(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device), mode="max-autotune")
    rows = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    loader = DataLoader(rows, batch_size=512, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True)
    optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cuda")
    for epoch in range(100):
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.pin_memory().to(device)
            with torch.autocast(device, torch.float16):
                loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if loss.item() < 2:
                torch.save(net.state_dict(), "best.pt")
if __name__ == "__main__":
    main()
"""


def test_an_everyday_script_is_traced_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, pinned memory and the compiler know nothing of the simulated device; what it would save stays on the disk."""
    script, saved = tmp_path / "train.py", tmp_path / "best.pt"
    script.write_text(EVERYDAY)
    saved.write_text("of a real run")
    monkeypatch.chdir(tmp_path)
    found = typed(["trace", "train.py", "--json"])
    assert found.code == 0, found.err
    said = json.loads(found.out)
    assert said["steps"] == 2
    parameters = 64 * 256 + 256 + 256 * 10 + 10
    assert said["peak"]["categories"]["optimizer states"] == pytest.approx(2 * 4 * parameters, abs=10 * 512)
    assert {"compile", "torch.save"} <= said["assumed"].keys()
    assert saved.read_text() == "of a real run"


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
optimizer, loader = torch.optim.AdamW(net.parameters()), DataLoader(TensorDataset(torch.randn(640, 64)), 8, num_workers=2)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for (x,) in loader:
    with accelerator.accumulate(net):
        accelerator.backward(net(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
MOVED = """
import torch
net = torch.nn.Linear(1024, 1024, bias=False)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
net.to("cuda")
for _ in range(2):
    net(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("text", "parameters"), [(MOVED, 1024 * 1024), (ACCELERATED, 64 * 256 + 256 + 256 * 8 + 8)])
def test_an_optimizer_follows_weights_that_move(text: str, parameters: int, tmp_path: Path) -> None:
    """Made before the model is on the card, as every script of accelerate does."""
    if "accelerate" in text:
        pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(text)
    found = typed(["trace", str(tmp_path / "train.py"), "--json"])
    assert found.code == 0, found.err
    said = json.loads(found.out)
    assert said["steps"] == 2
    states = max(moment["categories"].get("optimizer states", 0) for moment in [*said["timeline"], said["peak"]])
    assert states == pytest.approx(8 * parameters, abs=8 * 512)


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
rows = [{"input_ids": torch.arange(128), "labels": torch.arange(128)} for _ in range(64)]
how = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, report_to=[], max_steps=100, save_strategy="no")
Trainer(LlamaForCausalLM(config), how, train_dataset=rows).train()
"""


@pytest.mark.thorough
def test_a_script_of_transformers_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees one device: with several it would copy the model to each."""
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    found = typed(["trace", "train.py", "--json"])
    assert found.code == 0, found.err
    said = json.loads(found.out)
    assert said["steps"] == 2
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert said["peak"]["categories"]["weights"] == pytest.approx(4 * (2 * 512 * 64 + 2 * layer + 64), rel=0.01)


def test_a_script_of_several_ranks_is_told_how_to_be_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nrank = int(os.environ['LOCAL_RANK'])\n")
    found = typed(["trace", str(script)])
    assert found.code == 2
    assert found.err.endswith("KeyError: 'LOCAL_RANK'; with --gpus 8 it is one of 8 ranks, and LOCAL_RANK is set\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--epochs 3", "no such option '--epochs'; arguments of {script} go after --"),
        (
            "--micro-batch 3",
            "--micro-batch: of a MODEL; a script trains as it is written, and its own arguments go after --",
        ),
        ("-- --epochs 3", "{script}: it left with SystemExit: 2"),
    ],
)
def test_flags_of_a_script_are_its_own(words: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WHOLE)
    (tmp_path / "beside.py").write_text("WIDTH = 256\n")
    found = typed(["trace", str(script), *words.split()])
    assert found.code == 2
    assert says.format(script=script) in found.err


@pytest.mark.parametrize("command", ["capture", "measure", "saved"])
def test_a_script_without_a_function_is_told_what_to_type(command: str, tmp_path: Path) -> None:
    """Its functions are read from its text; nothing of it is run."""
    script, ran = tmp_path / "train.py", tmp_path / "ran"
    script.write_text(
        f"open({str(ran)!r}, 'w')\ndef step(model): ...\nclass Net:\n    def forward(self): ...\n"
        "if True:\n    def main(lr=1): ...\nasync def later(): ...\n"
    )
    found = typed([command, str(script)])
    assert (found.code, found.out) == (2, "")
    assert found.err == f"loadgauge: {script}: name one of its functions, as in {script}:main (it has main, step)\n"
    assert not ran.exists()
    script.write_text("x = 1\n")
    assert f"type {script}:main" in typed([command, str(script)]).err
    script.write_text("x = (\n")
    assert "is not Python: '(' was never closed" in typed([command, str(script)]).err
