"""AMD Primus' YAML: a preset of a model, one of a trainer, and what a file has otherwise, of Megatron or torchtitan.

Variables of the environment count as they are where nobody sets them (`${NAME:value}`); other files are merged in by `extends`.
"""

from loadgauge.job_files.ideas import Dialect, Document, Facts, Idea, Keys, dropped, fixed, when
from loadgauge.job_files.pre_training.megatron import MEGATRON
from loadgauge.job_files.pre_training.megatron_model import resized
from loadgauge.job_files.pre_training.torchtitan import TORCHTITAN

MODULES = ("modules.pre_trainer.", "modules.post_trainer.")
ADAPTERS = ("lora.enabled", "lora.dim", "lora.dropout")
SHARED = {"bf16": True, "overlap_p2p_comm": True, "use_distributed_optimizer": True}
PRESETS: dict[str, dict[str, object]] = {
    "megatron": {**SHARED, "micro_batch_size": 2, "global_batch_size": 16, "seq_length": 1024},
    "sft": {**SHARED, "micro_batch_size": 1, "global_batch_size": 128, "seq_length": 2048},
    "torchtitan": {
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "activation_checkpoint.mode": "none",
        "compile.enable": True,
        "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.context_parallel_rotate_method": "allgather",
    },
}
"""`primus/configs/modules/*/{trainer_base,pre_trainer,sft_trainer}.yaml`, where they are not the backend's own defaults."""


def _variant(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """The backend of a file, and where the arguments of its module are."""
    own = next((name for name in MODULES if any(key.startswith(name) for key in document.names())), MODULES[0])
    names = [(f"{own}{name}", f"module.{name}") for name in ("framework", "config", "model", "name", "trainer_class")]
    return str(document.get(f"{own}framework")), [*names, (f"{own}overrides.", ""), (own, "")]


def _beneath(document: Document) -> dict[str, object]:
    """Return what the preset of the trainer says, by the file's own names."""
    backend, names = _variant(document)
    own = next(theirs for theirs, ours in names if not ours)
    preset = "sft" if "sft" in str(document.get(names[1][0])) and backend == "megatron" else backend
    return {f"{own}{key}": value for key, value in PRESETS.get(preset, {}).items()}


def _backend(keys: Keys) -> str:
    return str(keys.choice("module.framework", {"megatron": "megatron", "torchtitan": "torchtitan"}) or "megatron")


def _model(keys: Keys) -> Facts:
    """The model that a preset is named after, with the sizes that the file has of its own."""
    word = keys.word("module.model")
    if word is None:
        return {}
    name = word.removesuffix(".yaml").removesuffix("-fp8").replace("_", "-")
    own = resized(keys, name) if _backend(keys) == "megatron" and not keys.has("hidden_size") else None
    return {"model": name} if own is None else {"config": dropped(keys, own)}


def _adapted(keys: Keys) -> Facts:
    on = keys.flag(ADAPTERS[0])
    return {
        "lora_rank": keys.whole(ADAPTERS[1]) or 32 if on else 0,
        "lora_targets": "all" if on else None,
        "lora_dropout": (keys.real(ADAPTERS[2]) or None) if on else None,
    }


def _of(backend: str, idea: Idea) -> Idea:
    return when(lambda keys: _backend(keys) == backend, idea)


PRIMUS = Dialect(
    name="primus",
    title="AMD Primus",
    versions="Primus 0.1 - 0.8",
    syntaxes=("yaml",),
    framework="megatron",
    layers="keys/primus.toml",
    extends="extends",
    fills=r"\$\{\w+:([^{}]*)\}",
    beneath=_beneath,
    renames=_variant,
    blank={"yaml": "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n"},
    ideas=(
        fixed("module.framework", framework=_backend),
        *(_of("torchtitan", idea) for idea in TORCHTITAN.ideas),
        *(_of("megatron", idea) for idea in MEGATRON.ideas),
        Idea(
            keys=("module.model",),
            facts=("model", "config"),
            read=_model,
            write=lambda facts, keys: {"module.model": facts.get("model")},
        ),
        Idea(
            keys=ADAPTERS,
            facts=("lora_rank", "lora_targets", "lora_dropout"),
            read=_adapted,
            write=lambda facts, keys: {ADAPTERS[0]: bool(facts.get("lora_rank")), ADAPTERS[1]: facts.get("lora_rank")},
        ),
    ),
)
