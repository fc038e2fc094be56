"""One file without a server, in a real browser from disk: its table answers as the commands do, and nothing leaves it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import typed

pytest.importorskip("playwright.sync_api", reason="the page is driven with playwright, which is missing")

from driving import NEEDS_CHROMIUM, document, shown
from loadgauge.core.base.files import write_text
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.page import single

JOB = Job("gpt2", gpu="a100-sxm4-80gb", gpus=8, seq_len=1024, tokens="1B", price=2.0)
AXES = {
    "micro_batch": (1, 2),
    "seq_len": (1024, 512),
    "zero": (0, 3),
    "recompute": ("none", "full"),
    "gpu": ("a100-sxm4-80gb", "t4"),
}
AXE = Path(__file__).parent / "axe.min.js"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small run, with a small table."""
    given = resolve_job(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "values", lambda *_: AXES)
        file = tmp_path_factory.mktemp("one") / "run.html"
        text, count = single.page(given, given.estimate())
    assert count == 16 + 5
    write_text(file, text)
    return file


@pytest.fixture(scope="module")
def reader(browser: Any) -> Iterator[Any]:
    """A visitor without a network."""
    made = browser.new_context(locale="en-US", offline=True)
    yield made
    made.close()


@pytest.fixture
def read(reader: Any, written: Path) -> Iterator[Any]:
    """The file as a browser shows it; an error on the console or a request fails the test."""
    page, troubles = reader.new_page(), []
    page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or troubles.append(sent.url))
    page.goto(written.as_uri())
    page.wait_for_selector("#verdict .card")
    yield page
    page.close()
    assert not troubles


def move(page: Any, axis: str, place: int) -> None:
    """Moves a slider to a place in its row of values."""
    page.evaluate(
        "([id, at]) => { const one = document.querySelector(id); one.value = at; one.dispatchEvent(new Event('input')); }",
        [f"#flag-{axis}", place],
    )


def same(page: Any) -> None:
    """What is shown is what the command that is shown beside it prints."""
    said = document(page.inner_text("#command").removeprefix("loadgauge "))
    assert shown(page, "#verdict-fit .of [data-value]") == pytest.approx(said["memory"]["total"], rel=1e-5)
    assert shown(page, "#verdict-step .big") == pytest.approx(said["time"]["step"], rel=1e-5)
    assert shown(page, "#verdict-cost .big") == pytest.approx(said["time"]["cost"], rel=1e-5)


@NEEDS_CHROMIUM
def test_sliders_answer_as_the_command_beside_them(read: Any) -> None:
    same(read)
    assert read.locator(".block").count() > 5
    read.locator(".block[data-id='weights']").click()
    read.wait_for_selector("#drawer[open] section")
    read.keyboard.press("Escape")
    for axis, place in (("micro-batch", 1), ("seq-len", 0), ("zero", 1)):
        move(read, axis, place)
        read.wait_for_selector("#verdict .delta")
    read.select_option("#flag-recompute", "full")
    same(read)
    assert "vs written" in read.inner_text("#verdict-fit")
    assert read.locator("#panel-phases .value").count() > 3
    read.locator(".block").first.click()
    read.wait_for_selector("#drawer[open] .bad")
    assert "--explain" in read.inner_text("#drawer")


@NEEDS_CHROMIUM
def test_the_table_says_where_it_ends(read: Any) -> None:
    for axis, value in (("gpu", "t4"), ("recompute", "full")):
        read.select_option(f"#flag-{axis}", value)
    assert read.locator("#problem").is_hidden()
    for axis in ("micro-batch", "zero"):
        move(read, axis, 1)
    read.wait_for_selector("#problem:not([hidden])")
    assert "--gpu t4" in read.inner_text("#problem code")
    assert typed(read.inner_text("#problem code").removeprefix("loadgauge ")).code in (0, 1)
    assert "…" in read.inner_text("#flag-recompute option[value='none']")
    read.click("#back")
    read.wait_for_selector("#problem", state="hidden")
    same(read)


def test_a_module_of_its_own_has_no_length_to_move() -> None:
    given = resolve_job(JOB)
    own = given.estimate()
    assert {"seq_len", "recompute"} < set(single.values(given, own))
    module = SimpleNamespace(layout=own.layout, model=SimpleNamespace(own=SimpleNamespace(has_length=False)))
    assert list(single.values(given, module)) == ["micro_batch", "zero", "gpu"]  # type: ignore[arg-type]


@NEEDS_CHROMIUM
def test_a_run_after_pre_training_has_a_file_too(reader: Any, tmp_path: Path) -> None:
    """Its sliders are the task's own, and each place of them answers as the command beside them."""
    file = tmp_path / "grpo.html"
    asked = "gpt2 --task grpo --gpu a100-sxm4-80gb --gpus 2 --prompts 8 --samples 4 --prompt-len 64 --answers 128 --rollout hf"
    told = typed(f"estimate {asked} --html {file}")
    assert (told.code, "answers in one file" in told.err) == (0, True)
    page, troubles = reader.new_page(), []
    page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("#panel-posttrain .lanes")
    for axis, place in (("samples", 2), ("zero", 2)):
        move(page, axis, place)
        page.wait_for_selector("#panel-posttrain .delta")
        said = document(page.inner_text("#command").removeprefix("loadgauge "))
        update = next(each for each in said["time"]["phases"] if each["name"] == "update")
        assert update["seconds"] in [
            pytest.approx(float(each.get_attribute("data-value")), rel=1e-5)
            for each in page.locator("#panel-posttrain .lanes .value").all()
        ]
    page.click("#panel-posttrain button.act")
    assert page.locator("#panel-posttrain tbody tr").count() == len(said["memory"]["phases"])
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"] == []
    page.close()
    assert not troubles


