"""Models that no family reads, on the page: captured in the background, then as the command has them; nothing of a user's runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="the page needs the extra `web`")
pytest.importorskip("torch", reason="captures need the extra `torch`")

from command_line import document
from loadgauge import model
from loadgauge.core.base import optional_deps
from loadgauge.core.base.errors import ConfigError
from loadgauge.page.inputs import drop
from loadgauge.page.panels.captured import Wanted, closed
from loadgauge.page.panels.captures import Captures
from loadgauge.page.server.errors import Failed, Refused
from loadgauge.pytorch.capture.requests.regime import Regime
from serving import SMALL, Served, serving

CONFIG: dict[str, Any] = {
    "model_type": "bitnet", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "vocab_size": 640, "intermediate_size": 160, "max_position_embeddings": 256,
}  # fmt: skip
RUN = {"gpu": "h100-sxm5-80gb", "gpus": "4", "zero": "3", "micro-batch": "2", "global-batch": "8", "seq-len": "96"}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where captures are kept, by the server, its processes and the command alike."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def served(disk: Path) -> Iterator[Served]:
    with serving() as found:
        yield found


def settled(served: Served, path: str, **body: Any) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """The last answer to a question that is asked again while a capture is under way, and how far it was in between."""
    steps: list[dict[str, Any]] = []
    while (found := served.ask(path, **body)).status_code == 202:
        steps.append(found.json()["capturing"])
        time.sleep(0.2)
    return found, steps


@pytest.mark.long
def test_a_config_that_no_family_reads_is_captured_beside_the_page(served: Served, tmp_path: Path) -> None:
    trap, evil = tmp_path / "ran", tmp_path / "evil.py"
    evil.write_text(f"open({str(trap)!r}, 'w')")
    text = json.dumps({**CONFIG, "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": f"{evil}.Evil"}})
    dropped = served.answer("/api/drop", name="mine.json", text=text)
    assert (dropped["kind"], dropped["longest"]) == ("config", 256)
    state = {**RUN, **dropped["flags"]}
    assert served.ask("/api/estimate", flags=state).status_code == 202
    assert served.ask("/api/estimate", flags=SMALL, want=[]).status_code == 200  # the page goes on meanwhile
    found, steps = settled(served, "/api/estimate", flags=state)
    seconds = [step["seconds"] for step in steps]
    assert len(seconds) > 1
    assert seconds == sorted(seconds)
    assert {step["stage"] for step in steps} <= {"imports", "runs"}
    answer = found.json()
    file = tmp_path / "mine.json"
    file.write_text(text)
    told = document(f"estimate {file} {line(*RUN)}")
    for part in ("memory", "time", "flops", "model", "layout"):
        assert answer["estimate"][part] == told[part], part
    assert "; no family here reads it" in answer["captured"]["how"]
    assert set(answer["captured"]["closed"]) >= {"tp", "cp"}
    assert not trap.exists()

    # Another length, another batch, a formula and a plan: nothing is captured for them.
    other = {**state, "seq-len": "64", "micro-batch": "1"}
    assert served.ask("/api/estimate", flags=other).status_code == 200
    assert served.ask("/api/explain", flags=state, id="activations").status_code == 200
    planned = served.answer("/api/plan", flags=state, locks=[])
    best = document(f"plan {file} {line('gpu', 'gpus', 'global-batch', 'seq-len')}")
    assert planned["points"][planned["best"][0]][0] == best["layouts"][0]["memory"]["total"]
    assert planned["out_of_reach"] == best["out_of_reach"]

    # The axes that captured layers do not have are named, for a button that takes them away.
    refused = served.ask("/api/estimate", flags={**state, "tp": "2", "pp": "1"})
    assert (refused.status_code, refused.json()["closed"]) == (422, ["tp"])
    assert "tp = 2" in refused.json()["error"]


def test_closed_are_axes_that_no_degree_opens() -> None:
    assert set(closed(model("llama-3.1-8b"))) == {"ep", "etp"}
    assert closed(model("mixtral-8x7b")) == {}


def line(*names: str) -> str:
    """Flags of the run as words."""
    return " ".join(f"--{name} {RUN[name]}" for name in names)


class Process:
    """A worker that answers as it is told to, after a moment."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def ask(self, task: str, **given: Any) -> bytes:
        await asyncio.sleep(0)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return json.dumps(found).encode()

    def end(self) -> None:
        """Nothing to end."""

    async def close(self) -> None:
        """Nothing to close."""


def test_a_failure_of_the_model_is_kept_and_an_accident_is_not() -> None:
    failure, accident = Failed(422, {"error": "300 is more than the model's 256"}), Refused(503, "it broke off")

    async def errors(*answers: Any) -> list[Exception | None]:
        """What each of four questions about one capture gets: None while it is under way."""
        made, found = Captures(), []
        made.worker = Process(*answers)  # type: ignore[assignment]
        for _ in range(4):
            try:
                step = await made.progress(Wanted("mine.json", CONFIG, Regime(), {"b": 1, "s": 96}))
                assert step["name"] == "mine.json"
                found.append(None)
            except Exception as error:
                found.append(error)
            for _ in range(5):
                await asyncio.sleep(0)
        await made.close()
        return found

    assert asyncio.run(errors(failure)) == [None, failure, failure, failure]
    assert asyncio.run(errors(accident, failure)) == [None, accident, None, failure]
    unkept = asyncio.run(errors({"seconds": 1.0, "kept": False, "folder": "/kept"}))
    assert "cannot be written" in str(unkept[1])


def test_a_written_family_can_be_captured_and_another_cannot_be_read(served: Served) -> None:
    llama = json.dumps({**CONFIG, "model_type": "llama"})
    flags = {**RUN, **served.answer("/api/drop", name="llama.json", text=llama)["flags"]}
    assert served.answer("/api/estimate", flags=flags)["captured"] is None
    assert served.ask("/api/estimate", flags={**flags, "road": "captured"}).status_code == 202
    own = served.answer("/api/drop", name="mine.json", text=json.dumps(CONFIG))["flags"]
    refused = served.ask("/api/estimate", flags={**RUN, **own, "road": "written"})
    assert refused.status_code == 422
    assert "is not modelled" in refused.json()["error"]


@pytest.mark.parametrize("name", ["train.py:model", "./train.py:model", "/tmp/train.py:model"])
def test_no_script_runs_from_the_page(served: Served, name: str) -> None:
    for flags in ({"model": name}, {"model": name, "road": "captured"}):
        refused = served.ask("/api/estimate", flags=flags)
        assert refused.status_code == 422
        assert "runs no script" in refused.json()["error"]
    assert served.ask("/api/estimate", flags={"model": "gpt2", "inputs": name}).status_code == 422


def test_without_pytorch_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_deps, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"no family here reads 'bitnet'.*pip install 'loadgauge\[torch\]'"):
        drop.text("config.json", json.dumps(CONFIG))
    with pytest.raises(ConfigError, match="model_type"):
        drop.text("config.json", json.dumps({"hidden_size": 64}))
