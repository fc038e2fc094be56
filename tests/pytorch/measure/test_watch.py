"""Prediction beside measurement in real trainings on a CPU, and the warnings on a device whose counters are played."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import loadgauge
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.measure.trainer_watch import PredictionCallback
from loadgauge.pytorch.measure.watch import Expected, Watch

GIB = 2**30
S, B, STEPS = 64, 4, 5
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(S) % 90 + 3
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def job(tmp_path: Path) -> loadgauge.Job:
    """A training in float32 that a CPU runs in no time."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return loadgauge.Job(
        model=str(tmp_path / "config.json"),
        precision="fp32",
        micro_batch=B,
        seq_len=S,
        attention="eager",
    )


def model(job: loadgauge.Job) -> Any:
    """The model of a job."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(Path(job.model).parent)
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


class Played:
    """Counters of a card of so many bytes, on which each step leaves more behind."""

    def __init__(self, card: int, peak: int, left: int = 0, more: int = 0) -> None:
        self.card, self.highest, self.left, self.more = card, peak, left, more

    def peak(self) -> int:
        return self.highest

    def allocated(self) -> int:
        self.left += self.more
        return self.left

    def reserved(self) -> int:
        return self.highest + GIB // 16

    def free(self) -> int:
        return self.card - self.reserved()

    def reset(self) -> None:
        pass


class Counts(TrainerCallback):
    """Takes the size of weights and states from the optimizer itself."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.weights = sum(one.numel() * 4 for one in more["model"].parameters())


def test_a_real_training_by_transformers(job: loadgauge.Job, tmp_path: Path) -> None:
    lines: list[str] = []
    watched, counts = PredictionCallback(job, say=lines.append, steps=4), Counts()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=B, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, optim="adamw_torch", logging_strategy="no",
    )  # fmt: skip
    Trainer(model=model(job), args=arguments, train_dataset=Rows(), callbacks=[watched, counts]).train()
    assert len(lines) == 4
    assert lines[0].startswith("loadgauge: predicted ")
    assert [line.split(":")[1] for line in lines[1:]] == [" step 2", " step 3", " step 4"]
    assert len(watched.watch.seconds) == STEPS - 2  # not the first, and not the one that is recorded
    # Weights, gradients and two moments are there at the step of the optimizer; the prediction is of the same allocator.
    assert watched.watch.peak is not None
    assert watched.watch.peak >= 4 * counts.weights
    assert watched.watch.peak == pytest.approx(watched.watch.expected.memory[0], rel=0.1)
    assert f"({watched.watch.peak / watched.watch.expected.memory[0] - 1:+.1%})" in lines[3]
    assert not watched.watch.warnings
    assert not torch._C._autograd._profiler_enabled()


