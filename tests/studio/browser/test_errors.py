"""What goes wrong in the browser, and what a person is told of it: one line, and the page goes on."""

import pickle
import struct
import zlib

import pytest
from playwright.sync_api import Route, expect


def _bomb() -> bytes:
    """A PNG of 144 bytes or so that says it has 30,000 x 30,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def test_a_trigger_that_cannot_be(furnished, window):
    seen = window(furnished)
    report = seen.find("#register-report")
    ready = [seen.find(f"button#register-{name}") for name in ("teach", "save")]

    def is_ready(yes: bool) -> None:
        for button in ready:
            expect(button).to_be_enabled() if yes else expect(button).to_be_disabled()

    is_ready(False)
    seen.type("register-trigger", "grizzenfop")
    is_ready(True)
    seen.type("register-trigger", "   ")
    is_ready(False)
    for taken in ("zorblax", "Zorblax", "quib"):  # a trigger, in another case, and an alias
        seen.type("register-trigger", taken)
        expect(report).to_contain_text("Taken: choose another trigger")
        expect(report).to_contain_text("<img src=x onerror=alert(1)>")  # the name of the concept, as text
        is_ready(False)
        seen.type("register-trigger", "grizzenfop")
        is_ready(True)
    seen.type("register-trigger", "art")
    expect(report.get_by_text("word").first).to_be_visible()  # warned of, and allowed
    is_ready(True)
    seen.type("register-trigger", "x" * 121)
    expect(report).to_contain_text("has 121 characters, expected at most 120")
    is_ready(False)
    seen.type("register-trigger", "<b id=hurt>bold</b>")
    expect(report).to_contain_text("<b id=hurt>")
    expect(seen.find("#hurt")).to_have_count(0)
    seen.type("register-trigger", "grizzenfop")
    seen.type("register-aliases", ", ".join(f"alias{k}" for k in range(9)))
    expect(report).to_contain_text("9 aliases, expected at most 8")
    is_ready(False)
    seen.type("register-aliases", "")
    seen.click("register-suggest")
    expect(seen.box("register-trigger")).not_to_have_value("grizzenfop")
    is_ready(True)


def test_pictures_and_settings_that_cannot_be_taught(furnished, window, picture_bytes, tmp_path):
    files = {
        "text.png": b"this is no picture",
        "empty.png": b"",
        "half.png": picture_bytes(7)[:2000],
        "bomb.png": _bomb(),
        "<img src=x onerror=alert(2)": b"nor is this",
        "good.png": picture_bytes(8),
    }
    for name, blob in files.items():
        (tmp_path / name).write_bytes(blob)
    seen = window(furnished)
    seen.tab("Teach")
    expect(seen.find("#teach-tray .tt-card")).to_have_count(3)
    expect(seen.find("#teach-tray .tt-warn:visible")).to_have_count(0)  # no trigger, so no caption lacks it

    # what is dropped
    seen.find("#teach-files input[type=file]").set_input_files([tmp_path / name for name in files])
    refused = seen.find("#teach-refused")
    for name in files:
        if name != "good.png":
            expect(refused).to_contain_text(name.strip("<>"))  # gradio takes these out of names that are sent
    for told in ("not a picture", "the file is empty", "damaged picture", "more than 50,000,000 pixels"):
        expect(refused).to_contain_text(told)
    expect(seen.find("#teach-tray .tt-card")).to_have_count(4)
    expect(seen.find("#teach-tray")).to_contain_text("good.png")
    seen.keep("teach-refused")

    # what is typed
    seen.click("teach-start")
    seen.told("there is no trigger")
    seen.type("teach-trigger", "vimquat")
    expect(seen.find("#teach-report")).to_contain_text("has the tokens of")
    expect(seen.find("#teach-tray .tt-warn:visible")).to_have_count(1)
    seen.type("teach-trigger", "y" * 130)
    expect(seen.find("#teach-report")).to_contain_text("expected at most 120")
    seen.click("teach-start")
    seen.told("has 130 characters, expected at most 120")
    seen.type("teach-trigger", "grizzenfop")
    seen.click("teach-start")
    seen.told("caption")
    seen.find("#teach-tray textarea").first.fill("")
    expect(seen.find("#teach-tray .tt-warn:visible")).to_have_count(0)

    # numbers out of bounds
    seen.unfold("teach-advanced")
    field = seen.find("#teach-advanced").get_by_label("Steps").first
    for value, told in (("99999", "Steps is 99,999, expected at most 20,000"), ("-3", "Steps is -3"), ("", "Steps is empty")):
        field.fill(value)
        expect(seen.find("#teach-time")).to_contain_text(told)
        seen.click("teach-start")
        seen.told(told)
    field.fill("40")
    expect(seen.find("#teach-time")).to_contain_text("Takes about")
    seen.find("#teach-advanced textarea").last.fill("a picture without it")
    seen.click("teach-start")
    seen.told("does not hold {trigger}")
    seen.find("#teach-advanced textarea").last.fill("a {trigger}")

    # cancelling: asked first, and what was learnt can be taken up or deleted
    field.fill("5000")
    seen.find("#teach-advanced").get_by_label("Sample every").first.fill("0")
    expect(seen.find("#teach-time")).to_contain_text("Takes about")
    seen.click("teach-start")
    seen.told("is in the queue")
    live = seen.find("#teach-live .tt-live")
    expect(live).to_contain_text("grizzenfop")
    seen.click("teach-start")
    seen.told("is being taught already")
    live.get_by_role("button", name="Cancel").click()
    seen.page.get_by_role("button", name="Go back").click()
    expect(live).to_contain_text("grizzenfop")
    live.get_by_role("button", name="Cancel").click()
    seen.page.get_by_role("button", name="Cancel it").click()
    job = seen.find("#teach-jobs .tt-job").filter(has_text="grizzenfop")
    expect(job).to_contain_text("cancelled")
    job.get_by_role("button", name="Delete").click()
    seen.page.get_by_role("button", name="Delete it").click()
    expect(job).to_have_count(0)

    # an empty tray
    seen.find("#teach-tray").get_by_role("button", name="Take all out").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Take all out").click()
    expect(seen.find("#teach-tray")).to_contain_text("No pictures yet")
    seen.click("teach-start")
    seen.told("there are no pictures")


def test_pictures_that_cannot_be_drawn(furnished, window, picture_bytes, tmp_path):
    seen = window(furnished)
    seen.tab("Create")
    seen.click("create-generate")
    seen.told("the prompt is empty")
    seen.type("create-prompt", "a duck " * 400)
    assert len(seen.box("create-prompt").input_value()) == 2000
    seen.type("create-prompt", "a duck")
    seen.find("#create-random input").uncheck()
    seen.unfold("create-more")
    for id, value, told in (("seed", "-1", "-1"), ("seed", "4294967296", "4294967296"), ("width", "100", "multiple of")):
        before = seen.box(f"create-{id}").input_value()
        seen.type(f"create-{id}", value)
        seen.click("create-generate")
        seen.told(told)
        seen.type(f"create-{id}", before)
    expect(seen.find("button#create-generate")).to_be_enabled()

    # cancelling leaves nothing behind
    before = seen.find("#create-history .tc-thumb").count()
    seen.find("#create-steps input[type=number]").fill("150")
    seen.find("#create-steps input[type=number]").press("Tab")
    seen.click("create-generate")
    expect(seen.find("#create-progress")).to_contain_text("of 150")
    seen.click("create-cancel")
    expect(seen.find("button#create-generate")).to_have_text("Generate")
    expect(seen.find("button#create-generate")).to_be_enabled()
    expect(seen.find("#create-history .tc-thumb")).to_have_count(before)
    expect(seen.find(".toast-body")).to_have_count(0)

    # settings of a picture that has none
    foreign = tmp_path / "foreign.png"
    foreign.write_bytes(picture_bytes(3))
    seen.choose("create-upload", foreign)
    seen.told("the picture carries no settings")
    foreign.write_bytes(b"no picture at all")
    seen.choose("create-upload", foreign)
    seen.told("picture")


def test_files_and_names_that_the_library_refuses(furnished, window, tmp_path):
    seen = window(furnished)
    seen.tab("Library")
    cards = seen.find("#library-cards .tl-card")
    expect(cards).to_have_count(3)
    wrong = tmp_path / "<img src=x onerror=alert(3)>.safetensors"
    for blob in (pickle.dumps({"a": 1}), b"", struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2**40) + b"{}"):
        wrong.write_bytes(blob)
        seen.choose("library-import", wrong)
        seen.told("safetensors")
    expect(cards).to_have_count(3)

    cards.filter(has_text="zorblax").locator(".tl-open").click()
    expect(seen.find("#library-title .tl-title")).to_have_text("<img src=x onerror=alert(1)>&quot;")
    with seen.page.expect_download() as given:
        seen.find("#library-export").click()
    given.value.save_as(tmp_path / "again.safetensors")
    seen.choose("library-import", tmp_path / "again.safetensors")
    seen.told("is in the library already")
    expect(cards).to_have_count(3)

    seen.unfold("library-names")
    seen.type("library-name", "  ")
    seen.click("library-rename")
    seen.told("expected 1 to")
    seen.type("library-alias", "")
    seen.click("library-alias-add")
    seen.told("alias")
    seen.type("library-alias", "zorblax")
    seen.click("library-alias-add")
    seen.told("zorblax")
    seen.type("library-search", "nothing is called this <b>")
    expect(seen.find("#library-cards")).to_contain_text("Nothing here is called “nothing is called this <b>”")
    seen.type("library-search", "vimq")
    expect(cards).to_have_count(1)


def test_a_page_that_was_overtaken_by_another(furnished, window):
    first, second = window(furnished), window(furnished)
    first.type("register-trigger", "tulver-nib")
    first.click("register-save")
    first.told("is a draft now")
    expect(second.find("#register-drafts")).to_contain_text("tulver-nib")  # told by the server
    first.find("#register-drafts li").filter(has_text="tulver-nib").get_by_role("button", name="Delete").click()
    expect(first.find("#register-drafts")).not_to_contain_text("tulver-nib")
    expect(second.find("#register-drafts")).not_to_contain_text("tulver-nib")


def test_an_answer_that_is_late_takes_back_nothing_that_was_typed(furnished, window):
    seen = window(furnished)
    held: list[Route] = []
    holding = True
    seen.page.route("**/gradio_api/queue/data*", lambda route: held.append(route) if holding else route.continue_())
    with seen.page.expect_request("**/gradio_api/queue/data*"):
        seen.page.get_by_role("tab", name="Teach", exact=True).click()
    seen.expect_tab("Teach")
    seen.type("teach-trigger", "belmo-fa")
    expect(seen.find("#teach-report")).to_contain_text("· belmo-fa")
    holding = False
    assert held
    for route in held:
        route.continue_()
    seen.page.wait_for_timeout(1_000)  # what would take it back has come by then
    expect(seen.find("#teach-report")).to_contain_text("· belmo-fa")
    assert seen.box("teach-trigger").input_value() == "belmo-fa"
    seen.reload()
    expect(seen.box("teach-trigger")).to_have_value("belmo-fa")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_error_looks_right_on_a_narrow_page(furnished, window, looks, dark):
    seen = window(furnished, width=390, dark=dark)
    seen.tab("Create")
    seen.click("create-generate")
    expect(seen.find(".toast-body")).to_be_visible()
    seen.page.wait_for_timeout(600)  # it comes in by and by
    seen.keep(f"toast-{'dark' if dark else 'light'}")
    assert not looks(seen)
    seen.told("the prompt is empty")
