"""Values in programs as people write them: each style of settings says the same job, and nothing of a program is run."""

import ast
import sys
from pathlib import Path

import pytest

from loadgauge import read
from loadgauge.job_files.reading.values import UNKNOWN, Names, worked_out

HEAD = "import os, torch\nfrom transformers import AutoModelForCausalLM\nfrom trl import SFTTrainer, SFTConfig\n"
BODY = """
{i}model = AutoModelForCausalLM.from_pretrained({model})
{i}args = SFTConfig(output_dir="out", max_length={length}, per_device_train_batch_size={batch}, bf16=True)
{i}trainer = SFTTrainer(model=model, args=args)
{i}trainer.train()
"""
STYLES = {
    "environment": (
        'NAME = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")\nB = int(os.getenv("BS", "6"))\nos.environ["LEN"] = "3072"\n',
        ("NAME", 'int(os.environ["LEN"])', "B"), "",
    ),
    "dict": (
        'CFG = {"model": "Qwen/Qwen3-0.6B", "train": dict(bs=6, len=3072)}\n',
        ('CFG["model"]', 'CFG["train"]["len"]', 'CFG["train"].get("bs", 1)'), "",
    ),
    "spread dict": ('BASE = {"n": 3072, "b": 1}\nC = {**BASE, "b": 6}\n', ('"Qwen/Qwen3-0.6B"', 'C["n"]', 'C["b"]'), ""),
    "class": ('class CFG:\n    name = "Qwen/Qwen3-0.6B"\n    b = 6\n    n = b * 512\n', ("CFG.name", "CFG.n", "CFG.b"), ""),
    "dataclass": (
        'from dataclasses import dataclass, field\n@dataclass\nclass Settings:\n    name: str = "Qwen/Qwen3-0.6B"\n'
        "    b: int = 1\n    n: int = field(default=3072)\ns = Settings(b=6)\n", ("s.name", "s.n", "s.b"), "",
    ),
    "function": (
        'def main(name="Qwen/Qwen3-0.6B", b: int = 1, *, n=3072):', ("name", "n", "b"), "if 1:\n    main(b=6)\n",
    ),
    "fire": ('import fire\ndef main(name="Qwen/Qwen3-0.6B", b: int = 6, n=3072):', ("name", "n", "b"), "fire.Fire(main)\n"),
    "typer": (
        'import typer\ndef main(name: str = typer.Option("Qwen/Qwen3-0.6B"), b: int = typer.Option(6),'
        " n: int = 3072):",
        ("name", "n", "b"), "typer.run(main)\n",
    ),
    "click": (
        'import click\n@click.command()\n@click.option("--name", default="Qwen/Qwen3-0.6B")\n'
        '@click.option("-b", "--bs", default=6)\n'
        '@click.option("--max-len", default=3072)\ndef main(name, bs, max_len):', ("name", "max_len", "bs"), "main()\n",
    ),
    "namespace": (
        'from types import SimpleNamespace\nc = SimpleNamespace(m="Qwen/Qwen3-0.6B", b=6)\nc.n = 3072\n',
        ("c.m", "min(4096, c.n)", "c.b"), "",
    ),
    "object": (
        'class Run:\n    def __init__(self, name, b=1):\n        self.name, self.size = name, 1\n        self.b = b\n'
        "        self.n = 3072\n"
        "    def train(self):", ("self.model_name()", "self.n", "self.b"),
        '    def model_name(self):\n        return "Qwen/Qwen3-0.6B"\nRun("x", b=6).train()\n',
    ),
    "tyro": (
        'import tyro\nclass Conf:\n    m: str = "Qwen/Qwen3-0.6B"\n    b: int = 6\n    n: int = 3072\ncfg = tyro.cli(Conf)\n',
        ("cfg.m", "cfg.n", "cfg.b"), "",
    ),
}  # fmt: skip


def written(style: str) -> str:
    start, (model, length, batch), end = STYLES[style]
    indent = {True: "    ", False: ""}[start.rstrip(" ").endswith(":")] * (2 if "self" in length else 1)
    return HEAD + start + BODY.format(i=indent, model=model, length=length, batch=batch) + end


