"""Composes training pictures from cut-out sprites, on whatever device the sprites live.

A picture is a plain named background with one sprite ("alone") or two side by side ("pair"). Everything that a caption
can speak of (style, background colour, names, which is left) is in the `Layout`, so the caption and the picture come
from the same numbers. May import torch, numpy and its siblings only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from captions import COLOURS

STYLES = ("3d", "flat", "outlined")
SIZE = 128
BUILD = Path(__file__).resolve().parents[2] / "build" / "base"


@dataclass(frozen=True)
class Layout:
    """What is drawn where, one entry per picture.

    style, colour, left, right: int64 `[B]`; `right` is -1 where the picture holds one sprite. scale, x, y: float32
    `[B, 2]`, the longer side and the centre of each sprite as fractions of the picture.
    """

    style: torch.Tensor
    colour: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    scale: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.style)

    def __getitem__(self, index) -> Layout:
        return Layout(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})

    def to(self, device) -> Layout:
        return Layout(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


def load_names() -> list[dict]:
    return json.loads((BUILD / "names.json").read_text())


def random_layout(count: int, names: np.ndarray, *, pairs: float, seed: int) -> Layout:
    """Draws `count` layouts over the sprite indices in `names`; a share `pairs` of them holds two different sprites."""
    rng = np.random.default_rng(seed)
    left = rng.choice(names, count)
    right = rng.choice(names, count)
    right = np.where(left == right, names[(np.searchsorted(names, right) + 1) % len(names)], right)
    is_pair = rng.random(count) < pairs
    scale = np.where(is_pair[:, None], rng.uniform(0.40, 0.48, (count, 2)), rng.uniform(0.66, 0.92, (count, 1)))
    room = 0.5 - scale / 2
    centre_x = np.where(is_pair[:, None], [0.265, 0.735], 0.5)
    jitter = rng.uniform(-1, 1, (count, 4))
    x = centre_x + jitter[:, :2] * np.where(is_pair[:, None], 0.02, 0.6 * room)
    y = 0.5 + jitter[:, 2:] * np.where(is_pair[:, None], 0.07, 0.6 * room)
    return Layout(
        style=torch.from_numpy(rng.integers(0, len(STYLES), count)),
        colour=torch.from_numpy(rng.integers(0, len(COLOURS), count)),
        left=torch.from_numpy(left.astype(np.int64)),
        right=torch.from_numpy(np.where(is_pair, right, -1).astype(np.int64)),
        scale=torch.from_numpy(scale.astype(np.float32)),
        x=torch.from_numpy(x.astype(np.float32)),
        y=torch.from_numpy(y.astype(np.float32)),
    )


def reserved(layout: Layout) -> torch.Tensor:
    """Bool `[B]`: a tenth of all (things, style, colour) combinations is never trained on; the benchmark draws from it."""
    return (layout.left * 31 + (layout.right + 1) * 17 + layout.style * 7 + layout.colour * 3) % 10 == 0


class Compositor:
    """Sprites on a device, and the one routine that pastes them.

    rgba: uint8 `[N, styles, 128, 128, 4]`, straight alpha. Kept premultiplied in float16, at full and at half size:
    a sprite in a pair is drawn from the half-size copy, since one bilinear sample of the full one would alias.
    """

    def __init__(self, rgba: np.ndarray, device: str | torch.device):
        pixels = torch.from_numpy(rgba)
        full = []
        for chunk in pixels.flatten(0, 1).split(512):
            x = chunk.to(device).permute(0, 3, 1, 2).float() / 255
            full.append(torch.cat([x[:, :3] * x[:, 3:], x[:, 3:]], 1).half())
        self.styles = rgba.shape[1]
        self.full = torch.cat(full)
        self.half = F.avg_pool2d(self.full.float(), 2).half()
        self.palette = torch.tensor(list(COLOURS.values()), device=device).float() / 255

    def __call__(self, layout: Layout, *, background: torch.Tensor | None = None, augment=None) -> torch.Tensor:
        """RGB float32 `[B, 3, 128, 128]` in [-1, 1]. `background`: `[B, 3, 1 or 128, 1 or 128]` in [0, 1] instead of
        the named colours. `augment`: maps premultiplied sprites `[B, 4, H, W]` to the same shape."""
        canvas = self.palette[layout.colour][:, :, None, None] if background is None else background
        canvas = canvas.expand(-1, -1, SIZE, SIZE)
        pair = layout.right >= 0
        for slot, names in enumerate((layout.left, layout.right)):
            drawn = torch.ones_like(pair) if slot == 0 else pair
            index = names.clamp(min=0) * self.styles + layout.style
            for bank, chosen in ((self.full, drawn & ~pair), (self.half, drawn & pair)):
                where = chosen.nonzero()[:, 0]
                if len(where) == 0:
                    continue
                sprite = bank[index[where]].float()
                if augment is not None:
                    sprite = augment(sprite)
                # a sprite's longer side covers 124 of its 128 pixels
                zoom = 124 / 128 / layout.scale[where, slot]
                theta = torch.zeros(len(where), 2, 3, device=zoom.device)
                theta[:, 0, 0] = theta[:, 1, 1] = zoom
                theta[:, 0, 2] = -(layout.x[where, slot] * 2 - 1) * zoom
                theta[:, 1, 2] = -(layout.y[where, slot] * 2 - 1) * zoom
                grid = F.affine_grid(theta, [len(where), 4, SIZE, SIZE], align_corners=False)
                pasted = F.grid_sample(sprite, grid, mode="bilinear", align_corners=False)
                canvas = canvas.clone() if len(where) < len(layout) else canvas
                blended = pasted[:, :3] + canvas[where] * (1 - pasted[:, 3:])
                if len(where) == len(layout):
                    canvas = blended
                else:
                    canvas[where] = blended
        return canvas.clamp(0, 1) * 2 - 1
