"""What the training loop refuses, in one line and with nothing half-written: bad input, taken triggers, impossible folders, full disks."""

import errno
import os

import pytest

from tiny_engram.adapter import find_adapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.training import train
from tiny_engram.training.data import DataError


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


def tree(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_taken_trigger_and_disabled_concepts_are_refused(tiny, pipe, adapter, config, tmp_path):
    adapter.load_concept(tiny.concept(adapter, "ZQX", name="mine"))
    with pytest.raises(TinyEngramError, match="trigger 'zqx' of concept 'zqx' is already registered by concept 'mine'"):
        teach(pipe, config())
    adapter.unload_concept()
    adapter.disable_concepts()
    with pytest.raises(TinyEngramError, match="disabled, .*enable_concepts"):
        teach(pipe, config())
    assert adapter.get_list_concepts() == [] and not (tmp_path / "out").exists()


# -- bad input, full disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trigger": ""}, "is empty"),
        ({"trigger": " - !? "}, "is all punctuation"),
        ({"trigger": "zqx " * 76}, "tokens, expected at most 75"),
        ({"aliases": ("...",)}, "alias '...' is all punctuation"),
        ({"train_data_dir": "nowhere"}, "nowhere: no such folder"),
        ({"caption_template": ("a zqxish thing",)}, "the trigger 'zqx' does not fire in it"),
        ({"caption_template": ("word " * 80 + "{trigger}",)}, "does not fire in it .cut off at 77 tokens"),
    ],
)
def test_bad_input_leaves_nothing_behind(pipe, config, tmp_path, change, words):
    with pytest.raises(TinyEngramError, match=words) as caught:
        teach(pipe, config(**change))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and find_adapter(pipe) is None
    assert not any(child.training for part in (pipe.unet, pipe.vae, pipe.text_encoder) for child in part.modules())


def test_bad_pictures_are_skipped_on_request_only(pipe, config, folder, caplog):
    (folder / "2.png").write_bytes(b"no")
    (folder / "notes.md").write_text("junk")
    with pytest.raises(DataError, match=r"2\.png"):
        teach(pipe, config())
    with caplog.at_level("INFO", "tiny_engram"):
        result = teach(pipe, config(skip_bad_pictures=True, max_train_steps=1))
    assert len(result.skipped) == 1 and "2.png" in result.skipped[0] and result.concept.recipe["pictures"] == 2
    assert "skipped: " in caplog.text and "1 other files in" in caplog.text


def test_a_trigger_of_ordinary_words_is_taught_with_a_warning(pipe, config, tmp_path, caplog):
    with caplog.at_level("WARNING", "tiny_engram"):
        teach(pipe, config(max_train_steps=1))
        assert "trigger" not in caplog.text
        teach(pipe, config(trigger="cat", output_dir=str(tmp_path / "cat"), max_train_steps=1))
    assert caplog.text.count("trigger 'cat': 'cat' is made of ordinary words") == 1


def test_another_concept_is_not_written_over(pipe, config, tmp_path):
    path = teach(pipe, config(max_train_steps=1)).path
    before = path.read_bytes()
    with pytest.raises(TinyEngramError, match="holds the concept of 'zqx', not of 'vunk'; choose another output_dir"):
        teach(pipe, config(trigger="vunk", max_train_steps=1))
    assert path.read_bytes() == before
    teach(pipe, config(seed=1, max_train_steps=1))  # the same once more
    assert path.read_bytes() != before


def test_an_output_folder_that_cannot_be(pipe, config, tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in ("file", "file/below/it"):
        with pytest.raises(TinyEngramError, match="file.*: cannot write there .*choose another"):
            teach(pipe, config(output_dir=str(tmp_path / target)))
    assert (tmp_path / "file").read_text() == "mine" and tree(tmp_path) == ["file", "pictures"]


def test_a_full_disk_keeps_the_old_files(pipe, config, tmp_path, monkeypatch):
    old = teach(pipe, config(max_train_steps=1)).path
    before, there = old.read_bytes(), tree(tmp_path / "out")
    assert {"checkpoint-1", "concept.safetensors"} < set(there)

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TinyEngramError, match="No space left on device"):
        teach(pipe, config(max_train_steps=2))
    assert old.read_bytes() == before and tree(tmp_path / "out") == there and find_adapter(pipe) is None


def test_rows_that_explode_are_refused(pipe, config, tmp_path):
    with pytest.raises(TinyEngramError, match="lower the learning rate"):
        teach(pipe, config(learning_rate=1e37, gate_learning_rate=1e37, lr_scheduler="constant", lr_warmup_steps=0))
    assert not (tmp_path / "out" / "concept.safetensors").exists()
