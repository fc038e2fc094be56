"""A traced training step against real ones: the allocator's own events, PyTorch's counters, and the papers."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

from loadgauge.pytorch.trace.programs.jobs import of_module
from loadgauge.pytorch.trace.saved import saved
from loadgauge.pytorch.trace.torch_run import OPTIMIZERS
from loadgauge.pytorch.trace.trace import Trace, trace
from torch_kept import addresses, keeping, owned, total
from torch_models import Built, build
from torch_peak import CPU_GENERATOR, highest

S, B = 128, 2
WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}
MORE = {
    "mixtral": lambda **keys: MixtralForCausalLM(
        MixtralConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, use_cache=False, **keys,
        )
    ),
    "deepseek-v3": lambda **keys: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
            topk_group=1, q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
            first_k_dense_replace=1, use_cache=False, **keys,
        )
    ),
}  # fmt: skip


class Case(msgspec.Struct, frozen=True):
    name: str
    attention: str = "sdpa"
    dtype: str = "float32"
    optimizer: str = "adamw"
    checkpointed: bool = False
    vocab: int = 1000

    def __str__(self) -> str:
        saved = "-checkpointed" if self.checkpointed else ""
        return f"{self.name}-{self.attention}-{self.dtype}-{self.optimizer}-{self.vocab}{saved}"


CASES = [
    Case("llama-gqa", "eager", "bfloat16", checkpointed=True), Case("llama-gqa", vocab=8000),
    Case("qwen3", optimizer="sgd", checkpointed=True), Case("gpt2"), Case("gpt2", "eager", optimizer="sgd"), Case("gemma3"),
    Case("gemma2", "eager"), Case("bert", "eager", checkpointed=True), Case("modernbert"),
    Case("xlm-roberta-xl", optimizer="sgd"), Case("opt"), Case("phi3", checkpointed=True),
    Case("mixtral", dtype="bfloat16"), Case("deepseek-v3"),
]  # fmt: skip
cases = pytest.mark.parametrize("case", CASES, ids=str)


def made(case: Case) -> tuple[torch.nn.Module, torch.Tensor, int]:
    """The model, its ids, and how many layers it has."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    if case.name in MORE:
        model = MORE[case.name](attn_implementation=case.attention).to(dtype).train()
        ids, layers = torch.randint(3, 512, (B, S)), model.config.num_hidden_layers
    else:
        keys = {"head_dim": 32} if case.name.startswith(("qwen3", "gemma")) else {}
        if case.name == "opt":
            keys = {"ffn_dim": 352, "word_embed_proj_dim": 128}
        built = build(case.name, case.attention, dtype, **{**WIDE, "vocab_size": case.vocab, **keys})
        model, ids, layers = built.model, built.ids(S, B), built.config.num_hidden_layers
    if case.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, ids, layers


def really(model: torch.nn.Module, ids: torch.Tensor, optimizer: str) -> int:
    """The allocator's peak over two real steps."""
    step_of = OPTIMIZERS[optimizer][1](model.parameters())
    own = {one.data_ptr(): one.untyped_storage().nbytes() for one in [*model.parameters(), *model.buffers()]}
    model(ids, labels=ids).loss.backward()  # whatever a library makes once
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
            del loss
            step_of.step()
            step_of.zero_grad(set_to_none=True)
    return sum(own.values()) + ids.nbytes + highest(profiler)


def traced(model: torch.nn.Module, ids: torch.Tensor, optimizer: str = "adamw", device: str = "cpu") -> Trace:
    return trace(of_module(model, ids, keywords={"labels": ids}, optimizer=optimizer), device)


@cases
def test_the_peak_is_the_allocators(case: Case) -> None:
    model, ids, layers = made(case)
    found = traced(model, ids, case.optimizer)
    want = really(model, ids, case.optimizer)
    # Each checkpoint holds a copy of the CPU generator's state, which is no tensor of the program.
    generators = CPU_GENERATOR * layers if case.checkpointed else 0
    assert want - generators - 1e-3 * want <= found.peak.total <= want * (1 + 1e-3), (
        f"{found.peak.total / want - 1:+.4%}"
    )
    assert sum(found.peak.categories.values()) == found.peak.total
    assert sum(piece.nbytes for piece in found.at_peak) == found.peak.total
    assert found.peak.total == max(found.step_peaks) == max(found.phases.values())
    assert found.peak.total == max(moment.total for moment in found.timeline)
    assert found.allocated == found.peak.total  # nothing is rounded on a CPU
    weights = sum(
        {one.data_ptr(): one.untyped_storage().nbytes() for one in [*model.parameters(), *model.buffers()]}.values()
    )
    assert found.peak.categories["weights"] == weights
    assert found.steps == len(found.step_peaks) == 2