@pytest.mark.parametrize("style", STYLES)
def test_settings_in_each_style_are_the_same_job(style: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(written(style))
    facts = read(str(file)).facts
    assert [facts[name].value for name in ("model", "micro_batch", "seq_len")] == ["Qwen/Qwen3-0.6B", 6, 3072]


@pytest.mark.parametrize("style", ["environment", "click", "object"])
def test_the_styles_mean_that_when_python_runs_them(style: str) -> None:
    """Python itself, with the libraries put out of the way, calls the trainer with these figures."""
    text = written(style)
    if style == "click":
        pytest.importorskip("click")
        text = text.replace("main()\n", "main([], standalone_mode=False)\n")
    for line in HEAD.splitlines():
        text = text.replace(line + "\n", "", 1)
    seen: list[tuple[object, ...]] = []

    class Fake:
        from_pretrained = staticmethod(lambda name: seen.append((name,)))

        def __init__(self, *_: object, **words: object) -> None:
            if "max_length" in words:
                seen.append((words["max_length"], words["per_device_train_batch_size"]))

        def train(self) -> None: ...

    import os

    exec(text, {"os": os, "AutoModelForCausalLM": Fake, "SFTTrainer": Fake, "SFTConfig": Fake, "__name__": "__main__"})
    assert seen == [("Qwen/Qwen3-0.6B",), (3072, 6)]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("def f(b): ...\nf(1)\nf(2)", "f.b"),
        ("class A:\n    b = open('x').read()\na = A()", "a.b"),
        ("a = {'b': 1}\n", "a['c']"),
        ("", "int(os.environ.get('WORLD_SIZE', 1))"),
        ("", "os.environ['MODEL']"),
        ("a = [1, 2]", "a[2]"),
        ("class A:\n    def __init__(self):\n        self.b = 1\n    def g(self):\n        self.b = 2\na = A()", "a.b"),
        ("def f():\n    return 1\n    return 2", "f()"),
        ("a = a.b\nb = b", "a.b"),
        ("def f(x=f()):\n    return f()", "f()"),
        ("", "int('x' * 3)"),
        ("", "max()"),
        ("c = C()\nprint(c)\nc.n = 1", "min(c.n, 3)"),
    ],
)
def test_what_only_a_run_gives_stays_unknown(program: str, text: str) -> None:
    node = ast.parse(text, mode="eval").body
    assert worked_out(node, Names(ast.parse(program)), {}) is UNKNOWN


def test_a_program_is_read_and_never_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"open({str(tmp_path / 'made')!r}, 'w')\n" + written("object"))
    read(str(file))
    assert not (tmp_path / "made").exists()
    assert "tyro" not in sys.modules


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("\n".join(f"a{n} = a{n + 1}" for n in range(4000)), "a0"),
        ("".join(f"d{n} = {{**d{n + 1}, **d{n + 1}}}\n" for n in range(60)), "d0['k']"),
        ("".join(f"s{n} = s{n + 1} + s{n + 1}\n" for n in range(60)), "s0"),
        ("".join(f"class A{n}(A{n + 1}, A{n + 1}): pass\n" for n in range(40)), "A0.k"),
        ("".join(f"def f{n}(a, b=f{n + 1}()):\n    return f{n + 1}(a) + f{n + 1}(a)\n" for n in range(500)), "f0(1)"),
    ],
    ids=["chain", "spread", "sums", "bases", "functions"],
)
def test_a_program_that_would_take_for_ever_is_given_up(program: str, text: str) -> None:
    """Each doubles, or goes on, at every step; what is looked at is counted, and the suite would stand still without."""
    names = Names(ast.parse(program))
    assert worked_out(ast.parse(text, mode="eval").body, names, {}) is UNKNOWN


@pytest.mark.parametrize(
    ("calls", "value"), [("f(1)", 1), ("f(1)\nf(1)", 1), ("f(1)\nf(2)", UNKNOWN), ("", 3), ("f(*a)", UNKNOWN)]
)
def test_a_parameter_is_what_all_calls_give(calls: str, value: object) -> None:
    tree = ast.parse(f"def f(b=3):\n    print(b)\n{calls}")
    (node,) = [each for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id == "b"]
    assert worked_out(node, Names(tree), {}) == value
