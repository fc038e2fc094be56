"""The site: every command of every page runs, every link leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import contextlib
import functools
import html.parser
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from ruamel.yaml import YAML

from command_line import Outcome, typed
from documented import FENCE, ROOT, commands, workplace
from driving import ARGUMENTS, CHROMIUM, NEEDS_CHROMIUM
from loadgauge.core.command_line.main import COMMANDS
from loadgauge.evidence.articles.article import article
from loadgauge.job_files.dialects import FILES, dialect

DOCS = ROOT / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.md")
    if path.parent.name != "decisions"
    and path.name not in ("equations.md", "articles.md", "asked.md", "learn.md", "all.md")
)  # Their commands are run by tests/test_docs.py, tests/evidence/articles, tests/journeys and tests/test_packaging.py.
ELSEWHERE = {
    "loadgauge estimate diffusers:": "diffusers, which is no dependency",
    "loadgauge serve": "tests/page drives the page",
    "loadgauge mcp": "waits for an assistant; tests/page/test_mcp.py is one",
    "loadgauge validate": "takes a minute; tests/evidence/validate predicts the same runs",
    "loadgauge compare": "takes a minute; tests/pytorch/compare compares",
    "loadgauge measure": "tests/pytorch/measure measures",
    "loadgauge calibrate": "needs a GPU; tests/pytorch/measure calibrates a simulated one",
    "loadgauge anchor": "needs a GPU; tests/pytorch/measure writes a file on a CPU",
    "loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --zero 3 --a": "a GPU's file; tests/core/plan/test_anchor.py",
    "loadgauge plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --anchor": "a GPU's file; tests/core/plan/test_anchor.py",
    "loadgauge trace": "takes PyTorch half a minute; tests/pytorch/trace traces, and one is run below",
    "loadgauge capture": "takes PyTorch some seconds each; tests/pytorch/capture captures, and one is run below",
    "loadgauge estimate bitnet.json --gpu rtx4090": "captures an adapted model; tests/pytorch/capture adapts",
    "loadgauge estimate llava/config.json": "captures a model with a tower; tests/pytorch/capture trains parts of one",
    "loadgauge estimate granite-speech/config.json": "captures a model of text and sound; tests/pytorch/capture has theirs",
    "loadgauge estimate t5/config.json": "captures a model of two texts; tests/pytorch/capture has their lengths",
    "loadgauge estimate wav2vec2-classifier/config.json": "captures a model of sound; tests/pytorch/capture has its length",
    "loadgauge plan bart/config.json": "captures a model of two texts; tests/pytorch/capture has their lengths",
    "loadgauge estimate train.py:train_step": "captures; tests/pytorch/capture/test_own_loops.py has such a step",
    "loadgauge plan llama-3.1-70b": "takes seconds; tests/core/plan plans, and tests/test_packaging.py runs the README's",
    "loadgauge plan --sweep sweep.toml": "starts processes; tests/core/plan sweeps",
}
"""Commands that are not run here, by how they begin, and who runs the like."""
RUN = {
    "loadgauge trace script.py:train", "loadgauge validate --operators",
    "loadgauge capture module.py:model --inputs module.py:batch --micro-batch 64",
}  # fmt: skip
"""Those of them that are."""
PLACEHOLDER = re.compile(r" (MODEL|FILE|NAME|NUMBER|DIALECT|\.\.\.)( |$)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader types: the files of `examples/`, and those of the planner's page."""
    place = workplace(tmp_path_factory.mktemp("site"))
    (place / "axolotl.yaml").write_bytes((DOCS / "examples" / "axolotl.yaml").read_bytes())
    return place


@functools.cache
def answer(line: str, place: Path) -> Outcome:
    """What a command of a page answers."""
    if line.startswith(("loadgauge trace", "loadgauge capture", "loadgauge saved", "loadgauge article 5")):
        pytest.importorskip("torch")
    with contextlib.chdir(place):
        return typed(line.removeprefix("loadgauge "))


def runs_here(line: str) -> bool:
    return line in RUN or not line.startswith(tuple(ELSEWHERE))


