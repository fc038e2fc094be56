"""A decoded `config.json`, read key by key: each value checked, each key that was read remembered."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from loadgauge.core.base import ConfigError, NotModelled, read_data

LARGEST = 2**31
"""No size of a published model comes near it; a value above it is a slip, and would overflow elsewhere."""

_HARMLESS = """
_name_or_path name_or_path _commit_hash _attn_implementation _attn_implementation_autoset _experts_implementation
attn_implementation transformers_version transformers_weights torch_dtype dtype torchscript use_bfloat16 framework
tf_legacy_loss processor_class custom_pipelines base_model_tp_plan use_cache cache_implementation return_dict
output_attentions output_hidden_states output_scores tie_last_hidden_states gradient_checkpointing
initializer_range initializer_cutoff_factor init_std rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps
scale_attn_weights scale_attn_by_inverse_layer_idx query_pre_attn_scalar pretraining_tp
rope_theta rope_scaling rope_parameters rope_local_base_freq rotary_pct rotary_emb_base partial_rotary_factor
global_rope_theta local_rope_theta original_max_position_embeddings n_ctx seq_length
rope_interleave rope_ratio mrope_section attention_softmax_in_fp32 model_max_length
embedding_multiplier logits_scaling residual_multiplier attention_multiplier logit_scale embedding_scale
output_router_logits router_aux_loss_coef router_z_loss_coef aux_loss_alpha aux_loss_coef aux_loss_weight seq_aux
router_jitter_noise input_jitter_noise routed_scaling_factor scoring_func topk_method topk_group n_group moe_norm_min
sparse_pred_ignore_index deterministic_flash_attn reference_compile repad_logits_with_grad
architectures model_type id2label label2id num_labels problem_type finetuning_task task_specific_params
directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
tokenizer_class prefix classifier_dropout classifier_pooling is_composition output_past output_projection
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences return_dict_in_generate suppress_tokens begin_suppress_tokens exponential_decay_length_penalty
remove_invalid_values epsilon_cutoff eta_cutoff
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys that change neither memory nor FLOPs: bookkeeping, generation, initial values, angles of rotary positions,
scales, and how the experts of a token are chosen and balanced."""

HARMLESS_ENDINGS = ("_token_id", "_token_ids", "_token_index")
HARMLESS_BEGINNINGS = ("summary_",)

_ESSENTIAL = "hidden_size n_embd d_model dim num_hidden_layers n_layer n_layers num_layers layers_block_type"
ESSENTIAL = frozenset(_ESSENTIAL.split())
"""Names of the hidden size and of the number of layers. A config that states neither describes no particular model."""

_NO_SIZES = """
pad_token_id num_ln_in_parallel_attn moe_layer_freq decoder_sparse_step interleave_moe_layer_step
moe_layer_start_index moe_layer_interval moe_layer_end_index block_multiple_of expansion_ratio
"""
NO_SIZES = frozenset(_NO_SIZES.split())
"""Whole numbers that are no sizes: their defaults mean "nothing special"."""

REMARKS = {
    "auto_map": "code of its own, not run",
    "quantization_config": "not counted",
    "vision_config": "not counted",
    "audio_config": "not counted",
    "num_mtp_modules": "not counted",
    "mtp_num_hidden_layers": "not counted",
}


@functools.cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the declarations of a family's configuration class in transformers: each key and its default; empty where it has none.

    From `data/family_defaults.json`, which `tools/family_defaults.py` writes.

    >>> class_defaults("llama")["hidden_size"], class_defaults("dbrx")["attn_config"]["kv_n_heads"]
    (4096, 1)
    """
    return _all_class_defaults().get(model_type, {})


@functools.cache
def _all_class_defaults() -> dict[str, dict[str, Any]]:
    content = read_data("family_defaults.json")
    return msgspec.json.decode(content, type=dict[str, dict[str, Any]])


