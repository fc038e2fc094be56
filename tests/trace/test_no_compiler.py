"""PyTorch's compiler is left out of a process, and is all there for those who ask for it."""

import subprocess
import sys

import pytest

START = "import torch; from loadgauge.trace.no_compiler import without_compiler; without_compiler(); import sys\n"


def said(program: str) -> str:
    """What a program of PyTorch without its compiler prints."""
    return subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, check=True).stdout


def test_a_step_of_an_optimizer_needs_no_compiler() -> None:
    step = "p = torch.nn.Parameter(torch.ones(1)); p.grad = p.detach(); torch.optim.SGD([p], 0.5).step(); print(float(p))\n"
    assert said(f"{step}print('torch._dynamo.utils' in sys.modules)").split() == ["0.5", "False"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("import torch._dynamo.source as one; print(one.AttrSource.__module__)", "torch._dynamo.source"),
        ("print(torch._dynamo.eval_frame.DisableContext.__module__)", "torch._dynamo.eval_frame"),
        (
            "torch._dynamo.disable; torch.compile(abs, backend='eager'); print(torch._dynamo.disable.__module__)",
            "torch._dynamo.decorators",
        ),
    ],
)
def test_who_asks_for_the_compiler_gets_it(asked: str, given: str) -> None:
    assert said(asked).strip() == given
