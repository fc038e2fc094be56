"""Whatever is typed: one clear line and a code of 0, 1 or 2, never a traceback."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from command_line import typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.command_line.main import COMMANDS
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.core.definitions.job.job import WHOLE_RUN, Job
from loadgauge.core.definitions.layout.layout import SCHEDULES
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import When


def refused(line: str | list[str], *words: str) -> None:
    found = typed(line)
    assert found.code == 2, found
    assert not found.out
    assert found.err.startswith("loadgauge: ")
    assert found.err.count("\n") == 1
    assert "defect" not in found.err
    assert "Traceback" not in found.err
    for word in words:
        assert word in found.err


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nonsense", "nonsense"),
        ("estimte gpt2", "did you mean estimate"),
        ("estimate", "MODEL"),
        ("estimate gpt2 --no-such-flag", "--no-such-flag"),
        ("estimate gpt2 --tp x", "whole number"),
        ("estimate gpt2 --tp 0", "whole number"),
        ("estimate gpt2 --tp -3", "whole number"),
        ("estimate gpt2 --gpus 1e3", "whole number"),
        ("estimate gpt2 --micro-batch nan", "whole number"),
        (f"estimate gpt2 --seq-len {'9' * 5000}", "whole number"),
        ("estimate gpt2 --zero 4", "0 to 3"),
        ("estimate gpt2 --tokens -5", "--tokens"),
        ("estimate gpt2 --tokens 0", "--tokens"),
        ("estimate gpt2 --tokens -5 --price 2", "--tokens"),
        ("estimate gpt2 --price -2", "above 0"),
        ("check gpt2 --tokens -5", "--tokens"),
        ("fleet gpt2 --gpu l4 --gpus 8 --tokens -5", "--tokens"),
        ("estimate gpt2 --tp 5", "leaves 2"),
        ("estimate gpt2 --gpus 12 --tp 8", "leaves 4"),
        ("estimate gpt2 --pp 20", "num_hidden_layers"),
        ("estimate gpt2 --seq-len 2000", "1024"),
        ("estimate gpt2 --gpu h100-sxm5-81gb", "h100-sxm5-80gb"),
        ("estimate gpt22", "gpt2"),
        ("estimate gpt2 --gpu h100 --gpu a100", "--sweep gpu=h100,a100"),
        ("estimate /no/such/file.json", "no such file"),
        ("estimate gpt2 --schedule gpipe", "pp above 1"),
        ("estimate gpt2 --ep 2", "experts"),
        ("estimate gpt2 --etp 2", "experts"),
        ("estimate gpt2 --vpp 2", "vpp"),
        ("estimate gpt2 --sequence-parallel", "tp"),
        ("estimate gpt2 --lora-targets all", "--lora-rank"),
        ("estimate gpt2 --lora-rank 8 --lora-targets q_proj", "q_proj"),
        ("estimate gpt2 --stage-layers 6,6", "stage layers"),
        ("estimate gpt2 --pp 2 --stage-layers 6,x", "stage_layers"),
        ("estimate gpt2 --recompute half", "half"),
        ("estimate gpt2 --precision int2", "int2"),
        ("estimate gpt2 --optimizer adamm", "adamw"),
        ("estimate gpt2 --framework tensorflow", "huggingface"),
        ("estimate gpt2 --loss chunked:0", "chunks"),
        ("estimate gpt2 --lengths /no/such/file", "/no/such/file"),
        ("estimate gpt2 --explain everything", "everything"),
        ("estimate gpt2 extra", "extra"),
        ("equation volume", "volume"),
        ("equation stats", "did you mean states?"),
        ("equation params --attention flash", "--attention"),
        ("equation activations --tp many", "many"),
        ("equation activations --layer nosuchmodel", "nosuchmodel"),
        ("equation activations --json --latex", "--latex"),
        ("gpus --unknown", "--unknown"),
    ],
)
def test_errors_are_one_clear_line(line: str, word: str) -> None:
    refused(line, word)


@pytest.mark.parametrize("content", ["", "a\nb", "-3", "1.5", "[1, 2", '{"a": 1}', "0"])
def test_bad_lengths_are_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    refused(["estimate", "gpt2", "--lengths", str(path)])


GOOD = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
}
BAD_CONFIGS = {
    "empty": "",
    "blank": "  \n",
    "truncated": json.dumps(GOOD)[:-20],
    "list": "[]",
    "number": "7",
    "null": "null",
    "not json": "hidden_size = 256",
    "binary": "\x00\x01\x02",
    "nan": json.dumps(GOOD | {"hidden_size": float("nan")}),
    "infinite": json.dumps(GOOD | {"hidden_size": float("inf")}),
    "negative": json.dumps(GOOD | {"hidden_size": -256}),
    "zero": json.dumps(GOOD | {"num_hidden_layers": 0}),
    "huge": json.dumps(GOOD | {"hidden_size": 10**30}),
    "many digits": json.dumps(GOOD)[:-1] + f', "vocab_size": {"9" * 5000}}}',
    "text for a number": json.dumps(GOOD | {"hidden_size": "256"}),
    "fraction": json.dumps(GOOD | {"hidden_size": 256.5}),
    "true for a number": json.dumps(GOOD | {"hidden_size": True}),
    "list for a number": json.dumps(GOOD | {"hidden_size": [256]}),
    "null for a number": json.dumps(GOOD | {"hidden_size": None}),
    "indivisible": json.dumps(GOOD | {"num_attention_heads": 7}),
    "contradiction": json.dumps(GOOD | {"num_key_value_heads": 3}),
    "twice": json.dumps(GOOD)[:-1] + ', "hidden_size": 512}',
    "no type": json.dumps({"hidden_size": 256}),
    "unknown type": json.dumps(GOOD | {"model_type": "abacus"}),
    "type of the wrong kind": json.dumps(GOOD | {"model_type": 7}),
    "line breaks": json.dumps(GOOD | {"model_type": "a\nb\x1b[31m"}),
    "deep": "[" * 100_000,
    "millions of layers": json.dumps(GOOD | {"num_hidden_layers": 10**9}),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_are_one_clear_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(BAD_CONFIGS[name])
    refused(["estimate", str(path)])
    refused(["estimate", str(tmp_path), "--json"])
    refused(["equation", "params", "--layer", str(path)])


def test_a_model_without_logits_has_no_loss_to_choose(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | {"architectures": ["LlamaModel"]}))
    refused(["estimate", str(path), "--loss", "chunked"], "head")
    assert "--loss" not in json.loads(typed(["estimate", str(path), "--json"]).out)["assumed"]


def test_a_file_too_large_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * 20_000_000)
    refused(["estimate", str(path)], "larger")


def test_an_error_of_our_own_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr("loadgauge.core.command_line.estimate.resolve_job", fail)
    monkeypatch.delenv("LOADGAUGE_DEBUG", raising=False)
    found = typed("estimate gpt2")
    assert found.code == 2
    assert found.err.count("\n") == 1
    assert "please report" in found.err
    monkeypatch.setenv("LOADGAUGE_DEBUG", "1")
    with pytest.raises(KeyError):
        typed("estimate gpt2")


NUMBER = st.one_of(st.integers(-2, 130).map(str), st.integers(-(10**30), 10**30).map(str), st.text(max_size=6))
WORD = st.text(max_size=12)


def flag(name: str, value: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return value.map(lambda text: [name, text])


def one_of(words: Any) -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(sorted(words)), WORD)


FLAGS = st.one_of(
    *(
        flag(f"--{name}", NUMBER)
        for name in [
            "gpus",
            "tp",
            "pp",
            "vpp",
            "cp",
            "ep",
            "zero",
            "micro-batch",
            "global-batch",
            "seq-len",
            "lora-rank",
        ]
    ),
    flag("--gpu", one_of(gpu_ids())),
    flag("--schedule", one_of(SCHEDULES)),
    flag("--recompute", one_of(("none", "selective", "full", "full:every=2", "full:layers=1", "full:group=3", "mlp"))),
    flag(
        "--stage-layers",
        st.one_of(WORD, st.lists(st.integers(-1, 14), max_size=5).map(lambda x: ",".join(map(str, x)))),
    ),
    flag("--precision", one_of((*PRECISIONS, "bf16", "fp16"))),
    flag("--optimizer", one_of(OPTIMIZERS)),
    flag("--framework", one_of(FRAMEWORKS)),
    flag("--attention", one_of(("eager", "flash"))),
    flag("--loss", one_of(("auto", "float32", "inplace", "chunked", "chunked:4"))),
    flag("--lora-targets", one_of(("all", "attention", "q_proj,v_proj"))),
    flag("--offload", one_of(("none", "optimizer", "all"))),
    flag("--explain", one_of(PARTS)),
    flag("--at", one_of(get_args(When))),
    flag("--lengths", WORD),
    st.sampled_from([["--json"], ["--sequence-parallel"], ["--qlora"]]),
    WORD.map(lambda text: [text]),
)
ENDING = [name for name in COMMANDS if name not in ("serve", "mcp")]
"""Commands that end by themselves."""
MODELS = st.one_of(st.sampled_from(["gpt2", "llama-3.2-1b", "bert-base", "gemma-2-2b", "qwen3-0.6b"]), WORD)


def survives(words: list[str]) -> None:
    found = typed(words)
    assert found.code in (0, 1, 2)
    assert "defect" not in found.err, (words, found.err)
    errors = [line for line in found.err.splitlines() if not line.startswith("loadgauge: taken: ")]
    assert len(errors) == (found.code == 2), (words, found.err)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=MODELS, flags=st.lists(FLAGS, max_size=7))
def test_estimate_survives_anything(model: str, flags: list[list[str]]) -> None:
    survives(["estimate", model, *(word for words in flags for word in words)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(
                ["params", "activations", "wire", "states", "model-flops", "--tp", "--sequence-parallel", "--latex"]
            ),
            st.sampled_from(
                ["--json", "--layer", "gpt", "llama", "gemma-2-2b", "--recompute", "full", "--attention", "flash"]
            ),
            WORD,
        ),
        max_size=6,
    )
)
def test_equation_survives_anything(words: list[str]) -> None:
    survives(["equation", *words])


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.one_of(st.sampled_from([*ENDING, "--help", "--version", "-h", "--json"]), WORD), max_size=3))
def test_commands_survive_anything(words: list[str]) -> None:
    survives(words)


@pytest.mark.parametrize("field", WHOLE_RUN)
@pytest.mark.parametrize("value", [-5, 0, "-5", "-1e9", float("nan")])
def test_no_job_has_a_negative_count_or_price(field: str, value: Any) -> None:
    """However it is made: from texts, with keywords, or from another one."""
    for make in (Job.of("gpt2", {}).replace, functools.partial(Job, "gpt2"), lambda **given: Job.of("gpt2", given)):
        with pytest.raises(ConfigError, match=f"^{field}: "):
            make(**{field: value})
