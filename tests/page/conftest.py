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


@pytest.fixture(scope="module")
def usual(browser: Any) -> Iterator[Any]:
    """A visitor whose browser has the page's files, and code that is compiled, from before."""
    made = browser.new_context(locale="en-US")
    yield made
    made.close()


@pytest.fixture
def opened(address: str, browser: Any, usual: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page on a run, by who has not been there; whatever it says on the console as an error fails the test.

    With settings of a context, such as permissions, in one of its own.
    """
    held, troubles = [], []

    def open_(run: str, width: int = 1400, height: int = 560, **how: Any) -> Any:
        context = browser.new_context(locale="en-US", **how) if how else usual
        page = context.new_page()
        held.append(context if how else page)
        page.set_viewport_size({"width": width, "height": height})
        stores = {"origin": address.partition("/?")[0], "storageTypes": "local_storage,indexeddb"}
        context.new_cdp_session(page).send("Storage.clearDataForOrigin", stores)
        page.on("console", lambda said: said.type == "error" and "422" not in said.text and troubles.append(said.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.set_default_timeout(WAIT)
        page.goto(f"{address}#{run}")
        page.wait_for_selector("#verdict .card", state="attached")
        page.wait_for_selector("#flag-gpu", state="attached")
        page.wait_for_function(
            "() => performance.getEntriesByName('complete').length && performance.getEntriesByName('answered').length"
        )
        return page

    yield open_
    for page in held:
        page.close()
    assert not troubles
