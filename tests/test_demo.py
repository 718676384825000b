"""The demonstration on the embedded base, in very few steps: its files, its report, and no difference without the trigger."""

import json

import numpy as np
import pytest
from PIL import Image

from tiny_engram import demo
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.training.validation import native_size


def test_files_report_and_no_difference_without_the_trigger(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SEEDS", demo.SEEDS[:1])
    out = tmp_path / "demo"
    report = demo.run_demo(out, steps=2, inference_steps=2)
    assert report["largest_difference_without_trigger"] == 0
    assert json.loads((out / "report.json").read_text()) == report
    assert {"concept.safetensors", "report.json", "sheet.png", "taught.png"} <= {p.name for p in out.iterdir()}
    concept = Concept.load(out / report["file"])
    assert concept.trigger == report["trigger"] and concept.base == "emoji-sd" and concept.thumbnail
    place = concept.roles["clip_l"]
    assert report["rows"] == sum(at.payload[..., 0].numel() for at in place.mounts.values()) and report["maps"] == len(place.maps) == 14
    gates = sum(at.gain.nbytes + at.bias.nbytes for at in place.mounts.values())
    assert report["row_bytes"] + gates + report["map_bytes"] == report["table_bytes"] == concept.nbytes
    assert report["class_word"] == concept.recipe["class_word"] == "jellyfish"
    assert report["file_bytes"] == (out / report["file"]).stat().st_size and report["steps"] == 2
    assert concept.nbytes <= 12_288 and concept.with_details(thumbnail=None).save(tmp_path / "plain.safetensors").stat().st_size <= 16_384
    assert 0 < report["teaching_seconds"] <= report["total_seconds"] < 600 and report["peak_memory_bytes"] > 2**27
    (prompt,) = report["explanation"]["prompts"]
    assert [f["name"] for f in prompt["fired"]] == [report["trigger"]]
    sheet = Image.open(out / "sheet.png")
    pipe = demo.load_pipeline(device="cpu")
    side = native_size(pipe)
    assert side == 128 and sheet.width > len(demo.CONTEXTS) * side and sheet.height > 6 * side
    # The picture beside the sheet is the concept's, not the base's: what the file draws now.
    adapter = demo.attach(pipe)
    prompt = demo.CONTEXTS["taught"].replace("{trigger}", report["trigger"])
    contexts = [text.replace("{trigger}", report["trigger"]) for text in demo.CONTEXTS.values()]
    base = demo.draw_pictures(pipe, contexts, [demo.SEEDS[0]] * len(contexts), steps=2, guidance=4.0)[0]
    adapter.load_concept(out / report["file"])
    taught = demo.draw_pictures(pipe, contexts, [demo.SEEDS[0]] * len(contexts), steps=2, guidance=4.0)[0]
    shown = np.asarray(Image.open(out / "taught.png"))
    assert contexts[0] == prompt and np.array_equal(shown, taught) and not np.array_equal(shown, base)


def test_a_difference_without_the_trigger_is_an_error(tmp_path, monkeypatch):
    """Prompts that hold the trigger stand where trigger-free ones belong: the check must see it."""
    monkeypatch.setattr(demo, "SEEDS", demo.SEEDS[:1])
    monkeypatch.setattr(demo, "CONTEXTS", {"taught": "a 3d {trigger}"})
    monkeypatch.setattr(demo, "WITHOUT", ("a red tako-blip",))
    with pytest.raises(TinyEngramError, match="a picture without the trigger changed by .*expected 0"):
        demo.run_demo(tmp_path, trigger="tako-blip", steps=2, inference_steps=2)


def test_every_context_names_the_trigger_once_and_the_others_never():
    assert len(demo.CONTEXTS) == 6 and all(text.count("{trigger}") == 1 for text in demo.CONTEXTS.values())
    assert not [text for text in demo.WITHOUT if "{trigger}" in text or "tako-blip" in text]
