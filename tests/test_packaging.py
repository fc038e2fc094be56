"""What is published: built twice to the same bytes, small, complete, and enough by itself."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import loadgauge
from documented import ROOT, commands, workplace

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = loadgauge.__version__
DATE = "1700000000"
SOURCES = [*PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"], "pyproject.toml", ".gitignore"]


def build(source: Path, target: Path, mask: int) -> dict[str, Path]:
    """What the build backend makes of a source tree: the source distribution and the wheel."""
    pytest.importorskip("hatchling", reason="the build backend comes with the extra dev")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=source, check=True, capture_output=True, umask=mask, env={**os.environ, "SOURCE_DATE_EPOCH": DATE},
    )  # fmt: skip
    return {path.suffix: path for path in target.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
        else:
            shutil.copy(place, tree / name)
    return build(tree, tmp_path_factory.mktemp("built"), 0o022)


@pytest.mark.long
def test_the_source_distribution_builds_the_same_bytes_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    """Another folder, other times and permissions of the files; only what was published is at hand."""
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (tmp_path / "source").iterdir()
    for number, path in enumerate(source.rglob("*.py")):
        os.utime(path, (number, number))
    again = build(source, tmp_path / "again", 0o077)
    for kind in (".whl", ".gz"):
        assert again[kind].read_bytes() == built[kind].read_bytes(), kind


def test_the_wheel_is_small_and_whole(built: dict[str, Path]) -> None:
    wheel = built[".whl"]
    assert wheel.name == f"loadgauge-{VERSION}-py3-none-any.whl"
    assert wheel.stat().st_size < 5e6
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        said = email.message_from_string(archive.read(f"loadgauge-{VERSION}.dist-info/METADATA").decode())
    own = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "loadgauge").rglob("*") if path.is_file()}
    assert {name for name in own if not name.endswith(".pyc")} <= names
    assert f"loadgauge-{VERSION}.data/data/share/man/man1/loadgauge.1" in names
    assert f"loadgauge-{VERSION}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if "tests/" in name or ".pyc" in name]
    assert (said["Version"], said["License-Expression"]) == (VERSION, "Apache-2.0")


def test_twine_has_nothing_to_say(built: dict[str, Path]) -> None:
    pytest.importorskip("twine", reason="it comes with the extra dev")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


ALONE = """
import importlib.abc, json, shlex, sys

class Alone(importlib.abc.MetaPathFinder):
    "An environment that has the wheel's own dependencies and nothing else."
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ALLOWED = set(sys.argv[2].split(","))
sys.meta_path.insert(0, Alone())
# What asks whether a library is there gets the same answer as what imports it.
import importlib.util
found = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return found(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec

import contextlib, io
import loadgauge
from loadgauge.core.command_line.main import run
assert loadgauge.__file__.startswith(sys.argv[1]), loadgauge.__file__
answers = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(shlex.split(line)[1:])
    answers.append([line, code, len(out.getvalue()), err.getvalue()])
print(json.dumps(answers))
"""
NEEDS = {
    "trace": "torch",
    "capture": "torch",
    "compare": "torch",
    "saved": "torch",
    "loadgauge serve": "web",
    "mcp": "mcp",
    "--plot": "plot",
    "article 5": "torch",
    "bitnet.json": "torch",
    "module.py:": "torch",
}
"""What asks for an extra, by the words of a command."""
ELSEWHERE = {"loadgauge validate": "takes a minute; tests/evidence/validate predicts the same runs"}


def dependencies() -> set[str]:
    """The packages that the project depends on, as they are imported, with those that these depend on."""
    from importlib.metadata import requires

    imported = {"ruamel.yaml": "ruamel", "markdown_it_py": "markdown_it"}
    open_, found = [re.split(r"[ <>=~;\[]", one)[0] for one in PROJECT["project"]["dependencies"]], set()
    while open_:
        name = open_.pop()
        module = imported.get(name.replace("-", "_"), name.replace("-", "_"))
        if module not in found:
            found.add(module)
            open_ += [re.split(r"[ <>=~;\[]", one)[0] for one in requires(name) or () if ";" not in one]
    return found


@pytest.mark.long
def test_the_wheel_alone_answers_the_readme(built: dict[str, Path], tmp_path: Path) -> None:
    """Unpacked away from the source tree, with its dependencies only. What needs an extra names it."""
    with zipfile.ZipFile(built[".whl"]) as archive:
        archive.extractall(tmp_path / "wheel")
    workplace(tmp_path / "jobs")
    texts = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/questions/all.md"))
    asked = [line for line in commands(texts) if line not in ELSEWHERE]
    assert len(asked) > 30
    words = ["-c", ALONE, str(tmp_path / "wheel"), ",".join([*dependencies(), "loadgauge"])]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path / "jobs", input=json.dumps(asked), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "wheel"), "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    for line, code, printed, error in answers:
        extra = next((extra for word, extra in NEEDS.items() if word in line), None)
        if extra is not None:
            assert code == 2, line
            assert f"'loadgauge[{extra}]'" in error, line
        else:
            assert code in (0, 1), (line, error)
            assert printed > (40 if " lint " in line else 200), line  # a sound file is one line


def test_the_version_is_said_everywhere_alike() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == VERSION
    assert headings == sorted(headings, reverse=True)


def test_the_conda_recipe_has_the_dependencies_of_the_project() -> None:
    from ruamel.yaml import YAML

    recipe = YAML(typ="safe").load(ROOT / "packaging" / "conda" / "meta.yaml")
    assert recipe["package"] == {"name": "loadgauge", "version": VERSION}
    assert [line.replace(" ", "") for line in recipe["requirements"]["run"][1:]] == PROJECT["project"]["dependencies"]
    assert recipe["requirements"]["run"][0].replace(" ", "") == f"python{PROJECT['project']['requires-python']}"
    assert [line.replace(" ", "") for line in recipe["requirements"]["host"][2:]] == PROJECT["build-system"]["requires"]
    (entry,) = recipe["build"]["entry_points"]
    assert entry.replace(" ", "") == f"loadgauge={PROJECT['project']['scripts']['loadgauge']}"


def test_the_image_installs_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    assert 'ENTRYPOINT ["loadgauge"]' in text
    assert all(command.split()[1] in ("estimate", "check", "serve") for command in commands(f"```\n{text}\n```"))


def test_the_man_page_has_every_command_and_is_roff() -> None:
    """That it is what `make docs` writes is tested by tests/test_docs.py."""
    import doctest
    import importlib.util

    from loadgauge.core.command_line.main import COMMANDS
    from loadgauge.core.definitions.job.job import fields

    spec = importlib.util.spec_from_file_location("docs_man", ROOT / "docs" / "man.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0
    page = (ROOT / "docs" / "loadgauge.1").read_text(encoding="utf-8")
    assert all(f'.SS "loadgauge {name} ' in page for name in COMMANDS)
    for name in fields():
        assert name == "model" or f"\\-\\-{name}".replace("_", "\\-") in page, name
    groff = shutil.which("groff")
    if groff is not None:
        done = subprocess.run([groff, "-ww", "-man", "-Tutf8"], input=page, capture_output=True, text=True, check=True)
        assert not done.stderr
        assert "EXIT STATUS" in re.sub(r".\x08", "", done.stdout)  # bold letters are struck twice
