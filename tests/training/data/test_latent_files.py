"""Latents on disk: found only by what they were made of, made again where they are damaged."""

import errno
import logging
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_engram.errors import TinyEngramError
from tiny_engram.training import latent_files, train
from tiny_engram.training.cache import encode_picture
from tiny_engram.training.latent_files import LatentFiles, fingerprint


@pytest.fixture
def encoded(monkeypatch):
    """The pictures that the base really encoded, by size."""
    seen = []

    def spy(pipe, picture, size):
        seen.append(size)
        return encode_picture(pipe, picture, size)

    monkeypatch.setattr(latent_files, "encode_picture", spy)
    return seen


def test_what_is_kept_is_what_the_base_says_to_the_bit(pipe, tmp_path, picture, encoded):
    expected = encode_picture(pipe, picture(), (64, 64))
    for _ in range(2):
        found = LatentFiles(pipe, tmp_path / "deep" / "kept").encode(picture(), (64, 64))
        assert all(map(torch.equal, found, expected))
    assert encoded == [(64, 64)] and len(list((tmp_path / "deep" / "kept").iterdir())) == 1


def test_another_picture_size_or_base_is_another_file(tiny, pipe, tmp_path, picture):
    files = LatentFiles(pipe, tmp_path)
    other = picture()
    other.putpixel((3, 3), (1, 2, 3))
    changed = tiny.build()
    with torch.no_grad():
        next(changed.vae.parameters()).view(-1)[0] += 2.0**-20
    half = tiny.build(dtype=torch.bfloat16)
    paths = [
        files.path_of(picture(), (64, 64)),
        files.path_of(other, (64, 64)),
        files.path_of(picture(), (64, 48)),
        files.path_of(picture(64, 48), (64, 48)),
        *(LatentFiles(base, tmp_path).path_of(picture(), (64, 64)) for base in (changed, half)),
    ]
    assert len(set(paths)) == len(paths)
    assert LatentFiles(tiny.build(), tmp_path).path_of(picture(), (64, 64)) == paths[0], "the same weights in another process"


def test_the_scaling_of_latents_is_part_of_a_base(tiny):
    one, two = tiny.build().vae, tiny.build().vae
    assert fingerprint(one) == fingerprint(two)
    two.register_to_config(scaling_factor=0.5)
    assert fingerprint(one) != fingerprint(two)


def test_a_picture_in_tiles_is_another_file(tiny, tmp_path, picture):
    """Switched on from outside, where no config says so; its latents have other bits."""
    pipe = tiny.build()
    files = LatentFiles(pipe, tmp_path)
    whole, plain = files.encode(picture(), (64, 64)), fingerprint(pipe.vae)
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 32 // pipe.vae_scale_factor
    tiled = LatentFiles(pipe, tmp_path).encode(picture(), (64, 64))
    assert all(map(torch.equal, tiled, encode_picture(pipe, picture(), (64, 64)))) and not torch.equal(tiled[0], whole[0])
    pipe.vae.tile_sample_min_size = 48
    assert len({plain, files._base, fingerprint(pipe.vae)}) == 2 and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    "damage", ["truncated", "other bytes", "empty", "another tensor", "not finite", "another shape", "a folder", "unreadable"]
)
def test_a_damaged_file_is_made_again_with_a_warning(pipe, tmp_path, picture, encoded, caplog, damage):
    files = LatentFiles(pipe, tmp_path)
    expected = files.encode(picture(), (64, 64))
    path = files.path_of(picture(), (64, 64))
    whole = path.read_bytes()
    kept = load_file(path)
    if damage == "another tensor":
        save_file({"mean": kept["mean"]}, path)
    elif damage == "not finite":
        save_file({"mean": kept["mean"] * float("nan"), "std": kept["std"]}, path)
    elif damage == "another shape":
        save_file({"mean": kept["mean"], "std": kept["std"][:, :2].contiguous()}, path)
    elif damage == "unreadable":
        path.write_bytes(b"\xff" * 8 + whole)
    elif damage == "a folder":
        path.unlink()
        path.symlink_to(tmp_path)
    else:
        path.write_bytes({"truncated": whole[:-9], "other bytes": b"no", "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, "tiny_engram"):
        found = files.encode(picture(), (64, 64))
    assert all(map(torch.equal, found, expected)) and len(encoded) == 2
    assert caplog.text.count("latents that cannot be read") == 1 and path.name in caplog.text and "they are made again" in caplog.text
    assert all(map(torch.equal, files.encode(picture(), (64, 64)), expected)) and len(encoded) == 2, "mended for the next time"


def test_a_folder_that_cannot_be_is_one_clear_line(pipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TinyEngramError, match="cache_dir .*file/kept: cannot be made .*; choose another folder"):
        LatentFiles(pipe, tmp_path / "file" / "kept")


@pytest.mark.parametrize("kind", [errno.EACCES, errno.EIO])
def test_a_folder_that_may_not_be_searched_is_one_clear_line(pipe, tmp_path, picture, monkeypatch, caplog, kind):
    """Whoever runs tests as root may read everywhere, so the system's answer to all that is asked of the file is given by hand."""

    def deny(*args, **options):
        raise OSError(kind, os.strerror(kind))

    files = LatentFiles(pipe, tmp_path)
    for name in ("stat", "open", "read_bytes"):
        monkeypatch.setattr(Path, name, deny)
    monkeypatch.setattr(tempfile, "mkstemp", deny)
    with pytest.raises(
        TinyEngramError, match=r"latents-\w+\.safetensors: cannot be written .*; free space, or leave --cache_dir out"
    ) as caught:
        files.encode(picture(), (64, 64))
    assert "\n" not in str(caught.value) and caplog.text.count("they are made again") == 1


def test_a_cache_that_may_only_be_read_serves_as_long_as_nothing_is_missing(pipe, tmp_path, picture, encoded, monkeypatch):
    def deny(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    expected = LatentFiles(pipe, tmp_path).encode(picture(), (64, 64))
    monkeypatch.setattr(tempfile, "mkstemp", deny)
    files = LatentFiles(pipe, tmp_path)
    assert all(map(torch.equal, files.encode(picture(), (64, 64)), expected)) and len(encoded) == 1
    with pytest.raises(TinyEngramError, match="Read-only file system"):
        files.encode(picture(), (32, 32))


def test_a_run_reads_them_and_is_the_same(tiny, pipe, config, folder, tmp_path, encoded):
    def run(base, name: str, **options):
        return train(base, config(output_dir=str(tmp_path / name), random_flip=True, max_train_steps=3, **options), progress=False)

    plain = run(pipe, "plain")
    assert encoded == []
    kept = {"cache_dir": str(tmp_path / "kept")}
    first = run(pipe, "first", **kept)
    assert len(encoded) == 4 == len(os.listdir(tmp_path / "kept")), "two pictures and their mirror images"
    again = run(tiny.build(), "again", **kept)
    assert len(encoded) == 4 and first.losses == again.losses == plain.losses
    (folder / "0.png").write_bytes((folder / "1.png").read_bytes())
    assert run(pipe, "changed", **kept).losses != plain.losses, "a picture of the same name, and not the same"
