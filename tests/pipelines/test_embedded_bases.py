"""The embedded bases: their files, their tokenizers, what they draw by plain calls and by ours."""

import os

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, PixArtSigmaPipeline, StableDiffusionPipeline

import tiny_engram
from tests.pipelines.tiny.base import tokenizer_folder
from tiny_engram.cli import main
from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines import loaders
from tiny_engram.pipelines.loaders import EMBEDDED_BASES, load_pipeline
from tiny_engram.training.validation import draw_pictures, native_size

CLASSES = {"emoji-sd": StableDiffusionPipeline, "emoji-pixart": PixArtSigmaPipeline}
PUBLISHED = {
    "emoji-sd": ("stable_diffusion/tokenizer", ("vocab.json", "merges.txt")),
    "emoji-pixart": ("stable_diffusion_3/tokenizer_3", ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")),
}
# sRGB values of backgrounds, from the recipe
RED, CYAN = (210, 40, 40), (70, 208, 216)


@pytest.fixture(scope="module")
def bases():
    return {name: load_pipeline(name, device="cpu") for name in EMBEDDED_BASES}


@pytest.fixture(scope="module")
def pixart(bases):
    return bases["emoji-pixart"]


@pytest.mark.parametrize("name", CLASSES)
def test_it_draws_the_background_that_is_asked_for(bases, name):
    pipe = bases[name]
    assert type(pipe) is CLASSES[name] and native_size(pipe) == 128
    pictures = draw_pictures(pipe, ["a 3d rocket on a red background", "an outlined cat, cyan background"], [0, 1], steps=6, guidance=4.0)
    assert pictures.shape == (2, 128, 128, 3)
    for picture, colour in zip(pictures, (RED, CYAN), strict=True):
        border = np.concatenate([picture[:3].reshape(-1, 3), picture[-3:].reshape(-1, 3)])
        assert np.abs(np.median(border, 0) - colour).max() < 40
        assert (np.abs(picture[32:96, 32:96].astype(int) - colour).max(-1) > 60).mean() > 0.15  # something stands there


@pytest.mark.parametrize("name", CLASSES)
def test_its_tokenizer_is_the_published_one(bases, name):
    folder, files = PUBLISHED[name]
    for file in files:
        assert (EMBEDDED_BASES[name] / "tokenizer" / file).read_bytes() == (tokenizer_folder(folder) / file).read_bytes()


@pytest.mark.parametrize("name", CLASSES)
def test_its_captions_are_all_words_that_it_has(bases, name, repo_root):
    pipe = bases[name]
    lines = (repo_root / "assets/recipe/subjects.txt").read_text().splitlines()
    names = [line.strip(" !~").split(" = ")[-1] for line in lines if line and not line.startswith("#")]
    assert len(names) > 600
    ids = [i for row in pipe.tokenizer([f"an outlined {thing} on a purple background" for thing in names]).input_ids for i in row]
    assert max(ids) < pipe.text_encoder.get_input_embeddings().num_embeddings
    assert name == "emoji-sd" or pipe.tokenizer.unk_token_id not in ids


def test_all_weights_stay_within_the_budget_and_the_autoencoder_is_kept_once():
    kept = {path.resolve() for folder in EMBEDDED_BASES.values() for path in folder.rglob("*.safetensors")}
    assert len(kept) == 5 and sum(path.stat().st_size for path in kept) <= 56e6
    link = EMBEDDED_BASES["emoji-pixart"] / "vae"
    assert link.is_symlink() and os.readlink(link) == "../emoji-sd/vae"


def test_it_loads_by_plain_from_pretrained_and_saves_a_whole_folder(tmp_path):
    pipe = DiffusionPipeline.from_pretrained(EMBEDDED_BASES["emoji-pixart"])
    assert {pipe.transformer.dtype, pipe.text_encoder.dtype, pipe.vae.dtype} == {torch.float32}
    pipe.save_pretrained(tmp_path)
    assert not (tmp_path / "vae").is_symlink()
    again = load_pipeline(tmp_path, device="cpu")
    for part in ("transformer", "text_encoder", "vae"):
        one, two = getattr(pipe, part).state_dict(), getattr(again, part).state_dict()
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_padding_is_invisible(pixart):
    options = {"num_inference_steps": 2, "height": 128, "width": 128, "use_resolution_binning": False, "output_type": "pt"}
    pictures = [
        pixart("a flat key on a green background", max_sequence_length=n, generator=torch.Generator().manual_seed(0), **options).images
        for n in (24, 300)
    ]
    torch.testing.assert_close(*pictures, rtol=0, atol=1e-3)


def test_the_command_line_draws_with_it(tmp_path, capsys):
    path = tmp_path / "cat.png"
    drawn = ["generate", "--model", "emoji-pixart", "--prompt", "a cat", "--num_inference_steps", "1", "--output", str(path)]
    assert main(drawn) == 0 and path.stat().st_size > 1000
    capsys.readouterr()


def test_a_folder_of_its_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emoji-pixart").mkdir()
    with pytest.raises(TinyEngramError, match="'emoji-pixart' cannot be loaded"):
        load_pipeline("emoji-pixart", device="cpu")


def test_an_installation_without_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(loaders, "EMBEDDED_BASES", {"emoji-pixart": tmp_path / "nowhere"})
    with pytest.raises(TinyEngramError, match="carries no embedded base"):
        load_pipeline("emoji-pixart", device="cpu")


def test_a_concept_fires_on_it_and_nowhere_else(pixart):
    adapter = tiny_engram.attach(pixart)
    try:
        plain = adapter.embeds(["a 3d tako-blip", "a cat"])["prompt_embeds"]
        concept = adapter.new_concept("tako-blip")
        old = concept.mount_rows("t5")
        adapter.load_concept(concept.with_rows("t5", torch.ones(old.payload.shape), old.gain, old.bias))
        moved = adapter.embeds(["a 3d tako-blip", "a cat"])["prompt_embeds"]
    finally:
        adapter.detach()
    (fired,) = (moved[0] != plain[0]).any(-1).nonzero(as_tuple=True)
    assert torch.equal(moved[1], plain[1]) and 1 < len(fired) < 12 and fired.tolist() == list(range(int(fired[0]), int(fired[-1]) + 1))
