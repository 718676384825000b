"""What stands between a browser and the page: headers, refusals, and a bound on files that pages leave. Standard library only."""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["POLICY", "Guard", "PageFiles"]

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# Nothing from anywhere else. Gradio's page has inline scripts and compiles its templates, so those two cannot be forbidden.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
MOST_BODY = 1100 * 2**20  # bytes of one request: all pictures that one job may have, at once
# Parts that gradio answers to those who have not logged in, beside the page that asks for the password.
UNASKED = ("/gradio_api/cancel", "/gradio_api/heartbeat", "/gradio_api/reset", "/cancel", "/heartbeat", "/reset")
FORGOTTEN = ("/proxy=", "/stream/", "/dev/reload", "/monitoring", "/vibe", "/deep_link", "/custom_component", "/component_server_file")


class Guard:
    """ASGI middleware: the headers above on every answer, and no answer to what the page never asks.

    Refused are: names that are not this machine's where only it is listened to (another site's name that was made to point here), changes
    asked for by other sites' pages, files fetched from other servers through this one, parts of gradio that the Studio has no use for.
    """

    def __init__(self, app: Any, *, only_local: bool) -> None:
        self._app = app
        self._only_local = only_local

    @classmethod
    def middleware(cls, *, only_local: bool) -> Any:
        """As an entry for the application's list."""
        from starlette.middleware import Middleware

        return Middleware(cls, only_local=only_local)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                return  # the page has none
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                ours = {name for name, _ in HEADERS}
                message = {**message, "headers": [*(h for h in message.get("headers", ()) if h[0].lower() not in ours), *HEADERS]}
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._only_local and name.lower() not in LOCAL_NAMES:
            return 421, "this Studio answers to localhost and 127.0.0.1 alone; start it with --host to reach it by another name"
        origin = headers.get(b"origin")
        foreign = headers.get(b"sec-fetch-site") == "cross-site" or (origin is not None and urlsplit(origin).netloc.lower() != host.lower())
        if foreign and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            return 403, "this was asked for by a page of another site"
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY:
            return 413, "too much at once; send fewer or smaller files"
        path = scope["path"]
        if "/file=http:" in path or "/file=https:" in path or any(part in path for part in FORGOTTEN):
            return 404, "not found"
        if path.startswith(UNASKED) and _is_guest(scope.get("app"), headers.get(b"cookie", "")):
            return 401, "log in first"
        return None


def _is_guest(app: Any, cookies: str) -> bool:
    """Is there a password, and none was given? app: gradio's, which knows the tokens of those who gave it."""
    if getattr(app, "auth", None) is None:
        return False
    return not any(part.strip().partition("=")[2] in app.tokens for part in cookies.split(";"))


async def _answer(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


class PageFiles:
    """The folder in which gradio keeps what pages sent and were sent, bounded in count and bytes: the oldest go."""

    def __init__(self, folder: Path, *, keep: int = 256, keep_bytes: int = 256 * 2**20, young: float = 120.0, every: float = 5.0) -> None:
        """keep, keep_bytes: files and their bytes. young: seconds for which a file stays whatever there is (to twice the bounds)."""
        self.folder = folder
        self._keep, self._keep_bytes, self._young, self._every = keep, keep_bytes, young, every
        folder.mkdir(parents=True, exist_ok=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page files", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and remove all of it."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self.prune()
            except OSError:
                logger.exception("files of pages could not be cleaned up, trying again")

    def prune(self) -> None:
        """Remove the oldest beyond the bounds, with the folders that are empty then."""
        found = []
        for folder, _, names in os.walk(self.folder):  # which passes over what goes meanwhile
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    about = path.stat()
                    found.append((max(about.st_mtime, about.st_ctime), about.st_size, path))  # a copy may keep its original's date
        count, size, now = 0, 0, time.time()
        for changed, length, path in sorted(found, reverse=True):
            count, size = count + 1, size + length
            factor = 2 if now - changed < self._young else 1
            if count > factor * self._keep or size > factor * self._keep_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()
                    path.parent.rmdir()
