"""Files on the page, in a real browser: an answer is of the file that was dropped, or it is put aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import typed

pytest.importorskip("starlette", reason="the page needs the extra `web`")
pytest.importorskip("playwright.sync_api", reason="the page is driven with playwright, which is missing")

from driving import DROP, NEEDS_CHROMIUM, document, flags_of, settled, shown, until
from loadgauge.page.server import guard

pytestmark = NEEDS_CHROMIUM
MODELS = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "models"
CONFIG = (MODELS / "llama-3.1-8b.json").read_text(encoding="utf-8")
JOB = (
    "base_model: NousResearch/Meta-Llama-3.1-8B\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "sequence_len: 2048\nadapter: qlora\nlora_r: 16\nload_in_4bit: true\n"
)
DEEPSPEED = json.dumps({
    "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
})  # fmt: skip
NOTEBOOK = json.dumps({"cells": [{"cell_type": "code", "source": ["print(1)"]}], "metadata": {}, "nbformat": 4})
SIZED = "(size) => Object.defineProperty(File.prototype, 'size', {get: () => size, configurable: true})"
BINARY = "PK\x03\x04\x00\x00 weights"


def drop(page: Any, name: str, text: str) -> None:
    """Drops a file and waits for its answer."""
    settled(page, lambda: page.evaluate(DROP, [name, text]))


def refuse(page: Any, name: str, text: str) -> str:
    """Drops a file that has no answer, and returns what the page says in place of the verdict."""
    page.evaluate(DROP, [name, text])
    until(page, lambda: page.locator("#unanswered strong").all_inner_texts() == [name])
    assert page.locator("#verdict").is_hidden()
    assert page.locator("#panels > :visible").count() == 0
    return str(page.locator("#unanswered").inner_text())


def change(page: Any, flag: str, value: str) -> None:
    """Chooses in a menu of the settings, or types into a field."""
    field = page.locator(f"#flag-{flag}")
    settled(page, lambda: field.select_option(value) if flag == "gpu" else (field.fill(value), field.press("Enter")))


NOT_READ = [
    ("model.safetensors", BINARY, "is neither text (UTF-8) nor a snapshot of PyTorch's allocator"),
    ("train.ipynb", NOTEBOOK, "is no training job"),
    ("notes.md", "# Title\n\nwords: and words\n", "has no keys of a job file that is known"),
    ("run.log", "step 1\n" * 500_000, "is 3.5 MB of text; a job file has some kB"),
    ("big.ipynb", json.dumps({"nbformat": 4, "cells": ["x" * 3_500_000]}), "is a notebook of 3.5 MB"),
    ("weights.bin", "\x01\x00\x02" * 1_200_000, "is neither text (UTF-8) nor a snapshot of PyTorch's allocator"),
]


def test_a_file_that_is_not_read_puts_the_answer_aside(opened: Any) -> None:
    page = opened("")
    before, title = shown(page, "#verdict-fit .of [data-value]"), page.title()
    for name, text, said in NOT_READ:
        told = refuse(page, name, text)
        assert f"{name}: {said}" in told
        assert told.count(said) == 1
        assert "config.json, a job file or script (YAML, TOML, sh, py, ipynb)" in told
        assert "llama-3.1-70b · 256 × h100-sxm5-80gb, is put aside" in told
        assert page.title().startswith(name)
        assert "Fits" not in page.locator("#work").inner_text()
        page.get_by_role("button", name="Back to the run before").click()
        assert page.locator("#unanswered").is_hidden()
        assert shown(page, "#verdict-fit .of [data-value]") == before
        assert page.title() == title
    # One that is over the limit is not sent.
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    page.evaluate(SIZED, guard.FILE_LIMIT + 2**28)
    told = refuse(page, "snapshot.pickle", "x")
    assert "snapshot.pickle: is 1.3 GiB, and at most 1 GiB is read here" in told
    assert not [url for url in sent if "snapshot" in url or "drop" in url]
    page.evaluate(SIZED, guard.FILE_LIMIT)
    assert "snapshot.txt: is 0.0 MB" in refuse(page, "snapshot.txt", "x")  # at the limit it is sent


def test_what_is_refused_is_said_in_chinese(opened: Any) -> None:
    page = opened("~lang=zh")
    assert "示例" in page.locator("#origin").inner_text()
    assert "model.pt：既不是文本" in refuse(page, "model.pt", BINARY)
    assert "ds.json 按 deepspeed" in (told := refuse(page, "ds.json", DEEPSPEED))
    assert "它没有写明模型" in told
    page.locator("#language").click()
    until(page, lambda: "No answer yet" in page.locator("#unanswered").inner_text())
    # A file that is read ends the refusal before it.
    refuse(page, "model.pt", BINARY)
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
    page.evaluate(DROP, ["error.txt", f"{text} of which 1.15 GiB is free."])
    until(page, lambda: page.locator("#unanswered").is_hidden())
    assert page.locator("#tab-why").get_attribute("aria-selected") == "true"


def test_a_file_begins_with_nothing_said(opened: Any, tmp_path: Path) -> None:
    """The sample's tokens, price, batch, layout and card are not those of a file."""
    page = opened("")
    line = page.locator("#origin")
    assert line.inner_text().startswith(
        "A sample: llama-3.1-70b · 256 × h100-sxm5-80gb. Drop your file or change a setting."
    )
    drop(page, "config.json", CONFIG)
    assert flags_of(page).keys() == {"model"}
    assert page.locator("#verdict-days").count() == 0
    assert "Nothing was kept" in line.inner_text()
    file = tmp_path / "config.json"
    file.write_text(CONFIG)
    assert shown(page, "#verdict-fit .of [data-value]") == document(f"estimate {file}")["memory"]["total"]
    # A setting of the sample that is changed makes nothing else of it the user's own.
    page.go_back()
    until(page, lambda: line.is_visible() and "A sample" in line.inner_text())
    change(page, "seq-len-number", "4096")
    until(page, line.is_hidden)
    page.reload()
    page.wait_for_selector("#verdict-step")
    page.wait_for_selector("#flag-gpu", state="attached")
    drop(page, "job.yaml", JOB)
    assert flags_of(page).keys().isdisjoint({"gpu", "gpus", "tokens", "price", "pp"})
    assert flags_of(page)["seq-len"] == "2048"


