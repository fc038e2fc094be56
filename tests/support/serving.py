"""The server in a thread of the test's own process, on a real socket, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from loadgauge.page.server.app import server

TOKEN = "t" * 43
LLAMA: dict[str, Any] = {
    "model": "llama-3.1-70b", "gpu": "h100-sxm5-80gb", "gpus": "64", "tp": "8", "pp": "2", "sequence-parallel": "true",
    "zero": "1", "seq-len": "4096", "micro-batch": "1", "global-batch": "64",
}  # fmt: skip
SMALL: dict[str, Any] = {"model": "gpt2", "gpu": "a100-sxm4-80gb", "gpus": "8", "seq-len": "1024", "global-batch": "32"}
LARGE: dict[str, Any] = {
    "model": "llama-3.1-405b", "gpu": "h100-sxm5-80gb", "gpus": "1024", "tp": "8", "pp": "16",
    "stage-layers": "7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7", "sequence-parallel": "true", "zero": "1",
    "recompute": "selective", "seq-len": "8192", "global-batch": "512",
}  # fmt: skip


class Served(NamedTuple):
    """A server that runs, and who may ask it."""

    port: int
    client: httpx.Client

    def ask(self, path: str, **body: Any) -> httpx.Response:
        """A question of the page."""
        return self.client.post(path, json=body)

    def answer(self, path: str, **body: Any) -> Any:
        """Its answer, which must be one."""
        found = self.ask(path, **body)
        assert found.status_code == 200, found.text
        return found.json()

    def raw(self, text: bytes, wait: float = 600) -> bytes:
        """Whatever comes back for bytes that no client would send."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as made:
            made.sendall(text)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := made.recv(65536):
                    found += piece
            return found


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """A server for as long as the test wants it; its end is waited for."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(512)
    port = listening.getsockname()[1]
    made = server(TOKEN, port)
    thread = threading.Thread(target=lambda: asyncio.run(made.serve(sockets=[listening])))
    thread.start()
    while not made.started:
        time.sleep(0.01)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"X-Loadgauge-Token": TOKEN}, timeout=600
        ) as client:
            yield Served(port, client)
    finally:
        made.should_exit = True
        thread.join(600)
        listening.close()
    assert not thread.is_alive()


def alive(served: Served) -> bool:
    """Whether it still answers."""
    return served.ask("/api/estimate", flags=SMALL, want=[]).status_code == 200
