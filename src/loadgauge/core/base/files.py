"""Reads and writes small files; what goes wrong is a `ConfigError` of one line that names the file. What is worked out is
kept on disk beside them, where nothing goes wrong: what cannot be read or written is not there."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from loadgauge.core.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

LARGEST_PROGRAM = 10**6
"""Bytes of a program that is parsed."""
SHOWN = 8
"""Functions of a program that an error names."""
LARGEST_KEPT = 1 << 29
"""Bytes of what is kept on disk that are read, before compression."""


def read_start(path: str | Path, largest: int) -> bytes:
    """The first `largest` + 1 bytes of a regular file, so that a longer one can be told from the length.

    Raises `ConfigError` where there is no such file, where it is none (a pipe, a device, a folder) or cannot be read.
    """
    from pathlib import Path  # only where a file is read: an estimate of a catalogued model reads none

    target, file = Path(path), str(path)
    try:
        if target.is_file():
            with target.open("rb") as stream:
                return stream.read(largest + 1)
        reason = "is not a file" if target.exists() else "no such file"
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise ConfigError(reason, file=file)


def read_text(path: str | Path, largest: int) -> str:
    """The text of a file in UTF-8, without a byte-order mark.

    Raises `ConfigError` as `read_start` does, for more than `largest` bytes, and for anything else than UTF-8.
    """
    file, content = str(path), read_start(path, largest)
    if len(content) > largest:
        size = f"{largest // 1000} kB" if largest < 10**6 else f"{largest // 10**6} MB"
        raise ConfigError(f"is larger than {size}", file=file)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("is not text in UTF-8", file=file) from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file in UTF-8. Raises `ConfigError` where it cannot be written."""
    from pathlib import Path

    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot be written: {reason}", file=str(path)) from None


def is_script(target: str) -> bool:
    """Return whether a target is `script.py:function` instead of a model.

    >>> is_script("train.py:main"), is_script("gpt2")
    (True, False)
    """
    return ".py:" in target


