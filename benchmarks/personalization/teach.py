"""Training of many runs at once, with the draws, the noise and the loss of `tiny_engram.training`.

Every choice is keyed by (seed, step, sample), so all subjects and methods of one seed see the same timesteps and noise,
and picture and caption numbers that fall alike. Hashing and noise are done on the CPU, once for runs of equal seeds and ahead of
the steps that need them; a step waits for nothing, and losses stay on the device until the end.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.personalization.base import Base, Taught
from benchmarks.personalization.methods.method import Adapters, Rows, to_device
from benchmarks.personalization.optim import StackedAdamW
from tiny_engram.training import objective

__all__ = ["SNR_GAMMA", "teach"]

SNR_GAMMA = 5.0
MAX_NORM = 1.0
# Steps whose noise is drawn in one go.
_AHEAD = 64
# Rows of one forward and backward pass, unless told otherwise.
_LIMITS = {"cpu": 16, "cuda": 1024}


@functools.lru_cache(maxsize=64)
def _noise(seed: int, first: int, last: int, samples: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Noise for the picture and for its latents of steps `first` to `last`: float32 `[steps, samples, 2, *shape]` on the CPU."""
    steps = range(first, last)
    made = torch.empty(len(steps), samples, 2, *shape)
    for row, step in enumerate(steps):
        for i in range(samples):
            made[row, i] = objective.noise_for(objective.draw(seed, step, i, samples), (2, *shape))
    return made


@functools.lru_cache(maxsize=64)
def _shares(seed: int, steps: int, samples: int) -> np.ndarray:
    """Shares in [0, 1) of pictures, captions and timesteps: float64 `[3, steps, samples]`."""
    drawn = [[objective.draw(seed, step, i, samples) for i in range(samples)] for step in range(steps)]
    return np.array([[[getattr(d, name) for d in row] for row in drawn] for name in ("picture", "caption", "timestep")])


