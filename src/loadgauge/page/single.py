"""One file that opens anywhere: an estimate with its formulas, and a table of its neighbours that sliders read.

It needs no server, and asks nothing of anyone: its scripts, its words and its table are inside it, and its policy (CSP) allows
no request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadgauge._version import __version__
from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.figure import figures
from loadgauge.core.answers.figures.lanes import lanes as lanes_of
from loadgauge.core.answers.figures.treemap import treemap
from loadgauge.core.answers.plan.progress import clear, say
from loadgauge.core.answers.post_training import RunOfTask, answered
from loadgauge.core.base import ConfigError, Error, is_script
from loadgauge.core.definitions.hardware.hardware import Gpu, gpu as gpu_of
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import names_file
from loadgauge.core.plan.advise.advice import advice
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.page.inputs.uploads import plain_name
from loadgauge.page.panels.reasons import reason
from loadgauge.page.server.handlers import told

STATIC = Path(__file__).parent / "static"
STYLES = ("tokens", "frame", "controls", "panels", "charts", "print", "single")
CARDS = (
    "t4", "rtx3090", "rtx4090", "rtx5090", "l40s", "a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb",
    "mi300x",
)  # fmt: skip
"""Kinds of GPU that many have, from small to large: the ones beside the run's own are in the table."""
BESIDE = 4
LEFT_OUT = ("model", "training", "flops", "network", "basis", "assumed", "not_counted", "gpu_hours")
"""Keys that are the same in all cells, or not drawn."""
IMPORT = re.compile(r'^import \{ (.*?) \} from "\./([\w-]+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class) (\w+))", re.MULTILINE)


def page(
    setup: Setup, result: Estimate, job: Job | None = None, read: Callable[[Job], Setup] = resolve_job
) -> tuple[str, int]:
    """Return the file's text, and how many answers it has. job: with the names that a reader knows; read: resolves another"""
    axes, shown = values(setup, result), [each for each in figures() if "single" in each.shown]
    names = [each.name for each in shown]

    def answer(job: Job) -> dict[str, Any]:
        setup = read(job)
        return told(setup, setup.estimate(), names)

    more = {
        "figures": [each.to_dict() for each in shown],
        "explained": dict(explanations(setup, result)),
        "remedy": remedy(setup, result),
    }
    trials = table(setup.job, axes, 2 if result.layout.dp > 1 else 3, {"gpu"})
    return _page(setup.job if job is None else job, axes, told(setup, result, names), trials, answer, more)


def page_of_task(answer: RunOfTask) -> tuple[str, int]:
    """Return the file's text for a run after pre-training, and how many answers it has: those of one or two changes."""
    job, layout = answer.job, answer.run.trained.layout
    sizes = {"micro_batch": layout.micro_batch}
    if answer.run.engine is None:
        sizes["seq_len"] = layout.seq_len
    else:
        sizes |= {"prompts": answer.run.sequences.prompts, "samples": answer.run.sequences.samples}
    axes: dict[str, tuple[Any, ...]] = {name: _doubled(own, 3) for name, own in sizes.items()}
    if layout.dp > 1:
        axes["zero"] = tuple(dict.fromkeys((layout.zero, 0, 1, 2, 3)))
    axes["recompute"] = tuple(dict.fromkeys((str(layout.recompute), "none", "full")))
    if answer.run.gpu is not None and job.memory is None:
        axes["gpu"] = cards(answer.run.gpu, BESIDE)

    more = {"figures": [], "explained": {}, "remedy": ""}
    trials = table(job, axes, 2, set(axes))
    own = {"estimate": answer.to_dict() | {"layout": {"gpus": answer.run.placement.gpus}}}
    return _page(job, axes, own, trials, lambda trial: {"estimate": answered(trial).plain()}, more)


class Served(msgspec.Struct, frozen=True):
    """A pass without training, as a command line has it: a job and the fields of `Inference`, the task among them."""

    job: Job
    request: dict[str, Any]

    @property
    def model(self) -> str:
        """Return the model's name."""
        return self.job.model

    def replace(self, **changed: Any) -> Served:
        """Return it with other values."""
        own = {name: value for name, value in changed.items() if name in self.request}
        rest = {name: value for name, value in changed.items() if name not in own}
        return Served(self.job.replace(**rest), self.request | own)

    def command(self) -> str:
        """Return the command line that estimates it."""
        words = [f"--{_flag(name)} {value}" for name, value in self.request.items()]
        return " ".join([self.job.command(), *words])


def page_of_server(answer: Answer, job: Job, request: dict[str, Any]) -> tuple[str, int]:
    """Return the file's text for a pass without training, and how many answers it has: those of one or two changes.

    answer: of inference; request: fields of `Inference` that are said, the task among them
    """
    from loadgauge.core.resolve.inference import resolve_inference

    gpu, asked = answer.shown.gpu, answer.shown.asked
    sizes = {"batch": asked.batch, "context": asked.context}
    here = Served(job, sizes | {"weight_format": asked.weight_format} | request)
    axes: dict[str, tuple[Any, ...]] = {name: _doubled(own, 5) for name, own in sizes.items()}
    axes["weight_format"] = tuple(dict.fromkeys((asked.weight_format, "bf16", "fp8", "awq")))
    within = asked.pp * max(1, asked.ep // asked.tp)
    axes["tp"] = tuple(
        dict.fromkeys((asked.tp, *(size for size in (1, 2, 4, 8) if not (job.gpus or 8 * within) % (size * within))))
    )
    if gpu is not None and job.memory is None:
        axes["gpu"] = cards(gpu, BESIDE)

    def ask(trial: Served) -> dict[str, Any]:
        other = {name: value for name, value in trial.request.items() if name != "task"}
        return {"estimate": resolve_inference(trial.job, asked.task, other)[0].to_dict()}

    own = {"estimate": answer.to_dict()}
    return _page(here, axes, own, table(here, axes, 2, set(axes)), ask, {"figures": [], "explained": {}, "remedy": ""})


def _page(
    job: Any,
    axes: dict[str, tuple[Any, ...]],
    own: dict[str, Any],
    trials: Iterator[tuple[str, Any]],
    answer: Callable[[Any], dict[str, Any]],
    more: dict[str, Any],
) -> tuple[str, int]:
    cells = {key: cell(trial, answer) for key, trial in trials}
    clear()
    if names_file(job.model) and not is_script(job.model):
        job = job.replace(model=plain_name(job.model))  # not where it lies on this machine
    named = msgspec.to_builtins(job, enc_hook=str)
    named = named.get("job", named) | named.get("request", {})
    words = {_flag(name): value for name, value in named.items() if value is not None}
    run = {
        "flags": {name: value if isinstance(value, str) else str(value).lower() for name, value in words.items()},
        "command": job.command(),
        "axes": {_flag(name): [str(option) for option in sorted(value, key=_order)] for name, value in axes.items()},
        "here": {_flag(name): str(value[0]) for name, value in axes.items()},
        "own": own,
        "cells": cells,
        "count": len(cells) + 1,
        "messages": {
            name: msgspec.json.decode((STATIC / f"messages/{name}.json").read_bytes())
            for name in ("en", "zh", "errors.zh")
        },
        "version": __version__,
        **more,
    }
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(run), mtime=0)).decode()
    return framed(packed), len(cells) + 1