def no_function(path: str | Path) -> ConfigError:
    """Return the error for a program that is named without one of its functions: what to type, and which it has.

    The text is parsed, never run. Functions that can be called without arguments come first.
    """
    import ast

    file = str(path)
    try:
        waiting: list[ast.AST] = [ast.parse(read_text(path, LARGEST_PROGRAM), file)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error if isinstance(error, ConfigError) else ConfigError(f"is not Python: {error}", file=file)
    functions: list[ast.FunctionDef] = []
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef):
            functions.append(node)
        elif not isinstance(node, ast.ClassDef | ast.AsyncFunctionDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    functions.sort(key=lambda node: len(node.args.args) > len(node.args.defaults))
    names = list(dict.fromkeys(node.name for node in functions))
    if not names:
        return ConfigError(f"has no function: put its code into `def main():`, and type {file}:main", file=file)
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return ConfigError(f"name one of its functions, as in {file}:{names[0]} (it has {listed})", file=file)


# -- what is kept on disk ---------------------------------------------------------------------------------------------


def kept_file(folder: str, *facts: Any) -> Path:
    """The file for what all these facts decide, in a folder below `XDG_CACHE_HOME`, or else ~/.cache.

    >>> kept_file("plans", 1).parts[-3:-1]
    ('loadgauge', 'plans')
    """
    import hashlib
    import json
    from pathlib import Path

    homes = os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")
    # A relative path is to be ignored (XDG Base Directory Specification); where there is no home, nothing is kept.
    home = next(filter(os.path.isabs, homes), os.devnull)
    text = json.dumps(facts, sort_keys=True, default=str)
    return Path(home, "loadgauge", folder, f"{hashlib.sha256(text.encode()).hexdigest()}.bin")


def files_as_they_are(*folders: str | Path) -> str:
    """Return what changes where a file below these folders does: a digest of their names, sizes and times."""
    import hashlib

    stats, waiting = [], [str(folder) for folder in folders]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            if entry.is_file():
                stats.append((entry.path, (status := entry.stat()).st_size, status.st_mtime_ns))
            elif entry.name != "__pycache__":
                waiting.append(entry.path)
    return hashlib.sha256(repr(sorted(stats)).encode()).hexdigest()


def read_kept(file: Path, kind: type[T], check: Callable[[T], object] = id) -> T | None:
    """Return what `keep` wrote, as a type; None where it is not there or does not pass a check, which raises ConfigError."""
    import gc
    import zlib

    import msgspec

    enabled = gc.isenabled()
    gc.disable()  # many objects are made, and none is thrown away
    try:
        unpacked = zlib.decompressobj()
        content = unpacked.decompress(file.read_bytes(), LARGEST_KEPT)
        if unpacked.unconsumed_tail or not unpacked.eof:
            return None
        decoded = msgspec.msgpack.decode(content, type=kind)
        check(decoded)
    except (OSError, zlib.error, msgspec.MsgspecError, ConfigError):
        return None
    finally:
        if enabled:
            gc.enable()
    return decoded


def keep(file: Path, content: Any) -> None:
    """Write a structure to a file, whole or not at all; a place that cannot be written is left alone."""
    import contextlib
    import tempfile
    import zlib

    import msgspec

    packed = zlib.compress(msgspec.msgpack.encode(content), 6)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(packed)
            os.replace(name, file)
        except OSError:
            os.unlink(name)


STARTS = re.compile(
    r"(?:\w+=\S*\s+)*(?:torchrun|accelerate|deepspeed|python3?|srun|sbatch|mpirun|uv|llamafactory-cli|swift|axolotl|trl|xtuner"
    r"|litgpt|megatron|composer|automodel|vllm|sglang|trtllm-serve)\s+\S"
)
"""The beginning of a command that is typed in the place of a model: `loadgauge torchrun train.py --bf16 --gpu h100`."""
WITH_VALUE = ("--gpu", "--gpus", "--price", "--explain", "--html", "--memory", "--set")
ALONE = ("--brief", "--full", "--json", "--csv", "--sarif", "--diff", "--fix")
"""Flags that are of loadgauge wherever they stand in such a command."""


SERVES = re.compile(
    r"(?:\S*python\S* -m )?(vllm|sglang|trtllm)(?:-serve serve|[ -]serve|\.(?:\w+\.)*(?:api_server|launch_server))(?= )"
)
"""A command that starts a server, and of which engine."""


def is_command(text: str) -> bool:
    """Return whether a text is a command that starts a run, and no name of a model or of a file.

    >>> is_command("torchrun --nproc_per_node 8 train.py"), is_command("deepspeed-7b"), is_command("swift")
    (True, False, False)
    """
    return STARTS.match(text) is not None


def place_of(text: str) -> tuple[str, str]:
    """Return the path of a file and the name of one of the runs in it, empty where none is named.

    >>> place_of("train.py:main"), place_of("gpt2")
    (('train.py:main', ''), ('gpt2', ''))
    """
    path, _, part = text.rpartition(":")
    inside = path and not path.endswith(".py") and not os.path.exists(text) and os.path.isfile(path)
    return (path, part) if inside else (text, "")


def as_one(words: list[str]) -> list[str]:
    """Return words whose first begin a command as one text, and after it the flags among them that are of loadgauge; of a command
    that starts a server, its model and its options.

    >>> as_one(["accelerate", "launch", "sft.py", "--bf16", "--gpu", "h100", "--output_dir", "a b"])
    ["accelerate launch sft.py --bf16 --output_dir 'a b'", '--gpu', 'h100']
    >>> as_one(["vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "64"])
    ['Qwen/Qwen3-8B', '--max-num-seqs', '64', '--task', 'generate', '--server', 'vllm']
    """
    import shlex

    if (match := SERVES.match(" ".join(words))) is not None:
        rest, named = words[len(match[0].split()) :], [*map(words.index, {"--model", "--model-path"} & {*words})]
        if named:
            at = named[0] - len(match[0].split())
            rest = [*rest[at + 1 : at + 2], *rest[:at], *rest[at + 2 :]]
        return [*rest, "--task", "generate", "--server", match[1]]
    theirs, own, left = list[str](), list[str](), iter(words)
    for word in left:
        name = word.partition("=")[0]
        taken = name in WITH_VALUE or name in ALONE
        (own if taken else theirs).append(word)
        if name in WITH_VALUE and name == word:
            own += [value for value in [next(left, None)] if value is not None]
    return [shlex.join(theirs), *own]
