"""Teaching many concepts by one manifest, against single runs of the same settings: the stage `manifest` of benchmarks/training.py.

Both are commands: `tiny-engram train --manifest`, and `tiny-engram train` for a sample of the concepts, one after the other; what all of
them would have taken is the sample's mean times their number. Pictures are those of assets/examples, of which every concept takes one
folder, with a trigger and a seed of its own. Before anything is timed, concepts that are taught together must have the losses that they
have alone; the same short runs say how many steps fit into the time that is given.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import need, on_device, record, row
from tables import ROOT

import tiny_engram
from tiny_engram.config_file import yaml_text
from tiny_engram.launched import device_for
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import TrainConfig, train, train_concepts

__all__ = ["manifest"]

TARGET = 3.0
EXAMPLES = sorted(path for path in (ROOT / "assets" / "examples").iterdir() if path.is_dir())
# Of the default recipe's 300 steps no more than these, and no less.
MOST_STEPS, LEAST_STEPS = 300, 4
# Of the short runs; the losses of their first steps are compared, before rounding grows through the quantiser.
PILOT_STEPS, WARM_UP, CHECK_STEPS, CHECKED = 24, 8, 6, 2
CLOSE, SAFE = 0.01, 0.85


def triggers(adapter: Any, count: int) -> list[str]:
    """Made-up words, whose token ids neither are nor hold one another's."""
    first, second = "bdfgklmnprvz", "aeiou"
    parts = ["".join(each) for each in itertools.product(first, second, first)]
    found: list[str] = []
    taken: set[tuple[int, ...]] = set()
    inner: set[tuple[int, ...]] = set()
    for k in range(len(parts) ** 2):
        word = f"{parts[k * 37 % len(parts)]}{parts[k * 101 % len(parts)][:2]}-{parts[(k * 61 + k // len(parts)) % len(parts)]}"
        ids = {tuple(variant.ids) for made in adapter.compile(word).values() for variant in made.variants}
        inside = {one[a:b] for one in ids for a in range(len(one)) for b in range(a + 1, len(one) + 1)}
        if not inside & taken and not ids & inner:
            found.append(word)
            taken |= ids
            inner |= inside
        if len(found) == count:
            return found
    raise SystemExit(f"{len(found)} triggers found, expected {count}; ask for fewer concepts")


def entry(words: list[str], number: int) -> dict[str, Any]:
    return {"trigger": words[number], "train_data_dir": str(EXAMPLES[number % len(EXAMPLES)]), "seed": number}


class Clock:
    """Seconds between the steps of one concept; the first ones, which warm up, left out."""

    def __init__(self) -> None:
        self._at: list[float] = []

    def __call__(self, *_: object) -> None:
        self._at.append(time.perf_counter())

    @property
    def step(self) -> float:
        at = self._at[WARM_UP:]
        return statistics.median(b - a for a, b in itertools.pairwise(at))


@dataclass(frozen=True, slots=True)
class Pilot:
    """What short runs in this process found: the largest relative difference of a loss between concepts taught together and alone, seconds
    of a step of one concept and of a whole group, and what a group takes besides its steps."""

    worst: float
    single_step: float
    group_step: float
    group_rest: float


def pilot(pipe: Any, words: list[str], shared: dict[str, Any], folder: Path, together: int) -> Pilot:
    """Nothing is timed if what is taught together is not what is taught alone."""
    settings = {**shared, "max_train_steps": PILOT_STEPS}
    configs = [TrainConfig(**settings, **entry(words, k), output_dir=str(folder / f"together-{k}")) for k in range(together)]
    clock, begin = Clock(), time.perf_counter()

    def after(name: str, step: int, loss: float) -> None:
        if name == words[0]:
            clock()

    outcomes = train_concepts(pipe, configs, concepts_together=together, progress=False, on_step=after)
    rest = time.perf_counter() - begin - PILOT_STEPS * clock.step
    worst, singles = 0.0, []
    for k, outcome in enumerate(outcomes[:CHECKED]):
        own = Clock()
        need(outcome.result is not None, f"{outcome.name} was not taught: {outcome.error}")
        config = TrainConfig(**settings, **entry(words, k), output_dir=str(folder / f"alone-{k}"))
        alone = train(pipe, config, progress=False, on_step=own)
        singles.append(own.step)
        assert outcome.result is not None
        pairs = list(zip(outcome.result.losses, alone.losses, strict=True))[:CHECK_STEPS]
        worst = max(worst, *(abs(a - b) / b for a, b in pairs))
    need(worst <= CLOSE, f"concepts taught together have losses {worst:.2%} from those alone, expected {CLOSE:.0%} at most")
    return Pilot(worst, statistics.median(singles), clock.step, max(rest, 0.0))


