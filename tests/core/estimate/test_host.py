"""Small models in eager PyTorch: the GPU waits for the host that launches its kernels."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.software import HOST_LAUNCH, KERNELS, host_seconds
from loadgauge.core.resolve.resolve import resolve_job

LAYERS = 4
NOT_LAUNCHED = (
    "view", "as_strided", "empty", "reshape", "transpose", "detach", "slice", "unsqueeze", "expand", "alias", "select", "split",
    "::t.",
)  # fmt: skip


def kernels_of_a_layer(kind: str) -> float:
    """Kernels that a layer's forward launches in transformers' own code."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        launched = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launched += not any(word in str(func) for word in NOT_LAUNCHED)
            return func(*args, **(kwargs or {}))

    counts = []
    for layers in (1, 1 + LAYERS):
        if kind == "llama":
            config = transformers.LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, vocab_size=64
            )
        else:
            config = transformers.GPT2Config(n_embd=16, n_layer=layers, n_head=2, vocab_size=64)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
            tokens = torch.zeros(1, 8, dtype=torch.long)
        with Count() as counted:
            model(input_ids=tokens)
        counts.append(counted.launched)
    return (counts[1] - counts[0]) / LAYERS


def listed(name: str) -> int:
    facts = next(iter(resolve_job(Job(model=name, gpu="h100-sxm5-80gb")).estimate().workings.memory.facts.values()))
    return sum(operation.kind != "view" for operation in facts.layer)


@pytest.mark.parametrize(("kind", "name"), [("llama", "llama-3.1-8b"), ("gpt2", "gpt2")])
def test_kernels_are_as_many_as_transformers_launches(kind: str, name: str):
    assert kernels_of_a_layer(kind) / listed(name) == pytest.approx(KERNELS, rel=0.5)


def step(**flags: Any) -> float:
    values = {"model": "gpt2", "gpu": "h100-sxm5-80gb", "seq_len": 128, "micro_batch": 1, "optimizer": "adamw-fused"}
    time = resolve_job(Job(**{**values, **flags})).estimate().time
    assert time is not None
    return time.step


def test_a_small_model_waits_for_its_launches():
    # 12 layers of 15 operations, forward and backward; what a faster card saves is next to nothing.
    least = 2 * 12 * 15 * KERNELS * HOST_LAUNCH["eager"]
    assert least < step() < 1.5 * least
    assert step() > 0.9 * step(gpu="b200-sxm-180gb") > 0.7 * step()
    assert step(compile=True) < 0.6 * step()


def test_a_large_batch_hides_the_host():
    # The GPU works longer than the host: eight times the tokens take eight times as long, to what a launch takes.
    assert step(micro_batch=256, seq_len=1024) == pytest.approx(8 * step(micro_batch=32, seq_len=1024), rel=0.025)
    assert host_seconds("graphs") == 0


def test_a_pass_that_waits_for_its_launches_takes_their_time() -> None:
    """Of a small model the host is the slower one all the way: each pass takes its launches, whatever the GPU computes."""
    job = Job(model="gpt2", gpu="h100-sxm5-80gb", gpus=1, seq_len=64, micro_batch=1, global_batch=4, recompute="none")
    result = resolve_job(job.replace(framework="huggingface", precision="bf16")).estimate()
    time, step = result.time, result.workings.step
    assert time is not None
    ((key, facts),) = result.workings.memory.facts.items()
    work = [operation for operation in facts.layer if operation.kind != "view"]
    ahead, back = len(work), sum(operation.gradients for operation in work)
    passes = sum(time.parts[lane] for lane in ("forward", "backward", "host"))
    assert passes == pytest.approx(12 * 4 * (ahead + back) * step.machine.host, rel=1e-9)
    waits = step.layers[key]
    assert waits.forward["host"] * back == pytest.approx(waits.backward["host"] * ahead, rel=1e-9)


def test_fsdp2_reduces_in_float32_what_it_computes_in_16_bits() -> None:
    """`MixedPrecisionPolicy(reduce_dtype=torch.float32)`: four bytes an element come together, two are gathered."""
    for precision, times in (("bf16-pure", 1), ("bf16-pure-32", 2)):
        job = Job(
            model="llama-3.2-1b", gpu="h100-sxm5-80gb", gpus=8, zero=3, framework="torchtitan", precision=precision
        )
        network = resolve_job(job).estimate().network
        assert network is not None
        payloads = {row.collective: row.payload for row in network if row.axis == "dp"}
        assert payloads["reduce_scatter"] == times * payloads["all_gather"]


def test_a_whole_checkpoint_has_the_experts_of_all_ranks() -> None:
    job = Job(model="qwen3-30b-a3b", gpu="h100-sxm5-80gb", gpus=8, ep=8, zero=3, save="full")
    assert resolve_job(job).estimate().memory.saving == 2 * 30_532_122_624


def test_gradients_of_micro_batches_are_added_up() -> None:
    """Each but the first is read, with those before, and their sum written; buffers that stay are added to in the product."""
    job = Job(model="gpt2", gpu="h100-sxm5-80gb", gpus=1, micro_batch=1, global_batch=1, precision="bf16-autocast")

    def update(framework: str, batch: int, **more: Any) -> tuple[float, float]:
        run = resolve_job(job.replace(framework=framework, global_batch=batch, **more)).estimate()
        assert run.time is not None
        return run.time.parts["optimizer"], run.workings.step.machine.memory("elementwise").forward

    once, rate = update("huggingface", 1)
    parameters = 124_439_808
    assert update("huggingface", 4)[0] - once == pytest.approx(3 * 3 * 4 * parameters / rate)
    assert update("megatron", 4)[0] == pytest.approx(update("megatron", 1)[0])
    for sync, share in (("last", 1), ("each", 2)):  # FSDP waits with whole gradients, or adds shards
        shared = [update("huggingface", batch, gpus=2, zero=3, gradient_sync=sync)[0] for batch in (2, 8)]
        assert shared[1] - shared[0] == pytest.approx(3 * 3 * 4 * parameters / share / rate, rel=1e-3)
