"""Every figure of the page explains itself: its formula, worked out with the numbers beside it, is the figure."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page needs the extra `web`")

from loadgauge.core.base.errors import ConfigError
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.reasons import FIGURES
from loadgauge.page.server.handlers import OfBlock, Question, estimate, explain

STATIC = Path(__file__).parents[2] / "src" / "loadgauge" / "page" / "static"
RUNS: dict[str, dict[str, Any]] = {
    "pipeline": {
        "model": "llama-3.1-8b", "gpu": "h100-sxm5-80gb", "gpus": "16", "tp": "4", "pp": "2", "zero": "1", "seq-len": "4096",
        "sequence-parallel": "true", "micro-batch": "1", "global-batch": "32", "recompute": "full", "tokens": "1T", "price": "2.5",
        "mtbf-hours": "50000",
    },
    "sharded": {
        "model": "llama-3.1-8b", "gpu": "a100-sxm4-80gb", "gpus": "8", "zero": "3", "seq-len": "2048", "global-batch": "16",
        "tokens": "1B", "price": "1.5", "measured": "step=9s",
    },
    "experts": {
        "model": "mixtral-8x7b", "gpu": "h100-sxm5-80gb", "gpus": "64", "tp": "2", "pp": "2", "ep": "8", "cp": "2", "zero": "1",
        "sequence-parallel": "true", "seq-len": "8192", "global-batch": "64", "vpp": "2", "schedule": "interleaved",
        "tokens": "1B", "price": "2",
    },
    "one card": {"model": "gpt2", "gpu": "rtx4090", "gpus": "1", "seq-len": "1024", "micro-batch": "4", "global-batch": "8"},
    "no card": {"model": "gpt2", "seq-len": "1024"},
}  # fmt: skip


@pytest.fixture
def uploads() -> Uploads:
    return Uploads()


def ids(answer: dict[str, Any]) -> list[str]:
    """Every figure that the page shows of an answer."""
    found = ["fit"]
    if answer["estimate"]["time"] is not None:
        time = answer["estimate"]["time"]
        found += ["step", "rate", "mfu", *(name for name in ("days", "cost") if time.get(name))]
        found += [f"lane/{lane['lane']}" for lane in answer["panels"]["lanes"]]
        found += [f"network/{row['axis']}/{row['what']}" for row in answer["panels"]["network"] or ()]
    return found


@pytest.mark.parametrize("run", RUNS)
def test_formulas_come_to_the_figures(run: str, uploads: Uploads) -> None:
    answer = estimate(Question(flags=RUNS[run], want=["lanes", "network"]), uploads)
    for id in ids(answer):
        found = explain(OfBlock(flags=RUNS[run], id=id), uploads)
        assert found["value"] == pytest.approx(shown(answer, id), rel=1e-12), id
        assert found["formulas"] or found["steps"] or found["rule"], id
        for formula in found["formulas"]:
            worked_out = eval(formula["letters"], {"__builtins__": {}}, dict(formula["numbers"]))
            assert worked_out == pytest.approx(formula["value"], rel=1e-9, abs=1e-9), (id, formula["what"])
            assert formula["numbers"].keys() == formula["units"].keys() == formula["meaning"].keys()
        if found["steps"]:
            assert math.fsum(step["value"] for step in found["steps"]) == pytest.approx(found["value"], rel=1e-9), id
        assert {step["id"].partition("/")[0] for step in found["steps"]} <= {*FIGURES, *PARTS, ""}


PARTS = {"weights", "gradients", "optimizer", "activations", "loss", "gathered", "transient", "evaluation", "outside"}


def shown(answer: dict[str, Any], id: str) -> float:
    """The figure as the page has it."""
    name, _, rest = id.partition("/")
    if name == "lane":
        return next(lane["seconds"] for lane in answer["panels"]["lanes"] if lane["lane"] == rest)
    if name == "network":
        axis, _, what = rest.partition("/")
        return next(row["need"] for row in answer["panels"]["network"] if (row["axis"], row["what"]) == (axis, what))
    if name == "fit":
        return answer["estimate"]["memory"]["total"]
    return answer["estimate"]["time"][{"rate": "tokens_per_second_per_gpu"}.get(name, name)]


def test_every_figure_of_a_run_is_among_them(uploads: Uploads) -> None:
    asked = {id.partition("/")[0] for id in ids(estimate(Question(flags=RUNS["pipeline"]), uploads))}
    assert asked == FIGURES


@pytest.mark.parametrize("id", ["days", "cost", "step", "lane/tp", "lane/", "network/dp/gradients"])
def test_what_a_run_does_not_have_is_refused(id: str, uploads: Uploads) -> None:
    with pytest.raises(ConfigError, match="no figure"):
        explain(OfBlock(flags=RUNS["no card"], id=id), uploads)


def test_a_lane_that_is_not_there_is_refused(uploads: Uploads) -> None:
    for id in ("lane/ep", "lane/<b>", "network/tp/nothing"):
        with pytest.raises(ConfigError, match="no figure"):
            explain(OfBlock(flags=RUNS["pipeline"], id=id), uploads)


def in_chinese(text: str, words: dict[str, Any]) -> str:
    """As the page's `term` has it."""
    if text in words["terms"]:
        return str(words["terms"][text])
    for pattern, form in words["patterns"]:
        if found := re.fullmatch(pattern, text):
            return re.sub(r"\$(\d)", lambda number: in_chinese(found[int(number[1])], words), form)
    return text


@pytest.mark.parametrize("run", RUNS)
def test_what_is_said_of_a_figure_is_translated(run: str, uploads: Uploads) -> None:
    words = json.loads((STATIC / "messages" / "zh.json").read_text(encoding="utf-8"))
    said: set[str] = set()
    for id in ids(estimate(Question(flags=RUNS[run], want=["lanes", "network"]), uploads)):
        found = explain(OfBlock(flags=RUNS[run], id=id), uploads)
        said |= {found["rule"], *found["notes"], *(formula["what"] for formula in found["formulas"])}
        said |= {meaning for formula in found["formulas"] for meaning in formula["meaning"].values()}
        said |= {step["what"] for step in found["steps"] if ": " not in step["what"] and step["what"] not in PARTS}
    said = {text for text in said if re.search(r"[a-z]{2,}", text) and not text.startswith("lane.")}
    assert {text for text in said if not re.search("[\u4e00-\u9fff]", in_chinese(text, words))} == set()