def shown(value: object) -> str:
    """A value for an error message: on one line, and short.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # An int of thousands of digits, or a list within lists without end.
        return "a value too long to show"
    return text if len(text) <= 40 else f"{text[:37]}..."


class Reader:
    """Typed look-ups in one config; a value of the wrong kind raises `ConfigError` with the key and the file.

    A key that is missing has the `default` given, or else that of transformers' configuration class.

    >>> Reader({"model_type": "llama"}).flag("attention_bias")
    False
    >>> reader = Reader({"n_layer": 12, "n_special": 7, "bos_token_id": 1}, "config.json")
    >>> reader.whole("n_layer", default=1), reader.whole("n_head", default=12)
    (12, 12)
    >>> reader.unused()
    ('n_special',)
    >>> reader.defaults
    {'n_head': 12}
    >>> Reader({"hidden_size": "7B"}, "config.json").whole("hidden_size", default=768)
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: config.json: hidden_size: must be a whole number, got '7B'
    """

    def __init__(self, config: object, file: str = "", *, name: str = "", path: str = "", task: str = "") -> None:
        self.file, self.path = file, path
        if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
            raise ConfigError("must be a JSON object of named values", key=path, file=file)
        self.config: dict[str, Any] = config
        self.task = task
        """Task of the head, where the config around this one has decided it; else empty."""
        self.name = name
        self.class_defaults = False
        """True where a class default may stand in for a missing hidden size or number of layers."""
        self.defaults: dict[str, int] = {}
        """Sizes that the config does not state, and the default of transformers' class taken for each."""
        self._read: set[str] = set()
        self._part: Mapping[str, Any] | None = None
        """Defaults that the class declares for this part of a config; None: those of the class of the config's `model_type`."""

    def wrong(self, key: str, message: str) -> ConfigError:
        """A `ConfigError` that names `key`, its place and the file; for the caller to raise."""
        return ConfigError(message, key=f"{self.path}.{key}" if self.path else key, file=self.file)

    def unmodelled(self, key: str, message: str) -> NotModelled:
        """A `NotModelled` for a value that is valid but outside the model; for the caller to raise."""
        return NotModelled(str(self.wrong(key, message)))

    def has(self, key: str) -> bool:
        """Return whether the config states the key, be it null."""
        return key in self.config

    def ignore(self, *keys: str) -> None:
        """Counts keys as read, so that `unused` does not name them."""
        self._read.update(keys)

    @property
    def declared(self) -> Mapping[str, Any]:
        """The keys that transformers' configuration class declares, with their defaults."""
        return class_defaults(self.config.get("model_type", "")) if self._part is None else self._part

    def class_default(self, *keys: str) -> Any:
        """The default that transformers' class declares under any of the names of one key; None where it has none."""
        return next((self.declared[key] for key in keys if key in self.declared), None)

    def raw(self, *keys: str, default: object = UNSET) -> Any:
        """The value under any of the names of one key; names that disagree are an error."""
        self._read.update(keys)
        present = [key for key in keys if key in self.config]
        if not present:
            return self.class_default(*keys) if default is UNSET else default
        first = self.config[present[0]]
        for other in present[1:]:
            value = self.config[other]
            if type(value) is not type(first) or value != first:
                raise self.wrong(present[0], f"is {shown(first)} but {other}, another name of it, is {shown(value)}")
        return first

    def whole(self, *keys: str, default: int | UnsetType = UNSET, minimum: int = 1, maximum: int = LARGEST) -> int:
        """A whole number. A size that is missing is recorded in `defaults`; one of `ESSENTIAL` is an error."""
        value = self.raw(*keys, default=default)
        if not any(map(self.has, keys)):
            self.default(keys[0], value)
        return self._whole(next((key for key in keys if self.has(key)), keys[0]), value, minimum, maximum)

    def default(self, key: str, value: int | None) -> None:
        """Records the size that stands in for a key that is missing; `ConfigError` where nothing does."""
        if value is None:
            raise self.wrong(key, "is missing, and this family has no default for it")
        if key in ESSENTIAL and not self.class_defaults:
            family = f" ({self.config['model_type']}'s default is {value})" if self.has("model_type") else ""
            raise self.wrong(key, f"is missing; state it, as the size of a model is not guessed{family}")
        if value > 0 and key not in NO_SIZES:
            self.defaults[f"{self.path}.{key}" if self.path else key] = value

    def optional_whole(
        self, *keys: str, default: int | UnsetType | None = UNSET, minimum: int = 1, maximum: int = LARGEST
    ) -> int | None:
        """A whole number, or None where the value is null."""
        if self.raw(*keys, default=default) is None:
            return None
        return self.whole(*keys, default=0 if default is None else default, minimum=minimum, maximum=maximum)

    def _whole(self, key: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"must be a whole number, got {shown(value)}")
        if not minimum <= value <= maximum:
            raise self.wrong(key, f"must be from {minimum} to {maximum}, got {shown(value)}")
        return value

    def optional_real(self, *keys: str, default: float | UnsetType | None = UNSET) -> float | None:
        """A positive number, or None where the value is null."""
        value = self.raw(*keys, default=default)
        return None if value is None else self._real(keys[0], value, maximum=float(LARGEST), positive=True)

    def rate(self, *keys: str, default: float | UnsetType = UNSET) -> float:
        """A dropout probability; null means none."""
        value = self.raw(*keys, default=default)
        return 0.0 if value is None else self._real(keys[0], value, maximum=1.0, positive=False)

    def _real(self, key: str, value: object, *, maximum: float, positive: bool) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"must be a number, got {shown(value)}")
        if not 0 <= value <= maximum or (positive and not value):  # NaN is not between either
            least = "above 0" if positive else "from 0"
            raise self.wrong(key, f"must be {least} to {maximum:g}, got {shown(value)}")
        return float(value)

    def flag(self, *keys: str, default: bool | UnsetType = UNSET, nullable: bool = False) -> bool:
        """true or false; `nullable`: null means false. A key that the class does not declare is false."""
        value = self.raw(*keys, default=default)
        if value is None and (nullable or not any(map(self.has, keys))):
            return False
        if not isinstance(value, bool):
            raise self.wrong(keys[0], f"must be true or false, got {shown(value)}")
        return value

    def text(self, *keys: str, default: str | UnsetType = UNSET) -> str:
        """A string that is not empty."""
        value = self.raw(*keys, default=default)
        if not isinstance(value, str) or not value:
            raise self.wrong(keys[0], f"must be a string, got {shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None where it is missing or null."""
        value = self.raw(key, default=None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, f"must be a list of strings, got {shown(value)}")
        return tuple(value)

    def wholes(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers; None where it is missing or null."""
        value = self.raw(key, default=None)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(key, f"must be a list of whole numbers, got {shown(value)}")
        return tuple(self._whole(key, item, minimum, LARGEST) for item in value)

    def section(self, key: str, *, default: Mapping[str, Any], task: str = "") -> Reader:
        """A reader of the object under `key`; `default` stands in where it is missing or null."""
        value = self.raw(key, default=None)
        path = f"{self.path}.{key}" if self.path else key
        inner = self.within(dict(default) if value is None else value, path=path, task=task)
        inner._part = self.class_default(key)
        return inner

    def within(self, config: object, *, path: str = "", task: str = "") -> Reader:
        """A reader of a config inside this one; what it takes from defaults is recorded here too."""
        inner = Reader(config, self.file, name=self.name, path=path, task=task)
        inner.class_defaults, inner.defaults = self.class_defaults, self.defaults
        return inner

    @property
    def model_type(self) -> str:
        """The family's name in transformers."""
        if "model_type" not in self.config:
            raise self.wrong("model_type", "is missing; it says which family of models this is")
        return self.text("model_type", default="")

    def unused(self, among: Iterable[str] = ()) -> tuple[str, ...]:
        """Keys that were not read and could matter, after those in `among`; null, false, 0 and empty do nothing."""
        names = list(among)
        for key, value in self.config.items():
            harmless = key in HARMLESS or key.endswith(HARMLESS_ENDINGS) or key.startswith(HARMLESS_BEGINNINGS)
            if key in self._read or harmless or not value:
                continue
            name = f"{self.path}.{key}" if self.path else key
            names.append(f"{name} ({REMARKS[key]})" if key in REMARKS else name)
        return tuple(names)
