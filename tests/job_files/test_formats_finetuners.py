"""torchtune, LitGPT, ms-swift, NeMo AutoModel and Unsloth: files as their users have them, and several files of one job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.exchange import read, write

TUNE = """# tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_1/8B_lora
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8  # higher increases accuracy and memory
  lora_alpha: 16
  lora_dropout: 0.0
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
gradient_accumulation_steps: 8
compile: False
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
"""
LIT = """checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3.1-8B
out_dir: out/finetune/qlora-llama3.1-8b
precision: bf16-true
quantize: bnb.nf4
devices: 1
num_nodes: 1
lora_r: 32
lora_key: false
lora_mlp: true
train:
  global_batch_size: 8
  micro_batch_size: 2
  max_seq_length: 512
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
"""
SWIFT = """nproc_per_node=4
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 1 \\
    --lora_rank 8 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --max_length 2048 \\
    --deepspeed zero2
"""
NEMO = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: 8
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  target_modules: '*_proj'
  dim: 16
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 2
  activation_checkpointing: true
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
packed_sequence:
  packed_sequence_size: 1024
optimizer:
  _target_: torch.optim.Adam
"""
UNSLOTH = """from unsloth import FastLanguageModel, is_bfloat16_supported
import os
os.system("touch {mark}")
max_seq_length = 2048  # any
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Meta-Llama-3.1-8B",
    max_seq_length = max_seq_length,
    dtype = None,
    load_in_4bit = True,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj",
                      "gate_proj", "up_proj", "down_proj",],
    lora_alpha = 16,
    lora_dropout = 0,
    use_gradient_checkpointing = "unsloth",
)
trainer = SFTTrainer(
    model = model,
    train_dataset = dataset,
    max_seq_length = max_seq_length,
    args = TrainingArguments(
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 4,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        optim = "adamw_8bit",
        output_dir = "outputs",
    ),
)
"""


LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.yaml", TUNE, {
            "model": "llama-3.1-8b", "lora_rank": 8, "lora_targets": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
            "micro_batch": 2, "seq_len": 2048, "precision": "bf16-pure", "recompute": "full", "zero": 3, "qlora": False,
        }),
        ("a.yaml", LIT, {
            "model": "meta-llama/Meta-Llama-3.1-8B", "lora_rank": 32, "qlora": True, "base": "nf4-single", "gpus": 1,
            "lora_targets": "q_proj,v_proj,gate_proj,up_proj,down_proj", "micro_batch": 2, "global_batch": 8, "zero": 0,
            "recompute": "none", "seq_len": 512, "precision": "bf16-pure",
        }),
        ("a.yaml", LIT.replace("quantize: bnb.nf4\n", "").replace("devices: 1", "devices: 4"), {
            "gpus": 4, "zero": 3, "recompute": "full",
        }),
        ("a.sh", SWIFT, {
            "model": "Qwen/Qwen2.5-7B-Instruct", "lora_rank": 8, "lora_targets": "all", "gpus": 4, "zero": 2,
            "framework": "deepspeed", "global_batch": 16, "seq_len": 2048, "recompute": "full", "precision": "bf16",
        }),
        ("a.yaml", NEMO, {
            "model": "meta-llama/Llama-3.2-1B", "lora_rank": 16, "lora_targets": "all", "tp": 2, "zero": 3,
            "global_batch": 64, "micro_batch": 8, "seq_len": 1024, "recompute": "full", "precision": "bf16-pure-32",
        }),
        ("a.py", UNSLOTH, {
            "model": "unsloth/Meta-Llama-3.1-8B", "lora_rank": 16, "lora_targets": LINEAR, "qlora": True, "seq_len": 2048,
            "micro_batch": 2, "optimizer": "adamw-8bit", "precision": "bf16", "recompute": "full",
        }),
    ],
)  # fmt: skip
def test_files_as_people_have_them(name: str, text: str, wanted: dict[str, Any]) -> None:
    job = read(text, file=name).job
    assert {field: getattr(job, field) for field in wanted} == wanted


@pytest.mark.parametrize("text", [TUNE, LIT, NEMO])
def test_an_estimate_of_each(text: str, tmp_path: Path) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(text)
    gpus = "--gpus 2" if text is not LIT else ""
    assert document(f"estimate {place} {gpus}")["memory"]["total"] > 2**30


def test_a_script_is_parsed_and_never_run(tmp_path: Path) -> None:
    place, mark = tmp_path / "train.py", tmp_path / "mark"
    place.write_text(UNSLOTH.replace("{mark}", str(mark)))
    found = document(f"estimate {place} --gpu rtx4090")
    assert found["layout"]["seq_len"] == 2048
    assert not mark.exists()
    patched = typed(f"convert {place} --to unsloth --micro-batch 1 --seq-len 4096").out
    gone = [line.strip() for line in place.read_text().splitlines() if line not in patched.splitlines()]
    # The length where it is said, once; the batch as one line or two.
    assert gone[:2] == ["max_seq_length = 2048  # any", "per_device_train_batch_size = 2,"]
    assert gone[2:] in ([], ["gradient_accumulation_steps = 4,"])
    assert "max_seq_length = 4096" in patched


