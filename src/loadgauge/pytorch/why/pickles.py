"""A pickle of numbers, texts and containers of them, read without running anything and without more memory than it needs.

A pickle can name code to run, and it can ask the reader for memory: nine bytes make Python's own take 8 GB, for an entry
of the memo with a high number. So no class or function is known here, and every opcode is looked at before it is obeyed.
"""

import io
import pickle
import pickletools
from typing import Any

from loadgauge.core.base.errors import ConfigError

_SIZED = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4,
          pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip
_PUTS = {ord("q"): 1, ord("r"): 4}
_TWO_LINES = b"ic"
_MEMOIZE, _PUT, _FRAME, _STOP = 0x94, ord("p"), 0x95, ord(".")


def _lengths() -> tuple[list[int], dict[int, int]]:
    """Of each opcode, its bytes where they are known, else 0; and the width of the count that begins its argument (0: it
    ends with its line)."""
    whole, counted = [0] * 256, {}
    for opcode in pickletools.opcodes:
        code, argument = ord(opcode.code), opcode.arg
        if argument is None:
            whole[code] = 1
        elif argument.n >= 0:
            whole[code] = 1 + argument.n
        else:
            counted[code] = _SIZED.get(argument.n, 0)
    for code in (*_PUTS, _MEMOIZE, _FRAME, _STOP):
        whole[code] = 0
    return whole, counted


_WHOLE, _COUNTED = _lengths()


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers of them."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a snapshot asks for nothing")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside itself")


def check(data: bytes) -> None:
    """Raises ConfigError where an opcode asks for more than the file holds: a text longer than the rest, or a number in
    the memo beyond those that were given out.

    >>> check(pickle.dumps({"segments": []}))
    >>> check(b"\\x80\\x02Nr\\xff\\xff\\xff\\x1f.")
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: entry 536,870,911 of its memo, of which 0 are filled
    """
    offset, size, filled, whole = 0, len(data), 0, _WHOLE
    while offset < size:
        code = data[offset]
        length = whole[code]
        if length:
            offset += length
            continue
        if code == _MEMOIZE:
            filled += 1
            offset += 1
        elif code in _PUTS:
            width = _PUTS[code]
            filled = _put(int.from_bytes(data[offset + 1 : offset + 1 + width], "little"), filled)
            offset += 1 + width
        elif code == _FRAME:
            _within(int.from_bytes(data[offset + 1 : offset + 9], "little"), size - offset - 9)
            offset += 9
        elif code == _STOP:
            return
        elif code not in _COUNTED:
            raise ConfigError(f"byte {offset:,} is no opcode of a pickle")
        elif width := _COUNTED[code]:
            count = int.from_bytes(data[offset + 1 : offset + 1 + width], "little")
            _within(count, size - offset - 1 - width)
            offset += 1 + width + count
        else:
            end = data.find(b"\n", offset)
            if code == _PUT:
                number = data[offset + 1 : end].strip()
                filled = _put(int(number) if number.isdigit() and len(number) < 20 else 1 << 62, filled)
            if code in _TWO_LINES and end >= 0:
                end = data.find(b"\n", end + 1)
            offset = size if end < 0 else end + 1


def _put(number: int, filled: int) -> int:
    if number > filled + 1:
        raise ConfigError(f"entry {number:,} of its memo, of which {filled:,} are filled")
    return filled + 1


def _within(count: int, left: int) -> None:
    if count > left:
        raise ConfigError(f"a piece of {count:,} bytes, where {max(0, left):,} are left")


def plain(data: bytes) -> Any:
    """Decodes a pickle of plain data (numbers, text, containers). Raises ConfigError for anything else; runs no code."""
    check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle can fail in any way
        raise ConfigError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
