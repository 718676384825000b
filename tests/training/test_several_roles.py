"""Teaching a concept of two encoders, on a tiny Stable Diffusion XL: with everything that a run of one encoder has."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline, UNet2DConditionModel
from PIL import Image

import tiny_engram
from tests.pipelines.tiny.flux import flux
from tests.pipelines.tiny.stable_diffusion import version_3, xl
from tests.pipelines.tiny.t5 import hunyuandit
from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.training import loop, objective, train, trainer
from tiny_engram.training.cache import encode_picture
from tiny_engram.training.data import scan_folder
from tiny_engram.training.many import train_concepts
from tiny_engram.training.prepared import prepare

ROLES = ("clip_l", "clip_g")
ALL = {"mounts": ("input", "span", "value"), "share": "block", "bands": 2, "attention_rank": 1, "feedforward_rank": 1}
PROMPTS = ("a {trigger}", "the {trigger} by night")


@pytest.fixture(scope="module")
def base():
    return xl()


def test_what_was_validated_is_what_is_shipped(base, config, as_validated, tmp_path):
    more = {"validation_steps": 4, "validation_prompts": PROMPTS, "validation_seeds": (3,), "class_word": "lamp", "collages": 2}
    result = train(base, config(**ALL, **more), progress=False)
    sheet = np.asarray(Image.open(tmp_path / "out" / "validation" / "step-4.png"))
    assert set(Concept.load(result.path).roles) == set(ROLES)
    names = {name for name in load_checkpoint(tmp_path / "out" / "checkpoint-4")[0] if name.startswith("master.")}
    assert names == {f"master.{role}.{what}" for role in ROLES for what in ("rows", "gain", "bias", "maps")}
    fresh = xl()
    adapter = tiny_engram.attach(fresh)
    adapter.load_concept(result.path)
    assert np.array_equal(as_validated(fresh, [p.replace("{trigger}", "zqx") for p in PROMPTS]), sheet)


def test_the_unet_is_told_sizes_and_crops(base, config, tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    Image.new("RGB", (200, 100)).save(folder / "a.png")
    Image.new("RGB", (64, 96)).save(folder / "b.png")
    options = config(mounts=("span",), train_data_dir=str(folder))
    adapter = tiny_engram.attach(base)
    try:
        start = trainer.untrained(adapter, options)
        data = prepare(base, adapter, start, options, scan_folder(str(folder), ("zqx",)).examples)
        draws = [objective.draw(0, 0, sample, 2) for sample in range(2)]
        shown, _ = data.batch(draws, 0.0)
        seen: list[torch.Tensor] = []
        handle = base.unet.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["added_cond_kwargs"]["time_ids"]), with_kwargs=True
        )
        loop.denoising_loss(base, trainer.masters_of(adapter, start, options), adapter.contexts, data, draws, options)
        handle.remove()
    finally:
        adapter.detach()
    # height and width as found, top and left of the crop once the picture is scaled to 128 x 64 and 64 x 96, height and width now
    frames = [(100.0, 200.0, 0.0, 32.0, 64.0, 64.0), (96.0, 64.0, 16.0, 0.0, 64.0, 64.0)]
    assert [tuple(frame) for frame in data.frames] == frames
    assert torch.equal(seen[0], shown.frames) and {tuple(row) for row in shown.frames.tolist()} <= set(frames)


def test_half_precision_and_gradient_checkpoints(config, tmp_path):
    plain = train(xl(), config(**ALL, max_train_steps=2), progress=False)
    pipe = xl()
    pipe.unet.enable_gradient_checkpointing()
    kept = train(pipe, config(**ALL, max_train_steps=2, output_dir=str(tmp_path / "kept")), progress=False)
    assert kept.losses == pytest.approx(plain.losses, rel=1e-4)
    a, b = (load_checkpoint(p.path.parent / "checkpoint-2")[0] for p in (plain, kept))
    for role in ROLES:
        for what in ("rows", "maps"):
            name = f"optimizer.{role}.{what}.exp_avg"
            torch.testing.assert_close(a[name], b[name], rtol=1e-2, atol=1e-5)
    half = train(xl().to(torch.bfloat16), config(**ALL, max_train_steps=2, output_dir=str(tmp_path / "half")), progress=False)
    assert half.losses == pytest.approx(plain.losses, rel=0.05)


@pytest.mark.parametrize("build", [xl, version_3, pytest.param(hunyuandit, marks=pytest.mark.families)], ids=["xl", "3", "hunyuandit"])
def test_a_class_word_moves_every_encoder_s_states_to_its_own(build, config):
    pipe = build()
    options = config(mounts=("input", "span"), class_word="lamp", rho=4.0)
    adapter = tiny_engram.attach(pipe)
    start = trainer.untrained(adapter, options)
    begun = trainer.masters_of(adapter, start, options)
    text = "a 3d {} on a white background"
    plain, word = (adapter.family.states(pipe, adapter.embeds(text.format(said))) for said in ("zqx", "lamp"))
    adapter.load_concept(begun.concept(start, "", {name: p.detach() for name, p in begun.named_parameters()}))
    moved = adapter.family.states(pipe, adapter.embeds(text.format("zqx")))
    adapter.detach()
    for role in start.roles:
        (last,) = torch.nonzero((plain[role] != moved[role]).any(-1)[0])[-1:].tolist() or [[None]]
        there = adapter.mounts[role].tokenizer(text.format("lamp"), return_offsets_mapping=True)
        first = text.index("{")
        at = [k for k, (a, b) in enumerate(there.offset_mapping) if b > a and b == first + 4][0]
        now, before = (float((x[role][0, last[0]] - word[role][0, at]).norm()) for x in (moved, plain))
        assert now < 0.5 * before, role


def test_concepts_side_by_side_are_those_alone(base, config, tmp_path):
    def options(name: str, trigger: str):
        return config(**ALL, trigger=trigger, output_dir=str(tmp_path / name), max_train_steps=2)

    alone = [train(base, options(f"alone{k}", trigger), progress=False) for k, trigger in enumerate(("zqx", "a qzwv lamp"))]
    train_concepts(base, [options(f"both{k}", trigger) for k, trigger in enumerate(("zqx", "a qzwv lamp"))], progress=False)
    for k, one in enumerate(alone):
        (before, _), (found, state) = (load_checkpoint(tmp_path / f"{name}{k}" / "checkpoint-2") for name in ("alone", "both"))
        assert state["losses"] == pytest.approx(one.losses, rel=1e-4) and found.keys() == before.keys()
        for role in ROLES:
            mine, theirs = (tensors[f"optimizer.{role}.rows.exp_avg"] for tensors in (before, found))
            torch.testing.assert_close(theirs, mine, rtol=1e-2, atol=1e-2 * float(mine.abs().max()))


def test_the_shift_of_a_flow_follows_the_picture_s_size(config):
    scheduler = flux().scheduler
    pipe = flux()
    pipe.scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=0.5 + (1.15 - 0.5) * (1024 - 256) / (4096 - 256))
    assert objective.timesteps_for(scheduler, [0.4999], config(), 1024) == pytest.approx(float(pipe.scheduler.timesteps[1]), rel=1e-5)
    few, many = (objective.timesteps_for(scheduler, [0.4999], config(), places) for places in (256, 4096))
    assert few < many


def test_pictures_of_several_shapes(config, tmp_path):
    """FLUX.1 packs latents, which numbers the places and shifts the timesteps by their count."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    for k, size in enumerate(((96, 64), (64, 96), (64, 64))):
        Image.fromarray(np.random.default_rng(k).integers(0, 255, (size[1], size[0], 3), np.uint8)).save(folder / f"{k}.png")
    more = {"buckets": True, "resolution": 64, "train_data_dir": str(folder), "max_train_steps": 6, "random_flip": True}
    result = train(flux(), config(mounts=("span",), **more), progress=False)
    assert np.isfinite(result.losses).all() and set(result.concept.roles) == {"t5"}


