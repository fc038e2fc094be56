"""What the site is made of besides its pages: outputs of commands, equations as MathML, figures, the reference.

mkdocs calls these functions (`hooks` in mkdocs.yml). A block ```console that begins with `$ loadgauge` is given what the
command prints; the pages hold the command alone, so no printed number can be out of date. LOADGAUGE_SITE_OUTPUT=0 leaves
outputs and figures out, for a quick build.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^```console\n\$ (loadgauge [^\n]*(?:\\\n[^\n]*)*)\n```$", re.MULTILINE)
FIGURE = re.compile(r"^<!-- figure ([\w-]+\.svg|[\w-]+\.html): (loadgauge [^\n]*) -->$", re.MULTILINE)
TERM = re.compile(r"^\| (`[^`|]+`|[^|]+?) \| (.+) \|$", re.MULTILINE)
FOUND = {"questions": 4, "tutorials": 4, "zh": 0.01, "decisions": 0.0001, "design": 0.001}
"""How much a folder's pages count in the search; others 1. A word of a title counts a thousand times one of the text."""
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
OUTSIDE_HERE, OUTSIDE = (re.compile(rf"\[([^\]\n]*)\]\({up}[^)\n]*\)") for up in (r"\.\./", r"\.\./\.\./"))
HAN = re.compile(r"(?<=\\u[4-9][0-9a-f]{3})(?=\\u[4-9])")
API = {
    "loadgauge": "The facade. Each function and type is imported when it is first used.",
    "loadgauge.train": "Padding-free training (needs the extra `torch`): see [the guide](padding-free.md).",
    "loadgauge.pytorch.measure.watch": "In a training loop (needs the extra `torch`): see [the guide](callbacks.md).",
    "loadgauge.pytorch.measure.trainer_watch": "The same as a callback of transformers.",
    "loadgauge.pytorch.measure.lightning_watch": "The same as a callback of Lightning.",
    "loadgauge.sheets.notebook": "A view with sliders in a notebook (needs the extra `notebook`).",
}
"""Modules of the reference: their public names, with what is said before them."""
LONGEST = 45
"""Lines of an output that are shown."""


def outputs() -> bool:
    """Whether outputs and figures are made."""
    return os.environ.get("LOADGAUGE_SITE_OUTPUT", "1") != "0"


@cache
def printed(line: str, longest: int | None = LONGEST) -> str:
    """What a command prints in 90 columns, in a folder with the files of `examples/`; its first `longest` lines."""
    from loadgauge.core.command_line.main import run

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="90"), contextlib.chdir(ROOT / "examples"),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        run(shlex.split(line)[1:])
    text = re.sub(r"; [\d.,]+ s\.", ".", (out.getvalue() + err.getvalue()).rstrip())
    lines = text.splitlines()
    return "\n".join([*lines[:longest], "..."] if longest is not None and len(lines) > longest else lines)


def _with_output(match: re.Match[str]) -> str:
    command = match[1]
    text = printed(re.sub(r"\s*\\\n\s*", " ", command)) if outputs() else ""
    return f"```console\n$ {command}\n```\n" + (f"\n```text\n{text}\n```" if text else "")


