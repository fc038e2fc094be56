"""The page's files: every text is in both languages, nothing is fetched from elsewhere, what others wrote has its licence."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, get_args

import pytest

from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.definitions.training.tasks import TASKS, Objective, Phase
from loadgauge.page.panels.catalogue import catalogue

STATIC = Path(__file__).parents[2] / "src" / "loadgauge" / "page" / "static"
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted((STATIC / "js").glob("*.js"))}
CHINESE = re.compile(r"[一-鿿]")


def messages(language: str) -> dict[str, Any]:
    """The file of a language."""
    found: dict[str, Any] = json.loads((STATIC / "messages" / f"{language}.json").read_text(encoding="utf-8"))
    return found


def test_both_languages_have_every_text() -> None:
    english, chinese = messages("en"), messages("zh")
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        if isinstance(text, str):
            assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", chinese[key])), key
            assert chinese[key].strip(), key
    same = {key for key, text in chinese.items() if isinstance(text, str) and not CHINESE.search(text)}
    for key in same:
        assert not re.search(r"[A-Za-z]{4,} [a-z]{3,}", chinese[key]), f"{key} is not translated"


def test_every_text_that_is_asked_for_is_there() -> None:
    words, asked = messages("en"), set()
    for text in SCRIPTS.values():
        asked |= set(re.findall(r'\bt\("([^"]+)"', text))
        asked |= {key for pair in re.findall(r'\bt\([^"`()]*\? "([^"]+)" : "([^"]+)"', text) for key in pair}
    assert len(asked) > 100
    assert asked - words.keys() == set()
    for name, text in SCRIPTS.items():
        for stem in re.findall(r"\bt\(`([a-z_]+)\.\$\{", text):
            assert any(key.startswith(f"{stem}.") for key in words), f"{name}: {stem}"
    assert {f"flag.{flag['name']}" for flag in catalogue()["flags"]} - words.keys() == {"flag.hub"}


def test_every_flag_of_the_command_has_a_control() -> None:
    """Those that are not named in the page's script are put into the group of their field."""
    offered = {flag["name"]: flag for flag in catalogue()["flags"]}
    flags = {name.replace("_", "-") for name in Job.__struct_fields__ if fields()[name].group != "posttrain"}
    files = {name.replace("_", "-") for name, field in fields().items() if field.group == "file"} - {"road"}
    assert flags - {"model", *files} == set(offered)  # files are dropped, not named
    text = SCRIPTS["fields.js"]
    named = set(re.findall(r'(?:flag: |axis\()"([^"]+)"', text))
    assert named - set(offered) == {"model", "method", "~ranges"}
    assert re.search(r"LEFT = (\[.*?\]);", text)[1] == '["qlora", "hub"]'  # type: ignore[index]
    groups = set(re.findall(r"^  (\w+): \[", text, re.MULTILINE)) | {"money", "file"}
    assert {flag["group"] for flag in offered.values()} <= groups
    for name in re.findall(r'flag: "([^"]+)", kind: "(?:choice|suggest)"', text):
        assert offered[name]["choices"], name


def test_the_page_offers_every_task_and_names_every_phase() -> None:
    words, served = messages("zh")["terms"], catalogue()["posttrain"]
    rows = {row["name"]: row for row in served["tasks"]}
    assert rows.keys() == TASKS.keys()
    for name, task in TASKS.items():
        others = {role.field for role in task.roles} - {"model"}
        assert {one.replace("-", "_") for one in rows[name]["models"]} == others
        assert rows[name]["forms"] == list(task.objectives)
    # The script has no list of its own: what it shows of a task, it asks the record.
    assert not [
        name
        for name in TASKS
        if f'"{name}"' in SCRIPTS["posttrain.js"].replace('task: "grpo"', "").replace('=== "opd"', "")
    ]
    assert {f"reference.{one}" for one in ("usual", *served["references"])} <= messages("en").keys()
    assert {f"form.{one}" for one in ("usual", *get_args(Objective))} <= messages("en").keys()
    assert {role.name for task in TASKS.values() for role in task.roles} | {*get_args(Phase)} <= words.keys()


def test_patterns_of_the_library_s_words_can_be_used() -> None:
    for pattern, form in messages("zh")["patterns"]:
        groups = re.compile(pattern).groups
        assert all(int(number) <= groups for number in re.findall(r"\$(\d)", form)), pattern


