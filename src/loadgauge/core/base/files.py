"""Reads and writes small files; what goes wrong is a `ConfigError` of one line that names the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgauge.core.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


LARGEST_PROGRAM = 10**6
"""Bytes of a program that is parsed."""
SHOWN = 8
"""Functions of a program that an error names."""


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
