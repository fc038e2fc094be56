"""Sweeps: what a file spans, what is refused, the loop over workers, and results that equal single plans."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.plan.space import grid as sweep
from loadgauge.core.plan.space.grid import Cell, Row, read, run
from loadgauge.sheets.sweep.cells import cells, columns, lost, work
from loadgauge.sheets.sweep.results import DIGEST, Results, digest
from loadgauge.sheets.sweep.workers import Interrupt, OnRay
from sweep_cells import SMALL, rows_in, same_as_a_plan

pyarrow = pytest.importorskip("pyarrow")
KEYS = {"model": str, "gpus": str, "gpu": str, "nic_bandwidth": str, "tp": str}
HEAD = 'model = "gpt2"\ngpu = "h100-sxm5-80gb"\n'


# -- the file -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_combination_is_a_cell_once(data: Any) -> None:
    """Against a plain loop over the tables."""
    some = st.lists(st.integers(1, 4), min_size=1, max_size=3)
    axes = st.dictionaries(st.sampled_from(["gpus", "tp", "nic-bandwidth"]), some, max_size=3)
    common, tables = data.draw(axes), data.draw(st.lists(axes, max_size=3))
    lines = [f"{name} = {values}" for name, values in common.items()]
    for table in tables:
        lines += ["[[with]]", *(f"{name} = {values}" for name, values in table.items())]
    wanted = set()
    for table in tables or [{}]:
        merged = {**common, **table}
        for values in itertools.product(*merged.values()):
            wanted.add(frozenset(zip((name.replace("-", "_") for name in merged), map(str, values), strict=True)))
    found = [frozenset(cell.items()) for cell in read("\n".join(lines), KEYS)]
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_a_table_goes_before_what_stands_above_it() -> None:
    found = read('gpus = [8, 16]\ngpu = "a"\n[[with]]\ngpu = ["b", "c"]\n[[with]]\ngpus = 1', KEYS)
    assert [(cell["gpu"], cell["gpus"]) for cell in found] == [
        ("b", "8"), ("c", "8"), ("b", "16"), ("c", "16"), ("a", "1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = \n", ("no TOML", "line 1")),
        ("gpus = 8\ngpus = 9\n", ("no TOML", "line 2")),
        ("\nnic-bandwith = 1", ("sweep.toml:2: nic-bandwith: unknown key", "did you mean nic-bandwidth?")),
        ("json = true", ("sweep.toml:1: json: unknown key",)),
        ("find = 'seq-len'", ("sweep.toml:1: find: unknown key",)),
        ("top = 3", ("top: unknown key",)),
        ("[gpus]\nx = 1", ("gpus: must be a value or a list of values, got a table",)),
        ("gpus = [[1, 2]]", ("sweep.toml:1: gpus: must be a value", "a list in a list")),
        ("gpus = []", ("sweep.toml:1: gpus: is an empty list",)),
        ("\n\ngpus = 2026-11-21", ("sweep.toml:3: gpus: must be a value", "date")),
        ("nic-bandwidth = '1GB/s'\nnic_bandwidth = '2GB/s'", ("sweep.toml:2: nic_bandwidth: is there twice",)),
        ("with = 3", ("sweep.toml:1: with: must be tables", "[[with]]")),
        ("with = []", ("with: must be tables",)),
        ("[with]\ngpus = 3", ("sweep.toml:1: with: must be tables",)),
        ("gpus = 1\n[[with]]\ntp = 1\n[[with]]\ngpus = 2\ntpp = 1", ("sweep.toml:6: tpp: unknown key",)),
        ("gpus = 1\n[[with]]\ngpus = 2\n[[with]]\ngpus = 0", ("sweep.toml:5: gpus: must be a whole number from 1",)),
        ("gpus = 0", ("sweep.toml:1: gpus: must be a whole number from 1",)),
        ("gpus = '8,16'", ("gpus: must be one number of GPUs", "a list")),
        ("gpus = ['8', 'many']", ("sweep.toml:1: gpus: must be a whole number", "'many'")),
        ("gpus = 1.5", ("gpus: must be a whole number",)),
        ("gpus = true", ("gpus: takes a value, got true",)),
        ("qlora = 1", ("qlora: must be true or false, got 1",)),
        ("seq-len = -1", ("seq-len: must be a whole number",)),
        ("price = nan", ("price: must be a number above 0",)),
        ("schedule = 'zigzag'", ("schedule: 'zigzag' is not one of",)),
        ("objective = 'fame'", ("objective: ", "'fame'")),
        ("model = 7", ("model: must be text, got 7",)),
        ("model = '--help'", ("model: must be text",)),
        ("", ("model: is missing",)),
        ("model = 'gpt2'\n[[with]]\ngpu = 'l4'\n[[with]]\ngpus = 1", ("gpu: is missing",)),
        (f"{HEAD}seq-len = {list(range(1, 1100))}\nglobal-batch = {list(range(1, 1100))}", ("1,207,801 cells",)),
        ("a = " + "[" * 5000, ("no TOML",)),
        ("# \ud800", ("not text in UTF-8",)),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_clear_line(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_bytes(text.encode(errors="surrogatepass"))
    found = typed(["plan", "--sweep", str(file), "--output", str(tmp_path / "out")])
    assert found.code == 2
    assert not found.out
    assert found.err.count("\n") == 1
    assert "defect" not in found.err
    for word in words:
        assert word in found.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("plan", "MODEL"),
        ("plan gpt2 --output there", "needs --sweep"),
        ("plan gpt2 --workers 2", "needs --sweep"),
        ("plan gpt2 --ray auto", "needs --sweep"),
        ("plan --sweep /no/such/file.toml", "no such file"),
        ("plan gpt2 --sweep a.toml", "model: belongs in the sweep's file"),
        ("plan --sweep a.toml --gpus 8", "gpus: belongs in the sweep's file"),
        ("plan --sweep a.toml --objective time", "objective: belongs in the sweep's file"),
        ("plan --sweep a.toml --workers 0", "whole number"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(line: str, word: str) -> None:
    found = typed(line)
    assert (found.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert word in found.err


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.sampled_from("model=gpus[]with\"'{}.,-#\n\t 0123_\0\u2028"), max_size=60))
def test_whatever_stands_in_a_file_it_is_read_or_refused(text: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ConfigError, match=r"^sweep.toml: is no TOML: "):
            read(text, KEYS, "sweep.toml")
        return
    with contextlib.suppress(ConfigError):
        assert read(text, KEYS, "sweep.toml")


def keys(text: str, folder: Path) -> list[str]:
    file = folder / "a.toml"
    file.write_text(text)
    return [cell.key for cell in cells(str(file))[0]]


def test_a_key_says_what_the_result_rests_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = keys(f"{HEAD}gpus = 8", tmp_path)
    same = ["gpus = '8'", "gpus = 8\nobjective = 'time'", "gpus = [8, '8']"]
    for text in same:
        assert keys(HEAD + text, tmp_path) == base, text
    other = [
        "gpus = 16",
        "gpus = 8\nqlora = true",
        "gpus = 8\nobjective = 'money'",
        "gpus = 8\nsequence-parallel = false",
    ]
    hashes = [keys(HEAD + text, tmp_path)[0] for text in other]
    assert len({*base, *hashes}) == 5
    config = tmp_path / "config.json"
    of_a_file = f"model = '{tmp_path}'\ngpu = 'l4'"
    seen = set()
    for size in (1, 2):
        config.write_text(f"{size}")
        seen |= set(keys(of_a_file, tmp_path))
    assert len(seen) == 2
    monkeypatch.setattr("loadgauge.sheets.sweep.cells.__version__", "another")
    assert keys(f"{HEAD}gpus = 8", tmp_path) != base


# -- the results --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The small sweep, and its document."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.toml").write_text(SMALL)
    found = typed(["plan", "--sweep", str(folder / "sweep.toml"), "--output", str(folder / "out"), "--json"])
    assert (found.code, found.err) == (0, "")
    return folder, json.loads(found.out)


def test_each_cell_equals_the_plan_typed_alone(small: tuple[Path, dict[str, Any]]) -> None:
    folder, told = small
    rows = rows_in(folder / "out")
    assert len({row["cell"] for row in rows}) == len(rows) == told["cells"] == 6
    assert [told[name] for name in ("planned", "resumed", "fits", "nothing_fits", "cannot_tell")] == [6, 0, 3, 1, 2]
    for row in rows:
        same_as_a_plan(row)
        assert row["outcome"] == {0: "fits", 1: "nothing fits", 2: "cannot tell"}[row["code"]]
        assert (row["error"] is None) == (row["code"] == 0) == (row["step"] is not None)
        assert list(row) == list(columns())
        assert row["deaths"] == 0
        if row["code"] == 0:
            again = document(row["estimate"].removeprefix("loadgauge "))
            assert again["memory"]["total"] == row["memory_total"]
            assert again["time"]["step"] == row["step"]
    assert [{name: row[name] for name in told_row} for row, told_row in zip(
        sorted(rows, key=lambda row: row["cell"]), sorted(told["results"], key=lambda row: row["cell"]), strict=True
    )] == sorted(told["results"], key=lambda row: row["cell"])  # fmt: skip


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    found = typed(["plan", "--sweep", str(tmp_path / "pipe.toml"), "--output", str(tmp_path / "out")])
    assert (found.code, found.out) == (2, "")
    assert "is not a file" in found.err


def test_what_is_there_is_not_planned_again(small: tuple[Path, dict[str, Any]]) -> None:
    folder, before = small
    parts = {path.name: path.read_bytes() for path in (folder / "out").glob("part-*")}
    words = ["plan", "--sweep", str(folder / "sweep.toml"), "--output", str(folder / "out")]
    again = json.loads(typed([*words, "--json"]).out)
    assert (again["planned"], again["resumed"]) == (0, 6)
    assert again["results"] == before["results"]
    (folder / "sweep.toml").write_text(SMALL.replace("[1, 2]", "[2, 3]"))
    more = json.loads(typed([*words, "--json"]).out)
    assert (more["planned"], more["resumed"], more["others"]) == (3, 3, 3)
    assert parts.items() <= {path.name: path.read_bytes() for path in (folder / "out").glob("part-*")}.items()


def test_the_tables_tell_the_best_and_the_reasons(small: tuple[Path, dict[str, Any]]) -> None:
    folder, told = small
    (folder / "sweep.toml").write_text(SMALL)
    out = typed(["plan", "--sweep", str(folder / "sweep.toml"), "--output", str(folder / "out")]).out
    assert out.count("gpt2") == 2
    assert "Nothing fits: 1 of 6 cells" in out
    assert "Failed: 2 of 6 cells" in out
    assert "no-such-model on 1 to 2 h100-sxm5-80gb (2 cells)" in out
    assert "6 cells (6 planned before): 3 fit, 1 do not fit, 2 failed" in " ".join(out.split())
    assert len(told["best"]) == 3


@pytest.mark.parametrize(("models", "code"), [(["yi-6b"], 1), (["no-such-model"], 2)])
def test_the_exit_code_is_the_best_of_the_cells(models: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SMALL.replace("gpus = [1, 2]", "gpus = 1").replace('"gpt2", ', ""))
    text = (tmp_path / "sweep.toml").read_text().replace('["yi-6b", "no-such-model"]', json.dumps(models))
    (tmp_path / "sweep.toml").write_text(text)
    assert typed(["plan", "--sweep", str(tmp_path / "sweep.toml"), "--output", str(tmp_path / "out")]).code == code


def test_the_cost_is_that_of_the_gpu_hours(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        f"{HEAD}gpus = 2\nglobal-batch = 8\nseq-len = 512\nprice = 3\nmargin = 74\nobjective = 'money'\npp = 1"
    )
    (cell,), files = cells(str(file))
    row = work(cell, files)
    same_as_a_plan(row)
    tokens_an_hour = row["tokens_per_second_per_gpu"] * 2 * 3600
    assert row["cost_per_billion_tokens"] == pytest.approx(2 * 3 / tokens_an_hour * 1e9, rel=1e-12)


def test_a_worker_without_the_file_reads_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another node of a cluster: the same result, and the same words where it is refused."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}
    here, there = tmp_path / "here", tmp_path / "there"
    for name, text in (("tiny", json.dumps(config)), ("broken", '{"model_type": "gpt2", "n_layer": "x"}')):
        (here / name).mkdir(parents=True)
        (here / name / "config.json").write_text(text)
    there.mkdir()
    (here / "lengths.txt").write_text("100\n200\n300\n")
    (here / "a.toml").write_text(
        "model = ['./tiny', './broken']\ngpu = 'l4'\nglobal-batch = 4\nlengths = 'lengths.txt'"
    )
    monkeypatch.chdir(here)
    planned, files = cells("a.toml")
    rows = [work(cell, {}) for cell in planned]
    assert [row["code"] for row in rows] == [0, 2]
    monkeypatch.chdir(there)
    assert [work(cell, {})["code"] for cell in planned] == [2, 2]
    sent = [work(cell, files) for cell in planned]
    assert sent[0] == {**rows[0], "seconds": sent[0]["seconds"]}
    assert sent[1]["error"].removeprefix("./") == rows[1]["error"].removeprefix("./")
    os.remove(here / "lengths.txt")


def test_a_cell_is_typed_as_its_keys_say(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"{HEAD}sequence-parallel = [true, false]\nqlora = [true, false]\ntp = '2,4'\nseq-len = 1_024")
    flags = [sorted(cell.words[1:]) for cell in cells(str(file))[0]]
    common = ["--gpu=h100-sxm5-80gb", "--seq-len=1024", "--tp=2,4"]
    spread = ["--sequence-parallel", "--sequence-parallel", "--no-sequence-parallel", "--no-sequence-parallel"]
    assert flags == [
        sorted([*common, one, *more]) for one, more in zip(spread, [["--qlora"], ["--no-qlora"]] * 2, strict=True)
    ]  # fmt: skip


def test_an_example_is_a_sweep() -> None:
    example = Path(__file__).parents[2] / "examples" / "sweep.toml"
    found, files = cells(str(example))
    assert len(found) == 2 * 3 * (2 + 2)
    assert not files


# -- the folder ---------------------------------------------------------------------------------------------------------


def test_two_sweeps_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with Results(tmp_path, columns()), pytest.raises(Error, match="another sweep is writing"):
        Results(tmp_path, columns())
    Results(tmp_path, columns()).close()


def test_an_unfinished_file_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Results(tmp_path, columns()) as results:
        results.add([{"cell": "one", "code": 0}])
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            results.add([{"cell": "two", "code": 1}])
        monkeypatch.undo()
        assert set(results.rows()) == {"one"}
        assert len(list(tmp_path.glob(".part*"))) == 1
    with Results(tmp_path, columns()) as results:
        assert not list(tmp_path.glob(".part*"))
        results.add(
            [
                {"cell": "two", "code": 2},
                {"cell": "three", "code": 0, "gpus": 8, "mtp": True, "step": 0.1, "error": "é"},
            ]
        )
        assert set(results.rows()) == {"one", "two", "three"}
        assert [path.name for path in results.files()] == ["part-000001.parquet", "part-000002.parquet"]
        row = results.rows()["three"]
        assert (row["gpus"], row["mtp"], row["step"], row["error"]) == (8, True, 0.1, "é")


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    whole = tmp_path / "part-000001.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), whole)
    with Results(tmp_path, columns()) as results, pytest.raises(ConfigError, match="no result of a sweep"):
        results.rows()
    whole.write_bytes(whole.read_bytes()[:-9])
    with Results(tmp_path, columns()) as results, pytest.raises(ConfigError, match="cannot be read"):
        results.rows()
    with pytest.raises(ConfigError, match="is a file"):
        Results(whole, columns())


def test_without_pyarrow_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgauge.core.text.rows.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"loadgauge\[sweep\]"):
        Results(tmp_path, columns())


@pytest.mark.parametrize(
    ("address", "word"),
    [("nonsense", "HOST:PORT"), ("host:port", "HOST:PORT"), (":6379", "HOST:PORT"), ("ray://h:", "HOST:PORT"),
     ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("ray://127.0.0.1:99999", "no Ray cluster answers")],
)  # fmt: skip
def test_an_address_without_a_cluster_is_one_clear_line(address: str, word: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "sweep.toml").write_text(SMALL)
    words = ["plan", "--sweep", str(tmp_path / "sweep.toml"), "--output", str(tmp_path / "out"), "--ray", address]
    found = typed(words)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("loadgauge: ray: ")
    assert found.err.count("\n") == 1
    assert word in found.err


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgauge.sheets.sweep.workers.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"loadgauge\[ray\]"):
        OnRay(work, "auto", None, {})


def test_a_damaged_or_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    """Every flipped byte in it either changes no row or is found out; so is a row of another hand."""
    import pyarrow.parquet

    place = tmp_path / "part-000001.parquet"
    with Results(tmp_path, columns()) as results:
        results.add([{"cell": f"c{n}", "code": 0, "step": 0.1 + n, "error": "one"} for n in range(3)])
        before, raw = results.rows(), place.read_bytes()
        messages = []
        for at in range(0, len(raw), 97):
            place.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
            try:
                assert results.rows() == before, at
            except ConfigError as error:
                messages.append(str(error))
        assert len(messages) > 10
        assert all(message.startswith(f"{place}: ") for message in messages)
        table = pyarrow.parquet.ParquetFile(io.BytesIO(raw)).read()
        other = table.set_column(table.schema.get_field_index("code"), "code", pyarrow.array([7, 0, 0]))
        pyarrow.parquet.write_table(other, place)
        with pytest.raises(ConfigError, match=r"part-000001\.parquet: is damaged, or was changed"):
            results.rows()
        marked = other.replace_schema_metadata({DIGEST: digest(other.to_pylist())})
        pyarrow.parquet.write_table(marked, place)
        with pytest.raises(ConfigError, match=r"part-000001\.parquet: code must be 0, 1 or 2, got 7"):
            results.rows()


def test_a_cell_that_lost_its_workers_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep says so and cannot tell; the next one plans that cell, and only that."""
    (tmp_path / "sweep.toml").write_text(SMALL.replace(', "no-such-model"', ""))
    line = ["plan", "--sweep", str(tmp_path / "sweep.toml"), "--output", str(tmp_path / "out"), "--json"]
    asked: list[str] = []

    class Killed:
        """Workers that plan at once; those of the first cell die as often as it takes."""

        slots = 1

        def __init__(self, *_: object) -> None:
            self.done: list[tuple[int, Row | None]] = []

        def submit(self, number: int, cell: Cell) -> None:
            asked.append(cell.key)
            self.done.append((number, None if number == 0 and dying else work(cell, {})))

        def finished(self, seconds: float) -> list[tuple[int, Row | None]]:
            done, self.done = self.done, []
            return done

        def close(self) -> None:
            pass

    monkeypatch.setattr("loadgauge.sheets.sweep.text.Processes", Killed)
    dying = True
    first = typed(line)
    told = json.loads(first.out)
    assert (first.code, told["lost"], told["cannot_tell"], told["cells"]) == (2, 1, 1, 4)
    assert len(rows_in(tmp_path / "out")) == 3
    assert "1 of these lost their workers" in typed(line[:-1]).out
    dying, asked[:] = False, []
    again = typed(line)
    told = json.loads(again.out)
    assert (again.code, told["lost"], told["resumed"], told["planned"], len(asked)) == (0, 0, 3, 1, 1)
    assert len({row["cell"] for row in rows_in(tmp_path / "out")}) == 4


