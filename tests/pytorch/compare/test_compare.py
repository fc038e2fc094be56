"""Formula, trace and measurement of the same job: equal, or the difference is named by operation, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from command_line import typed
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.training.optimizers import NO_TEMPORARIES
from loadgauge.pytorch.compare.compare import Cause, Comparison, Formula, Line, compare, match, place_of, saved_lines
from loadgauge.pytorch.trace.programs.jobs import ConfigJob, of_module
from loadgauge.pytorch.trace.trace import record
from torch_models import CASES, NO_SDPA, SIZES, build
from torch_runs import torch_run

S, B = 96, 2  # rows of 32, which the memory-efficient kernel rounds up to
IDS = 8  # bytes of an index

FLASH = {"sdpa": "flash"}
"""Our words for those of transformers."""


def config_of(name: str, **keys: Any) -> Any:
    config = build(name, "eager" if name in NO_SDPA else "sdpa", torch.bfloat16, vocab_size=500, **keys).config
    config.architectures = [CASES[name].model]
    return config


def moe(kind: str, **keys: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "vocab_size": 500, "num_key_value_heads": 2, **keys})
    config.architectures = [f"{kind}ForCausalLM"]
    return config


EXPERTS = {
    "mixtral": lambda: moe("Mixtral", num_local_experts=4),
    "qwen3-moe": lambda: moe("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16),
    "deepseek-v3": lambda: moe(
        "DeepseekV3", num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        first_k_dense_replace=1, moe_intermediate_size=48,
    ),
}  # fmt: skip


def named(causes: list[Cause]) -> dict[str, int]:
    """Every difference by its reason; what has none stays under its own name."""
    found: dict[str, int] = {}
    for cause in causes:
        reason = next((why for part, why in REASONS.items() if part in cause.op), cause.op)
        found[reason] = found.get(reason, 0) + cause.amount
    return found


RANDOM = "state of the random numbers of a fused kernel"
CLASSES = "sum of the weights of the classes"
ROWS = "ids of positions and types"
LABELS = "labels, which are the ids themselves where nothing is shifted"
BIAS = "mask as the memory-efficient kernel takes it"
REASONS = {
    "rng_state": RANDOM, "keeps unused": RANDOM, "philox": RANDOM, "total_weight": CLASSES, "positions.ids": ROWS,
    "types.ids": ROWS, "EmbeddingBackward0 keeps indices": ROWS, "head.labels": LABELS, "keeps attn_bias": BIAS,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_of_families(name: str) -> None:
    """As on CUDA, in bfloat16: what autograd keeps is what the list of operations says, but for what is named."""
    attention = "eager" if name in NO_SDPA else "sdpa"
    job = ConfigJob(
        config_of(name),
        torch_run(seq_len=S, micro_batch=B, optimizer="sgd", attention=FLASH.get(attention, attention)),
    )
    check(name, job)


@pytest.mark.parametrize("name", EXPERTS)
def test_saved_bytes_of_experts(name: str) -> None:
    check(name, ConfigJob(EXPERTS[name](), torch_run(seq_len=S, micro_batch=B, optimizer="sgd")))


def test_llama4_makes_no_wide_probabilities() -> None:
    """Its eager attention takes the softmax in the dtype of the scores, where most families take it in float32."""
    config = moe("Llama4Text", num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96, head_dim=16)
    config.architectures = ["Llama4ForCausalLM"]
    check("llama4", ConfigJob(config, torch_run(seq_len=S, micro_batch=B, optimizer="sgd", attention="eager")))


def test_llama4_repeats_tokens_as_wide_as_they_come() -> None:
    """Under autocast tokens are float32 until the product of the experts casts them."""
    config = moe("Llama4Text", num_local_experts=8, num_experts_per_tok=1, intermediate_size_mlp=96, head_dim=16)
    config.architectures = ["Llama4ForCausalLM"]
    job = ConfigJob(config, torch_run(seq_len=512, micro_batch=4, optimizer="sgd", precision="bf16-autocast"))
    kept = sum(line.nbytes for line in saved_lines(record(job, steps=1)))
    assert sum(line.nbytes for line in Formula(job.config, job.run).saved()) == pytest.approx(kept, rel=0.02)


def check(name: str, job: ConfigJob) -> None:
    formula, traced = Formula(job.config, job.run), record(job, steps=1)
    listed, kept = formula.saved(), saved_lines(traced)
    causes = match(listed, kept)
    difference = sum(one.nbytes for one in kept) - sum(one.nbytes for one in listed)
    assert sum(cause.amount for cause in causes) == difference
    kernels, spec = traced.trace.attention, formula.spec
    found = named(causes)
    # A seed of 16 bytes and 8 that are not used; or two of 8 bytes.
    assert found.pop(RANDOM, 0) == 24 * kernels.get("flash", 0) + 16 * kernels.get("efficient", 0)
    assert found.pop(CLASSES) == (4 if spec.head.loss_float32 else 2)
    # One row of positions, or one of each sequence; types that are not given are a buffer of the model.
    assert abs(found.pop(ROWS, 0)) <= 2 * IDS * S * B
    shifted = name not in ("bert", "roberta", "xlm-roberta-xl", "modernbert")
    assert found.pop(LABELS, 0) in ((0,) if shifted else (0, -IDS * S * B))
    efficient = kernels.get("efficient", 0)
    assert found.pop(BIAS, 0) == (2 * B * S * S * efficient if name == "modernbert" else 0)
    assert found == {}
    formula_total = sum(one.nbytes for one in listed)
    assert formula_total == sum(layer.saved(again) for _, layer, again in formula.layers())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_saved_bytes_with_checkpointing(name: str, attention: str) -> None:
    settings = torch_run(
        seq_len=S,
        micro_batch=B,
        optimizer="sgd",
        attention=FLASH.get(attention, attention),
        recompute="full",
    )
    job = ConfigJob(config_of(name), settings)
    formula, traced = Formula(job.config, job.run), record(job, steps=1)
    causes = match(formula.saved(), saved_lines(traced))
    closures = {}  # what the blocks get by keyword, a checkpoint holds without autograd
    if name == "llama-gqa":
        closures["rotary.tables keeps rotary.tables"] = -2 * 2 * S * 16
        if attention == "eager":
            closures["checkpoints keep the mask"] = -2 * B * S * S
    assert {cause.op: cause.amount for cause in causes if "total_weight" not in cause.op} == closures


# -- three ways --------------------------------------------------------------------------------------------------------


def rows(found: Comparison) -> dict[str, tuple[Any, ...]]:
    return {row.quantity: (row.formula, row.trace, row.measured) for row in found.rows}


@pytest.fixture(scope="module")
def three() -> Comparison:
    """Llama on a CPU in float32, all three ways."""
    settings = torch_run(seq_len=S, micro_batch=B, precision="fp32", optimizer="adamw-loop")
    return compare(ConfigJob(config_of("llama-gqa", hidden_size=128, intermediate_size=352), settings), "cpu", "cpu")


def test_three_ways(three: Comparison) -> None:
    found = rows(three)
    for quantity in ("weights", "gradients", "optimizer states"):
        formula, traced, measured = found[quantity]
        assert measured == traced == pytest.approx(formula, rel=1e-3)
    for quantity in ("peak of forward and backward", "peak"):
        formula, traced, measured = found[quantity]
        assert traced == pytest.approx(measured, rel=1e-3)
        assert traced == pytest.approx(formula, rel=1e-3)
    assert found["FLOPs of a step"][0] == found["FLOPs of a step"][1] == found["FLOPs of a step"][2]


def test_the_step_of_an_optimizer_that_is_not_fused_is_the_formula_s(three: Comparison) -> None:
    """AdamW on a CPU is a loop over parameters: the square root and a quotient of the largest are there at once."""
    formula, traced, _ = rows(three)["peak of the optimizer step"]
    assert traced == pytest.approx(formula, rel=5e-3)  # the state's scalars and what each parameter's loop leaves
    assert not [one for one in three.differences if one.quantity == "peak of the optimizer step"]


def test_what_a_checkpoint_does_not_run_again_is_named() -> None:
    """PyTorch stops when all is there that backward needs: the last matrix of a layer is not computed again."""
    config = config_of("llama-gqa")
    found = compare(ConfigJob(config, torch_run(seq_len=S, micro_batch=B, recompute="full", optimizer="adamw-fused")))
    one = next(one for one in found.differences if one.quantity.startswith("FLOPs"))
    down = 2 * S * B * config.hidden_size * config.intermediate_size
    assert one.amount == -config.num_hidden_layers * down
    assert one.unexplained == 0
    assert [cause.op for cause in one.causes] == ["mlp.down"]
    assert not [other for other in found.differences if "peak" in other.quantity]


def test_a_formula_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One percent of what the layers keep, put where it does not belong."""
    original = Formula.saved

    def wrong(self: Formula) -> list[Line]:
        lines = original(self)
        return [line._replace(nbytes=2 * line.nbytes) if "mlp.gate" in line.op else line for line in lines]

    monkeypatch.setattr(Formula, "saved", wrong)
    found = compare(ConfigJob(config_of("llama-gqa"), torch_run(seq_len=S, micro_batch=B, optimizer="adamw-fused")))
    one = next(one for one in found.differences if one.quantity == "saved for backward")
    assert one.unexplained == 0
    assert any("mlp.gate" in cause.op for cause in one.causes)


