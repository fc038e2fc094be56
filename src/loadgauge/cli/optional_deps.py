"""What the core does not need, and a command may."""

from __future__ import annotations

from importlib.util import find_spec

from loadgauge.errors import ConfigError


def needs_torch(command: str) -> None:
    """Raises ConfigError, saying what to install, where PyTorch is not there."""
    if find_spec("torch") is None:
        raise ConfigError(f"`loadgauge {command}` needs PyTorch: pip install 'loadgauge[torch]'")


def needs_web(command: str) -> None:
    """Raises ConfigError, saying what to install, where the server's libraries are not there."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError(f"`loadgauge {command}` needs starlette and uvicorn: pip install 'loadgauge[web]'")
