"""Searches kept on disk: equal to those that are not, made again where anything changed, and nothing where no file can be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import document, typed
from loadgauge.core.base.errors import NothingFits
from loadgauge.core.plan.batch import kept
from loadgauge.core.plan.batch.evaluate import BatchEvaluator
from loadgauge.core.plan.request import PlanRequest, cases
from loadgauge.core.plan.search import Case, Objective, search

FLAGS = {
    "gpu": "h100-sxm5-80gb",
    "gpus": "8,16",
    "global_batch": 64,
    "seq_len": 4096,
    "cp": 1,
    "recompute": "none;full",
}
COMMAND = "plan llama-3.1-8b --gpu h100 --gpus 8 --global-batch 64 --seq-len 4096 --cp 1 --recompute none"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "QUICK", 0.0)
    token = kept.KEEPING.set(True)
    yield tmp_path / "cache" / "loadgauge" / "plans"
    kept.KEEPING.reset(token)


def of(**flags: Any) -> list[Case]:
    return cases(PlanRequest.of("llama-3.1-8b", FLAGS | flags))[1]


def told(given: list[Case], **more: Any) -> dict[str, Any]:
    """Everything that a search finds, and whether it was there."""
    result = search(given, top=8, **more)
    return {
        "best": [each.to_dict() for each in result.layouts], "front": [each.to_dict() for each in result.pareto],
        "tighter": result.tighter and result.tighter.to_dict(), "fit": result.fitting, "found": result.stored.found,
        "counts": (result.evaluated, result.valid, result.bounded, result.counted, result.moved),
    }  # fmt: skip


@pytest.mark.parametrize("objective", ["time", "headroom", "network"])
def test_the_second_answer_is_the_first_without_a_search(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    token = kept.KEEPING.set(False)
    alone = told(of(), objective=objective)
    kept.KEEPING.reset(token)
    first = told(of(), objective=objective)
    monkeypatch.setattr(BatchEvaluator, "batches", None)  # nothing is looked at again
    again = told(of(), objective=objective)
    assert not alone["found"]
    assert not first["found"]
    assert again.pop("found")
    assert again == {name: value for name, value in first.items() if name != "found"}
    assert again == {name: value for name, value in alone.items() if name != "found"}


def test_a_search_is_made_again_where_anything_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = of()
    assert not told(given)["found"]
    assert told(given)["found"]
    for changed in ({"seq_len": 4097}, {"gpus": "8"}, {"tp": 1}, {"nic_bandwidth": "399Gbit/s"}, {"precision": "fp16"}):
        assert not told(of(**changed))["found"], changed
    assert not told(given, objective="headroom")["found"]
    assert not told(given, margin=2.0**20)["found"]
    dearer = [msgspec.structs.replace(case, price=2.0) for case in given]
    assert not told(dearer)["found"]
    for name, value in (("__version__", "another"), ("_code", lambda: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(kept, name, value)
            assert not told(given)["found"]
    assert told(given)["found"]


def test_a_changed_table_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    table = tmp_path / "data" / "one.toml"
    table.write_text("a = 1\n")
    monkeypatch.setattr(kept, "PACKAGE", str(tmp_path))
    before = kept._code.__wrapped__()
    assert before == kept._code.__wrapped__()
    table.write_text("a = 10\n")
    assert before != kept._code.__wrapped__()


@pytest.mark.parametrize("objective", ["time", "network"])
def test_an_interrupted_search_goes_on(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    given = of()
    token = kept.KEEPING.set(False)
    whole = told(given, objective=objective)
    kept.KEEPING.reset(token)
    real = Case.batches
    monkeypatch.setattr(Case, "batches", _stopped(real, 16, 3))
    with pytest.raises(KeyboardInterrupt, match="the same command goes on from here"):
        search(given, top=8, objective=objective)
    monkeypatch.setattr(Case, "batches", _without(real, 8))
    again = told(given, objective=objective)
    assert not again["found"]
    assert again["best"] == whole["best"]
    assert again["front"] == whole["front"]
    assert again["counts"][:2] == whole["counts"][:2]
    monkeypatch.setattr(Case, "batches", None)
    assert told(given, objective=objective)["best"] == whole["best"]


def _stopped(real: Any, gpus: int, most: int) -> Any:
    """Batches that end with Ctrl-C after so many of one case."""

    def batches(self: Case, *more: Any) -> Iterator[Any]:
        for number, batch in enumerate(real(self, *more)):
            if self.space.gpus == gpus and number == most:
                raise KeyboardInterrupt
            yield batch

    return batches


def _without(real: Any, gpus: int) -> Any:
    """Batches of which one case has none that may be looked at."""

    def batches(self: Case, *more: Any) -> Any:
        assert self.space.gpus != gpus
        return real(self, *more)

    return batches


def test_what_does_not_fit_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = of(gpus=1, gpu="l4")
    with pytest.raises(NothingFits) as first:
        search(given)
    monkeypatch.setattr(Case, "batches", None)
    with pytest.raises(NothingFits) as again:
        search(given)
    assert str(again.value) == str(first.value)
    assert again.value.counts == pytest.approx(first.value.counts, rel=0.1)


@pytest.mark.parametrize("content", [b"", b"no plan", None])
def test_a_file_that_cannot_be_read_is_none(home: Path, content: bytes | None) -> None:
    first = told(of())
    (file,) = home.iterdir()
    file.write_bytes(file.read_bytes()[:-9] if content is None else content)
    assert told(of()) == first


def test_a_home_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not told(of())["found"]
    assert not told(of())["found"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home at all
    monkeypatch.chdir(tmp_path)
    assert not told(of())["found"]
    assert not (tmp_path / "~").exists()


def test_the_command_keeps_and_says_so(home: Path) -> None:
    assert "kept from before" not in typed(f"{COMMAND} --no-cache").out
    assert not home.exists()
    first, again = (" ".join(typed(f"{COMMAND} --full").out.split()) for _ in range(2))
    kept = ", kept from before (--no-cache searches again)"
    assert kept in again
    assert kept not in first
    # The seconds of the search are kept as they were when it was written, a little before it was printed.
    words = [re.sub(r"fit; [\d.]+ s", "fit", text.replace(kept, "")) for text in (first, again)]
    assert words[0] == words[1]
    assert "kept from before" not in typed(f"{COMMAND} --full --no-cache").out


def test_plans_of_lengths_are_kept_too() -> None:
    line = "plan llama-3.2-1b --gpu rtx4090 --gpus 2 --global-batch 64 --precision bf16-pure --zero 2 --lengths"
    first, again, longer = (document(f"{line} uniform:{most}") for most in (3000, 3000, 3500))
    assert first["layouts"] == again["layouts"] != longer["layouts"]
