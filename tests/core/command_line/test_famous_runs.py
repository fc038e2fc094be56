"""Famous runs are typed as their sources write them, and are answered."""

import json

import pytest

from loadgauge.core.command_line.main import run, spelled_out
from loadgauge.core.command_line.runs import famous, predicted


def test_flags_after_a_run_go_before_its_own(capsys):
    assert run(["estimate", "run:bloom-176b", "--micro-batch", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["micro_batch"] == 1
    assert spelled_out(["estimate", "gpt2"]) == ["estimate", "gpt2"]


def test_an_unknown_run_is_one_line_with_the_known_ones(capsys):
    assert run(["estimate", "run:bloom"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "bloom-176b" in error


@pytest.mark.parametrize("name", famous())
def test_every_run_has_an_answer_with_a_time(name):
    """They ran, so none may be refused; BLOOM's step took 105 s, and the prediction is within its own range of it."""
    row = predicted(name)
    assert "why" not in row
    assert row["predicted"] > 0


def test_figures_are_compared_as_speeds():
    """A step that is predicted shorter than it was is a positive error, and so are more tokens a second."""
    step, tokens = predicted("bloom-176b"), predicted("llama-2-7b-fsdp")
    assert step["error"] == pytest.approx(step["published"] / step["predicted"] - 1)
    assert tokens["error"] == pytest.approx(tokens["predicted"] / tokens["published"] - 1)


def test_the_list_is_a_table_and_a_document(capsys):
    assert run(["runs", "bloom-176b", "--predict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "bloom-176b"
    assert run(["runs"]) == 0
    assert "bloom-176b" in capsys.readouterr().out
