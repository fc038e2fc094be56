"""The page, timed in Chromium: from the move of a slider to the repainted page, the first paint, the weight.

    python benchmarks/page.py            # writes benchmarks/page.md
    python benchmarks/page.py pictures   # writes docs/page-*.png

Needs the extra `web`, playwright and a Chromium; LOADGAUGE_CHROMIUM is its path, where it is not /usr/bin/chromium.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHROMIUM = os.environ.get("LOADGAUGE_CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
RUNS = {
    "Llama 3.1 405B, 1,024 H100, tp 8, pp 16": (
        "model=llama-3.1-405b&gpu=h100-sxm5-80gb&gpus=1024&tp=8&pp=16&stage-layers=7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7"
        "&zero=1&sequence-parallel=true&recompute=full&seq-len=8192&micro-batch=1&global-batch=2048&tokens=15T&price=2.5"
    ),
    "Llama 3.1 8B, 8 H100, FSDP": (
        "model=llama-3.1-8b&gpu=h100-sxm5-80gb&gpus=8&zero=3&seq-len=8192&micro-batch=1&global-batch=64"
    ),
}
SLIDERS = {"seq-len": (3, 4, 5, 4), "global-batch": (10, 11, 12, 11), "tp": (3, 2, 1, 2), "micro-batch": (0, 1, 2, 1)}
"""Sliders, and the places that each is moved to."""
MOVE = """([flag, place]) => new Promise((done) => {
  const range = document.getElementById(`flag-${flag}`);
  if (Number(range.value) === place) return done(null);
  performance.clearResourceTimings();
  const seen = new PerformanceObserver((list) => {
    seen.disconnect();
    const whole = list.getEntriesByName('answered').at(-1);
    const asked = performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/api/estimate')).at(-1);
    done([whole.duration, asked ? asked.responseEnd - asked.requestStart : null]);
  });
  seen.observe({type: 'measure'});
  range.value = place;
  range.dispatchEvent(new Event('input', {bubbles: true}));
})"""


@contextmanager
def served() -> Iterator[str]:
    """The address of a page, served by a process of its own."""
    command = [sys.executable, "-m", "loadgauge", "serve", "--port", "0", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = server.stdout.readline()
            if not line:
                raise SystemExit("loadgauge serve did not start")
            text += line
        try:
            yield json.loads(text)["url"]
        finally:
            server.terminate()


def moved(page: Any, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds from each move to the repainted page, and of them those until the server's answer was there."""
    found = []
    for _ in range(rounds):
        for flag, places in SLIDERS.items():
            for place in places:
                times = page.evaluate(MOVE, [flag, place])
                if times is not None:
                    found.append((times[0], times[1]))
    return found


def percentile(values: list[float], share: float) -> float:
    """By the nearest rank."""
    return sorted(values)[min(len(values) - 1, round(share * len(values) + 0.5) - 1)]


def measure(rounds: int) -> dict[str, Any]:
    """All of it."""
    from playwright.sync_api import TimeoutError, sync_playwright

    found: dict[str, Any] = {"moves": {}}
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        found["chromium"] = browser.version
        for name, run in RUNS.items():
            page = browser.new_page(viewport={"width": 1500, "height": 1000})
            page.goto(f"{url}#{run}")
            page.wait_for_selector("#verdict-step")
            page.wait_for_selector("#panel-moments canvas")
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            found.setdefault("first_paint", []).append(paint)
            if "weight" not in found:
                found["weight"] = page.evaluate(
                    "performance.getEntriesByType('resource').filter((one) => !one.name.includes('/api/'))"
                    ".map((one) => [new URL(one.name).pathname, one.encodedBodySize])"
                )
            with suppress(TimeoutError):
                page.wait_for_selector("#panel-layouts canvas", timeout=60_000)
            moved(page, 1)  # the first moves fill caches
            found["moves"][name] = moved(page, rounds)
            page.close()
        browser.close()
    return found


def report(found: dict[str, Any]) -> str:
    """As a page of Markdown."""
    weight: dict[str, int] = {}
    for path, size in found["weight"]:
        kind = "echarts" if "echarts" in path else Path(path).suffix.lstrip(".")
        weight[kind] = weight.get(kind, 0) + size
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    lines = [
        "# The page, timed",
        "",
        f"Made by `benchmarks/page.py` on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores, {platform.system()},"
        f" Python {platform.python_version()}, Chromium {found['chromium']} without a GPU, 1500 x 1000; browser and server"
        f" share the cores. Load average of the machine afterwards: {load}.",
        "",
        "From the move of a slider to the repainted page, everything visible drawn anew [ms]:",
        "",
        "| run | moves | median | 95th percentile | largest | of the median, the server's answer |",
        "|---|---|---|---|---|---|",
    ]
    for name, moves in found["moves"].items():
        whole, server = [one for one, _ in moves], [one for _, one in moves if one is not None]
        lines.append(
            f"| {name} | {len(whole)} | {statistics.median(whole):.0f} | {percentile(whole, 0.95):.0f} | {max(whole):.0f}"
            f" | {statistics.median(server):.0f} |"
        )
    paints = ", ".join(f"{one:.0f}" for one in found["first_paint"])
    lines += [
        "",
        f"First contentful paint: {paints} ms.",
        "",
        f"Weight: {sum(weight.values()) / 1e3:,.0f} kB uncompressed, in {len(found['weight'])} files ("
        + ", ".join(f"{kind} {size / 1e3:,.0f} kB" for kind, size in sorted(weight.items(), key=lambda item: -item[1]))
        + "); ECharts is fetched after the first paint. Nothing comes from another host.",
        "",
    ]
    return "\n".join(lines)


PICTURES = {"light": "", "dark": "&~theme=dark", "zh": "&~lang=zh"}
SHOWN = (
    "model=llama-3.1-70b&gpu=h100-sxm5-80gb&gpus=256&tp=8&pp=4&vpp=5&schedule=interleaved&zero=1&sequence-parallel=true"
    "&seq-len=8192&micro-batch=1&global-batch=512&tokens=1T&price=2.5"
)


def pictures(width: int = 1500) -> None:
    """The page as it is seen, for the documentation."""
    from playwright.sync_api import sync_playwright

    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        for name, view in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": 1420}, color_scheme="light", locale="en-US")
            page.goto(f"{url}#{SHOWN}{view}")
            page.wait_for_selector("#panel-layouts .ring", timeout=300_000)
            page.wait_for_selector("#panel-changes .pill")
            page.wait_for_timeout(500)
            page.screenshot(path=HERE.parent / "docs" / f"page-{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["pictures"]:
        pictures()
        sys.exit()
    text = report(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 12))
    (HERE / "page.md").write_text(text, encoding="utf-8")
    print(text)
