"""The comparison on a base with a transformer and T5: the same promises as on the first one, each asked once."""

from dataclasses import replace

import pytest
import torch

import tiny_engram
from benchmarks.personalization import teach as bench
from benchmarks.personalization.bases import BASES, EMOJI_PIXART
from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.plan import Settings
from benchmarks.personalization.trigger_free import TriggerFree, near_misses, prompts
from tests.personalization.conftest import pictures

TRIGGER, OTHER = "rugo-bin", "kuvak-lin"
TEXT = "a 3d {0} on a red background"
TAUGHT = ("inversion-1", "inversion-t", "lora-unet-r8", "lora-both-r8", "full", "after-tiny-engram", "after-v-engram", "ours")


@pytest.fixture(scope="module")
def pixart(subjects):
    from benchmarks.personalization.base import Base

    loaded = Base.load(spec=EMOJI_PIXART)
    loaded.subjects = subjects | {"dot": replace(subjects["dot"], trigger=OTHER)}
    return loaded


@pytest.fixture(scope="module")
def pixart_taught(pixart, subjects):
    from benchmarks.personalization.base import Taught

    return {name: Taught.of(pixart, subjects[name], pictures(i, count=2, captions=1)) for i, name in enumerate(("disc", "dot"))}


def moved(adapters):
    """A method that was not taught, but moved away from where it starts."""
    with torch.no_grad():
        for k, p in enumerate(adapters.parameters()):
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
    return adapters


def one(pixart, text=TEXT, word=TRIGGER, vectors=None):
    return pixart.rows([text], [(word,)], torch.zeros(1, 1, dtype=torch.long), vectors)


def shown(pixart, adapter, text, steps):
    """What the pipeline draws of a text by itself, as uint8."""
    made = pixart.pipe(
        text, num_inference_steps=steps, guidance_scale=4.0, generator=torch.Generator().manual_seed(5), height=128, width=128,
        max_sequence_length=pixart.length, use_resolution_binning=False, output_type="pt", return_dict=False,
    )[0]  # fmt: skip
    return (made * 255).round().byte().permute(0, 2, 3, 1)


@torch.no_grad()
def test_prompts_are_the_pipelines_own(pixart):
    rows, text = one(pixart), TEXT.format(TRIGGER)
    states, mask, _, _ = pixart.pipe.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=pixart.length)
    assert torch.equal(rows.states, states) and torch.equal(pixart.mask(rows.ids), mask)
    ((_, _, start, length),) = rows.spans
    assert rows.ids[0, start : start + length].tolist() == pixart.word_ids(TRIGGER)
    assert pixart.tokenizer.decode(rows.ids[0, start : start + length]).strip() == TRIGGER
    made = draw(pixart, None, rows, [5], steps=2)
    assert torch.equal(shown(pixart, None, text, 2), torch.from_numpy(made))


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "apart"),
    [({"mounts": "input+span+value", "deep_local": True, "bands": 2, "share": "block"}, 0), ({}, 1)],
    ids=["rows alone", "ours by default"],
)
def test_the_product_draws_what_ours_draws(pixart, run, options, apart):
    ours = moved(Ours(pixart, [run("ours", plain=bool(options), **options)]))
    rows = one(pixart)
    made, plain = (torch.from_numpy(draw(pixart, adapters, rows, [5], steps=2).astype(int)) for adapters in (ours, None))
    adapter = tiny_engram.attach(pixart.pipe)
    try:
        concept = ours.concept(pixart, 0)
        adapter.load_concept(concept)
        drawn = shown(pixart, adapter, TEXT.format(TRIGGER), 2).long()
    finally:
        adapter.detach()
    assert concept.nbytes == ours.payload(0) and concept.base == "emoji-pixart"
    assert (drawn - made).abs().max() <= apart < (made - plain).abs().float().mean()


