"""The Teach tab's tray: pictures, captions and the form on disk, over restarts, kills and damage; and pictures as teaching sees them."""

import io

import pytest
from PIL import Image

gr = pytest.importorskip("gradio")

from tiny_engram.studio.errors import StudioError  # noqa: E402
from tiny_engram.studio.presets import PRESETS  # noqa: E402
from tiny_engram.studio.ui.teach_form import FIELDS, options_of, values_of  # noqa: E402
from tiny_engram.studio.ui.teach_pictures import crop_box, crop_uri, sample_uri, whole_uri  # noqa: E402
from tiny_engram.studio.ui.teach_tray import Tray, filled, unfilled  # noqa: E402
from tiny_engram.studio.uploads import Limits  # noqa: E402


@pytest.fixture
def two(picture_bytes):
    return [("a.png", picture_bytes(1)), ("b.jpg", picture_bytes(2, format="JPEG"))]


def test_the_tray_is_there_again_after_a_restart(workspace, tray, two):
    assert tray.add(two) == (2, ())
    first, second = tray.pictures
    tray.caption({first.id: "a zed-quack on a table"}, "zed-quack")
    tray.keep(trigger="zed-quack", aliases="zq", class_word="mug", preset="quick", options={"max_train_steps": 7})
    again = Tray(workspace)
    assert again.pictures == tray.pictures and again.form == tray.form
    assert [p.name for p in again.pictures] == ["a.png", "b.jpg"]
    assert [t.caption for t in again.taught()] == ["a {trigger} on a table", ""]
    assert again.path(second.id).is_file()