@pytest.mark.parametrize("name", [name for name in PAGES if name != "changes.md"])  # whose lines name forms of commands
def test_every_command_of_a_page_runs(name: str, folder: Path) -> None:
    for line in commands((DOCS / name).read_text(encoding="utf-8")):
        words = line.split()
        assert words[1] in COMMANDS or words[1] in ("--help", "--version"), line
        if (
            (len(words) == 2 and words[1] not in ("gpus", "models", "check"))
            or PLACEHOLDER.search(line)
            or not runs_here(line)
        ):
            assert typed(f"{words[1]} --help").code == 0  # A command that is only named.
            continue
        found = answer(line, folder)
        assert found.code in (0, 1), (line, found.err)
        assert len(found.out) > 20, line


QUESTIONS = {  # What a stranger asks, and what the answer must have in it.
    "Does it fit?": r"^FITS\b.*80 % range",
    "How long and how much money?": r"(?s)days.*GPU-hours",
    "On one card, with adapters?": r"QLoRA|lora",
    "The largest micro-batch?": r"micro-batch",
    "What are the activations made of?": r"(?s)attention.*MLP",
    "FLOPs of each operation?": r"FLOP",
    "Memory against batch and ZeRO stage?": r"(?s)zero.*\b3\b",
    "A model that only has a size?": r"(?s)10\.\d+ B|9\.\d+ B",
    "Which layout is best?": r"(?s)^BEST.*loadgauge estimate",
    "What must the network carry?": r"(?s)GB/s.*all-reduce",
    "I measured one node: what of eight?": r"By what you measured: .* instead of",
    "What does padding cost?": r"padding-free",
    "What would PyTorch allocate?": r"^PEAK",
    "What would nvidia-smi show?": r"nvidia-smi shows [\d.]+ GiB",
    "Does the evaluation fit?": r"evaluation",
    "Why did it run out of memory?": r"^CAUSE",
    "What is saved for backward?": r"(?s)saved|kept",
    "My job file?": r"read as axolotl",
    "The same job for another tool?": r"quantization_bit: 4",
    "Where are the articles wrong?": re.escape(article(2).title),
    "How many GPUs to serve it, with which context?": r"NEEDS THE FEWEST GPUS",
    "What does my job file waste?": r"job\.yaml \(axolotl",
    "Does my pull request still fit?": r"job\.yaml +ok",
}


