"""Writes `keys/<dialect>.txt`: every key that the installed tools' own argument classes have, with its default.

Run by hand where the tools are installed (`make parsers` installs them), with Megatron's and Megatron-Bridge's source:

    python tests/support/extract_keys.py [--megatron-lm DIR] [--bridge DIR]

Each line is a key, a tab, and its default as JSON (`null` where it has none or is not plain data). A line that begins with
`#` names the class, and the version of its package, that the keys below it come from.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import json
import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "job_files" / "keys"
Section = tuple[str, dict[str, Any]]
"""A class with the version of its package, and its keys with their defaults."""


def plain(value: Any) -> Any:
    """A default as plain data; None where it is not."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str | bool | int | float) or value is None:
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, list | tuple | set | dict) and not value:
        return None
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return list(value)
    return None


def of_dataclass(kind: type, prefix: str = "", deep: bool = False) -> dict[str, Any]:
    """The fields of a dataclass; `deep`: of the dataclasses in it too."""
    found: dict[str, Any] = {}
    hints = {}
    if deep:
        try:
            hints = typing.get_type_hints(kind)
        except (NameError, TypeError, AttributeError):
            hints = {}
    for field in dataclasses.fields(kind):
        if field.name.startswith("_"):
            continue
        inner = hints.get(field.name, field.type)
        inner = next((part for part in typing.get_args(inner) if dataclasses.is_dataclass(part)), inner)
        if deep and dataclasses.is_dataclass(inner):
            found |= of_dataclass(typing.cast(type, inner), f"{prefix}{field.name}.", deep)
            continue
        default: Any = None
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            try:
                default = field.default_factory()
            except Exception:  # a default that needs more than the class
                default = None
        found[f"{prefix}{field.name}"] = plain(default)
    return found


