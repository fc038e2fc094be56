"""Keys that are not read: each is named, with what it can do; the range has it, and the verdict depends on it where it decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from command_line import document, typed
from job_runs import SUFFIXES, SYNTAXES, runs
from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.dialects import dialect
from loadgauge.job_files.exchange import read, write
from loadgauge.job_files.ideas import table
from loadgauge.job_files.ideas.coverage import Coverage, Stop, key_lists, primary
from loadgauge.job_files.job_file import note
from loadgauge.job_files.reading.documents import document as parsed

TRAINS = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
cutoff_len: 4096
per_device_train_batch_size: 1
bf16: true
optim: adamw_torch
"""
RULES = {
    "saver": Stop("is computed in parts", effect="saves", parts=("activations", "loss"), share=0.5),
    "coster": Stop("keeps a copy", effect="costs", parts=("weights",)),
    "swinger": Stop("runs in a kernel of its own", effect="either", parts=("activations",)),
    "slower": Stop("takes another time", effect="costs"),
    "stopper": Stop("trains another model"),
}


@pytest.fixture
def ruled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of `RULES` are in every tool's lists."""
    monkeypatch.setattr(table, "key_lists", lambda name: key_lists(name).joined(Coverage(stops=RULES)))


def placed(folder: Path, *more: str) -> Path:
    place = folder / "job.yaml"
    place.write_text(TRAINS + "".join(f"{line}\n" for line in more))
    return place


def estimate(place: Path, more: str = "--gpu h100-sxm5-80gb") -> dict[str, Any]:
    return document(f"estimate {place} --gpus 1 {more}")


def keys_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["key"]: one for one in found["unread"]}


@pytest.mark.usefixtures("ruled")
@pytest.mark.parametrize("key", ["saver", "coster", "swinger", "slower"])
def test_a_key_moves_only_the_ends_that_it_can_move(key: str, tmp_path: Path) -> None:
    plain, found = estimate(placed(tmp_path)), estimate(placed(tmp_path, f"{key}: true"))
    own, rule = keys_of(found)[key], RULES[key]
    before, after = plain["memory"]["widest"], found["memory"]["widest"]
    peak, largest = plain["memory"]["parts"], plain["memory"]["largest"]
    saved = rule.share * sum(peak[part] for part in rule.parts) if rule.effect != "costs" else 0
    cost = rule.share * sum(largest[part]["bytes"] for part in rule.parts) if rule.effect != "saves" else 0
    assert (own["low_bytes"], own["high_bytes"], own["why"]) == (saved, cost, rule.why)
    assert found["memory"]["total"] == plain["memory"]["total"]
    assert after["low"] <= before["low"] if saved else after["low"] == before["low"]
    assert after["high"] > before["high"] if cost else after["high"] == before["high"]


@pytest.mark.usefixtures("ruled")
def test_the_verdict_depends_on_a_key_that_decides(tmp_path: Path) -> None:
    plain = estimate(placed(tmp_path))["memory"]
    between = (plain["high"] / 2**30) + 1
    card = f"--memory {between:.2f}GiB"
    assert estimate(placed(tmp_path), card)["memory"]["verdict"] == "fits"
    assert estimate(placed(tmp_path, "saver: true"), card)["memory"]["verdict"] == "fits"
    depends = estimate(placed(tmp_path, "coster: true"), card)["memory"]
    assert depends["verdict"] == "depends"
    assert (depends["question"]["flag"], depends["question"]["key"]) == ("coster", True)
    # How much the key costs is within the range of a card, or beyond it.
    assert [choice["verdict"] == "fits" for choice in depends["question"]["choices"]] == [True, False]


@pytest.mark.usefixtures("ruled")
def test_what_does_not_fit_may_with_a_key_that_saves(tmp_path: Path) -> None:
    card = f"--memory {estimate(placed(tmp_path))['memory']['low'] / 2**30 - 1:.2f}GiB"
    assert estimate(placed(tmp_path), card)["memory"]["verdict"] == "does not fit"
    assert estimate(placed(tmp_path, "coster: true"), card)["memory"]["verdict"] == "does not fit"
    found = estimate(placed(tmp_path, "saver: true"), card)["memory"]
    assert (found["verdict"], found["question"]["flag"]) == ("depends", "saver")


