"""Measured runs that are passed on: nothing private is in them, and what is read back is what was measured."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from pathlib import Path

import msgspec
import pytest

import loadgauge
from command_line import document, typed
from loadgauge.core.base.units import parse
from loadgauge.core.resolve.rescale import Anchor, evidence_text

HERE = Path(__file__).resolve().parents[2] / "evidence"
RUN = "llama-3.2-1b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --micro-batch 2"


def test_a_run_is_read_back_as_it_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    found = typed(f"evidence {RUN} --step 900ms --card 20GiB --allocated 15GiB --torch 2.13.0 --output {file}")
    assert found.code == 0, found.err
    assert file.read_text(encoding="utf-8") in found.out
    rows = {row["id"]: row for row in document(f"validate --runs {tmp_path}")["rows"]}
    assert rows["run"]["measured"] == pytest.approx(0.9)
    assert rows["run"]["predicted"] == pytest.approx(document(f"estimate {RUN}")["time"]["step"])
    assert (rows["run-card"]["measured"], rows["run-allocated"]["measured"]) == (20 * 2**30, 15 * 2**30)


def test_what_was_predicted_is_kept(tmp_path: Path) -> None:
    result = loadgauge.estimate("llama-3.2-1b", gpu="h100-sxm5-80gb", gpus=8, zero=3)
    content = tomllib.loads(evidence_text(result, {"step": "1s"}, "2.13.0"))
    assert result.time is not None
    assert parse(content["predicted"]["step"])[0] == pytest.approx(result.time.step, rel=1e-3)
    assert parse(content["predicted"]["card"])[0] == pytest.approx(result.memory.total, rel=1e-3)
    assert content["predicted"]["loadgauge"] == loadgauge.__version__


def test_nothing_private_is_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("512\n700\n", encoding="utf-8")
    job = loadgauge.Job.of("gpt2", {
        "gpu": "h100-sxm5-80gb", "lengths": str(tmp_path / "lengths.txt"), "tokens": "1B", "price": "2.5", "micro_batch": 4,
    })  # fmt: skip
    text = evidence_text(loadgauge.estimate(job), {"step": "1s"})
    for private in (str(tmp_path), "lengths", "price", "tokens", socket.gethostname(), str(Path.home())):
        assert private not in text.replace("micro_batch", ""), private


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("gpt2 --gpu h100 --step 3GB", "is not in seconds"), ("gpt2 --gpu h100 --step 3s --card 3s", "is not in bytes"),
        ("gpt2 --step 3s", "gpu: is missing"), ("{file} --gpu h100 --step 3s", "is a file of yours"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_on_is_one_line(flags: str, words: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 100, "n_positions": 64}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes}), encoding="utf-8")
    found = typed(f"evidence {flags.format(file=config)} --output {tmp_path / 'run.toml'}")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert words in found.err
    assert not (tmp_path / "run.toml").exists()


def faults(text: str, name: str) -> list[str]:
    """Return what is wrong with a file that somebody adds to `evidence/`."""
    try:
        anchor = msgspec.convert(tomllib.loads(text), Anchor)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        return [str(error)]
    wrong = [] if anchor.run else ["has no run"]
    values = [str(value) for value in (anchor.run.flags.values() if anchor.run else ())]
    wrong += [f"{value}: looks like a path" for value in values if re.search(r"^[~/.\\]|[\\/]\w+[\\/]|@", value)]
    if anchor.run and not re.fullmatch(r"[\d.]+ ?(s|ms|us)", anchor.run.step):
        wrong.append("step has no unit of time")
    return wrong + ([] if name.startswith(anchor.gpu) else ["the name does not begin with the card"])


def test_every_file_of_the_repository_keeps_to_the_form() -> None:
    wrong = {file.name: faults(file.read_text(encoding="utf-8"), file.name) for file in HERE.glob("*.toml")}
    assert not {name: found for name, found in wrong.items() if found}


def test_the_form_is_checked() -> None:
    result = loadgauge.estimate("gpt2", gpu="h100-sxm5-80gb")
    text = evidence_text(result, {"step": "1s"})
    assert faults(text, "h100-sxm5-80gb-gpt2-1.toml") == []
    assert faults(text, "gpt2.toml") == ["the name does not begin with the card"]
    assert faults(text.replace("1s", "1"), "h100-sxm5-80gb.toml") == ["step has no unit of time"]
    path = text.replace("[run.flags]", '[run.flags]\nversion = "/data/x/y"')
    assert "looks like a path" in faults(path, "h100-sxm5-80gb.toml")[0]
    assert "host" in faults('host = "a"\n' + text, "h100-sxm5-80gb.toml")[0]
