"""A case as its libraries are called for it: the model is loaded, prepared and trained by them, as in a user's script."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stack import preference
from stack.case import Case
from stack.models import config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2
"""The optimizer's states come with the first step."""
Mark = Callable[[str, Any], None]
"""Called with `loaded` and the model, `prepared` and the trainer, `end of step` and None."""


def train(case: Case, mark: Mark) -> None:
    """Trains `STEPS` steps, as a script does that loads a model and calls its trainer."""
    prepared(case, mark).train()


def prepared(case: Case, mark: Mark) -> Any:
    """The trainer of a script, with its model."""
    model = load(case)
    if case.trainer == "rm":
        model = preference.with_score(model)
    mark("loaded", model)
    model = adapt(case, model)
    trainer = make_trainer(case, model, mark)
    mark("prepared", trainer)
    return trainer


def load(case: Case) -> Any:
    """The model as `from_pretrained` leaves it: in its dtype, quantised, on the GPU where the script or Trainer puts it."""
    import transformers
    from transformers.initialization import no_init_weights

    with torch.device("cuda"), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(
            config(case), dtype=DTYPES[case.precision.partition("+")[0]], attn_implementation=case.attention
        )
    model.tie_weights()
    if case.method == "qlora":
        quantise(case, model)
    return model


def quantise(case: Case, model: Any) -> None:
    """What transformers' quantizer for bitsandbytes does to a model while it loads: `Bnb4BitHfQuantizer`."""
    import bitsandbytes
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=case.double_quant,
    )  # fmt: skip
    weights = {name: module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), how)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            value = weights.pop(name)
            value = value.T if issubclass(module.source_cls, transformers.pytorch_utils.Conv1D) else value
            own = {key: item for key, item in vars(module.weight).items() if key not in ("requires_grad", "_is_param")}
            module.weight = bitsandbytes.nn.Params4bit(value.detach(), requires_grad=False, **own).to("cuda")
            if biases[name] is not None:
                module.bias = biases[name]
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = how.quant_method
    model.config.quantization_config = how
    model.hf_quantizer = transformers.quantizers.AutoHfQuantizer.from_config(how)


def adapt(case: Case, model: Any) -> Any:
    """PEFT's part of a script, or the freezing of layers."""
    if case.method == "frozen":
        blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        for parameter in [*model.get_input_embeddings().parameters(), *blocks[: case.layers // 2].parameters()]:
            parameter.requires_grad_(False)
    if not case.adapters:
        return model
    import peft

    if case.method == "qlora" and case.kbit:
        again = checkpointing(case)
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=again is not None, gradient_checkpointing_kwargs=again
        )
    every = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_linear(module)
                    and "lm_head" not in name and "embed_out" not in name})  # fmt: skip
    attention = [name for name in every if name in ATTENTION]
    ends = [name.rpartition(".")[2] for name, module in model.named_modules()
            if module in (model.get_input_embeddings(), model.get_output_embeddings())]  # fmt: skip
    lora = peft.LoraConfig(
        r=case.rank, lora_alpha=16, lora_dropout=case.dropout, use_dora=case.method == "dora", task_type="CAUSAL_LM",
        target_modules=every if case.targets == "all" else attention,
        modules_to_save=ends if case.method == "embeddings" else None,
    )  # fmt: skip
    return peft.get_peft_model(model, lora)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value", "dense")


def is_linear(module: nn.Module) -> bool:
    """Whether PEFT puts an adapter beside it: `nn.Linear`, bitsandbytes' of it, or GPT-2's."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def checkpointing(case: Case) -> dict[str, Any] | None:
    """The `gradient_checkpointing_kwargs` of a script; None: it does not ask for checkpointing."""
    ways = {"reentrant": True, "non-reentrant": False}
    return {"use_reentrant": ways[case.checkpointing]} if case.checkpointing in ways else None


def arguments(case: Case, folder: str) -> dict[str, Any]:
    """The fields of `TrainingArguments`."""
    _, _, told = case.precision.partition("+")
    again = checkpointing(case)
    given: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": case.micro_batch, "max_steps": STEPS,
        "gradient_accumulation_steps": case.accumulate, "optim": case.optimizer, "max_grad_norm": case.clip,
        "bf16": told == "bf16", "fp16": told == "fp16", "gradient_checkpointing": again is not None,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "ddp_find_unused_parameters": False,  # it asks for pinned memory; on the GPU it takes 4 bytes a tensor
        "dataloader_pin_memory": False,  # a fake tensor cannot be pinned; it is of the host in any case
    }  # fmt: skip
    if again is not None:
        given["gradient_checkpointing_kwargs"] = again
    if case.loss in ("liger", "inplace"):
        given["use_liger_kernel"] = True
        fused = case.loss == "liger"
        given["liger_kernel_config"] = {
            "fused_linear_cross_entropy": fused, "cross_entropy": not fused, "rope": False, "rms_norm": False, "swiglu": False,
            "geglu": False,
        }  # fmt: skip
    if case.wrapper.startswith("fsdp2"):
        given["fsdp"] = ["full_shard", "auto_wrap"] + (["offload"] if case.wrapper.endswith("offload") else [])
        given["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": case.wrapper != "fsdp2-zero2",
            "cpu_ram_efficient_loading": False,
        }
    if case.wrapper.startswith("zero"):
        given["deepspeed"] = deepspeed(case)
    return given


def deepspeed(case: Case) -> dict[str, Any]:
    """The usual DeepSpeed configuration of a stage."""
    stage, _, offload = case.wrapper.removeprefix("zero").partition("-")
    zero: dict[str, Any] = {"stage": int(stage)}
    if case.bucket:
        zero |= {"reduce_bucket_size": case.bucket, "allgather_bucket_size": case.bucket}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == "3":
            zero["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    }  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of token ids, all of one length."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 4 * self.case.gpus * self.case.micro_batch * self.case.accumulate

    def __getitem__(self, _: int) -> dict[str, Any]:
        return {"input_ids": [1] * self.case.seq_len}


def make_trainer(case: Case, model: Any, mark: Mark) -> Any:
    """Trainer or SFTTrainer with the arguments of the case."""
    import transformers

    class Watch(transformers.TrainerCallback):
        """Reports the end of each step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            mark("end of step", None)

    def collate(rows: list[Any]) -> dict[str, Any]:
        ids = torch.ones((len(rows), case.seq_len), dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    def collate_for_trl(rows: list[Any]) -> dict[str, Any]:
        made = collate(rows)
        return {**made, "attention_mask": torch.ones_like(made["input_ids"])}

    given = arguments(case, tempfile.mkdtemp())
    common: dict[str, Any] = {"data_collator": collate, "callbacks": [Watch()]}
    if case.trainer not in ("trainer", "sft"):
        return preference.trainer(case, model, given, common["callbacks"], load, tokenizer(case))
    if not case.trains_by_trl:
        return transformers.Trainer(model, transformers.TrainingArguments(**given), train_dataset=Rows(case), **common)
    import datasets
    import trl

    given |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": case.seq_len,
              "activation_offloading": case.checkpointing == "offloaded"}  # fmt: skip
    common["data_collator"] = collate_for_trl
    rows = datasets.Dataset.from_list([Rows(case)[0] for _ in range(len(Rows(case)))])
    return trl.SFTTrainer(model, trl.SFTConfig(**given), train_dataset=rows, processing_class=tokenizer(case), **common)


def tokenizer(case: Case) -> Any:
    """A tokenizer of a few words, which nothing is given to read."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
