"""Programs with a loop of their own, Lightning's trainer, or a model made by its sizes: read as jobs, never run."""

import json
from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge import read

HEAD = "import torch\nfrom torch.utils.data import DataLoader\nfrom transformers import *\n"
LOADED = 'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B").cuda()\n'
SIZES = (
    "config = LlamaConfig(vocab_size=32000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,"
    " num_key_value_heads=2)\nmodel = LlamaForCausalLM(config).cuda()\n"
)
LOOP = """
block_size = 512
data = [torch.zeros(block_size, dtype=torch.long) for _ in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = {optimizer}(model.parameters(), lr=1e-4)
for ids in loader:
    ids = ids.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAIN = LOOP.format(optimizer="torch.optim.AdamW")
LIGHTNING = """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-5)
L.Trainer(devices=4, num_nodes=2, strategy="fsdp", precision="16-mixed", accumulate_grad_batches=3).fit(Module(), DataLoader(d, 2))
"""
ACCELERATED = """
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=8)
loader = DataLoader(data, batch_size=2)
import bitsandbytes as bnb
optimizer = bnb.optim.PagedAdamW8bit(model.parameters())
for batch in loader:
    ids = tokenizer(batch, truncation=True, max_length=768)
    accelerator.backward(model(**ids).loss)
"""


def facts(text: str, tmp_path: Path) -> dict[str, object]:
    file = tmp_path / "train.py"
    file.write_text(HEAD + text)
    return {name: fact.value for name, fact in read(str(file)).facts.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOADED + PLAIN, {"model": "Qwen/Qwen3-0.6B", "micro_batch": 4, "seq_len": 512, "precision": "bf16"}),
        (
            LOADED + ACCELERATED,
            {"micro_batch": 2, "accumulation": 8, "seq_len": 768, "precision": "fp16", "optimizer": "paged-adamw-8bit"},
        ),
        (
            LIGHTNING,
            {"gpus": 8, "zero": 3, "micro_batch": 2, "accumulation": 3, "precision": "fp16", "optimizer": "sgd"},
        ),
        (
            "grad_accum_steps = 5\nmodel.gradient_checkpointing_enable()\n" + LOADED + PLAIN,
            {"accumulation": 5, "recompute": "full"},
        ),
        (
            "from torch import autocast\nkind = torch.bfloat16\n"
            + LOADED
            + PLAIN.replace("dtype=torch.bfloat16", "dtype=kind"),
            {"precision": "bf16"},
        ),
        ("from torch import autocast\n" + LOADED + PLAIN.replace(", dtype=torch.bfloat16", ""), {"precision": "fp16"}),
        (
            LOADED + "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n" + PLAIN,
            {"zero": 3, "framework": "huggingface"},
        ),
    ],
)
def test_a_loop_s_own_words(text: str, expected: dict[str, object], tmp_path: Path) -> None:
    found = facts(text, tmp_path)
    assert {name: str(found[name]).split("-fsdp")[0].removesuffix("-autocast") for name in expected} == {
        name: str(value) for name, value in expected.items()
    }


def test_the_sizes_of_a_model_that_is_made(tmp_path: Path) -> None:
    config = facts(SIZES + PLAIN, tmp_path)["config"]
    assert isinstance(config, dict)
    assert config["model_type"] == "llama"
    assert config.items() >= {
        "vocab_size": 32000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    }.items()  # fmt: skip
    based = 'config = AutoConfig.from_pretrained("gpt2", n_layer=6, vocab_size=len(tok), n_ctx=n)\n' + PLAIN
    tokenizer = (
        'tok = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")\nmodel = AutoModelForCausalLM.from_config(config)\n'
    )
    other = facts(tokenizer + based, tmp_path)["config"]
    assert isinstance(other, dict)
    assert (other["n_layer"], other["n_embd"], other["vocab_size"]) == (6, 768, 151936)


@pytest.mark.parametrize(
    "text",
    [
        LOADED,  # nothing is trained
        LOADED + LOADED.replace("model", "teacher", 1) + PLAIN,  # two models: which one?
        "import deepspeed\n" + LOADED + PLAIN,  # whose engine has a file of its own
        LIGHTNING.replace("fsdp", "deepspeed_stage_3"),  # which is said to Lightning alone
        PLAIN,  # no model of transformers
    ],
)
def test_what_is_no_loop_that_is_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + text)
    found = typed(f"estimate {file} --gpu a100")
    assert (found.code, "is no training job" in found.err or "Lightning's Trainer: give" in found.err) == (2, True)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torch.optim.SGD"])
def test_its_tensors_are_those_of_the_program_as_it_runs(optimizer: str, tmp_path: Path) -> None:
    """The same program run on the simulated device, two steps of it."""
    pytest.importorskip("transformers")
    file = tmp_path / "train.py"
    file.write_text(HEAD + SIZES + LOOP.format(optimizer=optimizer))
    run = json.loads(typed(f"trace {file} --json").out)
    estimate = document(f"estimate {file} --gpu a100")
    peak = estimate["memory"]["total"] - estimate["memory"]["parts"]["outside"]
    assert peak == pytest.approx(run["peak"]["total"], rel=0.02)


def test_a_command_gives_the_program_that_it_starts_its_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD + "import argparse\np = argparse.ArgumentParser()\np.add_argument('--bs', type=int, default=2)\n"
        "p.add_argument('--max-len', type=int, default=1024)\nargs = p.parse_args()\n"
        + LOADED
        + PLAIN.replace("block_size = 512", "block_size = args.max_len").replace("batch_size=4", "batch_size=args.bs")
    )
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node 4 --nnodes 2 train.py --bs 6\n")
    words = {name: fact.value for name, fact in read(str(script)).facts.items()}
    assert [words[name] for name in ("model", "gpus", "micro_batch", "seq_len")] == ["Qwen/Qwen3-0.6B", 8, 6, 1024]
    script.write_text("python other.py --bs 6\n")  # which is not there
    assert typed(f"estimate {script} --gpu a100").code == 2


def test_a_size_that_only_a_run_gives_is_never_the_class_s_own(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + SIZES.replace("hidden_size=256", "hidden_size=int(open('n').read())") + PLAIN)
    found = typed(f"estimate {file} --gpu a100")
    assert (found.code, "hidden_size" in found.err) == (2, True)
    file.write_text(HEAD + SIZES.replace("vocab_size=32000", "vocab_size=len(tok)") + PLAIN)
    assert "its vocabulary is its class's, as len(tok)" in json.dumps(document(f"estimate {file} --gpu a100"))
