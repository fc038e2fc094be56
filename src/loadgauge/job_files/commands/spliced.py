"""JSON, and YAML within braces, with some values changed: the text as it was, but for these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any


def spliced(text: str, was: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return a text with the values of `now` where they are not those of `was`, which it has; None where it is of another form.

    >>> print(spliced('{"a": 1, "b": {"c": 2}}', {"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": True}}))
    {"b": {"c": 3, "d": true}}
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        root = YAML(typ="rt").compose(text.replace("\t", " "))
    except YAMLError:
        return None
    if root is None or not root.flow_style:
        return None
    for start, end, new in sorted(_edits(text, root, was, now), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _edits(text: str, node: Any, was: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yield the parts of a mapping's text that change, and what stands there then."""
    pairs = [(str(key.value), key.start_mark.index, value) for key, value in node.value]
    last = node.start_mark.index + 1
    for name, start, value in pairs:
        end = value.end_mark.index
        if name not in now:
            after = re.compile(r"\s*,[ \t]*\n?[ \t]*").match(text, end)
            yield (start, after.end(), "") if after else (len(text[:start].rstrip().removesuffix(",")), end, "")
            continue
        if isinstance(now[name], dict) and isinstance(was.get(name), dict) and hasattr(value, "flow_style"):
            yield from _edits(text, value, was[name], now[name])
        elif name not in was or now[name] != was[name]:
            yield value.start_mark.index, end, json.dumps(now[name])
        last = end
    new = [(name, value) for name, value in now.items() if name not in {name for name, _, _ in pairs}]
    line = text[text.rfind("\n", 0, pairs[-1][1]) + 1 : pairs[-1][1]] if pairs else ""
    gap = f"\n{line}" if "\n" in text[node.start_mark.index : node.end_mark.index] and not line.strip() else " "
    for name, value in new if last else ():
        comma = "," if last > node.start_mark.index + 1 and text[last:].lstrip()[:1] != "," else ""
        before = comma + gap if comma else gap if last > node.start_mark.index + 1 else ""
        at = last if comma or not pairs else last + len(text[last:]) - len(text[last:].lstrip()) + 1
        yield at, at, f"{before}{json.dumps(name)}: {json.dumps(value)}" + ("" if comma or not pairs else ",")
