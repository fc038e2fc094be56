"""The application: the page, its files, and the questions that it may ask."""

from __future__ import annotations

import asyncio
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
from loadgauge.show.web.catalogue import PRESETS, catalogue
from loadgauge.show.web.elsewhere import Elsewhere
from loadgauge.show.web.exports import Export, exported
from loadgauge.show.web.failures import failure
from loadgauge.show.web.guard import Guard
from loadgauge.show.web.pages import Pages
from loadgauge.show.web.questions import decoded
from loadgauge.show.web.uploads import Uploads

THREADS = 2
"""Questions that are worked on at once; the others wait in line."""
SECONDS = 60
"""That a question may take, its time in line included."""
PAUSE = 3
"""Seconds before SymPy is loaded, which takes one."""
Question = TypeVar("Question")


class Server:
    """What the questions share: the uploads, the threads and the processes that work them out."""

    def __init__(self) -> None:
        self.uploads = Uploads()
        self.threads = anyio.CapacityLimiter(THREADS)
        self.elsewhere = Elsewhere(self.uploads)

    def routes(self) -> list[Route]:
        """Every address under `/api`."""
        away = self.elsewhere
        return [
            Route("/api/catalogue", self.catalogue, methods=["GET"]),
            Route("/api/estimate", self.asked(answers.Question, answers.estimate), methods=["POST"]),
            Route("/api/explain", self.asked(answers.OfBlock, answers.explain), methods=["POST"]),
            Route("/api/changes", self.asked(answers.Question, answers.changes), methods=["POST"]),
            Route("/api/what_if", self.asked(answers.WhatIf, answers.what_if), methods=["POST"]),
            Route("/api/export", self.asked(Export, exported), methods=["POST"]),
            Route("/api/plan", self.sent(away.plan), methods=["POST"]),
            Route("/api/drop", self.sent(away.drop), methods=["POST"]),
            Route("/api/why", self.sent(away.drop), methods=["POST"]),
            Route("/api/snapshot", self.sent(away.snapshot), methods=["POST"]),
            Route("/api/validation", self.sent(away.validation), methods=["GET"]),
        ]

    async def catalogue(self, request: Request) -> Response:
        """All there is to choose from."""
        return await answered(self.threaded(catalogue))

    def asked(
        self, kind: type[Question], answer: Callable[[Question, Uploads], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The address of a question: its body is read as `kind`, its answer worked out in a thread."""

        async def handle(request: Request) -> Response:
            async def work() -> Any:
                question = decoded(await request.body(), kind)
                return await self.threaded(partial(answer, question, self.uploads))

            return await answered(work())

        return handle

    def sent(self, answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """The address of a question that a process of its own answers."""

        async def handle(request: Request) -> Response:
            return await answered(answer(request))

        return handle

    async def threaded(self, work: Callable[[], Any]) -> Any:
        """Works something out in a thread."""
        with anyio.fail_after(SECONDS):
            return await run_sync(work, limiter=self.threads, abandon_on_cancel=True)

    async def warm(self) -> None:
        """Reads what the first questions need, while the browser starts."""
        await self.threaded(catalogue)
        first = answers.OfBlock(flags=PRESETS[0]["flags"], id="activations")
        await self.threaded(partial(answers.estimate, answers.Question(flags=first.flags), self.uploads))
        await asyncio.sleep(PAUSE)
        await self.threaded(partial(answers.explain, first, self.uploads))

    async def close(self) -> None:
        """Ends the processes, and removes what was kept."""
        await self.elsewhere.close()
        self.uploads.close()


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
        warming = asyncio.create_task(server.warm())
        yield
        warming.cancel()
        await server.close()

    app = Starlette(
        routes=[*server.routes(), *pages.routes()],
        exception_handlers={404: nowhere, 405: nowhere},
        lifespan=lifespan,
    )
    return Guard(app, token, port)
