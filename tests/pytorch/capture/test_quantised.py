"""Captured models of which adapters on a base in 4 bits are trained, against models that transformers and bitsandbytes loaded on
the CPU, their steps, and steps with bitsandbytes' layers on the simulated device."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from test_tuned import KEYS, SMALL, captured, here, numbers  # noqa: F401
from transformers import CONFIG_MAPPING

from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled
from loadgauge.core.estimate.memory.rank_memory import stages
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.layers.operations.operations import Layer
from torch_qlora import adapted, loaded, packed, traced

pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")
RANK = 4
SIZE = (2, 96)
MODELS: dict[str, dict[str, Any]] = {
    # Layers of 60 x 20 and 60 x 150: no whole number of blocks of 64.
    "bitnet": {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "vocab_size": 320,
               "intermediate_size": 150, "num_hidden_layers": 3},
    # Layers with biases, which are stored as columns, and a head that is the table.
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 320},
    "diffllama": SMALL | {"num_hidden_layers": 3},
}  # fmt: skip


def estimated(kind: str, folder: Path, **fields: Any) -> Estimate:
    asked: dict[str, Any] = {"micro_batch": SIZE[0], "seq_len": SIZE[1], "lora_rank": RANK, "qlora": True}
    asked |= {"precision": "bf16", "optimizer": "adamw", "recompute": "none"}
    return captured(kind, folder, **(asked | fields))


def layers_of(found: Estimate) -> list[tuple[int, Layer]]:
    """How often each layer is there."""
    memory = found.workings.memory
    times = [found.model.pattern.count(kind) for kind in range(len(found.model.blocks))] + [1, 1]
    return list(zip(times, [*memory.block_layers(), *memory.end_layers()], strict=True))


def kept(found: Estimate) -> float:
    memory = found.workings.memory
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    given = [
        one.nbytes
        for _, layer in layers_of(found)
        for op in layer
        for one in op.keeps
        if one.name in ("inputs", "buffers")
    ]
    return float(held.kept + held.head - sum(given))


@pytest.mark.slow
@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize(
    ("kind", "base", "upcast", "checkpointed", "dropout"),
    [("bitnet", "nf4", "all", False, 0.0), ("gpt2", "nf4-single", "all", False, 0.0), ("diffllama", "fp4", "none", True, 0.1)],
)  # fmt: skip
@pytest.mark.long
def test_a_step_is_that_of_bitsandbytes_layers_where_transformers_puts_them(
    kind: str,
    base: str,
    upcast: str,
    checkpointed: bool,
    dropout: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KEYS, kind, MODELS[kind])
    config = CONFIG_MAPPING[kind](**MODELS[kind])
    model = loaded(config, tmp_path / "model", base)
    real = packed(model)
    found = estimated(
        kind, tmp_path, base=base, kbit_upcast=upcast, lora_dropout=dropout or None,
        recompute="full" if checkpointed else "none",
    )  # fmt: skip
    mine: Counter[tuple[int, ...]] = Counter()
    for times, layer in layers_of(found):
        for weight in layer.weights:
            if weight.base:
                mine[weight.shape or ()] += times
    assert mine == Counter(shape for shape, _ in real.values())
    lora = found.training.lora
    assert lora is not None
    assert lora.stored is not None
    # A last scale of values, and one of scales, are whole where their blocks are not.
    nbytes = lora.stored.nbytes * sum(times * math.prod(shape) for shape, times in mine.items())
    assert 0 <= sum(each for _, each in real.values()) - nbytes < 5 * len(real)
    rest = sum(one.nbytes for one in adapted(model, upcast, RANK).parameters() if one.is_floating_point())
    # bitsandbytes casts a bias to the dtype of its product when it first runs.
    biases = [model.get_submodule(f"{name}.base_layer").bias for name in real]
    rest -= sum(one.nbytes - 2 * one.numel() for one in biases if one is not None)
    assert float(found.workings.phases[-1].parts["weights"]) == nbytes + rest

    tokens = ("input_ids", "labels", *(("decoder_input_ids",) if config.is_encoder_decoder else ()))
    seen = traced(
        config, set(real), dict.fromkeys(tokens, SIZE), base, upcast, RANK, checkpointed=checkpointed, dropout=dropout
    )
    # Tables that turn codes into values: one of types, and one of scales with their mean, for each layer.
    codes = len(real) * (16 * 4 + (256 * 4 + 4 if base == "nf4" else 0))
    peak = max(float(moment.total) - float(moment.parts["outside"]) for moment in found.workings.phases)
    assert peak + codes == pytest.approx(seen.peak.total, rel=2e-3)
    if not checkpointed:
        # The stand-in for CUDA's kernel multiplies below PyTorch's counter, which sees the other products.
        ahead = 2 * math.prod(SIZE) * sum(times * math.prod(shape) for shape, times in mine.items())
        assert found.flops.hardware == seen.flops.total + ahead
        assert kept(found) == pytest.approx(seen.saved_nbytes, rel=1e-3)


class Held:
    """A tensor that the graph keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.slow
