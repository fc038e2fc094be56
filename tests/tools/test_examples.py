"""How many examples are answered, counted on a few files of our own."""

from __future__ import annotations

from pathlib import Path

from examples import Scored, commonest, named, reason, scored, table, written

FACTORY = "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
FACTORY += "cutoff_len: 2048\nbf16: true\n"


def test_files_are_answered_in_whole_or_in_part_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "llamafactory"
    folder.mkdir()
    for name, more in (("whole.yaml", ""), ("part.yaml", "my_kernel: x\n"), ("none.yaml", "use_teacher: true\n")):
        (folder / name).write_text(FACTORY + more)
    found = [scored(str(tmp_path), f"llamafactory/{name}.yaml") for name in ("whole", "part", "none")]
    assert [one.state for one in found] == ["answered", "in part", "refused"]
    assert found[1].keys == ("my_kernel",)
    assert reason(found[2].why, "none.yaml").startswith("use_teacher: is not known here")
    lines = list(table(found, {}, "2026-01-01"))
    assert lines[0].startswith("On 2026-01-01")
    assert "| llamafactory |  | 3 | 2 | 1 | 1 `my_kernel` | 1 use_teacher: " in lines[-2]
    assert lines[-1].startswith("| all | | 3 | 2 (67%) | 1 |")


def test_commits_are_those_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "| tool | repository | commit |\n|---|---|---|\n| trl | huggingface/trl | f2cd57710ae3 |\n"
    )
    assert named(tmp_path) == {"trl": ("huggingface/trl", "f2cd57710ae3")}


def test_a_page_is_written_between_its_marks() -> None:
    page = "a\n<!-- examples -->\n<!-- /examples -->\nb\n"
    assert written(written(page, ["x"]), ["y"]) == written(page, ["y"])
    assert commonest([]) == ""
    assert Scored("a", "b", "answered").keys == ()
