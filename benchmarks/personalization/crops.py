"""Where a subject is: the foreground of a picture on a plain background, cut out and brought to one size.

A picture's fidelity must measure the subject, not the background, the place or what stands beside it. A generated picture
and the reference that it is set against go through the same code, on the same background colour and at about the same
size. Imports torch and nothing else; everything is batched and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SIZE = 128
SIDES = ("whole", "left", "right")
BORDER = 3  # pixels
DISTANCE = 0.1  # of a channel's range: the autoencoder moves a plain background by a tenth of that
TRIM = 0.01  # of the foreground's pixels may lie beyond each edge of the box: specks, or what reaches over from the other half
MARGIN = 0.06  # of the box's longer side, on each side
FEWEST, MOST = 0.004, 0.9  # shares of the window; fewer or more foreground is no subject on a background


@dataclass(frozen=True, slots=True)
class Crops:
    """Subjects cut out of pictures.

    Attributes:
        pictures: float32 `[n, 3, 128, 128]` in 0..1, the subject in the middle of a square of background.
        longest: float32 `[n]`, the longer side of the box around the foreground before it was brought to size, in pixels.
        found: bool `[n]`; False where no foreground, or nothing but foreground, was seen: then the whole window was taken.
    """

    pictures: torch.Tensor
    longest: torch.Tensor
    found: torch.Tensor


def border_colour(pictures: torch.Tensor) -> torch.Tensor:
    """Median of each channel over the border: `[n, 3, H, W]` -> `[n, 3]`, in the pictures' own range."""
    ends = [pictures[:, :, :BORDER], pictures[:, :, -BORDER:], pictures[:, :, :, :BORDER], pictures[:, :, :, -BORDER:]]
    return torch.cat([end.flatten(2) for end in ends], 2).median(2).values


