"""Captures kept on disk, so that the second answer takes no PyTorch. A file is data: it is decoded into the types of
`packed`, every formula in it is checked by `sizes`, and one that cannot be read is as good as none."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loadgauge._version import __version__
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.captured import Captured
from loadgauge.pytorch.capture.inputs.packed import Packed
from loadgauge.pytorch.capture.symbols.sizes import Size, compiled

T = TypeVar("T")
LARGEST = 1 << 29
"""Bytes of captures that are read, before compression."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
PACKAGE = Path(__file__).parents[3]


def folder() -> Path:
    """Where captures are kept: below `XDG_CACHE_HOME`, or else ~/.cache."""
    own = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored (XDG Base Directory Specification).
    return (Path(own) if os.path.isabs(own) else Path.home() / ".cache") / "loadgauge" / "captures"


def place(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Path:
    """The file for the captures of a configuration. fields: all else that decides what is run

    Versions of PyTorch, transformers and this package are part of its name, and this package's own code.
    """
    known = [__version__, _code(), *(version_of(library) for library in LIBRARIES), config, dict(fields)]
    text = json.dumps(known, sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.bin"


def load(file: Path) -> list[Captured]:
    """The captures in a file; none where it is not there, or not as `save` writes it."""
    found: list[Captured] = []

    def unpack(packed: list[Packed]) -> None:
        for one in packed:
            check_sizes(one.rest.names, one.sizes(), one.rest.guards)
            found.append(one.captured())

    return found if read(file, list[Packed], unpack) is not None else []


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing is looked for garbage in the body, where many objects are made and none is thrown away."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_sizes(names: Sequence[str], sizes: Iterable[Size], guards: Sequence[str]) -> None:
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


def read(file: Path, kind: type[T], check: Callable[[T], None]) -> T | None:
    """Return what `write` wrote, as a type; None where it is not there or does not pass a check, which raises ConfigError."""
    try:
        unpacked = zlib.decompressobj()
        content = unpacked.decompress(file.read_bytes(), LARGEST)
        if unpacked.unconsumed_tail or not unpacked.eof:
            return None
        with _no_collection():
            found = msgspec.msgpack.decode(content, type=kind)
            check(found)
    except (OSError, zlib.error, msgspec.MsgspecError, ConfigError):
        return None
    return found


def write(file: Path, what: Any) -> None:
    """Write a structure to a file, whole or not at all; a place that cannot be written is left alone."""
    _put(file, zlib.compress(msgspec.msgpack.encode(what), 6))


def save(file: Path, captures: Sequence[Captured]) -> None:
    """Write captures to a file, whole or not at all; a place that cannot be written is left alone."""
    write(file, [Packed.of(one) for one in captures])


def _put(file: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.replace(name, file)
        except OSError:
            os.unlink(name)


def version_of(library: str) -> str:
    """Return the version of a library that is installed; "" where it is not."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _code() -> str:
    """Return what changes where the code that captures does: sizes and times of its files."""
    files = sorted(path for path in (PACKAGE / "pytorch").rglob("*.py"))
    stats = [(str(path.relative_to(PACKAGE)), path.stat()) for path in files]
    return hashlib.sha256(repr([(name, at.st_size, at.st_mtime_ns) for name, at in stats]).encode()).hexdigest()
