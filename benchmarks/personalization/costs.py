"""What a method costs: time of a step, memory and bytes, alone on the machine; and what it does to prompts that do not name its subject.

Every step of training is timed beside one forward and backward of the bare denoiser on a batch of the same shape, so that
both see the same machine. Imports torch and parts of the bench.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.personalization.base import Base
from benchmarks.personalization.methods import method_of
from benchmarks.personalization.plan import OURS, Settings
from benchmarks.personalization.runs import Run
from benchmarks.personalization.subjects import known_names
from benchmarks.personalization.teach import teach
from benchmarks.personalization.trigger_free import TriggerFree, near_misses, prompts

if TYPE_CHECKING:
    from benchmarks.personalization.pieces import Bench

__all__ = ["measure", "trigger_free"]

WARM = 5


class _Memory:
    """The most memory held since it was made, in bytes: on CUDA the base's weights and what was allocated since, otherwise the
    process's resident memory, as Linux tells it."""

    def __init__(self, base: Base) -> None:
        self.device = base.device
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            weights = [p for part in (base.denoiser, base.text_encoder, base.vae) for p in part.parameters()]
            # judges and latents may lie there too, from other pieces
            self.other = torch.cuda.memory_allocated(self.device) - sum(p.numel() * p.element_size() for p in weights)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.other
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bare_step(base: Base, batch: int) -> Callable[[], None]:
    """One forward and one backward of the denoiser to its text input."""
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(batch, *base.latent_shape, generator=generator).to(base.device)
    states = torch.randn(batch, base.length, base.width, generator=generator).to(base.device)
    timesteps = torch.linspace(0, base.scheduler.config.num_train_timesteps - 1, batch).long().to(base.device)

    mask = torch.ones(batch, base.length, dtype=torch.int64, device=base.device) if base.spec.masked else None

    def step() -> None:
        read = states.clone().requires_grad_()
        base.predict(noisy, timesteps, read, mask).square().mean().backward()

    return step


def _timed(bench: Bench, run: Run, settings: Settings, steps: int, warm: int) -> dict[str, Any]:
    base = bench.base
    bare = _bare_step(base, settings.batch)
    pairs: list[tuple[float, float]] = []
    adapters = method_of(run.method)(base, (run,))
    last = 0.0

    def on_step(done: int) -> None:
        nonlocal last
        _wait(base.device)
        now = time.perf_counter()
        # the method's hooks are attached for the denoiser's call alone: this one is bare
        bare()
        _wait(base.device)
        after = time.perf_counter()
        if done > warm:
            pairs.append((after - now, now - last))
        last = time.perf_counter()

    taught = bench.taught_to(adapters, settings)
    teach(base, adapters, taught, steps=warm + steps, batch_size=settings.batch, on_step=on_step)
    return {
        "bytes": adapters.payload(0),
        "values": adapters.trainable(),
        "step_seconds": statistics.median(step for _, step in pairs),
        "bare_seconds": statistics.median(seconds for seconds, _ in pairs),
        "step_ratio": statistics.median(step / seconds for seconds, step in pairs),
        "steps_timed": len(pairs),
        "batch": settings.batch,
    }


def measure(
    bench: Bench,
    run: Run,
    settings: Settings,
    *,
    timed: int = 30,
    warm: int = WARM,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Teach `run` for a few steps, alone on the machine, and measure.

    Args:
        timed: steps that are timed, after `warm` that are not.

    Returns:
        `bytes` as shipped, trainable `values`, medians of seconds per step (`step_seconds`, `bare_seconds`) and of their ratio
        (`step_ratio`), peak bytes of training and of the bare step (every step is alike), and the method's `options`.
    """
    base = bench.base
    bare = _bare_step(base, settings.batch)
    bare()
    memory = _Memory(base)
    bare()
    found: dict[str, Any] = {"bare_peak_bytes": memory.peak()}
    found |= _timed(bench, run, settings, timed, warm)
    say(f"{run.method}: {found['step_seconds'] * 1000:.1f} ms a step, {found['step_ratio']:.2f} of the bare denoiser's")
    taught = bench.taught_to(method_of(run.method)(base, (run,)), settings)
    memory = _Memory(base)
    teach(base, method_of(run.method)(base, (run,)), taught, steps=1 + warm, batch_size=settings.batch)
    return found | {"peak_bytes": memory.peak(), "options": dict(run.options)}


def trigger_free(
    bench: Bench,
    run: Run,
    settings: Settings,
    *,
    texts: int = 1000,
    pictures: int = 32,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Teach `run` up to the main checkpoint, and see what it does to prompts that do not name its subject.

    Args:
        texts: trigger-free prompts. pictures: drawn of the first of them.

    Returns:
        `trigger_free`, what `TriggerFree.changed_by` finds, and `steps`. For ours also `shipped`, the same by the product, or
        `not_shipped`, why no concept file can hold it.
    """
    base = bench.base
    adapters = method_of(run.method)(base, (run,))
    teach(base, adapters, bench.taught_to(adapters, settings), steps=settings.main, batch_size=settings.batch)
    trigger = bench.subjects[run.subject].trigger
    written = prompts(known_names(), trigger, texts)
    near = [any(word in text for word in near_misses(trigger)) for text in written]
    untriggered = TriggerFree(base, written, near, settings, pictures=pictures)
    found: dict[str, Any] = {"trigger_free": untriggered.changed_by(adapters), "steps": settings.main}
    if run.method == OURS:
        shipping: Any = adapters
        try:
            shipping.mounts()
        except ValueError as reason:
            found["not_shipped"] = str(reason)
        else:
            found["shipped"] = untriggered.changed_by_product(shipping.concept(base, 0))
    say(f"{run.method}: without its trigger the states change by {found['trigger_free']['conditioning']['max']:.3g} at most")
    return found
