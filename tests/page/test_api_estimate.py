"""The page's numbers are those of the command line, byte for byte; and they come quickly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import typed
from loadgauge.core.definitions.job.job import POSTTRAIN, Job
from loadgauge.core.families.catalogue import models
from loadgauge.page.inputs import drop
from loadgauge.page.inputs.flags import job_of
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.catalogue import PRESETS
from serving import LARGE, LLAMA, SMALL, Served, serving

STATES: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "pipeline": LLAMA,
    "large": LARGE,
    "no gpu": {"model": "bert-base"},
    "experts": {"model": "mixtral-8x7b", "gpu": "h100-sxm5-80gb", "gpus": "32", "ep": "8", "zero": "1", "global-batch": "64"},
    "expert imbalance": {
        "model": "mixtral-8x7b", "gpu": "h100-sxm5-80gb", "gpus": "32", "ep": "8", "expert-imbalance": "1.5",
        "global-batch": "64",
    },
    "does not fit": {"model": "llama-3.1-8b", "gpu": "rtx4090"},
    "lora": {"model": "llama-3.1-8b", "gpu": "rtx4090", "qlora": "true", "loss": "chunked", "lora-targets": "attention"},
    "money": {**LLAMA, "tokens": "1T", "price": "2.5", "mtbf-hours": "50000", "days": "30"},
    "measured": {**LLAMA, "measured": "mfu=0.41"},
    "lengths": {**{k: v for k, v in SMALL.items() if k != "seq-len"}, "lengths": "uniform:1000"},
    "interleaved": {**LLAMA, "vpp": "4", "schedule": "interleaved", "recompute": "full"},
    "other links": {**LLAMA, "nic-bandwidth": "25GB/s", "gpus-per-node": "4", "overlap": "all", "order": "tp,pp,cp,dp"},
    "numbers": {"model": "gpt2", "gpu": "a100-sxm4-80gb", "gpus": 8, "zero": 3, "mtp": False, "seq-len": "1_024"},
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def printed(document: Any) -> str:
    """A document as the command line prints it."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def without_outcomes(text: str) -> Any:
    """A document without what other assumptions come to, which the page asks for apart."""
    found = json.loads(text)
    found.pop("outcomes", None)
    found.pop("schema", None)
    return found


def without_assumed(text: str) -> Any:
    """A document without the flags that were not given, and what others come to."""
    found = without_outcomes(text)
    del found["assumed"]
    return found


@pytest.mark.parametrize("name", STATES)
def test_the_document_is_that_of_the_command_line(served: Served, name: str) -> None:
    state = STATES[name]
    words = [f"--{key}" if str(value) == "true" else f"--{key}={value}"
             for key, value in state.items() if key != "model" and value is not False]  # fmt: skip
    line = typed(["estimate", state["model"], *words, "--json"])
    assert not line.err
    found = served.answer("/api/estimate", flags=state)
    assert json.loads(line.out)["outcomes"] is not None
    assert printed(found["estimate"]) == printed(without_outcomes(line.out))
    # The command that can be copied says the same, and assumes less, because it is written out.
    copied = typed(found["command"].removeprefix("loadgauge ") + " --json")
    assert without_assumed(copied.out) == without_assumed(line.out)
    assert copied.code == line.code == int(found["estimate"]["memory"]["fits"] is False)