def of_pydantic(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of a pydantic model, and of the models in it."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        inner = [part for part in _parts(field.annotation) if hasattr(part, "model_fields")]
        name = f"{prefix}{field.alias or name}"
        if inner and not _listed(field.annotation):
            for part in inner:
                found |= of_pydantic(part, f"{name}.")
        else:
            default = None if field.is_required() else field.default
            found[name] = plain(default if type(default).__name__ != "PydanticUndefinedType" else None)
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from _parts(part)


def _listed(annotation: Any) -> bool:
    return any(typing.get_origin(part) in (list, dict, tuple) for part in _parts(annotation))


def of_yaml(path: Path) -> dict[str, Any]:
    """The leaves of a YAML file."""
    from ruamel.yaml import YAML

    found: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        for key, inner in value.items():
            if isinstance(inner, dict) and inner:
                walk(inner, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = plain(inner)

    walk({key: value for key, value in YAML(typ="safe").load(path.read_text()).items() if key != "defaults"}, "")
    return found


def version(package: str) -> str:
    """A package and its version."""
    return f"{package} {importlib.metadata.version(package)}"


def transformers() -> Iterator[Section]:
    """TrainingArguments."""
    module = importlib.import_module("transformers")
    yield f"{version('transformers')}: TrainingArguments", of_dataclass(module.TrainingArguments)


TRL_OTHER = ("DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig")


def trl() -> Iterator[Section]:
    """SFT's arguments, then those that only other trainers have; without TrainingArguments' own."""
    module = importlib.import_module("trl")
    seen: set[str] = {
        field.name for field in dataclasses.fields(importlib.import_module("transformers").TrainingArguments)
    }
    for name in ("SFTConfig", "ModelConfig", "ScriptArguments", *TRL_OTHER):
        keys = {key: value for key, value in of_dataclass(getattr(module, name)).items() if key not in seen}
        seen |= keys.keys()
        yield f"{version('trl')}: {name}", keys


ACCELERATE = {
    "FSDP Arguments": "fsdp_config.", "DeepSpeed Arguments": "deepspeed_config.",
    "Megatron-LM Arguments": "megatron_lm_config.", "ParallelismConfig Arguments": "parallelism_config.",
    "FP8 Arguments": "fp8_config.",
}  # fmt: skip


def accelerate() -> Iterator[Section]:
    """The configuration's own keys, and its sections', which are the arguments of `accelerate launch`."""
    config = importlib.import_module("accelerate.commands.config.config_args")
    launch = importlib.import_module("accelerate.commands.launch")
    own = of_dataclass(config.ClusterConfig)
    sections = (*(section.rstrip(".") for section in ACCELERATE.values()), "dynamo_config")
    yield f"{version('accelerate')}: ClusterConfig", {key: value for key, value in own.items() if key not in sections}
    for group in launch.launch_command_parser()._action_groups:
        for title, section in ACCELERATE.items():
            if str(group.title).lower() == title.lower():
                keys = {f"{section}{action.dest}": plain(action.default) for action in group._group_actions}
                yield f"{version('accelerate')}: {title}", keys


def llamafactory() -> Iterator[Section]:
    """The classes of `llamafactory-cli train`, without TrainingArguments' own."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    parser = importlib.import_module("llamafactory.hparams.parser")
    base = {field.name for field in dataclasses.fields(importlib.import_module("transformers").TrainingArguments)}
    for kind in parser._TRAIN_ARGS:
        keys = {key: value for key, value in of_dataclass(kind).items() if key not in base}
        yield f"{version('llamafactory')}: {kind.__name__}", keys


def axolotl() -> Iterator[Section]:
    """Its schema."""
    schema = importlib.import_module("axolotl.utils.schemas.config")
    yield f"{version('axolotl')}: AxolotlInputConfig", of_pydantic(schema.AxolotlInputConfig)


def deepspeed() -> Iterator[Section]:
    """Its models of sections, and the keys that `runtime/config.py` looks up by the names in `runtime/constants.py`."""
    config = importlib.import_module("deepspeed.runtime.config")
    constants = importlib.import_module("deepspeed.runtime.constants")
    looked_up: dict[str, Any] = {}
    for node in ast.walk(ast.parse(Path(str(config.__file__)).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_scalar_param" and len(node.args) == 3:
            place, key, default = node.args
            if isinstance(place, ast.Name) and isinstance(key, ast.Name) and hasattr(constants, key.id):
                known = getattr(constants, default.id, None) if isinstance(default, ast.Name) else None
                looked_up[str(getattr(constants, key.id))] = plain(known)
    yield f"{version('deepspeed')}: runtime/config.py", looked_up
    models = (
        ("runtime.zero.config", "DeepSpeedZeroConfig", "zero_optimization."),
        ("runtime.precision_config", "DeepSpeedFP16Config", "fp16."),
        ("runtime.precision_config", "DeepSpeedBF16Config", "bf16."),
        ("runtime.tensor_parallel.config", "TPTrainingConfig", "tensor_parallel."),
        ("profiling.config", "DeepSpeedFlopsProfilerConfig", "flops_profiler."),
        ("monitor.config", "DeepSpeedMonitorConfig", ""),
        ("comm.config", "CommsLoggerConfig", "comms_logger."),
        ("compile.config", "CompileConfig", "compile."),
        ("nebula.config", "DeepSpeedNebulaConfig", "nebula."),
        ("runtime.swap_tensor.aio_config", "AioConfig", "aio."),
    )
    for module, name, prefix in models:
        try:
            kind = getattr(importlib.import_module(f"deepspeed.{module}"), name)
        except (ImportError, AttributeError):
            continue
        if hasattr(kind, "model_fields"):
            yield f"{version('deepspeed')}: {name}", of_pydantic(kind, prefix)
    checkpointing = importlib.import_module("deepspeed.runtime.activation_checkpointing.config")
    keys = {
        f"activation_checkpointing.{getattr(checkpointing, name)}": plain(getattr(checkpointing, f"{name}_DEFAULT"))
        for name in dir(checkpointing)
        if name.startswith("ACT_CHKPT_") and not name.endswith("_DEFAULT") and hasattr(checkpointing, f"{name}_DEFAULT")
    }
    yield f"{version('deepspeed')}: activation_checkpointing/config.py", keys


TORCHTITAN = {
    "trainer.py": {"Trainer": ""},
    "config/configs.py": {
        "TrainingConfig": "training.", "ParallelismConfig": "parallelism.", "CompileConfig": "compile.",
        "CommConfig": "comm.", "DebugConfig": "debug.",
    },
    "tools/profiler.py": {"Profiler": "profiler."},
    "components/optimizer/optimizer.py": {
        "OptimizersContainer": "optimizer.", "ParamGroupConfig": "optimizer.param_groups.0.",
    },
    "components/optimizer/lr_scheduler.py": {"LRSchedulersContainer": "lr_scheduler."},
    "components/metrics.py": {"MetricsProcessor": "metrics."},
    "components/checkpointer/dcp.py": {"CheckpointManager": "checkpoint."},
    "components/validate.py": {"Validator": "validator."},
    "components/loss.py": {"CrossEntropyLoss": "loss.", "ChunkedLossWrapper": "loss."},
    "components/dataloader.py": {"ParallelAwareDataloader": "dataloader."},
    "distributed/activation_checkpoint.py": {
        "ActivationCheckpointing": "activation_checkpoint.", "SelectiveAC": "activation_checkpoint.",
        "FullAC": "activation_checkpoint.", "MemoryBudgetAC": "activation_checkpoint.",
    },
}  # fmt: skip
SECTIONS = frozenset(
    {
        *("model_spec", "profiler", "metrics", "tokenizer", "dataloader", "optimizer", "lr_scheduler", "training"),
        *(
            "parallelism",
            "checkpoint",
            "activation_checkpoint",
            "compile",
            "comm",
            "validator",
            "debug",
            "override",
            "loss",
        ),
    }
)


def torchtitan() -> Iterator[Section]:
    """The trainer's configuration, by its source: what it imports wants a GPU's libraries."""
    root = Path(str(importlib.metadata.distribution("torchtitan").locate_file("torchtitan")))
    seen: set[str] = set(SECTIONS)
    for file, names in TORCHTITAN.items():
        for name, fields in dataclasses_of(root / file).items():
            owner = name.removesuffix(".Config")
            if owner in names:
                keys = {f"{names[owner]}{key}": value for key, value in fields.items()}
                keys = {key: value for key, value in keys.items() if key not in seen}
                seen |= keys.keys()
                yield f"{version('torchtitan')}: {name}", keys


def verl() -> Iterator[Section]:
    """Its generated configurations."""
    root = Path(str(importlib.metadata.distribution("verl").locate_file("verl/trainer/config")))
    seen: set[str] = set()
    for name in ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml", "sft_trainer_engine.yaml"):
        keys = {key: value for key, value in of_yaml(root / name).items() if key not in seen}
        seen |= keys.keys()
        yield f"{version('verl')}: {name}", keys


def folder_of(package: str, name: str) -> Path:
    """A folder of an installed package, whose modules want libraries that need not be there."""
    return Path(str(importlib.metadata.distribution(package).locate_file(name)))


def arguments_of(path: Path, function: str, prefix: str = "") -> dict[str, Any]:
    """The arguments of a function in a Python file, wherever it is, with defaults that are literals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = node.args.args + node.args.kwonlyargs
            defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + list(node.args.defaults)
            pairs = zip(names, [*defaults, *node.args.kw_defaults], strict=True)
            return {
                f"{prefix}{name.arg}": _literal(default)
                for name, default in pairs
                if name.arg not in ("self", "cls", "model")
            }
    return {}


def torchtune() -> Iterator[Section]:
    """The recipes that come with it, the keys that their programs look up, and the arguments of a builder of models."""
    recipes, found = folder_of("torchtune", "recipes"), dict[str, Any]()
    for path in sorted((recipes / "configs").rglob("*.yaml")):
        if not {"evaluation", "eleuther", "generation", "quantization"} & set(path.stem.split("_")):
            found |= dict.fromkeys(of_yaml(path))
    yield f"{version('torchtune')}: recipes/configs", found
    looked_up = dict[str, Any]()
    for path in sorted(recipes.glob("*_finetune_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "cfg.get"
                and isinstance(node.args[0], ast.Constant)
            ):
                looked_up[str(node.args[0].value)] = _literal(node.args[1]) if len(node.args) > 1 else None
    yield f"{version('torchtune')}: recipes", {key: value for key, value in looked_up.items() if key not in found}
    builder = folder_of("torchtune", "torchtune/models/llama3_1/_model_builders.py")
    keys = arguments_of(builder, "lora_llama3_1_8b", "model.")
    yield f"{version('torchtune')}: lora_llama3_1_8b", {key: value for key, value in keys.items() if key not in found}


def litgpt() -> Iterator[Section]:
    """The arguments of fine-tuning, and of the records in them."""
    root = folder_of("litgpt", "litgpt")
    seen: set[str] = {"train", "eval", "log"}
    for name in ("lora", "full"):
        keys = {
            key: value for key, value in arguments_of(root / f"finetune/{name}.py", "setup").items() if key not in seen
        }
        seen |= keys.keys()
        yield f"{version('litgpt')}: finetune/{name}.py", keys
    for name, fields in dataclasses_of(root / "args.py").items():
        yield (
            f"{version('litgpt')}: {name}",
            {f"{name.removesuffix('Args').lower()}.{key}": value for key, value in fields.items()},
        )


SWIFT = (
    "arguments/base_args/base_args.py", "arguments/base_args/data_args.py", "arguments/base_args/model_args.py",
    "arguments/base_args/quant_args.py", "arguments/base_args/template_args.py", "arguments/base_args/generation_args.py",
    "arguments/tuner_args.py", "arguments/sft_args.py", "trainers/arguments.py",
)  # fmt: skip


def ms_swift() -> Iterator[Section]:
    """The classes of `swift sft`, without TrainingArguments' own."""
    seen: set[str] = set()
    for file in SWIFT:
        for name, fields in dataclasses_of(folder_of("ms-swift", "swift") / file).items():
            keys = {key: value for key, value in fields.items() if key not in seen}
            seen |= keys.keys()
            yield f"{version('ms-swift')}: {name}", keys


AUTOMODEL = {
    "distributed/config.py": {"FSDP2Config": "distributed.", "MoEParallelizerConfig": "distributed.moe."},
    "distributed/mesh.py": {"ParallelismSizes": "distributed."},
    "distributed/pipelining/config.py": {"PipelineConfig": "distributed.pipeline."},
    "_peft/lora.py": {"PeftConfig": "peft."},
    "utils/compile_utils.py": {"CompileConfig": "compile."},
    "quantization/fp8.py": {"FP8Config": "fp8."},
    "checkpoint/config.py": {"CheckpointingConfig": "checkpoint."},
}  # fmt: skip


def automodel() -> Iterator[Section]:
    """The records that sections of a recipe are made into."""
    root = folder_of("nemo-automodel", "nemo_automodel/components")
    for file, names in AUTOMODEL.items():
        for name, fields in dataclasses_of(root / file).items():
            if name in names:
                keys = {f"{names[name]}{key}": value for key, value in fields.items()}
                yield f"{version('nemo-automodel')}: {name}", keys
    steps = arguments_of(root / "training/step_scheduler.py", "__init__", "step_scheduler.")
    passed = ("dp_size", "dataloader", "preemption_signal", "process_group")  # by the recipe itself
    keys = {key: value for key, value in steps.items() if key.rpartition(".")[2] not in passed}
    yield f"{version('nemo-automodel')}: StepScheduler", keys


def unsloth() -> Iterator[Section]:
    """The arguments of its two calls."""
    root, seen = folder_of("unsloth", "unsloth/models"), set[str]()
    for file, function, prefix in (
        ("loader.py", "from_pretrained", "model."),
        ("llama.py", "get_peft_model", "peft."),
        ("vision.py", "get_peft_model", "peft."),
    ):
        keys = {key: value for key, value in arguments_of(root / file, function, prefix).items() if key not in seen}
        seen |= keys.keys()
        yield f"{version('unsloth')}: {file}, {function}", keys


def megatron_core() -> Iterator[Section]:
    """The dataclasses of Megatron-Core that its arguments are made of."""
    for module, name in (
        ("megatron.core.transformer.transformer_config", "TransformerConfig"),
        ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
        ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
        ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ):
        kind = getattr(importlib.import_module(module), name)
        yield f"{version('megatron-core')}: {name}", of_dataclass(kind)


# -- of source that cannot be installed --------------------------------------------------------------------------------


def dataclasses_of(path: Path) -> dict[str, dict[str, Any]]:
    """The annotated fields of each class in a Python file, with defaults that are literals; `A.B` is B within A."""
    found: dict[str, dict[str, Any]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef):
                continue
            if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
                found[f"{prefix}{node.name}"] = {
                    line.target.id: _literal(line.value)
                    for line in node.body
                    if isinstance(line, ast.AnnAssign)
                    and isinstance(line.target, ast.Name)
                    and line.target.id[0] != "_"
                }
            walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(path.read_text()).body, "")
    return found


def _literal(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        keywords = {word.arg: word.value for word in node.keywords}
        node = keywords.get("default")
    if node is None:
        return None
    try:
        return plain(ast.literal_eval(node))
    except ValueError:
        return None


def megatron(root: Path) -> Iterator[Section]:
    """Megatron-LM's options: those of `add_argument`, and those made of dataclasses."""
    arguments = root / "megatron/training/arguments.py"
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(arguments.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args:
            keywords = {word.arg: word.value for word in node.keywords}
            action = _literal(keywords.get("action"))
            default = {"store_true": False, "store_false": True}.get(str(action), _literal(keywords.get("default")))
            for name in node.args:
                text = _literal(name)
                if isinstance(text, str) and text.startswith("--"):
                    # What turns a switch off is off itself unless it is given.
                    found[text[2:].replace("-", "_")] = False if action == "store_false" else default
    yield "Megatron-LM of 2026-08-22: megatron/training/arguments.py", found
    seen = set(found)
    for path in sorted((root / "megatron/training/config").glob("*.py")):
        for name, fields in dataclasses_of(path).items():
            if name.endswith("Container"):  # whose fields are the others
                continue
            keys = {key: value for key, value in fields.items() if key not in seen}
            seen |= keys.keys()
            yield f"Megatron-LM of 2026-08-22: {path.stem}.{name}", keys
    for file, names in (
        ("model_parallel_config.py", ("ModelParallelConfig",)),
        ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
        ("optimizer/optimizer_config.py", ("OptimizerConfig",)),
        ("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),
    ):
        known = dataclasses_of(root / "megatron/core" / file)
        for name in names:
            keys = {key: value for key, value in known[name].items() if key not in seen}
            seen |= keys.keys()
            yield f"Megatron-LM of 2026-08-22: {name}", keys


BRIDGE = {
    "training/config.py": {
        "TrainingConfig": "train.", "OptimizerConfig": "optimizer.", "SchedulerConfig": "scheduler.",
        "DistributedInitConfig": "dist.", "DistributedDataParallelConfig": "ddp.", "RNGConfig": "rng.",
        "LoggerConfig": "logger.", "CheckpointConfig": "checkpoint.", "GPTDatasetConfig": "dataset.",
        "FinetuningDatasetConfig": "dataset.", "TokenizerConfig": "tokenizer.", "ProfilingConfig": "profiling.",
        "RerunStateMachineConfig": "rerun_state_machine.", "FaultToleranceConfig": "ft.", "ValidationConfig": "validation.",
        "StragglerDetectionConfig": "straggler.", "InProcessRestartConfig": "inprocess_restart.",
        "NVRxStragglerDetectionConfig": "nvrx_straggler.", "TensorInspectConfig": "tensor_inspect.",
    },
    "training/mixed_precision.py": {"MixedPrecisionConfig": "mixed_precision."},
    "training/comm_overlap.py": {"CommOverlapConfig": "comm_overlap."},
    "peft/lora.py": {"LoRA": "peft."},
}  # fmt: skip


def bridge(root: Path) -> Iterator[Section]:
    """Megatron-Bridge's container: its own dataclasses; `model.` is Megatron's TransformerConfig."""
    for file, names in BRIDGE.items():
        path = root / "megatron/bridge" / file
        for name, fields in dataclasses_of(path).items():
            if name in names:
                yield f"Megatron-Bridge 0.3.1: {name}", {f"{names[name]}{key}": value for key, value in fields.items()}


def peft() -> Iterator[Section]:
    module = importlib.import_module("peft")
    names = ["Lora", "IA3", "Vera", "AdaLora", "LoHa", "LoKr", "OFT", "PromptTuning", "PromptEncoder", "PrefixTuning"]
    for name in names:
        yield f"{version('peft')}: {name}Config", of_dataclass(getattr(module, f"{name}Config"))


def options_of(path: Path) -> dict[str, Any]:
    """The options that a program's `argparse` is given, of each of a loop's two roles, with plain defaults."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        named = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", ""))
        if not isinstance(node, ast.Call) or named not in ("add_argument", "reset_arg", "ConfigField"):
            continue
        words = {keyword.arg: keyword.value for keyword in node.keywords}
        places = [*node.args, words.get("arg_name")]
        word = next((one for one in places if isinstance(one, ast.Constant | ast.JoinedStr)), None)
        if word is None or (isinstance(word, ast.Constant) and not str(word.value).startswith("-")):
            continue
        given = words.get("default", words.get("default_value"))
        try:
            default = None if given is None else ast.literal_eval(given)
        except ValueError:
            default = None
        parts = [word] if isinstance(word, ast.Constant) else word.values
        for role in ("",) if isinstance(word, ast.Constant) else ("actor", "critic"):
            name = "".join(str(one.value) if isinstance(one, ast.Constant) else role for one in parts)
            found[name.lstrip("-").replace("-", "_")] = plain(default)
    return found


def programs(title: str, *patterns: str, each: tuple[str, ...] = ()) -> Callable[[list[Path]], Iterator[Section]]:
    """The options of all programs of a tool together, each with the default that is met first; of each program those of `each`."""

    def sections(roots: list[Path]) -> Iterator[Section]:
        found: dict[str, Any] = {}
        for path in (path for root in roots for pattern in patterns for path in sorted(root.glob(pattern))):
            own = options_of(path)
            found = own | found
            if each:
                yield f"{title}: {path.stem}", {key: value for key, value in own.items() if key in each}
        yield title, {key: value for key, value in found.items() if not {"actor", "critic"} & set(key.split("_"))}

    return sections


def openrlhf(roots: list[Path]) -> Iterator[Section]:
    """OpenRLHF's programs, of each release whose folder is given, the newest first."""
    seen: set[str] = set()
    for root in roots:
        release = (root / "VERSION").read_text(encoding="utf-8").strip()
        for path in sorted((root / "openrlhf" / "cli").glob("train_*.py")):
            if path.stem == "train_prm":
                continue
            keys = {key: value for key, value in options_of(path).items() if key not in seen}
            seen |= keys.keys()
            yield f"openrlhf {release}: {path.stem}", keys


def slime(roots: list[Path]) -> Iterator[Section]:
    """slime's own arguments."""
    yield "slime 624b824a8: arguments", options_of(roots[0] / "slime" / "utils" / "arguments.py")


def nemo_rl(roots: list[Path]) -> Iterator[Section]:
    """The recipes that NeMo-RL's others are built on."""
    for name in ("grpo_math_1B", "dpo", "sft", "rm", "distillation_math"):
        yield f"NeMo-RL 7ea279abf: {name}.yaml", of_yaml(roots[0] / "examples" / "configs" / f"{name}.yaml")


PRIME = {"rl": "RLConfig", "sft": "SFTConfig"}
"""Classes of prime-rl's configurations, by their file."""


def prime_rl(roots: list[Path]) -> Iterator[Section]:
    """prime-rl's pydantic classes, read as source: their imports are not installed."""
    folder = roots[0] / "packages" / "prime-rl-configs" / "src" / "prime_rl" / "configs"
    classes: dict[tuple[str, str], ast.ClassDef] = {}
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[path.stem, node.name] = node

    def fields(module: str, name: str, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        place = (module, name) if (module, name) in classes else next((key for key in classes if key[1] == name), None)
        if place is None or depth > 6:
            return
        for base in classes[place].bases:
            yield from fields(place[0], getattr(base, "id", ""), prefix, depth + 1)
        for line in classes[place].body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            inner = [
                one.id for one in ast.walk(line.annotation) if isinstance(one, ast.Name) and one.id.endswith("Config")
            ]
            listed = "list[" in ast.unparse(line.annotation)
            if inner and not listed:
                for one in inner:
                    yield from fields(place[0], one, f"{prefix}{line.target.id}.", depth + 1)
                continue
            try:
                default = None if line.value is None else ast.literal_eval(line.value)
            except ValueError:
                default = None
            yield f"{prefix}{line.target.id}", plain(default)

    for module, name in PRIME.items():
        yield f"prime-rl 0.8.0: {name}", dict(fields(module, name, "", 0))


INSTALLED: dict[str, Callable[[], Iterator[Section]]] = {
    "transformers": transformers, "trl": trl, "accelerate": accelerate, "llamafactory": llamafactory, "axolotl": axolotl,
    "deepspeed": deepspeed, "torchtitan": torchtitan, "verl": verl, "megatron-core": megatron_core,
    "torchtune": torchtune, "litgpt": litgpt, "ms-swift": ms_swift, "automodel": automodel, "unsloth": unsloth,
    "peft": peft,
}  # fmt: skip
SOURCES = {"megatron": megatron, "megatron-bridge": bridge}
SIZES = (
    "train_batch_size", "resolution", "rank", "lora_rank", "max_sequence_length", "height", "width", "max_num_frames",
)  # fmt: skip
DIFFUSERS = (
    "text_to_image", "dreambooth", "controlnet", "unconditional_image_generation", "cogvideo", "instruct_pix2pix", "flux-control",
    "t2i_adapter", "custom_diffusion", "consistency_distillation", "advanced_diffusion_training",
)  # fmt: skip
FOLDERS: dict[str, Callable[[list[Path]], Iterator[Section]]] = {
    "openrlhf": openrlhf, "slime": slime, "nemo-rl": nemo_rl, "prime-rl": prime_rl,
    "diffusers": programs("diffusers 0.42: examples", *(f"examples/{name}/train_*.py" for name in DIFFUSERS), each=SIZES),
    "finetrainers": programs("finetrainers 0.2: args", "finetrainers/args.py", "finetrainers/trainer/*/config.py"),
    "musubi-tuner": programs("musubi-tuner 0.3: programs", "training/parser_common.py", "*_train*.py"),
    "simpletuner": programs("SimpleTuner 4.0: fields", "**/field_registry/**/*.py"),
}  # fmt: skip
"""Tools whose folders are given: `--folder openrlhf=DIR,DIR`."""


def text_of(sections: Iterator[Section]) -> str:
    """The file."""
    lines: list[str] = []
    for title, keys in sections:
        lines += [f"# {title}", *(f"{key}\t{json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def sections_of(name: str) -> list[Section]:
    """The sections of a file that this wrote."""
    found: list[Section] = []
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            found.append((line[2:], {}))
        else:
            key, _, default = line.partition("\t")
            found[-1][1][key] = json.loads(default)
    return found


def main() -> None:
    """Writes what can be written here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron-lm", type=Path)
    parser.add_argument("--bridge", type=Path)
    parser.add_argument("--folder", action="append", default=[], metavar="NAME=DIR[,DIR]")
    parser.add_argument("tools", nargs="*")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for word in given.folder:
        name, _, roots = word.partition("=")
        text = text_of(FOLDERS[name]([Path(root) for root in roots.split(",")]))
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
        print(name, text.count("\n"))
    for name, extract in INSTALLED.items():
        if given.folder and not given.tools:
            break
        if given.tools and name not in given.tools:
            continue
        try:
            text = text_of(extract())
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
        print(name, text.count("\n"))
    for name, root in (("megatron", given.megatron_lm), ("megatron-bridge", given.bridge)):
        if root is not None:
            text = text_of(SOURCES[name](root))
            (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
            print(name, text.count("\n"))


if __name__ == "__main__":
    main()
