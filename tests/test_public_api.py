"""The facade, used as a stranger would: by names, by specifications, from a typed file, over pickles and imports."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import loadgauge
from command_line import document, typed
from loadgauge.api import Flags, TaskFlags
from loadgauge.core.base.errors import ConfigError, Error, LayoutError
from loadgauge.core.definitions.job.job import POSTTRAIN, Job, fields

GPU = "h100-sxm5-80gb"
JOB: dict[str, Any] = {"gpus": 8, "zero": 3, "seq_len": 2048}


# Asking


def test_a_job_in_keywords_is_the_command_lines() -> None:
    result = loadgauge.estimate("llama-3.1-8b", gpu=GPU, **JOB)
    told = document(f"estimate llama-3.1-8b --gpu {GPU} --gpus 8 --zero 3 --seq-len 2048")
    answer = result.to_dict()
    for part in ("model", "layout", "training", "memory", "flops", "network", "assumed", "not_counted"):
        assert told[part] == pickle.loads(pickle.dumps(answer[part])), part
    assert told["time"].items() >= answer["time"].items()


def test_names_stand_for_specifications() -> None:
    layout = loadgauge.Layout(dp=8, zero=3, global_batch=8, seq_len=2048)
    named = loadgauge.estimate("llama-3.1-8b", layout, gpu=GPU)
    assert named == loadgauge.estimate(loadgauge.model("llama-3.1-8b"), layout, gpu=loadgauge.gpu(GPU))
    machines = loadgauge.cluster(loadgauge.gpu(GPU), 8)
    assert named == loadgauge.estimate("llama-3.1-8b", layout, cluster=machines)
    assert named.time is not None


def test_a_path_stands_for_a_model(tmp_path: Path) -> None:
    place = tmp_path / "config.json"
    place.write_text('{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}')
    for path in (place, tmp_path, str(place)):
        result = loadgauge.estimate(path, gpus=2)
        assert (result.model.hidden_size, result.layout.dp) == (64, 2)
        assert result.assumed["vocab_size"] == "50257 (not in the config: gpt2's default)"


def test_why_there_is_no_time_is_said() -> None:
    without = loadgauge.estimate("gpt2", loadgauge.Layout(seq_len=64))
    assert without.time is None
    odd = loadgauge.estimate("gpt2", loadgauge.Layout(dp=12, global_batch=12, seq_len=64), gpu=GPU)
    assert odd.time is None
    assert odd.memory.fits
    assert "12 GPUs are not whole nodes of 8" in odd.not_counted[0]


def test_a_layout_needs_its_sequence_length() -> None:
    with pytest.raises(TypeError, match="seq_len"):
        loadgauge.Layout()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("args", "flags", "message"),
    [
        ((5,), {}, "model: must be a name in the catalogue, a path, a ModelSpec or a Job, got 5"),
        (("gpt2", "tp=8"), {}, "layout: must be a loadgauge.Layout; without one, give gpus=, tp="),
        (("gpt2",), {"zer": 3}, "zer: no flag of a job has this name; did you mean zero"),
        (("gpt2",), {"tp": 0}, "tp: must be a whole number from 1"),
        (("gpt2",), {"tp": True}, "tp: must be a number or a text, got True"),
        (("gpt2",), {"tp": 1.5}, "tp: must be a whole number"),
        (("gpt2",), {"qlora": 1}, "qlora: must be true or false, got 1"),
        ((Job(model="gpt2"),), {"tp": 2}, "model: a Job is estimated as it is; change it with job.replace"),
        ((Job(model="gpt2"), loadgauge.Layout(seq_len=8)), {}, "model: a Job is estimated as it is"),
        (("gpt2",), {"schedule": "2f2b"}, "schedule: "),
        (("gpt2",), {"gpu": 80}, "gpu: must be the id of a GPU"),
        (("gpt2",), {"gpu": "h1000"}, "h1000"),
        (("gpt2",), {"scale": 2.0}, "scale: needs a Layout"),
        (("gpt2",), {"training": "megatron"}, "training: needs a Layout"),
        (("gpt2", loadgauge.Layout(seq_len=8), "megatron"), {}, "training: must be what loadgauge.training"),
        (("gpt2", loadgauge.Layout(seq_len=8)), {"cluster": 8}, "cluster: must be what loadgauge.cluster"),
        (("gpt2", loadgauge.Layout(seq_len=8)), {"tp": 2}, "tp: already said by the Layout"),
    ],
)
def test_what_cannot_be_read_names_what_can(args: tuple[Any, ...], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as caught:
        loadgauge.estimate(*args, **flags)
    assert "\n" not in str(caught.value)


def test_a_layout_that_cannot_exist_is_refused_in_both_forms() -> None:
    with pytest.raises(LayoutError):
        loadgauge.estimate("gpt2", gpu=GPU, gpus=6, tp=5)
    with pytest.raises(LayoutError):
        loadgauge.estimate("gpt2", loadgauge.Layout(dp=2, global_batch=3, seq_len=8), gpu=GPU)


def test_none_is_the_same_as_not_given() -> None:
    assert loadgauge.estimate("gpt2", gpus=2, tp=None) == loadgauge.estimate("gpt2", gpus=2)  # type: ignore[call-overload]


def test_a_plan_s_flags_give_its_estimate_and_go_into_other_tools_files() -> None:
    best = loadgauge.plan("llama-3.1-8b", gpu=GPU, gpus=8, seq_len=8192, global_batch=64, tp=(1, 2), pp=1, cp=1).best
    again = loadgauge.estimate(best.job)
    assert (again.memory.total, again.time) == (best.estimate.memory.total, best.estimate.time)
    assert "--framework" in best.flags()
    assert f"--tensor-model-parallel-size {best.estimate.layout.tp}" in loadgauge.convert(best.job, to="megatron").text


def test_a_job_is_the_same_as_its_keywords() -> None:
    job = loadgauge.Job(model="llama-3.1-8b", gpu=GPU, **JOB)
    assert loadgauge.estimate(job) == loadgauge.estimate("llama-3.1-8b", gpu=GPU, **JOB)
    assert loadgauge.estimate(job.replace(tp=4)).layout.dp == 2


def test_the_keywords_have_the_names_and_types_of_a_jobs_fields() -> None:
    keywords, kinds = get_type_hints(Flags), get_type_hints(Job)
    assert set(keywords) == set(kinds) - {"model", "gpu", *POSTTRAIN}
    of_tasks = get_type_hints(TaskFlags)
    assert set(of_tasks) == set(kinds) - {"model"}
    for name, kind in of_tasks.items():
        if name in ("task", "gpu"):  # its words are those of `spec.tasks`
            continue
        if get_origin(kind) is Literal:
            assert get_args(kind) == fields()[name].choices, name
        else:
            assert kind | None == kinds[name], name
            assert not fields()[name].choices or kind is str, name


def test_every_flag_of_the_command_is_a_keyword() -> None:
    assert {*Flags.__annotations__, "model", "layout", "gpu"} <= set(inspect.signature(loadgauge.estimate).parameters)


# Showing


def test_an_estimate_prints_as_a_page_and_shows_as_a_line() -> None:
    result = loadgauge.estimate("llama-3.1-8b", gpu=GPU, **JOB)
    assert str(result) == typed(f"estimate llama-3.1-8b --gpu {GPU} --gpus 8 --zero 3 --seq-len 2048").out.rstrip("\n")
    result = copy.copy(result)  # as from specifications: without what was asked
    text = str(result)
    assert len(text) < 2500
    assert all(len(line) <= 120 for line in text.splitlines()[:-2])
    for part, nbytes in result.memory.parts.items():
        assert not nbytes or f"{nbytes / 2**30:,.2f} GiB" in text, part
    assert "--framework huggingface" in text
    assert "data loading" in text
    assert repr(result).count("\n") == 0
    assert len(repr(result)) < 200


# Importing


def test_a_public_name_hides_no_module() -> None:
    for name in loadgauge.__all__:
        spec = importlib.util.find_spec(f"loadgauge.{name}")
        assert spec is None or spec.origin is None, (
            name
        )  # a folder of an older checkout may still be there, without modules


def test_the_package_can_be_called_and_imported_from() -> None:
    import loadgauge.core.estimate.memory.rank_memory as by_name
    from loadgauge import estimate
    from loadgauge.core.estimate.memory import rank_memory

    assert by_name is rank_memory is sys.modules["loadgauge.core.estimate.memory.rank_memory"]
    assert estimate is loadgauge.estimate
    assert callable(estimate)
    assert pickle.loads(pickle.dumps(estimate)) is estimate
    assert copy.deepcopy(estimate) is estimate
    assert estimate.__doc__ is not None
    assert "the flags of `loadgauge estimate`" in estimate.__doc__


@pytest.mark.parametrize(
    "code",
    [
        "import loadgauge.core.estimate.memory.rank_memory as m; assert m.MemoryModel",
        "from loadgauge.core.estimate.memory import rank_memory; assert rank_memory.MemoryModel",
        "from loadgauge import estimate; assert estimate('gpt2').params",
        "from loadgauge.measure.watch import Watch; import loadgauge.pytorch.measure.watch as w; assert w.Watch is Watch",
        "import loadgauge as lg; from loadgauge.core.estimate.estimate import estimate; assert lg.estimate('gpt2').params",
    ],
)
def test_every_way_of_importing_works_in_a_fresh_process(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_importing_the_facade_loads_nothing_heavy() -> None:
    heavy = (
        "torch",
        "sympy",
        "numpy",
        "rich",
        "click",
        "msgspec",
        "loadgauge.core.command_line",
        "loadgauge.core.definitions",
        "loadgauge.core.layers",
    )
    code = f"import sys, loadgauge; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("words", ["--version", "", "--help"])
def test_what_needs_no_estimate_imports_none(words: str) -> None:
    """A cold start is imports: what only prints a text takes a tenth of a second because it has few of them."""
    heavy = (
        "torch",
        "sympy",
        "numpy",
        "rich",
        "msgspec",
        "loadgauge.core.estimate.result",
        "loadgauge.core.definitions",
        "loadgauge.core.layers",
    )
    code = f"""