def test_an_uploaded_config_is_what_the_command_line_reads(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024,
                       "num_attention_heads": 8, "vocab_size": 1000, "invented_key": 1})  # fmt: skip
    dropped = served.answer("/api/drop", name="my-own.json", text=text)
    assert dropped["kind"] == "config"
    assert dropped["unread"] == ["invented_key"]
    found = served.answer("/api/estimate", flags={**SMALL, **dropped["flags"]})
    (tmp_path / "my-own.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert "my-own.json" in found["command"]
    copied = typed(found["command"].removeprefix("loadgauge ") + " --json").out
    assert without_assumed(copied) == without_assumed(printed(found["estimate"]))


def test_an_upload_that_is_gone_is_asked_for_again(served: Served) -> None:
    answer = served.ask("/api/estimate", flags={**SMALL, "model": "upload:0123456789abcdef"})
    assert answer.status_code == 422
    assert "hand it in again" in answer.json()["error"]


def test_the_id_of_an_upload_depends_on_its_text_alone() -> None:
    sizes = '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}'
    texts = [sizes, f"{sizes} "]
    keys = []
    for _ in range(2):
        kept = Uploads()
        keys.append([kept.add_model(text, name) for text, name in zip(texts, ("a.json", "b.json"), strict=True)])
        kept.close()
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2


def test_uploads_are_forgotten_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgauge.page.inputs.uploads.MOST", 3)
    kept = Uploads()
    keys = [
        kept.add_model(
            json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": n}), "x.json"
        )
        for n in range(1, 6)
    ]
    files = [kept.add_file(str(n), "x.txt", str(n)) for n in range(5)]
    assert list(kept.models) == keys[2:]
    assert list(kept.files) == files[2:]
    folder = Path(kept.folder.name)
    assert len(list(folder.iterdir())) == 3
    kept.close()
    assert not folder.exists()


def test_only_the_figures_that_are_wanted_are_drawn(served: Served) -> None:
    found = served.answer("/api/estimate", flags=SMALL, want=["treemap", "lanes"])
    assert list(found["panels"]) == ["treemap", "lanes"]
    assert served.answer("/api/estimate", flags=SMALL, want=[])["panels"] == {}


def test_ranges_are_those_of_the_time(served: Served) -> None:
    found = served.answer("/api/estimate", flags=STATES["money"], want=[])
    time, ranges = found["estimate"]["time"], found["ranges"]
    assert ranges["step"] == [time["low"], time["high"]]
    for name in ("days", "cost", "gpu_hours", "tokens_per_second_per_gpu", "mfu", "hfu"):
        low, high = ranges[name]
        assert low < time[name] < high
        # Each is in proportion to the time of a step, or to its inverse.
        falls = name in ("tokens_per_second_per_gpu", "mfu", "hfu")
        wanted = [time["high"], time["low"]] if falls else [time["low"], time["high"]]
        power = -1 if falls else 1
        assert [low / time[name], high / time[name]] == pytest.approx([(end / time["step"]) ** power for end in wanted])
    assert served.answer("/api/estimate", flags={"model": "gpt2"}, want=[])["ranges"] == {}


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ({"tp": "3"}, "LayoutError", "are not divisible by"),
        ({"model": "no-such-model"}, "ConfigError", "neither a model in the catalogue nor a file"),
        ({"gpu": "h1000"}, "ConfigError", "closest: h100"),
        ({"tpp": "2"}, "ConfigError", "did you mean tp"),
        ({"tp": "two"}, "ConfigError", "must be a whole number"),
        ({"schedule": "2f2b"}, "ConfigError", "2f2b"),
        ({"days": "2"}, "ConfigError", "--tokens"),
    ],
)
def test_what_is_wrong_is_said_as_on_the_command_line(served: Served, change: Any, kind: str, word: str) -> None:
    state = {**SMALL, **change}
    answer = served.ask("/api/estimate", flags=state)
    assert answer.status_code == 422
    body = answer.json()
    assert (body["kind"], body["code"]) == (kind, 2)
    assert word in body["error"]
    if not change.keys() & {"tpp", "model"}:  # only the command line has files, and no misspelt keys
        words = [f"--{key}={value}" for key, value in state.items() if key != "model"]
        said = typed(["estimate", state["model"], *words]).err.removeprefix("loadgauge: ")
        assert body["error"].removeprefix(f"{next(iter(change))}: ") in said


def test_every_flag_of_a_run_is_on_the_page(served: Served) -> None:
    found = served.client.get("/api/catalogue").json()
    names = {flag["name"] for flag in found["flags"]}
    # Job files are dropped onto the page, and name no model.
    of_files = {"beside", "dialect", "inputs", "base-model", "strict", "ignore", "variables", "rows"}
    assert names == {name.replace("_", "-") for name in Job.__struct_fields__[1:] if name not in POSTTRAIN} - of_files
    assert [row["name"] for row in found["models"]] == list(models())
    assert all(flag["help"] for flag in found["flags"])
    for flag in found["flags"]:
        assert flag["type"] != "choice" or flag["choices"], flag


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset["name"])
def test_presets_can_be_run(preset: dict[str, Any]) -> None:
    kept = Uploads()
    found = job_of(preset["flags"], kept).estimate()
    kept.close()
    assert found.memory.fits
    assert found.time is not None
    assert set(preset["flags"]) <= {name.replace("_", "-") for name in Job.__struct_fields__}


@pytest.mark.parametrize("name", ["job.yaml", "train.py", "pretrain.sh", "train.yaml"])
def test_what_a_dropped_file_says_are_flags(name: str) -> None:
    """Whatever a file says can be typed: the page asks for its answer by flags alone."""
    text = (Path(__file__).parents[2] / "examples" / name).read_text(encoding="utf-8")
    said = {flag.replace("-", "_"): value for flag, value in drop.text(name, text)["flags"].items()}
    assert Job.of(said.pop("model", "gpt2"), said).model