def test_a_loop_of_ones_own(job: loadgauge.Job) -> None:
    lines: list[str] = []
    watch, net = Watch(job, say=lines.append, steps=3), model(job)
    optimizer = torch.optim.AdamW(net.parameters())
    ids = torch.arange(B * S).reshape(B, S) % 90
    for _ in range(4):
        with watch.step():
            net(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(lines) == 3
    assert watch.peak == pytest.approx(watch.expected.memory[0], rel=0.1)


def test_what_was_measured_is_written_when_asked(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = Watch("gpt2", gpu="h100-sxm5-80gb", say=lines.append)
    watch.close(tmp_path / "none.toml")  # nothing was measured
    assert not lines
    watch.seconds, watch.peak = [0.4, 0.2, 0.3], 3 * 2**30
    watch.close(tmp_path / "run.toml")
    run = tomllib.loads((tmp_path / "run.toml").read_text(encoding="utf-8"))["run"]
    assert (run["model"], run["step"], run["allocated"]) == ("gpt2", "0.3s", "3.000 GiB")
    assert lines == [f"loadgauge: {tmp_path / 'run.toml'} is written, and sent nowhere"]


def test_a_loop_by_accelerate(job: loadgauge.Job) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    lines: list[str] = []
    watch = Watch(job, say=lambda text: (lines.append(text), accelerator.print(end=""))[0], steps=2)
    net, optimizer = accelerator.prepare(model(job), torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    ids = torch.arange(B * S).reshape(B, S) % 90
    for _ in range(2):
        with watch.step():
            for _ in range(2):
                with accelerator.accumulate(net):
                    accelerator.backward(net(input_ids=ids, labels=ids).loss)
                    optimizer.step()
                    optimizer.zero_grad()
    assert len(watch.seconds) == 1
    assert len(lines) == 2


def test_a_real_training_by_lightning(job: loadgauge.Job) -> None:
    pytest.importorskip("lightning", reason="heavy; the hook is small and the same Watch is tested with transformers")
    import lightning

    from loadgauge.pytorch.measure.lightning_watch import PredictionCallback as Callback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model(job)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    lines: list[str] = []
    watched = Callback(job.replace(global_batch=2 * B), say=lines.append, steps=4)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", callbacks=[watched], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=B))
    assert [line.split(":")[1].split()[0] for line in lines] == ["predicted", "step", "step", "step"]
    assert len(watched.watch.seconds) == STEPS - 2
    # Gradients stay from batch to batch, which the job says.
    assert watched.watch.peak == pytest.approx(watched.watch.expected.memory[0], rel=0.1)


def warned(card: float, factor: float = 1.0, more: float = 0, **flags: Any) -> tuple[list[str], list[str]]:
    """The kinds of warnings of eight steps whose peak is `factor` times the prediction, and the lines that were printed."""
    lines: list[str] = []
    expected = Expected.of(loadgauge.estimate("gpt2", **flags))
    played = Played(round(card * GIB), round(expected.memory[0] * factor), more=round(more * GIB))
    watch = Watch("gpt2", say=lines.append, counters=played, **flags)
    for _ in range(8):
        with watch.step():
            pass
    return [one.partition(":")[0] for one in watch.warnings], lines


def test_it_warns_before_memory_runs_out() -> None:
    peak = Expected.of(loadgauge.estimate("gpt2")).memory[0] / GIB
    assert warned(24)[0] == []
    assert warned(24, factor=3)[0] == ["over"]
    assert warned(peak * 1.02)[0] == ["near"]
    assert warned(peak * 1.2)[0] == []
    kinds, lines = warned(24, more=0.5)
    assert kinds == ["grows"]
    # 0.5 GiB a step, of what is left at the peak.
    (line,) = (line for line in lines if "WARNING" in line)
    assert f"in {(24 - peak) / 0.5:,.0f} steps" in line


def test_it_warns_of_an_evaluation_that_will_not_fit() -> None:
    flags: dict[str, Any] = {"eval_batch": 64, "seq_len": 1024}
    found = loadgauge.estimate("gpt2", **flags)
    expected = Expected.of(found)
    ((name, later),) = expected.later.items()
    assert later > expected.memory[0]
    assert warned(later / GIB * 1.3, **flags)[0] == []
    assert warned(later / GIB * 0.7, **flags)[0] == [name.partition(":")[0]]
    # Where training takes more than was predicted, the evaluation will, too.
    assert name.partition(":")[0] in warned(later / GIB * 1.2, factor=1.3, **flags)[0]


def test_the_prediction_is_the_estimates() -> None:
    found = loadgauge.estimate("llama-3.1-8b", gpu="h100", gpus=8, zero=3)
    expected = Expected.of(found)
    assert found.time is not None
    assert expected.step == (found.time.step, found.time.low, found.time.high)
    assert expected.memory[0] == found.memory.allocated
    shown = found.memory.reading("allocated")
    assert expected.memory[1:] == pytest.approx((shown.low, shown.high))
    same = Watch("llama-3.1-8b", gpu="h100", gpus=8, zero=3).expected
    assert same == expected == Watch(found).expected
    with pytest.raises(ConfigError, match="zero: already said by the job"):
        Watch(found, zero=3)
    with pytest.raises(ConfigError, match="zer"):
        Watch("gpt2", zer=3)
