"""Words of a job file that say nothing, contradict one another, or are of another release (`data/lint.toml`)."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, read_table
from loadgauge.job_files.dialects import BUILT_ON, dialect
from loadgauge.job_files.ideas import MISSING, Document, short
from loadgauge.job_files.reading.documents import document

OFF = ("", "0", "no", "none", "false", "null", "off")
"""Words of a value that sets nothing."""
SOURCED = re.compile(r"^\s*(?:source|\.)\s+\S", re.MULTILINE)
"""Lines by which a script reads another, whose words are not seen."""
TERM = re.compile(r"([\w.]+)(?:([=>])(\S*))?")


class Words(msgspec.Struct, frozen=True):
    """Name of a rule, what is wrong, the text that is, and keys that are set, or (None) go, to mend it."""

    rule: str
    says: str
    text: str
    keys: dict[str, Any] = {}


def own_words(text: str, tool: str, syntax: str, file: str = "", *, nvlink: bool = False) -> Iterator[Words]:
    """Yield what the words of a job file say in vain, the table's rows in order.

    tool: its dialect; nvlink: whether the job's card has it

    >>> text = "base_model: gpt2\\nlora_r: 8\\ngradient_checkpointing_kwargs: {use_reentrant: true}\\n"
    >>> [(words.rule, words.text) for words in own_words(text, "axolotl", "yaml")]
    [('dead-key', 'lora_r'), ('dead-key', 'gradient_checkpointing_kwargs')]
    """
    table = read_table("lint.toml")
    of_file = document(text, syntax, dialect(tool), file)

    def of_tool(row: dict[str, Any]) -> bool:
        return bool({tool, None if "alone" in row else BUILT_ON.get(tool)} & set(row["tools"].split()))

    elsewhere = syntax == "argv" and SOURCED.search(text) is not None
    for row in () if elsewhere else filter(of_tool, table["dead"]):
        idle = not _any(of_file, row.get("unless", ""), text, unknown=True)
        if idle and ("when" not in row or _any(of_file, row["when"])):
            dead = [key for key in row["keys"].split() if _on(_value(of_file, key))]
            shown = [of_file.shown(key) for key in dead]
            if dead:
                yield Words(
                    "dead-key",
                    f"{', '.join(f'`{each}`' for each in shown)} {'says' if len(dead) == 1 else 'say'} {row['says']}",
                    shown[0].rpartition(".")[2],
                    dict.fromkeys(dead),
                )
    for row in filter(of_tool, table["clash"]):
        both = [key for key in row["keys"].split() if _on(_value(of_file, key))]
        if len(both) > 1:
            yield Words("keys-contradict", f"{' and '.join(f'`{key}`' for key in both)} {row['says']}", both[-1])
    for row in filter(of_tool, table["renamed"]):
        for key in row.keys() - {"tools", "since"}:
            if _value(of_file, key) is not None:
                yield Words(
                    "other-release",
                    f"`{of_file.shown(key)}` is of another release: `{row[key]}` since {row['since']}",
                    key,
                )
    for key in getattr(of_file, "skipped", ()) if syntax == "yaml" else ():  # given twice
        yield Words("key-twice", key, re.escape(key.split()[0]))
    for row in table["text"]:
        written = next((row for line in text.splitlines() if _is(row["pattern"], line)), None)
        if written is not None and (nvlink or "nvlink" not in row):
            yield Words(row["rule"], row["says"], row["pattern"])


def rules() -> dict[str, str]:
    """Return the names of the rules that have no change of their own, and what each looks for.

    >>> "dead-key" in rules() and "links-off" in rules()
    True
    """
    table = read_table("lint.toml")
    return {**table["rules"], **{row["rule"]: row["says"] for row in table["text"]}}


def line_of(text: str, words: str) -> int:
    """Return the first line that has a word or a pattern, outside comments; 1 where none has.

    >>> line_of("# lora_r\\nlora_r: 8", "lora_r")
    2
    """
    return next((number for number, line in enumerate(text.splitlines(), 1) if _is(words, line)), 1)


def packing(tool: str) -> dict[str, Any]:
    """Return the keys by which a tool puts sequences end to end; empty where it has none.

    >>> packing("trl")
    {'packing': True}
    """
    return dict(read_table("lint.toml")["packing"].get(tool, {}))


def padding(text: str, tool: str, syntax: str, file: str = "") -> str | None:
    """Return how a job file puts sequences of different lengths in a micro-batch; None where the tool has no word for it.

    >>> padding("sample_packing: true", "axolotl", "yaml"), padding("pad_to_sequence_len: true", "axolotl", "yaml")
    ('free', 'max-length')
    """
    words = packing(tool)
    of_file = document(text, syntax, dialect(tool), file)
    if not words:
        return None
    if _on(_value(of_file, next(iter(words)))):
        return "free"
    return "max-length" if _on(_value(of_file, "pad_to_sequence_len")) else "dynamic"


def _is(pattern: str, line: str) -> bool:
    bare = line.partition("#")[0]
    return re.search(pattern, bare) is not None or re.search(pattern, bare.replace("-", "_")) is not None


def _value(of_file: Document, key: str) -> Any:
    """Return the value of a key, of several words the first; None where it has none, or several that differ."""
    try:
        value = of_file.get(key)
    except ConfigError:
        return None
    if isinstance(value, list) and of_file.syntax == "argv":
        value = value[0] if value else True
    return None if value is MISSING else value


def _on(value: Any) -> bool:
    return value not in (None, [], {}) and str(value).lower() not in OFF and "$" not in short(value)


def _any(of_file: Document, terms: str, text: str = "", *, unknown: bool = False) -> bool:
    """Return whether one of some terms holds. unknown: also where a variable decides, or a script names the key elsewhere"""
    for key, sign, wanted in TERM.findall(terms):
        value = _value(of_file, key)
        if value is None:
            named = (
                unknown and of_file.syntax != "yaml" and _is(rf"\b{key.rpartition('.')[2]}\b", text.replace("\n", " "))
            )
            if named and "." not in key:
                return True
            continue
        # A variable of a script that several lines set has another value in another branch.
        by = re.search(rf"--{key.replace('_', '[-_]')}[ =]+[\"']?\$\{{?(\w+)", text) if unknown else None
        if unknown and ("$" in str(value) or (by and len(re.findall(rf"\b{by[1]}=", text)) > 1)):
            return True
        number = str(value).replace(".", "", 1)
        more = sign == ">" and number.isdecimal() and float(value) > float(wanted)
        if more or (sign == "=" and str(value).lower() == wanted) or (not sign and _on(value)):
            return True
    return False
