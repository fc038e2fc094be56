"""What a connection may cost the page's server: half-open ones, too many, bodies that nobody wants, and the log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx

import loadgauge
from loadgauge.page.server import connections
from loadgauge.page.server.guard import JSON_LIMIT
from serving import SMALL, Served, alive, serving


@contextlib.contextmanager
def half_open(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send the beginning of a request, and nothing more."""
    made = []
    try:
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port), timeout=30)
            made.append(one)
            with contextlib.suppress(OSError):  # The server may have ended it already.
                one.sendall(b"POST /api/estimate HTTP/1.1\r\nHost: ")
        yield made
    finally:
        for one in made:
            one.close()


def ended(connection: socket.socket) -> bool:
    """Waits for the server to end a connection."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


# -- half-open ---------------------------------------------------------------------------------------------------------


def test_a_head_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with serving() as served, half_open(served.port, 40) as made:
        assert alive(served)
        assert all(map(ended, made))
        # A client that keeps its connection is not in a hurry between its questions, and is within one.
        time.sleep(0.7)
        assert alive(served)
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:
            slow.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode())
            assert b"401" in slow.recv(4096)
            for byte in b"GET / HTTP/1.1":
                with contextlib.suppress(OSError):
                    slow.sendall(bytes([byte]))
                time.sleep(0.1)
            assert ended(slow)


def test_a_body_that_stops_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    with serving() as served, socket.create_connection(("127.0.0.1", served.port), timeout=30) as made:
        head = f"POST /api/estimate HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nX-Loadgauge-Token: {'t' * 43}\r\n"
        made.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert ended(made)
        assert alive(served)


def test_whoever_asks_is_served_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest connections that ask nothing make room, and not those that asked before."""
    monkeypatch.setattr(connections, "most_connections", lambda: 10)
    with serving() as served:
        assert alive(served)
        with half_open(served.port, 30) as made:
            assert alive(served)
            assert all(map(ended, made[:20]))
            with httpx.Client(base_url=str(served.client.base_url), headers=dict(served.client.headers)) as other:
                assert other.post("/api/estimate", json={"flags": SMALL, "want": []}).status_code == 200


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on open files there")
@pytest.mark.parametrize("log", ["file", "a pipe that nobody reads"])
def test_more_connections_than_files_may_be_open(log: str, tmp_path: Path) -> None:
    """The server answers while they are there, and logs little, or nothing where it cannot."""
    place = tmp_path / "stderr"
    with contextlib.ExitStack() as stack:
        if log == "file":
            stderr = stack.enter_context(place.open("wb")).fileno()
        else:
            reading, stderr = os.pipe()
            stack.callback(os.close, reading)
            stack.callback(os.close, stderr)
            os.set_blocking(stderr, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(stderr, b"x")
            os.set_blocking(stderr, True)
        home = str(Path(loadgauge.__file__).parents[1])
        command = f"ulimit -n 256; exec {shlex.quote(sys.executable)} -m loadgauge serve --port 0 --no-browser --json"
        words, env = ["bash", "-c", command], {**os.environ, "PYTHONPATH": home}
        process = stack.enter_context(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        told = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        with half_open(told["port"], 400), httpx.Client(timeout=60) as client:
            address = f"http://127.0.0.1:{told['port']}/api/estimate"
            for _ in range(3):
                answer = client.post(
                    address, json={"flags": SMALL, "want": []}, headers={"X-Loadgauge-Token": told["token"]}
                )
                assert answer.status_code == 200
    if log == "file":
        assert place.stat().st_size < 10_000


# -- bodies that are not wanted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [True, False])
def test_a_client_sees_why_its_body_was_not_wanted(served: Served, token: bool) -> None:
    """Though the answer is made before the body has come."""
    headers = {} if token else {"X-Loadgauge-Token": "another"}
    body = b" " * (8 * JSON_LIMIT)
    answer = served.client.post("/api/estimate", content=body, headers=headers)
    assert answer.status_code == (413 if token else 401)
    assert "error" in answer.json()
    assert alive(served)


def test_a_large_config_is_called_what_it_is(served: Served) -> None:
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "padding": "x" * 5_000_000}
    answer = served.client.post("/api/snapshot", content=json.dumps(config))
    assert answer.status_code == 422
    assert "is a config.json of 5.0 MB" in answer.json()["error"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


# -- the log -----------------------------------------------------------------------------------------------------------


def test_a_flood_is_logged_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    handler = connections.OneLine()
    logger = logging.Logger("flood")
    logger.addHandler(handler)
    for number in range(1000):
        try:
            raise OSError(24, "Too many open files")
        except OSError:
            logger.exception("socket.accept() out of system resource\n %d", number)
    handler.begun = -connections.SPAN  # as if some time had passed
    logger.warning("another")
    text = ""
    until = time.monotonic() + 20
    while "another" not in text and time.monotonic() < until:
        time.sleep(0.01)
        text += capsys.readouterr().err
    lines = text.splitlines()
    assert len(lines) <= connections.LINES + 1
    assert lines[0] == "loadgauge: socket.accept() out of system resource 0 (OSError: [Errno 24] Too many open files)"
    assert lines[-1] == f"loadgauge: another (and {1000 - connections.LINES:,} more lines before)"
