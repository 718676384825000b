import pytest
import torch

from benchmarks.personalization.crops import SIZE, border_colour, crop, crop_sprites, paste
from benchmarks.personalization.subjects import load_subjects

SKY, RED, BLACK = (0.3, 0.7, 0.9), (0.8, 0.1, 0.1), (0.0, 0.0, 0.0)


def disc(colour=RED, longest=124.0) -> torch.Tensor:
    """A sprite `[4, 128, 128]`: two thirds as high as wide."""
    y, x = torch.meshgrid(torch.arange(SIZE) - 63.5, torch.arange(SIZE) - 63.5, indexing="ij")
    inside = ((x / (longest / 2)) ** 2 + (y / (longest / 3)) ** 2 <= 1).float()
    return torch.cat([torch.tensor(colour)[:, None, None] * inside, inside[None]])


def on(background, longest: float, at: tuple[float, float], sprite=None) -> torch.Tensor:
    plain = torch.tensor([background]) if isinstance(background, tuple) else background
    sprite = disc() if sprite is None else sprite
    return paste(sprite[None], plain, torch.tensor([longest]), torch.tensor([at]))[0]


def test_border_colour_is_not_moved_by_what_reaches_the_border():
    picture = on(SKY, 80.0, (0.2, 0.5))
    assert (picture[0, 0, :, 0] - SKY[0]).abs().max() > 0.1
    assert torch.allclose(border_colour(picture), torch.tensor([SKY]))


@pytest.mark.parametrize("longest", [30.0, 56.0, 110.0])
def test_a_drawing_is_pasted_at_its_size(longest):
    mask = paste(disc()[None], torch.tensor([SKY]), torch.tensor([longest]), torch.tensor([[0.5, 0.5]]))[1][0]
    assert mask.any(0).sum() == pytest.approx(longest, abs=2)
    assert mask.any(1).sum() == pytest.approx(longest * 2 / 3, abs=2)


def test_a_subject_is_cut_out_alike_wherever_it_stands():
    places = [(0.5, 0.5), (0.42, 0.6), (0.58, 0.4)]
    pictures = torch.cat([on(SKY, 90.0, place) for place in places])
    crops, background = crop(pictures, ["whole"] * 3)
    assert crops.found.all() and torch.allclose(background, torch.tensor([SKY] * 3))
    assert crops.longest.tolist() == pytest.approx([90.0] * 3, rel=0.06)
    assert (pictures[0] - pictures[1]).abs().mean() > 5 * (crops.pictures[0] - crops.pictures[1]).abs().mean()
    assert (crops.pictures - crops.pictures[:1]).abs().mean() < 0.01


def test_size_is_taken_away_but_for_sharpness():
    pictures = torch.cat([on(SKY, longest, (0.5, 0.5)) for longest in (60.0, 118.0)])
    crops, _ = crop(pictures, ["whole"] * 2)
    assert crops.longest.tolist() == pytest.approx([60.0, 118.0], rel=0.06)
    assert (crops.pictures[0] - crops.pictures[1]).abs().mean() < 0.02


def test_nothing_of_the_other_half_is_seen():
    left = on(SKY, 56.0, (0.265, 0.5))
    both = on(left, 56.0, (0.735, 0.45), disc(BLACK))
    alone, beside = crop(left, ["left"])[0], crop(both, ["left"])[0]
    assert torch.equal(alone.pictures, beside.pictures)
    other, _ = crop(both, ["right"])
    middle = other.pictures[0, :, SIZE // 2, SIZE // 2]
    assert torch.allclose(middle, torch.tensor(BLACK), atol=0.02)
    assert (other.pictures[0] - torch.tensor(RED)[:, None, None]).abs().amax(0).min() > 0.3


def test_specks_and_holes_do_not_move_the_box():
    clean = on(SKY, 90.0, (0.5, 0.5))
    marked = clean.clone()
    marked[:, :, 5:7, 5:7] = 0
    marked[:, :, 50:70, 50:70] = torch.tensor(SKY)[:, None, None]
    one, other = crop(clean, ["whole"])[0], crop(marked, ["whole"])[0]
    assert other.longest.item() == pytest.approx(one.longest.item(), abs=2)
    assert torch.allclose(other.pictures[0, :, 64, 60], torch.tensor(SKY), atol=0.02)


@pytest.mark.parametrize("side", ["whole", "left"])
def test_without_a_subject_the_whole_window_is_taken(side):
    empty = torch.tensor(SKY)[None, :, None, None].expand(1, 3, SIZE, SIZE)
    full = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    crops, _ = crop(torch.cat([empty, full]), [side] * 2)
    assert not crops.found.any() and crops.longest.tolist() == pytest.approx([SIZE] * 2, abs=4)
    assert torch.allclose(crops.pictures[0], empty[0], atol=1e-6)
    if side == "whole":
        coarse = torch.nn.functional.avg_pool2d(torch.stack([crops.pictures[1], full[0], full[0].flip(1)]), 16)
        assert (coarse[0] - coarse[1]).abs().mean() < (coarse[2] - coarse[1]).abs().mean() / 2


def test_references_are_cropped_as_pictures_are():
    owl = next(subject for subject in load_subjects("final") if subject.name == "owl")
    sprite = torch.tensor(owl.sprites[0]).permute(2, 0, 1).float() / 255
    cyan = torch.tensor(SKY)
    picture = on(SKY, 96.0, (0.44, 0.55), sprite)
    cut, _ = crop(picture, ["whole"])
    assert (crop_sprites(sprite[None], cyan, 96.0) - cut.pictures).abs().mean() < 0.02
    assert (crop_sprites(sprite[None].flip(3), cyan, 96.0) - cut.pictures).abs().mean() > 0.03


def test_a_reference_in_the_colour_of_its_background_is_not_lost():
    white = torch.ones(3)
    crops = crop_sprites(torch.stack([disc((1.0, 1.0, 1.0)), disc()]), white, 96.0)
    shape = (crops[1] < 0.5).any(0)
    assert torch.equal(crops[0], torch.ones_like(crops[0]))
    assert shape.any(0).sum() == pytest.approx(SIZE / 1.12, abs=8)
