"""Serving the page: what is listened to, what is refused, what is cleaned up; and the command `tiny-engram app`.

Importing it is light: gradio, and the rest of the Studio, are imported when it serves. What guards the page is in `guarding`.
"""

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import MOST_FILE
from tiny_engram.studio.guarding import Guard, PageFiles

if TYPE_CHECKING:
    from tiny_engram.studio.studio import Studio

__all__ = ["Served", "add_arguments", "main", "read_auth", "serve"]

MOST_SESSIONS = 64
PORTS = range(7860, 7960)
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Auth = Sequence[tuple[str, str]]


class Served:
    """A page that answers at `url`. `close` (once is enough) stops listening; the studio stays open."""

    def __init__(self, url: str, stop: Callable[[], None]) -> None:
        self.url = url
        self._stop: Callable[[], None] | None = stop

    def close(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settle_environment(files: Path) -> Callable[[], None]:
    """What gradio reads from the environment, for as long as it serves; returns what puts it back."""
    wanted = {
        "GRADIO_TEMP_DIR": str(files),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_ALLOWED_PATHS": "",
        "GRADIO_SHARE": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)

    def put_back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return put_back


def serve(
    studio: "Studio",
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    auth: Auth | None = None,
    inbrowser: bool = False,
) -> Served:
    """Show the page of a studio that is open; returns when it answers. One page a process.

    host: 127.0.0.1 is this machine alone. port: None takes the first that is free from 7860. auth: (user, password) pairs who may come in;
    None lets everybody in who reaches the port. Raises TinyEngramError: gradio is missing, the port is taken or may not be used.
    """
    need_gradio()
    from tiny_engram.studio.workspace import new_id

    files = PageFiles(studio.workspace.tmp / f"pages-{new_id()}")
    put_back = _settle_environment(files.folder)
    try:
        from tiny_engram.studio.ui.page import build_page
        from tiny_engram.studio.ui.theme import look

        page = build_page(studio)
        # Pictures are drawn one by one whatever waits here; other events have queues of their own.
        page.queue(max_size=128, default_concurrency_limit=8, api_open=True)
        local = host in LOOPBACK
        _, url, _ = page.launch(
            server_name=host,
            server_port=port if port is not None else _free_port(host),
            auth=list(auth) if auth else None,
            auth_message="Tiny-Engram Studio",
            inbrowser=inbrowser,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            show_error=False,
            # What handlers give to a browser is copied from here; nothing else of the server is served.
            allowed_paths=[str(studio.workspace.tmp)],
            max_file_size=MOST_FILE,
            state_session_capacity=MOST_SESSIONS,
            max_threads=40,
            enable_monitoring=False,
            mcp_server=False,
            pwa=False,
            ssr_mode=False,
            run_history=False,
            footer_links=["api"],
            strict_cors=True,
            app_kwargs={"middleware": [Guard.middleware(only_local=local)], "openapi_url": None, "docs_url": None, "redoc_url": None},
            **look(),
        )
    except OSError as error:
        put_back()
        raise TinyEngramError(f"cannot listen at {host}:{port or PORTS.start} ({error}); choose another --port or --host") from error
    except BaseException:
        put_back()
        raise
    files.start()

    def stop() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            page.close(verbose=False)
        files.close()
        put_back()

    return Served(url.rstrip("/"), stop)


def _free_port(host: str) -> int:
    """The first of PORTS that nobody listens at. Raises TinyEngramError."""
    import socket

    for port in PORTS:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((host, port))
                return port
            except OSError as error:
                if error.errno in (13, 99) or isinstance(error, socket.gaierror):
                    raise TinyEngramError(f"cannot listen at {host} ({error.strerror}); choose another --host") from error
    raise TinyEngramError(f"no free port from {PORTS.start} to {PORTS.stop - 1}; choose one with --port")


def need_gradio() -> None:
    """Raises TinyEngramError where gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise TinyEngramError("the Studio needs gradio; install it with: pip install 'tiny-engram[app]'")


def read_auth(text: str) -> list[tuple[str, str]]:
    """USER:PASSWORD, or a file with one such line for each user. Raises TinyEngramError, which does not repeat passwords."""
    path = Path(text)
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else [text]
    except (OSError, UnicodeDecodeError) as error:
        raise TinyEngramError(f"--auth {text!r}: cannot be read ({error}); expected a text file of USER:PASSWORD lines") from error
    pairs = []
    for number, line in enumerate((line for line in lines if line.strip()), 1):
        user, colon, password = line.strip().partition(":")
        if not (colon and user.strip() and password):
            raise TinyEngramError(f"--auth: entry {number} is not USER:PASSWORD; write both, or name a file with one such line a user")
        pairs.append((user.strip(), password))
    if not pairs:
        raise TinyEngramError(f"--auth {text!r}: an empty file, expected one USER:PASSWORD a line")
    return pairs


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 1 to 65535")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tiny-engram app`, beside those of the model."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is every network (default: this machine alone)")
    parser.add_argument("--port", type=_port, help="port to listen at (default: the first that is free from 7860)")
    parser.add_argument(
        "--data_dir",
        type=Path,
        help="folder of concepts, jobs and pictures (default: $TINY_ENGRAM_HOME, or tiny-engram in the user's data folder)",
    )
    parser.add_argument("--auth", metavar="FILE|USER:PASSWORD", help="who may come in; a file has one USER:PASSWORD a line")
    parser.add_argument("--open", action="store_true", help="open it in the browser")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second one of them ends the process at once."""
    ended = threading.Event()

    def end(number: int, _frame: Any) -> None:
        ended.set()
        signal.signal(number, signal.SIG_DFL)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield ended
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main(args: argparse.Namespace) -> int:
    """Open the studio, serve it until a signal comes, close it; the exit code. Raises TinyEngramError for a user's error."""
    need_gradio()
    auth = read_auth(args.auth) if args.auth else None
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with _ended_by_signals() as ended:
        from tiny_engram.studio.studio import Studio

        print("Tiny-Engram Studio: loading the base ...", file=sys.stderr, flush=True)
        with Studio.open(args.data_dir, model=args.model, dtype=args.dtype, device=args.device) as studio:
            if ended.is_set():
                return 0
            with serve(studio, host=args.host, port=args.port, auth=auth, inbrowser=args.open) as served:
                if args.host not in LOOPBACK and auth is None:
                    print(f"tiny-engram: everyone who reaches {args.host} can use it; --auth asks for a password", file=sys.stderr)
                print(f"Tiny-Engram Studio: {served.url}  (files in {studio.workspace.root}; Ctrl-C ends it)", flush=True)
                while not ended.wait(1.0):
                    pass
                print("tiny-engram: closing; a running job stops at a checkpoint", file=sys.stderr, flush=True)
    return 0
