"""Progress of long searches on stderr, shown only on a terminal."""

import sys


def say(text: str) -> None:
    """Show what is being searched, on one line that the next call replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


_best: list[str] = []


def terminal() -> bool:
    """Return whether anyone sees this."""
    return sys.stderr.isatty()


def so_far(text: str) -> None:
    """Show the best layout so far, beside the bars that follow."""
    _best[:] = [text]
    say(text)


def progress(done: int, whole: int, counted: str = "pipelines") -> None:
    """Show a bar of `done` out of `whole` of the things that are counted."""
    width = 30
    beside = f"; so far {_best[0]}" if _best else ""
    full = done * width // max(whole, 1)
    say(f"{'#' * full}{'.' * (width - full)} {done:,} of {whole:,} {counted}{beside}")


def clear() -> None:
    """Erase the line of progress."""
    _best.clear()
    say("")