@pytest.mark.parametrize("case", [*CASES[::3], Case("deepseek-v3")], ids=str)
def test_what_is_saved_is_what_hooks_count(case: Case) -> None:
    """Each storage once, without parameters, buffers and ids."""
    model, ids, _ = made(case)
    found = traced(model, ids, case.optimizer)
    torch.manual_seed(0)
    if case.name == "deepseek-v3":  # hooks would also count what a branch without use has let go
        count = saved(model, ids, labels=ids).total
    else:
        with keeping(owned(model) | addresses([ids])) as seen:
            result = model(ids, labels=ids)
            count = total(seen)
        del result
    assert sum(found.kept.values()) == found.saved_nbytes
    assert found.saved_nbytes == count  # the inputs of checkpoints too
    names = {name for name, _ in model.named_modules()}
    strangers = {one.module for one in found.saved} - names
    # Modules that forward makes or borrows: a loss, an activation of a table.
    assert all(name.startswith("CrossEntropyLoss") or name.endswith("GELUActivation") for name in strangers)


# -- MemTracker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "optimizer"), [("llama-gqa", "adamw"), ("bert", "sgd"), ("gemma3", "sgd-momentum")])
@pytest.mark.long
def test_totals_are_those_of_memtracker(name: str, optimizer: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    built = build(name, "eager", torch.float32, vocab_size=512)
    found = traced(built.model, torch.zeros(B, S, dtype=torch.long), optimizer)
    with FakeTensorMode(), torch.device("cpu"), patched_masks():
        model = type(built.model)(built.config).train()
        ids = torch.zeros(B, S, dtype=torch.long)
        step_of = OPTIMIZERS[optimizer][1](model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, step_of, ids)
        with tracker:
            for number in range(2):
                if number:
                    tracker.reset_mod_stats()
                model(ids, labels=ids).loss.backward()
                step_of.step()
                step_of.zero_grad(set_to_none=True)
        peaks = [sum(parts.values()) - parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values()]
    assert found.peak.total == max(peaks)


@contextlib.contextmanager
def patched_masks():  # type: ignore[no-untyped-def]
    from loadgauge.pytorch.device.patches import no_packed_sequences

    with no_packed_sequences():
        yield


# -- FLOPs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "checkpointed"), [("llama-gqa", False), ("gpt2", True), ("bert", False)])
def test_flops_are_pytorchs(name: str, checkpointed: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, ids, _ = made(Case(name, "eager", checkpointed=checkpointed))
    found = traced(model, ids).flops
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(ids, labels=ids).loss
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    assert found.total == forward + counter.get_total_flops()
    assert found.by_phase["forward"] == forward
    assert sum(found.by_module.values()) == sum(found.by_op.values()) == found.total
    assert not found.uncounted
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert name == "gpt2" or all(found.by_module[name] > 0 for name in linear)


@pytest.mark.parametrize("heads", [4, 2])
def test_flops_of_attention_on_a_cpu(heads: int) -> None:
    """PyTorch's table has no formula for it; CUDA's has."""
    built = build("llama-gqa", "sdpa", torch.bfloat16, num_key_value_heads=heads)
    ids = torch.zeros(B, S, dtype=torch.long)
    on_cpu, as_cuda = (traced(built.model, ids, device=device).flops for device in ("cpu", "cuda"))
    assert on_cpu.total == as_cuda.total
    assert not on_cpu.uncounted
    attention = 4 * B * S * S * built.config.hidden_size * built.config.num_hidden_layers
    assert sum(flops for op, flops in as_cuda.by_op.items() if op.endswith("flash_attention")) == attention


# -- as on CUDA --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """The layer of Korthikanti et al. 2022 (arXiv:2205.05198), figure 2: everything it has, and nothing more."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.norm1, self.norm2 = torch.nn.LayerNorm(h), torch.nn.LayerNorm(h)
        self.qkv, self.out = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
        self.fc1, self.fc2 = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)
        self.drops = torch.nn.ModuleList(torch.nn.Dropout(0.1) for _ in range(3))

    def forward(self, x: Any, mask: Any) -> Any:
        b, s, h = x.shape
        q, k, v = (self.qkv(self.norm1(x)).view(b, s, 3, self.a, h // self.a).permute(2, 0, 3, 1, 4)).unbind(0)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        scores = (q @ k.transpose(-1, -2) / (h // self.a) ** 0.5).masked_fill_(mask, -1e4).softmax(-1)
        context = (self.drops[0](scores) @ v).transpose(1, 2).reshape(b, s, h)
        x = x + self.drops[1](self.out(context))
        return x + self.drops[2](self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(x)))))


