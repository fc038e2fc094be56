"""Takes the page's pictures for these pages (`page-*.png`), of the page as it is in this checkout: `make pictures`."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path += [str(DOCS.parent / "tests" / "page"), str(DOCS.parent / "tests" / "support")]
RUN = (
    "model=llama-3.1-70b&gpu=h100-sxm5-80gb&gpus=256&tp=8&pp=4&vpp=5&zero=1&sequence-parallel=true&seq-len=8192&micro-batch=1"
    "&global-batch=512&tokens=1T&price=2.5"
)
PICTURES = {"light": ("light", "en-US"), "dark": ("dark", "en-US"), "zh": ("light", "zh-CN")}
"""Names of the pictures, and a browser's colours and language in each."""


def main() -> None:
    """Serve the page and take its pictures, once nothing is being searched any more."""
    from playwright.sync_api import sync_playwright

    from driving import ARGUMENTS, CHROMIUM
    from serving import TOKEN, serving

    with serving() as found, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        for name, (colours, language) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1500, "height": 1420}, color_scheme=colours, locale=language)
            page.goto(f"http://127.0.0.1:{found.port}/?token={TOKEN}#{RUN}")
            page.wait_for_selector("#verdict .card", state="attached")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(9000)
            page.screenshot(path=DOCS / f"page-{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
