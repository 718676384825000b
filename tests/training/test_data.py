"""Folders of pictures: what a person sees of every kind of file, captions from every source, and what is refused in which words."""

import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from tiny_engram.training.data import DEFAULT_TEMPLATES, DataError, load_picture, scan_folder

ORIENTATION = 0x0112
# What was done to the upright picture before it was stored, undone by the EXIF value.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


def corners() -> np.ndarray:
    """uint8 `[16, 24, 3]`: another colour in each quarter."""
    array = np.full((16, 24, 3), 255, np.uint8)
    array[:8, :12], array[:8, 12:], array[8:, :12] = (200, 0, 0), (0, 200, 0), (0, 0, 200)
    return array


def seen(path) -> np.ndarray:
    picture = load_picture(path)
    assert picture.mode == "RGB"
    return np.asarray(picture)


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_eight_orientations_give_one_array(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(np.ascontiguousarray(STORED[orientation](corners()))).save(tmp_path / f"p.{suffix}", exif=exif, **options)
    assert np.array_equal(seen(tmp_path / f"p.{suffix}"), corners())


def ramp() -> np.ndarray:
    """uint8 `[16, 16]`: every grey once."""
    return np.arange(256, dtype=np.uint8).reshape(16, 16)


GREY = np.repeat(ramp()[..., None], 3, 2)


def rgba() -> np.ndarray:
    """uint8 `[4, 4, 4]`: red, the left half opaque, the right half clear, one pixel half clear."""
    array = np.zeros((4, 4, 4), np.uint8)
    array[..., 0], array[:, :2, 3], array[0, 0, 3] = 255, 255, 128
    return array


OVER_WHITE = np.array([[[255, 0, 0] if x < 2 else [255, 255, 255] for x in range(4)] for _ in range(4)], np.uint8)
OVER_WHITE[0, 0] = (255, 127, 127)


def close(found, expected, by: int = 0) -> None:
    assert found.shape == expected.shape and np.abs(found.astype(int) - expected.astype(int)).max() <= by, (found, expected)


def test_greys_of_every_depth(tmp_path):
    path = tmp_path / "p.png"
    Image.fromarray(ramp()).save(path)
    close(seen(path), GREY)
    Image.fromarray(ramp()).convert("1", dither=Image.Dither.NONE).save(path)
    close(seen(path), np.where(GREY > 127, 255, 0))
    Image.fromarray(ramp().astype(np.uint16) * 257).save(path)
    assert Image.open(path).mode == "I;16"
    close(seen(path), GREY)
    # A dark 16-bit picture stays dark: its mode says where white is.
    Image.fromarray(ramp().astype(np.uint16)).save(path)
    close(seen(path), np.round(GREY / 257).astype(np.uint8))


@pytest.mark.parametrize("white", [255, 65535, 2**31 - 1])
def test_32_bit_greys(tmp_path, white):
    Image.fromarray((ramp().astype(np.int64) * white // 255).astype(np.int32)).save(tmp_path / "p.tif")
    assert Image.open(tmp_path / "p.tif").mode == "I"
    close(seen(tmp_path / "p.tif"), GREY, by=1)


@pytest.mark.parametrize("white", [1.0, 255.0, 65535.0])
def test_float_greys(tmp_path, white):
    values = ramp().astype(np.float32) * white / 255
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "p.tif")
    assert Image.open(tmp_path / "p.tif").mode == "F"
    close(seen(tmp_path / "p.tif"), GREY)


def test_16_bit_greys_of_the_other_byte_order(tmp_path):
    Image.fromarray(ramp().astype(np.uint16) * 257).save(tmp_path / "little.tif")
    blob = (tmp_path / "little.tif").read_bytes()
    little = Image.open(tmp_path / "little.tif")
    # A big-endian file written by hand: header, one strip, nine tags.
    pixels = (ramp().astype(np.uint16) * 257).astype(">u2").tobytes()
    tags = [
        (256, 3, 16),
        (257, 3, 16),
        (258, 3, 16),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (277, 3, 1),
        (278, 3, 16),
        (279, 4, len(pixels)),
    ]
    entries = b"".join(struct.pack(">HHI", t, k, 1) + (struct.pack(">HH", v, 0) if k == 3 else struct.pack(">I", v)) for t, k, v in tags)
    path = tmp_path / "big.tif"
    path.write_bytes(b"MM\0*" + struct.pack(">I", 8 + len(pixels)) + pixels + struct.pack(">H", len(tags)) + entries + bytes(4))
    assert blob[:2] == b"II" and little.mode == "I;16" and Image.open(path).mode == "I;16B"
    close(seen(path), GREY)


def test_transparency_lies_over_white(tmp_path):
    path = tmp_path / "p.png"
    Image.fromarray(rgba()).save(path)
    close(seen(path), OVER_WHITE)
    alpha = np.full((4, 4), 255, np.uint8)
    alpha[:, 2:] = 0
    Image.merge("LA", (Image.new("L", (4, 4), 10), Image.fromarray(alpha))).save(path)
    close(seen(path)[:, :, 0], np.where(alpha, 10, 255).astype(np.uint8))
    close(np.asarray(load_picture(path, background=(0, 0, 99)))[:, 2:], np.full((4, 2, 3), (0, 0, 99), np.uint8))


@pytest.mark.parametrize("kind", ["colour key", "palette index", "palette table"])
def test_transparency_without_an_alpha_channel(tmp_path, kind):
    path = tmp_path / "p.png"
    array = np.zeros((4, 4, 3), np.uint8)
    array[:, :2], array[:, 2:] = (255, 0, 0), (0, 0, 255)
    picture = Image.fromarray(array)
    if kind == "colour key":
        picture.save(path, transparency=(0, 0, 255))
    else:
        flat = picture.quantize(2)
        blue = flat.getpixel((3, 0))
        flat.save(path, transparency=blue if kind == "palette index" else bytes(0 if k == blue else 255 for k in range(2)))
        assert Image.open(path).mode == "P"
    expected = np.full((4, 4, 3), 255, np.uint8)
    expected[:, :2] = (255, 0, 0)
    close(seen(path), expected)


def test_cmyk_and_lab(tmp_path):
    red = Image.new("RGB", (8, 8), (220, 40, 30))
    red.convert("CMYK").save(tmp_path / "p.tif")
    close(seen(tmp_path / "p.tif"), np.asarray(red), by=2)
    red.convert("CMYK").save(tmp_path / "p.jpg", quality=100)
    close(seen(tmp_path / "p.jpg"), np.asarray(red), by=8)
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(red, to_lab)
    assert lab is not None
    lab.save(tmp_path / "lab.tif")
    assert Image.open(tmp_path / "lab.tif").mode == "LAB"
    close(seen(tmp_path / "lab.tif"), np.asarray(red), by=4)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations_show_their_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), colour) for colour in [(250, 0, 0), (0, 250, 0), (0, 0, 250)]]
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(tmp_path / f"p.{suffix}", save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(tmp_path / f"p.{suffix}"), "n_frames", 1) == 3
    close(seen(tmp_path / f"p.{suffix}"), np.asarray(frames[0]), by=4)


