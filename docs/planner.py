"""Refreshes `planner.md`: what each command in it prints, and with `--published` the table of published layouts (half an
hour). The text between is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accuracy.choices import Choice
    from loadgauge.core.definitions.layout.layout import Layout
    from loadgauge.core.estimate.result import Estimate

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
PAGE = Path(__file__).with_name("planner.md")
FILES = Path(__file__).with_name("examples")
COMMAND = re.compile(r"```console\n\$ (loadgauge [^\n]*)\n.*?```", re.DOTALL)
DIALECTS = re.compile(r"(<!-- dialects -->\n).*?(<!-- end dialects -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- published -->\n).*?(<!-- end -->)", re.DOTALL)
MEANS = {"zero": "ZeRO", "sequence_parallel": "sequence parallelism", "recompute": "recompute"}


def printed(line: str) -> str:
    """What a command prints, in 110 columns, without how long it took."""
    from loadgauge.core.command_line.main import run

    os.environ["COLUMNS"] = "110"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(FILES):
        run(shlex.split(line)[1:])
    text = re.sub(r"; [\d.,]+ s\.", ".", out.getvalue() + err.getvalue())
    return f"```console\n$ {line}\n{text.rstrip()}\n```"


def dialects() -> str:
    """The table of dialects."""
    from loadgauge.job_files.dialects import FILES as NAMES, dialect

    known = [dialect(name) for name in NAMES]
    words = {"argv": "command line", "python": "script, notebook", "yaml": "YAML", "json": "JSON", "toml": "TOML"}
    lines = [
        f"| `{one.name}` | {one.title}: {', '.join(words[syntax] for syntax in one.syntaxes)} | {one.versions} |"
        f" {len(one.known)} | {len(one.coverage.harmless)} | {len(one.coverage.bounded)} | {len(one.coverage.stops)} |"
        for one in known
    ]
    return "".join(f"{line}\n" for line in lines)


def published() -> str:
    """Published layouts beside the planner's best, by our own model."""
    from accuracy.choices import choose, configurations
    from loadgauge.core.base.errors import Error
    from loadgauge.evidence.validate.runs import published as rows

    choices: list[Choice] = []
    left: list[str] = []
    # Of Megatron-Bridge's some ninety, the first of each model, kind of GPU and number of them.
    listed = configurations(rows().runs, ["KOR", "SC21"])
    seen: set[object] = set()
    for names, setup in configurations(rows().runs, ["MB"]):
        key = setup.model.name.partition(" ")[0], setup.gpu.id if setup.gpu else "", setup.layout.gpus
        if key not in seen:
            seen.add(key)
            listed.append((names, setup))
    for number, (names, setup) in enumerate(listed, 1):
        print(f"{number} of {len(listed)}: {names[0]} {setup.model.name}", file=sys.stderr, flush=True)
        try:
            choices.append(choose(names, setup))
            print(row(choices[-1]), file=sys.stderr, flush=True)
        except Error as error:
            left.append(f"{names[0]}: {error}")
    assert choices
    found = sum(choice.found for choice in choices)
    fits = [choice for choice in choices if choice.published.memory.fits]
    slower = [choice for choice in fits if (choice.gain(choice.best) or 1) < 1 - 1e-9]
    alike = [choice.gain(choice.alike) or 1.0 for choice in fits]
    lines = [
        f"{len(choices)} published configurations; {found} of their layouts are in the planner's space; {len(fits)} fit by our"
        f" memory model; the best is slower than the published one in {len(slower)}. With the published layout's own ZeRO"
        f" stage, sequence parallelism and recomputation the best is {statistics.median(alike):.2f} times as fast at the"
        f" median. {len(left)} more cannot be timed: no trusted source states their network.",
        "",
        "| first row | model | GPUs | published | step | best of all | times as fast | with its own means | why more than 10 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(choice) for choice in choices]
    return "\n".join(lines) + "\n"


def row(choice: Choice) -> str:
    """One configuration as a row of the table."""
    best, alike, own = choice.best, choice.alike, choice.published
    gain, with_means = choice.gain(best), choice.gain(alike)
    setup = choice.setup
    verdict = "" if own.memory.fits else " (does not fit by our model)"
    cells = [
        choice.rows[0], setup.model.name, f"{setup.layout.gpus:,} x {setup.gpu.id}, {setup.training.precision.name}",
        f"{short(own.layout)}{verdict}", f"{own.time.step:.3g} s", "" if best is None else short(best.layout),
        "" if gain is None else f"{gain:.2f}", "" if with_means is None else f"{with_means:.2f}",
        "" if gain is None or gain <= 1.1 else because(own, best),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def short(layout: Layout) -> str:
    """A layout in few words."""
    names = {"tp": "tp", "pp": "pp", "vpp": "vpp", "cp": "cp", "ep": "ep", "etp": "etp"}
    words = [f"{word} {value}" for name, word in names.items() if (value := getattr(layout, name)) > 1]
    words += [f"zero {layout.zero}", f"micro {layout.micro_batch}"]
    mode = layout.recompute.mode
    return ", ".join(
        [*words, *([] if mode == "none" else ["some operations again" if mode == "ops" else f"{mode} recompute"])]
    )


def because(own: Estimate, best: Estimate) -> str:
    """Which of its means the best changes, and where most of the time goes that it saves."""
    from loadgauge.core.text.estimate.step_time import LANES

    before, after = own.layout, best.layout
    changed = [
        f"{word} {getattr(before, name)} -> {getattr(after, name)}".replace("False", "no").replace("True", "yes")
        for name, word in MEANS.items()
        if getattr(before, name) != getattr(after, name) and not (name == "sequence_parallel" and after.tp == 1)
    ]
    changed = [re.sub(r"recompute [a-z_.,]{40,}", "recompute of some operations", text) for text in changed]
    saved = {lane: own.time.parts[lane] - best.time.parts[lane] for lane in own.time.parts}
    lane = max(saved, key=lambda name: saved[name])
    share = saved[lane] / own.time.step
    return "; ".join([*changed, f"saves {share:.0%} of the step in {LANES[lane]}"])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    if "--published" in sys.argv:
        table = published()
        text = TABLE.sub(lambda found: f"{found[1]}{table}{found[2]}", text)
    else:
        text = COMMAND.sub(lambda found: printed(found[1]), text)
        text = DIALECTS.sub(lambda found: f"{found[1]}{dialects()}{found[2]}", text)
    PAGE.write_text(text, encoding="utf-8")
