"""`loadgauge serve`: the page, on this machine only."""

import secrets
import socket
import sys

import click

from loadgauge.core.base import ConfigError, needs_web
from loadgauge.core.command_line.options.param_types import Whole

ADDRESS = "127.0.0.1"
PORT = 8417


@click.command("serve")
@click.option(
    "--port", type=Whole(0, 65535), default=PORT, show_default=True, help="Port to listen on; 0: any free one."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON document.")
def command(port: int, no_browser: bool, as_json: bool) -> None:
    """Serve the page: what the commands answer, at a glance, recomputed while a slider moves.

    It listens on 127.0.0.1 only and answers only requests with the token in the printed address. Nothing leaves this
    machine. Ctrl-C ends it.

    \b
    loadgauge serve
    loadgauge serve --port 9000 --no-browser
    """
    needs_web("serve")
    from loadgauge.page.server.app import run

    token = secrets.token_urlsafe(32)
    listening = _listen(port)
    port = listening.getsockname()[1]
    url = f"http://{ADDRESS}:{port}/?token={token}"
    if as_json:
        from loadgauge.core.text.table import document

        document({"url": url, "port": port, "token": token})
    else:
        click.echo(f"loadgauge: {url}")
        click.echo("loadgauge: Ctrl-C ends it", err=True)
    sys.stdout.flush()
    run(listening, token, port, None if no_browser else url)


def _listen(port: int) -> socket.socket:
    """Open a listening socket on the loopback address. Raises `ConfigError` if the port cannot be used."""
    # With its protocol named, asyncio sends each answer at once; else it waits 40 ms for an acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((ADDRESS, port))
        listening.listen(512)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"{port} cannot be used ({error.strerror}); --port 0 takes any free one", key="port"
        ) from None
    return listening
