"""Captures kept on disk, so that the second answer takes no PyTorch. A file is data: it is decoded into the types of
`packed`, every formula in it is checked by `sizes`, and one that cannot be read is as good as none."""

import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadgauge._version import __version__
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.files import files_as_they_are, keep, kept_file, read_kept
from loadgauge.pytorch.capture.captured import Captured, Packed
from loadgauge.pytorch.capture.symbols.sizes import Formula, compiled

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
PACKAGE = Path(__file__).parents[3]


def place(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Path:
    """The file for the captures of a configuration. fields: all else that decides what is run

    Versions of PyTorch, transformers and this package are part of its name, and this package's own code.
    """
    facts = [__version__, _code(), *(version_of(library) for library in LIBRARIES), config, dict(fields)]
    return kept_file("captures", *facts)


def load(file: Path) -> list[Captured]:
    """The captures in a file; none where it is not there, or not as `save` writes it."""
    captures: list[Captured] = []

    def unpack(packed: list[Packed]) -> None:
        for pack in packed:
            check_sizes(pack.rest.names, pack.sizes(), pack.rest.guards)
            captures.append(pack.captured())

    return captures if read_kept(file, list[Packed], unpack) is not None else []


def check_sizes(names: Sequence[str], sizes: Iterable[Formula], guards: Sequence[str]) -> None:
    """Raise ConfigError unless formulas and guards are such, of these names."""
    ones = dict.fromkeys(names, 2)
    products = {product for size in sizes for product, _ in size.terms}
    for text in (*products, *guards):
        try:
            compiled(text)(ones)
        except ZeroDivisionError:  # by a size of 2, which the guards may leave out
            continue
        except (NameError, TypeError, ValueError) as error:
            raise ConfigError(f"not a formula of {', '.join(names)}: {error}") from None


def save(file: Path, captures: Sequence[Captured]) -> None:
    """Write captures to a file, whole or not at all; a place that cannot be written is left alone."""
    keep(file, [Packed.of(captured) for captured in captures])


def version_of(library: str) -> str:
    """Return the version of a library that is installed; "" where it is not."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _code() -> str:
    """Return what changes where the code that captures does."""
    return files_as_they_are(PACKAGE / "pytorch")


LARGE = 1 << 24
"""Bytes of a file from which on its size and time stand for its contents."""
MOST = 1000
"""Files of a program whose capture is kept."""
ASKS = re.compile(rb"\b(environ|getenv|argv)\b(?:(?:\.get|\.setdefault|\.pop)?[\[(]\s*[\"'](\w+)[\"'](?=\s*[\]),]))?")
"""Mentions of what a program may hang on beside files: a variable that it names, another one, or its arguments."""
VARIABLE = "$"
_OF_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")

_heard: list[set[str]] = []


@cache
def _listen() -> None:
    """Tell the innermost `reading` of every file that is opened, from now on."""

    def hear(event: str, details: tuple[Any, ...]) -> None:
        if _heard and event == "open":
            _heard[-1].add(str(details[0]))

    sys.addaudithook(hear)


@contextmanager
def reading() -> Iterator[set[str]]:
    """Collect the paths of the files that are opened in the body, and of the modules that it imports."""
    _listen()
    before, paths = set(sys.modules), set[str]()
    _heard.append(paths)
    try:
        yield paths
    finally:
        _heard.pop()
        paths.update(getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before)


def seals(paths: Iterable[str]) -> dict[str, str]:
    """Return what stays the same of each of a program's own files as long as it does; none where that does not say what it does.

    Of a library that was installed beside Python's own it is its folder, and of a variable that a program names its value.
    """
    of_python = {path for name in _OF_PYTHON if (path := sysconfig.get_paths().get(name))}
    others = (*of_python, *site.getsitepackages(), site.getusersitepackages(), str(PACKAGE), "/proc", "/sys", "/dev")
    inside = tuple(os.path.join(os.path.abspath(other), "") for other in others)
    own = {os.path.abspath(path) for path in paths if not path.endswith(".pyc")}
    own = {path for path in own if not path.startswith(inside) and os.path.isfile(path)}
    folders = [os.path.join(os.path.abspath(folder), "") for folder in dict.fromkeys(sys.path) if os.path.isdir(folder)]
    installed = [folder for folder in folders if any(name.endswith(".dist-info") for name in os.listdir(folder))]
    libraries = {path: folder + path.removeprefix(folder).partition(os.sep)[0]
                 for path in own for folder in installed if path.startswith(folder)}  # fmt: skip
    own -= libraries.keys()
    programs = [Path(path).read_bytes() for path in own if path.endswith(".py")]
    asked = {(word.decode(), name.decode()) for program in programs for word, name in ASKS.findall(program)}
    if len(own) > MOST or any(not name or word == "argv" for word, name in asked):
        return {}
    named = (*own, *libraries.values(), *(VARIABLE + name for _, name in asked))
    return {path: _seal(path, _BEGAN) for path in sorted(set(named))}


_BEGAN = dict(os.environ)
"""The environment before a program changed it."""


def _seal(path: str, environ: Mapping[str, str] = os.environ) -> str:
    if path.startswith(VARIABLE):
        return environ.get(path.removeprefix(VARIABLE), "")
    status = os.stat(path)
    by_time = status.st_size >= LARGE or os.path.isdir(path)
    return f"{status.st_size} {status.st_mtime_ns}" if by_time else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def unchanged(files: Mapping[str, str]) -> bool:
    """Return whether files are as they were when they were sealed."""
    return all(
        (path.startswith(VARIABLE) or os.path.exists(path)) and _seal(path) == seal for path, seal in files.items()
    )