def test_places() -> None:
    assert place_of("transformer.h.11.mlp.experts.3.c_fc") == ("block 11", "mlp")
    assert place_of("model.layers.2.self_attn.q_norm") == ("block 2", "norm")
    assert place_of("bert.encoder.layer.1.attention.self") == ("block 1", "attention")
    assert place_of("model.embed_tokens") == ("ends", "embedding")
    assert place_of("") == ("ends", "head")


def test_matching_is_exact() -> None:
    """A view that holds the storage of three tensors, something moved to another half, and something left over."""
    a = [Line("b", "x", name, 10) for name in ("q", "k", "v")] + [Line("b", "y", "moved", 7), Line("b", "y", "a", 3)]
    b = [Line("b", "x", "qkv", 30), Line("b", "z", "moved", 7), Line("b", "y", "c", 5)]
    assert {cause.op: cause.amount for cause in match(a, b)} == {"a": -3, "c": 5}
    assert match(a, a) == []


# -- the command line --------------------------------------------------------------------------------------------------


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of("llama-gqa").to_dict(), "architectures": ["LlamaForCausalLM"]}))
    found = typed(["compare", str(path), "--seq-len", "32", "--json"])
    assert found.code == 0, found.err
    comparison = msgspec.json.decode(found.out, type=Comparison)
    assert rows(comparison)["FLOPs of a step"][0] == rows(comparison)["FLOPs of a step"][1]