def _kinds(counts: Sequence[int], steps: int, samples: int) -> np.ndarray:
    """What each sample shows: int64 `[steps, samples]`, 0 for the taught pictures, k for the k-th of `counts` of every eight."""
    kind = [0] + [kind for kind, count in enumerate(counts, 1) for _ in range(count)]
    shown = [[objective.other_picture(step, i, samples, len(kind) - 1) for i in range(samples)] for step in range(steps)]
    return np.array([[0 if other is None else kind[1 + other] for other in row] for row in shown], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every step reads, for all steps at once.

    Attributes:
        captions: every caption of every run as a batch of its own. places: (slot, start, length) of the spans in each.
        means, stds: latents of all pictures of all subjects. masks: weights of their places `[pictures, 1, h, w]`, None where all are 1.
        timesteps, pictures, rows: int64 `[steps, runs, samples]`, on the device; `picks` is `rows` on the CPU.
        seeds: the seeds that occur. seed_of: int64 `[runs]` into them, on the device.
        schedule: what the objective reads of a scheduler, on the device: the scheduler's own lies on the CPU, and a step would wait.
    """

    captions: Rows
    places: list[list[tuple[int, int, int]]]
    means: torch.Tensor
    stds: torch.Tensor
    masks: torch.Tensor | None
    timesteps: torch.Tensor
    pictures: torch.Tensor
    rows: torch.Tensor
    picks: np.ndarray
    seeds: tuple[int, ...]
    seed_of: torch.Tensor
    schedule: SimpleNamespace

    @classmethod
    def of(cls, base: Base, adapters: Adapters, taught: Sequence[Taught], steps: int, samples: int) -> _Plan:
        length = base.scheduler.config.num_train_timesteps
        texts, words, owners = [], [], []
        offsets: dict[int, int] = {}
        means, stds, masks = [], [], []
        counted = adapters.shares.asked
        kinds = _kinds(tuple(counted.values()), steps, samples)
        timesteps, pictures, rows = (np.empty((steps, len(taught), samples), np.int64) for _ in range(3))
        for i, (run, data) in enumerate(zip(adapters.runs, taught, strict=True)):
            picture, caption, timestep = _shares(run.seed, steps, samples)
            timesteps[:, i] = (timestep * length).astype(np.int64)
            if missing := set(counted) - set(data.extras):
                raise ValueError(f"{run.method} on {run.subject} has the option {', '.join(sorted(missing))}; give `taught` those extras")
            for kind, source in enumerate((data, *(data.extras[name] for name in counted))):
                if id(source) not in offsets:
                    offsets[id(source)] = sum(len(m) for m in means)
                    means.append(source.means)
                    stds.append(source.stds)
                    mask = None if isinstance(source, Taught) else source.masks
                    masks.append(torch.ones_like(source.means[:, :1]) if mask is None else mask)
                counts = np.array([len(captions) for captions in source.captions])
                firsts = len(texts) + counts.cumsum() - counts
                for captions in source.captions:
                    texts += captions
                words += [(data.subject.trigger,)] * int(counts.sum())
                owners += [[i]] * int(counts.sum())
                chosen = (picture * len(source.means)).astype(np.int64)
                here = kinds == kind
                pictures[:, i][here] = chosen[here] + offsets[id(source)]
                rows[:, i][here] = (firsts[chosen] + (caption * counts[chosen]).astype(np.int64))[here]
        captions = base.rows(texts, words, torch.tensor(owners), adapters.vectors)
        places: list[list[tuple[int, int, int]]] = [[] for _ in texts]
        for row, *place in captions.spans:
            places[row].append((place[0], place[1], place[2]))
        seeds = tuple(dict.fromkeys(run.seed for run in adapters.runs))
        seed_of = torch.tensor([seeds.index(run.seed) for run in adapters.runs])
        scheduler = base.scheduler
        schedule = SimpleNamespace(alphas_cumprod=scheduler.alphas_cumprod.to(base.device), config=scheduler.config)
        at_step, shown, said = (torch.from_numpy(choices).to(base.device) for choices in (timesteps, pictures, rows))
        return cls(
            captions, places, torch.cat(means), torch.cat(stds), torch.cat(masks) if counted else None,
            at_step, shown, said, rows, seeds, seed_of.to(base.device), schedule,
        )  # fmt: skip

    def batch(self, step: int, first: int, last: int) -> Rows:
        """The captions of runs `first` to `last` at a step."""
        index = self.rows[step, first:last].flatten()
        picks = self.picks[step, first:last].ravel().tolist()
        spans = tuple((row, *place) for row, pick in enumerate(picks) for place in self.places[pick])
        whole = self.captions
        return Rows(whole.ids[index], whole.states[index], whole.run[index], spans)


def teach(
    base: Base,
    adapters: Adapters,
    taught: Sequence[Taught],
    *,
    steps: int,
    batch_size: int = 8,
    at: Sequence[int] = (),
    on_step: Callable[[int], None] | None = None,
    on_checkpoint: Callable[[int], None] | None = None,
    limit: int | None = None,
    autocast: torch.dtype | None = None,
) -> torch.Tensor:
    """Train the runs of `adapters` side by side; afterwards it holds what would be saved.

    A run's loss is the mean over its `batch_size` samples of the squared error of the denoiser's prediction, with min-SNR
    weights (gamma 5); its gradient norm is clipped at 1. Samples that `adapters.shares` gives to other pictures keep their
    timesteps and noise.

    Args:
        taught: `[runs]`, the subject of each run; runs of one subject may share the object.
        at: steps, counted from 1, after which `on_checkpoint(step)` is called; `adapters` then holds what would be saved at that
            step, and training goes on as if nothing had happened.
        on_step: called with the number of steps done. It is ahead of a CUDA device's work: synchronise to measure time.
        limit: rows of one pass, in whole runs; the default is made for the device's memory.
        autocast: lower precision of the denoiser's and the encoder's products, such as torch.bfloat16.

    Returns:
        losses float32 `[runs, steps]` on the CPU.

    Raises:
        ValueError: runs and subjects that do not match, several runs of a method that holds one.
    """
    runs = adapters.runs
    if len(runs) != len(taught):
        raise ValueError(f"{len(runs)} runs, {len(taught)} subjects; expected the subject of each run")
    for run, data in zip(runs, taught, strict=True):
        if run.subject != data.subject.name:
            raise ValueError(f"a run of {run.subject!r} was given the pictures of {data.subject.name!r}")
    if not adapters.stackable and len(runs) > 1:
        raise ValueError(f"{type(adapters).__name__} trains the base's own weights; give it one run at a time, not {len(runs)}")
    together = max(1, (limit or _LIMITS.get(base.device.type, 64)) // batch_size)
    plan = _Plan.of(base, adapters, taught, steps, batch_size)
    optimizer = StackedAdamW(adapters, steps)
    losses = torch.zeros(steps, len(runs), device=base.device)
    noise = torch.empty(0)
    for step in range(steps):
        if step % _AHEAD == 0:
            last = min(step + _AHEAD, steps)
            drawn = [_noise(seed, step, last, batch_size, base.latent_shape) for seed in plan.seeds]
            noise = to_device(torch.stack(drawn, 1), base.device)
        optimizer.zero()
        for first in range(0, len(runs), together):
            chunk = slice(first, min(first + together, len(runs)))
            drawn_noise = noise[step % _AHEAD][plan.seed_of[chunk]].flatten(0, 1)
            loss = _losses(base, adapters, plan, step, chunk, drawn_noise, autocast)
            _backward(loss.sum())
            losses[step, chunk] = loss.detach()
        optimizer.clip(MAX_NORM)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1)
        if on_checkpoint is not None and step + 1 in at:
            with optimizer.shipped():
                on_checkpoint(step + 1)
    optimizer.finish()
    return losses.T.cpu()


def _backward(loss: torch.Tensor) -> None:
    with warnings.catch_warnings():
        # gradients are views of one matrix, each with its parameter's own strides
        warnings.filterwarnings("ignore", "grad and param do not obey")
        loss.backward()


def _losses(
    base: Base, adapters: Adapters, plan: _Plan, step: int, chunk: slice, noise: torch.Tensor, autocast: torch.dtype | None
) -> torch.Tensor:
    """Loss `[runs in the chunk]`; noise is `[rows, 2, channels, h, w]`."""
    rows = plan.batch(step, chunk.start, chunk.stop)
    pictures, timesteps = plan.pictures[step, chunk].flatten(), plan.timesteps[step, chunk].flatten()
    latents = plan.means[pictures] + plan.stds[pictures] * noise[:, 1]
    noisy = objective.add_noise(plan.schedule, latents, noise[:, 0], timesteps)
    with torch.autocast(base.device.type, autocast, enabled=autocast is not None):
        states = adapters.states(base, rows)
        with adapters.attached(base, rows, states):
            predicted = base.predict(noisy, timesteps, states, base.mask(rows.ids))
    error = (predicted.float() - objective.target_of(plan.schedule, latents, noise[:, 0], timesteps)).square()
    if plan.masks is not None:
        error = error * plan.masks[pictures]
    weighted = error.mean((1, 2, 3)) * objective.loss_weights(plan.schedule, timesteps, SNR_GAMMA)
    return weighted.view(chunk.stop - chunk.start, -1).mean(1)