def on_config(config: Any) -> Any:
    """Put the articles into the navigation where their page exists."""
    if (ROOT / "docs" / "articles.md").exists():
        theory = next(entry["Theory"] for entry in config.nav if isinstance(entry, dict) and "Theory" in entry)
        if {"The articles": "articles.md"} not in theory:
            theory.append({"The articles": "articles.md"})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the package, and the figures that pages ask for."""
    from mkdocs.structure.files import File

    tutorial = ROOT / "docs" / "tutorials" / "notebook.ipynb"
    made = {"api.md": api, "commands.md": commands, "tutorials/notebook.md": lambda: notebook(tutorial)}
    for name, page in made.items():
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=page()))
    if outputs():
        for place in sorted((ROOT / "docs").rglob("*.md")):
            for name, line in FIGURE.findall(place.read_text(encoding="utf-8")):
                if files.get_file_from_path(f"figures/{name}") is None:
                    files.append(File.generated(config, f"figures/{name}", content=figure(line)))
    return files


def scatter(line: str) -> bytes:
    """Every published run that a `validate` command predicts: predicted over measured, with the stated range."""
    from matplotlib.figure import Figure

    rows = [row for row in json.loads(printed(f"{line} --json", None))["rows"] if row["predicted"]]
    sheet = Figure(figsize=(7, 6), layout="constrained")
    plot = sheet.subplots()
    for quality, colour in (("A", "#2b5788"), ("B", "#b05a24")):
        own = [row for row in rows if row["quality"] == quality]
        x, y = [row["measured"] for row in own], [row["predicted"] for row in own]
        ranges = [
            [max(0, row["predicted"] - row["low"]) for row in own],
            [max(0, row["high"] - row["predicted"]) for row in own],
        ]
        plot.errorbar(
            x, y, ranges, fmt=".", color=colour, elinewidth=0.4, markersize=4, alpha=0.6, label=f"quality {quality}"
        )
    ends = [min(row["measured"] for row in rows), max(row["measured"] for row in rows)]
    plot.plot(ends, ends, color="#5f6670", linewidth=0.8, label="predicted = measured")
    unit = "s" if "time" in line else "bytes"
    plot.set(xscale="log", yscale="log", xlabel=f"measured [{unit}]", ylabel=f"predicted [{unit}]")
    plot.legend(frameon=False)
    out = io.BytesIO()
    sheet.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def figure(line: str) -> bytes:
    """The file that a command with `--plot FILE` or `--html FILE` writes, or what is drawn of what `validate` says."""
    if line.startswith("loadgauge validate"):
        return scatter(line)
    with tempfile.TemporaryDirectory() as folder:
        words = shlex.split(line)
        at = words.index("--plot" if "--plot" in words else "--html") + 1
        place = Path(folder) / words[at]
        words[at] = str(place)
        printed(shlex.join(words))
        return place.read_bytes()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Run the commands of a page, say how much it counts in the search, and what its terms mean."""
    folder = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {"boost": FOUND.get(folder, 1)})
    if not page.file.src_uri.startswith(("zh/", "vocabulary")):
        markdown += glossary()
    up = "../" * page.file.src_uri.count("/")

    def shown(match: re.Match[str]) -> str:
        name, line = match.groups()
        if name.endswith(".html"):
            link = f"[Open it, with sliders and formulas]({up}figures/{name}){{ .md-button }}" if outputs() else ""
            return f"```sh\n{line}\n```\n\n{link}\n"
        image = f"![{name.removesuffix('.svg')}]({up}figures/{name})" if outputs() else ""
        return f"```sh\n{line}\n```\n\n{image}\n"

    # What lies beside the pages in the source is not part of the site: its name stays, without the link.
    outside = OUTSIDE if up else OUTSIDE_HERE
    return FIGURE.sub(shown, COMMAND.sub(_with_output, outside.sub(r"\1", markdown)))


