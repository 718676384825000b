"""Kinds of files that cameras and programs write: turned ones of every format, broken EXIF, transparency of every mode and depth."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.training.test_data import ORIENTATION, STORED
from tiny_engram.training.data import fitted_picture, load_picture, scan_examples


def quarters() -> np.ndarray:
    """uint8 `[32, 48, 3]`: another colour in each quarter, in whole blocks of JPEG."""
    array = np.full((32, 48, 3), 230, np.uint8)
    array[:16, :24], array[:16, 24:], array[16:, :24] = (200, 30, 30), (30, 200, 30), (30, 30, 200)
    return array


def stored(orientation: int) -> tuple[Image.Image, Image.Exif]:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return Image.fromarray(np.ascontiguousarray(STORED[orientation](quarters()))), exif


@pytest.mark.parametrize("suffix", ["jpg", "avif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_what_cameras_write_is_upright(tmp_path, orientation, suffix):
    picture, exif = stored(orientation)
    picture.save(tmp_path / f"p.{suffix}", exif=exif, quality=100)
    found = np.asarray(load_picture(tmp_path / f"p.{suffix}")).astype(int)
    inside = np.abs(found - quarters()).reshape(2, 16, 2, 24, 3)[:, 4:12, :, 4:20]
    assert found.shape == quarters().shape and inside.max() <= 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_from_python_are_turned_too(tmp_path, orientation):
    """Where they are taken from: the latents' picture, at the size that is taught."""
    picture, exif = stored(orientation)
    picture.save(tmp_path / "p.png", exif=exif)
    given = Image.open(tmp_path / "p.png")
    (example,) = scan_examples([{"image": given, "text": "a {trigger}"}], ("zqx",)).examples
    assert np.array_equal(np.asarray(fitted_picture(example, (48, 32))), quarters())


def app1(exif: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize(
    "exif", [b"garbage", b"", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x01\x01\x12", b"II*\0\x08\0\0\0\xff\xff" + b"\1" * 40]
)
def test_a_sound_picture_with_broken_exif_is_taken_as_it_is_stored(tmp_path, exif):
    """Every viewer shows it, so it is none that cannot be read."""
    picture = Image.fromarray(quarters())
    picture.save(tmp_path / "p.png")
    png = (tmp_path / "p.png").read_bytes()
    end = png.rindex(b"IEND") - 4
    (tmp_path / "p.png").write_bytes(png[:end] + chunk(b"eXIf", exif) + png[end:])
    assert np.array_equal(np.asarray(load_picture(tmp_path / "p.png")), quarters())
    picture.save(tmp_path / "p.jpg", quality=100)
    plain, jpeg = np.asarray(load_picture(tmp_path / "p.jpg")), (tmp_path / "p.jpg").read_bytes()
    (tmp_path / "p.jpg").write_bytes(jpeg[:2] + app1(b"Exif\0\0" + exif) + jpeg[2:])
    assert np.array_equal(np.asarray(load_picture(tmp_path / "p.jpg")), plain)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_is_none_turns_nothing(tmp_path, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(quarters()).save(tmp_path / "p.png", exif=exif)
    assert np.array_equal(np.asarray(load_picture(tmp_path / "p.png")), quarters())


def half_clear() -> Image.Image:
    """RGBA 4 by 4, red, the right half clear."""
    array = np.zeros((4, 4, 4), np.uint8)
    array[..., 0], array[:, :2, 3] = 255, 255
    return Image.fromarray(array)


@pytest.mark.parametrize("ways", [("RGBA",), ("RGBA", "RGBa"), ("LA",), ("LA", "La"), ("PA",)])
def test_transparency_of_every_mode_that_has_it(ways):
    given = half_clear()
    for way in ways:
        given = given.convert(way)
    (example,) = scan_examples([{"image": given, "text": "a {trigger}"}], ("zqx",)).examples
    seen = np.asarray(fitted_picture(example, 4))
    colour = (76, 76, 76) if ways[0] == "LA" else (255, 0, 0)
    assert (seen[:, :2] == colour).all() and (seen[:, 2:] == 255).all()


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_transparency_of_an_animation_s_first_frame(tmp_path, suffix):
    options = {"lossless": True} if suffix == "webp" else {}
    other = Image.new("RGBA", (4, 4), (0, 255, 0, 255))
    half_clear().save(tmp_path / f"p.{suffix}", save_all=True, append_images=[other], **options)
    seen = np.asarray(load_picture(tmp_path / f"p.{suffix}"))
    assert (seen[:, :2] == (255, 0, 0)).all() and (seen[:, 2:] == 255).all()


def png_of(path, bits: int, kind: int, row: bytes, clear: bytes) -> None:
    """A PNG two pixels wide, with the value that is clear."""
    head = struct.pack(">IIBBBBB", 2, 1, bits, kind, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"tRNS", clear) + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


@pytest.mark.parametrize(
    ("bits", "kind", "row", "clear"),
    [
        (8, 0, bytes([100, 7]), struct.pack(">H", 7)),
        (16, 0, struct.pack(">2H", 100 * 257, 7), struct.pack(">H", 7)),
        (8, 2, bytes([100] * 3 + [7, 0, 0]), struct.pack(">3H", 7, 0, 0)),
        (16, 2, struct.pack(">6H", *[100 * 257] * 3, 7 * 257, 0, 0), struct.pack(">3H", 7 * 257, 0, 0)),
    ],
)
def test_one_value_that_is_clear_at_every_depth(tmp_path, bits, kind, row, clear):
    png_of(tmp_path / "p.png", bits, kind, row, clear)
    assert np.asarray(load_picture(tmp_path / "p.png")).tolist() == [[[100] * 3, [255] * 3]]
