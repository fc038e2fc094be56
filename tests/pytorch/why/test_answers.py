"""What `why` answers to the text of an error: who took the memory, where, and what to do first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import typed
from loadgauge.core.base.package_data import read_data
from loadgauge.core.base.units import GIB, MIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.pytorch.why.answer import answer
from loadgauge.pytorch.why.message import parse
from loadgauge.pytorch.why.traceback import frames, place

OWN = "the program's own tensors"


def why(text: str, tmp_path: Path, *words: str) -> str:
    """What the command prints for a text, with lines joined."""
    path = tmp_path / "error.txt"
    path.write_text(text, encoding="utf-8")
    found = typed(["why", str(path), *words])
    assert found.code == 0, found.err
    return found.out if "--json" in words else " ".join(found.out.split())


# -- fragmentation -----------------------------------------------------------------------------------------------------

POSTED = {
    # github.com/NVIDIA/Megatron-LM/issues/525
    "4 % idle": "Tried to allocate 786.00 MiB (GPU 0; 31.74 GiB total capacity; 28.82 GiB already allocated; 577.19 MiB free;"
    " 29.97 GiB reserved in total by PyTorch)",
    "0.3 % idle": "Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity; 30.02 GiB already allocated; 5.75 MiB free;"
    " 30.10 GiB reserved in total by PyTorch)",
}


@pytest.mark.parametrize("text", POSTED.values(), ids=POSTED)
def test_little_that_lies_idle_is_not_the_cause(text: str, tmp_path: Path) -> None:
    said = why(f"RuntimeError: CUDA out of memory. {text}", tmp_path)
    assert said.startswith(f"CAUSE {OWN}: {text.split('; ')[2].split(' already')[0]} of 31.7")
    assert "expandable_segments" not in said[: said.index("loadgauge trace")]
    assert "fragmentation" not in said
    assert "--model MODEL --gpu GPU" in said


def test_where_fragmentation_begins() -> None:
    """The idle bytes beyond those of an ordinary training, and the free ones, serve the request; a MiB less does not."""
    kinds = tomllib.loads(read_data("memory_range.toml"))
    ordinary = max(kinds[kind]["needed"]["usual"] for kind in ("static", "fixed", "dynamic", "sharded"))
    for allocated, free, tried in ((40 * GIB, 100 * MIB, GIB), (5 * GIB, 0, 2 * MIB), (70 * GIB, GIB, 5 * GIB)):
        least = ordinary * allocated + tried - free
        for idle, cause in ((least + MIB, "fragmentation"), (least - MIB, OWN)):
            error = parse(
                f"Tried to allocate {tried} bytes. GPU 0 has a total capacity of 79.15 GiB of which {free} bytes is free. Of the"
                f" allocated memory {allocated} bytes is allocated by PyTorch, and {round(idle)} bytes is reserved by PyTorch but"
                " unallocated."
            )
            assert error.cause == cause


def test_fragmentation_comes_before_what_the_traceback_says(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    loss.backward()\nTried to allocate 2.00 GiB.'
        " GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is free. Of the allocated memory 60.00 GiB is allocated by"
        " PyTorch, and 17.00 GiB is reserved by PyTorch but unallocated."
    )
    said = why(text, tmp_path)
    assert said.startswith("CAUSE fragmentation: 17.00 GiB reserved by PyTorch lie idle in pieces")
    assert said.index("expandable_segments") < said.index("fewer tokens")


def test_room_that_was_refused_is_no_fragmentation() -> None:
    """github.com/modelscope/ms-swift/issues/9613"""
    error = parse(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 7 has a total capacity of 79.11 GiB of which"
        " 66.43 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the allocated memory 8.51"
        " GiB is allocated by PyTorch, and 856.16 MiB is reserved by PyTorch but unallocated."
    )
    assert error.cause == "refused though there was room"


# -- a job's own engine ------------------------------------------------------------------------------------------------

TRACE = """Traceback (most recent call last):
  File "/v/site-packages/{file}", line 390, in {function}
    loss = self.compute(batch)
  File "/v/site-packages/torch/nn/functional.py", line 2140, in softmax
    ret = input.softmax(dim)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.13 GiB
 is free. Process 1 has 30.20 GiB memory in use. Process 2 has 45.50 GiB memory in use. Of the allocated memory 43.80 GiB is
 allocated by PyTorch, and 0.70 GiB is reserved by PyTorch but unallocated.