@cache
def glossary() -> str:
    """The terms of the vocabulary, as abbreviations with their meaning."""
    rows = TERM.findall((ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8"))
    plain = {name.strip("`"): re.sub(r"[`*]", "", meaning) for name, meaning in rows if "," not in name}
    return "\n\n" + "\n".join(f"*[{name}]: {meaning}" for name, meaning in plain.items() if name not in ("term", "---"))


def on_post_build(config: Any) -> None:
    """Part the Chinese of the search index into characters; write it as a script, too, for a site in a folder (search.js)."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.write_text(HAN.sub(r"\\u200b", index.read_text(encoding="utf-8")), encoding="utf-8")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")


def notebook(place: Path) -> str:
    """A notebook as a page: its text, its code, and what it printed."""
    lines = []
    for cell in json.loads(place.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        lines += [text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```", ""]
        for output in cell.get("outputs", ()):
            said = output.get("text") or output.get("data", {}).get("text/plain", "")
            lines += [f"```text\n{''.join(said).rstrip()}\n```", ""]
    return "\n".join([*lines, f"The [notebook itself]({place.name}) is `docs/tutorials/{place.name}` of the source."])


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Write the equations as MathML, which browsers draw without a script; the first of each term leads to the vocabulary."""
    up, seen = "../" * page.file.src_uri.count("/"), set()

    def linked(match: re.Match[str]) -> str:
        if match[3] in seen:
            return match[0]
        seen.add(match[3])
        return f'{match[1]}<a href="{up}vocabulary.html" class="term">{match[2]}</a>'

    # Not within a link or a heading, which is one.
    parts = re.split(r"(<a .*?</a>|<h\d.*?</h\d>)", content, flags=re.DOTALL)
    parts[::2] = [re.sub(r"()(<abbr [^>]*>(.*?)</abbr>)", linked, part) for part in parts[::2]]
    return MATH.sub(lambda match: mathml(html.unescape(match[2]).strip(), match[1] == "div"), "".join(parts))


@cache
def mathml(tex: str, block: bool) -> str:
    """An equation in LaTeX as MathML."""
    from latex2mathml.converter import convert

    return str(convert(tex, display="block" if block else "inline"))


def api() -> str:
    """The reference of the Python interface, from signatures and docstrings."""
    lines = ["# Python", ""]
    for name, said in API.items():
        if importlib.util.find_spec(name) is None or (name != "loadgauge" and not outputs()):
            continue
        lines += [f"## {name}", "", said, ""]
        try:
            module = importlib.import_module(name)
        except ImportError as missing:
            lines += [f"Not described here: {missing}.", ""]
            continue
        for public in sorted(module.__all__, key=str.lower):
            lines += entry(public, getattr(module, public))
    return "\n".join(lines)


def entry(name: str, found: Any) -> list[str]:
    """The name, signature and docstring of a function or a class, and the public members of a class."""
    function = found._function() if inspect.ismodule(found) else found
    try:
        signature = str(inspect.signature(function)) if not _is_error(function) else ""
    except (TypeError, ValueError):
        signature = ""
    if len(signature) > 600:  # The flags of a job, which the command line describes.
        signature = re.sub(r"\*, .*(?=\) ->)", "**flags", signature, flags=re.DOTALL)
    lines = [f"### {name}", "", "```python", spread(f"{name}{signature}"), "```", ""]
    lines += [docstring(inspect.getdoc(function) or ""), ""]
    if inspect.isclass(function) and not _is_error(function):
        for member, value in vars(function).items():
            target = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if member.startswith("_") or not inspect.isfunction(target) or not target.__doc__:
                continue
            shape = "" if isinstance(value, property) else str(inspect.signature(target))
            lines += [f"#### {name}.{member}", "", "```python", spread(f"{member}{shape}"), "```", ""]
            lines += [docstring(inspect.getdoc(target) or ""), ""]
    return lines


def spread(signature: str) -> str:
    """A signature without the quotes of its types, and with a parameter a line where it is long.

    >>> print(spread("f(gpu: 'Gpu', gpus: 'int | None' = None) -> 'Cluster'"))
    f(gpu: Gpu, gpus: int | None = None) -> Cluster
    """
    signature = re.sub(r"((?::|->) )'([^']*)'", r"\1\2", signature).replace(" -> None", "")
    if len(signature) <= 88:
        return signature
    # Commas within brackets belong to a type or a default.
    head, body, tail = (
        *signature.partition("(")[:1],
        signature.partition("(")[2].rpartition(")")[0],
        signature.rpartition(")")[2],
    )
    parts, depth = [""], 0
    for letter in body:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    inside = "".join(f"    {part.strip()},\n" for part in parts)
    return f"{head}(\n{inside}){tail}"


def _is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, BaseException)


def docstring(text: str) -> str:
    """A docstring as Markdown: its examples as code.

    >>> docstring("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    parts = []
    for part in re.split(r"\n\s*\n", text):
        code = re.search(r"^\s*>>> ", part, re.MULTILINE)
        if code is None:
            # A line of its own for each argument, as it stands in the source.
            parts.append(re.sub(r"\n(?=[\w, ]+: )", "  \n", re.sub(r"(?<!`)<(?=\w)", "&lt;", part)))
            continue
        before, example = part[: code.start()].strip(), part[code.start() :]
        parts += [*([before] if before else []), f"```pycon\n{inspect.cleandoc(example)}\n```"]
    return "\n\n".join(parts)


def commands() -> str:
    """The reference of the command line, from the commands themselves."""
    import click

    from loadgauge.core.command_line.main import COMMANDS, commands as group
    from loadgauge.core.definitions.job.job import fields

    lines = ["# Command line", "", "`man loadgauge` has the same. Exit codes: 0 yes, 1 no, 2 cannot tell.", ""]
    context = click.Context(group, info_name="loadgauge")
    for name, what in COMMANDS.items():
        command = group.get_command(context, name)
        assert command is not None
        usage = " ".join(command.collect_usage_pieces(click.Context(command)))
        lines += [f"## {name}", "", f"{what[:1].upper()}{what[1:]}.", "", "```", f"loadgauge {name} {usage}", "```", ""]
        own = [each for each in command.params if isinstance(each, click.Option)]
        of_job = [each for each in own if each.name in fields()]
        if len(of_job) > 20:
            own = [each for each in own if each not in of_job]
            lines += ["Takes [the options of a job](#options-of-a-job).", ""]
        lines += [*options(own), ""]
    estimate = group.get_command(context, "estimate")
    assert estimate is not None
    every = [each for each in estimate.params if isinstance(each, click.Option) and each.name in fields()]
    return "\n".join([*lines, "## Options of a job", "", *options(every), ""])


def options(own: list[Any]) -> list[str]:
    """A table of options."""
    rows = [
        f"| `{', '.join([*each.opts, *each.secondary_opts])}` | {(each.help or '').replace('|', '&#124;').replace('<', '&lt;')} |"
        for each in own
    ]
    return ["| option | |", "|---|---|", *rows] if rows else []
