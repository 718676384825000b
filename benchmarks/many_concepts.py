"""Teaching many concepts by one manifest, against single runs of the same settings: the stage `manifest` of benchmarks/training.py.

Both are commands: `tiny-engram train --manifest`, and `tiny-engram train` for a sample of the concepts, one after the other; what all of
them would have taken is the sample's mean times their number. Pictures are those of assets/examples, of which every concept takes one
folder, with a trigger and a seed of its own. Before anything is timed, concepts that are taught together must have the losses that they
have alone. How many steps fit into the time that is given is found by two short runs of each kind.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu import need, record, row
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
CHECK_STEPS, PILOT_STEPS = 6, 24
CLOSE = 0.01


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


def check(pipe: Any, words: list[str], shared: dict[str, Any], folder: Path, count: int) -> float:
    """The largest relative difference of a loss between concepts taught together and alone."""
    settings = {**shared, "max_train_steps": CHECK_STEPS}
    together = [TrainConfig(**settings, **entry(words, k), output_dir=str(folder / f"together-{k}")) for k in range(count)]
    outcomes = train_concepts(pipe, together, concepts_together=count, progress=False)
    worst = 0.0
    for k, outcome in enumerate(outcomes):
        need(outcome.result is not None, f"{outcome.name} was not taught: {outcome.error}")
        alone = train(pipe, TrainConfig(**settings, **entry(words, k), output_dir=str(folder / f"alone-{k}")), progress=False)
        assert outcome.result is not None
        worst = max(worst, *(abs(a - b) / b for a, b in zip(outcome.result.losses, alone.losses, strict=True)))
    need(worst <= CLOSE, f"concepts taught together have losses {worst:.2%} from those alone, expected {CLOSE:.0%} at most")
    return worst


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


def steps_that_fit(seconds: float, singles: int, groups: int, one: tuple[float, float], many: tuple[float, float], start: float) -> int:
    """Of each run, by (seconds besides the steps, seconds of a step) of a single run and of one group; `start` is a command's alone."""
    fixed = singles * one[0] + start + groups * (many[0] - start)
    return max(LEAST_STEPS, min(MOST_STEPS, int((seconds - fixed) / (singles * one[1] + groups * many[1]))))


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
        worst = check(pipe, words, shared, folder, min(3, concepts))
        del pipe, adapter
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        pilots: dict[str, float] = {}
        one = many = (0.0, 0.0)
        if steps is None:
            short, long = LEAST_STEPS, PILOT_STEPS
            for count in (short, long):
                pilots[f"single, {count} steps"] = single(words, shared, 0, folder, device, count)
                pilots[f"group, {count} steps"] = by_manifest(words, shared, together, folder, device, together, count)

            def split(kind: str) -> tuple[float, float]:
                low, high = (pilots[f"{kind}, {count} steps"] for count in (short, long))
                each = max((high - low) / (long - short), 1e-4)
                return max(low - short * each, 0.0), each

            one, many = split("single"), split("group")
            left = seconds - (time.perf_counter() - begin)
            steps = steps_that_fit(0.9 * left, singles, groups, one, many, min(one[0], many[0]))
        numbers = [round(k * (concepts - 1) / max(1, singles - 1)) for k in range(singles)]
        alone = [single(words, shared, number, folder, device, steps) for number in numbers]
        whole = by_manifest(words, shared, concepts, folder, device, together, steps)
    mean = statistics.mean(alone)
    ratio = concepts * mean / whole
    setting = f"{steps} steps of batch {batch}, collages {collages}, {together} concepts together"
    rows = [
        row("concepts taught together and alone, largest difference of a loss", f"{worst:.3%}", f"<= {CLOSE:.0%}", worst <= CLOSE),
        row(f"a single run, mean of {len(alone)}, {setting}", f"{mean:.1f} s"),
        row(f"{concepts} concepts by one manifest", f"{whole:.1f} s"),
        row(
            f"{concepts} single runs one after the other (mean times {concepts}) over the manifest",
            f"{ratio:.2f}",
            f">= {TARGET:.0f}",
            ratio >= TARGET,
        ),
    ]
    figures = {"concepts": concepts, "together": together, "steps": steps, "batch": batch, "collages": collages, "device": device}
    figures |= {"single_seconds": alone, "manifest_seconds": whole, "ratio": ratio, "worst": worst, "pilots": pilots}
    if pilots and steps < MOST_STEPS:
        # what the default recipe's steps would give, from the parts of a step that were measured
        more = MOST_STEPS - steps
        longer = concepts * (mean + more * one[1]) / (whole + groups * more * many[1])
        figures["ratio_of_300_steps"] = longer
        rows.append(row(f"the same of {MOST_STEPS} steps, reckoned from two short runs of each", f"{longer:.2f}"))
    record("training", "manifest", figures=figures, rows=rows, packages=("diffusers", "transformers", "accelerate"))
    print(*(f"{each['measure']}: {each['figure']} {each['target']}" for each in rows), sep="\n")
