"""The fleet of a plan: its options as `--fleet` writes them."""

from typing import Any

from loadgauge.core.base.errors import ConfigError
from loadgauge.fleets.fleet import Options
from loadgauge.fleets.sites import OPTIONS as SITES


def options(fields: dict[str, str], find: str | None = None) -> tuple[Options, dict[str, str]]:
    """Return the options of a fleet, and with `--find sites` those of its sites. Raises `ConfigError` for others.

    >>> options({"spares": "2%", "failures": "llama3"})[0].failures
    'llama3'
    >>> options({"between": "100Gbit/s"}, "sites")[1]
    {'between': '100Gbit/s'}
    """
    sites = {name: text for name, text in fields.items() if find == "sites" and name in SITES}
    own: dict[str, Any] = {name: text for name, text in fields.items() if name not in sites}
    unknown = [name for name in own if name not in Options.__struct_fields__ or name in ("runs", "seed")]
    if unknown:
        raise ConfigError(f"has nothing called {unknown[0]!r}", key="fleet")
    return Options(**{"recover": "elastic", **own}), sites
