"""The page in a real browser, driven as a person would: its numbers are those of the command line, to the last bit."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page needs the extra `web`")
pytest.importorskip("playwright.sync_api", reason="the page is driven with playwright, which is missing")

from driving import (
    DROP,
    NEEDS_CHROMIUM,
    document,
    expected,
    flags_of,
    line,
    rest,
    settled,
    shown,
    until,
    verdict,
)
from serving import TOKEN

pytestmark = NEEDS_CHROMIUM
MODELS = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "models"
RUN = (
    "model=llama-3.1-8b&gpu=h100-sxm5-80gb&gpus=16&tp=4&pp=2&sequence-parallel=true&zero=1&seq-len=4096&micro-batch=1"
    "&global-batch=32&tokens=1T&price=2.5"
)
SMALL = "model=gpt2&gpu=a100-sxm4-80gb&gpus=8&seq-len=1024&micro-batch=4&global-batch=64&tokens=10B&price=1.5"


def slide(page: Any, flag: str, place: int) -> None:
    """Moves a slider as a hand does."""
    settled(
        page,
        lambda: page.locator(f"#flag-{flag}").evaluate(
            "(range, place) => { range.value = place; range.dispatchEvent(new Event('input', {bubbles: true})) }", place
        ),
    )


def fill(page: Any, flag: str, text: str) -> None:
    """Types into a field of the settings."""
    page.locator(f"#flag-{flag}").fill(text)
    page.locator(f"#flag-{flag}").press("Enter")


# -- what a person does ------------------------------------------------------------------------------------------------


def test_a_config_is_dropped_and_judged_as_by_the_command(opened: Any, tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 8
    text = json.dumps(config)
    page = opened(RUN)
    before = verdict(page)
    settled(page, lambda: page.evaluate(DROP, ["config.json", text]))
    file = tmp_path / "config.json"
    file.write_text(text)
    flags = {"gpu": "h100-sxm5-80gb", "gpus": "16", "tokens": "1T", "price": "2.5"}
    for flag in ("tokens", "price"):  # what the config does not say
        settled(page, lambda flag=flag: fill(page, flag, flags[flag]))
    want = document(line({"model": str(file), **flags}))
    assert verdict(page) == expected(want)
    assert before["memory"] < want["memory"]["total"]  # the layout before was of another run
    assert flags_of(page)["model"].startswith("upload:")
    assert "config.json" in page.locator("#read").inner_text()
    assert page.locator("#verdict-fit .big").inner_text().startswith(want["memory"]["verdict"].capitalize())
    assert page.locator("[data-fits]").get_attribute("data-fits") == str(want["memory"]["fits"]).lower()


def test_a_measurement_becomes_dots(opened: Any) -> None:
    # What `loadgauge measure --json` prints, with numbers of the test's own; a real trace is in test_api_dots.py.
    found = {"target": "gpt2", "backward_peak": 3 * 2**30 + 7, "step_peak": 2**30 + 5, "states": {"weights": 497759232}}
    page = opened(
        "model=gpt2&gpu=h100-sxm5-80gb&gpus=1&seq-len=1024&micro-batch=1&global-batch=1&~tables=moments", height=1300
    )
    settled(page, lambda: page.evaluate(DROP, ["measured.json", json.dumps({**found, "peak": found["backward_peak"]})]))
    cells = page.locator("#panel-moments [data-dot]")
    cells.first.wait_for()
    shown_there = cells.evaluate_all("(all) => all.map((one) => [one.dataset.dot, Number(one.dataset.value)])")
    assert dict(shown_there) == {
        "measured forward and backward": found["backward_peak"], "measured optimizer step": found["step_peak"]
    }  # fmt: skip
    assert "1.00 GiB" in cells.last.inner_text()
    page.locator("#panel-moments .head .act").last.click()
    legend = page.locator("#panel-moments [data-source='measured']")
    assert "measured: measured.json" in legend.inner_text()
    # Its weights are those of float32, the page's of bfloat16: another run.
    assert "weights 0.464 GiB there" in page.locator("[data-differs='measured']").inner_text()
    # Kept over a reload; the plot answers the pointer with the value.
    assert "dots" not in flags_of(page)
    page.reload()
    page.locator("#panel-moments canvas").wait_for()
    legend.wait_for()
    box = page.locator("#panel-moments .plot").bounding_box()
    told = page.get_by_text("measured, highest in the optimizer step").first
    places = itertools.cycle(range(4, 90, 6))  # of the last dot, from the right edge

    def found_there() -> bool:
        page.mouse.move(box["x"] + box["width"] - next(places), box["y"] + box["height"] / 2)
        return told.is_visible()

    until(page, found_there)
    page.locator("#language").click()
    page.get_by_text("实测: measured.json").first.wait_for()
    settled(page, lambda: legend.locator(".cross").click())
    assert legend.count() == 0
    assert page.evaluate("sessionStorage.getItem('dots')") == "{}"


def test_every_panel_moves_with_tp(opened: Any) -> None:
    page = opened(RUN, height=2600)
    page.wait_for_selector("#panel-layouts .ring")
    page.wait_for_selector("#panel-changes .pill")
    before = faces(page)
    slide(page, "tp", 1)
    until(page, lambda: not {name for name, face in faces(page).items() if face == before[name]})
    assert set(before) == {"treemap", "moments", "lanes", "layouts", "schedule", "network", "changes", "verdict"}
    assert verdict(page) == expected(document(line(flags_of(page))))
    assert flags_of(page)["tp"] == "2"


def faces(page: Any) -> dict[str, str]:
    """What each panel shows: the drawing on its canvas, or its texts and places."""
    places = {name: f"#panel-{name} .chart" for name in ("treemap", "lanes", "layouts", "network", "changes")}
    drawn = {name: f"#panel-{name} canvas" for name in ("moments", "schedule")}
    found = {name: page.locator(where).evaluate("(one) => one.innerHTML") for name, where in places.items()}
    found |= {name: page.locator(where).evaluate("(one) => one.toDataURL()") for name, where in drawn.items()}
    return found | {"verdict": page.locator("#verdict").inner_text()}


def test_blocks_add_up_and_explain_themselves(opened: Any) -> None:
    page = opened(RUN)
    want = document(line(flags_of(page)))
    blocks = page.locator(".block").evaluate_all(
        "(all) => all.map((one) => [one.dataset.id, Number(one.dataset.value)])"
    )
    assert sum(size for _, size in blocks) == pytest.approx(want["memory"]["total"], rel=1e-12)
    for part in ("activations", "optimizer", "weights", "gradients"):
        mine = [size for id, size in blocks if id.partition("/")[0] == part]
        assert sum(mine) == pytest.approx(want["memory"]["parts"][part], rel=1e-12)
    areas = page.locator(".block").evaluate_all("(all) => all.map((one) => one.offsetWidth * one.offsetHeight)")
    largest = max(range(len(blocks)), key=lambda place: blocks[place][1])
    assert areas[largest] == max(areas)

    page.locator('.block[data-id^="activations/"]').first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#drawer .formula.numbers")
    said = page.locator("#drawer .formula.numbers").first.inner_text()
    product = said.replace("·", "*").replace(",", "").split("=")[0]
    # The formula with the user's numbers, worked out here, is what it says it is.
    assert re.fullmatch(r"[\d*/+()\s.]+", product)
    assert eval(product) == pytest.approx(shown(page, "#drawer .formula.numbers strong >> nth=0"), rel=1e-12)
    letters = page.locator("#drawer .letters dt").all_inner_texts()
    values = page.locator("#drawer .letters dd:nth-of-type(odd)").all_inner_texts()
    assert {"s": "4,096", "b": "1", "t": "4"}.items() <= dict(zip(letters, values, strict=True)).items()
    assert page.locator("#drawer a[href^='https://']").count() >= 1
    page.keyboard.press("Escape")
    assert not page.locator("#drawer").is_visible()
    assert page.evaluate("document.activeElement.className").startswith("block")


def test_a_point_of_the_front_is_loaded(opened: Any) -> None:
    page = opened(f"{SMALL}&~tables=layouts", height=1300)
    page.wait_for_selector("#panel-layouts .scroll .pill")
    front = page.locator("#panel-layouts table.data tbody tr")
    cells = front.last.locator("td").all_inner_texts()
    before = verdict(page)
    settled(page, lambda: front.last.locator(".pill").click())
    after = verdict(page)
    assert after["memory"] < before["memory"]
    assert f"{after['memory'] / 2**30:,.1f}" == cells[1]
    assert f"{100 * after['mfu']:,.1f}%" == cells[2]
    assert after == expected(document(line(flags_of(page))))
    page.go_back()
    until(page, lambda: verdict(page) == before)


def test_a_click_on_the_front_loads_it(opened: Any) -> None:
    page = opened(SMALL, height=1300)
    page.wait_for_selector("#panel-layouts .ring")
    box = page.locator("#panel-layouts .plot").bounding_box()
    tips = page.locator("#panel-layouts .plot > div:nth-of-type(2)")
    # The front begins at the least memory, on the left: look for a point there by its tooltip.
    for x in range(46, 130, 4):
        for y in range(30, int(box["height"]) - 42, 8):
            page.mouse.move(box["x"] + x, box["y"] + y)
            if tips.count() and "MFU" in (tips.first.text_content() or "") and tips.first.is_visible():
                before = flags_of(page)
                settled(page, lambda x=x, y=y: page.mouse.click(box["x"] + x, box["y"] + y))
                assert flags_of(page) != before
                assert verdict(page) == expected(document(line(flags_of(page))))
                return
    raise AssertionError("no point of the scatter answers the pointer")


def test_the_copied_command_prints_the_same(opened: Any) -> None:
    page = opened(RUN, permissions=["clipboard-read", "clipboard-write"])
    slide(page, "micro-batch", 1)
    page.locator("#share").click()
    page.locator("#copy-command").click()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:3] == ["loadgauge", "estimate", "llama-3.1-8b"]
    assert "--micro-batch" in " ".join(words)
    assert verdict(page) == expected(document(shlex.join(words[1:])))
    page.locator("#share").click()
    page.locator("#copy-link").click()
    link = page.evaluate("navigator.clipboard.readText()")
    assert TOKEN not in link
    assert "micro-batch=2" in link


def test_the_address_holds_all_of_it(opened: Any) -> None:
    page = opened(RUN)
    slide(page, "seq-len", 4)
    page.locator("#flag-optimizer").select_option("lion")
    page.locator("#tab-network").click()
    page.keyboard.press("d")
    page.locator('[data-flag="tp"] .lock').click()
    wanted, theme = flags_of(page), page.evaluate("document.documentElement.dataset.theme")
    before = verdict(page)
    page.reload()
    page.wait_for_selector("#verdict-step")
    assert flags_of(page) == wanted
    assert wanted["seq-len"] == "8192"
    assert verdict(page) == before == expected(document(line(wanted)))
    assert page.locator("#tab-network").get_attribute("aria-selected") == "true"
    assert page.evaluate("document.documentElement.dataset.theme") == theme == "dark"
    page.wait_for_selector('[data-flag="tp"] .lock[aria-pressed="true"]')


def test_in_chinese(opened: Any) -> None:
    page = opened(RUN, height=2400)
    before = verdict(page)
    page.locator("#language").click()
    page.wait_for_selector("html[lang='zh-CN']")
    rest(page, 300)
    assert "放得下" in page.locator("#verdict-fit").inner_text()
    assert verdict(page) == before
    texts = page.locator("#body").inner_text()
    for english in json.loads((STATIC / "messages" / "en.json").read_text(encoding="utf-8")).values():
        if isinstance(english, str) and " " in english and "{" not in english:
            assert english not in texts
    assert not re.search(r"^[a-z_]+\.[a-z_.]+$", texts.replace("llama-3.1-8b", ""), re.MULTILINE)
    page.locator("#language").click()
    page.wait_for_selector("html[lang='en']")
    assert "Where every byte goes" in page.locator("#body").inner_text()


STATIC = Path(__file__).parents[2] / "src" / "loadgauge" / "page" / "static"


def test_pinned_the_differences_show(opened: Any) -> None:
    page = opened(RUN, height=1300)
    one = verdict(page)
    page.locator("#pin").click()
    page.wait_for_selector("#pinned strong")
    slide(page, "seq-len", 4)
    two = verdict(page)
    deltas = {
        name: float(page.locator(f"#verdict-{name} .delta").get_attribute("data-delta"))
        for name in ("fit", "step", "mfu")
    }
    assert deltas["fit"] == two["memory"] - one["memory"] > 0
    assert deltas["step"] == two["step"] - one["step"] > 0
    assert deltas["mfu"] == two["mfu"] - one["mfu"]
    assert page.locator("#panel-lanes .was").count() > 3
    settled(page, lambda: page.keyboard.press("x"))
    assert verdict(page) == one


def test_what_cannot_be_is_said_and_left_again(opened: Any) -> None:
    page = opened(RUN)
    before = verdict(page)
    box = page.locator("#flag-tp-number")
    box.fill("3")
    box.press("Enter")
    page.wait_for_selector("#problem:not([hidden])")
    assert "tp" in page.locator("#problem").inner_text()
    assert "Traceback" not in page.locator("#problem").inner_text()
    box.fill("4")
    settled(page, lambda: box.press("Enter"))
    assert page.locator("#problem").is_hidden()
    assert verdict(page) == before


def test_an_error_text_and_an_export(opened: Any) -> None:
    page = opened(f"{RUN}&~tab=why")
    page.locator("#oom-text").fill(OOM)
    page.get_by_role("button", name="Find the cause").click()
    page.wait_for_selector("#panel-cause .facts")
    facts = dict(
        zip(
            page.locator("#panel-cause dt").all_inner_texts(),
            page.locator("#panel-cause dd").all_inner_texts(),
            strict=True,
        )
    )
    assert facts["tried to allocate"] == "2.00 GiB"
    assert facts["in tensors"] == "70.0 GiB"
    said = page.locator("#panel-cause").inner_text()
    for part in (
        "fragmentation: 6.50 GiB",
        "where: backward: gradients of this call",
        "at: train.py:41 step: loss.backward()",
    ):
        assert part in said
    assert "expandable_segments" in page.locator("#panel-cause .remedies li").first.inner_text()
    page.wait_for_selector("#oom-yours li code")
    assert "micro-batch" in page.locator("#oom-yours p").inner_text()
    page.keyboard.press("Escape")
    page.locator("#share").click()
    page.locator("#more-dialects").click()
    assert page.locator("[data-dialect=verl]").is_visible()
    page.locator("[data-dialect=deepspeed]").click()
    written = json.loads(page.locator("#exported").inner_text())
    assert written["train_micro_batch_size_per_gpu"] == 1


def test_an_error_text_is_not_of_the_sample(opened: Any) -> None:
    """Before the user has said a model, no need and no tokens of the sample stand beside the error."""
    page = opened("~tab=why")
    page.locator("#oom-text").fill(OOM)
    page.get_by_role("button", name="Find the cause").click()
    page.wait_for_selector("#oom-yours.sample")
    assert page.locator("#oom-yours li").count() == 0
    assert page.locator("#verdict").is_hidden()
    box = page.locator("#flag-model")
    box.fill("llama-3.1-8b")
    settled(page, lambda: box.press("Enter"))
    page.wait_for_selector("#oom-yours:not(.sample)")
    assert page.locator("#verdict").is_visible()


OOM = (
    'Traceback (most recent call last):\n  File "train.py", line 41, in step\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of"
    " which 1.06 GiB is free. Process 12345 has 78.12 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by"
    " PyTorch, and 6.50 GiB is reserved by PyTorch but unallocated."
)


def test_a_published_run_opens_to_what_ran(opened: Any) -> None:
    page = opened(f"{SMALL}&~tab=accuracy&~tables=accuracy")
    row = page.locator("#panel-accuracy tbody tr button").first
    row.wait_for(timeout=60_000)
    assert "without its own rows" in page.text_content("#panel-accuracy .sub")
    row.click()
    page.wait_for_selector("#drawer[open] a[href^='https://']")
    assert "--gpus" in page.text_content("#drawer pre")


# -- for everybody -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_axe_finds_nothing(opened: Any) -> None:
    page = opened(f"{SMALL}&~theme=light")
    page.evaluate((Path(__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    for theme in ("light", "dark"):
        for tab in ("run", "layouts", "network", "why", "hardware", "cost", "posttrain", "fleet"):
            page.locator(f"#tab-{tab}").click()
            rest(page, 300)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            violations = [
                (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"][:300])
                for one in found["violations"]
            ]
            assert violations == [], (tab, theme)
            assert len(found["passes"]) > 20
        if theme == "light":
            page.keyboard.press("d")
            page.keyboard.press("a")  # the charts' tables too
            page.wait_for_selector("html[data-theme='dark']")


def test_the_open_tab_is_in_sight_on_a_narrow_screen(opened: Any) -> None:
    page = opened(f"{SMALL}&~tab=fleet", width=390)
    until(page, lambda: page.locator("#tab-fleet").evaluate("(tab) => tab.getBoundingClientRect().right") <= 390)
    assert page.locator("#tab-fleet").evaluate("(tab) => tab.getBoundingClientRect().left") >= 0


def test_nothing_sticks_out(opened: Any) -> None:
    page = opened(SMALL)
    for width in (390, 1100, 1900):
        page.set_viewport_size({"width": width, "height": 700})
        rest(page, 250)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        out = page.locator(".panel").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")
        assert len(out) == 7
        assert max(out) <= width


def test_keys(opened: Any) -> None:
    page = opened(RUN)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    keys = page.locator("#help kbd").all_inner_texts()
    assert {"?", "/", "p", "x", "l", "c", "d", "g", "[", "]"} <= set(keys)
    page.keyboard.press("Escape")
    settled(page, lambda: page.keyboard.press("["))
    assert flags_of(page)["tp"] == "2"
    page.keyboard.press("5")
    assert page.locator("#tab-hardware").get_attribute("aria-selected") == "true"
    page.keyboard.press("1")
    page.locator(".block[tabindex='0']").focus()
    first = page.evaluate("document.activeElement.dataset.id")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.id") not in (first, None)
    page.locator(".pipeline").focus()
    page.keyboard.press("ArrowRight")
    assert "micro-batch" in page.locator("#panel-schedule [role=status]").inner_text()


# -- what each view is for ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_last_run_comes_back_and_a_link_wins(opened: Any, address: str) -> None:
    page = opened(RUN)
    slide(page, "seq-len", 4)
    wanted = flags_of(page)
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#verdict-step")
    assert page.evaluate("document.querySelector('#flag-seq-len-number').value") == "8192"
    assert verdict(page) == expected(document(line(wanted)))
    page.goto("about:blank")
    page.goto(f"{address}#{SMALL}")
    page.wait_for_selector("#verdict-step")
    assert flags_of(page)["model"] == "gpt2"
    page.goto("about:blank")
    page.goto(address)  # a link that was only looked at is not one's own run
    page.wait_for_selector("#verdict-step")
    until(page, lambda: page.locator("#flag-model").input_value() == "llama-3.1-8b")


def test_a_run_whose_file_is_gone_gives_way_to_the_example(opened: Any, address: str) -> None:
    page = opened(RUN)
    page.evaluate("localStorage.setItem('run', 'model=upload:0123456789abcdef&gpu=l4')")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#verdict-step")
    assert page.locator("#problem").is_hidden()
    assert flags_of(page)["model"] == "llama-3.1-70b"


@pytest.mark.long
def test_every_number_opens_its_formula(opened: Any) -> None:
    page = opened(RUN, height=2600)
    page.wait_for_selector("#panel-network [data-why]")
    asked = page.locator("[data-why]").evaluate_all("(all) => all.map((one) => one.dataset.why)")
    assert {"fit", "step", "rate", "mfu", "days", "cost", "lane/matmul", "lane/tp", "lane/bubble"} <= set(asked)
    assert sum(id.startswith("network/") for id in asked) >= 3
    numbers = verdict(page)
    for id in asked:
        page.locator(f"[data-why='{id}']").click()
        page.wait_for_selector("#drawer .big[data-value]")
        if id in numbers:
            assert shown(page, "#drawer .big") == numbers[id]
        assert page.locator("#drawer section").count() >= 1
        page.keyboard.press("Escape")
    page.locator("[data-why='mfu']").click()
    page.wait_for_selector("#drawer .formula strong")
    assert shown(page, "#drawer .formula strong >> nth=0") == numbers["mfu"]
    assert "989" in page.locator("#drawer .formula.numbers").first.inner_text()
    assert page.locator("#drawer a[href*='2204.02311']").count() == 1
    page.keyboard.press("Escape")
    page.locator("[data-why='step']").click()
    page.locator("#drawer td .asks").first.click()  # a summand of the step opens its own
    page.wait_for_selector("#drawer .formula")


def test_which_card_is_cheapest(opened: Any) -> None:
    page = opened(f"{RUN}&~tab=cost")
    prices = {"h200-sxm-141gb": "3.5", "a100-sxm4-80gb": "1.25"}
    for id, price in prices.items():

        def costs(id: str = id, price: str = price) -> bool:
            field = page.locator(f"tr[data-gpu='{id}'] input").nth(1)
            if field.input_value() != price:  # the table is drawn anew when the list of cards comes
                field.fill(price)
            return bool(page.locator(f"tr[data-gpu='{id}'] [data-cost='1']").inner_text())

        until(page, costs)
    costs_of = {id: shown(page, f"tr[data-gpu='{id}'] [data-cost='1']") for id in prices}
    for id, price in prices.items():
        flags = {**flags_of(page), "gpu": id, "price": price}
        assert costs_of[id] == document(line(flags))["time"]["cost"]
    costs_of["h100-sxm5-80gb"] = verdict(page)["cost"]
    least = min(costs_of, key=costs_of.__getitem__)
    best = page.locator("table.costs .best")
    assert best.count() == 1
    assert float(best.get_attribute("data-value")) == costs_of[least]
    page.reload()
    page.wait_for_selector("tr[data-gpu='h200-sxm-141gb'] .least")
    assert page.locator("tr[data-gpu='h200-sxm-141gb'] input").nth(1).input_value() == "3.5"
    settled(page, lambda: page.locator("tr[data-gpu='a100-sxm4-80gb'] .pill").click())
    assert flags_of(page)["gpu"] == "a100-sxm4-80gb"
    assert flags_of(page)["price"] == "1.25"


def test_two_runs_as_a_diff_of_ledgers(opened: Any) -> None:
    page = opened(RUN, height=1300)
    one = verdict(page)
    page.locator("#pin").click()
    page.wait_for_selector("#panel-compare tbody")
    slide(page, "tp", 1)
    until(page, lambda: page.locator("#panel-compare [data-row='lane/matmul']").count() == 1)
    two = verdict(page)
    for group, name in (("memory", "memory"), ("time", "step")):
        rows = page.locator(f"#panel-compare [data-group='{group}'] [data-row] [data-change]")
        changes = [float(text) for text in rows.evaluate_all("(all) => all.map((one) => one.dataset.change)")]
        assert sum(changes) == pytest.approx(two[name] - one[name], rel=1e-9)
    why = page.locator("#panel-compare [data-row='activations'] .why").inner_text()
    assert "tensor-parallel ranks 4 → 2" in why
    page.locator("#panel-compare [data-row='lane/matmul'] .asks").click()
    page.wait_for_selector("#drawer .formula")
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    page.wait_for_selector("#panel-compare", state="detached")


def test_a_run_is_one_page_of_paper(opened: Any) -> None:
    page = opened(RUN)
    for change in ((), ("#theme", "#language"), ("#tab-cost",)):
        for button in change:
            page.locator(button).click()
        rest(page, 500)
        printed = page.pdf(prefer_css_page_size=True, print_background=True)
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
        assert re.search(rb"/MediaBox\s*\[\s*0 0 84[12][.\d]* 59[456]", printed)
        assert page.evaluate("document.documentElement.className") == ""


def test_refusals_are_in_the_language_of_the_page(opened: Any) -> None:
    page = opened(f"{RUN}&~lang=zh")
    for flag, wrong, said in (
        ("tp", "3", "16 张 GPU 不能被 tp 3 × pp 2 × cp 1 = 6 整除：余 4"),
        ("vpp", "40", "32"),
        ("micro-batch", "x", "须为 1 到"),
    ):
        box = page.locator(f"#flag-{flag}-number")
        before = box.input_value()
        box.fill(wrong)
        box.press("Enter")
        page.wait_for_selector("#problem:not([hidden])")
        until(page, lambda said=said: said in page.locator("#problem").inner_text())
        assert not re.search(r"[A-Za-z]{3,} [a-z]{3,} [a-z]{3,}", page.locator("#problem").inner_text())
        box.fill(before)
        settled(page, lambda box=box: box.press("Enter"))
    page.locator("#language").click()
    page.wait_for_selector("html[lang='en']")


def test_panels_with_nothing_to_draw_are_a_line(opened: Any) -> None:
    page = opened("model=gpt2&gpu=a100-sxm4-80gb&gpus=1&seq-len=1024", height=2600)
    page.wait_for_selector("#panel-network.idle")
    for name in ("network", "schedule"):
        assert page.locator(f"#panel-{name}").bounding_box()["height"] < 60
        assert page.locator(f"#panel-{name} .chart").is_hidden()
    settled(
        page, lambda: page.locator("#flag-gpus-number").fill("8") or page.locator("#flag-gpus-number").press("Enter")
    )
    page.wait_for_selector("#panel-network:not(.idle) table")