def command(*words: object) -> float:
    """Seconds of one `tiny-engram train`."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "tiny_engram", "train", *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    need(done.returncode == 0, f"tiny-engram train ended with {done.returncode}: {done.stderr[-1500:]}")
    return time.perf_counter() - begin


def options(fields: dict[str, Any]) -> list[str]:
    return [word for key, value in fields.items() for word in (f"--{key}", str(value))]


def single(words: list[str], shared: dict[str, Any], number: int, folder: Path, device: str, steps: int) -> float:
    fields = {**shared, **entry(words, number), "max_train_steps": steps, "output_dir": folder / f"single-{number}-{steps}"}
    return command(*options(fields), "--device", device)


def by_manifest(words: list[str], shared: dict[str, Any], count: int, folder: Path, device: str, together: int, steps: int) -> float:
    told = folder / f"manifest-{count}-{steps}.yaml"
    output = folder / f"concepts-{count}-{steps}"
    top = {**shared, "max_train_steps": steps, "output_dir": str(output), "concepts_together": together}
    told.write_text(yaml_text({**top, "concepts": [entry(words, k) for k in range(count)]}))
    seconds = command("--manifest", told, "--device", device)
    made = len(list(output.glob("*/concept.safetensors")))
    need(made == count, f"the manifest left {made} concepts, expected {count}")
    return seconds


def manifest(
    concepts: int, singles: int, together: int, steps: int | None, batch: int, collages: int, device: str | None, seconds: float
) -> None:
    """Args: `steps` of each run, None for as many as fit into `seconds`, which the stage takes in all."""
    begin = time.perf_counter()
    device = device_for(device)
    pipe = load_pipeline(device=device)
    adapter = tiny_engram.attach(pipe)
    words = triggers(adapter, concepts)
    adapter.detach()
    shared: dict[str, Any] = {"train_batch_size": batch, "collages": collages, "report_to": "none"}
    singles, together = min(singles, concepts), min(together, concepts)
    groups = math.ceil(concepts / together)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = pilot(pipe, words, shared, folder, together)
        del pipe, adapter
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        start = single(words, shared, 0, folder, device, 1)
        if steps is None:
            left = SAFE * (seconds - (time.perf_counter() - begin)) - (singles + 1) * start - groups * found.group_rest
            steps = int(left / (singles * found.single_step + groups * found.group_step))
            steps = max(LEAST_STEPS, min(MOST_STEPS, steps))
        numbers = [round(k * (concepts - 1) / max(1, singles - 1)) for k in range(singles)]
        alone = [single(words, shared, number, folder, device, steps) for number in numbers]
        whole = by_manifest(words, shared, concepts, folder, device, together, steps)
    mean = statistics.mean(alone)
    ratio = concepts * mean / whole
    setting = f"{steps} steps of batch {batch}, collages {collages}"
    by_step = found.single_step * together / found.group_step
    rows = [
        row("concepts taught together and alone, largest difference of a loss", f"{found.worst:.3%}", f"<= {CLOSE:.0%}", True),
        row("a step of one concept", f"{1e3 * found.single_step:.1f} ms"),
        row(f"a step of {together} concepts together", f"{1e3 * found.group_step:.1f} ms"),
        row(f"steps of {together} concepts one after the other, over the same together", f"{by_step:.2f}"),
        row(f"a single run, mean of {len(alone)}, {setting}", f"{mean:.1f} s"),
        row(f"{concepts} concepts by one manifest, {together} together, {setting}", f"{whole:.1f} s"),
        row(f"{concepts} times the single run over the manifest", f"{ratio:.2f}", f">= {TARGET:.0f}", ratio >= TARGET),
    ]
    figures: dict[str, Any] = {"concepts": concepts, "together": together, "steps": steps, "batch": batch, "collages": collages}
    figures |= {"device": device, "single_seconds": alone, "manifest_seconds": whole, "ratio": ratio, "pilot": asdict(found)}
    figures |= {"one_step_seconds": start}
    if steps < MOST_STEPS:
        # what the default recipe's steps would give: the same and the steps that are missing, by the short runs
        more = MOST_STEPS - steps
        longer = concepts * (mean + more * found.single_step) / (whole + groups * more * found.group_step)
        figures["ratio_of_most_steps"] = longer
        rows.append(row(f"the same of {MOST_STEPS} steps, reckoned from the steps of short runs", f"{longer:.2f}"))
    kind = device.partition(":")[0]
    section = "manifest" if kind == "cpu" else f"manifest, {kind}"
    record("training", section, figures=figures, rows=on_device(rows, kind), packages=("diffusers", "transformers", "accelerate"))
    print(*(f"{each['measure']}: {each['figure']} {each['target']}" for each in rows), sep="\n")
