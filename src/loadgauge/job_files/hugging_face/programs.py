"""Programs and notebooks that train with transformers and TRL, as the arguments of their calls. They are parsed and never run.

`SFTConfig(max_length=1024)` is the key `max_length`, `LoraConfig(r=8)` is `use_peft` and `lora_r`, a model of `from_pretrained` is
`model_name_or_path`: the keys of TRL's command line. What a command line gives is that of the text, else defaults.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loadgauge.core.base import LARGEST_PROGRAM, ConfigError, read_text, refuse
from loadgauge.core.families.catalogue import config, find
from loadgauge.core.families.hf import model_types
from loadgauge.core.families.named.listed import changed
from loadgauge.core.families.reader import class_defaults
from loadgauge.job_files.dialects import dialect, of_text
from loadgauge.job_files.ideas import MISSING, short
from loadgauge.job_files.ideas.coverage import key_lists, words
from loadgauge.job_files.reading.argv import Argv
from loadgauge.job_files.reading.calls import Calls
from loadgauge.job_files.reading.nested import leaves
from loadgauge.job_files.reading.values import UNKNOWN, Names, called, worked_out

CLASS = re.compile(r"(?:Seq2Seq|SentenceTransformer)?(\w*?)(?:Config|TrainingArguments|Trainer)$")
TRAINERS = {
    "SFT": "sft", "DPO": "dpo", "GRPO": "grpo", "Reward": "reward", "KTO": "kto", "ORPO": "orpo", "CPO": "cpo", "RLOO": "rloo",
    "GKD": "gkd", "": "", "Unsloth": "sft", "OnlineDPO": "online_dpo", "NashMD": "nash_md", "XPO": "xpo", "BCO": "bco",
    "PRM": "prm",
    "PPO": "ppo", "AsyncGRPO": "async_grpo", "TPO": "tpo", "SDPO": "sdpo", "SDFT": "sdft", "SSD": "ssd", "GOLD": "gold",
    "MiniLLM": "minillm",
    "PAPO": "papo", "Distillation": "distillation", "AsyncDistillation": "async_distillation",
    "ServerDistillation": "distillation", "GFPO": "gfpo", "DPPO": "dppo", "GSPOToken": "gspo_token",
    "GRPOWithReplayBuffer": "replayed_grpo",
}  # fmt: skip
"""Trainers by the beginning of the names of their classes; transformers' own has none."""
LOADED = re.compile(r"(Model|For[A-Z]\w*|architecture|model_(class|cls))\.from_pretrained$")
LABELS = re.compile(r"For(?:Sequence|Token)Classification")
"""Classes of models that have a classifier of two labels, unless another number is given (`PretrainedConfig.num_labels`)."""
PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
NEAR = {
    "tpo": "cpo", "online_dpo": "rloo", "nash_md": "rloo", "xpo": "rloo", "sdpo": "grpo", "sdft": "grpo", "ssd": "grpo",
    "gold": "gkd", "distillation": "gkd", "async_distillation": "gkd", "minillm": "gkd", "bco": "kto", "papo": "grpo",
    "async_grpo": "grpo",
    "prm": "reward", "ppo": "rloo",
    **dict.fromkeys(("gfpo", "dppo", "gspo_token", "replayed_grpo"), "grpo"),
}  # fmt: skip
"""Trainers that run as another one does but for what `data/keys/trl.toml` says of them (`trainer.*`)."""
ANSWERS = {
    **dict.fromkeys(("online_dpo", "nash_md", "xpo"), (2, "max_new_tokens", 64)),
    "ppo": (1, "response_length", 53),
}
"""Answers to a prompt, and the argument of their length with its default, of trainers with words of their own."""
FIRST = {"model": "model_name_or_path", "trainer": "model", "parser": "classes", "sizes": "base", "tokenizer": "name"}
ONCE = frozenset({"model", "sizes", "tokenizer", "optimizer", "DataLoader", "Accelerator", "Lightning", "autocast"})
"""Calls of which the first counts."""
APART = ONCE - {"model"} | {"parser", "peft"}
"""Calls whose arguments are no words of TRL's."""
KEYS = {
    "lora": {
        "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
        "target_parameters": "lora_target_parameters", "modules_to_save": "lora_modules_to_save", "use_dora": "use_dora",
        "use_rslora": "use_rslora", "task_type": "lora_task_type",
    },
    "bnb": {
        "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit", "bnb_4bit_quant_type": "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant", "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
    },
    "model": {
        "model_name_or_path": "model_name_or_path", "pretrained_model_name_or_path": "model_name_or_path", "dtype": "dtype",
        "torch_dtype": "dtype", "attn_implementation": "attn_implementation", "load_in_4bit": "load_in_4bit",
        "load_in_8bit": "load_in_8bit",
    },
    "trainer": {"model": "model_name_or_path", "ref_model": "ref_model"},
}  # fmt: skip
"""Arguments of PEFT's, bitsandbytes' and transformers' calls, and TRL's words for them."""
OF_MODELS = {"use_peft", *(word for call in ("lora", "bnb", "model") for word in KEYS[call].values())}
"""TRL's words for arguments that are none of a trainer's own."""
USUAL = {"lora_r": 8, "lora_dropout": 0.0}
"""PEFT's defaults, which TRL's command line has not."""
OBJECTS = ("model", "quantization_config", "args", "peft_config", "config")
"""Arguments that are other calls."""
DATA = words(
    """
    train_dataset eval_dataset processing_class tokenizer data_collator formatting_func callbacks compute_metrics reward_funcs
    preprocess_logits_for_metrics environment_factory tools reward_processing_classes rollout_func rollout_worker optimizers
    teacher_model quantization_config args peft_config
    """
)
"""Arguments of a trainer that are objects of the program: its data, and functions that work on them."""
LENGTHS = {"max_length", "max_seq_length", "block_size", "model_max_length", "max_source_length"}
PRIMARY = words(
    """
    model_name_or_path max_length max_seq_length per_device_train_batch_size gradient_accumulation_steps num_generations
    max_completion_length max_prompt_length lora_r use_peft
    """
)
"""Keys without which there is no answer, so that a flag is asked for where a value is not known."""
COMMAND = re.compile(
    r"^\s*(?:\$ *)?((?:[A-Z_]+=\S+ +)*(?:accelerate launch|torchrun|deepspeed|python3?|uv run|trl) .*)$", re.MULTILINE
)
RECOMPUTES = re.compile(
    r"\.gradient_checkpointing_enable\(|\bprepare_model_for_kbit_training\((?![^)]*use_gradient_checkpointing=False)"
)


