"""Why any number of an answer is what it is, by its key in the document: what the schema says of it, and the numbers under it."""

from collections.abc import Sequence

from loadgauge.core.answers.answer import Answer, Entry, described
from loadgauge.core.answers.why.reason import Reason
from loadgauge.core.base import ConfigError


def key_reason(answer: Answer, key: str) -> Reason:
    """Return what a key of an answer's document means, with every number under it. Raises `ConfigError` for no such key.

    >>> from loadgauge.core.answers.why.reason import Reason
    >>> key_reason(Reason(topic="tp", what="", value=3.0, unit="s", basis="", rule=""), "value").value
    3.0
    """
    ledger = answer.ledger()
    entries = [entry for entry in ledger if f"{entry.keys['of']}.".startswith(f"{key}.")]
    if not entries:
        topics = dict.fromkeys((*answer.topics, *(entry.keys["of"].partition(".")[0] for entry in ledger)))
        raise ConfigError(f"{key!r} is not explained here (known: {', '.join(topics) or 'nothing'})", key="explain")
    alone = entries[0] if len(entries) == 1 else None
    return Reason(
        topic=key,
        what=described(answer.form, key),
        value=None if alone is None else alone.value,
        unit="" if alone is None else alone.unit,
        basis=f"{answer.form} of `loadgauge schema`",
        rule="the document has it under this key (--json)",
        columns=("what", "value", "unit"),
        rows=()
        if alone
        else tuple(zip(_names(entries, key), (e.value for e in entries), (e.unit for e in entries), strict=True)),
    )


def _names(entries: Sequence[Entry], key: str) -> list[str]:
    """Names of the numbers: the rest of its key, and of the texts beside it those that tell it from the others."""
    texts = {
        name: [entry.keys.get(name, "") for entry in entries] for name in {name: 0 for e in entries for name in e.keys}
    }
    texts["of"] = [text.removeprefix(key).strip(".") for text in texts["of"]]
    telling = {name: column for name, column in texts.items() if name != "unit" and len(set(column)) > 1}
    alone = next((column for column in telling.values() if len(set(column)) == len(entries)), None)
    return alone or [", ".join(filter(None, each)) for each in zip(*telling.values(), strict=True)]