@pytest.mark.usefixtures("ruled")
def test_each_thing_that_keys_can_do_is_one_line_below_the_verdict(tmp_path: Path) -> None:
    place = placed(
        tmp_path, "saver: true", "coster: true", "swinger: true", "slower: true", "my_kernel: x", "my_note: x"
    )
    found = typed(f"estimate {place} --gpu h100-sxm5-80gb --gpus 1")
    lines = [line for line in found.out.splitlines() if line.startswith("Not read, ")]
    assert [line.partition(":")[0] for line in lines] == [
        "Not read, can only save",
        "Not read, can only cost",
        "Not read, can save or cost",
        "Not read, may change memory, by how much is not known",
    ]
    assert "slower (time alone)" in lines[1]
    assert lines[3].endswith("not known: my_kernel.")
    assert found.out.index(lines[0]) < found.out.index("Peak moment")
    classes = {key: one["class"] for key, one in keys_of(estimate(place)).items()}
    assert classes == {
        "saver": "bounded", "coster": "bounded", "slower": "bounded", "swinger": "widening", "my_kernel": "unknown",
        "my_note": "unknown",
    }  # fmt: skip


@pytest.mark.usefixtures("ruled")
@pytest.mark.parametrize("key", ["saver", "coster", "swinger", "slower", "my_kernel"])
def test_strict_stops_for_each_and_convert_says_what_it_leaves_out(key: str, tmp_path: Path) -> None:
    place = placed(tmp_path, f"{key}: true")
    told = typed(f"convert {place} --to flags")
    assert told.code == 0
    assert key in told.err
    assert "not carried over" in told.err
    for line in (f"estimate {place} --gpus 1 --strict", f"convert {place} --to flags --strict"):
        found = typed(line)
        assert (found.code, found.out, found.err.count("\n")) == (2, "", 1), line
        assert f"{place}: {key}: " in found.err
    assert typed(f"convert {place} --to flags --ignore {key}").code == 0


@pytest.mark.usefixtures("ruled")
def test_a_key_without_an_effect_stops_unless_it_is_ignored(tmp_path: Path) -> None:
    place = placed(tmp_path, "stopper: true", "coster: true")
    assert typed(f"estimate {place} --gpus 1").err.endswith("trains another model; without it there is an estimate\n")
    found = estimate(place, "--ignore stopper,coster")
    assert (found["unread"], "left out as asked: stopper, coster" in found["file"]) == ([], True)
    told = typed(f"estimate {placed(tmp_path)} --gpus 1 --ignore stopping")
    assert (told.code, told.err) == (2, f"loadgauge: ignore: 'stopping' is no key of {place}\n")


def test_a_key_in_no_list_is_what_the_verdict_depends_on_where_its_name_suggests_memory(tmp_path: Path) -> None:
    found = estimate(placed(tmp_path, "my_kernel: x"))["memory"]
    assert (found["verdict"], found["question"]["flag"], len(found["question"]["choices"])) == (
        "depends",
        "my_kernel",
        1,
    )
    assert estimate(placed(tmp_path, "my_note: x", "kernel_log_steps: 8"))["memory"]["verdict"] == "fits"
    tight = estimate(placed(tmp_path, "my_kernel: x"), "--memory 8GiB")["memory"]
    assert tight["verdict"] == "does not fit"


@pytest.mark.parametrize(
    ("key", "value", "stops"),
    [
        ("my.max_seq_len", 2048, True), ("my.max_seq_len", 1, False), ("my.max_seq_len", True, False),
        ("--per-device-batch-size", "8", True), ("eval.batch_size", 8, False), ("writer_batch_size", 1000, False),
        ("tensorParallelSize", 2, True), ("cp_size", "$CP", True), ("num_gpus_per_node", 8, True), ("lora_dim", 64, True),
        ("vocab_size", 32000, True), ("n_layer", 12, True), ("checkpointing_steps", 500, False), ("lr_schedule", "cosine", False),
        ("reward_model_path", "x/y", True), ("teacher_model.name", "x/y", True), ("use_dpo", True, True), ("stage", "dpo", True),
        ("stage", "sft", False), ("distillation.enabled", True, True), ("distillation.alpha", 0.5, False),
    ],
)  # fmt: skip
def test_what_says_a_size_a_model_or_a_task_is_not_guessed_at(key: str, value: Any, stops: bool) -> None:
    assert primary(key, value) is stops


@pytest.mark.usefixtures("ruled")
def test_a_run_with_a_task_has_them_too(tmp_path: Path) -> None:
    place = placed(tmp_path, "coster: true", "my_kernel: x")
    place.write_text(place.read_text().replace("stage: sft", "stage: dpo"))
    found = estimate(place, "--gpu b200-sxm-180gb")
    assert found["memory"]["verdict"] == "depends"
    assert keys_of(found)["coster"]["high_bytes"] > 2**30
    assert "coster (at most" in typed(f"estimate {place} --gpus 1 --gpu h100-sxm5-80gb").out


NAMES = st.sampled_from(
    [
        "log_note",
        "my_kernel",
        "eager_mode",
        "report",
        "rope_thing",
        "shards_of",
        "run.note",
        "opt.kernel",
        "zzz",
        "data.pad_note",
    ]
)


