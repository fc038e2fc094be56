"""The results of a sweep: a folder of Parquet files, each written whole or not at all, which any Parquet reader reads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgauge.core.base.errors import ConfigError, Error, refuse
from loadgauge.core.plan.space.grid import Kind, Row
from loadgauge.core.text.rows import arrow_table, need_pyarrow

KEY = "cell"
PREFIX, SUFFIX = "part-", ".parquet"
DIGEST = b"loadgauge.rows"
"""The key, in a file's metadata, of the digest of its rows."""
CODES = (0, 1, 2)
"""Values of `code`."""


class Results:
    """A folder of results. columns: their names and kinds; every file has them all.

    While it is open, no other sweep can write there. Files are written under another name and renamed, so a sweep that is
    killed leaves only whole files.
    """

    def __init__(self, folder: str | Path, columns: Mapping[str, Kind]) -> None:
        need_pyarrow("output")
        self.folder, self.columns = Path(folder), dict(columns)
        refuse(
            self.folder.exists() and not self.folder.is_dir(),
            f"{self.folder} is a file; a folder is needed",
            key="output",
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = _locked(self.folder)
        for left in self.folder.glob(f".{PREFIX}*"):
            left.unlink(missing_ok=True)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the folder."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def files(self) -> list[Path]:
        """The files with results, in the order of writing."""
        parts = (path for path in self.folder.glob(f"{PREFIX}*{SUFFIX}") if self._number(path) is not None)
        return sorted(parts, key=lambda path: self._number(path) or 0)

    def rows(self) -> dict[str, Row]:
        """Read every result of the folder, by the key of its cell.

        Raises `ConfigError` for a file that is none of a sweep, or whose rows are not those that were written.
        """
        import pyarrow
        import pyarrow.parquet

        results: dict[str, Row] = {}
        for path in self.files():
            try:
                table = pyarrow.parquet.ParquetFile(path).read()
                rows = table.to_pylist()
            except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # UnicodeDecodeError too
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"cannot be read ({reason}); without it, its cells would be planned again", file=str(path)
                ) from None
            if not all(isinstance(row.get(KEY), str) for row in rows) or not rows:
                raise ConfigError("is no result of a sweep; give a folder of its own", key="output", file=str(path))
            if (table.schema.metadata or {}).get(DIGEST) != digest(rows):
                raise ConfigError(
                    "is damaged, or was changed: its rows are not those that were written; without it, its cells would be"
                    " planned again",
                    file=str(path),
                )
            for row in rows:
                if row.get("code", 0) not in CODES:
                    raise ConfigError(f"code must be 0, 1 or 2, got {row['code']!r}", file=str(path))
                results.setdefault(row[KEY], row)
        return results

    def add(self, rows: Sequence[Row]) -> Path:
        """Write results as one more file and return its path."""
        import pyarrow.parquet

        last = self.files()[-1:]
        number = 1 + (0 if not last else self._number(last[0]) or 0)
        path = self.folder / f"{PREFIX}{number:06d}{SUFFIX}"
        unfinished = self.folder / f".{path.name}.unfinished"
        with open(unfinished, "wb") as file:
            table = arrow_table(rows, self.columns)
            marked = table.replace_schema_metadata({DIGEST: digest(table.to_pylist())})
            pyarrow.parquet.write_table(marked, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        return path

    @staticmethod
    def _number(path: Path) -> int | None:
        digits = path.name.removeprefix(PREFIX).removesuffix(SUFFIX)
        return int(digits) if digits.isascii() and digits.isdecimal() else None


def digest(rows: Sequence[Row]) -> bytes:
    """Hash the rows of a file, to detect damage and edits."""
    text = json.dumps(rows, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest().encode()


def _locked(folder: Path) -> int | None:
    """A lock on the folder, which the system takes away when this process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two sweeps into one folder at a time are not found out there.
        return None
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise Error(f"{folder}: another sweep is writing its results there") from None
    except OSError:  # A file system without locks.
        with contextlib.suppress(OSError):
            os.close(handle)
        return None
    return handle