def kind_of(name: str, bases: Mapping[str, str] | None = None) -> str | None:
    """The trainer of a class of its own or of its arguments, by its name or that of the class that it is made from; empty for
    transformers' own; None where it is neither.

    >>> [kind_of(name) for name in ("trl.DPOConfig", "SFTTrainer", "TrainingArguments", "GenerationConfig")]
    ['dpo', 'sft', '', None]
    """
    for _ in range(5):
        name = name.rpartition(".")[2]
        match = CLASS.match(name)
        if match is not None and match[1] in TRAINERS and name != "Config":
            return TRAINERS[match[1]]
        name = (bases or {}).get(name, "")
    return None


OPTIMIZERS = dict(
    name.split("=")
    for name in words(
        "AdamW=adamw_torch Adam=adamw_torch AdamW8bit=adamw_bnb_8bit Adam8bit=adamw_bnb_8bit PagedAdamW=paged_adamw_32bit"
        " PagedAdamW32bit=paged_adamw_32bit PagedAdamW8bit=paged_adamw_8bit Adafactor=adafactor SGD=sgd Lion=lion_32bit"
        " Lion8bit=lion_8bit RMSprop=rmsprop Adagrad=adagrad"
    )
)
"""Optimizers that a loop of its own makes, by transformers' names."""
SECTIONS = {
    "BitsAndBytesConfig": "bnb", "LoraConfig": "lora", "get_peft_model": "peft", **dict.fromkeys(PARSERS, "parser"),
    **{name: name for name in ("DataLoader", "Accelerator", "autocast")}, **dict.fromkeys(OPTIMIZERS, "optimizer"),
    **{f"{owner}.Trainer": "Lightning" for owner in ("L", "pl", "lightning", "pytorch_lightning")},
    "AutoTokenizer.from_pretrained": "tokenizer", "AutoConfig.from_pretrained": "sizes",
}  # fmt: skip
"""Sections of calls, by their last name or by their owner's too."""
SHARDS = re.compile(
    r"(?:^|\.)(?:FSDP|FullyShardedDataParallel|fully_shard|FSDPStrategy|FSDP2Strategy|FullyShardedDataParallelPlugin)$"
)
STEPS = re.compile(r"(?:^|\.)backward$")
SIZE = re.compile(r"hidden|layer|head|embd|intermediate|inner|expert|d_model|ffn|arguments")
PASSES = re.compile(r"grad\w*_accum\w*|accum\w*_(?:steps|iter\w*)")
"""Usual names of the passes of a step."""
OTHER_LOOPS = re.compile(
    r"(?m)^\s*(?:import|from) (?:diffusers|deepspeed)\b|deepspeed_|DeepSpeed\w+\(|ModelParallelStrategy"
)
"""Programs whose loop is another one: of images, or of an engine with a file of its own."""


