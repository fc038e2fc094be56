"""Dots on the memory of a step: a real trace beside the estimate, and documents that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page needs the extra `web`")
pytest.importorskip("torch", reason="traces need PyTorch")
pytest.importorskip("transformers", reason="traces of a model need transformers")

from command_line import typed
from serving import Served, serving

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the command prints of a tiny model."""
    config = tmp_path_factory.mktemp("model") / "tiny.json"
    config.write_text(json.dumps(CONFIG))
    told = typed(f"trace {config} --seq-len 128 --optimizer adamw-fused --json")
    assert told.code == 0, told.err
    return json.loads(told.out)


def state(served: Served, **more: str) -> dict[str, str]:
    """The same run on the page."""
    model = served.answer("/api/drop", name="tiny.json", text=json.dumps(CONFIG))["flags"]["model"]
    same = {"model": model, "gpus": "1", "seq-len": "128", "framework": "huggingface", "precision": "bf16-pure"}
    return {**same, **more}


def drawn(served: Served, found: Any, **more: str) -> tuple[Any, Any]:
    """The figure of the memory, and what is drawn of a document in it."""
    flags = state(served, **more)
    panel = served.answer("/api/estimate", flags=flags, want=["moments"], dots=[found])["panels"]["moments"]
    return panel, panel["dots"][0]


@pytest.mark.long
def test_a_real_trace_lies_on_the_estimate(served: Served, trace: Any) -> None:
    dropped = served.answer("/api/drop", name="t.json", text=json.dumps(trace))
    assert (dropped["kind"], dropped["flags"]) == ("trace", {})
    assert dropped["why"]["peak"] == trace["peak"]["total"]
    panel, found = drawn(served, dropped["dots"])
    assert (found["source"], found["target"], found["differs"], found["unsaid"]) == ("traced", "tiny.json", [], False)
    dots = {dot["phase"]: dot for dot in found["dots"]}
    assert {phase: dot["bytes"] for phase, dot in dots.items()} == {one: trace["phases"][one] for one in dots}
    assert list(dots) == ["forward", "backward", "optimizer step"]
    # PyTorch's own peak is the estimate's, moment for moment.
    for phase in ("backward", "optimizer step"):
        assert dots[phase]["estimated"] == pytest.approx(trace["phases"][phase], rel=0.002)
    rows = panel["curve"]["rows"]
    highest = max(rows, key=lambda row: sum(row[1:]))
    assert dots["backward"]["t"] == highest[0]
    assert dots["backward"]["height"] == pytest.approx(trace["phases"]["backward"] + highest[-1], rel=1e-12)
    assert dots["backward"]["moment"] == panel["peak"] == "loss"
    assert dots["optimizer step"]["t"] == rows[-1][0] > dots["forward"]["t"] == rows[0][0]
    # With a GPU the axis is in seconds, and the dots are with it.
    timed, again = drawn(served, dropped["dots"], gpu="h100-sxm5-80gb")
    assert timed["curve"]["timed"]
    assert again["dots"][-1]["t"] == timed["curve"]["rows"][-1][0] < 0.1


@pytest.mark.parametrize(
    ("flag", "value", "what", "there", "here"),
    [
        ("seq-len", "64", "seq-len", 128, 64),
        ("micro-batch", "2", "micro-batch", 1, 2),
        ("precision", "bf16-mixed-16", "precision", "bf16-pure", "bf16-mixed-16"),
        ("recompute", "full", "recompute", "none", "full"),
        ("model", "gpt2", "model", "tiny.json", "gpt2"),
    ],
)
def test_another_run_is_said_to_be_one(
    served: Served, trace: Any, flag: str, value: str, what: str, there: Any, here: Any
) -> None:
    dropped = served.answer("/api/drop", name="t.json", text=json.dumps(trace))
    _, found = drawn(served, dropped["dots"], **{flag: value})
    assert {"what": what, "there": there, "here": here} in found["differs"]
    if flag in ("seq-len", "micro-batch", "recompute"):
        assert len(found["differs"]) == 1
    if flag == "model":
        assert {row["what"] for row in found["differs"]} >= {"model", "layers", "weights"}


def test_a_measurement_says_no_sizes(served: Served, trace: Any) -> None:
    weights = trace["peak"]["categories"]["weights"]
    document = {"target": "/x/tiny.json", "backward_peak": 2000, "step_peak": 1000, "states": {"weights": weights}}
    dropped = served.answer("/api/drop", name="m.json", text=json.dumps(document))
    assert dropped["kind"] == "measurement"
    _, found = drawn(served, dropped["dots"])
    assert (found["source"], found["differs"], found["unsaid"]) == ("measured", [], True)
    assert [dot["bytes"] for dot in found["dots"]] == [2000, 1000]
    _, other = drawn(served, dropped["dots"], precision="fp32")
    assert other["differs"] == [{"what": "weights", "there": weights, "here": 2 * 230016}]


def test_a_large_trace_is_handed_in_as_a_file(served: Served, trace: Any) -> None:
    small = served.answer("/api/drop", name="t.json", text=json.dumps(trace))
    large = served.client.post("/api/snapshot?device=0", content=json.dumps(trace).encode() + b" " * 5_000_000)
    assert large.status_code == 200, large.text
    assert large.json()["dots"] == small["dots"]


HOSTILE = {
    "phases": [None, {"forward": -1}, {"backward": 2**80}, {"forward": 1.5}, {"forward": "1"}, []],
    "assumed": [{"settings": "--seq-len 0"}, {"settings": "x" * 3000}, {"settings": "--seq-len 99999999999"}, 3],
    "target": [3, None],
    "peak": [{}, [], {"total": 1}],
}


def test_documents_that_are_none_are_refused_in_a_line(served: Served, trace: Any) -> None:
    texts = ['{"at_peak": ' + "[" * 100_000, '{"backward_peak": ' + "[" * 100_000 + "]" * 100_000 + "}"]
    texts += ['{"backward_peak": 1}', '{"backward_peak": -1, "step_peak": 1, "target": "x", "states": {}}']
    for key, values in HOSTILE.items():
        texts += [json.dumps({**trace, key: value}) for value in values]
    for text in texts:
        answer = served.ask("/api/drop", name="t.json", text=text)
        assert answer.status_code == 422, (text[-80:], answer.text)
        assert "\n" not in answer.json()["error"]
        assert "defect" not in answer.json()["error"]
    good = served.answer("/api/drop", name="t.json", text=json.dumps(trace))["dots"]
    for bad in ([good] * 3, [{**good, "more": 1}], [{**good, "source": "guessed"}], [{**good, "weights": -1}], good):
        assert served.ask("/api/estimate", flags=state(served), want=[], dots=bad).status_code == 400
    nested = served.client.post("/api/snapshot", content=b'{"at_peak": ' + b"[" * 100_000)
    assert nested.status_code == 422
