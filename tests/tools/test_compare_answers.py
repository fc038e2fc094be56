"""The comparison of two trees: its jobs are command lines that this tree answers, and a difference in an answer is reported."""

from __future__ import annotations

import copy
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from compare_answers import Run, answer, answer_differences, entry_point, jobs, names_of, report
from random_jobs import MAKERS, Names, job, texts

LINE = "estimate gpt2 --gpu a100-sxm4-80gb --gpus 2 --zero 2"


@pytest.fixture(scope="module")
def run() -> Run:
    return entry_point()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def names(run: Run, folder: Path) -> Names:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return names_of(run, folder, random.Random(0))._replace(torch=False)


@pytest.fixture
def answered(run: Run) -> dict[str, Any]:
    return answer(run, LINE)


def differing(before: dict[str, Any], after: dict[str, Any], tolerance: float = 0.0) -> list[tuple[str, float | None]]:
    return [(row.where, row.relative) for row in answer_differences(before, after, tolerance, LINE)]


@pytest.mark.parametrize("maker", [each for each in MAKERS if not each.torch], ids=lambda each: each.write.__name__)
def test_every_maker_writes_jobs_that_are_answered(
    maker: Any, run: Run, names: Names, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    lines = [line for line, _ in jobs(run, names, 3, random.Random(1), maker.write.__name__)]
    assert len(lines) == 3
    answers = [answer(run, line) for line in lines]
    assert all(each["code"] in (0, 1, 2) for each in answers)
    assert any(each["code"] != 2 and (each["out"] or each["err"]) for each in answers), lines


def test_a_seed_gives_the_same_jobs_and_another_seed_others(names: Names) -> None:
    def drawn(seed: int) -> list[str]:
        pick = random.Random(seed)
        return [job(pick, names, maker) for maker in MAKERS for _ in range(5)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {shlex.split(line)[0] for line in drawn(1)} >= {
        maker.command for maker in MAKERS if maker.command != "article"
    }


def test_names_and_files_are_those_of_the_tree(names: Names) -> None:
    assert "gpt2" in names.models
    assert "a100-sxm4-80gb" in names.gpus
    assert {"activations", "model-flops", "longest"} <= set(names.quantities)
    assert not [name for name in names.quantities if name.startswith("-")]
    assert {"job.yaml", "pretrain.sh", "train.yaml", "ds_config.json"} <= set(names.files)
    assert sum(name.startswith("job-") for name in names.files) > 20
    assert set(names.checked) < set(names.files)


def test_texts_of_a_file_leave_its_docstrings_out(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""One.\n\n\n\n"""\nTEXT = """\na: 1\nb: 2\nc: 3\n"""\n', encoding="utf-8")
    assert texts(file) == ["\na: 1\nb: 2\nc: 3\n"]


def test_one_tree_agrees_with_itself_though_its_searches_take_other_times(run: Run) -> None:
    line = "plan gpt2 --gpu a100-sxm4-80gb --gpus 1 --zero 0 --seq-len 512 --global-batch 8"
    before, after = answer(run, line), answer(run, line)
    assert "evaluated" in before["json"]
    assert differing(before, after) == []


def test_a_number_of_the_document_is_compared_to_the_last_bit(answered: dict[str, Any]) -> None:
    after = copy.deepcopy(answered)
    after["json"]["time"]["step"] *= 1 + 1e-9
    ((where, relative),) = differing(answered, after)
    assert (where, relative) == ("estimate json.time.step", pytest.approx(1e-9, rel=1e-3))
    assert differing(answered, after, tolerance=1e-8) == []
    after = copy.deepcopy(answered)
    del after["json"]["time"]["step"]
    assert differing(answered, after) == [("estimate json.time.step", None)]


@pytest.mark.parametrize(
    ("old", "new", "key", "relative"),
    [
        ("adamw states", "states of adamw", "adamw states", None),
        ("a  2.50 GiB  ▉", "a  2.75 GiB  █▏", "a # GiB", 0.25 / 2.75),
        ("1,024 tokens", "1024 tokens", "# tokens", None),
        ("2.50 GiB", "2.50 MiB", "# GiB", None),
        ("a note", "", "a note", None),
    ],
)
def test_a_changed_line_is_reported_by_its_pattern(
    old: str, new: str, key: str, relative: float | None, answered: dict[str, Any]
) -> None:
    before, after = copy.deepcopy(answered), copy.deepcopy(answered)
    before["out"].insert(3, old)
    after["out"].insert(3, new)
    assert differing(before, after) == [(f"estimate out: {key}", relative and pytest.approx(relative))]


def test_spaces_and_bars_beside_the_same_numbers_are_reported_apart(answered: dict[str, Any]) -> None:
    before, after = copy.deepcopy(answered), copy.deepcopy(answered)
    before["out"].append("a  2.50 GiB  ▉")
    after["out"].append("a   2.50 GiB ▉")
    assert differing(before, after) == [("estimate out, spaces, rules or bars alone", None)]


def test_lines_that_are_added_do_not_make_those_below_differ(answered: dict[str, Any]) -> None:
    after = copy.deepcopy(answered)
    after["out"].insert(1, "one more")
    after["err"].append("loadgauge: a remark")
    assert differing(answered, after) == [("estimate out: one more", None), ("estimate err: loadgauge: a remark", None)]


def test_the_report_counts_and_names_a_job(
    tmp_path: Path, answered: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    after = copy.deepcopy(answered)
    after["json"]["time"]["step"] *= 1 + 1e-9
    after["code"] = 1
    for name, row in (("before", answered), ("after", after)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"job": LINE, **row}) + "\n", encoding="utf-8")
    before, later = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    assert report(before, before) == 0
    assert report(before, later) == 2
    text = capsys.readouterr().out
    assert "estimate json.time.step: 1 values in 1 jobs, up to 1e-09 relative" in text
    assert LINE in text
    assert "1 jobs (0 refused), 1 differ" in text
    assert report(before, later, ignored=r"^estimate code$") == 1
    later.write_text("", encoding="utf-8")
    assert report(before, later) == 1, "a job that is answered once differs"
