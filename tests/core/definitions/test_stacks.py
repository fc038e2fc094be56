"""Releases of libraries, and the defaults that follow from them."""

from __future__ import annotations

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.stacks import ADAMW_STEP, LOADED_DTYPE, LOADED_DTYPE_SFT, Stack
from loadgauge.core.resolve.resolve import resolve_job


@pytest.mark.parametrize(
    ("version", "way"),
    [
        ("", "fused"), ("transformers=4.54,torch=2.8", "fused"), ("transformers=4.57,torch=2.7", "foreach"),
        ("transformers=4.53.3,torch=2.8", "foreach"),
    ],
)  # fmt: skip
def test_the_release_decides_how_adamw_runs(version: str, way: str) -> None:
    assert ADAMW_STEP.at(Stack.parse(version)).value == way


def test_the_release_decides_what_is_loaded() -> None:
    assert [LOADED_DTYPE.at(Stack.parse(text)).value for text in ("", "transformers=4.57")] == ["auto", "float32"]
    assert LOADED_DTYPE_SFT.at(Stack()).value == "float32"
    assert LOADED_DTYPE_SFT.at(Stack.parse("trl=0.26")).value == "auto"


@pytest.mark.parametrize("text", ["torch", "torch=", "torch=new", "torch=2.6,torch=2.7", "numpy=2", "=2"])
def test_what_is_no_release_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Stack.parse(text)
    assert caught.value.key == "version"


BASE = Job(model="llama-3.2-1b", seq_len=512)


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({}, 2 + 2 + 4),
        ({"weights": "float32"}, 4 + 4 + 8),
        ({"version": "transformers=4.57"}, 4 + 4 + 8),
        ({"version": "transformers=4.57", "weights": "bfloat16"}, 2 + 2 + 4),
        ({"optimizer": "adamw-foreach"}, 2 + 2 + 4 + 2),
        ({"version": "transformers=4.50,torch=2.6"}, 4 + 4 + 8 + 4),
        ({"precision": "fp16"}, 4 + 4 + 8),
        ({"framework": "deepspeed"}, 2 + 2 + 4 + 8 + 4),
    ],
)
def test_bytes_of_a_parameter_in_the_optimizer_step(changes: dict[str, str], nbytes: int) -> None:
    result = resolve_job(BASE.replace(**changes)).estimate()
    step = result.memory.moments[-1]
    held = sum(step.parts[part] for part in ("weights", "gradients", "optimizer", "transient"))
    assert held / result.params == pytest.approx(nbytes, rel=1e-3)


def test_fsdp_shards_float32_whatever_was_loaded() -> None:
    two = [
        resolve_job(BASE.replace(framework="huggingface", gpus=8, zero=3, weights=weights)).estimate()
        for weights in ("bfloat16", "float32")
    ]
    assert two[0].memory == two[1].memory
    step = two[0].memory.moments[-1]
    held = sum(step.parts[part] for part in ("weights", "gradients", "optimizer"))
    assert held * 8 / two[0].params == pytest.approx(16, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--weights bfloat16 --precision fp16", "scaler takes those of float32"),
        ("--weights float32 --precision bf16-pure", "says what the weights are"),
        ("--weights float32 --framework megatron", "keeps its own copies"),
        ("--version transfomers=4", "did you mean 'transformers'?"),
    ],
)
def test_what_would_change_nothing_is_refused(flags: str, words: str) -> None:
    found = typed(f"estimate llama-3.2-1b {flags}")
    assert (found.code, found.out) == (2, "")
    assert words in found.err


def test_both_outcomes_are_shown() -> None:
    told = typed("estimate llama-3.2-1b --seq-len 512")
    assert "--weights bfloat16 is assumed; --weights float32:" in " ".join(told.out.split())
    (line,) = [one for one in document("estimate llama-3.2-1b --seq-len 512")["outcomes"] if one["name"] == "--weights"]
    other = document("estimate llama-3.2-1b --seq-len 512 --weights float32")
    assert line["total"] == other["memory"]["total"]


def test_the_checkpoint_says_what_auto_is() -> None:
    from loadgauge.core.families.hf import from_dict

    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    for dtype in ("float32", "bfloat16"):
        setup = resolve_job(BASE, from_dict({**config, "torch_dtype": dtype}))
        assert setup.training.weights == dtype


def test_float32_attention_of_few_key_heads_is_written_out_since_transformers_shares_them() -> None:
    # A run of 4.49 that measured it reserved 44.7 GiB, at 8,192 tokens; written-out scores are 8 GiB a copy and sequence.
    def peak(model: str, version: str | None) -> float:
        job = Job(model=model, precision="fp32", seq_len=8192, recompute="full", lora_rank=8, version=version)
        return resolve_job(job).estimate().memory.allocated

    new, old = (peak("llama-3.1-8b", version) for version in ("transformers=4.54", "transformers=4.53"))
    assert new - old > 4 * 32 * 8192**2  # bytes of one copy of the scores
    assert peak("llama-3.1-8b", None) == new
    assert peak("llama-2-7b", "transformers=4.53") == peak("llama-2-7b", "transformers=4.54")
