"""Teaching on PixArt: an encoder that is given a mask, a pipeline that rewrites prompts, a transformer told more than the text."""

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from diffusers import PixArtAlphaPipeline

import tiny_engram
from tests.pipelines.tiny.t5 import pixart
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.run_setup import frozen
from tiny_engram.training import loop, objective, rows, train, train_concepts, trainer
from tiny_engram.training.cache import encode_pictures
from tiny_engram.training.data import scan_folder
from tiny_engram.training.prepared import prepare
from tiny_engram.training.reading import read_texts

ROLE = "t5"
AT_ENCODER = {"mounts": ("input", "span"), "class_word": "lamp", "rho": 4.0}
EVERYWHERE = {"mounts": ("input", "value"), "share": "block", "bands": 2, "attention_rank": 1, "feedforward_rank": 1}


@pytest.fixture(scope="module")
def base():
    return load_pipeline("emoji-pixart", device="cpu")


def weights(pipe) -> dict[str, torch.Tensor]:
    parts = pipe.transformer, pipe.text_encoder, pipe.vae
    return {f"{k}.{name}": p.clone() for k, part in enumerate(parts) for name, p in part.state_dict().items()}


@torch.no_grad()
def fixed_error(pipe, folder, file=None) -> float:
    """Mean squared error at fixed pictures, noise and timesteps, as the pipeline's own call would have it."""
    examples = scan_folder(str(folder), ("zqx",)).examples
    latents, _ = encode_pictures(pipe, (disc.resize((64, 64)) for disc in map(_opened, examples)), 64)
    timesteps = torch.tensor([500, 900])
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(5))
    adapter = tiny_engram.attach(pipe)
    if file is not None:
        adapter.load_concept(file)
    embeds = adapter.embeds(["a zqx"] * len(latents))
    noisy = objective.add_noise(pipe.scheduler, latents, noise, timesteps)
    said = pipe.transformer(
        noisy,
        encoder_hidden_states=embeds["prompt_embeds"],
        encoder_attention_mask=embeds["prompt_attention_mask"],
        timestep=timesteps,
    ).sample
    adapter.detach()
    return float((said - objective.target_of(pipe.scheduler, latents, noise, timesteps)).square().mean())


def _opened(example):
    from tiny_engram.training.data import load_picture

    return load_picture(example.path)


@pytest.mark.parametrize("mounts", [AT_ENCODER, EVERYWHERE], ids=["encoder", "everywhere"])
def test_six_steps_lower_a_fixed_error_and_the_base_keeps_its_bits(base, config, folder, mounts):
    before, untaught = weights(base), fixed_error(base, folder)
    options = config(**mounts, max_train_steps=6, train_batch_size=4, resolution=64, caption_template=("a {trigger}",))
    result = train(base, options, progress=False)
    after = weights(base)
    assert all(torch.equal(p, after[name]) for name, p in before.items())
    assert fixed_error(base, folder, result.path) < 0.97 * untaught
    assert fixed_error(base, folder) == untaught


