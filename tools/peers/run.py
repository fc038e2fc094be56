"""Asks other tools the question of `docs/peers.md`, each in an environment of its own, and writes their answers there.

    make peers                 # all of them
    python tools/peers/run.py vramcalc

A tool is one file here, `NAME.toml`: what `install` (and `before` it) brings it, the `command` (or `python`) that asks, the
pattern of its `answer`, and what the number `holds`. `{config}` is a config.json of Llama 2 7B, `{override}` its sizes as
canifinetune takes them. One that cannot be installed or does not answer is listed with the reason.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "peers.md"
FENCE = "<!-- peers: made by tools/peers/run.py -->", "<!-- peers: end -->"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 32000, "hidden_act": "silu",
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16", "rms_norm_eps": 1e-05,
}  # fmt: skip
IMPORT = "import time; begun = time.perf_counter(); import {}; print(time.perf_counter() - begun)"
SIZE = """
import pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"))
own = [one for one in folder.iterdir() if one.name.split("-")[0] not in ("pip", "setuptools", "pkg_resources", "_distutils_hack")]
files = [file for one in own for file in ([one] if one.is_file() else one.rglob("*")) if file.is_file() and file.suffix != ".pyc"]
print(sum(file.stat().st_size for file in files))
"""
"""Bytes that a tool and what it depends on take on disk, without bytecode and what every environment has."""
WHAT_IT_TAKES = (
    "What each takes: itself and what it depends on, in a new environment; seconds on two cores, a second time:"
)
PATIENCE = 600
"""Seconds that an installation or an answer may take."""


def ask(name: str, inputs: Path) -> tuple[str, ...]:
    """Return the tool with its version, what was typed, its answer or why there is none, what that holds, and what it costs."""
    tool = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    place = ROOT / ".peers" / name
    python = place / "bin" / "python"
    typed = tool.get("command", "its Python interface")
    try:
        if not python.exists():
            venv.create(place, with_pip=True)
            for packages in filter(None, (tool.get("before"), tool["install"])):
                _run([str(python), "-m", "pip", "install", "--quiet", *packages])
        shown = _run([str(python), "-m", "pip", "show", name])
        release = re.search(r"^Version: (.+)$", shown, re.MULTILINE)
        paths = {"config": str(inputs / "config.json"), "override": str(inputs / "override.json")}
        words = tool["command"].format(**paths).split() if "command" in tool else ["python", "-c", tool["python"]]
        command = [str(place / "bin" / words[0]), *words[1:]]
        _run(command)
        begun = time.perf_counter()
        printed, took = _run(command), time.perf_counter() - begun
        imported = float(_run([str(python), "-c", IMPORT.format(tool["module"])]).splitlines()[-1])
        size = _run([str(python), "-c", SIZE])
    except (subprocess.SubprocessError, OSError) as error:
        return name, typed, f"no answer: {type(error).__name__}", tool["holds"], "", "", ""
    costs = (f"{int(size) / 1e6:,.0f} MB", f"{imported:.2f} s", f"{took:.1f} s")
    return f"{name} {release[1] if release else ''}".strip(), typed, read(tool, printed), tool["holds"], *costs


def read(tool: dict[str, str], printed: str) -> str:
    """Return the answer in what a tool printed, to a tenth."""
    found = re.search(tool["answer"], printed)
    answer = "no answer that is read" if found is None else f"{found[1]} {tool.get('unit', '')}".strip()
    return re.sub(r"(\d+\.\d)\d*", r"\1", answer)


def _run(words: list[str]) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout + done.stderr


def table(rows: list[tuple[str, ...]]) -> str:
    """The answers as a Markdown table, with the day they were asked on, and what each tool takes on disk and in time."""
    today = datetime.date.today().isoformat()
    lines = [f"Asked on {today}:", "", "| tool | command | its answer | what is in it |", "|---|---|--:|---|"]
    for name, typed, answer, holds, *_ in rows:
        shown = typed if typed.startswith("its") else f"`{typed.replace('{', '').replace('}', '.json')}`"
        lines.append(f"| {name} | {shown} | {answer} | {holds} |")
    lines += ["", WHAT_IT_TAKES, "", "| tool | on disk | `import` | its answer |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {' | '.join(costs)} |" for name, _, _, _, *costs in rows]
    return "\n".join(lines)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        (inputs / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        sizes = {"num_parameters": 6_738_415_616, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}  # fmt: skip
        (inputs / "override.json").write_text(json.dumps(sizes), encoding="utf-8")
        rows = []
        for name in names:
            print(f"{name} ...", file=sys.stderr)
            rows.append(ask(name, inputs))
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(FENCE[0])[0], text.split(FENCE[1])[1]
    PAGE.write_text(f"{before}{FENCE[0]}\n\n{table(rows)}\n\n{FENCE[1]}{after}", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:] or sorted(file.stem for file in HERE.glob("*.toml")))
