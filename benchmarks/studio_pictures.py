"""The pictures of the four tabs in the documentation, taken of a Studio that has really been taught.

    python benchmarks/studio_pictures.py                        # docs/images/studio, some ten minutes on two cores

Teaches the duck and the octopus of assets/examples first, unless --data_dir has them from an earlier run, and then a unicorn as far as its
third sample picture, whose job is taken away again.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradio_client import Client, handle_file
from PIL import Image
from studio_app import browser, open_page, running_app
from studio_app import open_tab as show_tab
from tables import ROOT

from tiny_engram.studio.gallery import Gallery
from tiny_engram.studio.jobs import JobStore
from tiny_engram.studio.ui.teach_tray import Tray
from tiny_engram.studio.workspace import Workspace

if TYPE_CHECKING:
    from playwright.sync_api import Page

EXAMPLES = ROOT / "assets" / "examples"
TAUGHT = (("zed-quack", "duck", "duck"), ("tako-blip", "octopus", "jellyfish"))
LIVE = ("uni-blip", "unicorn", "horse")
WIDTH, HEIGHT = 1440, 1000
MOST_BYTES = 300_000
DRAWN = (
    ("a flat pizza and a 3d zed-quack on a white background", 3),
    ("a 3d tako-blip on a yellow background", 11),
    ("an outlined tako-blip on a pink background", 5),
    ("a 3d zed-quack on an orange background", 8),
)
PROMPT, SEED = "a 3d tako-blip on a red background", 7
MINUTES = 25


def captions(folder: Path) -> list[tuple[Path, str]]:
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    return [(folder / line["file_name"], line["text"]) for line in lines]


def teach(client: Client, trigger: str, subject: str, class_word: str, preset: str) -> None:
    """Until it is in the library; nothing where it is there. SystemExit where the job fails."""
    if any(each["trigger"] == trigger and not each["draft"] for each in client.predict(trigger, api_name="/concepts")):
        return
    pictures = captions(EXAMPLES / subject)
    told = client.predict(
        [handle_file(str(path)) for path, _ in pictures],
        trigger,
        [text for _, text in pictures],
        class_word=class_word,
        preset=preset,
        api_name="/train",
    )
    until = time.monotonic() + MINUTES * 60
    while told["state"] in ("queued", "running") and time.monotonic() < until:
        time.sleep(2)
        told = client.predict(told["job"], api_name="/train_status")
    if told["state"] != "done":
        raise SystemExit(f"{trigger} was not taught: {told['state']} at step {told['step']}, {told['message']}")
    print(f"{trigger}: {told['steps']} steps in {told['seconds']:.0f} s", flush=True)


def clean(folder: Path) -> None:
    """Take the half-taught job, its pictures in the tray and what was drawn away."""
    with Workspace.open(folder) as workspace:
        jobs = JobStore(workspace)
        for state in jobs.states():
            if jobs.job(state.id).trigger == LIVE[0]:
                jobs.delete(state.id)
        Tray(workspace).clear()
        gallery = Gallery(workspace)
        for entry in gallery.entries(1000):
            gallery.delete(entry.id)


def keep(page: Page, path: Path, *, height: int = HEIGHT) -> None:
    """The page's top, in as many colours as the bytes allow."""
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement && document.activeElement.blur()")
    # not the page as a whole, whose foot the browser would have to be stretched for
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(500)
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for colours in (256, 192, 128, 64):
        buffer = io.BytesIO()
        taken.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= MOST_BYTES:
            break
    path.write_bytes(buffer.getvalue())
    print(f"{path}: {taken.width} x {taken.height}, {buffer.tell():,} bytes, {colours} colours", flush=True)


def open_tab(page: Page, title: str) -> None:
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    show_tab(page, title)


