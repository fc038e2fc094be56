"""Published runs are read row by row: what is wrong in one is said of that one, and nothing else can go wrong."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.evidence.published.tables import read
from loadgauge.evidence.validate.counters import Counter
from loadgauge.evidence.validate.runs import Measured, parse, published
from loadgauge.evidence.validate.validate import validate

HEAD = "id,model,pp,gpus,tp,tokens_per_s_per_gpu"


def test_every_published_row_is_read() -> None:
    found = published()
    assert len(found.runs) == 1209 + 676
    assert not found.rejected
    assert not found.ignored
    assert len({run.id for run in found.runs}) == len(found.runs)


def test_a_run_in_both_files_counts_its_speed_once() -> None:
    weighed = [run for run in published().runs if run.id.startswith("M-")]
    assert not any(run.measured.timed for run in weighed)
    assert sum(run.measured.peak_memory_gib is not None for run in weighed) == 539


def test_columns_may_be_missing_in_any_order_and_unknown_ones_are_listed() -> None:
    found = parse("colour,gpus,model,id\nred,8,gpt2,T-X-1\n")
    assert [(run.id, run.job) for run in found.runs] == [("T-X-1", Job(model="gpt2", gpus=8))]
    assert found.ignored == ("colour",)


def test_a_row_holds_the_fields_of_a_job_and_what_was_measured() -> None:
    head = "id,model,hardware,sharding,sequence_parallel,price,mfu,peak_memory_gib,memory_kind,quality"
    (run,) = parse(f'{head}\nx,gpt2,a100-sxm4-80gb,fsdp2,yes,2.5,0.4,12.5,"allocated, last stage",A\n').runs
    assert run.job == Job(model="gpt2", gpu="a100-sxm4-80gb", zero=3, sequence_parallel=True, price=2.5)
    assert run.measured == Measured(mfu=0.4, peak_memory_gib=12.5)
    assert (run.counter, run.quality) == (Counter("allocated", last_stage=True), "A")


def test_a_cell_may_hold_several_values() -> None:
    (run,) = parse("id,model,recompute,zero\nx,gpt2,none | full,1\n").runs
    assert run.job == Job(model="gpt2", recompute="none", zero=1)
    assert [(one.knob, one.value, one.job) for one in run.variants] == [("recompute", "full", {"recompute": "full"})]


def test_sweeps_of_batch_and_precision_are_one_configuration() -> None:
    head, rows = (
        "id,model,gpu,tp,seq_len,precision",
        ("a,gpt2,l4,2,128,bf16", "b,gpt2,l4,2,256,fp16", "c,gpt2,l4,1,128,bf16"),
    )
    first, second, third = (run.configuration[1:] for run in parse("\n".join((head, *rows))).runs)
    assert first == second != third


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("T-1,gpt,many,8,1,5", "pp: must be a whole number from 1 to 1000000, got 'many'"),
        ("T-1,gpt,12.5,8,1,5", "pp: must be a whole number from 1 to 1000000, got '12.5'"),
        ("T-1,gpt,12,0,1,5", "gpus: must be a whole number from 1 to 10000000, got '0'"),
        ("T-1,gpt,12,8,-1,5", "tp: must be a whole number from 1 to 1000000, got '-1'"),
        ("T-1,gpt,12,8,1,nan", "tokens_per_s_per_gpu: must be a number above 0, got 'nan'"),
        ("T-1,gpt,12,8,1,inf", "tokens_per_s_per_gpu: must be a number above 0, got 'inf'"),
        ("T-1,,12,8,1,5", "model: not stated"),
        ("T-1,gpt,12,8,1,5,6", "has more cells than there are columns"),
    ],
)
def test_a_bad_cell_rejects_its_row_alone(row: str, says: str) -> None:
    found = parse(f"{HEAD}\n{row}\nT-2,gpt,12,8,1,5\n")
    assert [(bad.id, bad.line, bad.reason) for bad in found.rejected] == [("T-1", 2, says)]
    assert [run.id for run in found.runs] == ["T-2"]


def test_an_id_may_not_appear_twice_and_a_missing_one_is_the_line() -> None:
    found = parse(f"{HEAD}\nT-1,a,1,1,1,1\nT-1,b,1,1,1,1\n,c,1,1,1,1\n")
    assert [run.id for run in found.runs] == ["T-1", "line 4"]
    assert [bad.reason for bad in found.rejected] == ["id: the id appears twice"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "one of them must be id"),
        ("model,gpus\nx,8\n", "one of them must be id"),
        ("id,gpus,gpus\nT,1,2\n", "the column gpus appears twice"),
        ('id,model\n"T,x\n', "not a valid CSV"),
        ("id\0,model\n", "zero byte"),
    ],
)
def test_what_is_no_csv_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text, "runs.csv")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"id,model\nT,caf\xe9\n")
    for path, says in (
        (tmp_path / "none.csv", "no such file"),
        (tmp_path, "no file that ends in .toml"),
        (tmp_path / "latin.csv", "not text in UTF-8"),
    ):
        with pytest.raises(ConfigError, match=says):
            read(path)


def test_a_byte_order_mark_does_not_hide_the_first_column(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("id,model\nT,gpt2\n", encoding="utf-8-sig")
    assert [run.id for run in read(tmp_path / "runs.csv").runs] == ["T"]


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@given(st.lists(st.lists(cells, min_size=3, max_size=8), max_size=4))
def test_no_content_is_a_traceback(rows: list[list[str]]) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([["id", "sequence_parallel", "mfu", "model"], *rows])
    try:
        found = parse(out.getvalue())
    except ConfigError:
        return
    assert all(bad.reason for bad in found.rejected)


@given(st.text(max_size=200))
def test_no_text_is_a_traceback(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text)


@given(st.integers(1, 10**7), st.floats(1e-9, 1e9))
def test_numbers_are_read_as_written(whole: int, real: float) -> None:
    (run,) = parse(f"id,model,gpus,mfu\nT,gpt2,{whole},{real!r}\n").runs
    assert run.job is not None
    assert (run.job.gpus, run.measured.mfu) == (whole, real)


def test_rows_in_json(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"id": "a", "job": {"model": "gpt2"}}\n{"id": "b", "job": {"modell": "gpt2"}}\n', encoding="utf-8")
    found = read(path)
    assert [(run.id, run.job) for run in found.runs] == [("a", Job(model="gpt2"))]
    assert [(bad.line, "modell" in bad.reason) for bad in found.rejected] == [(2, True)]


def in_source_words(tmp_path: Path, *changes: dict[str, str]) -> Path:
    """A table of a published row, and of what it would be with other cells."""
    raw = Path(__file__).parents[3] / "tools" / "published_runs" / "raw" / "memory.csv"
    with raw.open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["id"] == "M-SW-030")
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, row)
        table.writeheader()
        table.writerows([row, *({**row, **change} for change in changes)])
    return path


def test_products_in_eight_bits_go_with_weights_that_are_loaded(tmp_path: Path) -> None:
    found = read(in_source_words(tmp_path, {"id": "M-SW-930", "precision": "fp8"}))
    usual, fewer = (run.job for run in found.runs)
    assert usual is not None
    assert fewer is not None
    assert (fewer.precision, fewer.weights) == ("fp8-tensorwise", usual.weights)
    assert fewer.weights is not None
    assert [(one.id, one.reason) for one in validate(found)] == [("M-SW-030", ""), ("M-SW-930", "")]


def test_a_row_whose_words_make_no_job_is_listed_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_source_words(tmp_path, {"id": "bad", "notes": "one\ntwo"}, {"id": "M-SW-931"})
    read(path)  # which makes the tools known
    rows = importlib.import_module("loadgauge.evidence.published.rows")
    row_of = rows.row_of

    def refuses(source: Any) -> Any:
        if source.id == "bad":
            raise NotModelled("nobody knows")
        return row_of(source)

    monkeypatch.setattr(rows, "row_of", refuses)
    found = validate(read(path))
    assert [(one.id, one.reason) for one in found] == [
        ("M-SW-030", ""),
        ("M-SW-931", ""),
        ("bad", "line 4: nobody knows"),
    ]
