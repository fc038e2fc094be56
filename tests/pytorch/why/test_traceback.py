"""Tracebacks of real code that ran out of memory: PyTorch on the CPU, under a limit of bytes."""

from __future__ import annotations

import json
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import typed
from loadgauge import estimate
from loadgauge.pytorch.why.sizes import by_size
from loadgauge.pytorch.why.traceback import frames, place

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 1.15 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory"
    " 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
MIB = 2**20
WIDE, VOCABULARY = 512, 4096


class Limited(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, and fails like the CUDA allocator beyond a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.limit, self.peak = 0, 1 << 62, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        if self.live + nbytes > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB.")
        self.seen.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, key, nbytes)

    def free(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.live -= nbytes


class Model(nn.Module):
    """An embedding, a few matrices and a head with the loss of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.lm_head = nn.Linear(WIDE, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.table(tokens)
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        logits = self.lm_head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def failing(train: Callable[[Limited], None]) -> str:
    """The traceback that a function prints when it runs out of memory under `Limited`."""
    with Limited() as limited, pytest.raises(torch.OutOfMemoryError) as caught:
        train(limited)
    return "".join(traceback.format_exception(caught.value))


def step(limited: Limited, room: int, **options: Any) -> None:
    """One step to make the states, and a second one with `room` bytes left when the optimizer begins."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.zeros(1, 4, dtype=torch.long)).backward()
    if room >= 0:
        optimizer.step()
    limited.limit = limited.live + max(room, 0)
    optimizer.step()


def test_the_foreach_step_and_its_list_of_roots_are_named() -> None:
    text = failing(lambda limited: step(limited, 6 * MIB, foreach=True))
    found = place(text)
    assert found is not None
    assert (found.phase, found.per_parameter) == ("optimizer step", 4)
    assert "_foreach_sqrt" in found.frame
    assert "square roots" in found.tensor


def test_what_the_remedy_for_the_foreach_step_leaves_fits_where_the_step_failed() -> None:
    def run(**options: Any) -> None:
        with Limited() as limited:
            step(limited, 6 * MIB, **options)

    with pytest.raises(torch.OutOfMemoryError):
        run(foreach=True)
    run(fused=True)  # the remedy: no list of roots


def test_states_made_in_the_first_step_are_named() -> None:
    found = place(failing(lambda limited: step(limited, -1, foreach=True)))
    assert found is not None
    assert found.phase == "optimizer step"
    assert "states" in found.tensor


def test_the_loss_is_named_with_its_logits() -> None:
    def train(limited: Limited) -> None:
        model, tokens = Model(), torch.zeros(1, 1024, dtype=torch.long)
        limited.limit = limited.live + 4 * 1024 * VOCABULARY + 20 * MIB  # the logits fit, their logarithms do not
        model(tokens)

    found = place(failing(train))
    assert found is not None
    assert found.phase == "loss"
    assert "4 bytes" in found.tensor


def test_a_backward_is_named_by_its_call_and_a_recomputation_as_one() -> None:
    def train(limited: Limited, checkpointed: bool) -> None:
        layers = [nn.Linear(WIDE, 8 * WIDE), nn.Linear(8 * WIDE, WIDE)]

        def run(x: Any) -> Any:
            return layers[1](nn.functional.silu(layers[0](x)))

        x = torch.zeros(1024, WIDE, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
        limited.limit = limited.live + MIB * 3
        y.sum().backward()

    plain, again = (place(failing(lambda limited, how=how: train(limited, how))) for how in (False, True))
    assert plain is not None
    assert again is not None
    assert plain.phase == "backward"
    assert again.phase == "recomputation in the backward"


DEEPSPEED = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/u/train.py", line 40, in <module>
[rank3]:     trainer.train()
[rank3]:   File "/v/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 1950, in step
[rank3]:     self._optimizer_step(i)
[rank3]:   File "/v/site-packages/torch/optim/adamw.py", line 600, in _multi_tensor_adamw
[rank3]:     exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)
[rank3]:                       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.74 GiB. GPU 3 has a total capacity of 39.39 GiB
"""
"""Frames of DeepSpeed's step, by its source."""


def test_the_size_that_failed_is_the_ranks_share_of_the_parameters() -> None:
    found = place(DEEPSPEED)
    assert found is not None
    assert [frame.function for frame in frames(DEEPSPEED)] == ["<module>", "step", "_multi_tensor_adamw"]
    result = estimate("llama-3.1-8b", gpu="a100-sxm4-40gb", gpus=8, zero=2, framework="deepspeed", seq_len=2048)
    tried = 8_030_261_248 * 4 // 8
    assert found.same_size(tried, result) == "8,030,261,248 trained parameters x 4 B / 8 ranks"
    assert not found.same_size(round(tried * 1.02), result)


BACKWARD = """Traceback (most recent call last):
  File "/home/u/train.py", line 40, in <module>
    loss.backward()
  File "/v/site-packages/torch/autograd/graph.py", line 824, in _engine_run_backward
    return Variable._execution_engine.run_backward(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 79.15 GiB
"""


@pytest.mark.parametrize(("tokens", "size"), [(2048, "1002.00 MiB"), (4096, "1.96 GiB")])
def test_the_size_names_the_tensor_of_a_backward_that_shows_none(tokens: int, size: str, tmp_path: Path) -> None:
    """The gradient of Llama 3's logits in float32: tokens x 128,256 x 4 bytes, a multiple of 2 MiB, with two decimals."""
    file = tmp_path / "error.txt"
    file.write_text(BACKWARD.format(size=size), encoding="utf-8")
    words = f"--model llama-3.1-8b --memory 80GiB --seq-len {tokens} --micro-batch 1 --lora-rank 16 --json".split()
    place = json.loads(typed(["why", str(file), *words]).out)["place"]
    assert place["phase"] == "backward"
    assert f"gradient of head.logits ({tokens * 128_256:,} x 4 B)" in place["same_size"]
    file.write_text(BACKWARD.format(size="1012.00 MiB"), encoding="utf-8")  # 1 % more is none
    assert json.loads(typed(["why", str(file), *words]).out)["place"]["same_size"] == ""


def test_small_sizes_name_nothing() -> None:
    """Up to 10 MiB the allocator asks for a segment of 20 MiB, whatever the tensor."""
    result = estimate("llama-3.1-8b", gpu="a100-sxm4-40gb", seq_len=2048)
    assert by_size(20 * MIB, result, backward=False) == ""


def test_why_prints_the_place_and_changes_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "error.txt"
    file.write_text(DEEPSPEED, encoding="utf-8")
    job = "--model llama-3.1-8b --gpu a100-sxm4-40gb --gpus 8 --zero 2 --framework deepspeed --seq-len 4096"
    document = json.loads(typed(["why", str(file), *job.split(), "--json"]).out)
    assert document["place"]["phase"] == "optimizer step"
    assert document["place"]["same_size"].endswith("/ 8 ranks")
    assert document["changes"]
    assert document["changes"][0]["memory"]["verdict"] == "fits"


def test_frames_without_their_code_are_all_there() -> None:
    """As Python prints them where a program's source is not at hand."""
    at = ["train.py", "site-packages/transformers/trainer.py", "site-packages/transformers/loss/loss_utils.py"]
    bare = "".join(f'  File "/x/{file}", line 7, in loss\n' for file in at)
    text = f"Traceback (most recent call last):\n{bare}    logits = logits.float()\n{OOM}"
    assert [frame.file.removeprefix("/x/") for frame in frames(text)] == at
    found = place(text)
    assert found is not None
    assert (found.phase, found.tensor[:27]) == ("loss", "a float32 copy of the logit")


def test_the_gpu_of_the_error_is_that_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "error.txt"
    path.write_text(OOM.replace("capacity of 79.15", "capacity of 47.50"))
    flags = "--model gpt2 --seq-len 128 --json"
    told = json.loads(typed(f"why {path} {flags}").out)
    assert told == json.loads(typed(f"why {path} {flags} --memory 47.5GiB").out)
    assert "47.5GiB" in told["estimated"]


def test_a_text_without_a_traceback_has_no_place() -> None:
    assert place("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.74 GiB.") is None