@NEEDS_CHROMIUM
@pytest.mark.parametrize("planned", [False, True])
def test_a_server_has_a_file_too(reader: Any, tmp_path: Path, planned: bool) -> None:
    """Its sliders are a server's own, of an estimate and of a plan's best choice; each place answers as the command beside it."""
    file = tmp_path / "server.html"
    asked = "gpt2 --task generate --gpu t4 --gpus 2 --context 256 --answer 32 --server vllm --weight-format fp16"
    told = typed(f"{'plan' if planned else 'estimate'} {asked} --batch 4 --html {file}")
    assert (told.code, "answers in one file" in told.err) == (0, True)
    page, troubles = reader.new_page(), []
    page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("#panel-served [data-time]")
    for axis, place in (("batch", 4), ("context", 2)):
        move(page, axis, place)
        page.wait_for_selector("#panel-served .delta")
        said = document(page.inner_text("#command").removeprefix("loadgauge "))
        for name, seconds in (("first", said["served"]["first"]), ("token", said["served"]["token"])):
            value = page.locator(f"#panel-served [data-time={name}]").get_attribute("data-value")
            assert float(value) == pytest.approx(seconds, rel=1e-5)
        held = page.locator("#panel-served span[data-value]").first.get_attribute("data-value")
        assert float(held) == pytest.approx(said["memory"]["total"], rel=1e-5)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"] == []
    page.close()
    assert not troubles


def test_a_plan_of_a_task_draws_its_best_choice(tmp_path: Path) -> None:
    told = typed(f"plan gpt2 --task dpo --gpu t4 --gpus 1 --html {tmp_path / 'dpo.html'}")
    assert "answers in one file" in told.err
    for line, code in (
        ("--find seq-len", 0),
        ("--seq-len 1024 --micro-batch 512 --global-batch 512", 1),
    ):  # what is found; the nearest miss
        told = typed(f"plan gpt2 --gpu t4 --gpus 1 {line} --html {tmp_path / 'found.html'}")
        assert (told.code, "answers in one file" in told.err) == (code, True)
    told = typed(f"plan gpt2 --gpu t4 --gpus 8 --tokens 1B --find spares --html {tmp_path / 'none.html'}")
    assert (told.code, "leave out --find" in told.err) == (2, True)


@NEEDS_CHROMIUM
def test_it_is_for_everybody(read: Any) -> None:
    read.evaluate(AXE.read_text(encoding="utf-8"))
    for width, buttons in ((1440, ()), (390, ("#theme", "#language"))):
        read.set_viewport_size({"width": width, "height": 840})
        for button in buttons:
            read.click(button)
        read.wait_for_function("(zh) => document.documentElement.lang.startsWith('zh') === zh", arg=bool(buttons))
        found = read.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]] == []
        assert read.evaluate("document.documentElement.scrollWidth") <= width
        verdict, sliders = (read.locator(place).bounding_box() for place in ("#verdict", "#settings"))
        assert sliders["y"] >= verdict["y"] + verdict["height"] if width < 900 else sliders["x"] < verdict["x"]
    printed = read.pdf(prefer_css_page_size=True, print_background=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


def test_nothing_is_fetched_and_it_is_small(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert len(text) < 1_500_000
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe" not in policy[1]
    assert set(re.findall(r"(?:src|href)=\"(?!data:|#)([^\"]*)", text)) == set()


def test_the_page_saves_the_same_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="the page needs the extra `web`")
    from loadgauge.page.inputs.uploads import Uploads
    from loadgauge.page.server.handlers import Export, export

    monkeypatch.setattr(single, "values", lambda *_: {"micro_batch": (1, 2)})
    flags = {"model": "gpt2", "gpu": "a100-sxm4-80gb", "gpus": "8", "seq-len": "1024"}
    saved = export(Export(flags=flags, dialect="html"), Uploads())
    assert saved["filename"].endswith(".html")
    assert saved["text"][:200] == written.read_text(encoding="utf-8")[:200]


def test_without_a_card_or_where_it_cannot_be_written(tmp_path: Path) -> None:
    given = resolve_job(Job("gpt2", seq_len=1024))
    assert "gpu" not in single.values(given, given.estimate())
    told = typed(f"estimate gpt2 --html {tmp_path / 'none' / 'run.html'} --sweep zero=0,1")
    assert (told.code, "leave out --sweep" in told.err) == (2, True)
    told = typed(f"estimate gpt2 --task dpo --html {tmp_path}")
    assert (told.code, "cannot be written" in told.err) == (2, True)


def test_what_does_not_fit_says_what_would() -> None:
    """The mildest change that the command line names; a run that fits has none."""
    for job, fits in ((JOB, True), (JOB.replace(gpu="t4", model="llama-3.2-1b"), False)):
        setup = resolve_job(job)
        flags = single.remedy(setup, setup.estimate())
        assert (flags == "") == fits
        if flags:
            assert typed(f"{job.command().removeprefix('loadgauge ')} {flags}").out.startswith("FITS")
