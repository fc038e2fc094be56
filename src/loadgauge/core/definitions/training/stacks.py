"""Libraries and their releases: which one is assumed, and what each release does by default where that decides memory.

A `Habit` is one thing that libraries do by default, with the releases at which it changed and the file that shows it. Frameworks
and file formats name habits; nothing else asks for the release of a library.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from loadgauge.core.base.errors import ConfigError, closest

Release = tuple[int, ...]

NEWEST: dict[str, Release] = {
    "transformers": (5, 23), "torch": (2, 13), "accelerate": (1, 15), "peft": (0, 21), "trl": (1, 16),
    "bitsandbytes": (0, 50), "deepspeed": (0, 19), "torchtune": (0, 6), "torchtitan": (0, 2), "liger-kernel": (0, 8),
    "llamafactory": (0, 9), "axolotl": (0, 19), "unsloth": (2026, 11), "litgpt": (0, 5), "ms-swift": (4, 0),
    "nemo-automodel": (0, 2), "flash-attn": (2, 8), "torchao": (0, 14),
}  # fmt: skip
"""Libraries whose release may be given, and the release that is assumed where none is: the newest that was read."""


class Stack(msgspec.Struct, frozen=True):
    """The releases of libraries that a job runs on; what is not `given` is the newest (`NEWEST`)."""

    given: tuple[tuple[str, Release], ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> Stack:
        """Read `transformers=4.57,torch=2.6`. Raises `ConfigError` for an unknown library, or what is no release.

        >>> stack = Stack.parse("transformers=4.57.1,torch=2.6")
        >>> stack.release("transformers"), stack.release("accelerate")
        ((4, 57, 1), (1, 15))
        >>> Stack.parse("transformer=4")
        Traceback (most recent call last):
        loadgauge.core.base.errors.ConfigError: version: unknown library 'transformer'; did you mean 'transformers'?
        """
        releases: dict[str, Release] = {}
        for word in filter(None, (part.strip() for part in (text or "").split(","))):
            name, equals, release = (part.strip() for part in re.sub("==", "=", word).partition("="))
            name = name.lower().replace("_", "-")
            if name not in NEWEST:
                near = closest(name, NEWEST)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(NEWEST)})"
                raise ConfigError(f"unknown library {name[:40]!r}{hint}", key="version")
            numbers = re.match(r"\d+(\.\d+)*", release)
            if not equals or numbers is None or len(release) > 30:
                raise ConfigError(f"must be library=release, such as {name}=4.57, got {word[:60]!r}", key="version")
            if name in releases:
                raise ConfigError(f"{name} is given twice", key="version")
            releases[name] = tuple(int(number) for number in numbers[0].split("."))
        return cls(tuple(releases.items()))

    def release(self, library: str) -> Release:
        """Return the release of a library that the job runs on."""
        return dict(self.given).get(library, NEWEST[library])

    def at_least(self, library: str, *release: int) -> bool:
        """Return whether a library is of a release or a newer one.

        >>> Stack.parse("torch=2.6").at_least("torch", 2, 8), Stack().at_least("torch", 2, 8)
        (False, True)
        """
        own = self.release(library)
        return own + (0,) * (len(release) - len(own)) >= release

    def text(self, *libraries: str) -> str:
        """Return the releases of some libraries in words.

        >>> Stack.parse("torch=2.6").text("transformers", "torch")
        'transformers 5.23, torch 2.6'
        """
        return ", ".join(f"{name} {'.'.join(map(str, self.release(name)))}" for name in libraries)


NEWEST_STACK = Stack()
"""The newest release of everything."""


class Change(NamedTuple):
    """A default from some releases on (all of them), and the file that shows it."""

    value: str
    source: str
    since: tuple[tuple[str, Release], ...] = ()


class Habit(msgspec.Struct, frozen=True):
    """Defaults of a library by release, the newest first. The last one has no `since`."""

    changes: tuple[Change, ...]

    @classmethod
    def always(cls, value: str, source: str) -> Habit:
        """Return a habit that all releases share."""
        return cls((Change(value, source),))

    def at(self, stack: Stack) -> Change:
        """Return the default of the releases of a stack.

        >>> LOADED_DTYPE.at(Stack()).value, LOADED_DTYPE.at(Stack.parse("transformers=4.57")).value
        ('auto', 'float32')
        """
        for change in self.changes:
            if all(stack.at_least(library, *release) for library, release in change.since):
                return change
        raise AssertionError("the last change of a habit has no release")

    def possible(self, stack: Stack) -> tuple[str, ...]:
        """Return the defaults of all releases that a stack may be of, where it does not give the releases that decide.

        >>> LOADED_DTYPE.possible(Stack()), LOADED_DTYPE.possible(Stack.parse("transformers=5"))
        (('auto', 'float32'), ('auto',))
        """
        releases, values = dict(stack.given), []
        for change in self.changes:
            if all(library not in releases or stack.at_least(library, *release) for library, release in change.since):
                values.append(change.value)
                if all(library in releases for library, _ in change.since):
                    break
        return tuple(dict.fromkeys(values))

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries whose releases decide it."""
        return tuple(dict.fromkeys(library for change in self.changes for library, _ in change.since))


