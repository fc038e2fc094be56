"""The plain text of a step's time: where the seconds go, and what the whole run takes."""

from loadgauge.core.answers.figures.lanes import MEANING
from loadgauge.core.base.units import count, days_words, seconds
from loadgauge.core.definitions.hardware.calibration import efficiencies, of_cluster
from loadgauge.core.definitions.hardware.prices import listed
from loadgauge.core.definitions.training.software import TUNINGS, USUAL, kind_of
from loadgauge.core.estimate.result import Estimate, Time
from loadgauge.core.estimate.time.cost import Budget
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import rate
from loadgauge.core.text.table import Column, Paper, bar, draw, points, section


def headline(time: Time, counted: str = "tokens") -> str:
    """Return step time, throughput and MFU in one line. counted: what a step has (`setup.unit`)"""
    return (
        f"A step takes {seconds(time.step)} (range {seconds(time.low)} to {seconds(time.high)}):"
        f" {rate(time.tokens_per_second_per_gpu)} {counted}/s/GPU, {time.model_flops_per_gpu / 1e12:,.0f} model"
        f" TFLOP/s/GPU, MFU {time.mfu:.1%}, HFU {time.hfu:.1%}."
    )


def timing(target: Paper, setup: Setup, result: Estimate) -> None:
    """Print the components of step time, and the whole run where its number of tokens is given."""
    time = result.time
    if time is None:
        return
    columns = [
        Column("component"),
        Column("seconds", "right"),
        Column("share", "right", rank=2),
        Column("", style="cyan", wide=True),
        Column("what", wrap=True, rank=1),
    ]
    rows = [
        [lane, f"{value:,.4g}", f"{value / time.step:.1%}", bar(target, value / time.step), MEANING[lane]]
        for lane, value in time.parts.items()
        if value > 0
    ]
    rows.append(["step", f"{time.step:,.4g}", "100.0%", "", f"on the slowest pipeline stage ({time.stage})"])
    draw(target, columns, rows, "Where the time of a step goes", [len(rows) - 1])
    points(target, [basis(result)], "", style="dim")
    points(target, list(filter(None, [moved(setup, result)])), "")
    budget = setup.budget(result)
    if budget is not None:
        whole_run(target, budget, result.gpu or "")


def moved(setup: Setup, result: Estimate) -> str:
    """Return by how much what was measured moves the time of a step, whole and part by part; empty where nothing was measured."""
    after = result.time
    if setup.job.measured is None or after is None:
        return ""
    before = resolve_job(setup.job.replace(measured=None), setup.model).estimate().timing
    large = {name: value for name, value in after.parts.items() if value > after.step / 100 and before.parts.get(name)}
    parts = ", ".join(f"{name} {value / before.parts[name]:.3g}x" for name, value in large.items())
    now, was = (f"{seconds(time.step)} ({seconds(time.low)} to {seconds(time.high)})" for time in (after, before))
    far = (
        ""
        if before.low / before.step <= after.scale <= before.high / before.step
        else ". That is farther off than usual runs are: are the flags those of the run, and its step one of the whole batch?"
    )
    return f"By what you measured: {now} instead of {was}: {parts}{far}"


def basis(result: Estimate) -> str:
    """Return where the efficiencies behind the times come from."""
    assert result.gpu is not None
    if result.timing.scale != 1.0 and result.cluster is not None:
        moved_by = zip(
            ("kernels and hosts", "links inside a node", "links between nodes"),
            of_cluster(result.cluster).slower,
            strict=True,
        )
        words = (
            f"{name} take {'' if slower == 1 else f'{slower:.3f} x '}what is predicted" for name, slower in moved_by
        )
        return f"Rescaled to what you measured or assume: {'; '.join(words)}."
    calibration = efficiencies(result.gpu) if result.cluster is None else of_cluster(result.cluster)
    own = result.cluster.sustained if result.cluster is not None else None
    others = (f"x {kind_of(tuning=name).factor:.2f} under --tuning {name}" for name in TUNINGS if name != USUAL)
    at = f" Tuning taken: {result.training.tuning}; compute of the usual takes {' and '.join(others)}."
    at += "" if own is None else f" A long product runs at {own / 1e12:.4g} TFLOP/s, as you measured."
    if calibration.basis == "assumed":
        return f"Kernels are assumed ({calibration.how}), so the range is wide.{at}"
    rows = sum(figure.rows for figure in calibration.figures.values())
    sources = ", ".join(sorted({source for figure in calibration.figures.values() for source in figure.sources}))
    return f"Kernels: {rows:,} measured operations on {result.gpu} ({sources}), {calibration.date}; none is a training run.{at}"


SHOWN_OFFERS = 4
"""Of the list prices, how many are shown: the lowest, and the highest."""


def money_lines(budget: Budget, gpu: str) -> list[str]:
    """Return what a run costs: at the job's price, at that of each provider, or at list prices of a GPU."""
    if len(budget.offers) > 1:
        each = [
            f"{name} {days * 24 * budget.gpus * (price or 0):,.0f} at {price:g}"
            + (f" (in {days_words(days)})" if days != budget.offers[0][2] else "")
            for name, price, days in budget.offers
        ]
        return [f"cost: {', '.join(each)} per GPU-hour (in your currency)"]
    if budget.cost is not None:
        return [f"cost: {budget.cost:,.0f} at {budget.price:g} per GPU-hour (in your currency)"]
    offers = listed().get(gpu, ())
    between = len(offers) - SHOWN_OFFERS
    words = [
        f"{cloud} {kind} {budget.gpu_hours * each:,.0f} at {each:g} ({day})" for cloud, kind, each, day, _ in offers
    ]
    if between > 0:
        words[SHOWN_OFFERS - 1 : -1] = [f"{between} between"]
    return [f"cost at list prices, US dollars: {', '.join(words)}; --price takes yours"] if words else []


def whole_run(target: Paper, budget: Budget, gpu: str) -> None:
    """Print days, GPU-hours, cost and energy of the whole run. gpu: id of its kind"""
    lines = [f"{days_words(budget.days)}: {budget.steps:,.0f} steps, {budget.gpu_hours:,.0f} GPU-hours"]
    lines += money_lines(budget, gpu)
    if budget.kilowatt_hours is not None:
        lines.append(f"energy: at most {budget.kilowatt_hours:,.0f} kWh (every GPU at its thermal design power)")
    if budget.co2 is not None and budget.grid is not None:
        mass = f"{budget.co2 / 1000:,.3g} t" if budget.co2 >= 1000 else f"{budget.co2:,.3g} kg"
        lines.append(f"CO2: at most {mass}, at {budget.grid[0]:g} g a kWh ({budget.grid[1]})")
    if budget.checkpoint_every is not None:
        lines.append(
            f"goodput {budget.goodput:.1%} with what fails or is taken away (included in the days above), one checkpoint every"
            f" {budget.checkpoint_every / 60:,.0f} minutes"
        )
    if budget.gpus_needed is not None:
        lines.append(
            f"for {budget.wanted_days:g} days: {budget.gpus_needed:,} GPUs, if each stays as fast as with these"
            f" {budget.gpus:,}"
        )
    section(target, f"The whole run, {count(budget.tokens)} tokens", lines)