"""


def prefixed(mark: str, text: str) -> str:
    """A text as a launcher writes it."""
    return "".join(f"{mark} {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (prefixed("(WorkerDict pid=2416)", TRACE.format(file="x/a.py", function="step")), "free_cache_engine=True"),
        (
            TRACE.format(file="verl/workers/actor/dp_actor.py", function="update_policy"),
            "rollout.gpu_memory_utilization",
        ),
        (TRACE.format(file="trl/trainer/grpo_trainer.py", function="compute_loss"), "vllm_enable_sleep_mode=True"),
        (TRACE.format(file="openrlhf/trainer/ray/ppo_actor.py", function="fit"), "--vllm_enable_sleep"),
        (
            f"(Actor pid=1) INFO vllm engine ready\n(Actor pid=1) GRPO\n{TRACE.format(file='own.py', function='f')}",
            "SGLang",
        ),
    ],
)
def test_the_job_s_own_engine_is_no_other_process(text: str, tool: str, tmp_path: Path) -> None:
    said = why(text, tmp_path)
    assert said.startswith("CAUSE the job's own rollout engine: 30.20 GiB of 79.11 GiB")
    assert tool in said
    assert "end them" not in said


@pytest.mark.parametrize("file", ["train.py", "vllm/v1/worker/gpu_worker.py", "trl/trainer/sft_trainer.py"])
def test_another_process_of_no_post_training_stays_one(file: str) -> None:
    assert parse(TRACE.format(file=file, function="run")).cause == "other processes"


def test_the_probabilities_of_a_policy_have_a_place() -> None:
    found = place(TRACE.format(file="verl/utils/torch_functional.py", function="entropy_from_logits"))
    assert found is not None
    assert (found.phase, found.frame.split(":")[0]) == ("loss", "verl/utils/torch_functional.py")
    assert "vocabulary" in found.tensor


# -- prefixes ----------------------------------------------------------------------------------------------------------

MARKS: dict[str, Callable[[int], str]] = {
    "ray": lambda rank: f"(WorkerDict pid={2000 + rank}, ip=10.0.0.{rank})",
    "ray in colour": lambda rank: f"\x1b[36m(TaskRunner pid={rank + 7})\x1b[0m",
    "pytorch": lambda rank: f"[rank{rank}]:",
    "torchrun": lambda rank: f"[default{rank}]:",
    "srun": lambda rank: f"{rank:2}:",
    "mpirun": lambda rank: f"[1,{rank}]<stderr>:",
    "ray and pytorch": lambda rank: f"(Worker pid={rank + 7}) [rank{rank}]:",
    "vllm": lambda rank: f"(EngineCore_{rank} pid=9) ERROR 07-08 19:50:4{rank} [core.py:459]",
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_prefixes_of_launchers_are_no_part_of_the_error(mark: Callable[[int], str]) -> None:
    """Two ranks write at once: of the one that fails first, figures and place are those of its own text."""
    plain, other = (TRACE.format(file=name, function=name[:1]) for name in ("first/train.py", "other/run.py"))
    lines = [
        line
        for pair in zip(plain.splitlines(), other.splitlines(), strict=True)
        for line in (f"{mark(3)} {pair[0]}", f"{mark(1)} {pair[1]} [repeated 6x across cluster]")
    ]
    text = "\n".join(lines)
    assert [str(frame) for frame in frames(text)] == [str(frame) for frame in frames(plain)]
    assert "first/train.py" in str(frames(text)[0])
    assert place(text) == place(plain)
    found, alone = parse(text), parse(plain)
    assert (found.tried, found.allocated, found.others) == (alone.tried, alone.allocated, alone.others)


# -- texts without figures ---------------------------------------------------------------------------------------------

BARE = [
    ("RuntimeError: CUDA error: out of memory", "the driver refused memory", "nvidia-smi"),
    ("RuntimeError: HIP error: out of memory", "the driver refused memory", "nvidia-smi"),
    ("cublasCreate: CUBLAS_STATUS_ALLOC_FAILED", "the driver refused memory", "nvidia-smi"),
    ("Error out of memory at line 380 in file /src/csrc/ops.cu", "bitsandbytes", "csrc/ops.cu"),
    ("ValueError: No available memory for the cache blocks. Try increasing it.", "vLLM's share", "max-model-len"),
    ("Free memory on device (10.1/79.2 GiB) is less than desired GPU memory utilization", "vLLM's share", "lower it"),
    ("(16.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.52", "vLLM's cache", "fp8"),
    ("max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache", "vLLM's cache", "fp8"),
    ("Not enough memory. Please try to increase --mem-fraction-static.", "SGLang's share", "cuda-graph-max-bs"),
    ("ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer", "llama.cpp's buffers", "--n-gpu-layers"),
    # github.com/verl-project/verl/issues/302
    ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "an engine that sleeps", "gpu_memory_util"),
    ("torch.distributed.elastic:failed (exitcode: -9) local_rank: 0 (pid: 10398)", "the host's memory", "num_workers"),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "the host's memory", "offload"),
    ("ResourceExhaustedError: OOM when allocating tensor with shape[32,1024,50257] and type float", "a TensorFlow", "batch"),
    ("Out of memory error on GPU 0. Cannot allocate memory on GPU 0", "a PaddlePaddle", "recompute"),
    ("[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n): out of memory", "TensorRT-LLM", "max_num_tokens"),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144", "a kernel's tiles", "num_stages"),
    ("ValueError: Some modules are dispatched on the CPU or the disk.", "weights that", "weight-format"),
    ("AssertionError: Error in memory profiling. Initial free memory 21.5 GiB", "another process", "after one another"),
    ("Root Cause: Signal 9 (SIGKILL) received by PID 10398", "the host's memory", "num_workers"),
    ("Killed", "the host's memory", "--offload optimizer"),
    ("line 3: 41932 Killed                  python train.py", "the host's memory", "low_cpu_mem_usage"),
    ("Last State: Terminated\n  Reason: OOMKilled\n  Exit Code: 137", "the host's memory", "kubectl"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", "the host's memory", "sacct"),
    ("RuntimeError: DataLoader worker (pid 4) is killed by signal: Killed.", "the host's memory", "not the GPU's"),
    ("subprocess.CalledProcessError: died with <Signals.SIGKILL: 9>.", "the host's memory", "dmesg"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause", "says"), BARE, ids=lambda value: str(value)[:40])
def test_texts_without_figures_have_a_cause_of_their_own(text: str, cause: str, says: str, tmp_path: Path) -> None:
    said = why(f"step 3\n{text}\n", tmp_path)
    assert said.startswith(f"CAUSE {cause}")
    assert says in said
    document = json.loads(why(text, tmp_path, "--json"))
    assert (document["cause"].startswith(cause), document["tried"]) == (True, None)
    assert typed(["why", text]).out.startswith(f"CAUSE  {cause}")  # the text itself, without a file
    assert typed(["why", f"{text}\n{300 * chr(45)}"]).out.startswith(
        f"CAUSE  {cause}"
    )  # longer than a file can be named


def test_what_a_kernel_kills_has_no_place_of_its_launcher() -> None:
    text = "failed (exitcode: -9)\n" + TRACE[: TRACE.index("torch.OutOf")].format(
        file="torch/distributed/run.py", function="run"
    )
    assert place(text) is None


@pytest.mark.parametrize("text", ["loss 2.31, killed time", "srun --oom-kill-step=1 python train.py", "exit code 0"])
def test_what_is_no_error_stays_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    assert "no out-of-memory error" in typed(["why", str(path)]).err


JAX = """jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9031036208 bytes.
BufferAssignment stats:
             parameter allocation:    2.78GiB
