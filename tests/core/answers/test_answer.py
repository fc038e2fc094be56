"""Every kind of answer has the same numbers in all its forms, and goes with every flag that says how it is printed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from command_line import typed, written
from loadgauge.core.answers.answer import Answer
from loadgauge.core.command_line.options import answering
from loadgauge.core.text.show import How, show

GRPO = "--task grpo --prompts 8 --samples 4 --prompt-len 512 --answers 1000 --rollout vllm:tp=2,sleep=2 --zero 3"
FLEET = "fleet llama-3.2-1b --gpu h100 --gpus 64 --zero 1 --global-batch 64 --tokens 100B --runs 4 --seq-len 2048"
PLAN = "plan llama-3.2-1b --gpu h100 --gpus 4 --global-batch 8 --tp 1 --pp 1 --cp 1 --seq-len 2048 --micro-batch 1 --zero 0"
KINDS = {  # a command line, and a number of it that can be explained
    "estimate": ("estimate llama-3.2-1b --gpu h100 --gpus 4 --zero 3", "activations"),
    "estimate, a step": ("estimate gpt2 --gpu l4", "mfu"),
    "estimate, no card": ("estimate gpt2", "weights"),
    "table": ("estimate gpt2 --gpu l4 --table flops", ""),
    "sweep": ("estimate gpt2 --gpu l4 --sweep micro-batch=1,2", ""),
    "generate": ("estimate llama-3.2-1b --gpu h100 --task generate --context 2048 --batch 4", "token"),
    "forward": ("estimate llama-3.2-1b --gpu h100 --task forward --context 2048", "first"),
    "post-training": (f"estimate qwen3-0.6b --gpu h100 --gpus 4 {GRPO}", "tail"),
    "pairs": ("estimate qwen3-0.6b --gpu h100 --gpus 4 --task dpo", "logprobs"),
    "network": ("network llama-3.1-8b --gpu h100 --gpus 16 --tp 8", "tp"),
    "networks": ("network llama-3.1-8b --gpu h100 --gpus 16 --sweep tp=1,2", ""),
    "plan": (PLAN, "weights"),
    "plan, nothing fits": (PLAN.replace("h100 --gpus 4", "h100 --memory 8GiB --gpus 1"), "optimizer"),
    "plan, inverse": (f"{PLAN} --find gpus", ""),
    "plan of a server": (
        "plan llama-3.2-1b --gpu h100 --gpus 1 --task generate --context 2048 --answer 512 --batch 4", "memory",
    ),
    "fleet": (FLEET, "goodput"),
    "fleet, inverse": (f"{FLEET} --find spares", ""),
    "sites": (f"{FLEET} --sites 2 --between 100Gbit/s", ""),
    "fleets": (f"{FLEET} --sweep spares=0,1%", ""),
    "cards": ("gpus h100", "gpus.capacity"),
    "models": ("models llama", "models.params"),
    "runs": ("runs bloom-176b --predict", "runs.published"),
    "closed forms": ("equation amdahl --numbers serial=1h,total=20h,n=64", ""),
    "quantities": ("equation", ""),
    "article": ("article 2", "tables.rows.right"),
    "validation": ("validate --source SM --rows", "rows.measured"),
    "operators": ("validate --operators", "operators.median"),
    "error": ("why examples/oom.txt", "capacity"),
    "error of a run": (
        "why examples/oom.txt --model llama-3.1-8b --gpu h100 --gpus 8 --zero 3 --seq-len 8192", "changes.memory.total",
    ),
}  # fmt: skip
OF_PYTORCH = {
    "snapshot": ("why {snapshot}", "parts"),
    "recording": ("trace gpt2 --seq-len 64 --layers 1", "peak.categories"),
    "recording of a rank": ("trace gpt2 --seq-len 64 --layers 2 --gpus 2 --zero 2", "collectives.payload"),
    "error of a recording": ("why {trace}", "parts"),
    "capture": ("capture gpt2 --seq-len 64 --layers 1 --gpu 4090", "at_peak"),
    "measurement": ("measure {tiny} --seq-len 32 --steps 1 --precision fp32", "states"),
    "comparison": ("compare {tiny} --seq-len 64 --measure cpu --device cpu --precision fp32", "rows.trace"),
    "saved tensors": ("saved 'torch.nn.Sigmoid()(x)'", "tensors.nbytes"),
    "saved cases": ("saved --cases", "cases.kept"),
}
EMPTY = ("generate", "forward", "validation")
"""Kinds with a table that may be empty: of traffic, or of rows that are not predicted."""
SHORT = ("sweep", "table", "runs", "cards")
"""Kinds whose first line in short is told in other words, or has the numbers of a table alone."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> Counter[str]:
    """The numbers of a text, but for what a search says of its own wall-clock time."""
    text = re.sub(r"[\d.,]+ s\.", "", text).replace("&lt;", "<")
    return Counter(number.rstrip(",") for number in NUMBER.findall(text.replace("\\", "")))