class Program:
    """A program's arguments by TRL's words.

    >>> text = 'from trl import SFTTrainer, SFTConfig\\nn = 512\\nSFTTrainer("gpt2", args=SFTConfig(max_length=2 * n))'
    >>> program = Program(text)
    >>> program.program, {name: program.get(name) for name in program.names()}
    (('trl sft',), {'model_name_or_path': 'gpt2', 'max_length': 1024})
    """

    syntax = "python"
    cut = ""
    """The length that it cuts texts to, where that is not known."""

    def __init__(self, text: str, command: Argv | None = None) -> None:
        self.command = command
        self._read(text)

    def _read(self, text: str) -> None:
        """Reads a text, the program's own or one with a changed argument."""
        self.source, self.cut, self.typed = text, "", False
        self.skipped: list[str] = []
        self.bases: dict[str, str] = {}
        calls = Calls(text, self._section, FIRST, ONCE)
        self.bases = _bases(calls.tree)
        command = self.command or _command(calls.tree, calls.code, self.skipped)
        self.options = {**_declared(calls.tree), **({} if command is None else _values(command))}
        calls = Calls(text, self._section, FIRST, ONCE, self.options)
        self.calls, self.skipped = calls, [*calls.skipped, *self.skipped]
        self.trainer = self._trainer()
        self.looped = not self.trainer and self._loops()
        """True where the program steps by itself, or by Lightning's trainer."""
        self.trainer = "" if self.looped else self.trainer
        self.values: dict[str, Any] = {f"trainer.{self.trainer}": True} if self.trainer in NEAR else {}
        if self.trainer is None:
            return
        self._collect(command)
        self.skipped += self.calls.constants.searched
        if self.trainer in ANSWERS:
            count, key, length = ANSWERS[self.trainer]
            self.values = {
                "num_generations": count,
                "max_completion_length": self.values.pop(key, length),
            } | self.values
        if not self.trainer and any(LABELS.search(name) for name in self.calls.program):
            self.values.setdefault("model_init_kwargs.num_labels", 2)
        if self.trainer == "ssd":
            self.values.setdefault("num_generations", 1)
        if self.trainer == "async_grpo":
            self.values |= {"use_vllm": True, "vllm_mode": "server"}
            self.values.setdefault("max_completion_length", 2048)

    @property
    def named(self) -> bool:
        """Return whether the trainer gets its model by name, so that another model the program loads is not the trained one."""
        return "trainer.model" in self.calls.values and self._plain(self.calls.values["trainer.model"])

    @property
    def loaded(self) -> bool:
        """Tells whether the program loads the model that it trains by itself."""
        return "model" in self.calls.calls and not self.named

    @property
    def prepared(self) -> bool:
        """Tells whether it makes what is not quantised float32."""
        return "prepare_model_for_kbit_training(" in ast.unparse(self.calls.tree)

    @property
    def recomputes(self) -> bool:
        """Tells whether it switches recomputation on at the model (`prepare_model_for_kbit_training` of PEFT 0.21 does)."""
        return RECOMPUTES.search(ast.unparse(self.calls.tree)) is not None

    def _section(self, name: str) -> str | None:
        last = name.rpartition(".")[2]
        named = "model" if LOADED.search(name) else SECTIONS.get(last) or SECTIONS.get(name)
        if named is None and _model_type(name) in model_types():
            return "sizes"
        if named is None and kind_of(last, self.bases) is not None:
            return "trainer" if last.endswith("Trainer") else "args"
        return named

    def _trainer(self) -> str | None:
        """The trainer that is run; None where a program calls none."""
        called = [(name, kind) for name in self.calls.program if (kind := kind_of(name, self.bases)) is not None]
        trainers = [kind for name, kind in called if name.endswith("Trainer")]
        parsed = [kind for name in self._parsed() if (kind := kind_of(name, self.bases)) is not None]
        return next(iter([*filter(None, trainers), *trainers, *parsed, *(kind for _, kind in called)]), None)

    def _parsed(self) -> list[str]:
        """The classes that a parser of dataclasses fills."""
        node = self.calls.values.get("parser.classes")
        return [] if node is None else [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]

    def _collect(self, command: Argv | None) -> None:
        for key in self.calls.names():
            section, _, word = key.partition(".")
            node = self.calls.values[key]
            of_call = word in OBJECTS and isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
            if (
                section in APART
                or (section == "trainer" and word in DATA)
                or (section == "model" and self.named)
                or (of_call and not self._plain(node))
            ):
                continue
            name = KEYS.get(section, {}).get(word, word)
            if section in ("model", "trainer", "lora") and word not in KEYS.get(section, {}):
                name = {"model": f"model_init_kwargs.{word}", "lora": f"peft_config.{word}"}.get(section, word)
            self._take(name, node)
        for name, node in _assigned(self.calls.tree):
            self._take(name, node)
        if self.sizes is not None:
            self.values["own_sizes"] = "sizes"
            for key in self.calls.names():
                value, name = str(self.calls.get(key)), key.removeprefix("sizes.")
                if name == "vocab_size" and value.startswith("$"):
                    self.skipped.append(f"its vocabulary is its class's, as {value[1:]} comes from outside the file")
                elif name != key and value.startswith("$") and SIZE.search(name):
                    self.values[f"unresolved.{name}"] = value
            if (
                not any(name.endswith(".from_config") for name in self.calls.program)
                or "sizes.base" not in self.calls.values
            ):
                self.values.setdefault("dtype", "float32")  # as PyTorch makes parameters
        if self.looped:
            self._step()
        if not self.trainer and not LENGTHS & self.values.keys():
            self._cut()
        called = {name.rpartition(".")[2] for name in self.calls.program}
        if (
            self.trainer
            and "TrainingArguments" in called
            and not any(kind_of(name) and name[-6:] == "Config" for name in called)
        ):
            # TRL makes its own of them, with what they have of transformers' defaults (`SFTTrainer.__init__` of 1.16).
            self.values = {"bf16": False, "gradient_checkpointing": False} | self.values
        if self._used("lora"):
            asked = self.values.keys() | self._of_parser("lora")
            self.values |= {"use_peft": True} | {key: usual for key, usual in USUAL.items() if key not in asked}
        if self._used("bnb"):
            self.values.setdefault("bnb_4bit_quant_type", "fp4")
        if self._parsed():
            own = {name for name, _ in _fields(self.calls.tree)} - PRIMARY
            for name, value in self.options.items():
                alone = name in own and not dialect("trl").kinds(name)
                self.values.setdefault(f"own.{name}" if alone else name, value)
        elif command is not None:
            options = _values(command)
            if str(options.get("nproc_per_node")).isdecimal():
                options["num_processes"] = int(options["nproc_per_node"]) * int(options.get("nnodes") or 1)
            launcher = ("num_processes", "config_file", "num_machines")
            self.values |= {name: options[name] for name in launcher if name in options}
            self.values |= {f"own.{name}": value for name, value in _values(command).items() if name not in self.values}
        if "reward_model_path" in self.values and self.trainer in NEAR:
            self.values["reward_model_name_or_path"] = self.values.pop("reward_model_path")

    def _loops(self) -> bool:
        """Return whether the program trains a model of transformers in a loop of its own, or in Lightning's."""
        several = sum(LOADED.search(name) is not None for name in self.calls.program) > 1
        if several or not {"model", "sizes"} & self.calls.calls.keys() or OTHER_LOOPS.search(self.calls.code):
            return False
        return "Lightning" in self.calls.calls or any(map(STEPS.search, self.calls.program))

    def _step(self) -> None:
        """Take what a loop of its own says of a step: batch, passes, precision, optimizer, shards and GPUs."""

        def told(*paths: str) -> Any:
            return next((value for path in paths if (value := self.calls.get(path)) is not MISSING), None)

        values, count, loader = self.values, told("DataLoader.batch_size"), self.calls.calls.get("DataLoader")
        if loader is not None and len(loader.args) > 1:
            count = worked_out(loader.args[1], self.calls.constants, self.options)
            count = f"${ast.unparse(loader.args[1])}" if count is UNKNOWN else count
        values["per_device_train_batch_size"] = 1 if count is None else count
        names = [name for name in self.calls.constants.assigned if PASSES.fullmatch(name.lower())]
        passes = told("Accelerator.gradient_accumulation_steps", "Lightning.accumulate_grad_batches")
        if passes is None and names:
            passes = worked_out(ast.Name(names[0], lineno=10**9), self.calls.constants, self.options)
        passes = f"${names[0]}" if passes is UNKNOWN else passes
        values["gradient_accumulation_steps"] = 1 if passes is None else passes
        word, cast = (
            str(told("Accelerator.mixed_precision", "Lightning.precision") or ""),
            self.calls.calls.get("autocast"),
        )
        asked = "" if cast is None else f"{told('autocast.dtype')} {ast.unparse(cast)}"
        half = "bf16" if "bf16" in word or "bfloat16" in asked else "fp16" if "16" in word or asked else ""
        if half:
            own = {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[half]} if word.endswith("-true") else {}
            values |= {half: True, **own}
        optimizer = self.calls.calls.get("optimizer")
        values["optim"] = OPTIMIZERS["AdamW" if optimizer is None else called(optimizer.func).rpartition(".")[2]]
        if any(map(SHARDS.search, self.calls.program)) or "fsdp" in str(told("Lightning.strategy")):
            values |= {"fsdp": "full_shard", "fsdp_config.fsdp_version": 2 if "fully_shard" in self.calls.code else 1}
        devices, nodes = told("Lightning.devices"), told("Lightning.num_nodes")
        if isinstance(devices, int) and devices > 0:
            values["num_processes"] = devices * (nodes if isinstance(nodes, int) else 1)
        self.skipped.append("its own loop is counted as transformers' Trainer runs one")

    @property
    def sizes(self) -> dict[str, Any] | None:
        """The configuration of a model that the program makes by its sizes; None where it loads one, or makes none."""
        call = self.calls.calls.get("sizes")
        if call is None or "model" in self.calls.calls or self.named:
            return None
        paths = [key for key in self.calls.names() if key.startswith("sizes.") and key != "sizes.base"]
        words = {key.removeprefix("sizes."): self.calls.get(key) for key in paths}
        tokenizer = self.calls.get("tokenizer.name")
        if str(words.get("vocab_size")).startswith("$len(") and of_text(str(tokenizer)):
            words["vocab_size"] = config(find(str(tokenizer)).spec.name).get("vocab_size")
        own = {name: value for name, value in words.items() if not str(value).startswith("$")}
        base, kind = self.calls.get("sizes.base"), _model_type(called(call.func))
        usual = {"model_type": kind, **class_defaults(kind)} if base is MISSING else config(find(str(base)).spec.name)
        return changed(usual, own)

    def _cut(self) -> None:
        """Takes the length to which the program cuts its texts itself: transformers' own trainer has none."""
        answers = [node for node, second in _cuts(self.calls.tree) if second]
        if answers and isinstance(length := worked_out(answers[0], self.calls.constants, self.options), int):
            self.values.setdefault("max_target_length", length)
        lengths = [node for node, second in _cuts(self.calls.tree) if not second]
        stated = [
            value for node in lengths if isinstance(value := worked_out(node, self.calls.constants, self.options), int)
        ]
        if stated:
            self.values["max_length"] = max(stated)
        elif lengths:
            self.cut = ast.unparse(lengths[0])[:100]

    def _plain(self, node: ast.expr) -> bool:
        return worked_out(node, self.calls.constants, self.options) is not UNKNOWN

    def _of_parser(self, section: str) -> set[str]:
        """The keys of a call whose values are fields of what a parser fills, which have the defaults of TRL's command line."""
        passed = {
            key.partition(".")[2]: node for key, node in self.calls.values.items() if key.startswith(f"{section}.")
        }
        fields = {word for word, node in passed.items() if isinstance(node, ast.Attribute)}
        return {KEYS[section].get(word, word) for word in fields} if self._parsed() else set()

    def _used(self, section: str) -> bool:
        return section in self.calls.calls

    def _take(self, name: str, node: ast.expr) -> None:
        value = self.calls.downloaded(worked_out(node, self.calls.constants, self.options))
        if isinstance(value, dict) and name == "model_init_kwargs":
            for key, inner in value.items():
                self.values.setdefault(
                    {"torch_dtype": "dtype", "dtype": "dtype", "attn_implementation": key}.get(key, f"{name}.{key}"),
                    inner,
                )
            return
        if value is UNKNOWN:
            source = ast.unparse(node)[:100]
            typed = name == "dtype" and "ModelConfig" in self._parsed()  # whose default the model is loaded in
            self.typed |= typed
            if typed or _own(node, self.calls.constants):
                return  # of the command line, which has it under its own name or not at all
            listed = name in PRIMARY or key_lists("trl").kinds(name)
            name, value = (name if listed else f"unresolved.{name}"), f"${source}"
        self.values.setdefault(name, value)

    @property
    def program(self) -> tuple[str, ...]:
        """The command of TRL's that runs the same trainer; empty for transformers' own."""
        return (f"trl {NEAR.get(self.trainer, self.trainer)}",) if self.trainer else ()

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, in order; the paths inside of a value that is a mapping."""
        return tuple(".".join(path) for path, _ in leaves(self.values))

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""
        if key in self.values:
            return self.values[key]
        inner: Any = self.values
        for name in key.split("."):
            inner = inner.get(name, MISSING) if isinstance(inner, dict) else MISSING
        return inner

    def put(self, key: str, value: Any) -> None:
        """Sets an argument of the call that takes it. Raises `ConfigError` where none does, or a command line fills it."""
        path = self._path(key)
        if key in self.options or path.partition(".")[0] not in self.calls.calls or path[5:] in OF_MODELS:
            parser = self.calls.calls.get("parser")
            start = f"line {getattr(parser, 'lineno', 0)} parses it: start the program with --{key} {short(value)}"
            beside = "write it where the program has it" if parser is None else start
            raise ConfigError(f"is no argument of a call of the program; {beside}", key=key)
        self.calls.put(path, value)
        self._read(self.calls.text())

    def drop(self, key: str) -> None:
        """Takes an argument out of its call. Raises `ConfigError` where it is none of a call's."""
        if self.get(key) is MISSING:
            return
        refuse(
            (path := self._path(key)) not in self.calls.values,
            "is no argument of a call of the program; change it where the program has it",
            key=key,
        )
        self.calls.drop(path)
        self._read(self.calls.text())

    def _path(self, key: str) -> str:
        """Return an argument's call and name there: where it stands, else of the call that has its like, else the trainer's."""
        own = [f"{call}.{word}" for call, its in KEYS.items() for word, name in its.items() if name == key]
        there = [path for path in (*own, f"args.{key}", f"trainer.{key}") if path in self.calls.values]
        return next(
            iter([*there, *(path for path in own if path.partition(".")[0] in self.calls.calls)]), f"args.{key}"
        )

    def shown(self, key: str) -> str:
        """The key, without what says that its value is not known."""
        return key.removeprefix("unresolved.").removeprefix("peft_config.").removeprefix("own.")

    def text(self) -> str:
        """The program."""
        return self.source