@pytest.mark.parametrize(("name", "syntax"), SYNTAXES)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_key_is_read_or_named(name: str, syntax: str, data: st.DataObject) -> None:
    """The law of accounts: what a table reads and what the answer names are all keys of a file."""
    if syntax == "python":
        return  # calls have no keys that could be made up
    run = data.draw(runs(name, syntax))
    file = f"job.{SUFFIXES.get(syntax, syntax)}"
    try:
        whole = parsed(write(run, name, syntax=syntax).text, syntax, dialect(name), file)
        for key in data.draw(st.sets(NAMES, max_size=3)):
            whole.put(key, data.draw(st.sampled_from([0.5, "word", False])))
        found = read(whole.text(), name, file=file, given={"gpus": run.gpus} if run.gpus else None)
    except ConfigError:
        return
    keys, known = parsed(whole.text(), syntax, dialect(name), file), dialect(name).known
    named = {*found.unread, *(item.key for item in found.uncounted)}
    silent = [
        key
        for key in keys.names()
        if key not in known
        and key.replace(".no_", ".").removeprefix("no_") not in known
        and keys.shown(key) not in named
    ]
    assert not silent
    told = note(found)
    assert all(key in told for key in named)


def test_what_bounds_is_between_nothing_and_all() -> None:
    """Of every rule in every list: its share is one, and its parts are parts of the memory."""
    from loadgauge.core.estimate.memory.phases import PARTS
    from loadgauge.job_files.dialects import FILES

    for name in FILES:
        for key, rule in key_lists(name).stops.items():
            assert 0 <= rule.share <= 20, (name, key)
            assert set(rule.parts) <= set(PARTS), (name, key, rule.parts)
            assert rule.effect or not rule.parts, (name, key)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", True),
        ("export PYTORCH_ALLOC_CONF='max_split_size_mb:64,expandable_segments:True'", True),
        ("# export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", False),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", False),
    ],
)
def test_segments_that_grow_are_named(line: str, named: bool) -> None:
    text = f"{line}\ntorchrun -m trl.scripts.sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 1024 --bf16 true\n"
    found = [item for item in read(text, file="run.sh", given={"gpus": 1}).uncounted if "ALLOC_CONF" in item.key]
    assert [(item.effect, "low end" in item.note) for item in found] == [("", True)] * named


@pytest.mark.parametrize(("gpus", "effect"), [(None, ""), (1, ""), (2, "saves")])
def test_a_map_of_devices_matters_on_several_gpus(gpus: int | None, effect: str) -> None:
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 1024\nmodel_init_kwargs: {device_map: auto}\n"
    found = read(text, "trl", file="sft.yaml", given={"task": "sft"} | ({"gpus": gpus} if gpus else {})).uncounted
    assert [item.effect for item in found if "device_map" in item.key] == [effect]


@pytest.mark.parametrize(("name", "effects"), [("block_sparse_moe.gate", ["saves"]), ("mlp.gate", [])])
def test_a_module_that_has_another_name_now_is_named(name: str, effects: list[str]) -> None:
    text = f"base_model: mistralai/Mixtral-8x7B-v0.1\nsequence_len: 512\nunfrozen_parameters: ['model.layers.3[01].{name}']\n"
    found = [
        item.effect for item in read(text, "axolotl", file="a.yaml").uncounted if item.key == "unfrozen_parameters"
    ]
    assert found == effects


def test_mixtral_s_experts_have_that_name() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layer = modeling.MixtralDecoderLayer(
        modeling.MixtralConfig(hidden_size=32, intermediate_size=32, num_local_experts=2), 0
    )
    assert hasattr(layer, "mlp")
    assert not hasattr(layer, "block_sparse_moe")


@pytest.mark.parametrize(
    ("name", "bits", "effects"),
    [
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "true", ["costs"]),
        ("unsloth/Qwen3-14B-bnb-4bit", "true", []),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "false", []),
    ],
)
def test_dynamic_bits_are_named(name: str, bits: str, effects: list[str]) -> None:
    text = f"model_name_or_path: {name}\nmax_length: 512\nuse_peft: true\nload_in_4bit: {bits}\nbf16: true\n"
    found = [item.effect for item in read(text, "trl", file="a.yaml").uncounted if item.key == "model_name_or_path"]
    assert found == effects


@pytest.mark.parametrize(("value", "named"), [("true", True), ("false", False)])
def test_experts_that_run_as_usual_are_not_named(value: str, named: bool) -> None:
    text = f"base_model: Qwen/Qwen3-30B-A3B\nsequence_len: 512\nuse_scattermoe: {value}\n"
    assert ["use_scattermoe" for item in read(text, "axolotl", file="a.yaml").uncounted] == ["use_scattermoe"] * named