def test_nothing_comes_from_elsewhere() -> None:
    for path in [STATIC / "index.html", *(STATIC / "js").glob("*.js"), *(STATIC / "css").glob("*.css")]:
        text = path.read_text(encoding="utf-8")
        outside = [one for one in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text) if "www.w3.org" not in one]
        assert outside == [], path.name
        assert not re.search(r"\bon\w+=\"|<script>|\beval\(|new Function", text), path.name
    assert (STATIC / "index.html").read_text(encoding="utf-8").count("__TOKEN__") == 1


def test_files_are_small_and_say_what_they_hold() -> None:
    for name, text in SCRIPTS.items():
        assert text.startswith("/**"), name
        assert text.count("\n") < 400, name


def test_scripts_import_one_another_in_no_circle() -> None:
    imports = {name: set(re.findall(r'from "\./(\w+\.js)"', text)) for name, text in SCRIPTS.items()}
    assert set().union(*imports.values()) <= SCRIPTS.keys()
    assert list(TopologicalSorter(imports).static_order())[-1] == "main.js"


def test_what_others_wrote_has_its_licence() -> None:
    vendor = STATIC / "vendor"
    said = (vendor / "README.md").read_text(encoding="utf-8")
    for folder in (path for path in vendor.iterdir() if path.is_dir()):
        assert folder.name in said
        assert list(folder.glob("LICENSE*"))
    assert "6.1.0" in said
    assert "Apache" in (vendor / "echarts" / "NOTICE").read_text(encoding="utf-8")
    assert (vendor / "echarts" / "echarts.min.js").stat().st_size < 600_000
    axe = Path(__file__).parent
    assert "Mozilla Public License" in (axe / "axe-LICENSE").read_text(encoding="utf-8")


def test_colours_of_the_parts_are_told_apart_by_everybody() -> None:
    """In both themes the four colours differ in lightness or hue, also without red, green or blue cones."""
    text = (STATIC / "css" / "tokens.css").read_text(encoding="utf-8")
    light, dark = text.split(':root[data-theme="dark"]')
    for block in (light, light + dark):
        colours = dict(re.findall(r"--(\w[\w-]*): (#[0-9a-f]{6});", block))
        four = [linear(colours[name]) for name in ("states", "activations", "temporary", "outside")]
        for cones in DICHROMATS:
            seen = [[sum(row[at] * one[at] for at in range(3)) for row in cones] for one in four]
            for first in range(4):
                for second in range(first):
                    apart = sum((a - b) ** 2 for a, b in zip(lab(seen[first]), lab(seen[second]), strict=True)) ** 0.5
                    assert apart > 14, (first, second)
        for part in ("weights", "gradients", "optimizer", "activations", "loss", "gathered", "transient", "outside"):
            assert contrast(linear(colours[part]), linear(colours[f"on-{part}"])) >= 4.5, part


DICHROMATS = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)
"""Trichromats; protanopia, deuteranopia, tritanopia: Machado, Oliveira, Fernandes 2009, table 1, severity 1.0."""


def linear(colour: str) -> list[float]:
    """Linear red, green and blue of a colour (IEC 61966-2-1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(colour: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of linear red, green and blue."""
    red, green, blue = (max(0.0, part) for part in colour)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: list[float], other: list[float]) -> float:
    """WCAG 2.2's contrast of two colours."""
    light = [0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05 for red, green, blue in (one, other)]
    return max(light) / min(light)


# -- what the library says, in Chinese ---------------------------------------------------------------------------------

PACKAGE = STATIC.parents[1]
REFUSING = (
    *(f"core/{folder}" for folder in ("base/lengths", "definitions", "families", "layers", "estimate", "answers/why")),
    *(f"core/{folder}" for folder in ("post_training", "resolve", "plan")),
    "fleets",
    "job_files",
    "page",
)
"""Folders whose errors the page can show."""
ELSEWHERE = (
    "core/plan/space/grid.py",
    "core/plan/space/estimates.py",
    "core/plan/inverse.py",
    "core/families/hub.py",
    "core/definitions/hardware/hardware.py",
    "core/definitions/hardware/calibration.py",
    "core/estimate/schedule",
    "core/plan/advise",
    "fleets/text",
    "fleets/layouts.py",
    "fleets/command.py",
    "job_files/commands",
    "job_files/convert.py",
    "job_files/export.py",
    "page/command.py",
)
"""What the page never runs, or what only a damaged data file brings about."""
ERRORS = {
    "ConfigError",
    "LayoutError",
    "NotModelled",
    "NotStated",
    "NotMeasured",
    "NothingFits",
    "Refused",
    "error_body",
}


