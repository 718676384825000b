"""Pictures from a browser: what a person sees comes in, whatever else is named and left out."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from tiny_engram.studio import uploads
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.uploads import Limits, shown_name, take_pictures
from tiny_engram.training.data import load_picture


def encoded(picture: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def corner(side: int = 32) -> Image.Image:
    """Red above left, blue elsewhere: shows how it is turned."""
    values = np.zeros((side, side * 2, 3), np.uint8)
    values[..., 2] = 255
    values[: side // 2, : side // 2] = (255, 0, 0)
    return Image.fromarray(values)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises these pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_is_applied_and_not_kept(tmp_path, orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    exif.get_ifd(0x8825)[1] = "N"  # where it was taken
    blob = encoded(corner(), "JPEG", exif=exif, quality=95)
    (taken,) = take_pictures([("holiday.jpg", blob)], tmp_path).pictures
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(blob))).convert("RGB")
    with Image.open(taken.file) as kept:
        assert (kept.width, kept.height) == expected.size == (taken.width, taken.height)
        assert np.array_equal(np.asarray(kept), np.asarray(expected))
        assert not kept.getexif() and not {"exif", "icc_profile"} & kept.info.keys()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_comes_in_as_it_looks(tmp_path, mode):
    source = Image.fromarray(np.full((8, 8), 40_000, np.uint16)) if mode == "I;16" else corner(8).convert(mode)
    path = tmp_path / "given.png"
    source.save(path)
    (taken,) = take_pictures([path], tmp_path).pictures
    with Image.open(taken.file) as kept:
        assert kept.mode == "RGB" and np.array_equal(np.asarray(kept), np.asarray(load_picture(path)))


def test_transparency_lies_over_white_and_cmyk_is_read(tmp_path):
    clear = encoded(Image.new("RGBA", (4, 4), (9, 9, 9, 0)))
    cmyk = encoded(Image.new("CMYK", (4, 4), (0, 0, 0, 0)), "JPEG")
    for taken in take_pictures([("a.png", clear), ("b.jpg", cmyk)], tmp_path).pictures:
        assert np.asarray(Image.open(taken.file)).min() >= 254


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame(tmp_path, format):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    blob = encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=50, **options)
    (taken,) = take_pictures([("a", blob)], tmp_path).pictures
    assert np.asarray(Image.open(taken.file))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_known_formats_under_any_name(tmp_path, format, picture_bytes):
    (taken,) = take_pictures([("no ending", picture_bytes(format=format))], tmp_path).pictures
    assert taken.file == tmp_path / f"{taken.id}.png" and taken.name == "no ending"


def test_a_phone_s_jpeg_of_two_pictures(tmp_path):
    blob = encoded(corner(), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 32))])
    (taken,) = take_pictures([("IMG_1.JPG", blob)], tmp_path).pictures
    assert np.asarray(Image.open(taken.file))[0, 0, 0] > 200


def test_bad_ones_are_named_and_skipped(tmp_path, picture_bytes):
    good = picture_bytes()
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n"
    files = [
        ("empty.png", b""),
        ("first.png", good),
        ("text.png", b"hello, I am no picture"),
        ("cut.png", good[: len(good) // 2]),
        ("cut.jpg", picture_bytes(format="JPEG")[:100]),
        ("page.svg", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"),
        ("script.eps", script),
        ("../../<img src=x onerror=alert(1)>.png", b"nothing"),
        tmp_path / "lacking.png",
        tmp_path,
        ("last.png", picture_bytes(1)),
    ]
    taken = take_pictures(files, tmp_path)
    assert [p.name for p in taken.pictures] == ["first.png", "last.png"]
    reasons = dict(taken.refused)
    assert len(reasons) == 9 and all("\n" not in line and str(tmp_path) not in line for line in reasons.values())
    assert reasons["empty.png"].startswith("the file is empty")
    for name in ("text.png", "page.svg", "script.eps", "<img src=x onerror=alert(1)>.png"):
        assert reasons[name].startswith("not a picture that can be read, expected PNG, JPEG")
    assert reasons["cut.png"].startswith("a damaged picture (") and "damaged" in reasons["cut.jpg"]
    assert reasons["lacking.png"].startswith("no such file")
    assert sorted(tmp_path.iterdir()) == sorted(p.file for p in taken.pictures)


def test_bombs_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    def decoded(*_):
        raise AssertionError("it was decoded")

    monkeypatch.setattr(uploads, "load_picture", decoded)
    sizes = [(8000, 7000), (9000, 11_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        taken = take_pictures([(f"{w}x{h}.png", bomb(w, h)) for w, h in sizes], tmp_path)
    assert not seen and not taken.pictures and not list(tmp_path.iterdir())
    reasons = [reason for _, reason in taken.refused]
    assert reasons[0] == "8000 x 7000 pixels, expected at most 50,000,000 in all; save the picture smaller"
    assert all("pixels, expected" in reason for reason in reasons)


def test_limits_of_size_count_and_all(tmp_path, picture_bytes):
    blobs = [(f"{k}.png", picture_bytes(k)) for k in range(4)]
    size = len(blobs[0][1])
    for limits, kept, reason in (
        (Limits(file_bytes=size - 500), 0, "KiB, expected at most"),
        (Limits(files=2), 2, "more than 2 pictures"),
        (Limits(total_bytes=3 * size + 100), 3, "in all; send smaller pictures"),
        (Limits(pixels=64 * 64 - 1), 0, "64 x 64 pixels, expected at most 4,095"),
    ):
        folder = tmp_path / str(limits).replace("/", "")[:60]
        folder.mkdir()
        taken = take_pictures(blobs, folder, limits)
        assert len(taken.pictures) == kept == len(list(folder.iterdir())) and len(taken.refused) == 4 - kept
        assert all(reason in line for _, line in taken.refused)


def test_large_ones_are_kept_smaller(tmp_path):
    blob = encoded(Image.new("RGB", (3000, 2), (10, 20, 30)))
    (taken,) = take_pictures([("long.png", blob)], tmp_path, Limits(side=100)).pictures
    assert (taken.width, taken.height) == (100, 1) and taken.sent == (3000, 2) and Image.open(taken.file).size == (100, 1)


def test_a_folder_that_cannot_be_written_is_no_picture_s_fault(tmp_path, picture_bytes):
    with pytest.raises(StudioError, match="cannot save") as error:
        take_pictures([("a.png", picture_bytes())], tmp_path / "lacking")
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    "given, shown",
    [
        ("/tmp/gradio/abc/cat.png", "cat.png"),
        ("C:\\users\\me\\cat.png", "cat.png"),
        ("..", ".."),
        ("", "unnamed"),
        ("a\nb\u202egnp.exe\x00", "a b gnp.exe"),
        ("x" * 300 + ".png", "x" * 68 + "...xxxxx.png"),
    ],
)
def test_names_are_shown_on_one_line(given, shown):
    assert shown_name(given) == shown


def test_a_file_that_is_too_large_is_told_its_size(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(47 * 2**20)
    (told,) = take_pictures([path], tmp_path).refused
    assert told == ("large.png", "47 MiB, expected at most 32 MiB; save the picture smaller")