def test_the_card_that_was_chosen_stays_and_that_is_said(opened: Any, tmp_path: Path) -> None:
    page = opened("")
    change(page, "gpu", "a100-sxm4-80gb")
    change(page, "gpus-number", "64")
    drop(page, "job.yaml", JOB)
    flags = flags_of(page)
    assert (flags["gpu"], flags["gpus"], flags["global-batch"]) == ("a100-sxm4-80gb", "64", str(2 * 4 * 64))
    assert "tokens" not in flags
    assert "Kept from before, as you chose it: GPU a100-sxm4-80gb, GPUs 64." in page.locator("#origin").inner_text()
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    want = document(f"estimate {file} --gpu a100-sxm4-80gb --gpus 64")
    assert shown(page, "#verdict-fit .of [data-value]") == want["memory"]["total"]
    assert shown(page, "#verdict-step .big") == want["time"]["step"]
    # The same once more, and once more after a change.
    page.evaluate(DROP, ["job.yaml", JOB])
    until(page, lambda: "is what is shown already: nothing has changed" in page.locator("#origin").inner_text())
    change(page, "tokens", "1B")
    drop(page, "job.yaml", JOB)
    assert flags_of(page) == flags
    assert "Kept from before" in page.locator("#origin").inner_text()


def test_a_job_without_a_model_waits_for_one(opened: Any, tmp_path: Path) -> None:
    page = opened("")
    told = refuse(page, "ds.json", DEEPSPEED)
    assert "ds.json is read as deepspeed" in told
    assert "it names no model: choose one, or drop its config.json" in told
    assert "none is chosen" not in told
    page.get_by_role("button", name="Choose a model").click()
    assert page.evaluate("document.activeElement.id") == "flag-model"
    drop(page, "config.json", CONFIG)
    flags = flags_of(page)
    assert (flags["zero"], flags["micro-batch"]) == ("3", "2")
    assert page.locator("#unanswered").is_hidden()
    # A model of the user's own stays with a job that names none; the way back leads to the run before.
    drop(page, "ds.json", DEEPSPEED.replace('"stage": 3', '"stage": 2'))
    assert flags_of(page) == {**flags, "zero": "2"}
    assert "Model config.json" in page.locator("#origin").inner_text()
    page.goto("about:blank")
    page = opened("")
    before = shown(page, "#verdict-fit .of [data-value]")
    refuse(page, "ds.json", DEEPSPEED)
    settled(page, lambda: page.get_by_role("button", name="Back to the run before").click())
    assert flags_of(page)["model"] == "llama-3.1-70b"
    assert shown(page, "#verdict-fit .of [data-value]") == before
    assert "A sample" in page.locator("#origin").inner_text()


