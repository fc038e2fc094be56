"""A capture ends: initial values are not drawn, loops that CUDA has a kernel for are not run, and what goes on is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import loadgauge
from command_line import typed
from loadgauge.pytorch.capture.call import capture
from loadgauge.pytorch.device.kernels.cuda_rwkv import WeightedKeys
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.trace import subprocess as children

transformers = pytest.importorskip("transformers")


def siglip() -> Any:
    """A SigLIP whose class draws its weights until all lie in a range."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipConfig(
        text_config={**small, "vocab_size": 50, "projection_size": 32}, vision_config={**small, "image_size": 32}
    )
    return transformers.SiglipModel(config)


def pair(b: int) -> dict[str, Any]:
    """Texts and pictures for it."""
    ids = torch.zeros((b, 16), dtype=torch.long)
    return {"input_ids": ids, "pixel_values": torch.empty(b, 3, 32, 32), "return_loss": True}


def test_a_module_that_draws_until_all_values_lie_in_a_range_is_built() -> None:
    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in siglip().parameters())
    assert sum(loadgauge.capture(siglip, pair).at(b=2).parameters.values()) == expected


def test_tied_weights_stay_tied_and_constants_stay_known() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40)
    with fake_tensors(), torch.device(simulated_device()):
        model = transformers.GPT2LMHeadModel(config)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.transformer.ln_f.weight.mean().item() == 1
        table = torch.empty(3, 3)
        assert torch.nn.init.trunc_normal_(table) is table


def test_values_are_drawn_again_afterwards() -> None:
    table = torch.zeros(100)
    with fake_tensors():
        pass
    assert torch.nn.init.uniform_(table, 1, 2).min() >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rwkv_keeps_and_returns_what_transformers_own_function_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code, on tensors that say they are on CUDA, around a kernel that does nothing."""
    from transformers.models.rwkv import modeling_rwkv as theirs

    names = ("forward", "forward_bf16", "backward", "backward_bf16")
    kernel = SimpleNamespace(max_seq_length=64, **dict.fromkeys(names, lambda *_: None))
    monkeypatch.setattr(theirs, "rwkv_cuda_kernel", kernel)

    def run(function: Any, grads: Any) -> list[Any]:
        kept: list[Any] = []
        context = SimpleNamespace(save_for_backward=lambda *saved: kept.extend(saved))
        decay, first = (torch.empty(32, dtype=dtype, device="cuda") for _ in range(2))
        key, value = (torch.empty(2, 7, 32, dtype=dtype, device="cuda") for _ in range(2))
        out = function.forward(context, decay, first, key, value)
        context.saved_tensors = kept
        returned = function.backward(context, grads(key))
        out = out[0] if isinstance(out, tuple) else out
        return [
            None if one is None else (tuple(one.shape), one.dtype, one.stride()) for one in (out, *kept, *returned[:4])
        ]

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert run(WeightedKeys, torch.empty_like) == run(theirs.RwkvLinearAttention, torch.empty_like)


def test_rwkv_has_formulas_of_its_tokens() -> None:
    config = transformers.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=80, context_length=256)
    step = capture(config).at(b=2, s=128)
    assert not step.plain
    assert step.flops(b=2, s=200) * 128 == step.flops(b=2, s=128) * 200
    assert any("RWKV's CUDA kernel" in line for line in step.assumed)


@pytest.mark.parametrize("command", ["capture", "estimate"])
def test_what_does_not_end_is_stopped(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "endless.py"
    script.write_text("def model():\n    while True:\n        pass\n\ndef inputs(b):\n    pass\n")
    asked = f"{command} {script}:model --inputs {script}:inputs"
    monkeypatch.setenv("LOADGAUGE_CAPTURE_SECONDS", "0.5")
    told = typed(asked)
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert "endless.py:model: its own code had not ended after 0.5 s and was stopped" in told.err
    monkeypatch.setenv("LOADGAUGE_CAPTURE_SECONDS", "soon")
    told = typed(asked)
    assert (told.code, told.out) == (2, "")
    assert "LOADGAUGE_CAPTURE_SECONDS: must be a number of seconds above 0, got 'soon'" in told.err


@pytest.mark.parametrize("terminal", [True, False])
def test_who_waits_is_told_how_to_stop(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "PATIENCE" if terminal else "SILENCE", 0.1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr(children, "subprocess", subprocess)  # not a warm one
    monkeypatch.setattr("sys.executable", str(sleeper(tmp_path)))
    with pytest.raises(TimeoutError):
        children._run_child([], None, 0.3)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Ctrl-C stops it, and so do 0.3 s (LOADGAUGE_CAPTURE_SECONDS)" in told


def sleeper(folder: Path) -> Path:
    """A program in the place of Python, which does not end."""
    program = folder / "python"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    return program


@pytest.mark.skipif(os.name != "posix", reason="a process there keeps its parent's number")
def test_a_capture_ends_with_the_command_that_asked_for_it() -> None:
    waits = "import os, sys, threading; from loadgauge.pytorch.trace.child import end_with; "
    waits += "print(os.getpid(), flush=True); end_with(int(sys.argv[1]))"
    asks = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}, str(os.getpid())])"
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline().strip().isdigit()
        command.kill()
        assert command.stdout.read() == ""  # the child held it open, and would have for ever
