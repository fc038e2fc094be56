"""What must hold with every release of PyTorch and transformers that is admitted: `make versions` runs this with the oldest, a
middle and, as part of the suite, the newest. It asks transformers for small models that the oldest has too."""

from __future__ import annotations

import gc
import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import from_dict
from loadgauge.pytorch.measure.callback import MeasureCallback
from loadgauge.pytorch.measure.train_steps import measure_steps
from loadgauge.pytorch.trace.programs.jobs import ConfigJob, of_module
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.trace import trace
from torch_peak import highest

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
WITHOUT_GROUPS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SMALL, "Mistral": SMALL, "Qwen2": SMALL, "Gemma": {**SMALL, "head_dim": 16},
    "Gemma2": {**SMALL, "head_dim": 16}, "Phi3": {**SMALL, "pad_token_id": 0}, "Mixtral": {**SMALL, "num_local_experts": 4},
    "GPTNeoX": WITHOUT_GROUPS, "Starcoder2": SMALL, "Olmo": SMALL,
}  # fmt: skip


def config_of(name: str) -> Any:
    """A small config of a family, of transformers."""
    return getattr(transformers, f"{name}Config")(**FAMILIES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_class(name: str) -> None:
    config = config_of(name)
    kind = getattr(transformers, f"{name}ForCausalLM")  # imported here: some releases compute as they are imported
    with torch.device("meta"):
        model = kind(config)
    own = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
    assert parameters(from_dict(config.to_dict(), class_defaults=True)).total == own


def test_the_traced_peak_is_that_of_the_real_allocator() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of("Llama")).train()
    model.config.use_cache = False
    ids = torch.randint(3, 300, (2, 64))
    found = trace(of_module(model, ids, keywords={"labels": ids}, optimizer="adamw"), "cpu")
    step_of = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = {one.data_ptr(): one.untyped_storage().nbytes() for one in [*model.parameters(), *model.buffers()]}
    model(ids, labels=ids).loss.backward()  # what a library makes once
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            step_of.step()
            step_of.zero_grad(set_to_none=True)
    assert found.peak.total == pytest.approx(sum(own.values()) + ids.nbytes + highest(profiler), rel=2e-3)


@pytest.mark.parametrize("precision", ["bf16-pure", "bf16-autocast"])
def test_as_cuda_attention_keeps_no_scores(precision: str) -> None:
    """On the simulated device attention is one fused kernel: what it keeps grows with the tokens, not with their square.

    transformers up to 4.57.1 builds a mask for all heads and layers beside it; scores are at least of 2 bytes, 4 heads, 2 layers.
    """
    peaks = []
    for seq_len in (32, 64, 128):
        run = TorchRun.of(Job(model="", seq_len=seq_len, micro_batch=4, precision=precision))
        found = trace(ConfigJob(config_of("Llama"), run))
        peaks.append(found.phases["backward"])
        assert found.steps == 2
    squares = 4 * (128**2 - 64**2 - 2 * (64**2 - 32**2))  # of a micro-batch, for a byte a score
    assert abs(peaks[2] - peaks[1] - 2 * (peaks[1] - peaks[0])) <= max(4 * squares, 0.02 * (peaks[2] - peaks[1]))


def test_measure() -> None:
    run = TorchRun.of(Job(model="", seq_len=32, micro_batch=2, precision="fp32"))
    config = config_of("Llama")
    taken = measure_steps(ConfigJob(config, run))
    # Six FLOPs a weight of a matrix product and token, and at most as much again for attention's scores.
    weights = parameters(from_dict(config.to_dict(), class_defaults=True)).total - 300 * 64 - 5 * 64
    assert 6 * weights * 64 <= taken.model_flops <= 1.2 * 6 * weights * 64


def test_the_callback_in_trainer() -> None:
    pytest.importorskip("accelerate")
    model = transformers.LlamaForCausalLM(config_of("Llama"))
    rows = [{"input_ids": [token + 1] * 16, "labels": [token + 1] * 16} for token in range(20)]
    callback = MeasureCallback(1e12)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=5, per_device_train_batch_size=2, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        transformers.Trainer(
            model, arguments, train_dataset=rows, callbacks=[callback], data_collator=transformers.default_data_collator
        ).train()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert callback.result.states["optimizer states"] == pytest.approx(2 * weights, rel=1e-3)
    assert len(callback.result.seconds) == 2  # of five steps the first, and two with instruments, do not count
    assert callback.result.model_flops > 0


def test_padding_free_checks_itself_or_says_what_it_needs() -> None:
    if not hasattr(transformers, "AttentionMaskInterface"):
        with pytest.raises(ImportError, match=r"needs transformers 4\.53"):
            importlib.import_module("loadgauge.train")
        return
    from loadgauge.train import Collator, check, enable

    model = enable(transformers.LlamaForCausalLM(config_of("Llama")))
    found = check(model, Collator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10]}]))
    assert found.ok
    assert found.leak.worst == 0


def test_what_a_release_lacks_is_said(tmp_path: Path) -> None:
    from torch.utils import backend_registration

    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this release has everything")
    from loadgauge.pytorch.parallel.distributed import fake_process_group

    with pytest.raises(NotModelled, match="several GPUs"), fake_process_group(2, 0, None):  # type: ignore[arg-type]
        pass
