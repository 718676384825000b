"""Fixtures of the tests of pictures: files with a mask, transparency, another shape."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def picture():
    """A picture of random greys, RGB, by width, height and seed."""

    def make(width: int = 64, height: int = 64, seed: int = 0) -> Image.Image:
        grey = np.random.default_rng(seed).integers(0, 255, (height, width), dtype=np.uint8)
        return Image.fromarray(np.repeat(grey[..., None], 3, 2))

    return make


@pytest.fixture
def mask():
    """White in a part of the width, from `left` on, black elsewhere; mode L."""

    def make(width: int = 64, height: int = 64, left: float = 0.0, right: float = 0.5) -> Image.Image:
        values = np.zeros((height, width), np.uint8)
        values[:, round(left * width) : round(right * width)] = 255
        return Image.fromarray(values)

    return make