def start_page() -> dict[str, str]:
    """The questions of the start page, with the command of each."""
    rows = re.findall(
        r"^\| \[(.*?)\]\(.*?\) \| `(loadgauge .*?)` \|$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    return {question.replace("`", ""): line for question, line in rows}


def test_the_start_page_has_each_question_once() -> None:
    assert list(start_page()) == list(QUESTIONS)
    assert len(set(start_page().values())) == len(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stranger_finds_the_answer_in_one_command(question: str, folder: Path) -> None:
    found = answer(start_page()[question], folder)
    assert re.search(QUESTIONS[question], found.out), found.out[:3000]


@pytest.mark.parametrize("path", sorted((DOCS / "zh").glob("*.md")), ids=lambda path: path.name)
def test_a_chinese_page_has_the_commands_of_the_english_one(path: Path) -> None:
    english = DOCS / path.name if (DOCS / path.name).exists() else DOCS / "tutorials" / path.name
    assert commands(path.read_text(encoding="utf-8")) == commands(english.read_text(encoding="utf-8"))


OF_PICTURES = ("diffusers", "finetrainers", "musubi-tuner", "simpletuner")


def test_every_dialect_has_a_section_with_a_command() -> None:
    text = (DOCS / "dialects.md").read_text(encoding="utf-8")
    sections = dict(part.partition("\n")[::2] for part in text.split("\n## ")[1:])
    assert len(sections) == len(FILES) + 1
    for name in FILES:
        assert (
            any(f"--to {name}\n" in section for section in sections.values())
            or "python" in dialect(name).syntaxes
            or (name in OF_PICTURES and name in map(str.lower, sections))  # `job.yaml` is of a language model
        )


def test_the_settings_of_the_tutorial_are_those_of_the_example() -> None:
    (block,) = (
        block["body"]
        for block in FENCE.finditer((DOCS / "tutorials" / "platform.md").read_text(encoding="utf-8"))
        if block["language"] == "toml"
    )
    assert block == (ROOT / "examples" / "loadgauge.toml").read_text(encoding="utf-8")


# The site as it is built


def hooks() -> ModuleType:
    """docs/hooks.py."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_output_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.delenv("LOADGAUGE_SITE_OUTPUT", raising=False)
    found = hooks()
    shown = found.COMMAND.sub(found._with_output, "```console\n$ loadgauge estimate gpt2 \\\n    --brief\n```")
    assert shown.startswith("```console\n$ loadgauge estimate gpt2 \\\n    --brief\n```\n\n```text\n")
    assert typed("estimate gpt2 --brief").out.rstrip() in shown
    monkeypatch.setenv("LOADGAUGE_SITE_OUTPUT", "0")
    assert "text" not in found.COMMAND.sub(found._with_output, "```console\n$ loadgauge estimate gpt2\n```")


def test_the_examples_of_the_hooks() -> None:
    import doctest

    assert doctest.testmod(hooks()).failed == 0


def test_a_figure_is_what_the_command_draws() -> None:
    pytest.importorskip("matplotlib")
    drawn = hooks().figure("loadgauge estimate gpt2 --gpu h100 --plot figure.svg --figure time")
    assert drawn.lstrip().startswith(b"<?xml")
    assert b"</svg>" in drawn


class Page(html.parser.HTMLParser):
    """Links, what is loaded, and the places that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.equations = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.ids |= {said[name] for name in ("id", "name") if name in said}
        self.equations += tag == "math"
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        if tag in ("script", "img", "iframe", "source") and said.get("src"):
            self.loaded.append(said["src"])
        if tag == "link" and said.get("rel") not in ("canonical", "alternate", "prev", "next"):
            self.loaded.append(said["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site as mkdocs builds it, without outputs."""
    for needed in ("mkdocs", "material", "latex2mathml"):
        pytest.importorskip(needed, reason="the site's tools come with the extra dev")
    place = tmp_path_factory.mktemp("built")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "LOADGAUGE_SITE_OUTPUT": "0", "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in place.rglob("*.html") if path.name != "404.html"}


@pytest.mark.long
def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = []
    for path, page in site.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists() or (
                parts.fragment and target in site and unquote(parts.fragment) not in site[target].ids
            ):
                broken.append((path.name, link))
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    assert len(site) > 50
    for path, page in site.items():
        assert not [place for place in page.loaded if urlsplit(place).netloc], path.name
    folder = min(site, key=lambda path: len(path.parts)).parent
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?https?:", sheet.read_text(encoding="utf-8")), sheet.name


def test_equations_are_drawn_without_a_script(site: dict[Path, Page]) -> None:
    by_name = {path.name: page for path, page in site.items()}
    assert by_name["theory.html"].equations > 20
    assert by_name["equations.html"].equations > 50
    for path in site:
        assert 'class="arithmatex"' not in path.read_text(encoding="utf-8"), path.name


def test_the_reference_has_every_public_name_and_command(site: dict[Path, Page]) -> None:
    import loadgauge

    by_name = {path.name: page for path, page in site.items()}
    assert {name.lower() for name in loadgauge.__all__} <= by_name["api.html"].ids
    assert set(COMMANDS) <= by_name["commands.html"].ids


def test_every_page_is_in_the_navigation() -> None:
    def leaves(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        parts = entry.values() if isinstance(entry, dict) else entry
        return {leaf for part in parts for leaf in leaves(part)}  # type: ignore[attr-defined]

    found = leaves(YAML(typ="safe").load(ROOT / "mkdocs.yml")["nav"])
    assert {*PAGES, "equations.md"} - {"articles.md"} <= found


@NEEDS_CHROMIUM
def test_search_from_a_folder_has_questions_before_decisions(site: dict[Path, Page]) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        page, troubles = browser.new_page(), []
        page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
        page.goto((min(site, key=lambda path: len(path.parts)).parent / "index.html").as_uri())
        for words, first in (
            ("out of memory", "questions/why.html"), ("zero 3", "questions/sweep.html"), ("显存", "zh/"), ("qlora", "asked.html"),
        ):  # fmt: skip
            page.locator("input.md-search__input").fill("")
            page.locator("input.md-search__input").press_sequentially(words)
            page.keyboard.press("End")  # what is entered without a key, as Chinese is here, is seen with the next one
            page.locator(f".md-search-result__item:first-child a[href*='{first}']").first.wait_for()
        browser.close()
    assert not troubles
