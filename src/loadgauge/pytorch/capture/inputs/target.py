"""The subject of a capture and its sizes, found without running it: the keys of a configuration, or a function of a script."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse
from loadgauge.core.base.files import LARGEST_PROGRAM, is_script, read_start
from loadgauge.core.base.package_data import read_table
from loadgauge.core.families.catalogue import keys, names_file
from loadgauge.core.families.hf import LARGEST_FILE, decode
from loadgauge.pytorch.capture.inputs.libraries import library_keys, of_library

ONE, LENGTH = "b", "s"
"""The names of the number of sequences, and of the tokens of each."""
SECOND, SOUND = "t", "n"
"""The names of the tokens of a second text, such as a decoder's, and of the samples of a sound."""
SPELT, SPOKEN = "u", 15
"""The name of the letters of a transcript, and how many a second of speech has."""
ALSO = {
    ONE: ("batch_size", "batch", "bs", "B", "n"),
    LENGTH: ("seq_len", "seq_length", "length", "block_size", "T", "L"),
}
"""Other names of sizes, as functions of inputs have them."""
MANY = re.compile("batch|bsz|rays|samples|examples|rows|images|pairs|envs|clips|graphs|molecules")
"""Words in other names of the number of sequences, of which the first is it."""
USUAL = ("batch", "inputs", "example_inputs", "get_batch")
"""Names of the function of a script that makes what its module is called with; else the only one with a word of `LIKE` is it."""
LIKE = re.compile("batch|input|sample|example|dummy|fake|data|loader")
DEFINED = re.compile(r"^(?:def (\w+)\(|(\w+) *= *(?:lambda |[A-Za-z_]+$))", re.MULTILINE)
AS = {SECOND: LENGTH}
"""A size that is another one unless it is said."""


def config_keys(target: str) -> dict[str, Any]:
    """The keys of a model's configuration. Raises ConfigError where there is none, and NotModelled for a quantized one.

    >>> config_keys("gpt2")["n_embd"]
    768
    """
    if of_library(target):
        return library_keys(target)
    found = keys(target, whole=True)
    check_keys(target, found)
    return found


def check_keys(target: str, found: Mapping[str, Any]) -> None:
    """Raise NotModelled for the keys of a configuration that is not captured: a quantized one."""
    refuse(
        found.get("quantization_config"),
        f"{target}: quantization_config: a capture trains weights as the class makes them, not quantized",
        NotModelled,
    )


def longest_of(keys: Mapping[str, Any]) -> int | None:
    """Return the positions that a configuration has for its text; None where it states none.

    >>> longest_of({"max_source_positions": 1500, "max_target_positions": 448})
    448
    """
    of_text = keys.get("text_config") or {}
    names = ("max_position_embeddings", "max_target_positions")
    stated = (one.get(name) for one in (keys, of_text) for name in names)
    return next((one for one in stated if isinstance(one, int) and one > 0), None)


def check_script(target: str, inputs: str) -> str:
    """Return the text of `--inputs` for a script, before PyTorch is imported: as given, or a function of the file of a usual name.

    target: script.py:function; inputs: that of what it is called with, or the tensors themselves
    Raises ConfigError where it is missing, with all that can be typed.
    """
    for name in filter(is_script, (target, inputs)):
        file = name.rpartition(":")[0]
        refuse(not Path(file).is_file(), "no such file", file=file)
    file = target.rpartition(":")[0]
    if not inputs:
        text = read_start(file, LARGEST_PROGRAM).decode("utf-8", "replace")
        defined = [match[1] or match[2] for match in DEFINED.finditer(text)]
        names = [name for name in USUAL if name in defined]
        alike = [name for name in dict.fromkeys(defined) if LIKE.search(name.lower()) and f"{file}:{name}" != target]
        inputs = f"{file}:{(names or alike)[0]}" if names or len(alike) == 1 else ""
    refuse(
        not (is_script(inputs) or "(" in inputs),
        f"{target} needs --inputs{f', got {inputs!r}' if inputs else ''}: the tensors that the module is called with, such as"
        " --inputs 'randn(b, 3, 224, 224), randint(0, 10, (b,))', or a function that makes them, such as"
        f" --inputs {file}:batch with `def batch(b): return torch.randn(b, 3, 224, 224)` (b: --micro-batch, s: --seq-len)",
    )
    return inputs


