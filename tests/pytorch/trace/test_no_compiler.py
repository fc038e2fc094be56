"""PyTorch's compiler is left out of a process, and is all there for those who ask for it."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

START = """
import torch
from loadgauge.pytorch.trace.no_compiler import without_compiler

without_compiler()
import json, os, sys

for program in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
    print("END", flush=True)
"""
STEP = """
p = torch.nn.Parameter(torch.ones(1))
p.grad = p.detach()
torch.optim.SGD([p], 0.5).step()
print(float(p), 'torch._dynamo.utils' in sys.modules)
"""
ASKED = {
    "import torch._dynamo.source as one; print(one.AttrSource.__module__)": "torch._dynamo.source",
    "print(torch._dynamo.eval_frame.DisableContext.__module__)": "torch._dynamo.eval_frame",
    "print(torch.compile(abs, backend='eager')(-2))": "2",  # as it is, and eagerly
}
Said = Callable[[str], str]


@pytest.fixture(scope="module")
def said() -> Said:
    """What a program of PyTorch without its compiler prints; each in a process of its own, forked from one."""
    programs = [STEP, *ASKED]
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(programs)], capture_output=True, text=True, check=True
    )
    return dict(zip(programs, done.stdout.split("END"), strict=False)).__getitem__


@pytest.mark.long
def test_a_step_of_an_optimizer_needs_no_compiler(said: Said) -> None:
    assert said(STEP).split() == ["0.5", "False"]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.thorough
def test_who_asks_for_the_compiler_gets_it(asked: str, said: Said) -> None:
    assert said(asked).strip() == ASKED[asked]


ASSIGNMENT = """
import sys
from loadgauge.pytorch.trace.no_compiler import quick_scan

quick_scan(assignment=True)
from scipy.optimize import linear_sum_assignment

before = "scipy.optimize._lsap" in sys.modules
print(before, [one.tolist() for one in linear_sum_assignment([[1, 2], [1, 3]])], sys.modules["scipy.optimize"].root_scalar.__name__)
"""
ASKING = """
import sys
import loadgauge

print(loadgauge.trace("gpt2", layers=1, seq_len=16).events > 0, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        pytest.param(
            ASSIGNMENT, "False [[0, 1], [1, 0]] root_scalar", id="SciPy is imported where its assignment is called"
        ),
        pytest.param(ASKING, "True False", id="who asks for a trace imports no PyTorch", marks=pytest.mark.long),
    ],
)
def test_what_is_not_needed_is_not_imported(program: str, shown: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shown
