"""The efficiencies: the fit finds back what made the times, and the files say where they come from."""

from __future__ import annotations

import math

import msgspec
import pytest

from accuracy.calibrate import spread, text
from accuracy.fit import CHIPS, FITTED, Sample, chip_of, fit, fit_chip, predictor
from loadgauge import Layout, cluster, gpu, gpu_ids, model, training
from loadgauge.spec.calibration import DEFAULT, rates
from loadgauge.validate.runs import published

H100 = "h100-sxm5-80gb"
TRUE = msgspec.structs.replace(DEFAULT, gpu=H100, matmul=0.62, memory=0.88, contention=0.3, flash2=0.5)


def samples(known: object = TRUE, card: str = H100) -> list[Sample]:
    """Runs of several shapes, with the times that these efficiencies give."""
    made = []
    for name, given in (
        ("llama-3.1-8b", {"dp": 8, "zero": 3, "seq_len": 4096, "global_batch": 16}),
        ("llama-3.1-8b", {"dp": 8, "zero": 3, "seq_len": 65536, "global_batch": 8}),
        ("gpt2-xl", {"dp": 8, "zero": 3, "seq_len": 1024, "global_batch": 256, "micro_batch": 16}),
        ("qwen3-0.6b", {"dp": 8, "zero": 3, "seq_len": 2048, "global_batch": 64, "micro_batch": 4}),
        ("llama-3.1-70b", {"dp": 64, "zero": 3, "seq_len": 8192, "global_batch": 64}),
    ):
        layout = Layout(**given)
        sample = Sample(
            id=name, model=model(name), layout=layout, training=training("torchtitan"),
            cluster=cluster(gpu(card), layout.gpus), seconds=1.0,
        )  # fmt: skip
        made.append(msgspec.structs.replace(sample, seconds=predictor(sample)(known)))
    return made


def test_the_fit_finds_back_the_times():
    given = samples()
    found = fit(given, H100)
    before = [predictor(sample)(DEFAULT) / sample.seconds - 1 for sample in given]
    after = [predictor(sample)(found) / sample.seconds - 1 for sample in given]
    assert max(map(abs, before)) > 0.08
    assert max(map(abs, after)) < 0.02
    assert abs(found.matmul - TRUE.matmul) < 0.5 * abs(DEFAULT.matmul - TRUE.matmul)


def test_one_wild_row_does_not_turn_the_fit():
    given = samples()
    wild = msgspec.structs.replace(given[0], seconds=given[0].seconds * 4)
    found = fit([*given, wild], H100)
    assert max(abs(predictor(sample)(found) / sample.seconds - 1) for sample in given) < 0.06


def test_a_gpu_without_runs_takes_after_its_chip():
    found = fit_chip({H100: samples()}, "hopper")
    assert set(found) == set(CHIPS["hopper"])
    for name in FITTED:
        assert getattr(found["h200-sxm-141gb"], name) == getattr(found["h800-sxm5-80gb"], name)
    assert found["h200-sxm-141gb"].gpu == "h200-sxm-141gb"
    assert fit_chip({}, "hopper") == {}


def test_chips_are_made_of_known_gpus():
    for chip, members in CHIPS.items():
        assert set(members) <= set(gpu_ids())
        assert all(chip_of(member) == chip for member in members)
    assert chip_of("rtx4090") is None


@pytest.mark.parametrize("member", [member for members in CHIPS.values() for member in members])
def test_files_say_where_they_come_from(member: str):
    known = rates(member)
    rows = {run.id: run for run in published().runs}
    assert known.gpu == member
    assert known.basis.startswith("measured")
    assert known.date
    assert known.rows
    assert all(rows[row].quality == "A" for row in known.rows)
    for name, (_, _, low, high) in FITTED.items():
        assert low <= getattr(known, name) <= high * 1.001
    assert known.low < 1 < known.high
    own = {row for row in known.rows if row.startswith("T-")}
    assert own == set(known.rows)


def test_what_no_chip_covers_is_assumed():
    assert rates("rtx4090").basis == "assumed"
    assert rates("rtx4090").high - rates("rtx4090").low > rates(H100).high - rates(H100).low


def test_a_file_reads_back():
    import tomllib

    from loadgauge.spec.calibration import Rates

    known = msgspec.structs.replace(TRUE, rows=("T-X-001",), date="2026-01-01", basis="measured")
    back = msgspec.convert(tomllib.loads(text(known)), Rates)
    for name in FITTED:
        assert getattr(back, name) == pytest.approx(getattr(known, name), rel=6e-3)
    assert back.rows == ("T-X-001",)


def test_the_range_holds_eighty_percent():
    errors = [(math.exp(x / 100), 1.0) for x in range(-50, 51)]
    low, high = spread(errors)
    inside = sum(low <= 1 / ratio <= high for ratio, _ in errors) / len(errors)
    assert 0.75 <= inside <= 0.85
