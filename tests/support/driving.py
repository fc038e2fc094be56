"""A real browser for tests of the page, and what a person does with it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from command_line import typed

CHROMIUM = Path(os.environ.get("LOADGAUGE_CHROMIUM", "/usr/bin/chromium"))
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
NEEDS_CHROMIUM = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no Chromium at {CHROMIUM}; LOADGAUGE_CHROMIUM is the path of another"
)
WAIT = 120_000
DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, {type: 'application/json'}));
  window.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
}"""
"""Drops a file, of a name and a text, on the page."""


def shown(page: Any, where: str) -> float:
    """The exact number that an element shows."""
    return float(page.locator(where).get_attribute("data-value"))


def verdict(page: Any) -> dict[str, float]:
    """The numbers of the verdict row."""
    found = {"memory": shown(page, "#verdict-fit .of [data-value]")}
    return found | {name: shown(page, f"#verdict-{name} .big") for name in ("step", "mfu", "days", "cost")}


def expected(found: dict[str, Any]) -> dict[str, float]:
    """The same of what `estimate --json` prints."""
    time = found["time"]
    return {"memory": found["memory"]["total"], **{name: time[name] for name in ("step", "mfu", "days", "cost")}}


def settled(page: Any, action: Callable[[], Any]) -> None:
    """Does something that asks for another estimate, and waits until it is drawn."""
    before = page.evaluate("performance.getEntriesByName('answered').length")
    action()
    for _ in range(WAIT // 50):
        if page.evaluate("performance.getEntriesByName('answered').length") > before:
            return
        page.wait_for_timeout(50)
    raise AssertionError("no answer was drawn")


def rest(page: Any, milliseconds: int) -> None:
    """Waits by the page's own clock: its timers that were due before have then run, however busy the machine is."""
    page.evaluate("(time) => new Promise((done) => setTimeout(done, time))", milliseconds)


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Waits for what comes about when answers come; fails where it does not."""
    for _ in range(WAIT // 50):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come about")


def document(command: str) -> dict[str, Any]:
    """What a command line prints as JSON; remarks on what a file has beside it go elsewhere."""
    told = typed(f"{command} --json")
    assert told.out, told.err
    found: dict[str, Any] = json.loads(told.out)
    return found


def flags_of(page: Any) -> dict[str, str]:
    """The flags in the address, once they are written there."""
    rest(page, 350)
    text = page.evaluate("location.hash.slice(1)")
    return {name: value for name, value in parse_qsl(text) if not name.startswith("~")}


def line(flags: dict[str, str]) -> str:
    """A command line of flags."""
    words = [
        f"--{name}" if value == "true" else f"--{name} {shlex.quote(value)}"
        for name, value in flags.items()
        if name != "model"
    ]
    return " ".join(["estimate", shlex.quote(flags["model"]), *words])