def test_what_decides_is_asked_in_the_verdict(opened: Any) -> None:
    job = "olmo-3-7b --gpu h200-sxm-141gb --gpus 8"
    own, other = (
        json.loads(typed(f"estimate {job}{more} --json").out)["memory"] for more in ("", " --weights float32")
    )
    page = opened("model=olmo-3-7b&gpu=h200-sxm-141gb&gpus=8")
    line = page.locator(".question")
    text = " ".join(line.inner_text().split())
    first, second = (f"{memory['total'] / 2**30:.1f} GiB" for memory in (own, other))
    assert text == f"Depends on --weights: bfloat16 {first} FITS (assumed) float32 {second} DOES NOT FIT"
    big = page.locator("#verdict-fit .big span").first
    assert (big.inner_text(), big.get_attribute("class")) == ("Depends", "depends")
    for theme in ("light", "dark"):
        until(page, lambda theme=theme: page.evaluate("document.documentElement.dataset.theme") == theme)
        colours = {
            kind: page.evaluate(
                "(name) => getComputedStyle(document.documentElement).getPropertyValue(name)", f"--{kind}"
            )
            for kind in ("depends", "warn", "good", "bad", "surface", "depends-pale")
        }
        assert len(set(colours.values())) == len(colours)
        assert contrast(colours["depends"], colours["surface"]) >= 4.5
        assert contrast(colours["depends"], colours["depends-pale"]) >= 4.5
        page.locator("#theme").click()
    page.locator("#language").click()
    until(page, lambda: "取决于" in line.inner_text() and big.inner_text() == "视情况而定")
    settled(page, lambda: page.locator(".question [data-choice='float32']").click())
    assert flags_of(page)["weights"] == "float32"
    assert line.count() == 0
    assert big.get_attribute("class") == "bad"


def test_what_the_verdict_leaves_out_is_said_under_it(opened: Any) -> None:
    page = opened("model=qwen3-vl-8b&gpu=h100-sxm5-80gb&lora-rank=16")
    assert "Left out: vision_config (≥ 1.1 GiB)" in page.locator("#verdict-fit").inner_text()


def test_an_answer_that_comes_before_the_words_waits_for_them(usual: Any, address: str) -> None:
    page, held = usual.new_page(), []
    try:
        page.route("**/messages/en.json", lambda route: held.append(route))
        with page.expect_response("**/api/estimate"):
            page.goto(f"{address}#model=llama-3.1-8b&gpu=h100-sxm5-80gb")
        until(page, lambda: len(held) == 1)
        page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
        assert page.locator("#verdict .card").count() == 0
        held.pop().continue_()
        page.wait_for_selector("#verdict .card", state="attached")
        assert "fit." not in page.locator("#verdict").inner_text()
    finally:
        page.close()


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour.strip().lstrip("#")[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
