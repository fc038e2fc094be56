"""Laws of the lenses: what is written is read again, and writing what was read changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas.lenses import (
    SAYABLE,
    Spelled,
    adapters,
    degree,
    dora,
    engine,
    fixed,
    layers,
    product,
    quantised,
    reads,
    served,
    spelled,
    when,
    whole_and_dora,
    writes,
)
from loadgauge.job_files.ideas.table import STAYS, Facts, Idea, Keys, row
from loadgauge.job_files.reading.nested import json_document

SWITCHED = quantised(four="four", eight="eight", kind="kind", nested="nested", double=False)
NUMBERED = quantised(bits=("bits", "old"), kind="kind", nested="nested", method=("way", {"bnb": "", "hqq": "hqq"}))
LORA = adapters(
    lambda keys: keys.flag("on"), row("lora_rank", "r"), layers("modules"), SWITCHED, whole_and_dora("saved", "dora"),
    switch={"on": True},
)  # fmt: skip
OPTIONS = engine(
    "vllm",
    row("tp", "tp", default=1),
    row("utilization", "share", kind="real", default=0.9),
    row("graphs", "eager", words={"true": False, "false": True}, default=True),
    row("context", "longest"),
)
BASES = st.sampled_from([base for base in SAYABLE if base])
JOBS = st.fixed_dictionaries(
    {"lora_rank": st.sampled_from([0, 4, 16]), "lora_targets": st.sampled_from(["all", "q_proj,v_proj", "o_proj"])},
    optional={"modules_to_save": st.just("lm_head,embed_tokens")},
)


def keys_of(text: dict[str, Any]) -> Keys:
    return Keys(json_document(json.dumps(text)))


def put(idea: Idea, facts: dict[str, Any], keys: Keys) -> Keys:
    for key, value in idea.write(facts, keys).items():
        keys.document.drop(key) if value is None else keys.document.put(key, value)
    return keys


def both_laws(idea: Idea, facts: dict[str, Any], before: dict[str, Any]) -> None:
    keys = put(idea, facts, keys_of(before))
    had = idea.read(keys)
    assert {name: had.get(name) for name in facts} == facts
    text = keys.document.text()
    assert put(idea, had | facts, keys).document.text() == text


@settings(max_examples=30)
@given(base=st.one_of(st.none(), BASES), other=st.one_of(st.none(), BASES), idea=st.sampled_from([SWITCHED, NUMBERED]))
def test_a_base(base: str | None, other: str | None, idea: Idea) -> None:
    wanted = [{"qlora": True, "base": name} if name else {"qlora": False} for name in (base, other)]
    both_laws(idea, wanted[0], {})
    both_laws(idea, wanted[1], json.loads(put(idea, wanted[0], keys_of({})).document.text()))


@settings(max_examples=30)
@given(facts=JOBS, other=JOBS, magnitudes=st.booleans())
def test_adapters(facts: dict[str, Any], other: dict[str, Any], magnitudes: bool) -> None:
    there = put(LORA, {**other, "use_dora": magnitudes}, keys_of({}))
    wanted = facts if facts["lora_rank"] else {"lora_rank": 0}
    both_laws(LORA, wanted, json.loads(there.document.text()))


@settings(max_examples=30)
@given(
    tp=st.sampled_from([1, 2, 8]),
    share=st.sampled_from([0.25, 0.9]),
    graphs=st.booleans(),
    context=st.one_of(st.none(), st.just(4096)),
)
def test_an_engine(tp: int, share: float, graphs: bool, context: int | None) -> None:
    named = {"tp": tp, "utilization": share, "graphs": str(graphs).lower()} | ({"context": context} if context else {})
    text = Engine.parse("vllm:" + ",".join(f"{name}={value}" for name, value in named.items())).text()
    both_laws(OPTIONS, {"rollout": text}, {"tp": 4})


@pytest.mark.parametrize(
    ("idea", "facts", "before", "after"),
    [
        (degree("tp", "tp"), {"tp": 1}, {}, {}),
        (degree("tp", "tp"), {"tp": 1}, {"tp": 2}, {"tp": 1}),
        (degree("tp", "tp"), {"tp": 4}, {}, {"tp": 4}),
        (dora("dora"), {"use_dora": False}, {"dora": True}, {}),
        (layers("m", ["all"]), {"lora_targets": "attention"}, {}, {"m": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        (layers("m", "all", joined=True), {"lora_targets": "a,b"}, {}, {"m": "a,b"}),
        (when(lambda keys: keys.has("x"), degree("tp", "tp")), {"tp": 4}, {}, {}),
        (product(degree("tp", "tp"), fixed(zero=1)), {"tp": 4, "zero": 3}, {}, {"tp": 4}),
        (OPTIONS, {"rollout": "sglang:tp=2"}, {"tp": 1}, {"tp": 1}),
        (quantised(four="four"), {"qlora": True, "base": "hqq"}, {}, {}),
        (LORA, {"lora_rank": 0}, {"on": True, "r": 4, "four": True, "modules": ["q_proj"]}, {}),
        (LORA, {"lora_rank": 4, "qlora": True, "base": "gptq"}, {"on": False}, {"on": False}),
    ],
)
def test_what_is_written(idea: Idea, facts: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    assert json.loads(put(idea, facts, keys_of(before)).document.text()) == after


def test_other_names_share_what_is_noted() -> None:
    """An idea reads and writes a file's own spelling, and its notes are the file's."""
    named = spelled(
        quantised(four="four", kind="kind"), lambda keys, name: f"b.{name}", lambda name: (f"b.{name}", name)
    )
    keys = keys_of({"b": {"four": True, "kind": "fp4"}})
    assert (named.keys, named.read(keys)["base"]) == (("b.four", "four", "b.kind", "kind"), "fp4")
    assert [item.key for item in keys.noted.values()] == ["b.kind"]
    assert json.loads(put(named, {"qlora": False}, keys).document.text()) == {"b": {"four": False}}
    over = Spelled(keys, lambda _, name: f"b.{name}", {"length": 8})
    assert (over.whole("length"), over.flag("four")) == (8, False)


HELD = row("precision", "dtype", words={"bf16": "bf16-pure", "fp32": "fp32"}, default="bf16-pure")


def eight_written(facts: Facts, keys: Keys, at: Any) -> dict[str, Any]:
    if facts["precision"] == "fp8":
        return {at.switch: True, at.recipes["usual"]: "tensorwise"}
    return at.inner.write(facts, keys) | {at.switch: None, at.recipes["usual"]: None}


@reads(
    inner=HELD, write=eight_written, when=lambda keys: not keys.has("off"), can={"precision": ("fp8", "fp32", "bf16-pure")},
    switch="eight", recipes={"usual": "recipe"},
)  # fmt: skip
def EIGHT(keys: Keys, at: Any) -> Facts:
    return {"precision": "fp8"} if keys.flag(at.switch) else at.inner.read(keys)


@settings(max_examples=20)
@given(wanted=st.sampled_from(["fp8", "fp32", "bf16-pure"]), other=st.sampled_from(["fp8", "fp32", "bf16-pure"]))
def test_an_idea_over_another(wanted: str, other: str) -> None:
    """Its keys and facts are those of the idea beneath and its own, in this order."""
    assert (EIGHT.keys, EIGHT.facts) == (("dtype", "eight", "recipe"), ("precision",))
    before = put(EIGHT, {"precision": other}, keys_of({}))
    both_laws(EIGHT, {"precision": wanted}, json.loads(before.document.text()))


def test_what_an_idea_cannot_say_is_not_written() -> None:
    assert EIGHT.write({"precision": "mxfp8"}, keys_of({})) == {}
    assert EIGHT.read(keys_of({"off": True, "eight": True})) == {}
    ranks = reads(
        "r", facts="lora_rank", write=lambda facts, keys: {"r": facts["lora_rank"]}, needs="lora_rank", bases=("nf4",)
    )
    idea = ranks(lambda keys: {"lora_rank": keys.whole("r")})
    runs = [
        {},
        {"lora_rank": 0},
        {"lora_rank": 8},
        {"lora_rank": 8, "qlora": True, "base": "int8"},
        {"lora_rank": 8, "qlora": True},
    ]
    assert [idea.write(facts, keys_of({})) for facts in runs] == [{}, {}, {"r": 8}, {}, {"r": 8}]


def test_options_of_an_idea_are_none_of_its_keys() -> None:
    idea = reads(facts="tp", tp="tp", options={"usual": 4})(lambda keys, at: {"tp": keys.whole(at.tp) or at.usual})
    assert (idea.keys, idea.read(keys_of({})), idea.write({"tp": 2}, keys_of({}))) == (("tp",), {"tp": 4}, {})


def test_an_idea_written_otherwise() -> None:
    idea = writes(row("tp", "tp", default=1))(
        lambda facts, keys, inner: inner.write(facts, keys) | {"sp": facts["tp"] > 1}
    )
    assert idea.write({"tp": 2}, keys_of({})) == {"tp": 2, "sp": True}
    assert idea.read(keys_of({})) == {"tp": 1}


def test_an_engine_by_its_options() -> None:
    assert served("hf", {"batch": None}) == "hf"
    assert served("sglang", {"tp": 2, "prefix": False}) == Engine.parse("sglang:tp=2,prefix=false").text()


def test_a_key_that_stays_is_neither_written_nor_removed() -> None:
    def written(facts: Facts, keys: Keys) -> dict[str, Any]:
        return {"tp": facts["tp"], "sp": True if facts["tp"] > 1 else STAYS, "cp": None}

    idea = reads("tp", "sp", "cp", facts="tp", write=written)(lambda keys: {"tp": keys.whole("tp")})
    assert idea.write({"tp": 1}, keys_of({})) == {"tp": 1, "cp": None}
    assert idea.write({"tp": 2}, keys_of({})) == {"tp": 2, "sp": True, "cp": None}
    turned = writes(row("tp", "tp"))(lambda facts, keys, inner: inner.write(facts, keys) | {"cp": STAYS})
    assert turned.write({"tp": 2}, keys_of({"cp": 4})) == {"tp": 2}


def test_what_a_note_says_without_the_value() -> None:
    keys = keys_of({"mode": "late"})
    keys.note("mode", "is late", bare=True)
    keys.note("mode", "is late")
    assert list(keys.noted) == ["mode: is late", "mode = 'late': is late"]