LOADED_DTYPE = Habit(
    (
        Change("auto", "transformers 5.23: modeling_utils.py, from_pretrained", (("transformers", (5,)),)),
        Change("float32", "transformers 4.57.6: modeling_utils.py, from_pretrained"),
    )
)
"""The dtype in which `from_pretrained` loads weights; `auto` is the checkpoint's."""

LOADED_DTYPE_SFT = Habit(
    (
        Change("float32", "trl 0.27.2: trainer/utils.py, create_model_from_path", (("trl", (0, 27)),)),
        Change("auto", "trl 0.26.2: trainer/utils.py, create_model_from_path", (("trl", (0, 26)),)),
        *LOADED_DTYPE.changes,
    )
)
"""The same where TRL's trainer loads the model by its name."""

LOADED_DTYPE_UNSLOTH = Habit.always(
    "bfloat16", "unsloth: models/llama.py and vision.py, from_pretrained without a dtype"
)
"""The same of Unsloth, which does not ask the checkpoint: bfloat16, or float16 on a card that has none."""

KEPT_INPUT = Habit(
    (
        Change("no", "bitsandbytes 0.44.1: autograd/_functions.py, MatMul4Bit", (("bitsandbytes", (0, 44)),)),
        Change("yes", "bitsandbytes 0.43.1: autograd/_functions.py, MatMul4Bit"),
    )
)
"""Releases in which a 4-bit layer keeps its input for backward, which nothing reads where the matrix is frozen."""

NON_REENTRANT = "torch.utils.checkpoint without use_reentrant, which stops at the last tensor that backward needs"
RERUNS = Habit(
    (
        Change(
            "part", "transformers 5.23: modeling_utils.py, gradient_checkpointing_enable", (("transformers", (5,)),)
        ),
        Change("whole", "transformers 4.57.6: modeling_utils.py, gradient_checkpointing_enable"),
    )
)
"""How a checkpointed layer runs again: as a `whole`, or up to the last tensor that backward needs, without its last product."""

TABLE_REPLACED = Habit(
    (
        Change("yes", "litgpt 0.5.0: finetune/lora.py, StableEmbedding", (("litgpt", (0, 5)),)),
        Change("no", "litgpt 0.4.13: finetune/lora.py"),
    )
)
"""Releases in which quantised training replaces the token table. A variable keeps the old one alive, and the optimizer does not
know the new one, so that its gradient is never freed."""

ADAPTER_WEIGHTS = Habit(
    (
        Change("float32", "peft 0.12: tuners/tuners_utils.py, cast_adapter_dtype", (("peft", (0, 12)),)),
        Change("base", "peft 0.11: tuners/lora/layer.py, update_layer"),
    )
)
"""The dtype of PEFT's adapters beside 16-bit weights, under autocast or not; of a 4-bit base they were float32 before too."""

BRANCHING = Habit(
    (
        Change(
            "no",
            "bitsandbytes, pull requests 1746 and 1747: csrc/kernels.cu, kDequantizeBlockwise",
            (("bitsandbytes", (0, 48)),),
        ),
        Change("yes", "bitsandbytes 0.47: csrc/kernels.cu, dDequantizeNF4"),
    )
)
"""Releases whose kernel that unpacks 4 bits to 16 branches on each bit."""

