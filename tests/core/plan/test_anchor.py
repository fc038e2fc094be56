"""Anchor files: a run is predicted as it was measured, kernels are those of the file, and other files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed

FLAGS = "--gpus 8 --zero 3 --micro-batch 2 --recompute full"
RUN = f"estimate llama-3.2-1b --gpu h100-sxm5-80gb {FLAGS}"
ELSEWHERE = "estimate llama-3.2-1b --gpu h100-sxm5-80gb --gpus 64 --zero 2"
FILE = """
gpu = "h100-sxm5-80gb"
[run]
model = "llama-3.2-1b"
step = "900ms"
flags = { gpus = 8, zero = 3, micro_batch = 2, recompute = "full" }
"""


@pytest.fixture
def anchor(tmp_path: Path) -> Path:
    path = tmp_path / "anchor.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def step(line: str) -> float:
    seconds: float = document(line)["time"]["step"]
    return seconds


def test_its_own_run_takes_what_was_measured_and_others_as_much_longer(anchor: Path) -> None:
    assert step(f"{RUN} --anchor {anchor}") == pytest.approx(0.9)
    factor = 0.9 / step(RUN)
    node = ELSEWHERE.replace("--gpus 64", "--gpus 8")
    assert step(f"{node} --anchor {anchor}") == pytest.approx(factor * step(node))
    plan = "plan llama-3.2-1b --gpu h100-sxm5-80gb --gpus 8 --pp 1 --cp 1 --tp 1 --recompute none"
    best, moved = (document(f"{plan}{words}")["layouts"][0]["time"]["step"] for words in ("", f" --anchor {anchor}"))
    assert moved == pytest.approx(factor * best)


def test_what_did_not_run_stays_as_predicted(anchor: Path) -> None:
    """A node moves cards and inner links; one card moves cards alone; a run over several nodes moves the network, too."""
    factor = 0.9 / step(RUN)
    far = f"{ELSEWHERE} --tp 2 --overlap none"
    before, after = (document(line)["time"]["parts"] for line in (far, f"{far} --anchor {anchor}"))
    moved = {lane: value / before[lane] for lane, value in after.items() if before[lane]}
    assert moved["dp"] == pytest.approx(1)  # over 32 ranks of 8 nodes
    same = dict.fromkeys(("forward", "backward", "tp", "optimizer"), factor)
    assert {lane: moved[lane] for lane in same} == pytest.approx(same)
    one = document(f"{far} --measured step=2s,gpus=1,tp=,zero=,micro-batch=1")["time"]
    assert one["parts"]["forward"] / before["forward"] == pytest.approx(one["scale"])
    assert [one["parts"][lane] / before[lane] for lane in ("tp", "dp")] == pytest.approx([1, 1])
    several = document(f"{far} --measured step=2s")["time"]
    assert several["step"] == pytest.approx(2)
    assert several["parts"]["dp"] / before["dp"] == pytest.approx(several["scale"])


@pytest.mark.parametrize(
    "flags",
    [
        "llama-3.1-8b --gpus 8 --zero 3 --micro-batch 2 --recompute full --offload optimizer",
        "llama-3.1-8b --gpus 8 --zero 3 --framework deepspeed --offload all",
        "llama-3.1-8b --gpus 8 --cp 4 --seq-len 32768",
        "llama-3.1-8b --gpus 16 --pp 2 --zero 1 --precision fp8 --framework megatron",
        "llama-3.1-8b --gpus 8 --lora-rank 16 --qlora",
        "qwen3-30b-a3b --gpus 8 --ep 8 --zero 1",
    ],
)
def test_a_run_that_took_so_much_longer_takes_so_much_longer(flags: str) -> None:
    """Whatever the time of its own run is made of: kernels, links, host."""
    line = f"estimate {flags} --gpu h100-sxm5-80gb"
    seconds = step(line)
    assert step(f"{line} --measured step={1.7 * seconds}s") == pytest.approx(1.7 * seconds)


def test_kernels_of_a_file_alone_are_those_that_time_is_of(tmp_path: Path) -> None:
    path = tmp_path / "kernels.toml"
    path.write_text('gpu = "h100-sxm5-80gb"\nbasis = "measured"\nmatmul = 0.409\n', encoding="utf-8")
    line = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --micro-batch 4"
    slow, usual = step(f"{line} --anchor {path}"), step(line)
    assert 1.4 < slow / usual < 2  # half of the rate of products, which are most of a step
    plan = "plan llama-3.2-1b --gpu h100-sxm5-80gb --gpus 8 --tp 1 --pp 1 --cp 1 --recompute none --zero 2"
    best, slowest = (document(f"{plan}{words}")["layouts"][0]["time"]["step"] for words in ("", f" --anchor {path}"))
    assert 1.2 < slowest / best < 2


@pytest.mark.parametrize(
    ("content", "gpu", "said"),
    [
        (FILE, "a100-sxm4-80gb", "was measured on h100-sxm5-80gb"),
        (FILE.replace("900ms", "900GB"), "h100-sxm5-80gb", "step cannot be '900GB'"),
        (FILE.replace("[run]", "[walk]"), "h100-sxm5-80gb", "is not a file of"),
        ("gpu = ", "h100-sxm5-80gb", "is not a file of"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str, gpu: str, said: str) -> None:
    path = tmp_path / "anchor.toml"
    path.write_text(content, encoding="utf-8")
    found = typed(f"estimate llama-3.2-1b --gpu {gpu} --anchor {path}")
    assert found.code == 2
    assert said in found.err
    assert found.err.count("\n") == 1


def test_a_file_of_another_ending_is_told_the_ending() -> None:
    assert "a file that ends in .toml" in typed("estimate gpt2 --gpu h100-sxm5-80gb --anchor anchor").err


def test_a_plan_takes_no_run_of_one_layout() -> None:
    assert "--anchor" in typed("plan llama-3.2-1b --gpu h100-sxm5-80gb --gpus 8 --measured step=1s").err


def test_a_folder_of_anchors_is_rows_beside_their_predictions(anchor: Path) -> None:
    again = FILE.replace('step = "900ms"', 'step = "900ms"\nlayers = 4\ncard = "20GiB"')
    (anchor.parent / "few.toml").write_text(again, encoding="utf-8")
    (anchor.parent / "bad.toml").write_text("gpu = 3", encoding="utf-8")
    rows = {(row["id"], row["quantity"]): row for row in document(f"validate --runs {anchor.parent}")["rows"]}
    assert rows["anchor", "time"]["predicted"] == pytest.approx(step(RUN))
    assert rows["few", "time"]["predicted"] < 0.5 * step(RUN)
    assert rows["few-card", "memory"]["measured"] == 20 * 2**30
    assert "expected `str`" in rows["bad.toml", "time"]["reason"].lower()


def test_the_answer_says_by_how_much_it_was_moved(anchor: Path) -> None:
    """The step and its range without the file, and each part of a step."""
    before, after = (document(line)["time"] for line in (ELSEWHERE, f"{ELSEWHERE} --anchor {anchor}"))
    for form in ("--brief", "--full"):
        text = " ".join(typed(f"{ELSEWHERE} --anchor {anchor} {form}").out.split())
        assert "By what you measured: " in text
        assert f"forward {after['parts']['forward'] / before['parts']['forward']:.3g}x" in text
        assert "By what you measured" not in typed(f"{ELSEWHERE} {form}").out
    assert after["high"] / after["low"] < before["high"] / before["low"]


def test_a_reason_says_that_a_run_moved_it(anchor: Path) -> None:
    for topic in ("forward", "matmul", "optimizer-time"):
        out = " ".join(typed(f"{ELSEWHERE} --anchor {anchor} --explain {topic}").out.split())
        assert f"a run of yours took {0.9 / step(RUN):.3f} x what is predicted" in out
        assert "a run of yours" not in typed(f"{ELSEWHERE} --explain {topic}").out


def test_a_run_far_from_what_is_predicted_is_asked_about(anchor: Path) -> None:
    """900 ms is 3.6 times what is predicted; a run that took 1.05 times as long is not asked about."""
    usual = anchor.with_name("usual.toml")
    usual.write_text(FILE.replace("900ms", f"{1.05 * step(RUN)}s"), encoding="utf-8")
    for path, asked in ((anchor, True), (usual, False)):
        out = " ".join(typed(f"{ELSEWHERE} --anchor {path} --full").out.split())
        assert ("are the flags those of the run" in out) == asked
        assert "links between nodes take what is predicted." in out
    assert "参数是否与该次运行一致" in typed(f"{ELSEWHERE} --anchor {anchor} --brief --lang zh").out
