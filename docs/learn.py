"""Writes docs/learn.md and docs/zh/learn.md from `data/tasks.toml`: the page's tasks to learn by, with their commands.

    python docs/learn.py

tests/journeys/test_tasks.py holds every task to its goal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgauge.core.base.package_data import read_table

HERE = Path(__file__).parent
WORDS = {
    "en": {
        "title": "Learn by {count} tasks",
        "intro": """Made by `make docs`. Each task is a run with a problem, and a goal. Solve it on the page, which
looks at the goal after every change (`loadgauge serve`, then *Learn*), or here, by changing the command. Words:
[vocabulary]({up}vocabulary.md); where the equations come from: [the theory]({up}theory.md).""",
        "path": "**A path for a student**: the first task of each part, then [the theory]({up}theory.md), then the others.",
        "goal": "Reached when",
        "keep": "kept as they are:",
        "hint": "A hint",
        "answer": "One answer",
        "equation": "The equation: ",
        "article": "article {number}",
        "and": " and ",
    },
    "zh": {
        "title": "用 {count} 个任务学习",
        "intro": """由 `make docs` 生成。每个任务是一个有问题的运行和一个目标。在页面上做
（`loadgauge serve`，再点「学习」），每次改动后页面都会检查目标；也可以在这里改命令。
术语：[词汇表]({up}vocabulary.md)；公式的来源：[理论]({up}theory.md)。""",
        "path": "**学习路线**：先做每一部分的第一个任务，再读[理论]({up}theory.md)，然后做其余的。",
        "goal": "达到目标：",
        "keep": "保持不变：",
        "hint": "提示",
        "answer": "一个答案",
        "equation": "公式：",
        "article": "文章 {number}",
        "and": "，且 ",
    },
}


def command(flags: Mapping[str, str]) -> str:
    """Return the command of a task's flags; an empty one is left out.

    >>> command({"model": "gpt2", "gpu": "t4", "qlora": "true", "zero": "", "rl-task": "dpo"})
    'loadgauge estimate gpt2 --gpu t4 --qlora --task dpo'
    """
    words = [
        f"--{name.removeprefix('rl-')}" + ("" if value == "true" else f" {value}")
        for name, value in flags.items()
        if name != "model" and value
    ]
    return " ".join(["loadgauge estimate", flags["model"], *words])


def page(language: str) -> str:
    """Return the text of the page in a language: en or zh."""
    table, words, up = read_table("tasks.toml"), WORDS[language], "" if language == "en" else "../"
    tasks: list[dict[str, Any]] = table["task"]
    lines = [
        f"# {words['title'].format(count=len(tasks))}",
        "",
        words["intro"].format(up=up),
        "",
        words["path"].format(up=up),
        "",
    ]
    for track in table["tracks"]:
        lines += [f"## {track[language]}", ""]
        for number, task in enumerate(tasks, 1):
            if task["track"] != track["id"]:
                continue
            own = task[language]
            article = (
                f" ([{words['article'].format(number=task['article'])}]({up}articles.md))" if "article" in task else ""
            )
            goals = words["and"].join(f"`{goal}`" for goal in task["goal"])
            kept = ", ".join(f"`{name.removeprefix('rl-')}`" for name in task["keep"])
            quantity = task["equation"].partition(" ")[0]
            lines += [
                f"### {number}. {own['goal']} {{#{task['id']}}}", "", f"```sh\n{command(task['start'])}\n```", "",
                f"{words['goal']} {goals}{article}; {words['keep']} {kept}.", "",
                f'??? tip "{words["hint"]}"', f"    {own['hint']}", "", f'??? success "{words["answer"]}"', "    ```sh",
                f"    {command({**task['start'], **task['answer']})}", "    ```", "",
                f"    {own['why']} {words['equation']}[{quantity}]({up}equations.md), `loadgauge equation {task['equation']}`.", "",
            ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Write both pages."""
    for language, name in (("en", "learn.md"), ("zh", "zh/learn.md")):
        (HERE / name).write_text(page(language), encoding="utf-8")


if __name__ == "__main__":
    main()