def test_what_reads_more_than_noise_is_refused(config):
    pipe = xl()
    told = {name: value for name, value in pipe.unet.config.items() if not name.startswith("_")}
    unet = UNet2DConditionModel(**{**told, "in_channels": 9})
    painting = StableDiffusionXLInpaintPipeline(**{**pipe.components, "unet": unet}, add_watermarker=False)
    with pytest.raises(TinyEngramError, match="reads 9 channels, expected the 4 of its VAE's latents: .* teach on the base"):
        train(painting, config(mounts=("span",)), progress=False)


def test_a_refiner_is_refused(config):
    pipe = StableDiffusionXLImg2ImgPipeline(**xl().components, requires_aesthetics_score=True, add_watermarker=False)
    with pytest.raises(TinyEngramError, match="refines what another one drew, and is told how beautiful that is"):
        train(pipe, config(mounts=("span",)), progress=False)


def test_maps_where_there_are_none_are_refused_with_the_way_out(config):
    with pytest.raises(TinyEngramError, match="no maps can be put into a FluxPipeline.*; pass --attention_rank 0 --feedforward_rank 0"):
        train(flux(), config(mounts=("value",), attention_rank=1), progress=False)
    with pytest.raises(TinyEngramError, match="mount 'pooled' is unknown at clip_l"):
        train(xl(), config(mounts=("pooled",)), progress=False)


def test_a_vae_of_half_precision_encodes_in_whole_where_it_asks_for_that():
    pipe = xl()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    pipe.vae.half()
    before = {name: p.clone() for name, p in pipe.vae.state_dict().items()}
    seen: list[torch.dtype] = []
    handle = pipe.vae.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    mean, _ = encode_picture(pipe, picture, (64, 64))
    handle.remove()
    assert seen == [torch.float32] and pipe.vae.dtype == torch.float16
    assert all(torch.equal(p, before[name]) for name, p in pipe.vae.state_dict().items())
    torch.testing.assert_close(mean, encode_picture(xl(), picture, (64, 64))[0], rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        next(pipe.vae.parameters()).fill_(torch.nan)
    with pytest.raises(TinyEngramError, match="latents that are no numbers in torch.float16; load it in float32 or bfloat16"):
        encode_picture(pipe, picture, (64, 64))