def remedy(setup: Setup, result: Estimate) -> str:
    """Return the flags of the mildest change that makes a run fit; none where it fits, or where nothing does."""
    return (
        next((trial.flags for trial in advice(setup) if trial.result.memory.fits), "")
        if result.memory.fits is False
        else ""
    )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _order(value: Any) -> Any:
    """Numbers by size; cards by memory; ways of recomputation from none to all."""
    if isinstance(value, int):
        return value
    order = (*CARDS, "none", "selective", "full")
    return order.index(value) if value in order else len(order)


def values(setup: Setup, result: Estimate) -> dict[str, tuple[Any, ...]]:
    """The values of each flag that a slider moves, the run's own first: fewer where a pipeline makes an answer dear."""
    layout, dear = result.layout, result.layout.pp > 1
    own = str(layout.recompute)
    axes: dict[str, tuple[Any, ...]] = {
        "micro_batch": _doubled(layout.micro_batch, 3 if dear else 5),
    }
    if result.model.own.has_length:
        axes["seq_len"] = _doubled(layout.seq_len, 2 if dear else 4)
    if layout.dp > 1:
        axes["zero"] = tuple(dict.fromkeys((layout.zero, 1) if dear else (layout.zero, 0, 1, 2, 3)))
    if result.model.own.has_length:  # a module's own checkpoints are in its code
        axes["recompute"] = tuple(dict.fromkeys((own, "none", "selective", "full")))
    if setup.gpu is not None and setup.job.memory is None:
        axes["gpu"] = cards(setup.gpu, BESIDE // 2 if dear else BESIDE)
    return axes


def cards(own: Gpu, count: int) -> tuple[str, ...]:
    """A card and so many kinds that many have, next to it in memory.

    >>> cards(gpu_of("rtx4090"), 2)
    ('rtx4090', 'rtx3090', 'rtx5090')
    """
    others = [name for name in CARDS if name != own.id]
    at = sum(gpu_of(name).capacity < own.capacity for name in others)
    first = max(0, min(at - count // 2, len(others) - count))
    return (own.id, *others[first : first + count])


def _doubled(own: int, count: int) -> tuple[int, ...]:
    """So many values, each twice the one before, with the run's own first.

    >>> _doubled(4096, 4), _doubled(3, 3), _doubled(8, 2)
    ((4096, 2048, 8192, 16384), (3, 6, 12), (8, 16))
    """
    down = [own >> n for n in range(1, (count + 1) // 2) if own % (1 << n) == 0]
    return (own, *down, *(own << n for n in range(1, count - len(down))))


def table(job: Any, axes: dict[str, tuple[Any, ...]], most: int, dear: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the job of each spot but the run's own, by the values of its flags; where a dear flag differs, of few changes.

    >>> dict(table(Job("gpt2"), {"micro_batch": (1, 2), "gpu": ("t4",)}, 2, {"gpu"}))
    {'2 t4': Job(model='gpt2', micro_batch=2)}
    """
    here = {name: value[0] for name, value in axes.items()}
    spots = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    kept = [(spot, {name: value for name, value in spot.items() if value != here[name]}) for spot in spots]
    kept = [(spot, changed) for spot, changed in kept if changed and (len(changed) <= most or dear.isdisjoint(changed))]
    for number, (spot, changed) in enumerate(kept):
        if number % 16 == 0:
            say(f"{number:,} of {len(kept):,} answers of the file's table")
        yield " ".join(map(str, spot.values())), job.replace(**changed)


def cell(job: Any, read: Callable[[Any], dict[str, Any]]) -> Any:
    """Return what differs from the run's own answer at another spot of the table: rounded figures, or why there is none."""
    try:
        answer = read(job)
    except Error as error:
        return {"error": " ".join(str(error).split())}
    figures = {name: value for name, value in answer["estimate"].items() if name not in LEFT_OUT}
    return rounded({**answer, "estimate": figures})


def rounded(value: Any) -> Any:
    """Plain values with numbers to six digits.

    >>> rounded({"total": [1234567890, 0.123456789]})
    {'total': [1234570000.0, 0.123457]}
    """
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    large = isinstance(value, float) or (isinstance(value, int) and abs(value) >= 1e6)
    return float(f"{value:.6g}") if large else value


def explanations(setup: Setup, result: Estimate) -> Iterator[tuple[str, Any]]:
    """Yield what a block of the treemap or a figure consists of, by its id: what the page's drawer shows."""

    def blocks(nodes: list[Any]) -> Iterator[str]:
        for node in nodes:
            if node["bytes"] >= result.memory.total / 200:
                yield node["id"]
                yield from blocks(node["children"])

    tree = treemap(result)
    for id in blocks(tree):
        yield id, reason(setup, result, id, tree)
    lanes = [f"lane/{lane['lane']}" for lane in lanes_of(result) or ()]
    for id in ("fit", "step", "rate", "mfu", "days", "cost", *lanes):
        try:
            yield id, reason(setup, result, id)
        except ConfigError:
            continue


def framed(packed: str) -> str:
    """Return the page with its styles, its scripts and what it carries inside; the policy names them by their digests."""
    font = base64.b64encode((STATIC / "vendor/inter/inter-latin-wght-normal.woff2").read_bytes()).decode()
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    style = "".join((STATIC / f"css/{name}.css").read_text(encoding="utf-8") for name in STYLES)
    style = re.sub(r'url\("/static/[^"]+"\)', f'url("data:font/woff2;base64,{font}")', style)
    script = f'"use strict";\nconst modules = {{}};\n{"".join(bundle("single"))}'
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; font-src data:;"
        f" style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<(?:link|script|meta name=\"loadgauge-token\").*\n", "", text)
    text = text.replace("/static/icon.svg", f"data:image/svg+xml;base64,{icon}")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    body = f'<script type="text/plain" id="run">{packed}</script>\n<script>{script}</script>\n</body>'
    return text.replace("</head>", head).replace("<body>", '<body class="single">').replace("</body>", body)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def bundle(entry: str) -> list[str]:
    """Return the scripts that one needs, and itself last, each as a function that returns what it exports.

    What the page asks its server is read in the file's table.
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = (STATIC / f"js/{'table' if name == 'api' else name}.js").read_text(encoding="utf-8")
        for _, other in IMPORT.findall(text):
            add(other)
        names = EXPORT.findall(text)
        inner = EXPORT.sub(
            "", IMPORT.sub(lambda match: f"const {{ {match[1].replace(' as ', ': ')} }} = modules.{match[2]};\n", text)
        )
        gets = ", ".join(f"get {each}() {{ return {each}; }}" for each in names)
        done[name] = f"modules.{name} = (() => {{\n{inner}return {{ {gets} }};\n}})();\n"

    add(entry)
    return list(done.values())
