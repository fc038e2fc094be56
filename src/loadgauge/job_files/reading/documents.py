"""Opens job files: the text of one, or that of a run in it, its syntax, its keys and its dialect; and the one in a folder."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from loadgauge.core.base import ConfigError, is_command, place_of, read_start, read_table, read_text, refuse
from loadgauge.job_files.dialects import dialect as dialect_of, recognise
from loadgauge.job_files.ideas import Dialect, Document
from loadgauge.job_files.reading.argv import Argv
from loadgauge.job_files.reading.configured import Over, configured
from loadgauge.job_files.reading.held import BY_NAME, HEAD, LONGEST, Part, held, options_of, own_words
from loadgauge.job_files.reading.layered import Renamed
from loadgauge.job_files.reading.nested import kept, parsed as nested
from loadgauge.job_files.reading.shell import Shell

LARGEST_FILE = 100_000  # bytes; a job file has some thousands
LARGEST_NOTEBOOK = 5_000_000
"""Bytes of a notebook, which may hold the pictures that it printed."""
NESTED = ("json", "toml", "yaml")
OWN = re.compile(
    rf"(?:^|[\s.\"'{{,])(?:{'|'.join(read_table('containers.toml')['own'])}|per_device_train_batch_size|trainer|model)\b"
)
"""Words of settings that people choose themselves."""
STARTS_FILE = ("{", "#!", "torchrun", "python", "accelerate ", "deepspeed ", "--", "import ", "from ")
"""Beginnings of job files, whatever they are called."""
OWN_WORDS = "its sections and words are one's own, and read as a trainer's"
PLAIN_TAG = re.compile(r"!!python/(?:object(?:/new)?:[\w.]*(?:Namespace|AttributeDict)|tuple)(?=\s)")
"""Tags of mappings and lists that a run wrote down."""
LIGHTNINGS = ("trainer.devices", "trainer.accumulate_grad", "trainer.num_nodes")
"""Beginnings of keys that Lightning's trainer has."""
LOGS = (".log", ".out", ".err", ".txt")
MOST_SHOWN = 6
"""Runs of a file that an error names."""
SYNTAXES = {
    ".env": "json",
    ".json": "json",
    ".toml": "toml",
    **dict.fromkeys((".yaml", ".yml"), "yaml"),
    **dict.fromkeys((".py", ".ipynb"), "python"),
    **dict.fromkeys((".sh", ".txt", ".args", ".bash", ".slurm", ".sbatch"), "argv"),
}
WRITTEN_AS = {
    "python": r"(?m)^(?:from|import) \w",
    "json": r"\A\s*\{",
    "toml": r"(?m)^\[\[?[\w.-]+\]\]?[ \t]*$",
    "argv": r"\A\s*(?:#!|torchrun|python|accelerate |deepspeed )|(?:\A\s*|[\n ])--",
}
"""The first of these patterns that a text has says its syntax, where its name does not."""
OWNED = re.compile(r"^[ \t]*(?:from|import) (xtuner|olmo_core)\b", re.MULTILINE)
"""Programs of the tools that have readers of their own for them."""


def load(path: str | Path, dialect: str | None = None) -> str:
    """The text of a job file, of the run in it that is named, or a command itself. dialect: of the file, where it is told.

    Raises `ConfigError` for no regular file, one too large, one that is not UTF-8, or holds several runs.
    """
    if is_command(str(path)):
        return str(path)
    file, name = place_of(str(path))
    text = PLAIN_TAG.sub("", read_whole(file))
    several = held(text, file)
    if name and name not in {part.name for part in several}:
        names = ", ".join(part.name for part in several[:MOST_SHOWN]) or "none"
        raise ConfigError(f"holds no run {name!r} (known: {names})", file=file)
    runs = [part for part in several if (not name or part.name == name) and starts(part)]
    runs = runs or [part for part in several if part.name == name]
    if len(runs) > 1:
        raise several_runs("holds {} runs", [f"{file}:{part.name}" for part in runs], file)
    if runs:
        return runs[0].whole
    refuse(
        ending(file) not in SYNTAXES and not text.lstrip().startswith(STARTS_FILE),
        "holds no run that is read: no command that trains, and no settings that a trainer printed",
        file=file,
    )
    refuse(len(text) > largest(file), f"is larger than {LARGEST_FILE // 1000} kB; a job file has some kB", file=file)
    return (
        in_own_words(text, file)
        if dialect is None and OWN.search(text) and SYNTAXES.get(ending(file)) in NESTED
        else text
    )


