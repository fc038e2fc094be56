"""Writes docs/articles.md from docs/articles/items.txt: each claim of the five articles with the command that answers it.

    python docs/articles.py

A test runs every command and looks for what its output must say (tests/evidence/articles/test_items.py).
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import NamedTuple

from loadgauge.evidence.articles.article import verdicts

HERE = Path(__file__).parent
TITLES = {
    1: "Compute and memory of Megatron and LLaMA models", 2: "Where did the memory go", 3: "Sizing a cluster",
    4: "Padding-free layers", 5: "Memory of small autograd functions",
}  # fmt: skip


class Item(NamedTuple):
    """A claim. verdict: works, or missing where it could not be measured; command: without `loadgauge`, or `page NAME` of this
    folder; says: what the output must contain"""

    number: str
    claim: str
    verdict: str
    command: str
    says: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The command as words."""
        return shlex.split(self.command)

    @property
    def page(self) -> str:
        """The page that answers, where no command does."""
        return self.command.removeprefix("page ") if self.command.startswith("page ") else ""

    @property
    def wrong(self) -> str:
        """Whether the article is "wrong", or "wrong in part", by the rows of `loadgauge article` that are of this claim."""
        return of_rows(int(self.number.partition(".")[0])).get(self.number, "")


of_rows = functools.cache(verdicts)


def items() -> list[Item]:
    """Every claim, in order."""
    short: dict[str, str] = {}
    found = []
    for line in (HERE / "articles" / "items.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            name, equals, words = line.removeprefix("# ").partition(" = ")
            if equals:
                short[name] = words
            continue
        number, claim, verdict, command, says = (part.strip() for part in line.split(" | "))
        words = " ".join(short.get(word, word) for word in command.split(" "))
        found.append(Item(number, claim, verdict, words, tuple(says.split(" ; "))))
    return found


def page() -> str:
    """The text of docs/articles.md."""
    listed = items()
    partly, wrong = (sum(item.wrong == word for item in listed) for word in ("wrong in part", "wrong"))
    missing = sum(item.verdict == "missing" for item in listed)
    text = f"""# The five articles, claim by claim

Written by `python docs/articles.py`; a test runs every command. {len(listed)} claims: {len(listed) - missing} are
answered here, {missing} needs a machine that was not at hand. {wrong} are wrong in the article and {partly} in part, as the rows of
`loadgauge article NUMBER` have it: it prints the tables of an article as printed and as they are right, with what is wrong and
why.
"""
    for number, title in TITLES.items():
        text += f"\n## Article {number}: {title}\n\n| claim | says | command |\n|---|---|---|\n"
        for item in listed:
            if not item.number.startswith(f"{number}."):
                continue
            told = f"the article is {item.wrong}" if item.wrong else "not measured" if item.verdict == "missing" else ""
            note = f" **({told})**" if told else ""
            says = "; ".join(f"`{one}`" for one in item.says).replace("|", "\\|")
            there = f"[{item.page}]({item.page})" if item.page else f"`loadgauge {item.command}`"
            text += f"| {item.number} {item.claim}{note} | {says} | {there} |\n"
    return text


if __name__ == "__main__":
    (HERE / "articles.md").write_text(page(), encoding="utf-8")