# -- the loop -----------------------------------------------------------------------------------------------------------


class Pretended:
    """Workers that finish cells in the other order, and die under some."""

    def __init__(self, slots: int, deaths: dict[str, int], version: str = "1") -> None:
        self.slots, self.deaths, self.version = slots, dict(deaths), version
        self.busy: dict[int, Cell] = {}
        self.begun: list[str] = []
        self.closed = False

    def submit(self, number: int, cell: Cell) -> None:
        assert len(self.busy) < self.slots
        self.busy[number] = cell
        self.begun.append(cell.key)

    def finished(self, seconds: float) -> list[tuple[int, Row | None]]:
        number, cell = self.busy.popitem()
        if self.deaths.get(cell.key, 0):
            self.deaths[cell.key] -= 1
            return [(number, None)]
        return [(number, {"cell": cell.key, "loadgauge": self.version})]

    def close(self) -> None:
        self.closed = True


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 12),
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 11).map(str), st.integers(0, 5)),
    st.floats(0, 2),
)
def test_no_cell_is_lost_and_none_done_twice(count: int, slots: int, deaths: dict[str, int], tick: float) -> None:
    wanted = [Cell(str(number), ()) for number in range(count)]
    workers, kept = Pretended(slots, deaths), []
    clock = itertools.count(0.0, tick)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.time, "monotonic", lambda: next(clock))
        rows = list(
            run(wanted, workers, kept.append, lambda cell: {"cell": cell.key, "loadgauge": "1", "lost": True}, "1")
        )
    assert sorted(row["cell"] for row in rows) == sorted(cell.key for cell in wanted)
    # What lost its workers is no result: a sweep that goes on tries it again.
    done = sorted(cell.key for cell in wanted if deaths.get(cell.key, 0) < sweep.DEATHS)
    assert sorted(row["cell"] for row in itertools.chain(*kept)) == done
    for row in rows:
        died = deaths.get(row["cell"], 0)
        assert row.get("lost", False) == (died >= sweep.DEATHS)
        assert row["deaths"] == min(died, sweep.DEATHS)
        assert workers.begun.count(row["cell"]) == min(died + 1, sweep.DEATHS)
    assert workers.closed
    assert all(kept)
    if tick == 0 and done:
        assert len(kept) == 1


def test_what_is_done_is_kept_when_the_loop_is_left() -> None:
    wanted, kept, workers = [Cell(str(number), ()) for number in range(9)], [], Pretended(2, {})
    rows = run(wanted, workers, kept.append, lost, "1")
    first = [next(rows)["cell"] for _ in range(3)]
    rows.close()  # type: ignore[attr-defined]
    assert [row["cell"] for row in itertools.chain(*kept)] == first
    assert workers.closed


def test_a_worker_of_another_version_keeps_nothing() -> None:
    kept: list[list[Row]] = []
    with pytest.raises(Error, match="a worker has loadgauge 0, and this is 1"):
        list(run([Cell("a", ())], Pretended(2, {}, "0"), kept.append, lost, "1"))
    assert not kept


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_inside_a_destructor_is_heard() -> None:
    """Python drops the exception there; the sweep stops all the same."""

    class Last:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        last = Last()
        del last
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(signal.SIGINT) is before