def test_a_notebook(tmp_path: Path) -> None:
    lines = ["!pip install unsloth\n", *UNSLOTH.splitlines(keepends=True)]
    cells = [{"cell_type": "markdown", "source": ["# r = 99"]}, {"cell_type": "code", "source": lines}]
    place = tmp_path / "a.ipynb"
    place.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert document(f"estimate {place}")["layout"]["micro_batch"] == 2
    found = typed(f"convert {place} --to unsloth --micro-batch 1")
    was, now = (json.loads(text)["cells"] for text in (place.read_text(), found.out))
    assert found.code == 0
    assert now[0] == was[0]
    changed = [pair for pair in zip(was[1]["source"], now[1]["source"], strict=True) if pair[0] != pair[1]]
    assert changed
    assert all("batch" in line or "accumulation" in line for _, line in changed)


def notebook(place: Path, *cells: str) -> Path:
    """A notebook with these cells of code."""
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    place.write_text(json.dumps({"cells": code, "nbformat": 4}))
    return place


def test_each_cell_of_a_notebook_is_read_by_itself(tmp_path: Path) -> None:
    """Lines of the shell are no Python, wherever they stand; a cell that does not parse is skipped and named."""
    plain = notebook(tmp_path / "plain.ipynb", UNSLOTH)
    other = notebook(
        tmp_path / "other.ipynb",
        "%%capture\nimport os\nif 'COLAB_' in os.environ:\n    !pip install unsloth\nelse:\n    !pip install --no-deps \\\n  trl\n",
        "%%bash\nfor i in 1 2; do echo $i; done\n",
        UNSLOTH,
        "when = date(2024, 07, 26)\n",
    )
    assert document(f"estimate {other}")["memory"] == document(f"estimate {plain}")["memory"]
    text = " ".join(typed(f"estimate {other}").out.split())
    assert "cell 4 is skipped: it is not valid Python" in text
    assert "cell 1 " not in text


