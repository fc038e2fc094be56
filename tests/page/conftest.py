"""A server and a browser for the tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from driving import ARGUMENTS, CHROMIUM, WAIT


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the page is served."""
    from serving import TOKEN, serving

    with serving() as found:
        yield f"http://127.0.0.1:{found.port}/?token={TOKEN}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        made = started.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield made
        made.close()


@pytest.fixture
def opened(address: str, browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page on a run; whatever the page says on the console as an error fails the test."""
    contexts, troubles = [], []

    def open_(run: str, width: int = 1400, height: int = 560, **how: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, locale="en-US", **how)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: said.type == "error" and "422" not in said.text and troubles.append(said.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.set_default_timeout(WAIT)
        page.goto(f"{address}#{run}")
        page.wait_for_selector("#verdict .card", state="attached")
        page.wait_for_selector("#flag-gpu", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not troubles
