"""Every JSON document has the shape that `loadgauge schema` states, and that shape refuses documents that differ from it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator

from command_line import typed, written
from loadgauge.core.base import read_data
from loadgauge.core.command_line.main import COMMANDS, commands
from loadgauge.core.text.table import SCHEMA

ROOT = Path(__file__).parents[3]
H100 = "--gpu h100-sxm5-80gb --gpus 8"
GRPO = "--task grpo --prompts 64 --samples 16 --prompt-len 1024 --answers exp:2000,8192"
ROLLOUT = f"estimate qwen3-8b {H100} {GRPO} --rollout vllm:tp=2,utilization=0.6,sleep=2 --zero 3 --recompute full"
PLAN = f"plan llama-3.1-8b {H100} --global-batch 8 --tp 1 --pp 1 --cp 1 --seq-len 2048"
FLEET = (
    "fleet llama-3.1-70b --gpu h100 --gpus 512 --tp 8 --pp 4 --zero 1 --global-batch 512 --tokens 1T --runs 20"
    " --topology rail"
)
NETWORK = "network llama-3.1-70b --gpu h100-sxm5-80gb --gpus 512 --tp 8 --zero 1 --global-batch 1024"
LINES = {
    "estimate.train": [
        f"estimate llama-3.1-8b {H100} --zero 3 --tokens 1T --price 2.5 --mtbf-hours 50000 --days 30",
        "estimate llama-3.1-8b",
        "estimate qwen3-8b --gpu 4090 --qlora --eval-batch 4",
        "estimate gemma-3-12b --gpu h200 --gpus 2 --zero 3 --seq-len 8192",
        "estimate llama-3.1-8b --gpu h100 --lengths uniform:4096 --micro-batch 8",
        "estimate mixtral-8x7b --gpu h100 --gpus 16 --ep 8 --zero 1 --expert-imbalance 1.5",
        f"estimate examples/train.yaml {H100}",
        "estimate llama-3.1-70b --gpus 64 --tp 8 --pp 4 --explain activations",
        "estimate llama-3.1-8b --gpu h100 --explain mfu",
    ],
    "estimate.posttrain": [
        f"{ROLLOUT} --steps 100 --price 2",
        f"estimate qwen3-30b-a3b --gpu h100 --gpus 16 {GRPO}",
        "estimate qwen3-8b --gpu 4090 --task dpo --seq-len 2048",
        "estimate qwen3-8b --task dpo --seq-len 2048",
    ],
    "estimate.posttrain.explain": [f"{ROLLOUT} --explain tail"],
    "estimate.inference": [
        "estimate llama-3.1-8b --task generate --context 4096 --batch 16 --tp 2 --gpu h100 --price 2",
        "estimate qwen3-8b --gpu h100 --task generate --context 4096 --batch 8 --server vllm",
        "estimate llama-3.1-8b --task generate --context 4096",
        "estimate llama-3.1-8b --gpu h100 --task generate --context 4096 --server vllm --draft llama-3.2-1b",
        "estimate qwen3-30b-a3b --gpu rtx4090 --task generate --context 4096 --offload experts",
        "estimate llama-3.1-8b --gpu rtx4090 --task quantise --weight-format gptq",
        "estimate llama-3.1-8b --task forward --context 4096 --gpu h100",
    ],
    "estimate.table": [
        f"estimate llama-3.1-8b --table {name}" for name in ("operations", "weights", "flops", "activations")
    ],
    "estimate.sweep": [
        f"estimate llama-3.1-8b {H100} --sweep micro-batch=1,64 --sweep tp=1,3 --tokens 1T",
        "estimate llama-3.1-8b --sweep micro-batch=1,2",
        "estimate qwen3-8b --gpu 4090 --task dpo --sweep seq-len=1024,2048",
    ],
    "plan.layouts": [
        f"{PLAN} --why-not zero=3 --export torchtitan",
        f"{PLAN} --micro-batch 1 --zero 3 --what-next",
        "plan llama-3.1-8b --gpu rtx4090 --gpus 2 --global-batch 2 --tp 1 --pp 1 --cp 1",
    ],
    "plan.find": [
        f"{PLAN} --find gpus",
        f"{PLAN} --zero 3 --find micro-batch",
        f"{PLAN} --find gpus --tokens 1B --days 30",
    ],
    "plan.serving": [
        *(
            f"plan qwen3-8b --gpu {gpu} --gpus 2 --task generate --answer 512 --batch 4 --pp 1"
            for gpu in ("h100", "rtx4060")
        ),
        "plan qwen3-8b --gpu h100 --gpus 2 --task generate --answer 512 --batch 4 --apart",
        "plan qwen3-8b --gpu h100 --gpus 2 --task forward --context 512 --batch 4",
    ],
    "plan.task": [
        *(f"plan qwen3-8b --gpu {gpu} --gpus 8 {GRPO} --tp 2 --zero 1" for gpu in ("h100", "4090")),
        "plan llama-3.2-1b --gpu 4090 --task dpo --find micro-batch --seq-len 2048",
    ],
    "network.needs": [
        NETWORK,
        "network llama-3.1-8b --gpu a100-sxm4-80gb --gpus 64 --zero 3 --oversubscription 4 --rails --pod 32",
    ],
    "network.explain": [
        f"{NETWORK} --explain tp",
        "gpus h100 --explain gpus.tdp",
        "why examples/oom.txt --explain capacity",
        "estimate gpt2 --gpu l4 --explain memory.total",
    ],
    "network.sweep": ["network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --sweep tp=3,8"],
    "fleet.run": [f"{FLEET} --what-if --price 2"],
    "fleet.explain": [f"{FLEET} --explain days"],
    "fleet.find": [f"{FLEET} --find {name}" for name in ("checkpoint-interval", "spares", "oversubscription")],
    "fleet.sites": [f"{FLEET.partition(' --runs')[0]} --sites 2 --between 100Gbit/s --price 2"],
    "fleet.find-sites": [f"{FLEET.partition(' --runs')[0]} --find sites --between 100Gbit/s"],
    "fleet.sweep": [f"{FLEET} --sweep spares=0,1%"],
    "fleet.jobs": ["fleet --jobs {jobs}"],
    "equation.forms": [
        "equation activations --tp",
        "equation states",
        "equation bubble",
        "equation params --layer deepseek-v3",
    ],
    "equation.catalogue": ["equation"],
    "article.tables": ["article 2", "article 4"],
    "validate.runs": ["validate --source SM"],
    "validate.operators": ["validate --operators"],
    "why.message": [
        "why examples/oom.txt",
        f"why examples/oom.txt --model llama-3.1-8b {H100} --zero 3 --seq-len 8192",
    ],
    "why.snapshot": ["why {snapshot}"],
    "gpus.catalogue": ["gpus h100", "gpus"],
    "runs.list": ["runs bloom-176b", "runs bloom-176b --predict"],
    "models.catalogue": ["models llama"],
    "models.types": ["models --check"],
    "check.jobs": ["check examples/train.yaml gpt2 nosuch.yaml --gpu 4090 --budget memory=22GiB --tokens 1B"],
    "lint.files": ["lint examples/train.yaml --gpu 4090"],
    "check.facts": ["check examples/train.yaml --facts"],
    "convert.job": ["convert examples/train.yaml --to megatron"],
    "serve.address": ["serve --port 0 --no-browser"],
}
"""Command lines by the form of the document that they print."""
LARGE = {
    "plan.sweep": ["plan --sweep {sweep} --output {folder}"],
    "saved.expression": ["saved 'torch.nn.Sigmoid()(x)'"],
    "saved.cases": ["saved --cases"],
    "article.tables": ["article 5"],
    "measure.steps": ["measure {tiny} --seq-len 32 --steps 1 --precision fp32"],
    "trace.steps": ["trace gpt2 --seq-len 64 --layers 1 --gpus 2 --zero 2"],
    "why.trace": ["why {trace}"],
    "compare.ways": ["compare {tiny} --seq-len 64 --measure cpu --device cpu --precision fp32"],
    "capture.step": [
        "capture gpt2 --seq-len 64 --layers 1 --gpu 4090 --no-cache",
        "capture examples/module.py:model --inputs examples/module.py:batch --micro-batch 8",
    ],
    "estimate.train": ["estimate examples/module.py:model --inputs examples/module.py:batch --micro-batch 64"],
    "calibrate.device": ["calibrate --device cpu"],
}
"""Those that need PyTorch, or other processes."""
NUMBERS = {"number", "integer"}


@functools.cache
def schema(name: str = "") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(typed(f"schema {name}").out)
    return value


@functools.cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(schema(name))


def refused(name: str, document: object) -> bool:
    return not validator(name).is_valid(document)


@functools.cache
def printed(line: str) -> Any:
    return json.loads(typed(f"{line} --json").out)


def agrees(name: str, document: Any) -> None:
    """Fails where a document differs from its form, or from what its command prints."""
    wrong = [
        f"{'/'.join(map(str, each.absolute_path))}: {each.message[:300]}"
        for each in validator(name).iter_errors(document)
    ]
    assert not wrong, "\n".join(wrong)
    assert not refused(name.partition(".")[0], document)  # that of `--explain` is the same in all


def cases(lines: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(name, line, id=f"{name}-{place}")
        for name, each in lines.items()
        for place, line in enumerate(each)
    ]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(("name", "line"), cases(LINES))
def test_every_document_has_its_shape(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if name == "serve.address":
        pytest.importorskip("starlette")
        pytest.importorskip("uvicorn")
        monkeypatch.setattr("loadgauge.page.server.app.run", lambda *_: None)
    agrees(name, printed(written(line, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), cases(LARGE))
def test_every_document_of_real_code_has_its_shape(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    pytest.importorskip("torch")
    if name == "calibrate.device":
        from loadgauge.pytorch.measure import benchmarks

        small = benchmarks.Sizes(
            matmul=((256, 256, 256), (512, 256, 64), (64, 64, 64)), attention=((1, 128, 2, 32),), elements=(2**16,),
            parameters=2**12, payloads=(2**10, 2**14),
        )  # fmt: skip
        monkeypatch.setattr(benchmarks, "ON_CPU", small)
    agrees(name, printed(written(line, tmp_path)))


def test_the_schema_is_one_and_says_its_version() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["$defs"]["version"]["const"] == SCHEMA
    assert schema()["$id"].endswith(f":{SCHEMA}")
    for name in LINES | LARGE:
        Draft202012Validator.check_schema(schema(name))
    assert typed("schema nosuch").code == 2


def test_every_command_with_json_has_a_schema_and_every_form_a_test() -> None:
    context = click.Context(commands)
    told = {entry["$ref"].rpartition("/")[2] for entry in schema()["anyOf"]}
    with_json = set()
    for name in COMMANDS:
        command = commands.get_command(context, name)
        assert command is not None
        if any("--json" in parameter.opts for parameter in command.params):
            with_json.add(name)
    assert told == with_json
    forms = {entry["$ref"].rpartition("/")[2] for name in told for entry in schema()["$defs"][name]["anyOf"]}
    assert forms == {*LINES, *LARGE}


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, shape in schema()["$defs"].items():
        for key, value in shape.get("properties", {}).items():
            yield f"{name}.{key}", value


def alternatives(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield value
    for other in [
        *value.get("anyOf", ()),
        *(value[key] for key in ("items", "additionalProperties") if value.get(key)),
    ]:
        yield from alternatives(other)


def test_every_property_is_described_and_every_number_has_a_unit() -> None:
    """A number is of a shape that says its unit, such as `bytes`; none is only a number."""
    for name, value in properties():
        assert value.get("description"), name
        for each in alternatives(value):
            types = each.get("type", [])
            assert not NUMBERS & set([types] if isinstance(types, str) else types), f"{name} has no unit"


def test_every_shape_is_closed_but_what_others_go_on_from_and_rows_as_flat_as_csv() -> None:
    extended = {shape["$ref"].rpartition("/")[2] for shape in schema()["$defs"].values() if "$ref" in shape}
    for name, shape in schema()["$defs"].items():
        if "properties" in shape and name not in {*extended, "cell", "result", "fleet_cell"}:
            assert False in (shape.get("additionalProperties"), shape.get("unevaluatedProperties")), name


# -- documents that differ are refused ---------------------------------------------------------------------------------

HOLDERS = {
    "estimate.train": lambda found: found["memory"],
    "estimate.posttrain": lambda found: found["memory"],
    "estimate.inference": lambda found: found["memory"],
    "plan.layouts": lambda found: found["layouts"][0]["memory"],
    "plan.find": lambda found: found["answers"][0]["best"]["memory"],
    "plan.serving": lambda found: found["choices"][0]["memory"],
    "plan.task": lambda found: found["best"]["memory"],
    "fleet.run": lambda found: found["memory"],
    "check.jobs": lambda found: found["jobs"][0]["memory"],
}
"""Where each document has the memory that all have."""


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("key", ["total", "low", "high", "capacity", "fits", "verdict"])
def test_memory_without_a_key_or_with_another_type_is_refused(name: str, key: str) -> None:
    whole = printed(LINES[name][0])
    agrees(name, whole)

    def changed(how: Any) -> Any:
        document = copy.deepcopy(whole)
        how(HOLDERS[name](document))
        return document

    value = HOLDERS[name](whole)[key]
    assert refused(name, changed(lambda held: held.pop(key)))
    assert refused(name, changed(lambda held: held.update({f"{key}_bytes": held.pop(key)})))
    assert refused(name, changed(lambda held: held.update({f"new_{key}": 1})))
    for other in (
        "73 GiB",
        [value],
        {"value": value},
        "yes" if isinstance(value, bool) else -1,
        *([] if key == "capacity" else [None]),
    ):
        assert refused(name, changed(lambda held, other=other: held.update({key: other}))), other


@pytest.mark.parametrize(
    "wrong",
    [
        {"verdict": "fits", "fits": False}, {"verdict": "tight", "fits": True}, {"verdict": "unknown"},
        {"capacity": None}, {"verdict": "NEEDS"}, {"verdict": "does not fit", "fits": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_verdict_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    whole = copy.deepcopy(printed(LINES["estimate.train"][0]))
    assert whole["memory"]["verdict"] == "fits"
    whole["memory"] |= wrong
    assert refused("estimate.train", whole)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("equation.forms", "equations 0 unit"), ("article.tables", "tables 0 rows 0 unit"), ("network.explain", "unit"),
        ("network.explain", "lines 0 unit"), ("validate.runs", "rows 0 quantity"), ("estimate.table", "note"),
        ("estimate.train", "time step"), ("estimate.train", "time high"), ("estimate.train", "assumed"),
        ("estimate.posttrain", "time low"), ("estimate.posttrain", "not_counted"), ("estimate.train", "schema"),
        ("plan.layouts", "missing"), ("plan.layouts", "layouts 0 command"), ("estimate.sweep", "cells 0 memory_total"),
    ],
)  # fmt: skip
def test_a_document_without_a_unit_or_another_key_is_refused(name: str, path: str) -> None:
    document = copy.deepcopy(printed(LINES[name][0]))
    *way, last = path.split()
    held = document
    for step in way:
        held = held[int(step) if step.isdecimal() else step]
    value = held.pop(last)
    assert refused(name, document)
    held[last] = {"of another type": value} if isinstance(value, list) else [value]
    assert refused(name, document)


def test_what_is_not_known_is_said() -> None:
    """Where there is no time it is null, and `untimed` says why."""
    for name in ("estimate.train", "estimate.posttrain"):
        (document, *_) = (printed(line) for line in LINES[name] if "--gpu " not in line)
        assert document["time"] is None
        assert document["untimed"]
        assert refused(name, {key: value for key, value in document.items() if key != "untimed"})


def test_the_same_thing_has_the_same_key_in_every_command() -> None:
    """Each as text is what another command says of the same run."""
    job = f"gpt2 {H100} --zero 1 --global-batch 64 --micro-batch 1 --framework megatron --seq-len 1024"
    whole = printed(f"estimate {job} --tokens 1B --price 2")
    of_fleet = printed(f"fleet {job} --tokens 1B --runs 5")
    planned = printed(f"plan {job} --tp 1 --pp 1 --cp 1 --recompute none")["layouts"][0]
    (checked,) = printed(f"check {job}")["jobs"]
    core = {key: whole["memory"][key] for key in ("total", "low", "high", "capacity", "fits", "verdict")}
    assert core == of_fleet["memory"] == checked["memory"] == {key: planned["memory"][key] for key in core}
    assert whole["time"]["step"] == of_fleet["step"] == planned["time"]["step"]
    assert whole["layout"] == planned["layout"]
    assert whole["model"]["name"] == of_fleet["model"]["name"]


def test_no_key_of_the_schema_is_given_twice() -> None:
    """Of two alike JSON takes the last, and documents of the first would be wrong."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert len(set(keys)) == len(keys), [key for key in keys if keys.count(key) > 1]
        return dict(pairs)

    json.loads(read_data("schema.json"), object_pairs_hook=once)