def test_what_has_no_formula_is_refused() -> None:
    with pytest.raises(NotModelled, match="selective"):
        Formula(transformers.LlamaConfig(), torch_run(keep=("mm",), recompute="full"))


def test_errors(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n    pass\n")
    assert "not of scripts" in typed(["compare", f"{script}:main"]).err
    config = config_of("llama-gqa")
    with pytest.raises(ConfigError, match="optimizer"):
        torch_run(optimizer="lion")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            compare(ConfigJob(config, torch_run(seq_len=S)), measure="cuda")
    with pytest.raises(ConfigError, match="measured where it runs"):
        next(iter([of_module(torch.nn.Linear(2, 2), torch.ones(1, 2)).prepared(None, "cpu").__enter__()]))


# -- what no tracer sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shared"), [("llama-mha", 1), ("llama-gqa", 2), ("llama-mqa", 4)])
def test_workspace_of_attentions_backward(name: str, shared: int) -> None:
    """As mha_bwd of FlashAttention-2 allocates: dq_accum and softmax_d, and dk and dv expanded to the query heads."""
    config = config_of(name)
    traced = record(ConfigJob(config, torch_run(seq_len=S, micro_batch=B, optimizer="sgd")), steps=1).trace
    heads, width, rows = 4, 16, 128  # 96 tokens in blocks of 128, 16 channels as 32
    expanded = 2 * 2 * B * heads * S * width if shared > 1 else 0
    line = next(one for one in traced.hidden if one.name.startswith("FlashAttention"))
    assert line.nbytes == 4 * B * heads * rows * 32 + 4 * B * heads * rows + expanded
    assert line.low <= line.nbytes <= line.high


@pytest.mark.long
def test_hidden_memory_has_its_own_lines(tmp_path: Path) -> None:
    config = config_of("llama-gqa")
    found = compare(ConfigJob(config, torch_run(seq_len=96)))
    formula, traced, _ = rows(found)["hidden from tracers"]
    assert traced == sum(one.nbytes for one in found.hidden)
    assert formula == pytest.approx(next(one.nbytes for one in found.hidden if "context" in one.name), abs=1)
    one = next(one for one in found.differences if one.quantity == "hidden from tracers")
    assert abs(one.unexplained) < 1
    assert {cause.op for cause in one.causes} == {one.name for one in found.hidden if one.where == "allocated"}
    assert all(one.basis for one in found.hidden)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    said = typed(["compare", str(path), "--seq-len", "96"]).out
    assert "Hidden from tracers" in said
    on_cpu = compare(ConfigJob(config, torch_run(seq_len=96)), device="cpu")
    assert "hidden from tracers" not in rows(on_cpu)


def test_a_peak_at_another_moment_is_named() -> None:
    """AdamW that is not fused, with a formula that takes it for fused: the trace peaks in the step, the formula in backward."""
    config = config_of("llama-gqa", hidden_size=256, intermediate_size=704)
    run = torch_run(seq_len=S, micro_batch=B, optimizer="adamw")
    taken = msgspec.structs.replace(run.training.optimizer, step=NO_TEMPORARIES)
    run = msgspec.structs.replace(run, training=msgspec.structs.replace(run.training, optimizer=taken))
    found = compare(ConfigJob(config, run))
    one = next(one for one in found.differences if one.quantity == "peak")
    assert one.unexplained == 0
    assert any("formula's peak is not the optimizer step" in cause.op for cause in one.causes)
