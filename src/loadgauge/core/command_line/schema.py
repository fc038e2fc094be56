"""`loadgauge schema`: the shape of every JSON document, as JSON Schema."""

import json
from typing import Any

import click

from loadgauge.core.base.errors import ConfigError, suggest

PREFIX = "#/$defs/"


@click.command("schema")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Print the JSON Schema of all documents, or of those of NAME: a command, or a form of one, such as estimate.sweep.

    Each property is described, with its unit. The schema of one command has all that it refers to.

    \b
    loadgauge schema estimate > estimate.schema.json
    loadgauge estimate gpt2 --json > gpt2.json
    check-jsonschema --schemafile estimate.schema.json gpt2.json
    """
    from loadgauge.core.base.package_data import read_data

    text = read_data("schema.json")
    click.echo(text if name is None else json.dumps(schema_of(name, text), ensure_ascii=False, indent=2), nl=bool(name))


def schema_of(name: str, text: str) -> dict[str, Any]:
    """Return the schema of a command, or of a form of one, with all that it refers to; text: that of `data/schema.json`.

    Raises `ConfigError`.

    >>> from loadgauge.core.base.package_data import read_data
    >>> sorted(schema_of("saved.cases", read_data("schema.json"))["$defs"])
    ['amount', 'case', 'saved.cases', 'version']
    """
    whole: dict[str, Any] = json.loads(text)
    shapes = whole["$defs"]
    commands = [entry["$ref"].removeprefix(PREFIX) for entry in whole["anyOf"]]
    names = [*commands, *(each for each in shapes if each.partition(".")[0] in commands and "." in each)]
    if name not in names:
        hint = suggest(name, names) or f" (known: {', '.join(names)})"
        raise ConfigError(f"there is no document called {name!r}{hint}")
    needed = [name]
    for each in needed:
        needed += dict.fromkeys(other for other in _references(shapes[each]) if other not in needed)
    return whole | {
        "$id": f"{whole['$id']}:{name}",
        "title": f"{whole['title']}: {name}",
        "anyOf": [{"$ref": PREFIX + name}],
        "$defs": {each: shape for each, shape in shapes.items() if each in needed},
    }


def _references(shape: object) -> list[str]:
    """The names of the shapes that a shape refers to."""
    if isinstance(shape, dict):
        own = [shape["$ref"].removeprefix(PREFIX)] if "$ref" in shape else []
        return own + [name for part in shape.values() for name in _references(part)]
    return [name for part in shape for name in _references(part)] if isinstance(shape, list) else []
