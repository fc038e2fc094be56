"""The application: the page, its files, and the questions that it may ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loadgauge.web import handlers as answers
from loadgauge.web.catalogue import PRESETS, catalogue
from loadgauge.web.elsewhere import Elsewhere
from loadgauge.web.errors import failure
from loadgauge.web.guard import Guard
from loadgauge.web.pages import Pages
from loadgauge.web.questions import decoded
from loadgauge.web.uploads import Uploads

Asked = Callable[[Request], Awaitable[Any]]


class Server:
    """What the questions share: the uploads, and the processes that answer most of them.

    Estimates are worked out here, one after the other: each takes some milliseconds, and threads would only get in the way
    of one another.
    """

    def __init__(self) -> None:
        self.uploads = Uploads()
        self.elsewhere = Elsewhere(self.uploads)

    def routes(self) -> list[Route]:
        """Every address under `/api`."""
        away = self.elsewhere
        posted: dict[str, Asked] = {
            "estimate": self.estimate, "explain": away.explain, "changes": away.changes, "what_if": away.what_if,
            "export": away.export, "plan": away.plan, "drop": away.drop, "why": away.drop, "snapshot": away.snapshot,
        }  # fmt: skip
        read: dict[str, Asked] = {"catalogue": self.catalogue, "validation": away.validation}
        return [
            Route(f"/api/{name}", _handler(answer), methods=[method])
            for method, answers_of in (("POST", posted), ("GET", read))
            for name, answer in answers_of.items()
        ]

    async def catalogue(self, request: Request) -> Any:
        """All there is to choose from."""
        return catalogue()

    async def estimate(self, request: Request) -> Any:
        """The estimate and its figures."""
        return answers.estimate(decoded(await request.body(), answers.Question), self.uploads)

    async def warm(self) -> None:
        """Reads what the first questions need, while the browser starts."""
        catalogue()
        answers.estimate(answers.Question(flags=PRESETS[0]["flags"]), self.uploads)
        await self.elsewhere.warm()

    async def close(self) -> None:
        """Ends the processes, and removes what was kept."""
        await self.elsewhere.close()
        self.uploads.close()


def _handler(answer: Asked) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await answered(answer(request))

    return handle


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
        with contextlib.suppress(asyncio.CancelledError):
            await warming
        await server.close()

    app = Starlette(
        routes=[*server.routes(), *pages.routes()],
        exception_handlers={404: nowhere, 405: nowhere},
        lifespan=lifespan,
    )
    return Guard(app, token, port)