def leaves(value: Any) -> Iterator[float]:
    """Every number of a document."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def texts(value: Any) -> Iterator[str]:
    """Every text of a document."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def answers_of(line: str, monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """The answer that a command line prints; none where there is none."""
    kept: list[Answer] = []
    monkeypatch.setattr(answering, "show", lambda answer, how: kept.append(answer) or 0)
    assert (typed(line).code == 0) == bool(kept)
    return kept


def answer_of(line: str, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """The answer that a command line prints."""
    return answers_of(line, monkeypatch)[0]


def printed(answer: Answer, **how: Any) -> str:
    """What is printed of an answer."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert show(answer, How(**how)) == answer.code
    return out.getvalue()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_an_answer_are_the_same_in_every_form(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, topic = KINDS[kind]
    agrees(answer_of(line, monkeypatch), topic, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_PYTORCH)
def test_the_numbers_of_what_pytorch_does_are_the_same_in_every_form(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    line, topic = OF_PYTORCH[kind]
    agrees(answer_of(written(line, tmp_path), monkeypatch), topic, kind)


MODELS = ("gpt2", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "mistral-7b", "gemma-2-2b", "qwen2.5-7b")
CARDS = ("h100", "l4", "a100-sxm4-80gb", "4090", "h200", "b200-sxm-180gb")
OOM = (
    "why 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {number}.50 GiB. GPU 0 has a total capacity of 79.11 GiB of"
    " which {number}.25 GiB is free. Of the allocated memory 7{number}.00 GiB is allocated by PyTorch.'"
)
PARTS = {
    "models llama": "models {word}",
    "gpus h100": "gpus {card}",
    "article 2": "article {number}",
    "why examples/oom.txt": OOM,
    "saved 'torch.nn.Sigmoid()(x)'": "saved '{function}'",
}
"""Lines without a model, with places for what is drawn."""
EXPRESSIONS = (
    "torch.sigmoid(x) * y",
    "F.gelu(x)",
    "nn.Linear(1024, 64)(x)",
    "(x @ y).relu()",
    "F.layer_norm(x, (1024,))",
    "x.exp() + y",
)
ALIKE = {**KINDS, **OF_PYTORCH}
DRAWN = [kind for kind, (line, _) in ALIKE.items() if line in PARTS or re.search(r"--gpu |--seq-len ", line)]


def another(line: str, draw: Random) -> str:
    """A command line of the same kind: of another model, card, length and micro-batch."""
    words = ["llama", "qwen", "gemma", "deepseek", "gpt", "mistral", "phi", "olmo", "glm"]
    drawn = {
        "word": draw.choice(words),
        "card": draw.choice(CARDS),
        "number": draw.randint(1, 4),
        "function": draw.choice(EXPRESSIONS),
    }
    line = PARTS[line].format(**drawn) if line in PARTS else line
    if "{tiny}" not in line:
        line = re.sub(rf"\b({'|'.join(map(re.escape, MODELS))})\b", lambda _: draw.choice(MODELS), line)
    line = re.sub(r"--gpu \S+", lambda _: f"--gpu {draw.choice(CARDS)}", line)
    short = {"512", "1024", "2048"}
    return re.sub(
        r"--(seq-len|context|prompt-len) (\d+)",
        lambda match: f"--{match[1]} {draw.choice((512, 1024, 1536) if match[2] in short else (16, 32, 48))}",
        line,
    )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
def test_ten_drawn_answers_of_each_kind_have_the_same_numbers(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kind in OF_PYTORCH:
        pytest.importorskip("torch")
    (line, _), draw = ALIKE[kind], Random(kind)
    lines = [written(another(line, draw), tmp_path) for _ in range(10)]
    kept = [found for each in lines for found in answers_of(each, monkeypatch)]
    assert len(kept) > 4
    for answer in kept:
        agrees(answer, "", kind)


def agrees(answer: Answer, topic: str, kind: str) -> None:
    """Fails where a form of an answer, or of what explains a number of it, has a number that another has not."""
    assert answer.command
    for asked in (None, *([topic] if topic else [])):
        whole, brief = printed(answer, topic=asked, brief=False), printed(answer, topic=asked, brief=True)
        marked = printed(answer, topic=asked, markdown=True, brief=False)
        assert numbers(whole) == numbers(marked)
        assert kind in EMPTY or all(pivot.table(answer.ledger()) for pivot in answer.pivots)
        if kind not in SHORT:
            assert not numbers(brief.partition("\n")[0]) - numbers(whole)
            assert asked or not numbers(answer.headline()) - numbers(whole)
        rows = list(csv.DictReader(io.StringIO(printed(answer, topic=asked, csv=True))))
        told = json.loads(printed(answer, topic=asked, json=True))
        told.pop("schema")
        for document_of in (told, told.get("explain", {})):
            document_of.pop("seconds", None)
        if rows and "value" in rows[0] and "unit" in rows[0]:
            said = Counter(float(row["value"]) for row in rows if row["of"] != "seconds")
            assert said == Counter(map(float, leaves(told)))
            assert all(row["unit"] for row in rows)
        else:
            known = {*map(str, leaves(told)), *(text for text in texts(told))}
            assert {cell for row in rows for cell in row.values() if NUMBER.fullmatch(cell or "")} <= known


def test_parts_are_pivots_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answer_of(KINDS["post-training"][0], monkeypatch)
    ledger = answer.ledger()
    (table,) = (pivot.table(ledger) for pivot in answer.pivots)
    for phase in answer.to_dict()["memory"]["phases"]:
        assert sum(table[phase["phase"]].values()) == pytest.approx(phase["total"])
    assert {entry.unit for entry in ledger if entry.keys["of"].startswith("memory.phases.")} == {"byte"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("estimate gpt2 --json --csv", "--json and --csv exclude one another"),
        ("network llama-3.1-8b --gpu h100 --gpus 16 --csv --brief", "--csv and --brief exclude one another"),
        ("why examples/oom.txt --plot a.svg", "it has --json, --csv and --markdown"),
        (
            "network llama-3.1-8b --gpu h100 --gpus 16 --plot a.svg --figure step",
            "the tables Seconds of the collectives",
        ),
        ("why examples/oom.txt --explain colour", "known: held, place, tried"),
        ("estimate gpt2 --sweep micro-batch=1,2 --explain mfu", "is not explained here"),
        ("estimate gpt2 --explain kv", "--task grpo"),
        (f"{PLAN} --explain colour", "is not explained here"),
    ],
)
def test_what_an_answer_has_not_is_said(line: str, said: str) -> None:
    found = typed(line)
    assert (found.code, found.out) == (2, "")
    assert said in found.err