Peak buffers:
        Buffer 1:
                Size: 384.0KiB
                Entry Parameter Subshape: f32[256,128,3]
                ==========================

        Buffer 2:
                Size: 1.52GiB
                Operator: op_name="jit(f)/jit(main)/norm/reduce_sum[axes=(2,)]" source_file="/m2/modules.py" source_line=1446
                XLA Label: fusion
                Shape: f32[5120,1248,64]
                ==========================
"""
"""The form of github.com/jax-ml/jax/issues/13428 and github.com/patrickbryant1/SpeedPPI/issues/1."""


@pytest.mark.parametrize("mark", ["", "(Worker pid=3)", "2:"])
def test_xla_s_bytes_and_buffers_are_read(mark: str, tmp_path: Path) -> None:
    text = prefixed(mark, JAX) if mark else JAX
    found = parse(text)
    assert (found.tried, found.cause) == (9031036208, "an XLA program (JAX)")
    assert [(one.nbytes, one.name, one.shape) for one in found.buffers] == [
        (round(1.52 * GIB), "norm/reduce_sum[axes=(2,)]", "f32[5120,1248,64]"), (384 * 1024, "parameter", "f32[256,128,3]"),
    ]  # fmt: skip
    assert pytest.approx(5120 * 1248 * 64 * 4, rel=0.01) == 1.52 * GIB  # the shape and the size that XLA prints agree
    said = why(text, tmp_path)
    assert "f32[5120,1248,64]" in said
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in said
    assert parse("RESOURCE_EXHAUSTED: Out of memory allocating 3221225472 bytes.").tried == 3 * GIB


# -- with a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"), [([], "micro-batch 1 (not given) of"), (["--micro-batch", "2"], "micro-batch 2 of")]
)
def test_an_estimate_says_which_micro_batch_it_is_of(words: list[str], says: str, tmp_path: Path) -> None:
    error = f"CUDA out of memory. {POSTED['4 % idle']}"
    assert says in why(error, tmp_path, "--model", "gpt2-xl", "--gpu", "v100-sxm2-32gb", *words)


def test_the_document_has_what_is_printed(tmp_path: Path) -> None:
    text = TRACE.format(file="verl/utils/torch_functional.py", function="entropy_from_logits")
    document, said = json.loads(why(text, tmp_path, "--json")), why(text, tmp_path)
    assert document == json.loads(json.dumps({"schema": 1, **answer(text).to_dict()}))
    for part in (document["headline"], document["place"]["frame"], *document["remedies"], *document["notes"]):
        assert " ".join(part.split()) in said


def test_each_change_is_estimated_once(tmp_path: Path) -> None:
    text = TRACE.format(file="verl/utils/torch_functional.py", function="entropy_from_logits")
    changes = json.loads(why(text, tmp_path, "--model", "qwen3-8b", "--gpu", "h100", "--lora-rank", "8", "--json"))[
        "changes"
    ]
    assert len({one["flags"] for one in changes}) == len(changes)
    assert changes[0]["flags"] == "--loss chunked"
    assert "--micro-batch 1" not in {one["flags"] for one in changes}  # as it was


def test_the_text_of_an_error_loads_nothing_of_the_estimate() -> None:
    """It is typed where a run has just failed, so that it must be there at once."""
    program = (
        "import sys; from loadgauge.core.command_line.main import run; run(['why', 'examples/oom.txt']);"
        "rooms = ('core.estimate', 'core.layers', 'core.plan', 'core.resolve', 'core.serving');"
        "print([name for name in sys.modules if name.removeprefix('loadgauge.').startswith(rooms)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


TYPED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 3 has a total capacity of 79.11 GiB of which"
    " 2.35 GiB is free. Including non-PyTorch memory, this process has 76.75 GiB memory in use. Of the allocated memory"
    " 68.21 GiB is allocated by PyTorch, and 5.41 GiB is reserved by PyTorch but unallocated.\n"
)
PROGRAM = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", torch_dtype="bfloat16", attn_implementation="flash_attention_2")
args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, optim="paged_adamw_8bit", gradient_checkpointing=True)
Trainer(model=model, args=args, train_dataset=ds).train()
"""


