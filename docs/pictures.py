"""Takes the page's pictures for these pages (`page-*.png`), of the page as it is in this checkout: `make pictures`.

Each holds what the page said when it was taken; a test (tests/page/test_docs_pictures.py) compares that with the page now.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path += [str(DOCS.parent / "tests" / "page"), str(DOCS.parent / "tests" / "support")]
RUN = (
    "model=llama-3.1-70b&gpu=h100-sxm5-80gb&gpus=256&tp=8&pp=4&vpp=5&zero=1&sequence-parallel=true&seq-len=8192&micro-batch=1"
    "&global-batch=512&tokens=1T&price=2.5"
)
PICTURES = {"light": ("light", "en-US"), "dark": ("dark", "en-US"), "zh": ("light", "zh-CN")}
"""Names of the pictures, and a browser's colours and language in each."""
WIDTH, HEIGHT = 1500, 1420
SEARCHED = 9000
"""Milliseconds in which everything that the page searches for is found."""
SAID = b"iTXtPage\0\0\0\0\0"
"""Beginning of the part of a picture that holds what the page said."""


def take(browser: Any, address: str, name: str) -> bytes:
    """Return a picture of the page at an address as PNG, with what its verdict and its panels say inside."""
    colours, language = PICTURES[name]
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=colours, locale=language)
    page.goto(f"{address}#{RUN}")
    page.wait_for_selector("#verdict .card", state="attached")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SEARCHED)
    said = "\n".join([page.inner_text("#verdict-fit"), *page.locator("#panels h2").all_inner_texts()])
    picture: bytes = page.screenshot()
    page.close()
    chunk = SAID + said.encode()
    end = picture.rindex(struct.pack(">I", 0) + b"IEND")
    return (
        picture[:end] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + picture[end:]
    )


def said(picture: bytes) -> str:
    """Return what the page said when a picture was taken; empty where it does not hold that."""
    at = picture.find(SAID)
    if at < 0:
        return ""
    (length,) = struct.unpack(">I", picture[at - 4 : at])
    return picture[at + len(SAID) : at + 4 + length].decode()


def main() -> None:
    """Serve the page and take its pictures, once nothing is being searched any more."""
    from playwright.sync_api import sync_playwright

    from driving import ARGUMENTS, CHROMIUM
    from serving import TOKEN, serving

    with serving() as found, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        for name in PICTURES:
            address = f"http://127.0.0.1:{found.port}/?token={TOKEN}"
            (DOCS / f"page-{name}.png").write_bytes(take(browser, address, name))
        browser.close()


if __name__ == "__main__":
    main()
