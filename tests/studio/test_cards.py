"""Files of strangers: checked, bounded, shown as they may be shown, and refused in one line."""

import base64
import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tiny_engram import concept_file
from tiny_engram.concept import Concept
from tiny_engram.concept_layout import format_of, tensors_of
from tiny_engram.studio import library as module
from tiny_engram.studio.cards import safe_thumbnail
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.library import file_name_of


def test_an_exported_file_comes_back_the_same(library, workspace, made, tmp_path):
    id = library.add(made.with_details(name="Zørb: a/b\\c 猫"))
    path = library.export(id)
    assert path.name == "Zørb-a-b-c-猫.safetensors" and path.is_relative_to(workspace.tmp)
    with pytest.raises(StudioError, match="in the library already, as 'Zørb: a/b"):
        library.import_file(path)
    kept = shutil.copy(path, tmp_path / "kept.safetensors")
    library.delete(id)
    again = library.import_file(kept)
    assert library.get(again).name == "Zørb: a/b\\c 猫"
    assert (workspace.concepts / f"{again}.safetensors").read_bytes() == Path(kept).read_bytes()
    assert len(list(workspace.tmp.iterdir())) == 1  # the export alone: imports clean up


def test_a_clash_of_names_gives_a_free_one(library, attached, tiny, saved):
    library.add(tiny.concept(attached[1], "other", name="zorb"))
    assert library.get(library.import_file(saved)).name == "Zorb-2"
    with pytest.raises(StudioError, match="already, as 'Zorb-2'"):
        library.import_file(saved)


def test_the_trash_is_no_hindrance_to_an_import(library, saved):
    library.delete(library.import_file(saved))
    library.import_file(saved)


def refused(library, path, line):
    with pytest.raises(StudioError, match=line) as error:
        library.import_file(path)
    text = str(error.value)
    assert "\n" not in text and str(path.parent) not in text and str(library.workspace.root) not in text
    assert library.cards() == [] and not list(library.workspace.tmp.iterdir()) and not list(library.workspace.concepts.iterdir())


def test_files_that_are_no_concepts_are_refused(library, saved, tmp_path, monkeypatch):
    whole = saved.read_bytes()
    bad = tmp_path / "bad.safetensors"
    refused(library, bad, r"^bad\.safetensors: no such file")
    refused(library, tmp_path, "no such file, expected a concept")
    for blob, line in (
        (b"", "not a sound safetensors file"),
        (whole[: len(whole) // 2], "truncated"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "its data is not what was saved"),
        (b"\xff" * 200, "header of"),
    ):
        bad.write_bytes(blob)
        refused(library, bad, rf"^bad\.safetensors: .*{line}")
    save_file({"lora.weight": torch.zeros(3)}, bad)
    refused(library, bad, "is this a LoRA")

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    bad.write_bytes(pickle.dumps(Evil()))
    refused(library, bad, "not a sound safetensors file")
    torch.save({"evil": Evil()}, bad)
    refused(library, bad, "not a sound safetensors file")
    assert not (tmp_path / "owned").exists()
    monkeypatch.setattr(module, "MOST_IMPORT", len(whole) - 1)
    refused(library, saved, "expected a concept of some kilobytes")


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"name": "x" * 201}, "its name has 201 characters"),
        ({"name": " "}, "its name has 1 characters"),
        ({"base": "x" * 256}, "its base has 256"),
        ({"recipe": {"x": "y" * 70_000}}, "its recipe has 7"),
        ({"recipe": {"loss": float("nan")}}, "its recipe is no plain JSON"),
    ],
)
def test_texts_beyond_bounds_are_refused(library, made, tmp_path, changes, line):
    refused(library, made.with_details(**changes).save(tmp_path / "long.safetensors"), line)