@pytest.mark.parametrize("again", [
    "if False:\n    model, tokenizer = FastLanguageModel.from_pretrained(model_name='lora_model', load_in_4bit=False)\n",
    "model, tokenizer = FastLanguageModel.from_pretrained('lora_model', max_seq_length=64, load_in_4bit=False)\n",
])  # fmt: skip
def test_what_is_loaded_again_at_the_end_is_not_what_is_trained(again: str, tmp_path: Path) -> None:
    first, both = (notebook(tmp_path / f"{name}.ipynb", *cells) for name, cells in
                   (("first", [UNSLOTH]), ("both", [UNSLOTH, again])))  # fmt: skip
    assert document(f"estimate {both}")["memory"] == document(f"estimate {first}")["memory"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", TUNE + "optimizer_in_bwd: True\n", "without gradient accumulation"),
        ("a.yaml", TUNE.replace("lora_llama3_1_8b", "lora_llama9_8b"), "'llama9_8b' is no language model that is read"),
        ("a.yaml", LIT.replace("devices: 1", "devices: 4"), "needs one GPU"),
        ("a.yaml", LIT.replace("bf16-true", "8-true"), "'8-true' is not one that is read"),
        ("a.py", UNSLOTH.replace("r = 16", "r = RANK"), "'$RANK' comes from outside the file: add --lora-rank"),
        ("a.py", UNSLOTH + ")", "is not valid Python"),
        ("a.py", "x = " + "[" * 90 + "]" * 90, "nested too deeply"),
        ("a.py", "print(1)", "it calls no trainer"),
        ("a.py", "import lightning as L\nL.Trainer(devices=8)", "is of Lightning's Trainer: give the run as flags"),
        ("a.sh", "tune run full_finetune --config llama3_1/8B_full batch_size=4", "`tune cp llama3_1/8B_full FILE.yaml`"),
        ("a.sh", "tune run full_finetune --config no.yaml batch_size=4", "has its arguments in no.yaml"),
        ("a.ipynb", "{", "is no notebook"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_one_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.write_text(text)
    found = typed(["estimate", str(place)])
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("loadgauge: ")
    assert found.err.count("\n") == 1
    assert words in found.err


CLASSIC = """model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 2
max_length: 2048
bf16: true
output_dir: out
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
sequence_len: 2048
micro_batch_size: 2
bf16: true
datasets: [{path: x, type: alpaca}]
"""
FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: lora
cutoff_len: 2048
template: llama3
"""
NEMO_WHOLE = NEMO.partition("peft:")[0] + "distributed:" + NEMO.partition("distributed:")[2]
SWIFT_WHOLE = SWIFT.replace("--tuner_type lora", "--tuner_type full")
TRAINED = "train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 --bf16 --max_seq_length 512\n"
WHOLE = (
    'model, t = FastModel.from_pretrained("unsloth/Qwen3-0.6B", max_seq_length=512, %sfull_finetuning=True)\n'
    "trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, "
)
PLUGIN = "plugins: [axolotl.integrations.liger.LigerPlugin]\n"
LIGER = PLUGIN + "liger_rms_norm: true\nliger_glu_activation: true\n"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
QLORA = CLASSIC + "use_peft: true\nload_in_4bit: true\n"


@pytest.mark.parametrize(
    ("name", "text", "version", "wanted"),
    [
        # torchtune: PyTorch's AdamW is `foreach` unless its arguments say otherwise.
        ("a.yaml", TUNE, None, {"optimizer": "adamw-fused", "activation_offload": "none"}),
        ("a.yaml", TUNE.replace("  fused: True\n", ""), None, {"optimizer": "adamw-foreach"}),
        ("a.yaml", TUNE.replace("  fused: True\n", "  fused: False\n"), None, {"optimizer": "adamw-loop"}),
        ("a.yaml", TUNE + "optimizer_in_bwd: True\n", None, {"optimizer": "adamw-fused:in-backward"}),
        ("a.yaml", TUNE.replace("torch.optim.AdamW\n  fused: True", "bitsandbytes.optim.PagedAdamW"), None,
         {"optimizer": "paged-adamw-32bit"}),
        ("a.yaml", TUNE.replace("torch.optim.AdamW\n  fused: True", "torchao.optim.CPUOffloadOptimizer"), None,
         {"optimizer": "adamw-fused", "offload": "optimizer"}),
        ("a.yaml", TUNE.replace("offloading: False", "offloading: True"), None, {"activation_offload": "all"}),
        ("a.yaml", TUNE + "fsdp_cpu_offload: True\n", None, {"offload": "all"}),
        ("a.yaml", TUNE + "run_val_every_n_steps: 50\nbatch_size_val: 6\n", None, {"eval_batch": 6}),
        ("a.yaml", TUNE + "batch_size_val: 6\n", None, {"eval_batch": None}),
        ("a.yaml", "# On 2:\n#   tune run --nproc_per_node 2 lora_finetune_distributed --config x\n" + TUNE, None, {"gpus": 2}),
        ("a.yaml", "#   tune run lora_finetune_single_device --config x\n" + TUNE, None, {"gpus": 1}),
        # ms-swift
        ("a.sh", SWIFT.replace("zero2", "zero3_offload"), None, {"zero": 3, "offload": "all", "save": "full"}),
        ("a.sh", SWIFT.replace("zero2", "zero2 --optimizer muon"), None, {"optimizer": "muon"}),
        ("a.sh", SWIFT.replace("zero2", "zero2 --use_galore true --galore_rank 64"), None,
         {"optimizer": "galore:rank=64,every=50"}),
        ("a.sh", SWIFT.replace("zero2", "zero2 --use_dora true --modules_to_save all-embedding lm_head"), None,
         {"use_dora": True, "modules_to_save": "embed_tokens,lm_head", "lora_dropout": 0.05}),
        ("a.sh", SWIFT.replace("zero2", "zero2 --quant_method hqq --quant_bits 4"), None,
         {"qlora": True, "base": "hqq", "kbit_upcast": "none"}),
        ("a.sh", SWIFT, None, {"eval_batch": None}),
        ("a.sh", SWIFT, "3.0", {"eval_batch": 1}),  # it split the data
        ("a.sh", SWIFT.replace("zero2", "zero2 --split_dataset_ratio 0.01"), None, {"eval_batch": 1}),
        # A part of the model, and adapters in some layers or of experts.
        ("a.yaml", AXOLOTL + "unfrozen_parameters: [^lm_head.weight$, 'model.layers.2[0-9]+.mlp']\n", None,
         {"train": "^lm_head.weight$,model.layers.2[0-9]+.mlp", "lora_rank": 0}),
        ("a.yaml", AXOLOTL + "adapter: lora\nlora_target_linear: true\npeft_layers_to_transform: [0, 1]\n", None,
         {"lora_layers": "0,1", "lora_targets": "all", "train": None}),
        ("a.yaml", AXOLOTL.replace("meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1")
         + "adapter: lora\nlora_target_modules: [q_proj]\nlora_target_parameters: [mlp.experts.down_proj]\n", None,
         {"lora_targets": "q_proj,mlp.experts.down_proj"}),
        ("a.yaml", AXOLOTL.replace("meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1") + "adapter: lora\n"
         + "lora_target_modules: '.*self_attn[.](q|v)_proj'\nlora_target_parameters: [mlp.experts.down_proj]\n", None,
         {"lora_targets": ".*self_attn[.](q|v)_proj,mlp.experts.down_proj"}),
        ("a.yaml", AXOLOTL.replace("meta-llama/Llama-3.1-8B", "meta-llama/Llama-4-Scout-17B-16E")
         + "adapter: qlora\nload_in_4bit: true\nllama4_linearized_experts: true\n", None, {"base": "nf4-experts"}),
        # axolotl 0.19: beside adapters, moving takes the place of recomputing, and 4 bits are adapter: qlora's alone.
        ("a.yaml", AXOLOTL + "adapter: lora\ngradient_checkpointing: true\nactivation_offloading: true\n", None,
         {"recompute": "none", "activation_offload": "all"}),
        ("a.yaml", AXOLOTL + "adapter: lora\ngradient_checkpointing: offload\n", "0.15",
         {"recompute": "full", "activation_offload": "all"}),
        ("a.yaml", AXOLOTL + "gradient_checkpointing: true\nactivation_offloading: legacy\n", None,
         {"recompute": "full", "activation_offload": "all"}),
        ("a.yaml", AXOLOTL + "adapter: lora\nload_in_4bit: true\n", None, {"qlora": False}),
        # LLaMA-Factory 0.9.5: without bf16 the base stays in the checkpoint's 16 bits, and what is trained is float32.
        ("a.yaml", FACTORY, None, {"precision": "bf16-pure", "lora_dtype": "float32", "weights": None}),
        ("a.yaml", FACTORY.replace("lora", "full"), None, {"precision": "fp32"}),
        ("a.yaml", FACTORY.replace("lora", "freeze") + "pure_bf16: true\n", None, {"train": "layers.-2:", "lora_rank": 0}),
        ("a.yaml", FACTORY.replace("lora", "freeze") + "pure_bf16: true\nfreeze_trainable_layers: -4\n"
         "freeze_trainable_modules: mlp\nfreeze_extra_modules: lm_head\n", None, {"train": "layers.:4.mlp,lm_head"}),
        ("a.sh", SWIFT_WHOLE.replace("zero2", "zero2 --freeze_parameters_ratio 0.8"), None,
         {"train": "frozen:0.8", "lora_rank": 0}),
        ("a.sh", SWIFT_WHOLE.replace("zero2", "zero2 --freeze_parameters_ratio 1 --trainable_parameters"
         " model.layers.27 lm_head"), None, {"train": r"^model\.layers\.27,^lm_head"}),
        ("a.sh", SWIFT_WHOLE.replace("zero2", "zero2 --freeze_parameters model.embed_tokens model.layers.0."), None,
         {"train": r"but:model\.embed_tokens,but:model\.layers\.0\."}),
        ("a.sh", SWIFT_WHOLE.replace("zero2", "zero2 --freeze_parameters_regex mlp"), None, {"train": "but:.*(?:mlp)"}),
        ("a.yaml", NEMO_WHOLE + "freeze_config: {freeze_vision_tower: true}\n", None, {"train": None}),
        ("a.yaml", NEMO_WHOLE + "freeze_config: {freeze_embeddings: false}\n", None, {"train": None}),
        # Other methods than LoRA
        ("a.yaml", FACTORY.replace("lora", "oft", 1) + "oft_block_size: 64\noft_target: q_proj,v_proj\n", None,
         {"adapter": "oft", "lora_rank": 64, "lora_targets": "q_proj,v_proj"}),
        ("a.sh", SWIFT.replace("tuner_type lora", "tuner_type adalora --adalora_init_r 16"), None,
         {"adapter": "adalora", "lora_rank": 16}),
        ("a.py", UNSLOTH.replace("r = 16,", "r = 16, finetune_last_n_layers = 8,"), None, {"lora_layers": "-8:"}),
        ("a.py", UNSLOTH.replace("r = 16,", "r = 16, layers_to_transform = [3, 4],"), None, {"lora_layers": "3,4"}),
        # NeMo AutoModel
        ("a.yaml", NEMO.replace("torch.optim.Adam", "dion.Muon"), None, {"optimizer": "muon"}),
        ("a.yaml", NEMO + "quantization: {load_in_8bit: true}\n", None, {"qlora": True, "base": "int8"}),
        # of transformers' own code alone, on one tensor parallel rank
        ("a.yaml", NEMO.replace("model:\n", "model:\n  use_liger_kernel: true\n").replace("Llama-3.2-1B", "Phi-4")
         .replace("meta-llama", "microsoft").replace("tp_size: 2", "tp_size: 1").replace("Phi", "phi"), None,
         {"kernels": "liger", "loss": "float32"}),
        # LitGPT
        ("a.yaml", LIT.replace("bnb.nf4", "bnb.fp4"), None, {"base": "fp4"}),
        ("a.yaml", LIT.replace("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit"), None,
         {"optimizer": "paged-adamw-8bit"}),
        # Unsloth
        ("a.py", UNSLOTH, None, {"activation_offload": "checkpoints", "kbit_upcast": "none", "lora_dtype": "float32"}),
        # Cards that are visible are evidence: deepspeed and accelerate start a process on each, a program alone uses the one.
        ("a.sh", f"CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed {TRAINED}", None, {"gpus": 4}),
        ("a.sh", f"export CUDA_VISIBLE_DEVICES=0,1\naccelerate launch {TRAINED}", None, {"gpus": 2}),
        ("a.sh", f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 1 {TRAINED}", None, {"gpus": 1}),
        ("a.sh", f"deepspeed --include worker-0:0,2@worker-1:5 {TRAINED}", None, {"gpus": 3}),
        ("a.sh", f"CUDA_VISIBLE_DEVICES=3 python {TRAINED}", None, {"gpus": 1}),
        ("a.sh", f"CUDA_VISIBLE_DEVICES=0,1 python {TRAINED}", None, {"gpus": None}),
        # Unsloth 2026.10: whole models in 16 bits, unless their dtype or `float32_mixed_precision` says otherwise.
        ("a.py", WHOLE % "dtype=torch.float32, " + "fp16=False, bf16=False))\n", None, {"precision": "fp32"}),
        ("a.py", WHOLE % "float32_mixed_precision=True, " + "bf16=True))\n", None, {"precision": "bf16-autocast"}),
        ("a.py", WHOLE % "" + "bf16=True))\n", None, {"precision": "bf16"}),
        ("a.py", UNSLOTH.replace('= "unsloth"', "= True"), None, {"activation_offload": "none", "recompute": "full"}),
        ("a.py", UNSLOTH.replace('"down_proj",]', '"down_proj", "lm_head", "embed_tokens"]'), None,
         {"lora_targets": LINEAR, "modules_to_save": "embed_tokens,lm_head"}),
        ("a.py", UNSLOTH.replace('optim = "adamw_8bit"', 'eval_strategy = "steps"'), None, {"eval_batch": 8}),
        # Evaluation of the Trainer: 8 sequences unless said, and the losses alone unless it keeps logits.
        ("a.yaml", CLASSIC, None, {"eval_batch": None, "save": None}),
        ("a.yaml", CLASSIC + "eval_strategy: steps\n", None, {"eval_batch": 8, "eval_batches": None}),
        ("a.yaml", CLASSIC + "per_device_eval_batch_size: 4\neval_strategy: 'no'\n", None, {"eval_batch": None}),
        ("a.yaml", CLASSIC + "evaluation_strategy: epoch\neval_accumulation_steps: 3\n", None,
         {"eval_batch": 8, "eval_batches": 3}),
        ("a.yaml", CLASSIC + "eval_strategy: epoch\neval_accumulation_steps: 3\nprediction_loss_only: true\n", None,
         {"eval_batch": 8, "eval_batches": None}),
        ("a.yaml", AXOLOTL + "val_set_size: 0.05\nevals_per_epoch: 2\n", None, {"eval_batch": 2}),
        ("a.yaml", AXOLOTL + "val_set_size: 0.0\nevals_per_epoch: 2\n", None, {"eval_batch": None}),
        # Saving
        ("a.yaml", CLASSIC + "fsdp: full_shard\nfsdp_config: {state_dict_type: FULL_STATE_DICT}\n", None, {"save": "full"}),
        ("a.yaml", CLASSIC + "deepspeed: {zero_optimization: {stage: 3, stage3_gather_16bit_weights_on_model_save: true}}\n",
         None, {"save": "full"}),
        # TRL casts what PEFT made float32 back, by release.
        ("a.yaml", QLORA, "1.16", {"kbit_upcast": "none", "lora_dtype": "bfloat16"}),
        ("a.yaml", QLORA, "0.24", {"kbit_upcast": "norms", "lora_dtype": "bfloat16"}),
        ("a.yaml", QLORA.replace("bf16", "fp16"), "0.24", {"kbit_upcast": "all", "lora_dtype": None}),
        ("a.yaml", QLORA.replace("4bit", "8bit"), "0.24", {"kbit_upcast": "all", "base": "int8"}),
        ("a.yaml", QLORA + "bnb_4bit_quant_type: fp4\n", None, {"base": "fp4"}),
        ("a.yaml", CLASSIC + "activation_offloading: true\nuse_liger_kernel: true\n", None,
         {"activation_offload": "all", "kernels": "liger"}),
        ("a.yaml", CLASSIC, None, {"optimizer": "adamw", "kernels": "native"}),
        # TRL cuts nothing where its length is None, and at 1,024 where it is not said.
        ("a.yaml", QLORA.replace("2048", "null"), None, {"seq_len": None}),
        ("a.yaml", QLORA.replace("max_length: 2048\n", ""), None, {"seq_len": 1024}),
        # axolotl (`resolve_dtype`): bf16 is auto where it is not there, and only fp16 goes before that.
        ("a.yaml", AXOLOTL.replace("bf16: true\n", "float16: true\n"), None, {"precision": "bf16"}),
        ("a.yaml", AXOLOTL.replace("bf16: true\n", "bf16: auto\nfp16: true\n"), None, {"precision": "fp16"}),
        ("a.yaml", AXOLOTL.replace("bf16: true\n", "bf16: false\nfloat16: true\n"), None, {"precision": "bf16-pure"}),
        ("a.yaml", AXOLOTL + "fp16: true\n", None, {"precision": "bf16"}),
        ("a.yaml", AXOLOTL + "gradient_checkpointing: offload\n", None,
         {"recompute": "full", "activation_offload": "all"}),
        ("a.yaml", AXOLOTL + "gradient_checkpointing: offload\nadapter: qlora\nload_in_4bit: true\n", "0.11",
         {"activation_offload": "checkpoints"}),
        ("a.yaml", AXOLOTL + "gradient_checkpointing: offload\nadapter: qlora\n", None,
         {"activation_offload": "all", "kbit_upcast": "none"}),
        ("a.yaml", AXOLOTL + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true, sharding_strategy: NO_SHARD}\n", None,
         {"zero": 3, "precision": "bf16-autocast-8"}),
        ("a.yaml", AXOLOTL + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", "0.11", {"precision": "bf16"}),
        ("a.yaml", AXOLOTL + "fsdp_config: {offload_params: false}\n", None, {"zero": 3, "precision": "bf16"}),
        ("a.yaml", AXOLOTL + "fp8: true\nfp8_config: {recipe: rowwise}\n", None, {"precision": "fp8-rowwise"}),
        ("a.yaml", AXOLOTL + "adopt: 1\noptimizer: adopt_adamw\n", None, {"optimizer": "adamw-foreach"}),
        ("a.yaml", AXOLOTL + "plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]\nexpert_parallel_size: 2\n"
         "dp_shard_size: 4\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", None, {"ep": 2, "gpus": 8}),
        ("a.yaml", AXOLOTL + "adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\n"
         "lora_target_modules: 'model.layers.[0-9]+.self_attn.(q|v)_proj'\n", None,
         {"base": "nf4-experts", "lora_targets": "model.layers.[0-9]+.self_attn.(q|v)_proj"}),
        ("a.yaml", AXOLOTL + "lora_dropout: 0.1\nadapter:\n", None, {"lora_dropout": None, "lora_rank": 0}),
        ("a.yaml", AXOLOTL + "reward_model: true\nnum_labels: 1\n", None, {"task": "rm"}),
        ("a.yaml", AXOLOTL + "use_ray: true\nray_num_workers: 4\n", None, {"gpus": 4}),
        ("a.yaml", AXOLOTL + "attn_implementation: flash_attention_2@v1\n", None, {"attention": "fa2"}),
        # Each of 4 texts in 4 samples, and (512 - 8 - 8) / 8 + 1 blocks of 8 tokens behind each of 512.
        ("a.yaml", AXOLOTL.replace("sequence_len: 2048", "sequence_len: 512") + "rl: ebft\nebft: {mode: strided}\n", None,
         {"task": "grpo", "seq_len": 512 + 63 * 8, "prompt_len": 512, "samples": 4}),
        ("a.yaml", AXOLOTL + "rl: grpo\ntrl: {use_vllm: true, vllm_mode: server, max_completion_length: 128}\n"
         "vllm: {tensor_parallel_size: 2}\n", None,
         {"gpus": 3, "placement": "split:1+2", "answers": "128", "rollout": "vllm:tp=2"}),
        # `axolotl/cli/vllm_serve.py` hands both to the server.
        ("a.yaml", AXOLOTL + "rl: grpo\ntrl: {use_vllm: true, vllm_mode: server, max_completion_length: 128}\n"
         "vllm: {enforce_eager: true, enable_prefix_caching: false}\n", None, {"rollout": "vllm:graphs=false,prefix=false"}),
        ("a.yaml", AXOLOTL + LIGER + "liger_fused_linear_cross_entropy: true\n", None, {"kernels": "liger", "loss": "auto"}),
        ("a.yaml", AXOLOTL + LIGER, None, {"kernels": "liger", "loss": "float32"}),
        ("a.yaml", AXOLOTL + LIGER.replace("]", f", {CUT}]") + "cut_cross_entropy: true\n", None,
         {"kernels": "liger", "loss": "chunked:256"}),
        ("a.yaml", AXOLOTL + PLUGIN + "liger_fused_linear_cross_entropy: true\n", None, {"kernels": "native", "loss": "liger"}),
        ("a.yaml", AXOLOTL + "adapter: lora\ngptq: true\n", None, {"qlora": True, "base": "gptq"}),
        # LLaMA-Factory
        ("a.yaml", FACTORY + "quantization_bit: 4\nquantization_method: hqq\n", None, {"base": "hqq", "kbit_upcast": "none"}),
        ("a.yaml", FACTORY + "pure_bf16: true\n", None, {"lora_dtype": "float32"}),
        ("a.yaml", FACTORY + "enable_liger_kernel: true\nuse_unsloth_gc: true\n", None,
         {"kernels": "liger", "activation_offload": "checkpoints"}),
        ("a.sh", "llamafactory-cli train --stage sft --finetuning_type full --cutoff_len 512 --optim galore_adamw"
         " --optim_target_modules attn mlp --optim_args rank=64,update_proj_gap=50", None,
         {"optimizer": "galore:rank=64,every=50"}),
    ],
)  # fmt: skip
def test_what_the_keys_of_a_tool_mean(name: str, text: str, version: str | None, wanted: dict[str, Any]) -> None:
    job = read(text, file=name, version=version).job
    assert {field: getattr(job, field) for field in wanted} == wanted


def test_a_kernel_that_is_counted_is_not_bounded_as_well(tmp_path: Path) -> None:
    """axolotl's Liger norm alone widens the range downwards; with Liger's MLP too it is what is counted."""
    place = tmp_path / "a.yaml"
    found = {}
    for more in ("", f"{PLUGIN}liger_rms_norm: true\n", LIGER):
        place.write_text(AXOLOTL + more)
        found[more] = document(f"estimate {place}")
    plain, norm, both = found.values()
    assert norm["memory"]["total"] == plain["memory"]["total"] > both["memory"]["total"]
    assert norm["memory"]["widest"]["low"] < plain["memory"]["widest"]["low"]
    assert any(line.startswith("liger_rms_norm") for line in norm["not_counted"])
    assert not any("liger" in line for line in both["not_counted"])


def test_the_command_keeps_the_kernels(tmp_path: Path) -> None:
    given = resolve_job(parse(["llama-3.1-8b", "--gpu", "h100-sxm5-80gb", "--kernels", "liger", "--lora-rank", "8"]))
    line = completer(given.job)(given.estimate()).command()
    assert "--kernels liger" in line
    assert document(line.removeprefix("loadgauge "))["memory"]["total"] == given.estimate().memory.total


def test_logits_that_unsloth_is_told_to_return() -> None:
    """`UNSLOTH_RETURN_LOGITS` (unsloth 2026.10, `models/llama.py`): the gradient is written over 16-bit logits, and accelerate
    copies them to float32."""
    for line in ("%env UNSLOTH_RETURN_LOGITS = 1", "os.environ['UNSLOTH_RETURN_LOGITS'] = '1'"):
        told = json.dumps({"cells": [{"cell_type": "code", "source": [each]} for each in (line, UNSLOTH)]})
        found = read(told, file="a.ipynb", given={"gpus": 1})
        assert found.job.loss == "fused"
        assert [(item.key, item.effect, item.share) for item in found.uncounted] == [
            ("UNSLOTH_RETURN_LOGITS", "costs", 2.0)
        ]
    assert read(UNSLOTH, file="a.py", given={"gpus": 1}).job.loss == "chunked"


def test_defaults_of_unsloths_own_arguments() -> None:
    """SFTConfig is replaced by Unsloth's (models/rl.py), TrainingArguments is not."""
    bare = UNSLOTH.replace("per_device_train_batch_size = 2,\n", "").replace("gradient_accumulation_steps = 4,\n", "")
    bare = bare.replace('optim = "adamw_8bit",\n', "")
    plain, own = (read(text, file="a.py") for text in (bare, bare.replace("TrainingArguments", "SFTConfig")))
    assert (plain.job.micro_batch, plain.extra.accumulation, plain.job.optimizer) == (8, 1, "adamw")
    assert (own.job.micro_batch, own.extra.accumulation, own.job.optimizer) == (4, 2, "adamw-8bit")


def test_a_patch_of_a_recipe_keeps_comments() -> None:
    job = read(TUNE, file="a.yaml").job
    text = write(job.replace(lora_rank=64, qlora=True, base="nf4"), "torchtune", TUNE, file="a.yaml").text
    line = next(line for line in text.splitlines() if "lora_rank" in line)
    assert line.split() == ["lora_rank:", "64", "#", "higher", "increases", "accuracy", "and", "memory"]
    assert "quantize_base: true" in text
    assert text.startswith("# tune run")


# -- several files, --from and --version -------------------------------------------------------------------------------

TRAIN = """model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
max_length: 2048
output_dir: out
"""
ZERO = """{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_batch_size": "auto",
"train_micro_batch_size_per_gpu": %s, "gradient_accumulation_steps": "auto"}
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: ds.json}
num_machines: 1
num_processes: 8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "ds.json").write_text(ZERO % '"auto"')
    (tmp_path / "other.json").write_text(ZERO % "4")
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    return tmp_path


@pytest.mark.parametrize(
    "beside", ["--with {0}/ds.json --gpus 8", "--with {0}/acc.yaml", "--with {0}/acc.yaml,{0}/ds.json"]
)
def test_files_beside_the_trainers(beside: str, folder: Path) -> None:
    found = document(f"estimate {folder}/train.yaml {beside.format(folder)} --gpu h100-sxm5-80gb")
    assert [found["layout"][name] for name in ("dp", "zero", "micro_batch", "global_batch")] == [8, 3, 2, 128]
    assert found["training"]["framework"] == "deepspeed"
    assert "ds.json is read as deepspeed" in found["file"] or "acc.yaml is read as accelerate" in found["file"]
    # The command that says all of it says the same.
    line = f"{folder}/train.yaml {beside.format(folder)} --gpu h100-sxm5-80gb"
    setup = resolve_job(parse(line.split()))
    again = document(completer(setup.job)(setup.estimate()).command().removeprefix("loadgauge "))
    assert again["memory"] == found["memory"]


def test_a_file_beside_a_model_of_the_catalogue(folder: Path) -> None:
    found = document(f"estimate llama-3.1-8b --with {folder}/ds.json --gpus 4")
    assert (found["layout"]["zero"], found["layout"]["dp"]) == (3, 4)


def test_files_that_contradict_name_both_keys(folder: Path) -> None:
    found = typed(f"estimate {folder}/train.yaml --with {folder}/other.json")
    assert (found.code, found.out) == (2, "")
    assert "other.json: train_micro_batch_size_per_gpu = 4 contradicts" in found.err
    assert "per_device_train_batch_size = 2" in found.err


def test_the_file_that_a_launch_names_may_name_another(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "accelerate launch --config_file acc.yaml train.py --output_dir out --max_length 512 --bf16 True\n"
    )
    job = read((folder / "run.sh").read_text(), file=str(folder / "run.sh")).job
    assert (job.gpus, job.zero, job.framework) == (8, 3, "deepspeed")


def test_how_a_file_is_read_can_be_said(folder: Path) -> None:
    place = folder / "train.yaml"
    assert "read as trl 1.16" in document(f"estimate {place}")["file"]
    assert "read as transformers 5.23" in document(f"estimate {place} --from transformers")["file"]
    old = document(f"estimate {place} --version 0.15")
    assert "read as trl 0.15" in old["file"]
    assert old["memory"] == document(f"estimate {place} --version trl=0.15,torch=2.13")["memory"]
    # Before 0.22 nothing was checkpointed by default.
    assert old["layout"]["recompute"] == "none"
    assert "read as trl 0.15" in typed(f"convert {place} --to flags --version 0.15").err
    assert typed(f"plan {place} --from trl --version 1.6 --gpu h100-sxm5-80gb --gpus 8").code in (0, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("estimate gpt2 --from nope", "unknown dialect 'nope'"),
        ("estimate {0}/train.yaml --from nope", "unknown dialect 'nope'"),
        ("estimate {0}/train.yaml --with {0}/none.json", "no such file"),
        ("estimate {0}/train.yaml --version 1.x", "must be a version such as 1.6"),
        ("estimate {0}/train.yaml --from deepspeed", "is yaml, and DeepSpeed configuration is json"),
    ],
)
def test_what_cannot_be_read_so_is_one_line(line: str, words: str, folder: Path) -> None:
    found = typed(line.format(folder))
    assert (found.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert words in found.err


def test_a_deepspeed_configuration_decides_the_engine() -> None:
    from loadgauge.job_files.exchange import combine

    files = [read(TRAIN, file="a.yaml"), read(ZERO % '"auto"', file="ds.json")]
    assert combine(files)[0].framework == "deepspeed"
    with pytest.raises(ConfigError, match="contradicts"):
        combine(
            [
                *files,
                read(
                    ACCELERATE.replace("DEEPSPEED", "FSDP").replace("deepspeed_config:", "x:"),
                    file="acc.yaml",
                    alone=True,
                ),
            ]
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", TUNE.replace("compile: False", "compile: True")),
        ("t.sh", "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b --compile.enable"),
    ],
)
def test_compiled_layers_keep_less(name: str, text: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.write_text(text)
    found = document(f"estimate {place}")
    plain = document(f"estimate {place} --no-compile")
    assert found["memory"]["total"] < plain["memory"]["total"]
    assert any("torch.compile" in line for line in found["not_counted"])


def test_texts_that_unsloth_embeds_are_pairs_in_16_bits_without_logits() -> None:
    """`FastSentenceTransformer.from_pretrained` (unsloth 2026.10, `models/sentence_transformer.py`)."""
    text = """from unsloth import FastSentenceTransformer
model = FastSentenceTransformer.from_pretrained(model_name = "unsloth/Qwen3-Embedding-0.6B", max_seq_length = 512)
model = FastSentenceTransformer.get_peft_model(model, r = 32)
SentenceTransformerTrainer(model = model, args = SentenceTransformerTrainingArguments(per_device_train_batch_size = 8))
"""
    file = read(text, file="a.py")
    run = file.job
    assert (run.qlora, run.micro_batch, run.recompute, file.extra.head) == (False, 16, "none", 1)
    labels = UNSLOTH.format(mark="x").replace("dtype = None", "num_labels = 6")
    assert (read(labels, file="a.py").extra.head, read(labels, file="a.py").job.qlora) == (6, True)


@pytest.mark.parametrize("said", ["quantizer: {_component_: a.b.C}", "tasks: [x]", "max_new_tokens: 300"])
def test_a_recipe_of_torchtune_without_an_optimizer_trains_nothing(said: str) -> None:
    text = f"model: {{_component_: torchtune.models.llama2.llama2_7b}}\ncheckpointer: {{checkpoint_dir: a}}\n{said}\n"
    with pytest.raises(ConfigError, match="trains nothing"):
        read(text, "torchtune", file="a.yaml")
