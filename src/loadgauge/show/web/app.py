"""The application: the page, its files, and the questions that it may ask."""

from __future__ import annotations

import os
import traceback
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loadgauge.show.web import answers
from loadgauge.show.web.catalogue import catalogue
from loadgauge.show.web.failures import failure
from loadgauge.show.web.guard import Guard, Refused
from loadgauge.show.web.pages import Pages
from loadgauge.show.web.uploads import Uploads

THREADS = 4
"""Questions that are worked on at once; the others wait in line."""
SECONDS = 60
"""That a question may take, its time in line included."""
Question = TypeVar("Question")


class Server:
    """What the questions share: the uploads, and the threads that work them out."""

    def __init__(self) -> None:
        self.uploads = Uploads()
        self.threads = anyio.CapacityLimiter(THREADS)

    def routes(self) -> list[Route]:
        """Every address under `/api`."""
        return [
            Route("/api/catalogue", self.catalogue, methods=["GET"]),
            Route("/api/estimate", self.asked(answers.Question, answers.estimate), methods=["POST"]),
            Route("/api/explain", self.asked(answers.OfBlock, answers.explain), methods=["POST"]),
        ]

    async def catalogue(self, request: Request) -> Response:
        """All there is to choose from."""
        return await answered(self.threaded(catalogue))

    def asked(
        self, kind: type[Question], answer: Callable[[Question, Uploads], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The address of a question: its body is read as `kind`, its answer worked out beside the others."""

        async def handle(request: Request) -> Response:
            async def work() -> Any:
                question = decoded(await request.body(), kind)
                return await self.threaded(partial(answer, question, self.uploads))

            return await answered(work())

        return handle

    async def threaded(self, work: Callable[[], Any]) -> Any:
        """Works something out in a thread."""
        with anyio.fail_after(SECONDS):
            return await run_sync(work, limiter=self.threads, abandon_on_cancel=True)


def decoded(body: bytes, kind: type[Question]) -> Question:
    """A body as a question; whatever else it is, is said in one line."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise Refused(400, "the request is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the request cannot be read: {error}") from None


async def answered(work: Awaitable[Any]) -> Response:
    """An answer as JSON; or whatever went wrong, in one line."""
    try:
        return Response(msgspec.json.encode(await work), media_type="application/json")
    except Exception as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            traceback.print_exc()
        status, body = failure(error)
        return JSONResponse(body, status_code=status)


async def nowhere(request: Request, error: Exception) -> Response:
    """An address that there is not."""
    status, body = failure(error)
    return JSONResponse(body, status_code=status)


def application(token: str, port: int) -> Guard:
    """The application behind its guard. token: what every question must have; port: where it is served."""
    server, pages = Server(), Pages(token, port)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        yield
        server.uploads.close()

    app = Starlette(
        routes=[*server.routes(), *pages.routes()],
        exception_handlers={404: nowhere, 405: nowhere},
        lifespan=lifespan,
    )
    return Guard(app, token, port)
