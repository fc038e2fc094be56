"""The page and its files: those in the package's folder `static`, and nothing else."""

import hashlib
import html
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parents[1] / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".map": "application/json",
}
"""Content types of the files that are served, by suffix."""
MARK = "__TOKEN__"
"""Placeholder of the token in `index.html`."""
BLANK = f'<!doctype html><title>loadgauge</title><meta name="loadgauge-token" content="{MARK}">'
"""The page if its files are missing."""


class Pages:
    """Serve the files from a list of their names, so that no address can lead anywhere else."""

    def __init__(self, token: str, port: int, folder: Path = FOLDER) -> None:
        self.token, self.port, self.folder = token, port, folder
        self.files: dict[str, Path] = {}

    def routes(self) -> list[Route]:
        """The routes of the page and of its files."""
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/index.html", self.index, methods=["GET"]),
            Route("/{name:path}", self.file, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        """Serve the page with the token in a meta element, and in a cookie for reloads without the token in the address."""
        path = self.folder / "index.html"
        text = path.read_text(encoding="utf-8") if path.is_file() else BLANK
        answer = Response(text.replace(MARK, html.escape(self.token)), media_type="text/html; charset=utf-8")
        answer.set_cookie(f"loadgauge-{self.port}", self.token, httponly=True, samesite="strict", path="/")
        return answer

    async def file(self, request: Request) -> Response:
        """Serve a file of the page; 304 if it has not changed. Raises `HTTPException` (404)."""
        name = request.path_params["name"].removeprefix("static/")
        if name not in self.files:
            self.files = listed(self.folder)
        path = self.files.get(name)
        if path is None or not path.is_file():
            raise HTTPException(404)
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[path.suffix], headers=headers)


def listed(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that may be served, by path relative to it. Links are left out."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix in TYPES
    }