def windows(sides: Sequence[str], device: torch.device | str) -> torch.Tensor:
    """bool `[n, 1, 128]`: the columns that belong to "whole", "left" or "right"."""
    column = torch.arange(SIZE, device=device)
    known = torch.stack([column >= 0, column < SIZE // 2, column >= SIZE // 2])
    return known[torch.tensor([SIDES.index(side) for side in sides], device=device)][:, None]


def _extent(mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and past-the-last place `[n]` of what remains of `mass` `[n, 128]` once TRIM is taken off both ends."""
    total = mass.sum(1, keepdim=True).clamp(min=1)
    low = (mass.cumsum(1) <= TRIM * total).sum(1)
    high = SIZE - (mass.flip(1).cumsum(1) <= TRIM * total).sum(1)
    return low.float(), high.float()


def cut(pictures: torch.Tensor, mask: torch.Tensor, window: torch.Tensor, background: torch.Tensor) -> Crops:
    """Crops the square around each mask, `background` taking the place of all that lies outside the window.

    Args:
        pictures: float32 `[n, 3, 128, 128]` in 0..1.
        mask: bool `[n, 128, 128]`, the foreground.
        window: bool `[n, 1, 128]` from `windows`.
        background: float32 `[n, 3]` in 0..1.
    """
    inside = mask & window
    share = inside.sum((1, 2)) / (window.sum((1, 2)) * SIZE)
    found = (share > FEWEST) & (share < MOST)
    inside = torch.where(found[:, None, None], inside, window.expand_as(inside))
    left, right = _extent(inside.sum(1).float())
    top, bottom = _extent(inside.sum(2).float())
    longest = torch.maximum(right - left, bottom - top).clamp(min=1)
    zoom = longest * (1 + 2 * MARGIN * found) / SIZE
    theta = torch.zeros(len(pictures), 2, 3, device=pictures.device)
    theta[:, 0, 0] = theta[:, 1, 1] = zoom
    theta[:, 0, 2] = (left + right) / SIZE - 1
    theta[:, 1, 2] = (top + bottom) / SIZE - 1
    plain = background[:, :, None, None]
    grid = F.affine_grid(theta, [len(pictures), 3, SIZE, SIZE], align_corners=False)
    shown = F.grid_sample((pictures - plain) * window[:, None], grid, mode="bilinear", align_corners=False)
    return Crops((shown + plain).clamp(0, 1), longest, found)


def crop(pictures: torch.Tensor, sides: Sequence[str]) -> tuple[Crops, torch.Tensor]:
    """What stands out from the border's colour on each picture's side, and that colour, float32 `[n, 3]` in 0..1.

    Parts of a subject in the background's colour are holes in the mask, never in the crop. `pictures`: float32
    `[n, 3, 128, 128]` in 0..1; `sides`: "whole", "left" or "right" for each.
    """
    background = border_colour(pictures)
    mask = (pictures - background[:, :, None, None]).abs().amax(1) > DISTANCE
    return cut(pictures, mask, windows(sides, pictures.device), background), background


def paste(sprites: torch.Tensor, background: torch.Tensor, longest: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures float32 `[n, 3, 128, 128]` in 0..1 with one sprite each, and where it covers, bool `[n, 128, 128]`.

    Args:
        sprites: float32 `[n, 4, 128, 128]` in 0..1, straight alpha; the drawing's longer side covers 124 pixels.
        background: float32 `[n, 3]`, or pictures `[n, 3, 128, 128]` to paste on.
        longest: float32 `[n]`, the longer side that the drawing shall have, in pixels, at most 124.
        at: float32 `[n, 2]`, x and y of its centre as fractions of the picture.
    """
    planes = torch.cat([sprites[:, :3] * sprites[:, 3:], sprites[:, 3:]], 1)
    zoom = 124 / longest
    # One bilinear sample aliases when it shrinks, so what becomes less than half as large comes from a smaller copy.
    half = F.interpolate(planes, scale_factor=0.5, mode="bilinear", antialias=True, align_corners=False)
    quarter = F.interpolate(planes, scale_factor=0.25, mode="bilinear", antialias=True, align_corners=False)
    theta = torch.zeros(len(sprites), 2, 3, device=sprites.device)
    theta[:, 0, 0] = theta[:, 1, 1] = zoom
    theta[:, :, 2] = -(at * 2 - 1) * zoom[:, None]
    grid = F.affine_grid(theta, [len(sprites), 4, SIZE, SIZE], align_corners=False)
    full, small, least = (F.grid_sample(copy, grid, mode="bilinear", align_corners=False) for copy in (planes, half, quarter))
    level = zoom[:, None, None, None]
    drawn = torch.where(level < 2, full, torch.where(level < 4, small, least))
    canvas = background[:, :, None, None] if background.dim() == 2 else background
    return (drawn[:, :3] + canvas * (1 - drawn[:, 3:])).clamp(0, 1), drawn[:, 3] > 0.5


def crop_sprites(
    sprites: torch.Tensor, background: torch.Tensor, longest: float, through: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """References `[n, 3, 128, 128]`: sprites on a background, at `longest` pixels, cropped as pictures are.

    Here the mask is the drawing's alpha, since nothing of it may be lost in a background of its own colour.
    `background`: float32 `[3]`. `through` changes the middle of the pictures, `[n, 3, s, s]` in 0..1 with s a multiple of 8,
    in which the sprites lie, before they are cropped.
    """
    count, device = len(sprites), sprites.device
    plain = background.expand(count, 3)
    centre = torch.full((count, 2), 0.5, device=device)
    pictures, mask = paste(sprites, plain, torch.full((count,), longest, device=device), centre)
    if through is not None:
        room = min(SIZE, 8 * math.ceil((longest + 8) / 8)) // 2
        middle = slice(SIZE // 2 - room, SIZE // 2 + room)
        pictures[:, :, middle, middle] = through(pictures[:, :, middle, middle])
    return cut(pictures, mask, windows(["whole"] * count, device), plain).pictures