def several_runs(words: str, names: Sequence[str], file: str) -> ConfigError:
    """Return the error for a file or a folder with several runs, with the command for each. words: with a place for their number

    >>> print(several_runs("has {} files that say a run", ["a.yaml", "b c.sh"], "."))
    .: has 2 files that say a run; give one: `loadgauge a.yaml`, `loadgauge 'b c.sh'`
    """
    commands = ", ".join(f"`loadgauge {shlex.quote(name)}`" for name in names[:MOST_SHOWN])
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ConfigError(f"{words.format(len(names))}; give one: {commands}{more}", file=file)


def ending(file: str) -> str:
    """Return the ending of a file's name in small letters, which `.env` is too."""
    return os.path.splitext(f"x{os.path.basename(file)}")[1].lower()


def starts(part: Part) -> bool:
    """Return whether a part is of a run that is known, or a command that trains by options."""
    try:
        if recognise_text(part.text, part.syntax) is not None:
            return True
        line = Argv(part.text) if part.syntax == "argv" else None
    except ConfigError:
        return part.syntax == "argv"
    return line is not None and not line.idle and len(line.options) > 1 and " train" in f" {' '.join(line.program)}"


def read_whole(file: str) -> str:
    """The text of a file, of a log its beginning. Raises `ConfigError`."""
    if Path(file).suffix.lower() not in LOGS:
        return read_text(file, largest(file))
    content = read_start(file, LONGEST)
    refuse(b"\0" in content[:1000], "is not text in UTF-8", file=file)
    return content[:LONGEST].decode("utf-8-sig", errors="replace")


def largest(file: str) -> int:
    """Return how many bytes a job file may have, by its name. ``largest("train.yaml") == 100_000``"""
    return LARGEST_NOTEBOOK if file.lower().endswith(".ipynb") else LARGEST_FILE


def syntax_of(text: str, file: str) -> str:
    if is_command(text) and "\n" not in text:
        return "argv"
    if (part := HEAD.match(text)) is not None:
        return part[1]
    if (suffix := ending(file)) in SYNTAXES:
        return SYNTAXES[suffix]
    return next((syntax for syntax, pattern in WRITTEN_AS.items() if re.search(pattern, text)), "yaml")


def document(
    text: str,
    syntax: str,
    chosen: Dialect | None = None,
    file: str = "",
    variables: Mapping[str, str] | None = None,
) -> Document:
    """Parses a file's text into keys and values. Raises a `ConfigError` of one line where it cannot be parsed.

    variables: values of those that a shell script sets nowhere
    """
    parsed = _parsed(text, syntax, chosen, file, variables)
    return parsed if chosen is None or chosen.renames is None else Renamed(parsed, chosen.renames)


def _parsed(text: str, syntax: str, chosen: Dialect | None, file: str, variables: Mapping[str, str] | None) -> Document:
    refuse("\0" in text, "holds a zero byte, so it is not text", file=file)
    try:
        if syntax == "argv":
            style, objects = (chosen.style, chosen.objects) if chosen is not None else ("value", frozenset[str]())
            line = Argv(text, style, objects, variables, file)  # type: ignore[arg-type]
            if chosen is not None and chosen.beneath is not None:
                return Over(line, chosen.beneath(line))
            return configured(
                line,
                file,
                lambda path, text: _parsed(text or load(path), SYNTAXES[path.suffix], chosen, str(path), None),
            )
        if syntax == "python" and (owner := OWNED.search(text)) is not None:
            return dialect_of(owner[1].replace("_", "-")).script(text)  # type: ignore[misc]
        if syntax == "python":
            from loadgauge.job_files.fine_tuning.unsloth import script
            from loadgauge.job_files.hugging_face.programs import Program

            calls = script(text)
            of_unsloth = "model" in calls.calls or (chosen is not None and chosen.name == "unsloth")
            return calls if of_unsloth else Program(text)
        if file.endswith(".env"):  # variables, which are options
            text = json.dumps({name.lower(): value for name, value in Shell(text).variables.items()})
        if chosen is None or not chosen.layers:
            return nested(text, syntax, () if chosen is None else tuple(chosen.sections.items()))
        from loadgauge.job_files.reading.layered import layered

        how = (syntax, tuple(chosen.sections.items()), chosen.fills)
        bundled = read_table(chosen.layers)
        whole = layered(nested(text, *how), file, lambda path: kept(load(path), *how), bundled, chosen.extends)
        return whole if chosen.beneath is None else Over(whole, chosen.beneath(whole))
    except ConfigError as error:
        raise ConfigError(str(error), file="" if str(error).startswith(f"{file}:") else file) from None


