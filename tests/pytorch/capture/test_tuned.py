"""Captured models of which adapters or a part are trained, against steps with PEFT's own modules and frozen parameters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from transformers import CONFIG_MAPPING

import loadgauge
from in_process import in_process
from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.layers.operations.rank_view import View
from loadgauge.pytorch.capture import road
from loadgauge.pytorch.capture.inputs.kinds import of_config
from loadgauge.pytorch.capture.lists.blocks import Stack
from loadgauge.pytorch.capture.record import Recorded, record
from loadgauge.pytorch.capture.requests import list_request
from loadgauge.pytorch.capture.requests.regime import Regime
from loadgauge.pytorch.capture.requests.tuning import Named, chosen_of
from loadgauge.pytorch.trace.programs.training import Sized
from loadgauge.pytorch.trace.torch_run import TorchRun

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "intermediate_size": 160,
}
KEYS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_hidden_layers": 4},
    "bitnet": SMALL | {"num_hidden_layers": 4},
    "mixtral": SMALL | {"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bart": {
        "d_model": 64, "vocab_size": 320, "max_position_embeddings": 128, "encoder_layers": 3, "decoder_layers": 3,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    },
}  # fmt: skip
SIZES: dict[str, int] = {"b": 6, "s": 96, "t": 96}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Captures in this process, kept nowhere else."""

    in_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(road, "_FAMILIES", {})


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures with numbers alone, which are three times as fast."""

    def refused(*_: Any) -> Any:
        raise NotModelled("numbers")

    monkeypatch.setattr(list_request, "recorded", refused)


def captured(kind: str, folder: Path, **fields: Any) -> Estimate:
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(KEYS[kind] | {"model_type": kind}))
    given: dict[str, Any] = {
        "micro_batch": SIZES["b"], "seq_len": SIZES["s"], "precision": "bf16-pure", "optimizer": "sgd",
        "framework": "huggingface", "road": "captured",
    }  # fmt: skip
    return loadgauge.estimate(str(file), **(given | fields))


def real(kind: str, change: Callable[[Any], Any], precision: str = "bf16-pure") -> Recorded:
    """The very step, all layers, with a module as `change` leaves it."""
    run = TorchRun.of(Job(model="", seq_len=1, precision=precision, optimizer="sgd"))
    job = of_config(CONFIG_MAPPING[kind](**KEYS[kind]), run)

    def build(device: str) -> Any:
        module = job.build(device)
        with torch.device(device):
            change(module)
        return module

    return record(Sized(build, job.inputs, job.loss, run, job.names), {name: SIZES[name] for name in job.names})


def check(found: Estimate, truth: Recorded, peaks: float = 2e-3) -> None:
    """Trained elements and FLOPs are equal, the peak is, but for moments that the list leaves to others."""
    memory = found.workings.memory
    layers = [*memory.block_layers(), *memory.end_layers()]
    times = [found.model.pattern.count(kind) for kind in range(len(found.model.blocks))] + [1, 1]
    trained = sum(
        n * weight.numel for n, layer in zip(times, layers, strict=True) for weight in layer.weights if weight.trainable
    )
    weights = {one.name: one for one in truth.weights.values()}
    assert trained == sum(torch.Size(one.shape).numel() for one in weights.values() if one.trained)
    assert found.flops.hardware == sum(op.flops for op in truth.ops[truth.second :] if op.flops)
    peak = max(float(moment.total) - float(moment.parts["outside"]) for moment in found.workings.phases)
    assert peak == pytest.approx(max(itertools.accumulate(truth.changes)), rel=peaks)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize(
    ("kind", "fields", "config"),
    [
        ("llama", {}, {"target_modules": "all-linear"}),
        ("bitnet", {"lora_targets": "q_proj,v_proj", "lora_dropout": 0.1},
         {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}),
        ("mixtral", {"lora_targets": "o_proj,experts.down_proj"},
         {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]}),
        ("bart", {"lora_targets": r".*decoder\.layers\.[12]\..*(k|v)_proj", "use_dora": True},
         {"target_modules": r".*decoder\.layers\.[12]\..*(k|v)_proj", "use_dora": True}),
    ],
)  # fmt: skip
def test_adapters_are_what_peft_makes_of_the_class(
    kind: str, fields: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    found = captured(kind, tmp_path, lora_rank=4, **fields)
    how = peft.LoraConfig(r=4, **config)
    check(found, real(kind, lambda module: peft.get_peft_model(module, how)))
    assert found.params == sum(
        one.numel()
        for one in of_config(CONFIG_MAPPING[kind](**KEYS[kind]), TorchRun.of(Job(model=""))).build("meta").parameters()
    )


@pytest.mark.long
def test_adapters_are_those_of_the_written_family_at_sizes_never_captured(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lora_rank": 4, "precision": "bf16", "optimizer": "adamw"}
    asked["recompute"] = "full"
    captured("llama", tmp_path, micro_batch=2, seq_len=64, **asked)
    own, written = (captured("llama", tmp_path, road=way, **asked) for way in ("captured", "written"))
    # Adapters in float32 beside 16-bit weights, with their gradients and moments.
    for name in ("weights", "gradients", "optimizer"):
        assert float(own.workings.phases[-1].parts[name]) == float(written.workings.phases[-1].parts[name])
    assert (own.params, own.flops.forward) == (written.params, written.flops.forward)
    peaks = [max(float(one.total) for one in each.workings.phases) for each in (own, written)]
    assert peaks[0] == pytest.approx(peaks[1], rel=2e-3)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize(
    ("kind", "words", "trains"),
    [
        ("llama", "layers.-2:,lm_head", lambda name: "layers.2" in name or "layers.3" in name or "lm_head" in name),
        ("bitnet", "layers.1.mlp", lambda name: "layers.1.mlp" in name),
        # The table is the encoder's too, so that its `parameters()` have it.
        ("bart", "but:encoder", lambda name: ".encoder." not in name and ".shared." not in name),
    ],
)
def test_a_part_is_what_a_step_with_frozen_parameters_trains(
    kind: str, words: str, trains: Callable[[str], bool], tmp_path: Path
) -> None:
    def change(module: Any) -> None:
        for name, one in module.named_parameters():
            one.requires_grad_(trains(name))

    check(captured(kind, tmp_path, train=words), real(kind, change))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"logprobs": "pairs"}, "not that of a post-training task"),
        ({"loss_pieces": 2}, "the loss float32 in 2 pieces"),
        ({"loss": "liger"}, "the loss liger"),
    ],
)
def test_a_loss_that_the_code_does_not_have_is_refused(changes: dict[str, Any], why: str) -> None:
    view = View(tokens=8, pairs=8, kernels=msgspec.structs.replace(Kernels(), **changes))
    with pytest.raises(NotModelled, match=why):
        Regime.of(view, "a model")
    assert Regime.of(View(tokens=8, pairs=8), "a model") == Regime()


@pytest.mark.usefixtures("numbers")
def test_time_follows_what_is_trained(tmp_path: Path) -> None:
    seconds = []
    for words in ("lm_head", None):
        found = captured("llama", tmp_path, train=words, gpu="h100")
        assert found.time is not None
        seconds.append(found.time.step)
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        (
            {"lora_rank": 4, "lora_targets": "q_prj"},
            ConfigError,
            "no layer 'q_prj' in this model .*did you mean 'q_proj'",
        ),
        ({"lora_rank": 4, "lora_targets": r".*\.nothing"}, ConfigError, "fits no whole name of a layer"),
        ({"lora_rank": 4, "lora_targets": "(q"}, ConfigError, "is no regular expression"),
        ({"lora_rank": 4, "modules_to_save": "nothing"}, ConfigError, "no module is called 'nothing'"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, ConfigError, "must be below 1"),
        ({"train": "lm_haed"}, ConfigError, "no parameter is called 'lm_haed' .*did you mean 'lm_head'"),
        ({"train": "layers.9"}, ConfigError, "are none of the 4 layers"),
        ({"train": "lm_head", "lora_rank": 4}, ConfigError, "beside adapters: --modules-to-save"),
        ({"lora_rank": 4, "kbit_upcast": "all"}, NotModelled, "that are cast to float32 without --qlora"),
        ({"adapter": "vera"}, NotModelled, "VeRA on captured layers"),
    ],
)
def test_what_no_module_has_is_one_line(
    fields: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        captured("llama", tmp_path, **fields)


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("vision", {0}),
        ("text.layers.0,lm_head", {1, 3}),
        ("layers.*.norm", {4}),
        ("but:vision,but:layers", {3}),
        (r"text\.layers\.\d+\.fc", {1, 2}),
        ("frozen:0.75", {3, 4}),
    ],
)
def test_words_name_parameters(words: str, places: set[int]) -> None:
    every = [
        Named(("vision.fc.weight",), 4), Named(("text.layers.0.fc.weight",), 4), Named(("text.layers.1.fc.weight",), 4),
        Named(("text.embed.weight", "lm_head.weight"), 4), Named(("text.layers.1.norm.weight",), 2),
    ]  # fmt: skip
    stacks = [Stack("text.layers", ("text.layers.0", "text.layers.1"), (0, 1))]
    assert chosen_of(every, stacks, words) == places


@pytest.mark.usefixtures("numbers")
def test_adapters_are_split_with_their_layers(tmp_path: Path) -> None:
    """As PEFT does: the second matrix of a layer that is split by columns, the first of one that is split by rows."""
    own, written = (
        captured("llama", tmp_path, road=way, lora_rank=4, lora_targets="q_proj,o_proj", gpus=2, tp=2)
        for way in ("captured", "written")
    )
    layer = own.workings.memory.block_layers()[-1]
    width = SMALL["hidden_size"]
    rows = {weight.name: weight.numel for weight in layer.weights if weight.trainable}
    assert sorted(rows.values()) == [4 * width // 2, 4 * width // 2, 4 * width, 4 * width]
    assert own.workings.phases[-1].parts["weights"] == written.workings.phases[-1].parts["weights"]
    assert own.flops == written.flops
    # Each adapter's rows are summed over the ranks once: forward of the one, backward of the other.
    sent = sorted(int(c.nbytes) for op in layer for c in (*op.forward_comm, *op.backward_comm))
    rows_of_two = SIZES["b"] * SIZES["s"] * 2
    assert sent == [2 * 4 * rows_of_two] * 2 + [width * rows_of_two] * 4  # of the adapters in float32
    kept = [memory.block_layers()[-1].saved() for memory in (own.workings.memory, written.workings.memory)]
    assert float(kept[0]) == pytest.approx(float(kept[1]), rel=1e-3)


@pytest.mark.usefixtures("numbers")
def test_what_peft_does_not_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no magnitudes of DoRA"):
        captured("llama", tmp_path, lora_rank=4, use_dora=True, gpus=2, tp=2)
