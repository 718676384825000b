"""One concept's life in the browser: registered, taught, drawn, shared, deleted and brought back. Nothing stands in for anything."""

import base64
import io
import re

import pytest
from PIL import Image
from playwright.sync_api import expect

from tiny_engram import Concept

TRIGGER = "zed-quack"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("story") / "studio"


@pytest.fixture(scope="module")
def app(apps, folder):
    return apps(folder)


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_a_page_with_nothing_on_it_says_what_to_do(app, window, looks, width):
    seen = window(app, width=width, dark=width == 390)
    empty = {
        "Register": (("#register-report", ""), ("#register-drafts", "No drafts")),
        "Teach": (("#teach-tray", "No pictures yet"), ("#teach-jobs", "No job yet")),
        "Create": (("#create-stage", "Your picture appears here"), ("#create-shelf", "There is no concept yet")),
        "Library": (("#library-cards", "Your library is empty"), ("#library-title", "Choose a card")),
    }
    for tab, parts in empty.items():
        seen.tab(tab)
        for css, text in parts:
            expect(seen.find(css)).to_contain_text(text)
        for scheme in ("dark", "light"):
            seen.paint(scheme)
            seen.keep(f"empty-{tab.lower()}-{width}-{scheme}")
            assert not (wrong := looks(seen)), f"{tab}, {scheme}: {wrong}"


def _pixels(uri: str) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).tobytes()


def test_a_concept_from_its_trigger_to_its_file_and_back(app, folder, window, repo_root, tmp_path):
    seen = window(app)
    page = seen.page

    # register
    report = seen.find("#register-report")
    expect(seen.find("button#register-teach")).to_be_disabled()
    seen.box("register-trigger").press_sequentially(TRIGGER)
    expect(report.locator(".te-token").first).to_be_visible()
    expect(seen.find("button#register-teach")).to_be_enabled()
    seen.type("register-aliases", "zed quack")
    seen.type("register-class-word", "duck")
    seen.click("register-save")
    seen.told("is a draft now")
    expect(seen.find("#register-drafts")).to_contain_text(TRIGGER)
    seen.click("register-teach")

    # teach
    seen.expect_tab("Teach")
    expect(seen.box("teach-trigger")).to_have_value(TRIGGER)
    expect(seen.box("teach-class-word")).to_have_value("duck")
    pictures = sorted((repo_root / "assets" / "examples" / "duck").glob("*.png"))[:2]
    seen.find("#teach-files input[type=file]").set_input_files(pictures)
    expect(seen.find("#teach-tray .tt-card")).to_have_count(2)
    seen.find("#teach-tray textarea").first.fill(f"a photo of {TRIGGER}")
    seen.find("#teach-presets label").filter(has_text="Quick").click()
    expect(seen.find("#teach-time")).to_contain_text("Takes about")
    seen.unfold("teach-advanced")
    for label, value in (("Steps", "24"), ("Pictures a step", "1"), ("Sample every", "0")):
        page.locator("#teach-advanced").get_by_label(label).first.fill(value)
    expect(seen.find("#teach-time")).to_contain_text("second")
    seen.find("#teach-tray textarea").nth(1).fill(f"a toy {TRIGGER}")
    seen.click("teach-start")  # at once: what was just typed is taught too
    seen.told("is in the queue")
    (captions,) = folder.glob("jobs/*/**/metadata.jsonl")
    assert "a toy " in captions.read_text()

    # a reload in the middle of it
    live = seen.find("#teach-live .tt-live")
    expect(live.locator(".tt-facts")).to_contain_text(re.compile(r"step [1-9]\d* of 24"))
    seen.reload()
    seen.tab("Teach")
    expect(live).to_contain_text(TRIGGER)
    expect(live).to_contain_text("of 24")
    expect(seen.box("teach-trigger")).to_have_value(TRIGGER)
    expect(seen.find("#teach-tray .tt-card")).to_have_count(2)
    expect(seen.find("#teach-tray textarea").first).to_have_value(f"a photo of {TRIGGER}")
    live.get_by_role("button", name="Pause").click()
    jobs = seen.find("#teach-jobs .tt-job")
    expect(jobs).to_contain_text("paused")
    seen.reload()
    seen.tab("Teach")
    expect(jobs).to_contain_text("paused")
    jobs.get_by_role("button", name="Resume").click()
    seen.told("is taught")
    expect(jobs).to_contain_text("done")

    # create
    jobs.get_by_role("button", name="Use it").click()
    seen.expect_tab("Create")
    shelf = seen.find("#create-shelf")
    shelf.get_by_role("button", name=f"Put {TRIGGER} into the prompt").click()
    expect(seen.box("create-prompt")).to_have_value(TRIGGER)
    seen.box("create-prompt").press_sequentially(" on a beach")
    expect(seen.find("#create-highlight mark.tc-fires")).to_have_text(TRIGGER)
    expect(seen.find("#create-highlight")).to_contain_text("Will fire")
    shelf.get_by_role("slider").press("ArrowLeft")
    expect(shelf.locator("output")).to_have_text("0.95")
    seen.unfold("create-more")
    seen.find("#create-steps input[type=number]").fill("3")
    seen.find("#create-random input").uncheck()
    seen.type("create-seed", "7")
    seen.click("create-generate")
    figures = seen.find("#create-stage figure")
    expect(figures).to_have_count(3)
    expect(seen.find("#create-stage")).to_contain_text("fired")
    expect(seen.find("#create-history .tc-thumb")).to_have_count(1)
    first = figures.first.locator("img").get_attribute("src")
    seen.reload()
    seen.tab("Create")
    expect(seen.box("create-prompt")).to_have_value(f"{TRIGGER} on a beach")
    seen.find("#create-history .tc-thumb").click()
    expect(figures.first.locator("img")).to_have_attribute("src", str(first))
    seen.click("create-reuse")
    seen.told("the settings are filled in")
    seen.click("create-generate")
    expect(seen.find("#create-history .tc-thumb")).to_have_count(2)
    expect(figures).to_have_count(3)
    again = figures.first.locator("img").get_attribute("src")
    assert _pixels(str(again)) == _pixels(str(first))  # strength and seed are those of the picture

    # export
    seen.tab("Library")
    card = seen.find("#library-cards .tl-card")
    expect(card).to_have_count(1)  # its draft went when it was taught
    expect(card).to_contain_text("24 steps")
    card.locator(".tl-open").click()
    expect(seen.find("#library-title .tl-title")).to_have_text(TRIGGER)
    with page.expect_download() as given:
        seen.find("#library-export").click()
    assert given.value.suggested_filename == f"{TRIGGER}.safetensors"
    file = tmp_path / given.value.suggested_filename
    given.value.save_as(file)
    made = Concept.load(file)
    assert made.trigger == TRIGGER and made.aliases == ("zed quack",)

    # delete, undo, delete, import
    seen.click("library-delete")
    expect(card).to_have_count(0)
    seen.find("#library-undo").get_by_role("button", name="Undo").click()
    seen.told("is back")
    expect(card).to_have_count(1)
    card.locator(".tl-open").click()
    seen.click("library-delete")
    expect(card).to_have_count(0)
    expect(seen.find("#library-cards")).to_contain_text("Your library is empty")
    seen.choose("library-import", file)
    seen.told("is in the library")
    expect(card).to_have_count(1)
    expect(card).to_contain_text(TRIGGER)
    seen.reload()
    seen.tab("Library")
    expect(card).to_contain_text(TRIGGER)