def damaged(folder) -> dict[str, bytes]:
    """Name -> bytes of files that are no pictures, each wrong in another way."""
    whole = folder / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    jpeg = whole.read_bytes()
    whole.unlink()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return {
        "bomb.png": b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""),
        "cut.jpg": jpeg[: len(jpeg) // 2],
        "empty.webp": b"",
        "header.tif": b"II*\0" + b"\xff" * 40,
        "short.bmp": b"BM",
        "text.png": b"not a picture at all",
    }


def test_every_bad_file_is_named_before_anything_else(folder):
    bad = damaged(folder)
    for name, blob in bad.items():
        (folder / name).write_bytes(blob)
        with pytest.raises(DataError, match=f"{name}: not a picture that can be read"):
            load_picture(folder / name)
    with pytest.raises(DataError, match="or pass --skip_bad_pictures") as caught:
        scan_folder(folder, ("zqx",))
    assert all(name in str(caught.value) for name in bad) and "\n" not in str(caught.value)
    assert "0.png" not in str(caught.value)
    found = scan_folder(folder, ("zqx",), skip_bad=True)
    assert [e.path.name for e in found.examples] == ["0.png", "1.png"]
    assert len(found.skipped) == len(bad) and all(any(name in line for line in found.skipped) for name in bad)


def test_a_decompression_bomb_is_refused_for_its_size(folder):
    (folder / "bomb.png").write_bytes(damaged(folder)["bomb.png"])
    with pytest.raises(DataError, match="decompression bomb"):
        load_picture(folder / "bomb.png")


@pytest.mark.parametrize("skip", [False, True])
def test_all_unreadable(folder, skip):
    for path in folder.iterdir():
        path.write_bytes(b"no")
    with pytest.raises(DataError, match=r"none of its 2 pictures can be read: 0\.png, 1\.png"):
        scan_folder(folder, ("zqx",), skip_bad=skip)


