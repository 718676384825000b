"""Pictures drawn during training: fixed seeds, one sheet, the pipeline left as it was; thumbnails; files whole or absent."""

import base64
import errno
import io
import os

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_engram.errors import TinyEngramError
from tiny_engram.training.data import Example
from tiny_engram.training.validation import Validator, draw_pictures, native_size, save_picture, thumbnail_of


def test_pictures_depend_on_prompt_and_seed_alone(pipe):
    assert native_size(pipe) == 64
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw_pictures(pipe, ["a cat", "a cat"], [3, 4], steps=2, guidance=4.0)
    assert first.shape == (2, 64, 64, 3) and first.dtype == np.uint8 and not np.array_equal(first[0], first[1])
    assert torch.equal(before, torch.get_rng_state())
    again = draw_pictures(pipe, ["a cat", "a cat"], [4, 3], steps=2, guidance=4.0)
    assert np.array_equal(first[0], again[1]) and np.array_equal(first[1], again[0])
    other = draw_pictures(pipe, ["a cat", "a cat"], [3, 4], steps=2, guidance=4.0, negative_prompt="a tree by a river")
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("disable", [True, False])
def test_the_progress_bar_is_put_back(pipe, disable, capfd):
    pipe.set_progress_bar_config(disable=disable, leave=False)
    try:
        draw_pictures(pipe, ["a cat"], [0], steps=1, guidance=1.0)
        assert pipe._progress_bar_config == {"disable": disable, "leave": False} and capfd.readouterr().err == ""
        with pytest.raises(ZeroDivisionError):
            draw_pictures(pipe, ["a cat"], [0], steps=0, guidance=1.0)
        assert pipe._progress_bar_config == {"disable": disable, "leave": False}
    finally:
        pipe.set_progress_bar_config(disable=True)


def test_the_sheet_has_a_column_a_prompt_and_a_row_a_seed(tiny, pipe, adapter, config, tmp_path):
    told = config(validation_prompts=("a {trigger}", "the zqx by night"), validation_seeds=(5, 6, 7))
    concept = tiny.concept(adapter, "zqx")
    sheet = Validator(adapter, told, tmp_path / "v").draw(concept, 12)
    assert sheet is not None and sheet.shape == (3 * 64, 2 * 64, 3) and adapter.get_list_concepts() == []
    assert np.array_equal(np.asarray(Image.open(tmp_path / "v" / "step-12.png")), sheet)
    adapter.load_concept(concept)
    rows = [draw_pictures(pipe, ["a zqx", "the zqx by night"], [s, s], steps=2, guidance=4.0) for s in (5, 6, 7)]
    assert np.array_equal(sheet, np.concatenate([np.concatenate(list(r), 1) for r in rows], 0))


def test_no_prompts_no_sheet(tiny, adapter, config, tmp_path):
    assert Validator(adapter, config(), tmp_path / "v").draw(tiny.concept(adapter, "zqx"), 1) is None
    assert not (tmp_path / "v").exists()


def test_the_concept_is_unloaded_after_an_error(tiny, adapter, config, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no picture")

    monkeypatch.setattr(type(adapter.pipe), "__call__", fail)
    with pytest.raises(RuntimeError, match="no picture"):
        Validator(adapter, config(validation_prompts=("a {trigger}",)), tmp_path).draw(tiny.concept(adapter, "zqx"), 1)
    assert adapter.get_list_concepts() == []


def test_thumbnail_is_a_small_square_webp(folder):
    uri = thumbnail_of(Example(folder / "0.png", ()))
    head, _, data = uri.partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/webp;base64" and picture.format == "WEBP" and picture.size == (64, 64) and len(uri) < 4000


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = save_picture(Image.new("RGB", (4, 4), (1, 2, 3)), tmp_path / "new" / "p.png")
    before = path.read_bytes()

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TinyEngramError, match=r"p\.png: cannot write the picture \(No space left on device\)"):
        save_picture(Image.new("RGB", (4, 4)), path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["p.png"]
    with pytest.raises(TinyEngramError, match="cannot write the picture"):
        save_picture(Image.new("RGB", (4, 4)), path / "below" / "a_file.png")
