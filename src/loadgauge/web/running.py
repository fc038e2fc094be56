"""Runs the application until it is interrupted."""

from __future__ import annotations

import contextlib
import socket
import threading
import webbrowser

import uvicorn

from loadgauge.web.app import application
from loadgauge.web.connections import AT_ONCE, Connection, Server, log_briefly


def server(token: str, port: int) -> uvicorn.Server:
    """The server, ready to run on a socket that listens at that port of the loopback address."""
    config = uvicorn.Config(
        application(token, port), log_level="warning", log_config=None, access_log=False, server_header=False,
        date_header=False, lifespan="on", timeout_keep_alive=30, timeout_graceful_shutdown=2, http=Connection, ws="none",
        loop="asyncio", backlog=AT_ONCE,
    )  # fmt: skip
    return Server(config)


def run(listening: socket.socket, token: str, port: int, url: str | None) -> None:
    """Serves on a socket that listens already; `url` is opened in a browser once it does."""
    log_briefly()
    if url is not None:
        threading.Timer(0.3, webbrowser.open, [url]).start()
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
        server(token, port).run(sockets=[listening])
