"""A folder in the place of a job file: the one of its files that says the run, and the configurations beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.documents import SYNTAXES, load, read_whole, recognise_text, several_runs, syntax_of
from loadgauge.job_files.reading.held import BY_NAME

MOST_FILES, DEEPEST = 80, 3
"""Files of a folder that are looked into, and folders within each other."""
LEFT_OUT = re.compile(
    r"(?i)^(?:\.(?!hydra$|vscode$|github$|gitlab-ci).*|node_modules|__pycache__|venv|env|site-packages|tests?|docs?|data|checkpoint-\d+"
    r"|tokenizer.*|vocab.*|special_tokens_map.*|generation_config.*|added_tokens.*|requirements.*|package(?:-lock)?\.json|hydra\.yaml"
    r"|overrides\.yaml|pyproject\.toml|setup\.py|conftest\.py|mkdocs\.yml|wandb-metadata\.json|wandb-summary\.json|all_results\.json)$"
)
"""Files and folders that say nothing of a run, or what another of their folder says."""
BESIDE = ("accelerate", "deepspeed", "peft")
"""Dialects whose files stand beside another one."""
LAST = re.compile(r"(?i)\.(?:md|markdown|qmd|rmd|log|out|err|txt)$|trainer_state\.json$")
"""Files that say a run where no other does."""
MODELS = ("config.json", "model_index.json", "params.json")


def holds_no_model(path: str) -> bool:
    """Return whether a folder is of a run and not of a model's weights; one of adapters has a model's configuration too."""
    names = {*os.listdir(path)}
    return "adapter_config.json" in names or not names & {*MODELS}


def _files(path: str) -> Iterator[str]:
    """Yield the files that may say a run, those nearest to the top first."""
    waiting = [(path, 0)]
    while waiting:
        folder, depth = waiting.pop(0)
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if LEFT_OUT.match(entry.name) or entry.is_symlink():
                continue
            if entry.is_dir():
                waiting += [(entry.path, depth + 1)] if depth < DEEPEST else []
            elif Path(entry.name).suffix.lower() in SYNTAXES or LAST.search(entry.name) or _named(entry.name):
                yield entry.path


def _named(name: str) -> bool:
    return any(re.search(test, name.lower()) for test in BY_NAME)


def of_folder(path: str) -> tuple[str, list[str]]:
    """Return the file of a folder that says a run, and those beside it. Raises `ConfigError` where none or several do.

    A file that another one of the folder names is read through that one.
    """
    runs: dict[str, str] = {}
    beside: dict[str, str] = {}
    looked = 0
    for file in _files(path):
        looked += 1
        if looked > MOST_FILES:
            break
        try:
            text = load(file)
            chosen = recognise_text(text, syntax_of(text, file), file)
        except ConfigError as error:
            chosen, text = None, read_whole(file) if "runs; give one" in str(error) else ""
            runs |= {file: text} if text else {}
        if chosen is not None:
            (beside if chosen.name in BESIDE else runs)[file] = text
    named = {file for file in runs for other, text in runs.items() if other != file and os.path.basename(file) in text}
    first = [file for file in runs if not LAST.search(file) and file not in named] or [*runs] or [*beside][:1]
    if not first:
        raise ConfigError(f"has no file that says a training run, among {looked} that may; give the file", file=path)
    if len(first) > 1:
        raise several_runs("has {} files that say a run", first, path)
    main = first[0]
    text = runs.get(main, "")
    kinds = [
        file
        for file in beside
        if file != main and os.path.basename(file) not in text and Path(file).parent == Path(main).parent
    ]
    return main, kinds