@pytest.mark.parametrize("method", TAUGHT)
def test_gradients_are_those_of_the_loss(pixart, pixart_taught, run, method):
    """A short step against the gradient lowers the loss by as much as its norm says."""
    options = {"quantise": False, "collage": 0, "bands": 2} if method == "ours" else {}
    adapters = METHODS[method](pixart, [run(method, plain=False, **options)])
    with torch.no_grad():  # away from the zeros where some begin
        for k, p in enumerate(adapters.parameters()):
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
    plan = bench._Plan.of(pixart, adapters, [pixart_taught["disc"]], 1, 2)
    noise = bench._noise(0, 0, 1, 2, pixart.latent_shape)[0]

    def loss():
        return bench._losses(pixart, adapters, plan, 0, slice(0, 1), noise, None).sum()

    before = loss()
    before.backward()
    grads = [p.grad for p in adapters.parameters() if p.grad is not None]
    assert all(g.shape == p.shape and g.isfinite().all() for g, p in zip(grads, adapters.parameters(), strict=True))
    square = torch.stack([g.square().sum() for g in grads]).sum()
    wanted = 1e-3 * before.detach()
    with torch.no_grad():
        for p, g in zip(adapters.parameters(), grads, strict=True):
            p -= wanted / square * g
        lowered = before - loss()
    assert 0.7 * wanted < lowered < 1.3 * wanted
    assert not any(p.requires_grad for part in (pixart.denoiser, pixart.text_encoder) for p in part.parameters())


@torch.no_grad()
@pytest.mark.parametrize("method", ["inversion-t", "after-tiny-engram", "after-v-engram", "lora-unet-r8", "ours"])
def test_runs_of_triggers_of_other_lengths_do_not_touch_each_other(pixart, run, method):
    assert len(pixart.word_ids(TRIGGER)) != len(pixart.word_ids(OTHER))
    both = METHODS[method](pixart, [run(method, "disc", plain=False), run(method, "dot", plain=False)])
    alone = METHODS[method](pixart, [run(method, "dot", plain=False)])
    words, latents = [(TRIGGER,), (OTHER,)], torch.ones(2, *pixart.latent_shape)
    found = []
    for adapters, owners in ((both, [[0], [1]]), (alone, [[-1], [0]])):
        rows = pixart.rows([TEXT] * 2, words, torch.tensor(owners), adapters.vectors)
        states = adapters.states(pixart, rows)
        with adapters.attached(pixart, rows, states):
            found.append(pixart.predict(latents, torch.tensor([500, 500]), states, pixart.mask(rows.ids))[1])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_stands_behind_the_text_is_masked(pixart, run):
    """Also where maps ask how much attention a trigger gets: with fewer tokens of padding, nothing changes."""
    ours = moved(Ours(pixart, [run("ours", plain=False)]))
    rows = one(pixart)
    short = type(rows)(rows.ids[:, :40], rows.states[:, :40], rows.run, rows.spans)
    found = []
    for part in (rows, short):
        states = ours.states(pixart, part)
        with ours.attached(pixart, part, states):
            latents = torch.ones(1, *pixart.latent_shape)
            found.append(pixart.predict(latents, torch.tensor([500]), states, pixart.mask(part.ids)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_what_prompts_without_the_trigger_feel(pixart, run):
    settings = Settings(steps=1, main=1, checkpoints=(1,), drawing_steps=1)
    texts = prompts(["fox", "red apple", "whale", "drum"], TRIGGER, 8)
    near = [any(word in text for word in near_misses(TRIGGER)) for text in texts]
    untriggered = TriggerFree(pixart, texts, near, settings, pictures=1)
    ours = moved(Ours(pixart, [run("ours", plain=False)]))
    for found in (untriggered.changed_by(ours), untriggered.changed_by_product(ours.concept(pixart, 0))):
        assert all(found[name] == {"max": 0.0, "mean": 0.0} for name in ("conditioning", "near", "denoiser", "pictures"))
    lora = untriggered.changed_by(moved(METHODS["lora-both-r8"](pixart, [run("lora-both-r8")])))
    assert all(lora[name]["max"] > 1e-4 for name in ("conditioning", "near", "denoiser"))


def test_bases_have_results_of_their_own():
    assert len({spec.results for spec in BASES.values()}) == len(BASES)
    assert all((spec.folder / "model_index.json").exists() for spec in BASES.values())
