"""The generated pages are complete, and are what `make docs` writes."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from loadgauge.core.answers.equations.equation import QUANTITIES
from loadgauge.core.answers.equations.layers import LAYERS
from loadgauge.core.base.sources import cite
from loadgauge.core.families import model_types, models

DOCS = Path(__file__).parents[1] / "docs"


def generator() -> ModuleType:
    """docs/generate.py."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", generator().PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == generator().PAGES[name](), "run `make docs`"


def test_every_model_and_family_is_on_the_page() -> None:
    rows = [line.split(" | ") for line in generator().models_page().splitlines() if line.startswith("| ")][1:]
    assert {row[0].removeprefix("| ") for row in rows} == set(model_types())
    assert sum("[" in row[1] or "(" in row[1] for row in rows if len(row) > 1) == len(models())


KORTHIKANTI = {  # as printed, with s b h written b h s
    "1": "b*h*s*(34 + 5*a*s/h)",
    "2": "b*h*s*(10 + 24/t + 5*a*s/(h*t))",
    "4": "b*h*s/t*(34 + 5*a*s/h)",
    "6": "34*b*h*s/t",
}


@functools.cache
def entries() -> dict[str, dict[str, str]]:
    """The page of equations: of each section and heading, what is said there."""
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = {}
    for section in page.split("\n## ")[1:]:
        title, *rest = section.split("\n### ")
        found[title.partition("\n")[0]] = {entry.partition("\n")[0]: entry for entry in rest}
    return found


@pytest.mark.parametrize("number", KORTHIKANTI)
def test_the_equations_everybody_knows_are_named(number: str) -> None:
    named = f"(Korthikanti et al., equation {number})"
    (entry,) = (entry for title, entry in entries()["GPT: `--layer gpt`"].items() if title.endswith(named))
    assert KORTHIKANTI[number] in entry.replace("= ", "").splitlines()
    assert f"Source: `korthikanti2022`, equation {number}." in entry


def test_every_quantity_of_every_layer_is_on_the_page() -> None:
    layers = {title: found for title, found in entries().items() if "--layer" in title}
    assert {name for title in layers for name in LAYERS if f"`{name}`" in title or f" {name}`" in title} == set(LAYERS)
    for title, found in layers.items():
        told = {heading.partition(" ")[0] for heading in found}
        # Where all parameters are active, and nothing is computed twice, there is nothing more to say.
        dense = {"active-params", "model-active-params"} if "Experts" not in title and "Latent" not in title else set()
        assert set(QUANTITIES) - told <= dense | {"states", "recompute-flops"}
    assert {heading.partition(" ")[0] for heading in entries()["Model states"]} == {"states"}


def test_every_equation_has_its_command_letters_and_source() -> None:
    cited = {line.partition("`")[2].partition("`")[0] for line in entries_of_sources()}
    for section, found in entries().items():
        for heading, entry in found.items():
            assert f"```\nloadgauge equation {heading.partition(' (')[0]}" in entry
            assert entry.count("$") % 2 == 0
            assert entry.count("$") >= 2
            assert "\nwhere " in entry
            source = entry.rpartition("\nSource: ")[2]
            assert {word for place, word in enumerate(source.split("`")) if place % 2} <= cited, section
            assert "`" in source


def entries_of_sources() -> list[str]:
    """The lines of the list of works cited."""
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    return [line for line in page.partition("\n## Sources\n")[2].splitlines() if line]


def test_every_citation_is_whole() -> None:
    for line in entries_of_sources():
        key = line.split("`")[1]
        assert line == f"- `{key}`: {cite(key)}"


def test_the_generator_s_own_examples() -> None:
    import doctest

    assert doctest.testmod(generator()).failed == 0