def test_bad_files_are_named_and_the_others_taken(tray, picture_bytes, two):
    turned = Image.new("RGB", (30, 10), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", exif=exif)
    clear = io.BytesIO()
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(clear, "PNG")
    files = [("notes.txt", b"not a picture"), ("turned.jpg", buffer.getvalue()), ("empty.png", b""), ("clear.png", clear.getvalue())]
    count, refused = tray.add([*files, ("cut.png", picture_bytes(3)[:200])])
    assert count == 2 and [name for name, _ in refused] == ["notes.txt", "empty.png", "cut.png"]
    upright, white = tray.pictures
    assert (upright.width, upright.height) == (10, 30)
    with Image.open(tray.path(white.id)) as opened:
        assert opened.convert("RGB").getpixel((5, 5)) == (255, 255, 255)


def test_the_tray_has_one_bound_for_all_uploads(workspace, picture_bytes):
    tray = Tray(workspace, Limits(files=3))
    tray.add([(f"{k}.png", picture_bytes(k)) for k in range(2)])
    count, refused = tray.add([(f"{k}.png", picture_bytes(k)) for k in range(2, 5)])
    assert count == 1 and len(refused) == 2 and all("more than 3 pictures" in why for _, why in refused)
    count, refused = tray.add([("more.png", picture_bytes(9))])
    assert count == 0 and "more than 3 pictures" in refused[0][1]


def test_a_kill_loses_no_picture_and_brings_none_back(workspace, tray, two, picture_bytes):
    tray.add(two)
    first, second = tray.pictures
    lost = tray.folder / f"{'ab' * 8}.png"
    lost.write_bytes(picture_bytes(5))  # taken, and not written down yet
    (tray.folder / ".x.sent.tmp").write_bytes(b"half")
    (tray.folder / f"{first.id}.png").unlink()  # removed, and still written down
    again = Tray(workspace)
    assert [p.id for p in again.pictures] == [second.id, "ab" * 8]
    assert not list(tray.folder.glob(".*.tmp"))


def test_a_damaged_tray_keeps_its_pictures(workspace, tray, two):
    tray.add(two)
    for damage in ("{", '{"pictures": 3, "form": []}', '{"pictures": [{"id": "../../x"}, 4, null], "form": {"trigger": 3, "preset": "x"}}'):
        (tray.folder / "tray.json").write_text(damage)
        again = Tray(workspace)
        assert {p.id for p in again.pictures} == {p.id for p in tray.pictures} and again.form.preset == "balanced"


def test_pictures_are_taken_out(workspace, tray, two):
    tray.add(two)
    first, second = tray.pictures
    tray.remove(first.id)
    tray.remove(first.id)  # from another page
    assert [p.id for p in Tray(workspace).pictures] == [second.id]
    with pytest.raises(StudioError, match="no picture"):
        tray.path(first.id)
    for id in ("../../etc", "", "x" * 16):
        with pytest.raises(StudioError):
            tray.remove(id)
    tray.keep(trigger="kept")
    tray.clear()
    assert not list(tray.folder.glob("*.png")) and Tray(workspace).form.trigger == "kept"


def test_captions_follow_the_trigger(tray, two):
    assert unfilled("A Zed-Quack by the zed-quacks", "zed-quack") == "A {trigger} by the zed-quacks"
    assert unfilled("a (c++) thing", "(c++)") == "a {trigger} thing" and unfilled("a mug", " ") == "a mug"
    assert filled("a {trigger}", "mug") == "a mug" and filled("a {trigger}", "") == "a {trigger}"
    tray.add(two)
    id = tray.pictures[0].id
    tray.caption({id: "  a   zed-quack\n here ", "0" * 16: "gone", tray.pictures[1].id: 3}, "zed-quack")
    assert tray.pictures[0].caption == "a {trigger} here" and tray.pictures[1].caption == ""
    with pytest.raises(StudioError, match="expected at most 1,000"):
        tray.caption({id: "x" * 1001})
    with pytest.raises(StudioError, match="class word"):
        tray.keep(class_word="x" * 5000)


def test_the_crop_preview_is_what_teaching_sees(tmp_path):
    from tiny_engram.training.data import Example, fitted_picture

    picture = Image.new("RGB", (90, 30), "white")
    picture.paste("red", (30, 0, 60, 30))
    path = tmp_path / "wide.png"
    picture.save(path)
    assert fitted_picture(Example(path, ()), 64).getpixel((2, 32)) == (255, 0, 0)
    assert crop_box(90, 30) == pytest.approx((100 / 3, 0, 100 / 3, 100)) and crop_box(20, 40) == pytest.approx((0, 25, 100, 50))
    seen = _decoded(crop_uri(path, 64))
    assert seen.size == (64, 64) and all(abs(a - b) < 12 for a, b in zip(seen.getpixel((4, 32)), (255, 0, 0), strict=True))
    assert _decoded(whole_uri(path)).size == (90, 30)
    path.write_bytes(b"damaged")
    assert whole_uri(path) == crop_uri(path, 64) == sample_uri(path) == ""
    assert sample_uri(tmp_path / "none.png") == ""


def _decoded(uri: str) -> Image.Image:
    import base64

    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_as_it_is_has_no_options(preset):
    values = values_of(preset, {})
    assert len(values) == len(FIELDS) and options_of(preset, values) == {}
    assert options_of(preset, [None] * len(FIELDS)) == {}
    # a browser sends whole numbers as floats
    assert options_of(preset, [float(v) if isinstance(v, int) else v for v in values]) == {}


def test_what_is_changed_comes_back(workspace, tray):
    values = dict(zip(FIELDS, values_of("quick", {}), strict=True))
    values |= {"max_train_steps": 12, "validation_steps": 0, "seed": 3, "validation_prompts": "a ZED here\n\n the {trigger} "}
    options = options_of("quick", list(values.values()), "zed")
    prompts = ["a {trigger} here", "the {trigger}"]
    assert options == {"max_train_steps": 12, "validation_steps": 0, "seed": 3, "validation_prompts": prompts}
    tray.keep(preset="quick", options=options)
    assert options_of("quick", values_of("quick", Tray(workspace).form.options)) == options
