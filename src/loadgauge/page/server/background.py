"""Questions that separate processes answer: plans, which take long, and files, which may be hostile."""

import contextlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from anyio import open_file
from starlette.requests import Request

from loadgauge.core.base.hooks import Door, load
from loadgauge.page.inputs.flags import State
from loadgauge.page.inputs.uploads import PREFIX, Uploads, plain_name
from loadgauge.page.server.errors import Failed, Refused
from loadgauge.page.server.protocol import TASKS, decode
from loadgauge.page.server.worker_pool import Pool, Worker

PYTORCH = Door("pytorch")

Handler = Callable[[Request], Awaitable[Any]]

PLAN_SECONDS, FILE_SECONDS, VALIDATION_SECONDS, QUESTION_SECONDS = 300.0, 60.0, 60.0, 60.0
READERS = 2
"""Processes that read files: a slow file does not block the others."""
ROOM = 12 * 2**30
"""Address space for reading a file [bytes]."""
MOST_PLANS = 8
"""Plans whose answer is kept, for a page that comes back to it."""
MOST_NAMED = 8
"""Job files whose text is kept, because another one may name them."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flags, the locked axes, and the page that asks: its next plan replaces this one."""

    flags: State
    locks: list[str] = []
    page: str = "page"


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dropped file: its name, its text or its bytes in base64, and the flags of the page that go before it."""

    name: str = "file"
    text: str = ""
    base64: str = ""
    flags: dict[str, str] = {}


class Background:
    """The processes, each started when it is first needed, and the handlers of the questions that they answer."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        self.planner, self.validator = Worker(PLAN_SECONDS), Worker(VALIDATION_SECONDS)
        self.reader, self.second = Pool(READERS, FILE_SECONDS, ROOM), Worker(QUESTION_SECONDS)
        self.captured: tuple[bytes, set[bytes]] = b"", set()
        """The last plan, and the captures that it has asked for."""
        self.named: OrderedDict[str, str] = OrderedDict()
        self.plans: OrderedDict[bytes, Any] = OrderedDict()

    def handlers(self) -> dict[str, Handler]:
        """The handler of each address under `/api` that a process answers."""
        about_flags = {name: partial(self.ask, name) for name, task in TASKS.items() if task.question}
        return {
            **about_flags,
            "plan": self.plan,
            "drop": self.drop,
            "why": self.drop,
            "snapshot": self.snapshot,
            "validation": self.validation,
        }

    async def close(self) -> None:
        """End the processes."""
        for worker in (self.planner, self.validator, self.reader, self.second):
            await worker.close()

    async def warm(self) -> None:
        """Load SymPy, which takes a second, before the first formula is asked for."""
        flags: State = {"model": "gpt2", "loss": "chunked"}
        with contextlib.suppress(Exception):
            await self.second.ask("explain", "", question={"flags": flags, "id": "activations"}, uploads={})

    async def ask(self, task: str, request: Request) -> Any:
        """Answer a question about the flags in another process, so that a moving slider does not wait for it.

        task: its name in `TASKS`; returns the answer as JSON. Raises `Refused` for a body that cannot be read.
        """
        question = decode(await request.body(), load(TASKS[task].question))
        uploads = {**self.uploads.of(getattr(question, "a", {})), **self.uploads.of(question.flags)}
        return await self.second.ask(task, "", question=msgspec.to_builtins(question), uploads=uploads)

    async def plan(self, request: Request) -> Any:
        """Search for every layout that fits, and return the answer as JSON; a newer plan of the same page replaces this one."""
        asked = decode(await request.body(), Plan)
        texts, path = self.uploads.of(asked.flags), ""
        if str(asked.flags.get("model", "")).startswith(PREFIX):
            path = str(self.uploads.config(str(asked.flags["model"])))
        question = msgspec.json.encode([asked.flags, asked.locks, texts], order="deterministic")
        if question in self.plans:
            self.planner.take_back(asked.page)
            return self.plans[question]
        if self.captured[0] != question:
            self.captured = question, set()
        more = max(0, PYTORCH.MOST_CAPTURES - len(self.captured[1]))
        try:
            answer = await self.planner.ask(
                "plan", asked.page, flags=asked.flags, locks=asked.locks, uploads=texts, path=path, more=more
            )
        except Failed as error:
            if error.status == 202:  # a capture is missing, and the page asks again
                self.captured[1].add(msgspec.json.encode(error.body, order="deterministic"))
            raise
        self.plans[question] = answer
        if len(self.plans) > MOST_PLANS:
            self.plans.popitem(last=False)
        return answer

    async def validation(self, request: Request) -> Any:
        """Return as JSON how predictions compare with published runs, from row `since` of the request on."""
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdecimal() and len(since) < 10):
            raise Refused(400, "since must be a number of rows")
        return await self.validator.ask("validation", "", since=int(since))

    async def drop(self, request: Request) -> Any:
        """Read a file that was dropped, and return what it is; configs and sequence lengths are kept as uploads."""
        asked = decode(await request.body(), Drop)
        answer = await self.reader.ask(
            "text",
            "",
            name=asked.name,
            text=asked.text,
            base64_text=asked.base64,
            others=dict(self.named),
            flags=asked.flags,
        )
        document = json.loads(bytes(answer))
        if document["kind"] in ("job", "deepspeed") and asked.text:
            self.named[plain_name(asked.name)] = asked.text
            while len(self.named) > MOST_NAMED:
                self.named.popitem(last=False)
        if (text := document.pop("model", None)) is not None:
            document["flags"]["model"] = self.uploads.add_model(text, document["name"])
        if (text := document.pop("lengths", None)) is not None:
            # The lengths counted are read faster than the file; it is known by its own text.
            original = asked.text or asked.base64
            document["flags"]["lengths"] = self.uploads.add_file(text, document["name"], original)
        return document

    async def snapshot(self, request: Request) -> Any:
        """Return the diagnosis of an allocator snapshot. The body is written to disk as it arrives and deleted afterwards."""
        device = request.query_params.get("device", "0")
        if not (device.isascii() and device.isdecimal() and len(device) < 4):
            raise Refused(400, "device must be a number")
        with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
            path = Path(folder) / "snapshot"
            async with await open_file(path, "wb") as file:
                async for piece in request.stream():
                    await file.write(piece)
            return await self.reader.ask("snapshot", "", path=str(path), device=int(device))
