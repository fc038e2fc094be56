"""The page's words for texts of a terminal, as `static/js/i18n.js` has them for the page."""

import re
from functools import cache
from importlib.resources import files

import msgspec

MESSAGES = files("loadgauge.page") / "static/messages"
LITERAL = re.compile(r"\{(\d*)\}")


@cache
def _table(name: str) -> dict[str, str]:
    table: dict[str, str] = msgspec.json.decode((MESSAGES / f"{name}.zh.json").read_bytes())
    return table


@cache
def _templates(name: str) -> list[tuple[re.Pattern[str], str]]:
    """Sentences with {} for what they name, those with the most words first: each as a pattern, and its translation."""
    ordered = sorted(_table(name).items(), key=lambda pair: -len(pair[0].replace("{}", "")))
    return [(re.compile("(.*?)".join(map(re.escape, text.split("{}"))), re.DOTALL), form) for text, form in ordered]


def _filled(form: str, values: list[str]) -> str:
    rest = iter(values)
    return LITERAL.sub(lambda at: values[int(at[1])] if at[1] else next(rest), form)


def said(text: str, name: str = "lines") -> str:
    """Return a text in Chinese, part by part; what has no translation stays as it is.

    name: whose texts they are, lines of an answer or errors

    >>> said("DOES NOT FIT"), said("A step: 3.1 s, 900 tokens/s a GPU, MFU 40%")
    ('放不下', '一步：3.1 s，每张 GPU 900 token/s，MFU 40%')
    >>> said("train.yaml: model: is missing", "errors")
    'train.yaml：model：缺失'
    """
    if text in _table(name):
        return _table(name)[text]
    for pattern, form in _templates(name):
        match = pattern.fullmatch(text)
        if match and not (name == "errors" and any("; " in value.removeprefix("; ") for value in match.groups())):
            return _filled(form, [said(value, name) for value in match.groups()])
    key, colon, rest = text.partition(": ")
    if colon and " " not in key and (other := said(rest, name)) != rest:
        return f"{key}：{other}"
    if (body := text.lstrip()) != text and body:
        return text[: -len(body)] + said(body, name)
    parts = text.split("; ")
    told = [said(part, name) for part in parts] if len(parts) > 1 else parts
    return text if told == parts else "；".join(told)