def _model_type(name: str) -> str:
    """The `model_type` of a configuration class of transformers.

    >>> _model_type("transformers.Qwen3MoeConfig"), _model_type("GPT2Config")
    ('qwen3_moe', 'gpt2')
    """
    bare = name.rpartition(".")[2].removesuffix("Config")
    return {kind.replace("_", ""): kind for kind in model_types()}.get(bare.lower(), bare.lower())


def _own(node: ast.expr, names: Names) -> bool:
    """Return whether an expression has parts of the program's own arguments, such as `model_args.dtype`."""
    whole = [*ast.walk(node)]
    for each in list(whole):
        if isinstance(each, ast.Name) and (value := names.of(each.id, each.lineno)) is not None:
            whole += ast.walk(value)
    return any(
        isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id.endswith("args")
        for part in whole
    )


def _bases(tree: ast.Module) -> dict[str, str]:
    """The class that each class of a program is made from."""
    return {
        node.name: base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
        for base in node.bases[:1]
    }


def _fields(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """The fields of a program's dataclasses and their defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    value = part.value
                    if isinstance(value, ast.Call) and "field" in ast.unparse(value.func):
                        value = next((word.value for word in value.keywords if word.arg == "default"), None)
                    yield part.target.id, value


def _declared(tree: ast.Module) -> dict[str, Any]:
    """The program's own arguments and their defaults: fields of its dataclasses, and those of argparse."""
    names = Names(tree)
    values: dict[str, Any] = {
        name: value
        for name, default in _fields(tree)
        if default is not None and (value := worked_out(default, names, {})) is not UNKNOWN
    }
    for node in names.calls.get(".add_argument", []):
        flags = [
            str(each.value) for each in node.args if isinstance(each, ast.Constant) and str(each.value).startswith("--")
        ]
        words = {word.arg: word.value for word in node.keywords}
        action = ast.unparse(words["action"]).strip("'\"") if "action" in words else ""
        value = (
            worked_out(words["default"], names, {})
            if "default" in words
            else {"store_true": False, "store_false": True}.get(action)
        )
        if flags and value is not UNKNOWN:
            values[flags[0].lstrip("-").replace("-", "_")] = value
    return values


def started(line: Argv, file: str) -> Program | None:
    """The program that a command starts, with the command's options, where it is there and trains."""
    names = [word.text for command in line.shell.commands for word in command if word.text.endswith(".py")]
    for path in (each for name in names for each in (Path(file).parent / name, Path(name)) if each.is_file()):
        program = Program(read_text(path, LARGEST_PROGRAM), line)
        if program.trainer is not None:
            program.skipped.append(f"it starts {path.name}, which is read with its options")
            return program
    return None


def _cuts(tree: ast.Module) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what texts are cut to, and whether they are answers (`text_target=...`).

    Such are `tokenizer(..., truncation=True, max_length=n)`, and blocks of a language model's examples (`block_size = n`).
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = {word.arg: word.value for word in node.keywords}
            if {"truncation", "max_length"} <= words.keys():
                yield words["max_length"], "text_target" in words
        elif isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "block_size" for each in node.targets):
            yield node.value, False


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Return what a program sets of its arguments after they are parsed: `training_args.name = value`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(target := node.targets[0], ast.Attribute):
            continue
        if isinstance(target.value, ast.Name) and target.value.id.endswith(("training_args", "training_arguments")):
            yield target.attr, node.value


def _command(tree: ast.Module, code: str, remarks: list[str]) -> Argv | None:
    """The first command that the docstring or the first comment of a program shows."""
    comment = "\n".join(line.lstrip("# ") for line in re.match(r"(?:[ \t]*(?:#.*)?\n)*", code)[0].splitlines())  # type: ignore[index]
    text = re.sub(r"\\\s*\n\s*", " ", (ast.get_docstring(tree) or "") + "\n" + comment)
    commands = [match[1] for match in COMMAND.finditer(text) if ".py" in match[1] or " trl " in f" {match[1]}"]
    commands = [each for each in commands if "vllm-serve" not in each]
    if not commands:
        return None
    remarks.append(
        f"its arguments are those of the first of {len(commands)} commands in its text"
        if len(commands) > 1
        else "its arguments are those of the command in its text"
    )
    return Argv(commands[0], "value")


def _values(command: Argv) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in command.options:
        value = command.get(name)
        if isinstance(value, list):
            value = [str(each).strip(",\"'") for each in value]
            program = next((index for index, each in enumerate(value) if each.endswith(".py")), len(value))
            value = (
                value[:program] if program > 1 else value[0] if program else True
            )  # the program comes after its launcher's options
        values[name] = value
    return values