def template(node: ast.expr | None) -> str | None:
    """A text with {} for what it names; None where the text is not written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text if (text := template(side)) is not None else "{}" for side in (node.left, node.right))
    return None


def refusals(path: Path) -> Iterator[str]:
    """The texts of the errors that a module raises."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            named = {"refuse"} if isinstance(node.func, ast.Name) else {"wrong", "unmodelled"}
            place = 1 if name in named | {"Refused"} else 0
            if name in ERRORS | named and len(node.args) > place:
                yield from filter(None, [template(node.args[place])])
        elif isinstance(node, ast.Yield) and path.name == "layout.py":
            yield from filter(None, [template(node.value)])


@pytest.mark.slow
def test_every_refusal_is_translated() -> None:
    known = json.loads((STATIC / "messages" / "errors.zh.json").read_text(encoding="utf-8"))
    said = {
        text: path.name
        for folder in REFUSING
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(ELSEWHERE)
        for text in refusals(path)
        if re.search("[a-z]{2,}", text.replace("{}", ""))
    }
    assert len(said) > 300
    assert {text: name for text, name in said.items() if text not in known} == {}
    for text, form in known.items():
        assert CHINESE.search(form), text
        assert sorted(re.findall(r"\{(\d*)\}", form)) in (
            ["" for _ in range(text.count("{}"))], [str(at) for at in range(text.count("{}"))]
        ), text  # fmt: skip


def in_chinese(text: str) -> str:
    """As the page's `term` has it."""
    words = messages("zh")
    if text in words["terms"]:
        return str(words["terms"][text])
    for pattern, form in words["patterns"]:
        if found := re.fullmatch(pattern, text):
            return re.sub(r"\$(\d)", lambda number: in_chinese(found[int(number[1])]), form)
    return text


@pytest.mark.parametrize("other", ["en", "zh"])
def test_the_page_in_one_language_is_less_than_a_mebibyte(other: str) -> None:
    """Of the messages, a visitor loads those of one language; what tells of licences no page asks for."""
    beside = re.compile(r"LICENSE|NOTICE|README|entry\.js|single\.|table\.js")
    loaded = (
        path for path in STATIC.rglob("*")
        if path.is_file() and not beside.match(path.name) and not path.name.endswith(f"{other}.json")
    )  # fmt: skip
    assert sum(path.stat().st_size for path in loaded) < 2**20


def test_what_why_answers_is_translated() -> None:
    """Causes, places and remedies of an error's text."""
    from loadgauge.pytorch.why.causes import ADVICE, TOOLS
    from loadgauge.pytorch.why.traceback import PHASES, TENSORS

    said = {*ADVICE, *(line for lines in ADVICE.values() for line in lines), *(words for _, words in TOOLS)}
    said |= {text for rule in TENSORS for text in (rule.phase, rule.tensor, rule.remedy) if text}
    said |= {name for name, _ in PHASES}
    assert {text for text in said if not CHINESE.search(in_chinese(text))} == set()


def test_every_figure_has_a_script_or_a_form_that_one_draws() -> None:
    """A script draws a figure by its name, with its words in the messages; `figure.js` draws all others by their form."""
    forms = set(re.findall(r"\w+", re.search(r"const FORMS = \{(.*?)\}", SCRIPTS["figure.js"])[1]))  # type: ignore[index]
    needs = set(re.findall(r"(\w+): \"", re.search(r"const NONE = \{(.*?)\}", SCRIPTS["figure.js"])[1]))  # type: ignore[index]
    own = set(re.findall(r"\w+", re.search(r"const ESTIMATED = \[(.*?)\]", SCRIPTS["main.js"])[1]))  # type: ignore[index]
    tabs = set(re.findall(r"^  (\w+): \[", SCRIPTS["main.js"], re.MULTILINE))
    for row in catalogue()["figures"]:
        if row["name"] in own:
            assert {f"{row['name']}.title"} <= messages("en").keys()
        else:
            assert row["form"] in forms
            assert CHINESE.search(row["title"]["zh"])
            assert not row["needs"] or row["needs"] in needs
        assert {*row["shown"]} <= {"single", "notebook", *tabs}


def test_remedies_are_translated() -> None:
    """Every text of a change, in the modules that make them."""
    said = set()
    for name in ("changes.py", "task_fits.py"):
        tree = ast.parse((PACKAGE / "core" / "plan" / "advise" / name).read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        said |= {
            node.value.strip()
            for node in texts
            if id(node) not in told and re.fullmatch(r"[a-z0-9 ,;-]+( [a-z0-9-]+){2,}", node.value)
        }
    assert len(said) > 25
    assert {text for text in said if not CHINESE.search(in_chinese(text))} == set()
