"""What the bench's tests share: the embedded base itself, and subjects of a few painted pixels to teach it."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_engram.training import objective

ROOT = Path(__file__).resolve().parents[2]
# What lies in these is run as scripts there.
for folder in (ROOT / "assets" / "recipe", ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from benchmarks.personalization.subjects import Subject, TaughtPicture  # noqa: E402


def painted(name: str, trigger: str, class_word: str) -> Subject:
    """A subject whose one sprite nobody looks at: training reads pictures."""
    sprites = np.zeros((1, 128, 128, 4), np.uint8)
    return Subject(name, "object", "development", trigger, class_word, None, sprites, ("3d",), (0,))


def pictures(seed: int, count: int = 5, captions: int = 3) -> list[TaughtPicture]:
    """Discs on plain grounds, each with captions of its own."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:128, :128]
    made = []
    for i in range(count):
        inside = (x - rng.integers(40, 90)) ** 2 + (y - 64) ** 2 < rng.integers(25, 45) ** 2
        image = np.where(inside[..., None], rng.integers(0, 256, 3), rng.integers(0, 256, 3)).astype(np.uint8)
        texts = tuple(f"a {{0}}, picture {i} said {way} times" for way in range(2, 2 + captions))
        made.append(TaughtPicture(image, texts, "gray"))
    return made


# Ours with keys and values at every cross-attention alone: what one lever adds is seen against it.
PLAIN = {
    "mounts": "key+value", "bands": 1, "share": "none", "init": "zero", "deep_local": False, "maps": "none", "beta2": 0.99, "collage": 0,
}  # fmt: skip

# One of each kind of record.
FEW = ("taught", "right", "bare")


@pytest.fixture(scope="session")
def synthetic():
    """The module that invents results."""
    spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).with_name("synthetic.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def few():
    """Three of the nine contexts are drawn, and named: pictures take their time on a CPU."""
    from benchmarks.personalization import shots
    from benchmarks.personalization.prompts import prompts_for

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shots, "prompts_for", lambda subject: tuple(p for p in prompts_for(subject) if p.context in FEW))
        yield FEW


@pytest.fixture(scope="session")
def subjects() -> dict[str, Subject]:
    given = (("disc", "rugo-bin", "ball"), ("spot", "vex-lumo", "hot air balloon"), ("dot", "kelo-vin", "tomato"))
    return {name: painted(name, *words) for name, *words in given}


@pytest.fixture(scope="session")
def shown() -> list[TaughtPicture]:
    """Two pictures with captions."""
    return pictures(3, count=2)


@pytest.fixture(scope="session")
def base(subjects):
    """The embedded base on the CPU, shared: a test that changes it must put it back."""
    from benchmarks.personalization.base import Base

    loaded = Base.load()
    loaded.subjects = subjects
    return loaded


@pytest.fixture(scope="session")
def taught(base, subjects) -> dict:
    from benchmarks.personalization.base import Taught

    return {name: Taught.of(base, subject, pictures(i)) for i, (name, subject) in enumerate(subjects.items())}


@pytest.fixture(scope="session")
def run():
    """A run of a method, by default gentle enough that a few steps do not blow it up; of ours without what it does by default."""
    from benchmarks.personalization.methods import RATES
    from benchmarks.personalization.runs import Run

    def make(method: str, subject: str = "disc", seed: int = 0, factor: float = 1.0, *, plain: bool = True, **options) -> Run:
        if plain and method.startswith("ours"):
            options = PLAIN | options
        rate = RATES.get(method, 1e-3) * factor
        return Run(method=method, subject=subject, seed=seed, learning_rate=rate, options=tuple(sorted(options.items())))

    return make


@pytest.fixture(scope="session")
def plain_batch(base):
    """One run's batch at a step, made the plain way: captions with the trigger in, and the mean weighted error of a prediction."""

    def make(data, seed: int, step: int, samples: int):
        draws = [objective.draw(seed, step, i, samples) for i in range(samples)]
        pictures = [int(d.picture * len(data.captions)) for d in draws]
        chosen = [data.captions[k][int(d.caption * len(data.captions[k]))] for d, k in zip(draws, pictures, strict=True)]
        timesteps = torch.tensor([int(d.timestep * 1000) for d in draws])
        noise = torch.stack([objective.noise_for(d, (2, *base.latent_shape)) for d in draws])
        latents = data.means[pictures] + data.stds[pictures] * noise[:, 1]
        noisy = objective.add_noise(base.scheduler, latents, noise[:, 0], timesteps)
        target = objective.target_of(base.scheduler, latents, noise[:, 0], timesteps)

        def loss(unet, states: torch.Tensor) -> torch.Tensor:
            error = (unet(noisy, timesteps, states).sample - target).square().mean((1, 2, 3))
            return (error * objective.loss_weights(base.scheduler, timesteps, 5.0)).mean()

        return [text.replace("{0}", data.subject.trigger) for text in chosen], loss

    return make


@pytest.fixture
def own_pipe():
    """A second copy of the base's pipeline, for tests that train its weights or load adapters into it."""
    from diffusers import StableDiffusionPipeline

    from benchmarks.personalization.bases import EMOJI_SD

    pipe = StableDiffusionPipeline.from_pretrained(EMOJI_SD.folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for part in (pipe.unet, pipe.text_encoder, pipe.vae):
        part.requires_grad_(False).eval()
    return pipe