def recognise_text(
    text: str, syntax: str, file: str = "", variables: Mapping[str, str] | None = None
) -> Dialect | None:
    """The dialect whose keys a text has; None where it has those of none. Raises `ConfigError` where it cannot be parsed."""
    chosen = recognise(document(text, syntax, None, file, variables), file)
    if chosen is None and syntax == "yaml":  # Megatron's sections are not part of its keys
        chosen = recognise(document(text, syntax, dialect_of("megatron"), file))
    return chosen


def _known(kind: str, text: str, before: Dialect | None, own: bool) -> float:
    """The share of a text's keys that its dialect reads; 0 where it has none, or the one that it had before."""
    reader = recognise_text(text, kind)
    if reader is None or (before is not None and not own and reader.name == before.name):
        return 0
    names = document(text, kind).names()
    return len(reader.known & {*names}) / max(1, len(names))


@lru_cache(maxsize=8)
def in_own_words(text: str, file: str) -> str:
    """A file whose sections and words are one's own, as the command of a trainer; any other text as it is."""
    syntax = syntax_of(text, file)
    try:
        chosen = recognise_text(text, syntax, file)
        if chosen is not None and chosen.name not in ("trl", "transformers") and "trainer" not in text:
            return text
        parsed = document(text, syntax, None, file)
        of_trainer = any(name.startswith(LIGHTNINGS) for name in parsed.names())
        if not of_trainer and chosen is not None and chosen.name not in ("trl", "transformers"):
            return text
        words = read_table("containers.toml")["own"]
        own = (
            of_trainer
            or chosen is None
            or any(
                name in words and name not in chosen.known and words[name] not in parsed.names()
                for name in parsed.names()
            )
        )
        dotted = shlex.join(["train.py", *options_of({name: parsed.get(name) for name in parsed.names()})])
        others = [("argv", f"{dotted}\n", "its keys are read as options")] if chosen is None else []
        others += [("yaml", text, "it is read as YAML")] if syntax == "json" else []
        others += [("argv", own_words(parsed.root), OWN_WORDS)] if own else []  # type: ignore[attr-defined]
        of_tools = {
            _known(kind, inner, chosen, own): Part("", kind, inner, why).whole for kind, inner, why in others[::-1]
        }
        text = of_tools[max(of_tools)] if max(of_tools, default=0) else text
    except ConfigError:
        pass
    return text


# -- folders ----------------------------------------------------------------------------------------------------------

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
MAY_SAY = "|".join([LAST.pattern, *BY_NAME])
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
            elif ending(entry.name) in SYNTAXES or re.search(MAY_SAY, entry.name.lower()):
                yield entry.path


def of_folder(path: str) -> tuple[str, list[str]]:
    """Return the file of a folder that says a run, and those beside it. Raises `ConfigError` where none or several do.

    A file that another one of the folder names is read through that one.
    """
    runs: dict[str, str] = {}
    beside: dict[str, str] = {}
    files = list(islice(_files(path), MOST_FILES))
    for file in files:
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
    refuse(
        not first,
        f"has neither a model's config.json nor a file that says a training run, among {len(files)} that may; give the file",
        file=path,
    )
    if len(first) > 1:
        raise several_runs("has {} files that say a run", first, path)
    folder, text = Path(first[0]).parent, runs.get(first[0], "")
    others = [file for file in beside if os.path.basename(file) not in text and Path(file).parent == folder]
    return first[0], [file for file in others if file != first[0]]
