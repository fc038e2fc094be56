"""The command line: what a person and a script see, and that nothing they type ends in a traceback."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import loadgauge
from command_line import FITS, PIPELINE, TOO_BIG, document, typed
from loadgauge.core.command_line.main import COMMANDS
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.plan.advise.advice import advice
from loadgauge.core.resolve.resolve import resolve_job

RAGGED = "estimate llama-3.1-8b --gpus 8 --zero 3 --micro-batch 4 --attention flash"


# -- the verdict -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "word", "code"),
    [
        (FITS, "FITS", 0),
        (TOO_BIG, "DOES NOT FIT", 1),
        ("estimate llama-3.1-8b", "NEEDS", 0),
        (PIPELINE, None, None),
    ],
)
def test_the_verdict_comes_first(line: str, word: str | None, code: int | None) -> None:
    found = typed(line)
    first = found.out.splitlines()[0]
    number = r"[\d,]+\.\d"
    pattern = (
        rf"(FITS|TIGHT|DOES NOT FIT|NEEDS)  ({number}) GiB( of {number} GiB)? on the worst rank"
        rf" \(stage \d+ of \d+\), 80 % range {number}-{number} GiB"
    )
    match = re.fullmatch(pattern, first)
    assert match, first
    assert word in (None, match[1])
    assert code in (None, found.code)
    assert (match[3] is None) == (match[1] == "NEEDS")
    total = document(line)["memory"]["total"]
    assert match[2] == f"{total / 2**30:,.1f}"


def test_exit_codes_follow_the_document() -> None:
    for line in (FITS, TOO_BIG, PIPELINE, "estimate gpt2"):
        fits = document(line)["memory"]["fits"]
        assert typed(line).code == typed(f"{line} --json").code == (1 if fits is False else 0)
    assert typed("estimate gpt2 --tp 7").code == 2


@pytest.mark.parametrize("line", [FITS, TOO_BIG, PIPELINE, "estimate bert-base", "gpus", "models", "equation states"])
@pytest.mark.parametrize("columns", [80, 200])
def test_text_is_plain_and_keeps_to_the_width(line: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = typed(line)
    assert "\x1b" not in found.out, "colour where there is no terminal"
    first, *rest = found.out.splitlines()
    assert len(first) <= max(columns, 110), "the verdict is one line, whatever the width"
    # A command line to be copied is never broken.
    assert all(len(row) <= columns for row in rest if not row.startswith("  loadgauge "))
    assert not any(row.endswith(" ") for row in rest)


def test_a_run_that_does_not_fit_is_told_what_to_change() -> None:
    out = typed(TOO_BIG).out
    assert "GiB over capacity; the largest part is optimizer" in out
    assert "Changes that make it fit" in out
    assert "--qlora" in out


@pytest.mark.parametrize(
    "line",
    [
        TOO_BIG,
        "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --micro-batch 8",
        "estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 16 --tp 8 --global-batch 32",
        "estimate qwen2.5-72b --gpu a100-sxm4-80gb --gpus 64 --pp 4 --attention eager",
    ],
)
def test_every_suggestion_holds_when_it_is_typed(line: str) -> None:
    words = shlex.split(line)[1:]
    pairs = {name.lstrip("-").replace("-", "_"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    values: dict[str, Any] = {name: int(value) if value.isdecimal() else value for name, value in pairs.items()}
    changes = advice(resolve_job(Job(model=words[0], **values)))
    assert changes
    for change in changes:
        memory = document(f"{line} {change.flags}")["memory"]
        assert memory["total"] == change.result.memory.total
        assert memory["fits"] == change.result.memory.fits
    fails = [change.result.memory.verdict == "does not fit" for change in changes]
    assert all(fails) or not any(fails)


def test_defaults_are_said() -> None:
    found = document("estimate gpt2")
    assert found["assumed"]["--seq-len"] == "1024", "no longer than the model's positions"
    assert found["assumed"]["--framework"] == "huggingface"
    assert document("estimate llama-3.1-8b")["layout"]["seq_len"] == 4096
    parallel = document("estimate llama-3.1-8b --tp 4")
    assert parallel["training"]["framework"] == "megatron"
    assert parallel["layout"]["gpus"] == 4
    said = document("estimate llama-3.1-8b --tp 4 --framework torchtitan --gpus 16 --micro-batch 2")
    assert "--framework" not in said["assumed"]
    assert (said["layout"]["dp"], said["layout"]["global_batch"]) == (4, 8)
    assert "seq-len 4096" in typed("estimate llama-3.1-8b").out


def test_what_was_not_read_is_listed(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "surprise": 7,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = typed(["estimate", str(tmp_path)])
    assert found.code == 0
    assert "surprise" in found.out.split("Not counted")[1]


# -- the document ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", [FITS, TOO_BIG, PIPELINE, "estimate gpt2 --lora-rank 8", "estimate llama-3.1-8b --qlora"]
)
def test_the_document_has_the_promised_keys(line: str) -> None:
    found = document(line)
    assert {"name", "params", "active_params"} <= found["model"].keys()
    layout = "dp tp pp cp ep vpp zero sequence_parallel recompute micro_batch global_batch num_microbatches seq_len"
    assert set(layout.split()) <= found["layout"].keys()
    memory = found["memory"]
    assert {"total", "capacity", "fits", "rank", "moment", "parts"} <= memory.keys()
    assert "stage" in memory["rank"]
    assert tuple(memory["parts"]) == PARTS
    assert {"model_per_step", "hardware_per_step"} <= found["flops"].keys()
    assert found["basis"]
    assert found["not_counted"]


@pytest.mark.parametrize(
    "line", [FITS, TOO_BIG, PIPELINE, "estimate bert-base", "estimate gemma-2-9b --recompute full"]
)
def test_parts_add_up_at_every_moment(line: str) -> None:
    memory = document(line)["memory"]
    assert sum(memory["parts"].values()) == pytest.approx(memory["total"], rel=1e-12)
    totals = [sum(moment["parts"].values()) for moment in memory["moments"]]
    assert max(totals) == pytest.approx(memory["total"], rel=1e-12)
    assert max(memory["stages"]) == pytest.approx(memory["total"], rel=1e-12)
    assert memory["low"] <= memory["total"] <= memory["high"]


def test_lists_are_documents_too() -> None:
    cards = {card["id"]: card for card in document("gpus")["gpus"]}
    assert set(cards) == set(gpu_ids())
    assert cards["h100-sxm5-80gb"]["peak_flops"]["bf16"] == 989e12
    assert cards["v100-sxm2-32gb"]["peak_flops"]["bf16"] is None
    models = {row["name"]: row for row in document("models")["models"]}
    assert models["llama-3.1-8b"]["params"] == 8030261248
    assert set(models) == set(loadgauge.models())
    states = document("equation states")["equations"]
    assert [one["expression"] for one in states] == ["16", "4 + 12/d", "2 + 14/d", "16/d"]


def test_models_can_be_searched() -> None:
    assert {row["model_type"] for row in document("models gemma2")["models"]} == {"gemma2"}
    assert typed("models nosuchthing").code == 2


# -- ragged batches ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(length) for length in (100, 400, 700, 2000)))
    return path


def test_lengths_give_the_expected_and_the_worst_batch(lengths: Path) -> None:
    found = document(f"{RAGGED} --lengths {lengths}")
    told = found["lengths"]
    assert told["expected_tokens"] == 4 * 800
    assert told["longest"] == found["layout"]["seq_len"] == 2000
    worst = document(f"{RAGGED} --seq-len 2000")["memory"]
    assert told["worst_case"]["total"] == worst["total"] > found["memory"]["total"]
    text = typed(f"{RAGGED} --lengths {lengths}").out
    assert "without padding" in text
    assert "Worst micro-batch, 4 x the longest" in text


def test_padding_costs_tokens(lengths: Path) -> None:
    free, padded = (
        document(f"{RAGGED} --lengths {lengths} --attention {kind}")["lengths"] for kind in ("flash", "eager")
    )
    assert free["expected_tokens"] < padded["expected_tokens"] < 4 * 2000


# -- the program itself ------------------------------------------------------------------------------------------------


def process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)


def test_an_estimate_loads_no_heavy_library() -> None:
    line = shlex.split(f"{FITS} --json")
    heavy = ["torch", "transformers", "numpy", "sympy", "rich", "matplotlib"]
    done = process(
        f"import sys\nfrom loadgauge.core.command_line.main import run\ncode = run({line!r})\n"
        f"print([name for name in {heavy!r} if name in sys.modules], code, file=sys.stderr)"
    )
    assert done.stderr.strip() == "[] 0"
    assert json.loads(done.stdout)["memory"]["fits"] is True


def test_a_report_loads_no_equations() -> None:
    done = process(
        f"import sys\nfrom loadgauge.core.command_line.main import run\nrun({shlex.split(TOO_BIG)!r})\n"
        "print([name for name in ('torch', 'numpy', 'sympy') if name in sys.modules], file=sys.stderr)"
    )
    assert done.stderr.strip() == "[]"


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loadgauge", "--version"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.strip() == f"loadgauge {loadgauge.__version__}"
    assert done.returncode == 0


def test_a_reader_that_stops_reading_is_no_error() -> None:
    line = f"{shlex.quote(sys.executable)} -m loadgauge models | head -1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0
    assert not done.stderr


def test_help_names_every_command() -> None:
    found = typed("--help")
    assert found.code == 0
    assert all(name in found.out for name in COMMANDS)
    for name in COMMANDS:
        assert typed(f"{name} --help").code == 0


def test_the_timeline_is_the_step(tmp_path: Path) -> None:
    line = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --tp 2 --pp 4 --global-batch 16 --seq-len 2048"
    found = document(f"{line} --timeline {tmp_path / 'step.json'}")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X" and event["pid"] < 4]
    assert len(work) == 4 * 8 * 2
    for stage in range(4):  # a stage does one thing at a time, and each backward after its forward
        own = sorted((event for event in work if event["pid"] == stage), key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-6 for one, other in pairwise(own))
        begins = {event["name"]: event["ts"] for event in own}
        assert all(begins[f"backward {number}"] > begins[f"forward {number}"] for number in range(8))
    parts = [event for event in events if event["ph"] == "X" and event["pid"] == 4 and "hidden" not in event["name"]]
    assert sum(event["dur"] for event in parts) / 1e6 == pytest.approx(found["time"]["step"])
