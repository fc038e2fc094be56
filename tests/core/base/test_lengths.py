"""Lengths: against enumeration of every batch, closed forms, simulation; and what its reader refuses."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from hypothesis import given, strategies as st

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.lengths import LONGEST, Lengths, files

DATA = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def enumerated(data: list[int], b: int) -> dict[str, Fraction]:
    """The expectations over every batch there can be."""
    batches = list(itertools.product(data, repeat=b))
    each = {
        "expected_max": lambda batch: max(batch),
        "expected_max_square": lambda batch: max(batch) ** 2,
        "expected_sum": sum,
        "expected_sum_square": lambda batch: sum(length**2 for length in batch),
    }
    return {name: Fraction(sum(of(batch) for batch in batches), len(batches)) for name, of in each.items()}


@given(DATA, st.integers(1, 4))
def test_against_every_possible_batch(data: list[int], b: int) -> None:
    lengths = Lengths.of(data)
    for name, expected in enumerated(data, b).items():
        assert getattr(lengths, name)(b) == pytest.approx(float(expected), rel=1e-13), name
    assert lengths.mean == pytest.approx(sum(data) / len(data))
    assert lengths.mean_square == pytest.approx(sum(length**2 for length in data) / len(data))
    assert lengths.longest == max(data)


@given(DATA, st.integers(1, 100))
def test_bounds(data: list[int], b: int) -> None:
    lengths = Lengths.of(data)
    slack = 1 + 1e-12
    assert lengths.mean <= lengths.expected_max(b) * slack
    assert lengths.expected_max(b) <= lengths.longest * slack
    assert lengths.expected_max(b) <= lengths.expected_max(b + 1) * slack
    assert lengths.expected_max(b) ** 2 <= lengths.expected_max_square(b) * slack
    assert lengths.expected_sum(b) <= b * lengths.expected_max(b) * slack
    assert lengths.expected_sum_square(b) <= b * lengths.expected_max_square(b) * slack


@pytest.mark.parametrize("n", [1, 2, 7])
def test_uniform_is_each_length_once(n: int) -> None:
    uniform, listed = Lengths.uniform(n), Lengths.of(range(1, n + 1))
    for b in (1, 3):
        for name, expected in enumerated(list(range(1, n + 1)), b).items():
            assert getattr(uniform, name)(b) == pytest.approx(float(expected), rel=1e-13)
            assert getattr(uniform, name)(b) == getattr(listed, name)(b)


@pytest.mark.parametrize("n", [512, 8192, 131072])
@pytest.mark.parametrize("b", [1, 2, 8])
def test_uniform_against_exact_fractions(n: int, b: int) -> None:
    lengths = Lengths.uniform(n)
    assert lengths.mean == (n + 1) / 2
    assert lengths.mean_square == pytest.approx((n + 1) * (2 * n + 1) / 6, rel=1e-15)
    powers = [k**b for k in range(n)]
    largest = n - Fraction(sum(powers), n**b)
    square = n**2 - Fraction(sum((2 * k + 1) * power for k, power in enumerate(powers)), n**b)
    assert lengths.expected_max(b) == pytest.approx(float(largest), rel=1e-14)
    assert lengths.expected_max_square(b) == pytest.approx(float(square), rel=1e-14)
    # The approximations b/(b+1) N and b/(b+2) N^2.
    assert lengths.expected_max(b) == pytest.approx(b / (b + 1) * n, rel=2 / n)
    assert lengths.expected_max_square(b) == pytest.approx(b / (b + 2) * n**2, rel=4 / n)


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_against_simulation(kind: str) -> None:
    generator, draws, b = numpy.random.default_rng(20240801), 200_000, 8
    skewed = numpy.unique(generator.lognormal(6, 0.5, 500).astype(int) + 1).tolist()
    data = list(range(1, 513)) if kind == "uniform" else [*skewed, *skewed[: len(skewed) // 2]]
    lengths = Lengths.uniform(512) if kind == "uniform" else Lengths.of(data)
    batches = generator.choice(numpy.array(data), (draws, b)).astype(float)
    for name, sample in (
        ("expected_max", batches.max(axis=1)),
        ("expected_max_square", batches.max(axis=1) ** 2),
        ("expected_sum", batches.sum(axis=1)),
        ("expected_sum_square", (batches**2).sum(axis=1)),
    ):
        sigma = sample.std() / math.sqrt(draws)
        assert abs(sample.mean() - getattr(lengths, name)(b)) < 5 * sigma, name
        # Five sigma are under 1 %, so a formula off by a hundredth would show.
        assert 5 * sigma < 0.01 * sample.mean()


@pytest.mark.parametrize("kind", ["uniform", "skewed", "rare"])
@pytest.mark.parametrize("b", [1, 2, 8, 32])
def test_the_fullest_batch_against_drawn_epochs(kind: str, b: int) -> None:
    generator, epochs = numpy.random.default_rng(7), 400
    data = {
        "uniform": numpy.arange(1, 1025),
        "skewed": numpy.clip(generator.lognormal(5.8, 0.8, 2000).astype(int), 1, 4096),
        "rare": numpy.array([100] * 990 + [4096] * 10),
    }[kind]
    batches = len(data) // b
    fullest = numpy.median(generator.choice(data, (epochs, batches, b)).sum(axis=2).max(axis=1))
    found = Lengths.of(data.tolist()).expected_fullest(b)
    # A step of the length's bins on each sequence, and the spread of a median of 400.
    assert found == pytest.approx(fullest, rel=0.02)
    assert found <= b * max(data)


def test_the_fullest_batch_is_exact_for_few_lengths() -> None:
    # Of 6 batches of 2 draws from {10, 1000}: more than 1010 in a quarter of them, so in most epochs one has 2000.
    assert Lengths.of([10, 1000] * 6).expected_fullest(2) == pytest.approx(2000, rel=2e-3)
    # A long one in a hundred: a batch of two long ones is in 0.5 % of the epochs.
    assert Lengths.of([10] * 99 + [1000]).expected_fullest(2) == pytest.approx(1010, rel=2e-3)
    assert Lengths.of([7] * 5).expected_fullest(4) == 28
    assert Lengths.uniform(131072).expected_fullest(1_000_000) == pytest.approx(1e6 * 65536.5)


def test_one_length_has_no_padding() -> None:
    lengths = Lengths.of([4096] * 3)
    assert lengths.expected_max(64) == lengths.mean == lengths.longest == 4096
    assert lengths.expected_sum(64) == 64 * 4096


def test_fast_enough_for_long_contexts() -> None:
    started = time.process_time()
    lengths = Lengths.uniform(131072)
    assert all(
        math.isfinite(value) for value in (lengths.mean, lengths.expected_max(8), lengths.expected_max_square(8))
    )
    assert time.process_time() - started < 2


def test_light_to_import() -> None:
    code = "import sys, loadgauge.core.base.lengths; sys.exit(any(name in sys.modules for name in ('numpy', 'sympy', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("b", [0, -1, 1.5, True, "8"])
def test_refuses_a_batch_that_is_none(b: object) -> None:
    for name in ("expected_max", "expected_max_square", "expected_sum", "expected_sum_square"):
        with pytest.raises(ConfigError, match="batch: must be a whole number"):
            getattr(Lengths.uniform(4), name)(b)


@pytest.mark.parametrize("bad", [0, -5, LONGEST + 1, 2.0, True, "512", None, float("nan")])
def test_refuses_a_length_that_is_none(bad: object) -> None:
    with pytest.raises(ConfigError, match="must be whole numbers from 1"):
        Lengths.of([512, bad])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="must be whole numbers from 1"):
        Lengths.uniform(bad)  # type: ignore[arg-type]


def test_refuses_none_at_all() -> None:
    with pytest.raises(ConfigError, match="no lengths"):
        Lengths.of([])


# -- files ------------------------------------------------------------------------------------------------------------

GOOD = {
    "lines": "512\n1024\n512\n",
    "lines of another system": "512\r\n1024\r\n512\r\n",
    "no newline at the end": "512\n1024\n512",
    "blank lines and spaces": "\n 512 \n\n1024\n512\n\n",
    "commas": "512,1024,512",
    "commas over lines": "512, 1024,\n512",
    "byte order mark": "\ufeff512\n1024\n512\n",
    "leading zeros": "0512\n1024\n00512\n",
    "json": "[512, 1024, 512]",
    "json over lines": "\n [\n512,\n1024,\n512\n]\n",
    "csv": "length\n512\n1024\n512\n",
    "csv, several columns": 'id,text,length\n1,"a, b",512\n2,"c\nd",1024\n3,,512\n',
    "csv, other name, capitals": "Lengths,id\r\n512,1\r\n1024,2\r\n512,3\r\n",
    "csv with blank lines": "length\n\n512\n1024\n\n512\n",
    "csv histogram": "length,count\n1024,1\n512,2\n",
    "csv histogram, a length twice and one of none": "Count,Length\n1,512\n1,1024\n1,512\n0,7\n",
    "csv whose third column is no count": "length,count,id\n512,3,1\n1024,9,2\n512,4,3\n",
    "json histogram": '{"512": 2, "1024": 1}',
    "json histogram over lines": '{\n "512": 2,\n "1024": 1\n}\n',
    "json lines": '{"length": 512, "text": "a"}\n\n{"text": "b", "length": 1024}\n{"length": 512}\n',
    "json lines of token ids": "".join(json.dumps({"input_ids": [7] * n}) + "\n" for n in (512, 1024, 512)),
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_reads(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(text.encode())
    assert Lengths.from_file(file) == Lengths.from_file(str(file)) == Lengths.of([512, 1024, 512])


BAD = {
    "empty": ("", "no lengths given"),
    "blank": ("\n \n", "no lengths given"),
    "empty json": ("[]", "no lengths given"),
    "a header alone": ("length\n", "no lengths given"),
    "json with a fraction": ("[512, 1.5]", "got 1.5"),
    "json with text": ('[512, "x"]', "got 'x'"),
    "json with a truth": ("[true]", "got True"),
    "json in json": ("[[512]]", r"got \[512\]"),
    "broken json": ("[512, 1024", "starts like a JSON list but is not one"),
    "deep json": ("[" * 100_000, "starts like a JSON list but is not one"),
    "json object": (
        '{\n"length": 512\n}',
        r"must be JSON lines \(one object a line\) or an object of counts by length",
    ),
    "json, lists for lengths": ('{"length": [512]}', r"line 1: must be whole numbers from 1 to .* got \[512\]"),
    "json histogram with a fraction": ('{"512": 0.5}', "the count of length 512 must be a whole number, got 0.5"),
    "json histogram of nothing": ('{"512": 0}', "no lengths given"),
    "json histogram of a length too long": ('{"10000001": 1}', "got 10000001"),
    "json lines without the column": ('{"size": 1}\n', "has no column named length, lengths or input_ids; name one"),
    "json lines, then another": ('{"length": 1}\n[2]\n', "line 2: is not a JSON object"),
    "json lines, one without": ('{"length": 1}\n{"id": 2}\n', "line 2: has no column length"),
    "json lines with text": ('{"length": "long"}\n', "length: holds text, whose length in tokens depends"),
    "json lines with an empty sequence": ('{"input_ids": []}\n', "line 1: .* got 0"),
    "csv histogram with words": ("length,count\n512,many\n", "line 2: the count must be a whole number, got 'many'"),
    "words": ("hello world\n", "must hold whole numbers"),
    "csv without the column": ("id,size\n1,512\n", "must hold whole numbers"),
    "zero": ("512\n0\n", "line 2: must be whole numbers from 1"),
    "negative": ("512\n-3\n", "line 2: .* got '-3'"),
    "fraction": ("512\n1024.0\n", "line 2: .* got '1024.0'"),
    "word among numbers": ("512\n1024\nmany\n", "line 3: .* got 'many'"),
    "other digits": ("512\n٥١٢\n", "line 2"),
    "far too long": ("512\n" + "9" * 5000, "line 2: .*9999"),
    "too long": ("512\n10000001", "got 10000001"),
    "csv, short row": ("id,length\n1,512\n2\n", "line 3: .* got ''"),
    "csv, word": ("id,length\n1,512\n2,many\n", "line 3: .* got 'many'"),
    "csv, huge field": ("id,length\n1," + "x" * 200_000, "cannot be read as CSV"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_refuses_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        Lengths.from_file(file)
    said = str(caught.value)
    assert said.startswith(str(file))
    assert "\n" not in said
    assert len(said) - len(str(file)) < 170


def test_refuses_what_is_no_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Lengths.from_file(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is not a file"):
        Lengths.from_file(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"512\n\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        Lengths.from_file(binary)
    with pytest.raises(ConfigError, match="is not a file"):
        Lengths.from_file("/dev/null")
    monkeypatch.setattr(files, "FILE_BYTES", 8)
    (tmp_path / "large").write_text(json.dumps([512] * 3))
    with pytest.raises(ConfigError, match="has 15 bytes, more than the 8"):
        Lengths.from_file(tmp_path / "large")


# -- data sets ---------------------------------------------------------------------------------------------------------

ROWS = [
    {"id": n, "tokens": length, "ids": [0] * length, "text": "word " * length} for n, length in enumerate((5, 9, 5))
]


def data_set(kind: str, folder: Path) -> Path:
    """The rows of `ROWS` as a file."""
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return path
    if kind == "csv":
        path.write_text("id,tokens,text\n" + "".join(f'{row["id"]},{row["tokens"]},"{row["text"]}"\n' for row in ROWS))
        return path
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    if kind == "parquet":
        from pyarrow import parquet

        parquet.write_table(table, path)
    elif kind == "folder":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    else:
        new = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow", "stream", "folder"])
def test_a_column_of_a_data_set(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = data_set(kind, tmp_path)
    expected = Lengths.of([5, 9, 5])
    assert Lengths.from_file(path, "tokens") == Lengths.parse(f"{path}:tokens") == expected
    if kind != "csv":
        assert Lengths.parse(f"{path}:ids") == expected
    with pytest.raises(ConfigError, match="text: holds text, whose length in tokens depends on the tokenizer") as text:
        Lengths.parse(f"{path}:text")
    with pytest.raises(ConfigError, match=r"size: has no (such )?column"):
        Lengths.parse(f"{path}:size")
    assert "\n" not in str(text.value)
    with pytest.raises(ConfigError, match="length"):  # No column has a name that says so.
        Lengths.parse(str(path))


def test_a_table_that_is_broken_or_holds_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    for values, message in (
        ([5, None], "got None"),
        ([5, 0], "got 0"),
        ([5.5], "must hold whole numbers or token ids, not double"),
        ([[5]], "must hold whole numbers or token ids, not list"),
    ):
        parquet.write_table(pyarrow.table({"length": values}), path)
        with pytest.raises(ConfigError, match=f"length: .*{message}") as caught:
            Lengths.from_file(path)
        assert "\n" not in str(caught.value)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"PAR1", b"ARROW1" + whole[6:], b"\xff\xff\xff\xff" + whole[4:]):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            Lengths.from_file(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs pyarrow to be read"):
        Lengths.from_file(path)


def test_what_a_command_line_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lengths.parse("uniform:7") == Lengths.uniform(7)
    for bad in ("uniform:", "uniform:0", "uniform:x", "uniform:-1", "uniform:10000001", "uniform:" + "9" * 30):
        with pytest.raises(ConfigError, match=r"uniform|whole numbers from 1"):
            Lengths.parse(bad)
    with pytest.raises(ConfigError, match="No such file"):
        Lengths.parse(str(tmp_path / "missing:column"))
    with pytest.raises(ConfigError, match="zero byte"):
        Lengths.parse("a\0b")
    monkeypatch.chdir(tmp_path)
    Path("uniform:7").write_text("512\n", encoding="utf-8")  # A file goes before its meaning.
    assert Lengths.parse("uniform:7") == Lengths.of([512])


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 4))
def test_a_histogram_is_its_sequences(counts: dict[int, int], b: int) -> None:
    listed = Lengths.of([length for length, count in counts.items() for _ in range(count)])
    assert Lengths.histogram(counts) == listed
    padded, unpadded = listed.padded(b), listed.unpadded(b)
    assert padded == (b * listed.expected_max(b), b * listed.expected_max_square(b))
    assert unpadded == (listed.expected_sum(b), listed.expected_sum_square(b))


@pytest.mark.parametrize("counts", [{512: -1}, {512: 0.5}, {512: True}, {0: 1}, {512: 0}, {}])
def test_refuses_a_histogram_that_is_none(counts: dict[int, int]) -> None:
    with pytest.raises(ConfigError):
        Lengths.histogram(counts)