def usual_length(inputs: str) -> int | None:
    """The default of the size s of a function of inputs, as its script has it, which is not run; None where it has none."""
    file, _, name = inputs.rpartition(":")
    text = read_start(file, LARGEST_PROGRAM).decode("utf-8", "replace") if is_script(inputs) else ""
    names = "|".join((LENGTH, *ALSO[LENGTH]))
    default = re.search(
        rf"^def {re.escape(name)}\([^)]*?\b(?:{names})\b(?:: *int)? *= *(\d{{1,9}})\b", text, re.MULTILINE
    )
    return int(default[1]) if default else None


def processor_keys(target: str) -> dict[str, Any] | None:
    """The keys of the `preprocessor_config.json` beside a model's config.json; None where there is none. Raises ConfigError."""
    place = Path(target)
    file = (place if place.is_dir() else place.parent) / "preprocessor_config.json"
    if not names_file(target) or not file.is_file():
        return None
    found: dict[str, Any] = decode(read_start(file, LARGEST_FILE), str(file))
    return {
        key: value for key, value in found.items() if key not in ("auto_map", "image_processor_type", "processor_class")
    }


def usual_of_heads() -> dict[str, int]:
    """Sizes that heads have unless they are said.

    >>> usual_of_heads()["k"]
    8
    """
    return {
        name: value for row in read_table("capture/heads.toml").values() for name, value in row.get("usual", {}).items()
    }


def sized(names: Sequence[str], given: Mapping[str, int], defaults: Mapping[str, int]) -> dict[str, int]:
    """The sizes by name. given: as asked for; defaults: of those that were not. Raises ConfigError for one too many or too few.

    >>> sized(("b", "s", "t"), {"s": 128}, {"b": 1, "s": 4096})
    {'b': 1, 's': 128, 't': 128}
    """
    for name in given:
        refuse(name not in names, f"it has no size {name}; its sizes are {', '.join(names) or 'none'}", key="size")
    found: dict[str, int] = {}
    for name in names:
        source = name if name in given or name in defaults else AS.get(name, name)
        value = given.get(source, defaults.get(source))
        if value is None:
            raise ConfigError(f"needs --size {name}=NUMBER", key="size")
        found[name] = value
    return found


def rows_of(text: str) -> dict[str, tuple[int, ...] | str]:
    """Return rows by line from a text such as `boxes.py:41=2000,2100,most`: numbers that follow belong to the line before them.

    Raises `ConfigError`.

    >>> rows_of("boxes.py:41=2000,2100,nets.py:7=most"), rows_of("12")
    ({'boxes.py:41': (2000, 2100), 'nets.py:7': 'most'}, {'': (12,)})
    """
    rows: dict[str, tuple[int, ...] | str] = {}
    line = ""
    for word in filter(None, text.split(",")):
        line, number = word.rpartition("=")[::2] if "=" in word else (line, word)
        before = rows.get(line, ())
        if line and not re.fullmatch(r".*\.py:[1-9]\d*", line):
            number = ""
        if re.fullmatch("[0-9]{1,9}", number) and isinstance(before, tuple):
            rows[line] = (*before, int(number))
        elif number == "most" and not before:
            rows[line] = number
        else:
            raise ConfigError(f"must be such as boxes.py:41=2000, 2000 or most, got {word[:40]!r}", key="rows")
    return rows


MOST = " <= "
"""Between the name of a size and the most that a model has of it, in the key of an error."""


def longest_told(error: ConfigError) -> int:
    """Return the tokens that a model has at most, where an error is about more; else 0.

    >>> longest_told(ConfigError("4096 is more", key="s <= 64")), longest_told(ConfigError("is missing", key="gpus"))
    (64, 0)
    """
    name, _, most = error.key.partition(MOST)
    return int(most) if most and name == LENGTH else 0


def sound_window(keys: Mapping[str, Any]) -> float:
    """Seconds to which a model fills any sound up; 0 where it does not."""
    key, rate, usual = (
        read_table("capture/heads.toml")["of_sound"].get(keys.get("model_type"), {}).get("window", ("", 1, 0))
    )
    seconds: float = (keys.get(key) or usual) / rate
    return seconds
