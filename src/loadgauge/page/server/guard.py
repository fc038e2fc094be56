"""Checks of every request before anything else: Host, Origin, token and size of the body.

The server listens on the loopback address only, but every page that a browser has open can send requests there, and
every name can be made to point there (DNS rebinding). The token keeps other pages and other users of the machine out.
"""

import asyncio
import contextlib
import html
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from secrets import compare_digest
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from loadgauge.page.server.errors import Refused, error_body

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_LIMIT = 4 * 2**20
"""Largest JSON body [bytes]."""
FILE_LIMIT = 2**30
"""Largest snapshot [bytes]; it is written to disk piece by piece."""
MOST_DRAINED = 2**28
"""Bytes of a refused body that are still read, so that the client sees the answer."""
DRAIN_SECONDS = 1.0
"""Longest wait for another byte of a refused body."""
FILE_PATHS = ("/api/snapshot",)
PAGE = ("/", "/index.html")
"""Addresses that a link from another page may open (a terminal in a browser): with the token, never in a frame."""
NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
        " connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """Pass on requests of the page itself, answer all others with one line, and add the security headers."""

    def __init__(self, app: App, token: str, port: int, extra_hosts: Iterable[str] = ()) -> None:
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in NAMES} | set(extra_hosts)
        self.cookie = f"loadgauge-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        body = Body(receive, headers)
        send = self.hardened(scope, body.awaited(send))
        try:
            body.limit = self.check(scope, headers)
            await self.app(scope, body.receive, send)
        except Refused as error:
            await refuse(error, send, page=scope["path"] in PAGE and "text/html" in headers.get("accept", ""))

    def check(self, scope: Scope, headers: dict[str, str]) -> int:
        """Return the limit of the body [bytes]. Raises `Refused` without the token, or for another host, origin or method."""
        path, method = scope["path"], scope["method"]
        if headers.get("host", "").lower() not in self.hosts:
            text = "this host is not served here; open the address that `loadgauge serve` printed"
            raise Refused(421, f"{text} (through a tunnel: with the same port)")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            raise Refused(403, "requests from other pages are refused")
        if path not in PAGE and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise Refused(403, "requests from other pages are refused")
        if method not in ("GET", "HEAD", "POST"):
            raise Refused(405, f"{method} is not known here")
        if path.startswith("/api/"):
            if not self.is_token(headers.get("x-loadgauge-token", "")):
                raise Refused(401, "the token is missing or wrong; open the address that `loadgauge serve` printed")
        elif path in PAGE and not (self.in_address(scope) or self.in_cookie(headers)):
            raise Refused(401, "the token is missing or wrong; open the address that `loadgauge serve` printed")
        limit = FILE_LIMIT if path in FILE_PATHS else JSON_LIMIT
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise Refused(400, "content-length is no number")
        if int(length) > limit:
            raise Refused(413, too_large(limit))
        return limit

    def is_token(self, text: str) -> bool:
        """Return whether the text is the token, compared in constant time."""
        return compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    def in_address(self, scope: Scope) -> bool:
        """Return whether the query string carries the token."""
        query = scope.get("query_string", b"").decode("latin-1")
        try:
            tokens = parse_qs(query, max_num_fields=20).get("token", [""])
        except ValueError:
            return False
        return self.is_token(tokens[0])

    def in_cookie(self, headers: dict[str, str]) -> bool:
        """Return whether the cookie carries the token."""
        try:
            jar = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return self.cookie in jar and self.is_token(jar[self.cookie].value)

    def hardened(self, scope: Scope, send: Send) -> Send:
        """Wrap `send` to add the security headers, and `no-store` where no cache policy is set."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if b"cache-control" not in names:
                    extra.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        return sending


def too_large(limit: int) -> str:
    """The error text for a body over the limit [bytes]."""
    return f"is larger than {limit // 2**20} MiB"


class Body:
    """The body of a request. Its bytes are counted as they arrive, because no header has to state their number.

    If the answer is ready before the whole body has arrived, the rest is read and discarded: a connection that is closed
    with unread bytes is reset, and the client would never see the answer.
    """

    def __init__(self, receive: Receive, headers: dict[str, str]) -> None:
        self.next, self.limit, self.seen = receive, JSON_LIMIT, 0
        self.complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        """Receive the next piece. Raises `Refused` (413) above the limit."""
        message = await self.next()
        self.count(message)
        if self.seen > self.limit:
            raise Refused(413, too_large(self.limit))
        return message

    def count(self, message: Message) -> None:
        """Record the size of a piece, and whether it is the last."""
        self.seen += len(message.get("body", b""))
        self.complete = self.complete or not message.get("more_body", False)

    def awaited(self, send: Send) -> Send:
        """Wrap `send` so that an answer ends only after the rest of the body has been read."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and not self.complete:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            elif message["type"] == "http.response.body" and not message.get("more_body") and not self.complete:
                await send({**message, "more_body": True})
                await self.drain()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        return sending

    async def drain(self) -> None:
        """Read and discard the rest of the body, up to `MOST_DRAINED` bytes and without long pauses."""
        with contextlib.suppress(TimeoutError):
            while not self.complete and self.seen <= MOST_DRAINED:
                async with asyncio.timeout(DRAIN_SECONDS):
                    self.count(await self.next())


async def refuse(error: Refused, send: Send, *, page: bool = False) -> None:
    """Send the answer for a refused request: its status, and one line as JSON; page: to read, for whoever opens the address."""
    line = html.escape(error.text) if page else json.dumps(error_body(error.text, "Refused"))
    body = f"<!doctype html><title>loadgauge</title><p>loadgauge: {line}</p>".encode() if page else line.encode()
    kind = b"text/html; charset=utf-8" if page else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
