"""Loading a base: the embedded one, a folder, and every way in which there is none."""

import json
import shutil

import pytest
import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines import loaders
from tiny_engram.pipelines.loaders import load_pipeline


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_folder_loads_with_its_weights_in_the_dtype_asked_for(saved_pipe, pipe, dtype):
    loaded = load_pipeline(saved_pipe, dtype=dtype, device="cpu")
    for part in ("unet", "vae", "text_encoder"):
        want, have = getattr(pipe, part).state_dict(), getattr(loaded, part).state_dict()
        assert all(torch.equal(want[k].to(v.dtype), v) for k, v in have.items()) and set(want) == set(have)
        assert getattr(loaded, part).dtype == getattr(torch, dtype) and not getattr(loaded, part).training


def test_progress_bars_are_switched_back_on(saved_pipe):
    from diffusers.utils import logging as ours
    from transformers.utils import logging as theirs

    shown = [(library, library.is_progress_bar_enabled()) for library in (ours, theirs)]
    try:
        for library, _ in shown:
            library.enable_progress_bar()
        load_pipeline(saved_pipe, device="cpu")
        assert all(library.is_progress_bar_enabled() for library, _ in shown)
        ours.disable_progress_bar()
        load_pipeline(saved_pipe, device="cpu")
        assert not ours.is_progress_bar_enabled()
    finally:
        for library, on in shown:
            (library.enable_progress_bar if on else library.disable_progress_bar)()


def refused(words: str, *args, **kwargs) -> None:
    with pytest.raises(TinyEngramError, match=words) as caught:
        load_pipeline(*args, **kwargs)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_no_such_model(tmp_path):
    for model in (tmp_path / "nowhere", "no-such-user/no-such-model", "a/b/c", ""):
        refused("cannot be loaded .*expected a diffusers folder or hub id", model)
    refused(r"\.\.\.\); expected .* or an embedded base \(emoji-sd, emoji-pixart\)", "emoji-pixxart")  # the reason is cut between words
    (tmp_path / "empty").mkdir()
    refused("empty' cannot be loaded", tmp_path / "empty")


def test_damaged_models(saved_pipe, tmp_path):
    def copy(name: str):
        return shutil.copytree(saved_pipe, tmp_path / name)

    cut = copy("cut") / "unet" / "diffusion_pytorch_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:5000])
    refused("cut' cannot be loaded", tmp_path / "cut")
    (copy("index") / "model_index.json").write_text("{")
    refused("index' cannot be loaded", tmp_path / "index")
    index = copy("class") / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "unet": ["diffusers", "NoSuchModel"]}))
    refused("class' cannot be loaded", tmp_path / "class")
    config = copy("width") / "text_encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    refused("width' cannot be loaded", tmp_path / "width")


def test_dtype_device_and_missing_base(saved_pipe, tmp_path, monkeypatch):
    refused("dtype 'int8', expected float32, float16 or bfloat16", saved_pipe, dtype="int8")
    refused("device 'toaster' cannot be used .*expected cpu", saved_pipe, device="toaster")
    if not torch.cuda.is_available():
        refused("device 'cuda' cannot be used", saved_pipe, device="cuda")
    monkeypatch.setattr(loaders, "EMBEDDED_BASE", tmp_path / "nowhere")
    refused("carries no embedded base .*give one with --model")