EXPERTS_QUANTISED = Habit(
    (
        Change(
            "no", "transformers 5.23: integrations/bitsandbytes.py, replace_with_bnb_linear", (("transformers", (5,)),)
        ),
        Change("yes", "transformers 4.57.6: integrations/bitsandbytes.py, replace_with_bnb_linear"),
    )
)
"""Releases in which bitsandbytes quantises routed experts: those before transformers 5, which has no `nn.Linear` of an expert."""

EXPERTS_RUN = Habit(
    (
        Change(
            "grouped",
            "transformers 5.23: integrations/moe.py, get_correct_experts_implementation",
            (("transformers", (5,)),),
        ),
        Change("modules", "transformers 4.57.6: models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock"),
    )
)
"""How transformers' modules run experts (`Kernels.experts`)."""

EXPERTS_QUANTISED_UNSLOTH = Habit.always(
    "yes", "unsloth_zoo 2026.10.9: temporary_patches/moe_utils_bnb4bit.py and gpt_oss.py, GptOssExpertsBnb4bit"
)
"""The same of Unsloth, which quantises experts in one tensor, and has a class of its own where that cannot be done."""

EXPERTS_ADAPTED_UNSLOTH = Habit(
    (
        Change("yes", "unsloth 2026.2: models/_utils.py, get_moe_target_parameters", (("unsloth", (2026, 2)),)),
        Change("no", "unsloth 2026.1: models/llama.py, get_peft_model"),
    )
)
"""Adapters of routed experts beside those of the MLP, which Unsloth has without being asked."""

BEFORE_ONE_TENSOR = "transformers=4.57"
"""The last release that holds each expert's matrices apart, so that bitsandbytes finds them."""

ADAMW_STEP = Habit(
    (
        Change(
            "fused",
            "transformers 4.54.1: training_args.py, default_optim",
            (("transformers", (4, 54)), ("torch", (2, 8))),
        ),
        Change("foreach", "transformers 4.44.2: training_args.py, default_optim"),
    )
)
"""How transformers' Trainer runs AdamW where `optim` is not given (`adamw_torch_fused` or `adamw_torch`)."""

END_UNITS = Habit(
    (
        Change("apart", "accelerate 1.14: utils/fsdp_utils.py, fsdp2_prepare_model", (("accelerate", (1, 14)),)),
        Change("root", "accelerate 1.13: utils/fsdp_utils.py, fsdp2_prepare_model"),
    )
)
"""FSDP2 units of the embedding, and of the head with its norm: their own, or the rest of the model."""

LOSS_SFT = Habit(
    (
        Change("chunked", "trl 1.6: trainer/sft_trainer.py, loss_type", (("trl", (1, 6)),)),
        Change("float32", "transformers 5.23: loss/loss_utils.py, ForCausalLMLoss"),
    )
)
"""The loss of transformers' models, and where TRL's SFTTrainer runs it."""

LOSS_LOGPROBS = Habit(
    (
        Change("tiled", "trl 1.16: trainer/utils.py, add_fused_lm_head", (("trl", (1, 16)),)),
        Change("float32", "trl 1.0: trainer/utils.py, selective_log_softmax"),
    )
)
"""Way in which TRL's trainers of preferences and policies make log-probabilities."""

SHARED_KEYS = Habit(
    (
        Change(
            "yes", "transformers 4.54: integrations/sdpa_attention.py, use_gqa_in_sdpa", (("transformers", (4, 54)),)
        ),
        Change("no", "transformers 4.53: integrations/sdpa_attention.py, repeat_kv"),
    )
)
"""Releases that hand fewer key heads than heads to PyTorch's attention, which writes it out in float32."""

UPCAST_SFT = Habit(
    (
        Change("none", "trl 1.0: trainer/sft_trainer.py", (("trl", (1, 0)),)),
        Change("all", "peft 0.21: utils/other.py, prepare_model_for_kbit_training"),
    )
)
"""Weights that are cast to float32 before QLoRA, by PEFT's preparation, which newer TRL does not call."""