def test_missing_and_empty_folders(folder, tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder; expected a folder of training pictures"):
        scan_folder(tmp_path / "nowhere", ("zqx",))
    with pytest.raises(DataError, match=r"0\.png: is a file; expected a folder"):
        scan_folder(folder / "0.png", ("zqx",))
    for path in folder.iterdir():
        path.rename(path.with_suffix(".doc"))
    with pytest.raises(DataError, match=r"pictures: no pictures in it; expected files ending in .*\.png"):
        scan_folder(folder, ("zqx",))


def test_a_folder_that_cannot_be_listed(folder, monkeypatch):
    def deny(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(folder), "iterdir", deny)
    with pytest.raises(DataError, match=r"pictures: cannot be listed \(Permission denied\)"):
        scan_folder(folder, ("zqx",))


def test_junk_is_counted_and_left_alone(folder):
    for name in (".DS_Store", "Thumbs.db", "notes.md", "stray.txt", "data.json"):
        (folder / name).write_bytes(b"junk")
    (folder / "sub").mkdir()
    (folder / "sub" / "2.png").write_bytes(b"junk")
    (folder / "0.txt").write_text("a {trigger}")
    (folder / "1.PNG").write_bytes((folder / "1.png").read_bytes())
    found = scan_folder(folder, ("zqx",))
    assert found.others == 4 and [e.path.name for e in found.examples] == ["0.png", "1.PNG", "1.png"]  # hidden files do not count


def captions(folder, *spellings, **options) -> list[tuple[str, ...]]:
    return [e.captions for e in scan_folder(folder, spellings or ("zqx",), **options).examples]


def test_templates(folder):
    assert captions(folder) == [tuple(t.replace("{trigger}", "zqx") for t in DEFAULT_TEMPLATES)] * 2
    assert captions(folder, templates=("my {trigger}", "the zqx")) == [("my zqx", "the zqx")] * 2
    assert captions(folder, "zqx", "zqxs", templates=("my {trigger}",)) == [("my zqx", "my zqxs")] * 2


def test_sidecars(folder):
    (folder / "0.txt").write_bytes("\ufeffa {trigger} by night\r\n\r\n  the ZQX, seen from afar \n".encode())
    (folder / "1.txt").write_text("\n \n")
    assert captions(folder, templates=("my {trigger}",)) == [("a zqx by night", "the ZQX, seen from afar"), ("my zqx",)]


def test_a_caption_may_hold_an_alias(folder):
    (folder / "0.txt").write_text("two zzyx")
    assert captions(folder, "zqx", "zzyx")[0] == ("two zzyx",)


def test_a_caption_without_the_trigger_is_refused(folder):
    (folder / "1.txt").write_text("a {trigger}\na cat")
    with pytest.raises(DataError, match=r"1\.txt: caption 'a cat' holds neither \{trigger\} nor 'zqx'; put \{trigger\} where"):
        scan_folder(folder, ("zqx",))


def metadata(folder, *rows) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows), "utf-8")


def test_metadata(folder):
    (folder / "0.txt").write_text("unused {trigger}")
    metadata(folder, {"file_name": "0.png", "text": "a {trigger} on\u2028white"}, "", {"file_name": "./0.png", "caption": "the {trigger}"})
    (folder / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + (folder / "metadata.jsonl").read_bytes())
    assert captions(folder, templates=("my {trigger}",)) == [("a zqx on\u2028white", "the zqx"), ("my zqx",)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "0.png", "text": "a {trigger}"}, r"line 2: columns \['image', 'text'\], expected file_name and text or caption"),
        ({"file_name": "0.png", "prompt": "a {trigger}"}, r"line 2: columns \['file_name', 'prompt'\]"),
        ({"file_name": "0.png", "text": ["a {trigger}"]}, r"columns \['file_name', 'text'\], .*both text"),
        ({"file_name": None, "text": "a {trigger}"}, r"columns \['file_name', 'text'\]"),
        (["0.png", "a {trigger}"], "line 2: columns list"),
        ("{'file_name': '0.png'}", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("9" * 10_000, "line 2: not JSON"),
        ({"file_name": "7.png", "text": "a {trigger}"}, r"names '7\.png', which is no picture in this folder \(1 such\)"),
        ({"file_name": "sub/0.png", "text": "a {trigger}"}, "names 'sub/0.png', which is no picture in this folder"),
        ({"file_name": "notes.md", "text": "a {trigger}"}, r"names 'notes\.md', which is no picture"),
        ({"file_name": "0.png", "text": "a cat"}, r"metadata\.jsonl, 0\.png: caption 'a cat' holds neither"),
    ],
)
def test_metadata_confusion_is_explained(folder, row, words):
    (folder / "sub").mkdir()
    (folder / "sub" / "0.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "notes.md").write_text("junk")
    metadata(folder, {"file_name": "1.png", "text": "a {trigger}"}, row)
    with pytest.raises(DataError, match=words) as caught:
        scan_folder(folder, ("zqx",))
    assert "\n" not in str(caught.value) and "metadata.jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["metadata.jsonl", "0.txt"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_one_clear_line(folder, name, encoding):
    line = "ein {trigger} über Wasser"
    text = json.dumps({"file_name": "0.png", "text": line}, ensure_ascii=False) if name == "metadata.jsonl" else line
    (folder / name).write_text(text, encoding)
    with pytest.raises(DataError, match=rf"{name}: cannot be read as UTF-8 text .*; save it as UTF-8") as caught:
        scan_folder(folder, ("zqx",))
    assert "\n" not in str(caught.value)
