"""Questions that processes of their own answer: plans, which take long, and files, which may be hostile."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
from anyio import open_file
from starlette.requests import Request

from loadgauge.web import handlers as answers
from loadgauge.web.errors import Refused
from loadgauge.web.flags import State
from loadgauge.web.questions import decoded
from loadgauge.web.uploads import PREFIX, Uploads, plain_name
from loadgauge.web.worker_pool import Pool, Worker

PLAN_SECONDS, FILE_SECONDS, VALIDATION_SECONDS, QUESTION_SECONDS = 300.0, 60.0, 60.0, 60.0
READERS = 2
"""Processes that read files: a file that takes long holds up nobody else's."""
ROOM = 12 * 2**30
"""Address space for reading a file [bytes]."""
MOST_NAMED = 8
"""Job files whose texts are kept, as another one may name them."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flags, which axes are locked, and which page asks: its next plan replaces this one."""

    flags: State
    locks: list[str] = []
    page: str = "page"


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: its name, and its text or its bytes in base64."""

    name: str = "file"
    text: str = ""
    base64: str = ""


class Elsewhere:
    """The processes, each started when it is first needed."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        self.planner, self.validator = Worker(PLAN_SECONDS), Worker(VALIDATION_SECONDS)
        self.reader, self.second = Pool(READERS, FILE_SECONDS, ROOM), Worker(QUESTION_SECONDS)
        self.named: OrderedDict[str, str] = OrderedDict()

    async def close(self) -> None:
        """Ends them."""
        for worker in (self.planner, self.validator, self.reader, self.second):
            await worker.close()

    async def warm(self) -> None:
        """Has SymPy loaded, which takes a second."""
        flags: State = {"model": "gpt2", "loss": "chunked"}
        with contextlib.suppress(Exception):
            await self.second.ask("explain", "", question={"flags": flags, "id": "activations"}, uploads={})

    async def explain(self, request: Request) -> Any:
        """One block of the treemap."""
        return await self._second("explain", decoded(await request.body(), answers.OfBlock))

    async def changes(self, request: Request) -> Any:
        """What to change next."""
        return await self._second("changes", decoded(await request.body(), answers.Question))

    async def what_if(self, request: Request) -> Any:
        """Another network adapter."""
        return await self._second("what_if", decoded(await request.body(), answers.WhatIf))

    async def export(self, request: Request) -> Any:
        """The run as another tool's job file."""
        return await self._second("export", decoded(await request.body(), answers.Export))

    async def _second(self, task: str, question: Any) -> Any:
        """Worked out beside the estimates, so that a slider that moves waits for none of it."""
        uploads = self.uploads.of(question.flags)
        return await self.second.ask(task, "", question=msgspec.to_builtins(question), uploads=uploads)

    async def plan(self, request: Request) -> Any:
        """Every layout that fits."""
        asked = decoded(await request.body(), Plan)
        texts, path = self.uploads.of(asked.flags), ""
        if str(asked.flags.get("model", "")).startswith(PREFIX):
            path = str(self.uploads.config(str(asked.flags["model"])))
        return await self.planner.ask(
            "plan", asked.page, flags=asked.flags, locks=asked.locks, uploads=texts, path=path
        )  # fmt: skip

    async def validation(self, request: Request) -> Any:
        """Predicted against published runs, from row `since` on."""
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdecimal() and len(since) < 10):
            raise Refused(400, "since must be a number of rows")
        return await self.validator.ask("validation", "", since=int(since))

    async def drop(self, request: Request) -> Any:
        """What a file says; a model's config, and lengths of sequences, are kept."""
        asked = decoded(await request.body(), Drop)
        told = await self.reader.ask(
            "text", "", name=asked.name, text=asked.text, content=asked.base64, others=dict(self.named)
        )
        found = json.loads(bytes(told))
        if found["kind"] in ("job", "deepspeed") and asked.text:
            self.named[plain_name(asked.name)] = asked.text
            while len(self.named) > MOST_NAMED:
                self.named.popitem(last=False)
        if (text := found.pop("model", None)) is not None:
            found["flags"]["model"] = self.uploads.add_model(text, found["name"])
        if (text := found.pop("lengths", None)) is not None:
            # The lengths counted are read faster than the file; it is known by its own text.
            original = asked.text or asked.base64
            found["flags"]["lengths"] = self.uploads.add_file(text, found["name"], original)
        return found

    async def snapshot(self, request: Request) -> Any:
        """A snapshot of the allocator, as it is: it goes to the disk piece by piece, and is gone afterwards."""
        device = request.query_params.get("device", "0")
        if not (device.isascii() and device.isdecimal() and len(device) < 4):
            raise Refused(400, "device must be a number")
        with tempfile.TemporaryDirectory(prefix="loadgauge-") as folder:
            place = Path(folder) / "snapshot"
            async with await open_file(place, "wb") as file:
                async for piece in request.stream():
                    await file.write(piece)
            return await self.reader.ask("snapshot", "", path=str(place), device=int(device))
