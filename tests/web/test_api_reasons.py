"""Every figure of the page explains itself: its formula, worked out with the numbers beside it, is the figure."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page needs the extra `web`")

from loadgauge.errors import ConfigError
from loadgauge.web.handlers import OfBlock, Question, estimate, explain
from loadgauge.web.reasons import FIGURES
from loadgauge.web.uploads import Uploads

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
    "one card": {"model": "gpt2", "gpu": "rtx4090", "gpus": "1", "seq-len": "1024", "micro-batch": "4", "global-batch": "8"},
    "no card": {"model": "gpt2", "seq-len": "1024"},
}  # fmt: skip


@pytest.fixture
def uploads() -> Uploads:
    return Uploads()


def ids(answer: dict[str, Any]) -> list[str]:
    """Every figure that the page shows of an answer."""
    found = ["fit"]
    if "time" in answer["estimate"]:
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
