"""Configs of models by their names on the Hugging Face hub: from the local cache, and, where it is allowed, from the hub.

Only `config.json` is read, as data; code that a repository holds (`auto_map`) is never run.
"""

import os
import re

from loadgauge.core.base.errors import ConfigError, first_line, refuse

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""Owner and name."""
SECONDS = 5.0
"""Seconds that the hub may take to answer."""
LARGEST = 1_000_000
"""Bytes of a config.json from the hub."""
ALLOWED = "LOADGAUGE_HUB"
"""The environment variable that allows it to be asked: 1."""


def allowed(asked: bool | None) -> bool:
    """Return whether the hub may be asked: what the user said, else what the environment says."""
    return os.environ.get(ALLOWED, "").lower() in ("1", "true", "yes", "on") if asked is None else asked


def cache_folder() -> str:
    """Return the folder of the local cache, as huggingface_hub finds it: HF_HUB_CACHE, else hub in HF_HOME, else in ~/.cache."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "huggingface"
    )
    return os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")


def cached(name: str) -> str | None:
    """Return the `config.json` of a repository in the local cache, of its `main` where that is there; None for none."""
    if not REPOSITORY.fullmatch(name):
        return None
    folder = os.path.join(cache_folder(), f"models--{name.replace('/', '--')}")
    snapshots = os.path.join(folder, "snapshots")
    try:
        revisions = sorted(os.listdir(snapshots), key=lambda commit: os.path.getmtime(os.path.join(snapshots, commit)))
        with open(os.path.join(folder, "refs", "main"), encoding="utf-8") as file:
            revisions.append(file.read(64).strip())
    except (OSError, UnicodeDecodeError):
        if not os.path.isdir(snapshots):
            return None
        revisions = sorted(os.listdir(snapshots))
    for revision in reversed(revisions):
        config = os.path.join(snapshots, os.path.basename(revision), "config.json")
        if os.path.isfile(config):
            return config
    return None


def fetch(name: str) -> bytes:
    """Return the `config.json` of a repository on the hub: by huggingface_hub with its token and its cache where that is
    installed, else over HTTPS. Raises `ConfigError` in one line."""
    refuse(not REPOSITORY.fullmatch(name), f"{name!r} is not the name of a repository, which is OWNER/NAME", key="hub")
    try:
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            return _over_https(name)
        with open(hf_hub_download(name, "config.json", etag_timeout=SECONDS), "rb") as file:
            return file.read(LARGEST + 1)
    except Exception as error:  # huggingface_hub, httpx, requests and urllib each have their own
        raise ConfigError(
            f"huggingface.co gives no config.json of {name}: {first_line(error)[:120]}", key="hub"
        ) from None


def _over_https(name: str) -> bytes:
    from urllib.request import Request, urlopen

    address = f"https://huggingface.co/{name}/resolve/main/config.json"
    token = os.environ.get("HF_TOKEN")
    headers = {"User-Agent": "loadgauge"} | ({"Authorization": f"Bearer {token}"} if token else {})
    with urlopen(Request(address, headers=headers), timeout=SECONDS) as answer:
        content: bytes = answer.read(LARGEST + 1)
        return content
