"""What a scan tells before anything is taught: numbers, sizes, buckets, and what is probably a mistake, by name."""

import json
import logging

import numpy as np
import pytest
from PIL import Image

from tiny_engram.training import train
from tiny_engram.training.data import report, scan_folder


@pytest.fixture
def mixed(tmp_path, picture, mask):
    """A folder with one of everything."""
    made = tmp_path / "mixed"
    made.mkdir()
    picture(128, 64, 1).save(made / "wide.png")
    picture(64, 128, 2).save(made / "tall.png")
    picture(64, 64, 3).save(made / "square.png")
    picture(64, 64, 3).save(made / "again.bmp")
    picture(20, 200, 4).save(made / "small.png")
    clear = np.full((64, 64, 4), 200, np.uint8)
    clear[..., 3] = 2
    Image.fromarray(clear).save(made / "clear.png")
    (made / "bad.png").write_bytes(b"no")
    (made / "notes.md").write_text("")
    mask(128, 64).save(made / "wide.mask.png")
    (made / "tall.txt").write_text("my {trigger}\nthe {trigger}")
    (made / "metadata.csv").write_text("file_name,repeats\nsquare.png,3\n")
    return made


def test_everything_is_counted_and_named(mixed):
    found = report(scan_folder(mixed, ("zqx",), templates=("a {trigger}",), skip_bad=True), 64, bucket_step=16)
    assert (found.pictures, found.samples, found.captions, found.captioned, found.masked, found.ignored) == (6, 8, 3, 1, 1, 1)
    assert len(found.bad) == 1 and "bad.png: not a picture" in found.bad[0]
    assert found.sizes == {"20x200": 1, "64x64": 3, "64x128": 1, "128x64": 1}
    assert found.buckets == {"48x80": 2, "64x64": 3, "80x48": 1}
    assert found.small == ("small.png",) and found.clear == ("clear.png",) and found.duplicates == (("again.bmp", "square.png"),)
    assert found.warnings == [
        "much smaller than the resolution, so that they will be blurred: small.png",
        "transparent nearly everywhere, so that hardly more than white is seen: clear.png",
        "the same picture 2 times: again.bmp, square.png",
    ]
    text = str(found)
    assert text.splitlines()[0] == "6 pictures, 1 with captions of their own, 1 with masks, 8 samples with repeats"
    for words in (
        "3 distinct captions, 1 other file left alone",
        "buckets 48x80: 2, 64x64: 3, 80x48: 1",
        "left out: ",
        "warning: the same",
    ):
        assert words in text
    assert json.loads(json.dumps(found.to_dict()))["buckets"] == found.buckets


def test_without_a_resolution_nothing_is_said_of_it(mixed):
    found = report(scan_folder(mixed, ("zqx",), skip_bad=True))
    assert found.buckets == {} and found.small == () and "buckets" not in str(found)
    assert report(scan_folder(mixed, ("zqx",), skip_bad=True), 64).buckets == {"64x64": 6}, "squares"


def test_a_small_picture_s_own_bucket(mixed):
    assert report(scan_folder(mixed, ("zqx",), skip_bad=True), 512, bucket_step=64, upscale=False).buckets == {
        "64x64": 3,
        "64x128": 1,
        "64x192": 1,
        "128x64": 1,
    }


def test_pictures_that_differ_in_one_pixel_or_in_transparency_alone_are_not_the_same(folder):
    array = np.full((64, 64, 4), 255, np.uint8)
    Image.fromarray(array).save(folder / "0.png")
    array[3, 3, 1] = 254
    Image.fromarray(array).save(folder / "1.png")
    array[3, 3, 1], array[..., 3] = 255, 254
    Image.fromarray(array).save(folder / "2.png")
    assert report(scan_folder(folder, ("zqx",))).duplicates == ()


def test_long_lists_of_names_are_cut(folder, picture):
    for k in range(12):
        picture(8, 8, 1).save(folder / f"{k:02}.png")
    small, same = report(scan_folder(folder, ("zqx",)), 64).warnings
    assert small.endswith("07.png and 4 more") and same.startswith("the same picture 12 times: 00.png, ") and same.endswith("and 4 more")


def test_a_run_says_what_is_probably_a_mistake(pipe, config, folder, picture, caplog):
    picture(8, 8).save(folder / "0.png")
    (folder / "1.txt").write_text("the left {trigger}")
    with caplog.at_level(logging.WARNING, "tiny_engram"):
        train(pipe, config(max_train_steps=1, random_flip=True, shuffle_tags=True, unmasked_weight=0.5), progress=False)
    assert "pictures: much smaller than the resolution, so that they will be blurred: 0.png" in caplog.text
    assert "caption 'the left zqx' tells left from right, which --random_flip mixes up" in caplog.text
    assert "no caption has commas in it, so that caption_tag_dropout and shuffle_tags change nothing" in caplog.text
    assert "no picture has a mask, so that alpha_mask and unmasked_weight change nothing" in caplog.text


def test_a_run_without_mistakes_says_nothing_of_pictures(pipe, config, folder, mask, caplog):
    mask().save(folder / "0.mask.png")
    (folder / "1.txt").write_text("red, a {trigger}, leftover")
    with caplog.at_level(logging.WARNING, "tiny_engram"):
        train(pipe, config(max_train_steps=1, random_flip=True, shuffle_tags=True, unmasked_weight=0.5), progress=False)
    assert not [line for line in caplog.messages if "picture" in line or "caption" in line]
