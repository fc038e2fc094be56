"""Families of models: one small file per family, each mapping a Hugging Face config to a `ModelSpec`."""

from loadgauge.core.families.catalogue import find_model, model, model_sources, models
from loadgauge.core.families.hf import from_dict, from_hf, model_types

__all__ = ["find_model", "from_dict", "from_hf", "model", "model_sources", "model_types", "models"]