def take_register(page: Page, path: Path) -> None:
    open_tab(page, "Register")
    page.fill("#register-trigger textarea, #register-trigger input", "kob-linar")
    page.fill("#register-aliases textarea, #register-aliases input", "koblinar")
    page.fill("#register-class-word textarea, #register-class-word input", "teapot")
    page.wait_for_selector("#register-teach:not([disabled])")
    page.get_by_role("button", name="Try it in a prompt").click()
    page.fill("#register-explain-prompt textarea", "a tako-blip beside two zed-quacks")
    page.wait_for_function("document.querySelector('#register-explain-rows').innerText.includes('zed-quack')")
    page.wait_for_timeout(500)
    keep(page, path, height=1500)


def take_teach(page: Page, path: Path) -> None:
    trigger, subject, class_word = LIVE
    open_tab(page, "Teach")
    page.fill("#teach-trigger textarea, #teach-trigger input", trigger)
    page.fill("#teach-class-word textarea, #teach-class-word input", class_word)
    pictures = captions(EXAMPLES / subject)
    for count, (file, _) in enumerate(pictures, 1):  # one by one, so that they lie in their order
        page.set_input_files("#teach-files input[type=file]", str(file))
        page.wait_for_function(f"document.querySelectorAll('#teach-tray textarea').length === {count}")
    boxes = page.locator("#teach-tray textarea")
    for number, (_, text) in enumerate(pictures):
        boxes.nth(number).fill(text.replace("{trigger}", trigger))
    page.wait_for_timeout(1500)
    page.get_by_label("Quick", exact=False).first.check()
    page.locator("#teach-start").click()
    page.wait_for_function("document.querySelectorAll('#teach-samples img').length >= 3", timeout=MINUTES * 60_000)
    page.wait_for_timeout(4000)
    keep(page, path, height=1500)


def take_create(page: Page, path: Path) -> None:
    open_tab(page, "Create")
    for trigger, _, _ in TAUGHT:
        button = page.locator("#create-shelf button[data-act=use]", has_text=trigger)
        if button.count():
            button.first.click()
            page.wait_for_selector(f"#create-shelf button[data-text='{trigger}']")
    page.get_by_label("New seed for each picture").uncheck()
    for prompt, seed in (*DRAWN, (PROMPT, SEED)):
        page.fill("#create-prompt textarea", prompt)
        page.get_by_label("Seed", exact=True).fill(str(seed))
        page.locator("#create-generate").click()
        page.wait_for_function("document.querySelector('#create-generate').innerText.includes('Drawing')")
        page.wait_for_function("document.querySelector('#create-generate').innerText.trim() === 'Generate'", timeout=120_000)
    page.wait_for_timeout(1000)
    keep(page, path, height=1180)


def take_library(page: Page, path: Path) -> None:
    open_tab(page, "Library")
    page.locator("#library-cards button.tl-open", has_text=TAUGHT[1][0]).click()
    page.wait_for_selector("#library-details table")
    page.wait_for_timeout(500)
    keep(page, path, height=1180)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data_dir", type=Path, default=ROOT / "out" / "studio-pictures", help="the Studio's folder, kept for another run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "studio")
    parser.add_argument("--preset", default="balanced", help="how the duck and the octopus are taught")
    parser.add_argument("--only", nargs="+", choices=("register", "teach", "create", "library"), help="not all four")
    args = parser.parse_args()
    wanted = args.only or ("create", "register", "library", "teach")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data_dir.exists():
        clean(args.data_dir)
    with running_app(args.data_dir) as app:
        client = Client(app.url, verbose=False)
        for trigger, subject, class_word in TAUGHT:
            teach(client, trigger, subject, class_word, args.preset)
        with browser() as opened:
            page: Any = opened.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            open_page(page, app.url)
            takes = {"register": take_register, "teach": take_teach, "create": take_create, "library": take_library}
            for name in wanted:
                takes[name](page, args.out / f"{name}.png")
        client.close()
    clean(args.data_dir)


if __name__ == "__main__":
    main()