@pytest.mark.parametrize("mounts", [AT_ENCODER, EVERYWHERE], ids=["encoder", "everywhere"])
def test_the_transformer_says_in_training_what_it_says_when_served(base, config, tmp_path, mounts):
    options = config(**mounts, resolution=64)
    adapter = tiny_engram.attach(base)
    start = trainer.untrained(adapter, options)
    module = trainer.masters_of(adapter, start, options)
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)) * 0.3)
    text = "a 3d zqx by night, and a zqx"
    examples = scan_folder(options.train_data_dir, ("zqx",), templates=(text.replace("zqx", "{trigger}"),)).examples
    data = prepare(base, adapter, start, options, examples)
    draws = [objective.draw(0, 0, sample, 2) for sample in range(2)]  # one in each band
    calls: list[tuple] = []
    handle = base.transformer.register_forward_hook(lambda _m, *call: calls.append(call), with_kwargs=True)
    contexts = adapter.contexts[ROLE]
    with frozen(base.transformer, base.text_encoder), contexts.held() if options.at_denoiser else nullcontext():
        loop.denoising_loss(base, module, contexts, data, draws, options).backward()
    handle.remove()
    # rows that capitals would read are there, and no caption of this pipeline has any
    assert all(p.grad is not None and p.grad.ne(0).any() for p in module.parameters())
    values = {name: p.detach() for name, p in module.named_parameters()}
    adapter.load_concept(module.concept(start, ROLE, values).save(tmp_path / "c.safetensors"))
    ((noisy,), given, (trained,)) = calls[0]

    @torch.no_grad()
    def said(prompt: str) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        embeds = adapter.embeds([prompt] * 2)
        states, mask = embeds["prompt_embeds"], embeds["prompt_attention_mask"]
        options = {"encoder_hidden_states": states, "encoder_attention_mask": mask, "timestep": given["timestep"]}
        return embeds, base.transformer(noisy, **options).sample

    served, output = said(text.upper())  # the pipeline writes it in lower case
    adapter.disable_concepts()
    plain, without = said(text)
    adapter.detach()
    states, mask = given["encoder_hidden_states"].detach(), given["encoder_attention_mask"]
    time = mask.shape[1]
    assert torch.equal(mask, served["prompt_attention_mask"][:, :time]) and not served["prompt_attention_mask"][:, time:].any()
    read = mask.bool()
    torch.testing.assert_close(states[read], served["prompt_embeds"][:, :time][read], rtol=1e-4, atol=1e-4)
    assert (states[read] - plain["prompt_embeds"][:, :time][read]).abs().max() > 0.05
    torch.testing.assert_close(trained.detach(), output, rtol=1e-4, atol=1e-4)
    assert (output - without).abs().max() > 0.02


def test_texts_are_read_as_the_pipeline_reads_them(base):
    adapter = tiny_engram.attach(base)
    tokens = read_texts(adapter, ROLE, ["A  Lamp", "one " * 400])
    adapter.detach()
    assert tokens.window == tokens.ids.shape[1] == 300 and tokens.mask is not None
    assert tokens.mask.sum(1).tolist() == [4, 300]
    assert tokens.ids[0, :4].tolist() == base.tokenizer("a  lamp").input_ids and tokens.characters[0][2] == (3, 7)


@pytest.mark.parametrize("conditions", [False, True])
def test_published_shapes_say_variance_and_size_beside(conditions, config):
    """Noise is predicted, eight channels come out of four, and Alpha is told the picture's size."""
    pipe = pixart(PixArtAlphaPipeline, conditions=conditions)
    result = train(pipe, config(mounts=("span",), max_train_steps=2, resolution=32), progress=False)
    assert torch.tensor(result.losses).isfinite().all()
    assert result.concept.mount_rows(ROLE).rows().ne(0).any()


def test_concepts_with_captions_of_other_lengths_are_taught_together(base, config, folder, tmp_path, monkeypatch):
    """The shorter states of one end in zeros, which the mask hides; without the quantiser, which makes steps of rounding."""
    monkeypatch.setattr(rows, "fake_quantize", lambda x: x)
    options = {**EVERYWHERE, "max_train_steps": 3, "resolution": 64, "adam_epsilon": 1e-3}
    captions = {"zqx": "a {trigger}", "vortex cat": "a photo of a {trigger} that sits on a very long table beside two lamps"}

    def make(below: str):
        own = [
            {"trigger": word, "caption_template": (text,), "output_dir": str(tmp_path / below / word)} for word, text in captions.items()
        ]
        return [config(**options, **each, seed=k) for k, each in enumerate(own)]

    for outcome, alone in zip(train_concepts(base, make("together"), progress=False), make("alone"), strict=True):
        assert outcome.result is not None
        assert outcome.result.losses == pytest.approx(train(base, alone, progress=False).losses, rel=1e-4)
