"""xtuner: version 1 by its command line or a `TrainerConfig` in a program, and the older configurations of mmengine.

A program is parsed and never run: the arguments of the classes that it calls, or names as the `type` of a `dict`.
"""

from loadgauge.job_files.ideas import (
    Dialect,
    Document,
    Facts,
    Idea,
    Keys,
    adapters,
    degree,
    fixed,
    quantised,
    reads,
    row,
    when,
)
from loadgauge.job_files.pre_training.megatron import launched
from loadgauge.job_files.reading.calls import Calls

NEW = {
    **dict.fromkeys(("TrainerConfig", "TrainingArguments"), "trainer"),
    "FSDPConfig": "fsdp_config",
    "DataloaderConfig": "loader",
    "CELossConfig": "loss_config",
    "Float8Config": "float8_config",
    "AdamWConfig": "adamw",
    "MuonConfig": "muon",
}
OLD = {
    "AutoModelForCausalLM.from_pretrained": "llm",
    "LoraConfig": "lora",
    "BitsAndBytesConfig": "bits",
    "AmpOptimWrapper": "wrapper",
    **dict.fromkeys(("SupervisedFinetune", "DPO", "RewardModel", "LLaVAModel"), "tuned"),
}
MODELS = {"qwen3-moe-30ba3": "qwen3-30b-a3b", "glm-5.2": "glm-5.2"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
TOP = "top."
"""Before names that an older configuration assigns to."""


def document(text: str) -> Calls:
    """The arguments of xtuner's classes in a program, and what it assigns to names."""
    calls = Calls(text, (NEW | OLD).get, {})
    if calls.calls.keys().isdisjoint(NEW.values()):
        for name, several in calls.constants.assigned.items():
            if (value := several[0][1]) is not None:
                calls.values.setdefault(f"{TOP}{name}", value)
    return calls


def _variant(keys: Document) -> tuple[str, list[tuple[str, str]]]:
    """The version of a file, and its own names of what the command line of version 1 says."""
    if any(name.startswith(TOP) for name in keys.names()):
        named = {
            "batch_size": "intra_layer_micro_batch",
            "accumulative_counts": "accumulative_counts",
            "max_length": "pack_max_length",
            "sequence_parallel_size": "sp_size",
        }
        return "0", [
            ("llm.pretrained_model_name_or_path", "load_from"),
            *((f"{TOP}{old}", new) for old, new in named.items()),
        ]
    return "1", [] if keys.syntax == "argv" else [("trainer.fsdp_cfg", "fsdp_cfg"), ("trainer.", ""), ("loader.", "")]


def _older(keys: Keys) -> bool:
    return getattr(keys.document, "variant", "1") == "0"


def _recompute(keys: Keys) -> str:
    share = keys.real("fsdp_config.recompute_ratio")
    keys.note(
        "fsdp_config.recompute_ratio",
        "makes a share of the layers again, where all are counted",
        "costs",
        "activations",
        8.0,
        when=share not in (None, 0, 1),
    )
    return "none" if share == 0 or keys.flag("tuned.use_activation_checkpointing") is False else "full"


def _model(keys: Keys) -> Facts:
    name = keys.raw("load_from") or keys.raw("model_cfg")
    named = name if isinstance(name, str) and not name.startswith("$") else None
    return {"model": MODELS.get(str(named).lower(), named)}


def _engine(keys: Keys) -> Facts:
    """FSDP 2 over float32 weights; the older version has DDP, unless its command line names a file of DeepSpeed's."""
    if _older(keys):
        word = keys.choice("wrapper.dtype", PRECISIONS) or "fp16"
        return {"framework": "huggingface", "zero": 0, "precision": word, "weights": keys.word("llm.torch_dtype")}
    word = keys.word("fsdp_config.param_dtype") or "bfloat16"
    return {
        "framework": "torchtitan",
        "zero": 2 if keys.flag("fsdp_config.reshard_after_forward") is False else 3,
        "precision": PRECISIONS.get(word.rpartition(".")[2], "bf16"),
        "compile": keys.flag("fsdp_config.torch_compile") is not False,
        "offload": "all" if keys.flag("fsdp_config.cpu_offload") else "none",
        "shards": keys.whole("fsdp_config.hsdp_sharding_size"),
    }


def _loss(keys: Keys) -> str | None:
    usual = "chunk" if keys.document.syntax == "argv" else "eager"
    words = {"chunk": "chunked", "eager": "auto", "liger": "chunked"}
    return None if _older(keys) else words.get(keys.word("loss_config.mode") or usual)


def _length(keys: Keys) -> int:
    return 2048 if _older(keys) else 4096 if keys.document.syntax == "argv" else 32_768


FSDP = ("param_dtype", "hsdp_sharding_size", "cpu_offload", "reshard_after_forward", "torch_compile")
XTUNER = Dialect(
    name="xtuner", title="xtuner", versions="xtuner 0.1 - 1.0", syntaxes=("argv", "python"), framework="torchtitan", style="value",
    script=document, renames=_variant,
    blank={"argv": "torchrun xtuner/v1/train/cli/sft.py --chat-template qwen3\n", "python": "from xtuner.v1 import train\n"},
    ideas=(
        launched(),
        Idea(keys=("load_from", "model_cfg"), facts=("model",), read=_model,
             write=lambda facts, keys: {"load_from": facts.get("model")}),
        reads("wrapper.dtype", "llm.torch_dtype", *(f"fsdp_config.{name}" for name in FSDP),
              facts="framework zero precision weights compile offload shards")(_engine),
        row("seq_len", "pack_max_length", default=_length),
        row("micro_batch", "intra_layer_micro_batch", default=1),
        row("accumulation", "accumulative_counts"),
        row("global_batch", "global_batch_size"),
        degree("tp", "fsdp_config.tp_size"),
        degree("ep", "fsdp_config.ep_size"),
        degree("cp", "sp_size"),
        fixed(cp_comm=lambda keys: "all_to_all" if (keys.whole("sp_size") or 1) > 1 else None),
        fixed("fsdp_config.recompute_ratio", "tuned.use_activation_checkpointing", recompute=_recompute),
        fixed("loss_config.mode", loss=_loss),
        fixed("optim", optimizer=lambda keys: "muon" if "MuonConfig" in (keys.word("optim"), *keys.document.program)
              or keys.word("optim") == "Muon" else "adamw"),
        when(_older, adapters(lambda keys: keys.has("lora.r"), row("lora_rank", "lora.r"),
             quantised(four="bits.load_in_4bit", eight="bits.load_in_8bit", kind="bits.bnb_4bit_quant_type",
                       nested="bits.bnb_4bit_use_double_quant", upcast="all"))),
    ),
)  # fmt: skip