@pytest.mark.parametrize(("b", "s", "h", "a"), [(4, 2048, 2048, 16), (1, 1024, 12288, 96)])
def test_a_layer_keeps_what_korthikanti_says(b: int, s: int, h: int, a: int) -> None:
    """34 s b h + 5 a s^2 b bytes, at full size; with the norms' statistics and the mask, which the paper leaves out."""
    with torch.device("meta"):
        block = Block(h, a).to(torch.bfloat16)
        x = torch.empty(b, s, h, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(s, s, dtype=torch.bool)
    found = trace(of_module(block, x, mask, optimizer="sgd"), "cuda")
    x_itself = 2 * s * b * h  # an input of the block, which the paper counts with it
    assert found.saved_nbytes + x_itself == 34 * s * b * h + 5 * a * s * s * b + 16 * s * b


def test_kernels_that_cuda_would_choose() -> None:
    """Llama 3 8B, two layers of 4096 tokens, in bfloat16: bytes as PyTorch's CUDA build counts them on fake tensors."""
    config = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    found = {}
    for layers in (1, 2):
        with torch.device("meta"):
            built: Built = build("llama-gqa", "sdpa", torch.bfloat16, num_hidden_layers=layers, **config)
            ids = torch.empty(1, 4096, dtype=torch.long)
        found[layers] = traced(built.model, ids, device="cuda")
        assert found[layers].attention == {"flash": 2 * layers}
    # The figures of that build include the ids (32 KiB), which serve as labels too.
    assert found[2].saved_nbytes + 4096 * 8 == pytest.approx(3_882_991_676, abs=64 * 1024)
    assert found[2].saved_nbytes - found[1].saved_nbytes == 822_640_664


def test_dropout_keeps_one_byte_an_element_on_cuda() -> None:
    x = torch.empty(4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    job = of_module(torch.nn.Dropout(0.5), x)
    assert trace(job, "cuda").saved_nbytes == 4096
    assert trace(of_module(torch.nn.Dropout(0.5), x), "cpu").saved_nbytes == 2 * 4096


def test_autocast_copies_weights_once() -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    twice = torch.nn.Sequential(layer, layer)
    x = torch.empty(8, 64, device="meta", requires_grad=True)
    found = trace(of_module(twice, x, precision="bf16-autocast", optimizer="sgd"), "cuda")
    dtypes = {(one.node, one.field, one.dtype) for one in found.saved}
    assert ("MmBackward0", "mat2", "bfloat16") in dtypes
    # One copy of the weight, and one of each linear layer's input.
    assert found.saved_nbytes == 2 * (64 * 64) + 2 * 2 * (8 * 64)


def test_rms_norm_is_one_kernel_on_cuda() -> None:
    x = torch.empty(32, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    norm = torch.nn.RMSNorm(64).to(torch.bfloat16)
    assert trace(of_module(norm, x), "cuda").saved_nbytes == 32 * 4
    assert trace(of_module(norm, x), "cpu").saved_nbytes > 32 * 64


def test_blocks_of_512_bytes() -> None:
    found = trace(of_module(torch.nn.Linear(10, 10), torch.empty(1, 10, device="meta"), optimizer="sgd"))
    assert found.peak.total < found.allocated
    assert found.allocated % 512 == 0
    assert found.allocated == sum(-(-piece.nbytes // piece.count // 512) * 512 * piece.count for piece in found.at_peak)


def test_the_module_gets_its_own_back() -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    before = dict(tied.named_parameters(remove_duplicate=False))
    found = traced_plain(tied)
    assert dict(tied.named_parameters(remove_duplicate=False)) == before
    assert found.peak.categories["weights"] == 4 * (64 + 8 + 8)
    assert all(parameter.grad is None for parameter in tied.parameters())


def traced_plain(module: torch.nn.Module) -> Trace:
    return trace(of_module(module, torch.empty(2, 8, device="meta")), "cpu")


# -- advice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_advice_saves_what_it_says(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator is put where the advice says, and the model traced again."""
    from transformers.models.llama import modeling_llama

    from loadgauge.train import fused

    built = build("llama-gqa", "sdpa", dtype, vocab_size=512)
    ids = torch.zeros(B, S, dtype=torch.long)
    before = traced(built.model, ids, device="cuda")
    advice = {one.operator: one for one in before.advice}
    layers = built.config.num_hidden_layers
    assert {name: len(one.modules) for name, one in advice.items()} == {
        "rms_norm": 2 * layers + 1,
        "swiglu": layers,
        "linear_cross_entropy": 1,
    }
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward",
        lambda self, x: fused.rms_norm(x, self.weight, self.variance_epsilon),
    )  # fmt: skip
    with_norm = traced(built.model, ids, device="cuda")
    assert before.saved_nbytes - with_norm.saved_nbytes == advice["rms_norm"].saves
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward",
        lambda self, x: self.down_proj(fused.swiglu(self.gate_proj(x), self.up_proj(x))),
    )  # fmt: skip
    with_both = traced(built.model, ids, device="cuda")
    assert with_norm.saved_nbytes - with_both.saved_nbytes == advice["swiglu"].saves
    assert [one.operator for one in with_both.advice] == ["linear_cross_entropy"]
