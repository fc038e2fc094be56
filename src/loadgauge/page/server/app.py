"""The application: the page, its files, the questions that it may ask, and the server that runs it."""

import asyncio
import contextlib
import os
import socket
import threading
import traceback
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loadgauge.core.base.errors import NotYet
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.captured import Wanted
from loadgauge.page.panels.captures import Captures
from loadgauge.page.panels.catalogue import PRESETS, catalogue
from loadgauge.page.server import handlers
from loadgauge.page.server.background import Background, Handler
from loadgauge.page.server.connections import AT_ONCE, Connection, Server, log_briefly
from loadgauge.page.server.errors import Failed, error_answer
from loadgauge.page.server.guard import Guard
from loadgauge.page.server.pages import Pages
from loadgauge.page.server.protocol import decode

READ_ONLY = ("catalogue", "validation")
"""Addresses that are read with GET; all others are posted to."""


class Api:
    """The addresses under `/api`: the uploads they share, and the processes that answer most of them.

    Estimates are computed here, one after the other: each takes a few milliseconds, and threads would only slow them.
    """

    def __init__(self) -> None:
        self.uploads, self.captures = Uploads(), Captures()
        self.background = Background(self.uploads)

    def routes(self) -> list[Route]:
        """A route for every address under `/api`."""
        answers = {"catalogue": self.catalogue, "estimate": self.estimate, **self.background.handlers()}
        return [
            Route(f"/api/{name}", self._endpoint(answer), methods=["GET" if name in READ_ONLY else "POST"])
            for name, answer in answers.items()
        ]

    async def catalogue(self, request: Request) -> Any:
        """Answer with all that the page offers to choose from (`catalogue`), as plain values."""
        return catalogue()

    async def estimate(self, request: Request) -> Any:
        """Answer a `Question` with the estimate and its figures, as JSON. Raises `Refused` or `Error`, answered as errors."""
        return handlers.estimate(decode(await request.body(), handlers.Question), self.uploads)

    async def warm(self) -> None:
        """Load what the first questions need, while the browser starts."""
        catalogue()
        handlers.estimate(handlers.Question(flags=PRESETS[0]["flags"]), self.uploads)
        await self.background.warm()

    async def close(self) -> None:
        """End the processes, and delete the uploads."""
        await self.captures.close()
        await self.background.close()
        self.uploads.close()

    def _endpoint(self, answer: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return await respond(answer(request), self.captures)

        return handle


async def respond(work: Awaitable[Any], captures: Captures) -> Response:
    """Await an answer and encode it as JSON; an exception becomes an error answer of one line.

    Where a model must be captured first, the answer is 202 with how far that is, and the page asks again.
    """
    try:
        try:
            return _json(await work)
        except (NotYet, Failed) as error:
            status, body = error_answer(error)
            if status != 202:
                raise
        return _json({"capturing": await captures.progress(msgspec.convert(body["capture"], Wanted))}, 202)
    except Exception as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            traceback.print_exc()
        status, body = error_answer(error)
        return JSONResponse(body, status_code=status)


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


async def not_found(request: Request, error: Exception) -> Response:
    """Answer 404 or 405 with the JSON body of `error_answer`, for an unknown address or method."""
    status, body = error_answer(error)
    return JSONResponse(body, status_code=status)


def application(token: str, port: int) -> Guard:
    """The application behind its guard. token: what every request must carry; port: where it is served."""
    api, pages = Api(), Pages(token, port)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        warming = asyncio.create_task(api.warm())
        yield
        warming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await warming
        await api.close()

    app = Starlette(
        routes=[*api.routes(), *pages.routes()],
        exception_handlers={404: not_found, 405: not_found},
        lifespan=lifespan,
    )
    return Guard(app, token, port)


def server(token: str, port: int) -> uvicorn.Server:
    """A server for a socket that listens at this port of the loopback address."""
    config = uvicorn.Config(
        application(token, port),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        http=Connection,
        ws="none",
        loop="asyncio",
        backlog=AT_ONCE,
    )
    return Server(config)


def run(listening: socket.socket, token: str, port: int, url: str | None) -> None:
    """Serve on a listening socket until Ctrl-C; `url`, if given, is opened in a browser."""
    log_briefly()
    if url is not None:
        threading.Timer(0.3, webbrowser.open, [url]).start()
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
        server(token, port).run(sockets=[listening])
