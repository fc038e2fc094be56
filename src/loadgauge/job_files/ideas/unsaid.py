"""Facts that a file leaves open: what depends on its model, and lengths that it does not tell apart."""

from contextlib import suppress

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.job_files.ideas.table import Facts, Keys

UNSAID = ("hidden_dropout", "moe_grouped_gemm")
"""Switches of a command line that do something where they are not there."""


def spec_of(keys: Keys, key: str) -> ModelSpec | None:
    """Return the model that was asked for, or that a key names; None where it is not known."""
    from loadgauge.core.resolve.model import found_model  # the list of dialects is read without it

    with suppress(ConfigError):
        return found_model(Job(model=keys.given.get("model") or keys.model(key) or "", hub=False)).spec
    return None


def lengths(keys: Keys, prompt: int, answer: int, *, taken: bool) -> Facts:
    """Return the tokens of prompts and answers; `taken`: the file does not tell them apart, which the answer says."""
    keys.remark(f"prompts are taken to have {prompt} tokens, and answers {answer}", when=taken)
    return {"prompt_len": prompt, "answers": str(answer)}
