"""Finds the job to trace for a name on the command line."""

from typing import Any

from loadgauge.core.base import ConfigError, is_script
from loadgauge.core.families.catalogue import find_model, keys
from loadgauge.core.families.hf import model_types
from loadgauge.pytorch.trace.programs.jobs import ConfigJob, maker_of
from loadgauge.pytorch.trace.programs.script import FunctionJob, check
from loadgauge.pytorch.trace.programs.training import Traceable
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.transformers_api import text_config


def find_job(target: str, run: TorchRun, layers: int | None = None, arguments: tuple[str, ...] = ()) -> Traceable:
    """The job for a name in the catalogue, a Hugging Face `config.json` or its folder, or `script.py:function`.

    layers: number of layers, instead of the model's own; arguments: of a script that is run whole
    Raises ConfigError. Above one GPU a model is split as `run.layout` says; a script is parallel by itself.
    """
    if is_script(target):
        check(target)
        return FunctionJob(None, target, arguments)
    return config_job(hugging_face(target), run, target, layers)


def config_job(config: Any, run: TorchRun, target: str = "", layers: int | None = None) -> Traceable:
    """The job for a config object of transformers. `layers`: number of layers, instead of the config's own."""
    config = with_layers(config, layers)
    maker_of(config)  # its code is imported now, where no garbage is looked for
    if run.layout.gpus > 1:
        from loadgauge.pytorch.parallel.parallel import ParallelJob

        return ParallelJob(config, run, target)
    return ConfigJob(config, run, target)


def with_layers(config: Any, layers: int | None) -> Any:
    """A config object of transformers whose language model has another number of layers, of its kinds in turn; None: its own.

    Each list with an entry a layer has its entries in turn; what a class derives from the number of layers follows by itself.
    Raises ConfigError for a number that the class cannot have.
    """
    if layers is None:
        return config
    own = text_config(config)
    count = own.num_hidden_layers
    for key, value in list(vars(own).items()):
        if isinstance(value, list) and len(value) == count and key != "architectures":
            setattr(own, key, [value[number % count] for number in range(layers)])
    special = getattr(vars(own).get("_heterogeneity_spec"), "per_layer_overrides", {})  # Gemma 4
    own.num_hidden_layers = layers
    if own.num_hidden_layers != layers:  # LongCat's come in pairs
        raise ConfigError(f"{layers} are not possible: {own.model_type} has its layers in groups", key="layers")
    if special:
        turns = {number: special.get(number % count) for number in range(layers)}
        own.per_layer_config = {number: sizes for number, sizes in turns.items() if sizes}
    return config


def hugging_face(target: str) -> Any:
    """Return transformers' configuration object for a model: a name in the catalogue, or a path.

    Raises ConfigError where the model is unknown, or transformers cannot read its config.
    """
    config = keys(target)
    if config.get("model_type") in model_types():
        find_model(target)  # says what is wrong, in the words of every command
    return config_object(config, target)


def config_object(config: dict[str, Any], target: str) -> Any:
    """Return transformers' configuration object of some keys. Raises ConfigError where transformers cannot read them.

    Code that the keys name (`auto_map`) is never run.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = "; its own code (auto_map) is not run" if config.get("auto_map") else ""
        raise ConfigError(f"transformers knows no model_type {kind!r}{own}", file=target)
    try:
        return CONFIG_MAPPING[kind].from_dict({key: value for key, value in config.items() if key != "auto_map"})
    except Exception as error:  # of classes that check what they are given, each in its own way
        raise ConfigError(f"transformers cannot read it: {' '.join(str(error).split())[:200]}", file=target) from None