import sys
from loadgauge.core.command_line.main import run
code = run({words.split()!r})
print(code, [name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_every_public_name_is_found_listed_and_kept() -> None:
    assert set(loadgauge.__all__) <= set(dir(loadgauge))
    for name in loadgauge.__all__:
        assert getattr(loadgauge, name) is getattr(loadgauge, name)
    with pytest.raises(AttributeError, match="'loadgauge' has no attribute 'estimat'"):
        loadgauge.estimat  # noqa: B018


# Types

STRANGER = """
import loadgauge as lg
import loadgauge.core.estimate.memory.rank_memory as memory
from loadgauge import Layout, estimate
from loadgauge.core.estimate.result import Estimate

result: Estimate = lg.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
other: Estimate = estimate(lg.model("gpt2"), Layout(seq_len=1024), gpu=lg.gpu("rtx4090"))
job: lg.Job = lg.Job(model="gpt2", gpu="rtx4090", tp=1, sequence_parallel=None)
again: Estimate = estimate(job.replace(zero=1))
words: list[str] = job.words()
line: str = job.command() + job.flags()
read: lg.Job = lg.Job.of("gpt2", {"tp": "2"})
fits: bool | None = result.memory.fits
parts: dict[str, float] = result.memory.parts
model: memory.MemoryModel | None = None
traced: str = str(lg.trace("gpt2", layers=1, seq_len=16, recompute="full"))
peak: int = lg.trace(job, device="cpu").peak.total
best: lg.Job = lg.plan("gpt2", gpu="rtx4090", gpus=1, tp=(1, 2), objective="headroom").best.job
flags: str = lg.plan(job, top=3).best.flags()
text: str = lg.convert(job, to="megatron").text
if result.time is not None:
    step: float = result.time.step
"""
WRONG = """
import loadgauge as lg

lg.estimate("gpt2", lg.Layout())
lg.estimate("gpt2", gpus="8")
lg.estimate("gpt2", zer=3)
lg.estimate(5)
lg.estimate(lg.Job(model="gpt2"), tp=2)
lg.Job(model="gpt2", tp="2")
lg.trace("gpt2", seq_length=16)
lg.plan("gpt2", objective="speed")
lg.convert(5)
"""


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files("loadgauge").joinpath("py.typed").is_file()


@pytest.mark.long
def test_a_strangers_file_is_checked(tmp_path: Path) -> None:
    """mypy --strict, over a file that uses the facade and one that misuses it, with the package as a library."""
    pytest.importorskip("mypy")
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "wrong.py").write_text(WRONG)
    # What loadgauge itself imports is nothing that its callers see, and mypy would read all of PyTorch.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-loadgauge.*]\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*,numpy.*,IPython.*,ruamel.*]\nfollow_imports = skip\n"
    )
    words = ["-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, *words, "stranger.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True
    )
    errors = {tuple(line.split(":")[:2]) for line in done.stdout.splitlines() if ": error:" in line}
    wrong = {str(number) for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith("lg.")}
    assert errors == {("wrong.py", number) for number in wrong}, done.stdout


def test_every_error_is_one_of_ours() -> None:
    with pytest.raises(Error):
        loadgauge.estimate("no-such-model")
