"""Files made to harm: they are data, and end in one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings, strategies as st
from tomlkit.exceptions import KeyAlreadyPresent

from command_line import typed
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.job_files.dialects import FILES, dialect
from loadgauge.job_files.exchange import read, write
from loadgauge.job_files.reading.nested import toml_document

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MAPS = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{b: *a{n - 1}, c: *a{n - 1}}}\n" for n in range(1, 39))
BOMB = 'a: &a ["x","x","x","x","x","x","x","x","x"]\n' + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "bomb.yaml": (BOMB + "base_model: x\nsequence_len: *i\nmicro_batch_size: 1\n", "values once its YAML aliases"),
    "unread.yaml": (BOMB + "base_model: x\nlora_thing: *i\nmicro_batch_size: 1\n", "values once its YAML aliases"),
    "tuple.json": ('{"train_micro_batch_size_per_gpu": [' + "[1]," * 20_000 + "1]}", "must be a whole number"),
    "anchor.yaml": ("x: &x {<<: *x}\n", "a value holds itself"),
    "nul.sh": ("torchrun x.py --micro-batch-size 1 \0 --seq-length 4", "holds a zero byte"),
    "nul.json": ('{"train_batch_size": 1, "a\0": 2}', "holds a zero byte"),
    "python.yaml": ("!!python/object/apply:os.system ['touch {mark}']\n", "YAML tag"),
    "inner.yaml": ("base_model: !!python/name:os.system\nmicro_batch_size: 1\n", "YAML tag"),
    "local.yaml": ("base_model: !load x\nmicro_batch_size: 1\n", "YAML tag"),
    "laughs.yaml": (LAUGHS, "values once its YAML aliases"),
    "maps.yaml": (MAPS, "values once its YAML aliases"),
    "deep.yaml": ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
    "lists.yaml": ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    "deep.json": ('{"a":' * 12000 + "1" + "}" * 12000, "nested too deeply"),
    "lists.json": ('{"a":' + "[" * 40000 + "]" * 40000 + "}", "nested too deeply"),
    "deep.toml": ("a = " + "[" * 5000 + "]" * 5000, ""),
    "dots.toml": (".".join(["a"] * 3000) + " = 1\n", "nested"),
    "number.json": ('{"train_micro_batch_size_per_gpu": ' + "9" * 5000 + "}", ""),
    "infinite.json": ('{"train_micro_batch_size_per_gpu": 1e999}', "must be a whole number"),
    "huge.yaml": ("a: 1\n# " + "x" * 600_000, "larger than 100 kB"),
    "twice.json": ('{"train_batch_size": 1, "train_batch_size": 2}', "appears twice"),
    "twice.toml": ("max_steps = 1\nmax_steps = 2\n", "not valid TOML: Cannot overwrite a value (at line 2"),
    "two.yaml": ("base_model: a\n---\nbase_model: b\n", "2 YAML documents"),
    "list.yaml": ("- 1\n- 2\n", "must be a YAML mapping"),
    "list.json": ("[1]", "must be a JSON object"),
    "empty.yaml": ("", "no keys"),
    "empty.sh": ("", "no keys"),
    "binary.yaml": ("\0\1\2", ""),
    "minus.sh": ("torchrun x.py --micro-batch-size -1 --seq-length 4", "must be a whole number"),
    "words.sh": ("--a " * 20_000, "more than 15000 words"),
    "run.sh": ("torchrun x.py --micro-batch-size $(touch {mark}) --seq-length 4 `touch {mark}`", "comes from outside"),
    "sum.sh": ("A=$((9**9**9))\ntorchrun x.py --micro-batch-size $A --seq-length 4", "comes from outside"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_line(name: str, tmp_path: Path) -> None:
    text, words = HOSTILE[name]
    mark, place = tmp_path / "mark", tmp_path / name
    place.write_text(text.replace("{mark}", str(mark)))
    start = time.process_time()
    for line in (["convert", str(place), "--to", "flags"], ["estimate", str(place)]):
        found = typed(line)
        assert found.code == 2, found
        assert not found.out
        assert found.err.startswith("loadgauge: ")
        assert found.err.count("\n") == 1
        assert "defect" not in found.err
    assert words in typed(["convert", str(place), "--to", "flags"]).err
    assert not mark.exists()
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.yaml",
            f"defaults: grpo-{'9' * 400}.yaml\npolicy: {{model_name: meta-llama/Llama-3.1-8B-Instruct}}\ngrpo: {{}}\n",
        ),
        ("run.sh", f"swift sft {'a' * 5000}.yaml --model Qwen/Qwen3-8B\n"),
        ("rl.toml", f'[model]\nname = "{"m" * 5000}"\n[orchestrator]\nseq_len = 4096\n'),
    ],
)
def test_a_name_that_is_longer_than_a_file_has_it(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = typed(["estimate", str(tmp_path / name), "--gpus", "8"])
    assert "defect" not in found.err
    assert found.code in (0, 1, 2), found


def test_tables_of_one_name_with_others_between() -> None:
    """It is valid TOML, which the library that keeps comments does not join."""
    apart = '[[o.s]]\nname = "a"\n[o.s.e]\nx = 1\n[t.m]\ny = 2\n[o.s.f]\nz = 3\n'
    with pytest.raises(KeyAlreadyPresent):
        tomlkit.parse(apart).unwrap()
    document = toml_document(apart)
    assert document.get("t.m.y") == 2
    document.put("t.m.y", 5)
    again = toml_document(document.text())
    assert (again.get("t.m.y"), again.get("o.s")) == (5, [{"name": "a", "e": {"x": 1}, "f": {"z": 3}}])


def test_of_a_key_twice_the_last_counts_and_is_named(tmp_path: Path) -> None:
    """As PyYAML reads it, with which the tools read their files."""
    place = tmp_path / "twice.yaml"
    place.write_text("micro_batch_size: 1\nmicro_batch_size: 2\nsequence_len: 64\nbase_model: gpt2\n")
    found = typed(["convert", str(place), "--to", "flags"])
    assert (found.code, "--micro-batch 2" in found.out) == (0, True)
    assert "micro_batch_size is given more than once, and its last value is read" in found.err


def test_not_a_file(tmp_path: Path) -> None:
    for place, words in (
        (tmp_path, "is not a file"),
        (tmp_path / "x.yaml", "no such file"),
        (Path("/dev/zero"), "is not a file"),
    ):
        found = typed(["convert", str(place), "--to", "flags"])
        assert (found.code, found.out) == (2, "")
        assert words in found.err
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not text" in typed(["convert", str(tmp_path / "bytes.yaml"), "--to", "flags"]).err


def test_a_zero_byte_in_the_file_to_patch(tmp_path: Path) -> None:
    place, onto = tmp_path / "job.yaml", tmp_path / "train.sh"
    place.write_text("base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 1\nsequence_len: 2048\n")
    onto.write_text("torchrun x.py --micro-batch-size 1 \0 --seq-length 4\n")
    found = typed(f"convert {place} --to megatron --onto {onto}")
    assert (found.code, found.out) == (2, "")
    assert "holds a zero byte" in found.err


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**12), st.floats(allow_nan=False), st.text(max_size=8), st.just("auto"),
    st.lists(st.text(max_size=3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_for_any_key(name: str, data: st.DataObject) -> None:
    """Nonsense under known keys is either read or refused as an error of ours; nothing else ever happens."""
    from io import StringIO

    from ruamel.yaml import YAML

    chosen = dialect(name)
    if "yaml" not in chosen.syntaxes:
        return
    known = sorted(chosen.known)
    found = data.draw(st.dictionaries(st.sampled_from(known), VALUES, min_size=1, max_size=5))
    nested: dict[str, object] = {}
    for key, value in found.items():
        place = nested
        *sections, last = key.split(".")
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                break
            place = inner
        else:
            place[last] = value
    target = StringIO()
    YAML(typ="safe", pure=True).dump(nested, target)
    text = target.getvalue()
    try:
        job = read(text, name, file="job.yaml")
        write(job.job, name, text, file="job.yaml")
    except Error:
        return


def test_a_run_that_cannot_be_is_refused_on_the_way_out() -> None:
    for run in ({"tp": 4, "gpus": 6}, {"gpus": 8, "micro_batch": 3, "global_batch": 8}, {"gpus": 8, "replicas": 3}):
        for name in FILES:
            with pytest.raises(Error):
                write(Job(model="", **run), name)
