"""Optional dependencies: a clear error where a command needs one that is not installed."""

from importlib.util import find_spec

from loadgauge.core.base.errors import ConfigError


def needs_torch(command: str) -> None:
    """Raise `ConfigError`, with the pip command, if PyTorch is not installed."""
    if find_spec("torch") is None:
        raise ConfigError(f"`loadgauge {command}` needs PyTorch: pip install 'loadgauge[torch]'")


def needs_capture() -> None:
    """Raise `ConfigError`, with the pip command, if what captures a model is not installed: PyTorch and transformers."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigError(
            "a model is captured from its own code by PyTorch and transformers: pip install 'loadgauge[torch]'"
        )


def needs_web(command: str) -> None:
    """Raise `ConfigError`, with the pip command, if the server's libraries are not installed."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError(f"`loadgauge {command}` needs starlette and uvicorn: pip install 'loadgauge[web]'")


def needs_mcp(command: str) -> None:
    """Raise `ConfigError`, with the pip command, if the SDK of the Model Context Protocol is not installed."""
    if find_spec("mcp") is None or find_spec("mcp.server.mcpserver") is None:
        raise ConfigError(f"`loadgauge {command}` needs the SDK of MCP: pip install 'loadgauge[mcp]'")
