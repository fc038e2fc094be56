"""Captures of scripts are kept by the contents of the files that they read."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import document
from loadgauge.pytorch.capture import road
from loadgauge.pytorch.capture.lists.store import reading, seals, unchanged

PARTS = "WIDTH = 64\n"
SCRIPT = """
import torch
from parts import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = self.body(x)
        return self.head(x[x.sum(-1) > 0]).square().mean()

def model():
    return Net()

def batch(b):
    return torch.randn(b, WIDTH)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "net.py").write_text(SCRIPT)
    (tmp_path / "sizes.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("parts", None)


def test_what_a_script_reads_is_what_its_capture_is_kept_by(folder: Path) -> None:
    (folder / "main.py").write_text("import json, parts\njson.load(open('sizes.json'))\n")
    with reading() as paths:
        runpy.run_path("main.py")
    files = seals(paths)
    assert {"main.py", "parts.py", "sizes.json"} <= {os.path.basename(path) for path in files}
    assert not any(name in path for path in files for name in ("site-packages", os.path.dirname(os.__file__)))
    assert unchanged(files)
    (folder / "sizes.json").write_text("{} ")
    assert not unchanged(files)
    (folder / "sizes.json").write_text("{}")
    assert unchanged(files)
    (folder / "parts.py").unlink()
    assert not unchanged(files)


@pytest.mark.parametrize(
    "line", ["width = [*os.environ]", "import sys; width = sys.argv", "width = os.getenv('W' + 'I')"]
)
def test_a_script_that_asks_for_what_it_does_not_name_is_not_kept(folder: Path, line: str) -> None:
    (folder / "main.py").write_text(f"import os\n{line}\n")
    with reading() as paths:
        runpy.run_path("main.py")
    assert not seals(paths)


def test_a_script_is_kept_by_the_variables_that_it_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "main.py").write_text(
        "import os\nwidth = os.environ.get('LOADGAUGE_WIDTH'), os.getenv('LOADGAUGE_DEPTH', 2)\n"
    )
    with reading() as paths:
        runpy.run_path("main.py")
    files = seals(paths)
    assert len(files) == 3
    assert unchanged(files)
    monkeypatch.setenv("LOADGAUGE_WIDTH", "8")
    assert not unchanged(files)


def test_a_library_installed_beside_is_kept_by_its_folder(folder: Path) -> None:
    (folder / "lib" / "blocks").mkdir(parents=True)
    (folder / "lib" / "blocks-1.0.dist-info").mkdir()
    (folder / "lib" / "blocks" / "__init__.py").write_text("import os\nwidth = [*os.environ]\n")
    sys.path.insert(0, str(folder / "lib"))
    (folder / "main.py").write_text("import blocks\n")
    try:
        with reading() as paths:
            runpy.run_path("main.py")
        files = seals(paths)
    finally:
        sys.path.remove(str(folder / "lib"))
        sys.modules.pop("blocks", None)
    assert str(folder / "lib" / "blocks") in files
    assert unchanged(files)
    (folder / "lib" / "blocks" / "more.py").touch()
    assert not unchanged(files)


@pytest.mark.slow
def test_a_second_estimate_of_a_script_runs_nothing_and_a_changed_import_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "estimate net.py:model --inputs net.py:batch --micro-batch 128 --gpu l4"
    few, many = (document(f"{line} --rows {rows}") for rows in (32, 64))
    # A linear layer's three products, of 64 by 8 weights and as many more rows.
    assert many["flops"]["hardware_per_step"] - few["flops"]["hardware_per_step"] == 3 * 2 * 32 * 64 * 8
    road._FAMILIES.clear()
    captured: list[object] = []
    monkeypatch.setattr(road.OnDemand, "_captured", lambda self, *_: captured.append(self))
    again = document(f"{line} --rows 32")
    assert (again["flops"], again["memory"]) == (few["flops"], few["memory"])
    assert not captured
    road._FAMILIES.clear()
    (folder / "parts.py").write_text("WIDTH = 128\n")
    with pytest.raises(AssertionError):
        document(f"{line} --rows 32")
    assert captured