@pytest.mark.parametrize("order", ["error.txt train.py", "train.py error.txt", "error.txt --model train.py"])
def test_an_error_beside_the_program_that_ran(tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card of which the error alone knows; a run that needed more than its program says is told which length would."""
    (tmp_path / "error.txt").write_text(TYPED, encoding="utf-8")
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = " ".join(typed(f"why {order}").out.split())
    assert "the run needed 81.40 GiB" in text
    assert "--offload optimizer" not in text  # the states of a paged optimizer leave the card as it is
    length = int(re.findall(r"--seq-len (\d+) would explain it", text)[0])
    assert (
        resolve_job(Job(model="train.py", memory="79.11GiB", seq_len=length)).estimate().memory.total >= 81.40 * 2**30
    )
    shorter = resolve_job(Job(model="train.py", memory="79.11GiB", seq_len=int(length / 1.1))).estimate()
    assert shorter.memory.total < 81.40 * 2**30
    assert typed(f"why {order} --model qwen3-8b" if "--model" not in order else f"why {order} qwen3-8b").code == 2


@pytest.mark.parametrize(
    ("text", "cause", "tried"),
    [
        ("allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory", "llama.cpp's buffers", 2**32),
        (
            "Error: model requires more system memory (48.5 GiB) than is available (31.2 GiB)",
            "the host's memory",
            48.5 * 2**30,
        ),
    ],
)
def test_what_other_allocators_asked_for_is_read(text: str, cause: str, tried: float) -> None:
    told = json.loads(typed(["why", text, "--json"]).out)
    assert (told["cause"], told["tried"]) == (cause, tried)
    assert typed([text]).out == typed(["why", text]).out
