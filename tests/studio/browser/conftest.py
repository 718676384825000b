"""The Studio in processes of its own, and Debian's Chromium, driven through it by Playwright as a person would.

A test that fails leaves a picture of its page in out/browser/.
"""

import base64
import dataclasses
import io
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tiny_engram.studio.gallery import Gallery
from tiny_engram.studio.job_folder import Progress, progress_lines
from tiny_engram.studio.jobs import JobStore, Taught
from tiny_engram.studio.library import Library
from tiny_engram.studio.ui.teach_tray import Tray
from tiny_engram.studio.workspace import Workspace

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEFT_OUT = "no Chromium was found; install it (Debian: apt install chromium) to run the browser tests"
FAILED = Path(__file__).resolve().parents[3] / "out" / "browser"
PATIENCE = 60_000  # milliseconds: two cores may be busy with other things
expect.set_options(timeout=PATIENCE)
# Gradio's client says so whenever it closes a stream of events, and has nothing more to close.
GRADIO_SAYS = ("Method not implemented.",)


class Window:
    """A window of the browser on an app: what a person does there, and what the console said meanwhile."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self._leaving = False
        page.on("console", lambda told: self._heard(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self._heard(str(error)))
        page.on("response", lambda given: self._heard(f"{given.status} of {given.url}") if given.status >= 400 else None)
        page.set_default_timeout(PATIENCE)
        page.set_default_navigation_timeout(PATIENCE)

    def _heard(self, text: str) -> None:
        if text not in GRADIO_SAYS and not self._leaving:
            self.complaints.append(text)

    def open(self) -> "Window":
        """Load the page, or load it again; back when it listens."""
        self.page.goto(self.url)
        self.page.wait_for_selector("body[data-ready=true]")
        return self

    def paint(self, scheme: Literal["light", "dark"]) -> None:
        """Light or dark, as a page that is loaded gets it: gradio puts one class on the body then, and does not follow the system later."""
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(
            """dark => {
              document.body.classList.toggle('dark', dark);
              getComputedStyle(document.body).color;
              return Promise.all(document.getAnimations().filter((each) => each instanceof CSSTransition).map((each) => each.finished));
            }""",
            scheme == "dark",
        )

    def reload(self) -> None:
        self._leaving = True  # what was on its way breaks off, and gradio's client says so
        self.page.reload()
        self._leaving = False
        self.page.wait_for_selector("body[data-ready=true]")

    def tab(self, name: str) -> None:
        """Open a tab by its title."""
        self.page.get_by_role("tab", name=name, exact=True).click()
        self.expect_tab(name)

    def expect_tab(self, name: str) -> None:
        expect(self.page.get_by_role("tab", name=name, exact=True)).to_have_attribute("aria-selected", "true")

    def find(self, css: str) -> Locator:
        return self.page.locator(css)

    def box(self, id: str) -> Locator:
        """The text box of a component."""
        return self.page.locator(f"#{id} textarea, #{id} input").first

    def type(self, id: str, text: str) -> None:
        self.box(id).fill(text)

    def click(self, id: str) -> None:
        self.page.locator(f"button#{id}").click()

    def choose(self, id: str, *files: Path) -> None:
        """Choose files by a button that uploads."""
        with self.page.expect_file_chooser() as asked:
            self.click(id)
        asked.value.set_files(files)

    def unfold(self, id: str) -> None:
        """Open an accordion that is closed."""
        self.page.locator(f"#{id} > button").click()

    def keep(self, name: str) -> None:
        """Keep a picture of the whole page, where $TINY_ENGRAM_SCREENSHOTS names a folder."""
        if folder := os.environ.get("TINY_ENGRAM_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    def told(self, text: str | re.Pattern[str]) -> None:
        """Wait for a toast that says so, and close all toasts."""
        expect(self.page.locator(".toast-body").filter(has_text=text).first).to_be_visible()
        for button in reversed(self.page.locator(".toast-close").all()):
            button.click(timeout=2_000, force=True)
        expect(self.page.locator(".toast-body")).to_have_count(0)


def _chromium() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(LEFT_OUT)
    return found


@pytest.fixture(scope="module")
def browser():
    """A browser for the tests of a file; as long as Playwright runs, nothing else may run an event loop in this thread."""
    path = _chromium()
    with sync_playwright() as playwright:
        # tests run as root in containers, where there is no sandbox and little shared memory
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def apps(forked):
    """apps(folder) -> the app on a folder and a free port, which is starting; ended at the end, having had nothing to complain of."""
    _chromium()
    started = []

    def start(folder: Path):
        with socket.socket() as tried:
            tried.bind(("127.0.0.1", 0))
            port = tried.getsockname()[1]
        started.append(forked.app("--data_dir", str(folder), port=port, log=folder.parent / "log"))
        return started[-1]

    yield start
    for app in started:
        app.send(signal.SIGTERM)
    codes = [app.ended(60) for app in started]
    for app, code in zip(started, codes, strict=True):
        app.kill()
        assert "Traceback" not in app.said and "unexpected" not in app.said, app.said
        assert code == 0, (code, app.said)


@pytest.fixture
def window(request, browser: Browser):
    """window(app, width=1440, height=900, dark=False) -> a Window on it."""
    contexts, opened, used = [], [], []

    def make(app, *, width: int = 1440, height: int = 900, dark: bool = False) -> Window:
        app.wait()
        used.append(app)
        scheme = "dark" if dark else "light"
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"))
        opened.append(Window(contexts[-1].new_page(), app.url))
        return opened[-1].open()

    yield make
    report = getattr(request.node, "report", None)
    for k, each in enumerate(opened):
        if report is None or report.failed:
            FAILED.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", request.node.name).strip("-")
            each.page.screenshot(path=FAILED / f"{name}-{k}.png", full_page=True)
            print(each.complaints, *used[k].said.splitlines()[-40:], sep="\n")
    for context in contexts:
        context.close()
    assert not (complaints := [line for each in opened for line in each.complaints]), complaints


@pytest.fixture
def looks():
    """looks(window) -> what is wrong with how its page looks now, as lines: overflow, contrast, controls without a name."""
    script = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")

    def judged(seen: Window) -> list[str]:
        assert seen.page.viewport_size is not None
        return seen.page.evaluate(script, seen.page.viewport_size["width"])

    return judged


# -- a Studio in which somebody has worked

LONG = "a concept whose name somebody has written without any thought of how wide a page may be, and-then-a-word-that-never-breaks-anywhere"
HOSTILE = "<img src=x onerror=alert(1)>&quot;"


@pytest.fixture(scope="session")
def furnished(apps, concept_of, picture_bytes, tmp_path_factory):
    """An app with two concepts (triggers zorblax and vimquat), a draft, pictures, a tray and jobs of each kind; texts are long or hostile.

    Tests may add to it, and take away what they have added.
    """
    folder = tmp_path_factory.mktemp("furnished") / "studio"
    with Workspace.open(folder) as workspace:
        library, gallery, tray, jobs = Library(workspace), Gallery(workspace), Tray(workspace), JobStore(workspace)
        thumbnail = "data:image/png;base64," + base64.b64encode(picture_bytes()).decode()
        recipe = {"step": 300, "pictures": 4, "note": HOSTILE}
        library.add(concept_of("zorblax", name=HOSTILE, aliases=("quib", "zor blax")).with_details(thumbnail=thumbnail, recipe=recipe))
        library.add(concept_of("vimquat", name=LONG, seed=1).with_details(recipe={"step": 20}))
        library.save_draft("mubble-zik", ("mubblezik",), "a thing of no particular kind")
        taught = []
        for k in range(3):
            picture = Image.open(io.BytesIO(picture_bytes(k, 128)))
            gallery.add(picture, {"prompt": f"{LONG} {HOSTILE}", "seed": k, "steps": 25, "guidance": 4.0, "width": 128, "height": 128})
            path = folder.parent / f"{LONG[:60]} {k}.png"
            picture.crop((0, 0, 128, 96 if k else 128)).save(path)
            taught.append(path)
        tray.add(str(path) for path in taught)
        tray.caption({tray.pictures[0].id: "a caption that does not say what it is of"})
        for state, message in (("failed", f"the base cannot be read: {LONG}"), ("paused", "paused at step 12"), ("cancelled", "")):
            job = jobs.create([Taught(path=path) for path in taught], "mubble-zik", class_word="thing")
            (jobs.folder(job.id) / "progress.jsonl").write_bytes(progress_lines([Progress(k, 1 / k, 0.2 * k) for k in range(1, 13)]))
            jobs.write(dataclasses.replace(jobs.state(job.id), state=state, step=12, loss=0.08, seconds=3.0, message=message))
    return apps(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.report = report
    return report
