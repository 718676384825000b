"""Masks: where they are found, what is refused, and what a mask does to the loss."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_engram
from tiny_engram.training import loop, objective, train, trainer
from tiny_engram.training.data import DataError, fitted_mask, scan_folder
from tiny_engram.training.prepared import prepare


def masked(folder, **options) -> list[bool]:
    return [one.masked for one in scan_folder(folder, ("zqx",), **options).seen]


def test_masks_are_found_and_are_no_pictures(folder, mask):
    mask().save(folder / "0.mask.png")
    (folder / "masks").mkdir()
    mask().save(folder / "masks" / "1.png")
    found = scan_folder(folder, ("zqx",))
    assert [e.path.name for e in found.examples] == ["0.png", "1.png"] and masked(folder) == [True, True] and found.others == 0
    assert [e.mask for e in found.examples] == [folder / "0.mask.png", folder / "masks" / "1.png"]


def test_a_mask_of_no_picture_is_named(folder, mask):
    mask().save(folder / "7.mask.png")
    with pytest.raises(DataError, match=r"7\.mask\.png: a mask of no picture here"):
        scan_folder(folder, ("zqx",))


def test_two_masks_of_one_picture_are_refused(folder, mask):
    (folder / "masks").mkdir()
    mask().save(folder / "0.mask.png")
    mask().save(folder / "masks" / "0.png")
    with pytest.raises(DataError, match=r"is a mask of the same picture; keep one of them"):
        scan_folder(folder, ("zqx",))


@pytest.mark.parametrize("size", [(32, 32), (64, 32), (128, 128)])
def test_a_mask_of_another_shape_is_refused_by_name(folder, mask, size):
    mask(*size).save(folder / "1.mask.png")
    with pytest.raises(DataError, match=rf"1\.mask\.png is {size[0]}x{size[1]}, expected 64x64 as 1\.png has it"):
        scan_folder(folder, ("zqx",))


def test_an_empty_or_unreadable_mask_is_refused_by_name(folder, mask):
    Image.new("L", (64, 64)).save(folder / "0.mask.png")
    with pytest.raises(DataError, match=r"0\.mask\.png is empty, .*make white what shall count"):
        scan_folder(folder, ("zqx",))
    (folder / "0.mask.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"0\.mask\.png: not a picture that can be read"):
        scan_folder(folder, ("zqx",))


def test_a_mask_is_turned_as_its_picture_is(folder, picture, mask):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(48, 64).save(folder / "0.png", exif=exif)
    mask(64, 48).save(folder / "0.mask.png")
    assert masked(folder) == [True, False]


def test_transparency_is_a_mask_where_asked_for(folder):
    alpha = np.full((64, 64, 4), 255, np.uint8)
    alpha[:, 32:, 3] = 0
    Image.fromarray(alpha).save(folder / "0.png")
    assert masked(folder) == [False, False] and masked(folder, alpha_mask=True) == [True, False]
    found = fitted_mask(scan_folder(folder, ("zqx",), alpha_mask=True).examples[0], 8)
    assert found is not None and np.array_equal(np.asarray(found)[0], [255] * 4 + [0] * 4)
    Image.new("RGBA", (64, 64), (9, 9, 9, 0)).save(folder / "0.png")
    with pytest.raises(DataError, match=r"0\.png: its transparency as a mask is empty"):
        scan_folder(folder, ("zqx",), alpha_mask=True)
    mask_file = Image.fromarray(alpha[..., 3])
    mask_file.save(folder / "0.mask.png")
    assert scan_folder(folder, ("zqx",), alpha_mask=True).examples[0].mask == folder / "0.mask.png", "a file says it before transparency"


def test_a_mask_that_the_crop_leaves_nothing_of_is_refused(folder, picture, mask):
    picture(128, 64).save(folder / "0.png")
    mask(128, 64, 0.0, 0.1).save(folder / "0.mask.png")
    example = scan_folder(folder, ("zqx",)).examples[0]
    with pytest.raises(DataError, match=r"0\.png: the crop to 64x64 leaves nothing of its mask; .*--buckets"):
        fitted_mask(example, 64)
    assert fitted_mask(example, (128, 64)) is not None


@pytest.fixture
def held(pipe, config):
    """Pictures ready to be taught on an attached pipeline, and what one sample of them costs where the denoiser is wrong by `error`."""
    adapters = []

    def make(**changes):
        options = config(**changes)
        adapter = tiny_engram.attach(pipe)
        adapters.append(adapter)
        start = trainer.untrained(adapter, options)
        spellings = ("zqx",)
        found = scan_folder(options.train_data_dir, spellings, alpha_mask=options.alpha_mask)
        data = prepare(pipe, adapter, start, options, found.examples)
        module = trainer.masters_of(adapter, start, options)

        def cost(error: torch.Tensor, picture: int, **drawn) -> float:
            draw = dataclasses.replace(objective.draw(0, 0, 0, 1), picture=(picture + 0.5) / 2, **drawn)
            noise = objective.noise_for(draw, (2, *data.means[picture].shape))[:1]
            family = dataclasses.replace(data.family, predicts=lambda *args: noise + error)
            told = dataclasses.replace(data, family=family)
            return float(
                loop.denoising_loss(pipe, module, adapter.contexts["clip_l"], told, [draw], dataclasses.replace(options, snr_gamma=None))
            )

        return data, cost

    yield make
    for adapter in adapters:
        adapter.detach()


def test_the_loss_counts_what_the_mask_holds_at_one_scale(held, folder, mask):
    mask(right=0.25).save(folder / "0.mask.png")
    data, cost = held()
    weights = data.weights[0]
    assert weights.shape == (1, 8, 8) and torch.equal(weights[0, 0], torch.tensor([4.0] * 2 + [0.0] * 6)) and data.weights[1] is None
    everywhere, inside, outside = torch.ones(1, 4, 8, 8), torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 8, 8)
    inside[..., :2], outside[..., 2:] = 1.0, 1.0
    # an error that is everywhere the same costs the same whatever the mask's area
    assert cost(everywhere, 0) == pytest.approx(1.0) and cost(everywhere, 1) == pytest.approx(1.0)
    assert cost(inside, 0) == pytest.approx(1.0) and cost(outside, 0) == 0.0
    assert cost(inside, 1) == pytest.approx(0.25) and cost(outside, 1) == pytest.approx(0.75)


def test_what_is_outside_counts_as_much_as_is_asked_for(held, folder, mask):
    mask(right=0.25).save(folder / "0.mask.png")
    _, cost = held(unmasked_weight=0.2)
    outside = torch.zeros(1, 4, 8, 8)
    outside[..., 2:] = 1.0
    # weights 1 and 0.2 over a quarter and three of the picture
    assert cost(outside, 0) == pytest.approx(0.2 * 0.75 / (0.25 + 0.2 * 0.75))
    assert cost(torch.ones(1, 4, 8, 8), 0) == pytest.approx(1.0)


def test_a_mask_at_latent_size_is_the_share_of_each_place(held, folder, mask):
    mask(right=0.3125).save(folder / "0.mask.png")  # 20 of 64 pixels: half of the third place
    data, _ = held()
    assert torch.allclose(data.weights[0][0, 5], torch.tensor([1.0, 1.0, 0.5] + [0.0] * 5) * 8 / 2.5)


def test_a_mirrored_sample_has_a_mirrored_mask(held, folder, mask):
    mask(right=0.25).save(folder / "0.mask.png")
    _, cost = held(random_flip=True)
    right = torch.zeros(1, 4, 8, 8)
    right[..., 6:] = 1.0
    assert cost(right, 0, flip=0.9) == 0.0 and cost(right, 0, flip=0.1) == pytest.approx(1.0)


def test_a_run_with_masks_is_another_one_and_a_full_mask_is_none(pipe, config, folder, tmp_path, mask):
    def losses(name: str):
        return train(pipe, config(output_dir=str(tmp_path / name), max_train_steps=2), progress=False).losses

    plain = losses("plain")
    for k in range(2):
        mask(right=1.0).save(folder / f"{k}.mask.png")
    assert losses("full") == pytest.approx(plain, rel=1e-5)
    for k in range(2):
        mask(right=0.25).save(folder / f"{k}.mask.png")
    assert losses("quarter") != pytest.approx(plain, rel=1e-3)
