"""The Studio as its users have it, for studio.py and studio_pictures.py: the app in a process of its own, and a real Chromium.

Imports playwright (of the dev extra) when a browser is asked for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tables import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS, STOP_SECONDS = 180.0, 60.0
INSIDE = {"Register": "#register-trigger", "Teach": "#teach-start", "Create": "#create-generate", "Library": "#library-cards"}
READY = "document.body && document.body.dataset.ready === 'true'"


@dataclass(frozen=True)
class App:
    """A Studio that answers: where, when it said so (time.time), and the seconds from its start until then."""

    url: str
    printed_at: float
    start_seconds: float
    process: subprocess.Popen[str]


def _lines(process: subprocess.Popen[str], said: queue.Queue[tuple[float, str] | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.put((time.time(), line))
    said.put(None)


@contextlib.contextmanager
def running_app(data_dir: Path, *options: str) -> Iterator[App]:
    """`tiny-engram app` on a folder, from the address it prints to Ctrl-C. SystemExit where it does not start; its stderr is ours."""
    began = time.time()
    command = [sys.executable, str(ROOT / "app.py"), "--data_dir", str(data_dir), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    said: queue.Queue[tuple[float, str] | None] = queue.Queue()
    threading.Thread(target=_lines, args=(process, said), daemon=True).start()
    try:
        while True:
            try:
                told = said.get(timeout=max(0.1, began + START_SECONDS - time.time()))
            except queue.Empty:
                raise SystemExit(f"the app did not print its address within {START_SECONDS:.0f} s") from None
            if told is None:
                raise SystemExit(f"the app ended with code {process.wait()} before it printed its address")
            found = re.search(r"http://\S+", told[1])
            if found:
                break
        yield App(found[0], told[0], told[0] - began, process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium, without a window. SystemExit where there is none."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise SystemExit(f"no {' or '.join(CHROMIUM)} on this machine; install Debian's package chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        try:
            yield opened
        finally:
            opened.close()


def open_page(page: Page, url: str) -> None:
    """Until the page listens. A page polls, so that its network is never at rest."""
    page.goto(url)
    page.wait_for_function(READY, timeout=60_000)


def open_tab(page: Page, title: str) -> None:
    """Until it is shown, and has had a moment for what it reads from the server then."""
    page.get_by_role("tab", name=title, exact=True).click()
    page.wait_for_selector(INSIDE[title], state="visible")
    page.wait_for_timeout(1000)
