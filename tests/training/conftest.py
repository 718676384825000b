"""Fixtures of the training tests: folders of small pictures, and configs that finish in a moment."""

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_engram.training.config import TrainConfig


def disc(seed: int, side: int = 64) -> Image.Image:
    """A bright disc on a dark ground, in a colour of its own."""
    y, x = np.mgrid[:side, :side]
    inside = (x - side / 2) ** 2 + (y - side / 2) ** 2 < (side / 3) ** 2
    colour = np.random.default_rng(seed).integers(100, 256, 3)
    return Image.fromarray(np.where(inside[..., None], colour, 20).astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Two pictures without captions."""
    made = tmp_path / "pictures"
    made.mkdir()
    for k in range(2):
        disc(k).save(made / f"{k}.png")
    return made


@pytest.fixture
def recipe(folder, tmp_path):
    """The default recipe in few steps, changed by keywords."""

    def make(**changes) -> TrainConfig:
        options = {
            "train_data_dir": str(folder),
            "trigger": "zqx",
            "output_dir": str(tmp_path / "out"),
            "max_train_steps": 4,
            "train_batch_size": 4,
            "collage_pictures": 1,
            "validation_inference_steps": 2,
            "report_to": "none",
        }
        return TrainConfig(**{**options, **changes})

    return make


@pytest.fixture
def config(recipe):
    """A config of few steps for a concept at the encoder's output alone, without collages, changed by keywords."""
    old = {"train_batch_size": 2, "learning_rate": 2e-2, "gate_learning_rate": 1e-2, "rho": 1.0, "adam_beta2": 0.99}
    old |= {"lr_scheduler": "cosine", "lr_warmup_steps": 2, "mounts": ("span",), "share": "none", "bands": 1}
    old |= {"attention_rank": 0, "feedforward_rank": 0, "collages": 0, "collage_pictures": 4}
    return lambda **changes: recipe(**{**old, **changes})


@pytest.fixture
def as_validated():
    """What the run of a few steps draws to validate, drawn by a pipeline as users call it: uint8 `[h, prompts * w, 3]`."""

    def draw(pipe, prompts) -> np.ndarray:
        generators = [torch.Generator("cpu").manual_seed(3) for _ in prompts]
        images = pipe(
            list(prompts), num_inference_steps=2, guidance_scale=4.0, generator=generators, height=64, width=64, output_type="np"
        ).images
        return (np.concatenate(list(images), 1) * 255).round().astype(np.uint8)

    return draw


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps one precision for the life of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()