@pytest.mark.usefixtures("numbers")
def test_a_real_step_on_the_cpu_keeps_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DoRA, which makes whole matrices in each step, of which nothing is kept."""
    monkeypatch.setitem(KEYS, "bitnet", MODELS["bitnet"])
    model = loaded(CONFIG_MAPPING["bitnet"](**MODELS["bitnet"]), tmp_path / "model", "nf4").train()
    model.set_attn_implementation("eager")
    how = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", use_dora=True)
    model = peft.get_peft_model(model, how)
    ids = torch.zeros(SIZE, dtype=torch.long)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), ids)}
    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    storages = {one.data_ptr(): one.nbytes() for one in (held.tensor.untyped_storage() for held in alive)}
    found = estimated("bitnet", tmp_path, precision="bf16-pure", kbit_upcast="none", attention="eager", use_dora=True)
    # The list has the loss itself too.
    assert kept(found) - loss.nbytes == pytest.approx(sum(n for at, n in storages.items() if at not in own), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"recompute": "full"}),
        ("mixtral", {"lora_targets": "q_proj,k_proj,v_proj,o_proj", "kbit_upcast": "none"}),
        ("llama", {"gpus": 2, "zero": 3, "kbit_upcast": "none", "optimizer": "paged-adamw-8bit"}),
    ],
)
@pytest.mark.usefixtures("numbers")
def test_both_roads_agree(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    own, written = (estimated(kind, tmp_path, road=way, **fields) for way in ("captured", "written"))
    assert (own.params, own.flops) == (written.params, written.flops)
    for name in ("weights", "gradients", "optimizer"):
        assert float(own.workings.phases[-1].parts[name]) == float(written.workings.phases[-1].parts[name])
    peaks = [
        max(float(one.total) - float(one.parts["outside"]) for one in each.workings.phases) for each in (own, written)
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=2e-3)


@pytest.mark.long
def test_formulas_hold_at_sizes_never_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loadgauge.pytorch.capture import road
    from loadgauge.pytorch.capture.requests import list_request

    asked = {"recompute": "full", "kbit_upcast": "all"}
    first = estimated("llama", tmp_path, micro_batch=3, seq_len=64, **asked)
    assert not any(listing.plain for listing in first.model.listed.known)  # type: ignore[union-attr]

    def refused(*_: Any) -> Any:
        raise NotModelled("nothing is captured again")

    with monkeypatch.context() as patch:
        patch.setattr(list_request, "list_request", refused)
        own = estimated("llama", tmp_path, **asked)
    monkeypatch.setattr(road, "_FAMILIES", {})
    written = estimated("llama", tmp_path, road="written", **asked)
    assert own.flops == written.flops
    peaks = [max(float(one.total) for one in each.workings.phases) for each in (own, written)]
    assert peaks[0] == pytest.approx(peaks[1], rel=2e-3)


@pytest.mark.usefixtures("numbers")
def test_a_product_has_its_matrix_and_the_time_of_making_it(tmp_path: Path) -> None:
    """`roofline.dequantising` goes by the weights of products; what makes a matrix has no time of its own."""
    found = estimated("llama", tmp_path)
    every = [op for _, layer in layers_of(found) for op in layer]
    base = [op for op in every if any(weight.base for weight in op.weights)]
    assert all(op.gemms and sum(weight.base for weight in op.weights) == 1 for op in base)
    making = [op for op in every if "dequantize" in op.name]
    assert len(making) == 2 * len(base)  # scales, and the matrix
    assert {op.moves for op in making} == {(0, 0)}
    assert all(op.input_gradient_flops == op.forward_flops and not op.weight_gradient_flops for op in base[7:])


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"base": "int8"}, NotModelled, r"a base of captured layers in int8 \(known: nf4, nf4-single, fp4\)"),
        ({"gpus": 2, "tp": 2}, LayoutError, "matrices in 4 bits are packed as they lie, and no plan splits them"),
        ({"modules_to_save": "q_proj"}, NotModelled, "only Tensors of floating point dtype can require gradients"),
        ({"adapter": "vera"}, NotModelled, "VeRA on captured layers"),
        ({"version": "bitsandbytes=0.43"}, NotModelled, "with the bitsandbytes that is installed"),
    ],
)
@pytest.mark.usefixtures("numbers")
def test_what_is_not_known_of_4_bits_is_one_line(
    fields: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        estimated("llama", tmp_path, **fields)


def test_of_a_module_of_ones_own_all_but_the_last_is_put_in_4_bits(tmp_path: Path) -> None:
    """As transformers' loader does: two matrices, half a byte an element and a scale of a byte for 64; the head in float32."""
    import loadgauge

    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def model(): return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)])\n"
        "def batch(b): return torch.zeros(b, 1024)\n"
    )
    found = loadgauge.estimate(f"{file}:model", inputs=f"{file}:batch", qlora=True, lora_rank=8, micro_batch=2)
    elements = 1024 * 1024
    scales = elements // 64
    outer = 4 * scales // 256
    adapters = 3 * 2 * 1024 * 8 * 4
    weights = 2 * (elements // 2 + scales + outer) + 4 * elements + adapters
    assert found.memory.parts["weights"] == pytest.approx(weights, rel=2e-3)


def test_without_bitsandbytes_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        estimated("llama", tmp_path)