def test_whatever_bytes_are_sent_the_answer_is_one_line(library, saved, tmp_path):
    whole, draw = saved.read_bytes(), random.Random(0)
    header = int.from_bytes(whole[:8], "little") + 8
    path, taken = tmp_path / "sent.safetensors", 0
    for _ in range(150):
        blob = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(header)
            blob[at : at + draw.choice((0, 1, 1, 2))] = bytes(draw.choices(b'0129{}[],:"-ae\\ \xff', k=draw.randint(0, 2)))
        path.write_bytes(blob)
        try:
            library.import_file(path)
            taken += 1
        except StudioError as error:
            assert "\n" not in str(error) and str(tmp_path) not in str(error)
    cards = library.cards()
    assert len(cards) == taken < 100 and not [c for c in cards if c.error]
    for card in cards:
        json.dumps(library.inspect(card.id), allow_nan=False)


def test_the_name_of_a_stranger_is_one_line(library, made, tmp_path):
    library.import_file(made.with_details(name="a\nb\u202ec\x00").save(tmp_path / "odd.safetensors"))
    assert library.cards()[0].name == "a b c"


def test_a_thumbnail_of_training_is_shown(library, made, tmp_path, picture_bytes):
    from tiny_engram.training.data import Example
    from tiny_engram.training.validation import thumbnail_of

    (tmp_path / "a.png").write_bytes(picture_bytes())
    thumbnail = thumbnail_of(Example(tmp_path / "a.png", ()))
    library.add(made.with_details(thumbnail=thumbnail))
    assert library.cards()[0].thumbnail == thumbnail and thumbnail.startswith("data:image/webp")


@pytest.mark.parametrize("steps", ["many", True, -1, None, {"a": 1}])
def test_a_recipe_may_say_anything(library, made, tmp_path, steps):
    path = made.with_details(recipe={"step": steps, "<b>": "<script>"}).save(tmp_path / "odd.safetensors")
    id = library.import_file(path)
    assert library.cards()[0].steps is None and library.inspect(id)["recipe"]["<b>"] == "<script>"


def with_thumbnail(path: Path, concept: Concept, thumbnail: str) -> Path:
    """Written past the format's own check, as a stranger would."""
    packed = concept.metadata | {concept_file.THUMBNAIL: thumbnail}
    version = format_of(concept.config, concept.roles)
    tensors = {name: t for role, place in concept.roles.items() for name, t in tensors_of(role, place, version).items()}
    return concept_file.write(path, tensors, packed)


def test_a_thumbnail_that_is_none_is_left_out(library, made, tmp_path):
    buffer = io.BytesIO()
    Image.new("L", (2, 1100)).save(buffer, "PNG")
    high = base64.b64encode(buffer.getvalue()).decode()
    thumbnails = (
        "javascript:alert(1)",
        'data:image/png;base64,AAAA" onerror="alert(1)',
        "data:image/svg+xml;base64,PHN2Zy8+",
        "data:image/png;base64,AAAA",
        "data:image/png;base64," + high,
        "data:image/webp;base64," + made.thumbnail.partition(",")[2],  # a PNG that says it is a WebP
    )
    for thumbnail in thumbnails:
        assert safe_thumbnail(thumbnail) is None
        id = library.import_file(with_thumbnail(tmp_path / "odd.safetensors", made, thumbnail))
        assert library.cards()[0].thumbnail is None
        assert Concept.load(library.workspace.concepts / f"{id}.safetensors").thumbnail is None
        library.rename(id, "can be saved again")
        library.delete(id)
    assert safe_thumbnail(made.thumbnail) == made.thumbnail


@pytest.mark.parametrize(
    "name, file",
    [
        ("my dog", "my-dog"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "concept"),
        ("", "concept"),
        ("CON", "CON-concept"),
        ("lpt3", "lpt3-concept"),
        ('<a href="x">&', "a-href-x"),
        ("\u202egnp.exe\x00", "gnp-exe"),
        ("x" * 300, "x" * 60),
        ("猫" * 100, "猫" * 60),
        ("\U0001f600", "concept"),
    ],
)
def test_file_names_that_every_system_takes(name, file):
    assert file_name_of(name) == f"{file}.safetensors"
