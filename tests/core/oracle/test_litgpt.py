"""What LitGPT's adapters and loss keep, run in plain PyTorch: one matrix of queries, keys and values, and float32 logits."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from loadgauge import Job, Layout
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.points import At
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.states.gathered import copies
from loadgauge.core.families.reference import llama_model
from loadgauge.core.resolve.resolve import resolve_job
from torch_kept import keeping, total
from torch_peak import highest

WIDTH, HEADS, ROWS, RANK = 64, 4, 32, 8
MODEL = llama_model(1, WIDTH, HEADS, 2048)


def memory(lora: Lora, rows: int = ROWS) -> MemoryModel:
    layout = Layout(micro_batch=1, global_batch=1, seq_len=rows)
    how = training("litgpt", lora=lora)
    return MemoryModel(MODEL, layout, how, view_of(layout, how))


@pytest.mark.parametrize("adapted", [("query", "value"), ("query", "key", "value")])
def test_adapters_of_one_matrix(adapted: tuple[str, ...]) -> None:
    x = torch.randn(1, ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    frozen = torch.randn(3 * WIDTH, WIDTH, dtype=torch.bfloat16)
    low = torch.randn(RANK * len(adapted), WIDTH, dtype=torch.bfloat16, requires_grad=True)
    highs = [torch.randn(WIDTH, RANK, dtype=torch.bfloat16, requires_grad=True) for _ in adapted]
    places = torch.cat([torch.arange(WIDTH) + WIDTH * ("query", "key", "value").index(name) for name in adapted])
    with keeping({t.untyped_storage().data_ptr() for t in (frozen, low, *highs)}) as seen:
        between = (x @ low.T).chunk(len(adapted), dim=-1)
        made = torch.cat([part @ high.T for part, high in zip(between, highs, strict=True)], dim=-1)
        if len(adapted) < 3:
            made = made.new_zeros(1, ROWS, 3 * WIDTH).index_copy(-1, places, made)
        joined = x @ frozen.T + made * 2
        query, key, value = (t.view(1, ROWS, HEADS, -1).transpose(1, 2) for t in joined.chunk(3, dim=-1))
        context = F.scaled_dot_product_attention(query + 0, key + 0, value, is_causal=True)
        count = total(seen)
    kept = {
        tensor.name: tensor.nbytes
        for layer in memory(Lora(rank=RANK, targets=frozenset(adapted))).block_layers()
        for tensor in layer.kept()
        if tensor.name.startswith("attention.") and ".norm" not in tensor.name[9:15]
    }
    assert context.requires_grad
    norm = kept.pop("attention.norm", x.numel() * 2)
    assert sum(kept.values()) + norm == count


def test_logits_in_float32_until_the_next_ones_are_there() -> None:
    rows, pieces = 256, 8
    head = torch.randn(2048, WIDTH, dtype=torch.bfloat16)
    x, targets = torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True), torch.randint(0, 2048, (rows,))

    def step() -> list[torch.Tensor]:
        """Logits piece by piece, then all of them in float32, as the wrapper around the model returns them."""
        return [piece.float() for piece in [part @ head.T for part in x.split(rows // pieces)]]

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logits = step()
        for _ in range(2):
            if x.grad is not None:
                logits = step()
            losses = [F.cross_entropy(*pair) for pair in zip(logits, targets.split(rows // pieces), strict=True)]
            torch.stack(losses).mean().backward()
    own = memory(Lora(rank=RANK), rows)
    (stage,) = stages(MODEL, own.layout)
    before = copies(own, stage, At("ends"))["logits of the micro-batch before"]
    assert before == 4 * rows * 2048
    assert highest(profiler) == pytest.approx(before + own.head_working, rel=0.01)


def test_a_quantised_base_has_the_head_and_another_token_table() -> None:
    table = 2048 * WIDTH
    of = memory(Lora(rank=RANK, quantised="nf4"))
    assert [weight.base for weight in of.head.weights if weight.numel == table] == [True]
    assert sum(weight.numel for weight in of.embedding.weights) == 3 * table


def test_embedding_and_head_are_two_matrices() -> None:
    """`convert_hf_checkpoint.py` writes a tied head as a matrix of its own, and only `pretrain.py` can tie them."""
    tied, own = (resolve_job(Job("llama-3.2-3b", framework=name)).estimate().params for name in ("megatron", "litgpt"))
    assert own - tied == 128_256 * 3072
