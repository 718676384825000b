"""Runs one piece of the comparison: teach, draw, judge, and hand over what its file holds. Imports the parts of the bench.

Everything that several pieces need (base, judges, pictures of the subjects) is loaded once, in a `Bench`.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import ROOT, circumstances

from benchmarks.personalization.base import Base, Taught
from benchmarks.personalization.bases import EMOJI_SD, BaseSpec
from benchmarks.personalization.methods import LABELS, Adapters, method_of
from benchmarks.personalization.plan import OURS, Piece, Settings, Subjects
from benchmarks.personalization.priors import Priors
from benchmarks.personalization.scores import Gallery, Judges, accuracy, ceilings
from benchmarks.personalization.shots import Shot, averaged, cases, draw_shots, pair_shots, single_shots
from benchmarks.personalization.store import PieceFile
from benchmarks.personalization.subjects import Subject, load_subjects, taught_pictures
from benchmarks.personalization.teach import teach

__all__ = ["Bench", "Outcome", "run_piece", "save_piece"]

# Files, beside a base's weights, that decide figures and are no code.
INPUTS = (
    "benchmarks/personalization/subjects.npz",
    "benchmarks/personalization/squeezenet.safetensors",
    "benchmarks/classifiers.safetensors",
)
CODE = ("assets/bases", "assets/recipe", "benchmarks", "kernels", "pipelines", "tiny_engram")
# Training losses are kept as means over so many steps.
WINDOW = 25


class Bench:
    """What pieces share, each part loaded when it is first asked for."""

    def __init__(self, device: str | torch.device = "cpu", spec: BaseSpec = EMOJI_SD, *, tf32: bool = True) -> None:
        self.device, self.spec, self.tf32 = torch.device(device), spec, tf32
        self._taught: dict[str, Taught] = {}
        self._galleries: dict[tuple[str, ...], Gallery] = {}
        self._priors: dict[tuple[int, int, float], Priors] = {}

    @cached_property
    def base(self) -> Base:
        return Base.load(self.device, self.spec, tf32=self.tf32)

    @cached_property
    def judges(self) -> Judges:
        return Judges.load(self.device)

    @cached_property
    def subjects(self) -> dict[str, Subject]:
        return {subject.name: subject for subject in load_subjects("development", "final", "known")}

    @property
    def names(self) -> Subjects:
        """The subjects' names by split."""
        splits: dict[str, list[str]] = {"development": [], "final": [], "known": []}
        for subject in self.subjects.values():
            splits[subject.split].append(subject.name)
        return Subjects(**{split: tuple(names) for split, names in splits.items()})

    @cached_property
    def inputs(self) -> str:
        """A digest of the base's weights, the judges' and the subjects' pictures."""
        digest = hashlib.sha256()
        folder = self.spec.folder
        # a part that a base shares with another is a link, which a search does not follow
        shared = [path for path in sorted(folder.iterdir()) if path.is_symlink() and path.is_dir()]
        weights, configs = (
            [f for place in (folder, *shared) for f in sorted(place.rglob(f"*.{kind}"))] for kind in ("safetensors", "json")
        )
        for path in (*weights, *configs, *(ROOT / name for name in INPUTS)):
            if path.name != "metrics.json":
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    @cached_property
    def circumstances(self) -> dict[str, Any]:
        """Commit, machine and versions."""
        accelerator = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return circumstances("torch", "diffusers", "transformers", depends_on=CODE, accelerator=accelerator)

    def taught(self, name: str) -> Taught:
        if name not in self._taught:
            self._taught[name] = Taught.of(self.base, self.subjects[name], taught_pictures(self.subjects[name]))
        return self._taught[name]

    def taught_to(self, adapters: Adapters, settings: Settings) -> list[Taught]:
        """What each run is taught, with the pictures beside it that its options ask for."""
        taught = {run.subject: self.taught(run.subject) for run in adapters.runs}
        shares = adapters.shares
        if shares.prior or shares.collage:
            how = (settings.drawn, settings.drawing_steps, settings.guidance)
            if how not in self._priors:
                self._priors[how] = Priors(self.base, count=how[0], steps=how[1], guidance=how[2])
            priors = self._priors[how]
            collages = priors.collages([data.subject for data in taught.values()]) if shares.collage else {}
            for name, data in taught.items():
                extras = {"prior": priors.prior} if shares.prior else {}
                taught[name] = replace(data, extras=extras | ({"collage": collages[name]} if shares.collage else {}))
        return [taught[run.subject] for run in adapters.runs]

    def gallery(self, names: tuple[str, ...]) -> Gallery:
        if names not in self._galleries:
            self._galleries[names] = Gallery(tuple(self.subjects[name] for name in names))
        return self._galleries[names]


@dataclass
class Outcome:
    """What a piece found: records by stage, records of pairs, losses, costs, judges' figures; pictures and concept files."""

    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[str, list[float | None]] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    judges: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def run_piece(bench: Bench, piece: Piece, say: Callable[[str], None] = lambda line: None) -> Outcome:
    """Do everything that a piece asks for. `say` is given lines about how far it is."""
    outcome = Outcome()
    if piece.kind == "teach":
        for part in [piece.runs] if method_of(piece.method).stackable else [(run,) for run in piece.runs]:
            _teach_and_draw(bench, piece, part, outcome, say)
    elif piece.kind in ("known", "untaught"):
        _draw_base(bench, piece, outcome, say)
    elif piece.kind == "judges":
        subjects = tuple(bench.subjects.values())
        outcome.judges = accuracy(bench.base.vae, subjects, judges=bench.judges)
        outcome.ceilings = ceilings(bench.base.vae, subjects, judges=bench.judges)
    elif piece.kind in ("costs", "trigger-free"):
        from benchmarks.personalization.costs import measure, trigger_free

        find = measure if piece.kind == "costs" else trigger_free
        outcome.costs = {piece.method: find(bench, piece.runs[0], piece.settings, say=say)}
    else:
        raise ValueError(f"piece of kind {piece.kind!r}, expected teach, known, untaught, judges, costs or trigger-free")
    return outcome


def save_piece(bench: Bench, piece: Piece, outcome: Outcome, seconds: float, folder: Path) -> PieceFile:
    """Write the piece's file."""
    content = {
        "key": piece.key(bench.inputs),
        "inputs": bench.inputs,
        "base": bench.spec.name,
        "piece": piece.described(),
        "cells": sorted(piece.cells()),
        "seconds": round(seconds, 1),
        "work": round(piece.work()),
        "finished": round(time.time(), 3),
        **bench.circumstances,
        **{name: getattr(outcome, name) for name in ("records", "pairs", "losses", "costs", "judges", "ceilings")},
    }
    return PieceFile.write(folder, content["key"], content, outcome.pictures, outcome.files)


def _teach_and_draw(bench: Bench, piece: Piece, runs: tuple, outcome: Outcome, say: Callable[[str], None]) -> None:
    base, settings = bench.base, piece.settings
    adapters = method_of(piece.method)(base, runs)
    started = time.perf_counter()

    def at_checkpoint(step: int) -> None:
        say(f"step {step} of {steps}, {time.perf_counter() - started:.0f} s")
        _draw_runs(bench, piece, adapters, step, outcome, piece.method, piece.label, say)
        if step == settings.main:
            if piece.method == OURS and piece.keep:
                outcome.files |= _concept_files(adapters, base)
            for control, drawn in _controls(piece, adapters):
                _draw_runs(bench, piece, drawn, step, outcome, control, LABELS.get(control, control), say)

    # a constant rate does not ask how long training lasts
    steps = max(piece.draw_at) if adapters.schedule == "constant" else settings.steps
    losses = teach(
        base, adapters, bench.taught_to(adapters, settings), steps=steps, batch_size=settings.batch,
        at=piece.draw_at, on_checkpoint=at_checkpoint,
    )  # fmt: skip
    for run, curve in zip(runs, losses.float().cpu(), strict=True):
        name = f"{piece.stage}/{piece.label}/{run.subject}/{run.seed}/{run.learning_rate:g}"
        outcome.losses[name] = windowed(curve)


def windowed(losses: torch.Tensor) -> list[float | None]:
    """Means over `WINDOW` steps of one run's losses `[steps]`; None where the run had diverged."""
    means = [part.mean().item() for part in losses.split(WINDOW)]
    return [round(mean, 5) if math.isfinite(mean) else None for mean in means]


def _controls(piece: Piece, adapters: Any) -> list[tuple[str, Adapters]]:
    """Ours, spoilt in ways that need no training."""
    if not piece.controls:
        return []
    from benchmarks.personalization.methods.controls import DRAWN

    return [(name, DRAWN[name](adapters)) for name in piece.controls]


def _draw_runs(
    bench: Bench, piece: Piece, adapters: Adapters, step: int, outcome: Outcome, method: str, label: str, say: Callable[[str], None]
) -> None:
    """Draw and judge the runs at a checkpoint: all contexts, and pairs where the piece has them."""
    settings, runs = piece.settings, adapters.runs
    main = step == settings.main
    drawn = [i for i, run in enumerate(runs) if main or run.seed in piece.between_seeds]
    subjects = {i: bench.subjects[runs[i].subject] for i in drawn}
    seeds = {i: runs[i].seed for i in drawn}
    shots = single_shots(subjects, seeds, settings.samples if main else settings.between)
    stage = piece.stage if method == piece.method else "controls"
    # controls of ours that need training have a stage of their own in the results as well
    stage = "controls" if method.startswith(f"{OURS}-") and stage == "methods" else stage

    def common(run_index: int) -> dict[str, Any]:
        run = runs[run_index]
        named = {"method": method, "label": label, "seed": run.seed, "learning_rate": run.learning_rate}
        return named | {"options": dict(run.options), "step": step}

    records = outcome.records.setdefault(stage, [])
    for shot, means in _judged(bench, piece, adapters, shots, outcome, step, label if stage == "levers" else method, main, say):
        records.append(common(shot.runs[0]) | {"subject": shot.subjects[0].name, "context": shot.prompt.context} | means)
    if not (piece.pairs and main):
        return
    for seed in dict.fromkeys(seeds.values()):
        pairs = pair_shots({i: subjects[i] for i in drawn if seeds[i] == seed}, seed, settings.pair)
        for shot, means in _judged(bench, piece, adapters, pairs, outcome, step, label if stage == "levers" else method, True, say):
            named = {"stage": stage, "subjects": [subject.name for subject in shot.subjects]}
            outcome.pairs.append(named | common(shot.runs[0]) | means)


def _judged(
    bench: Bench,
    piece: Piece,
    adapters: Adapters | None,
    shots: Sequence[Shot],
    outcome: Outcome,
    step: int,
    name: str,
    keep: bool,
    say: Callable[[str], None],
) -> list[tuple[Shot, dict[str, Any]]]:
    if not shots:
        return []
    started = time.perf_counter()
    pictures = draw_shots(bench.base, adapters, shots, piece.settings)
    drawn = time.perf_counter()
    scores = bench.judges.score(pictures, cases(shots), bench.gallery(piece.gallery))
    say(f"{name}, step {step}: {len(shots)} pictures drawn in {drawn - started:.1f} s, judged in {time.perf_counter() - drawn:.1f} s")
    if keep and piece.keep:
        for shot, picture in zip(shots, pictures, strict=True):
            if shot.sample == 0:
                subject = "+".join(thing.name for thing in shot.subjects)
                seed = adapters.runs[shot.runs[0]].seed if adapters is not None else 0
                outcome.pictures[f"{name}/{subject}/{seed}/{step}/{shot.prompt.context}"] = picture
    return averaged(shots, scores)


def _draw_base(bench: Bench, piece: Piece, outcome: Outcome, say: Callable[[str], None]) -> None:
    """The untouched base: names that it was trained on, or subjects that it never saw by the nearest name that it knows."""
    untaught = piece.kind == "untaught"
    drawn = [bench.subjects[name] for name in piece.gallery if (bench.subjects[name].split == "known") != untaught]
    subjects = {-1 - i: subject for i, subject in enumerate(drawn)}
    common = {"method": piece.method, "label": piece.label, "seed": 0, "step": 0}
    shots = single_shots(subjects, dict.fromkeys(subjects, 0), piece.settings.samples, by_class_word=untaught)
    rest: dict[str, Any] = {"learning_rate": None, "options": {}}
    outcome.records["base"] = [
        common | rest | {"subject": shot.subjects[0].name, "context": shot.prompt.context} | means
        for shot, means in _judged(bench, piece, None, shots, outcome, 0, piece.method, True, say)
    ]
    pairs = pair_shots(subjects, 0, piece.settings.pair) if piece.pairs else []
    outcome.pairs = [
        {"stage": "base", "subjects": [subject.name for subject in shot.subjects]} | common | means
        for shot, means in _judged(bench, piece, None, pairs, outcome, 0, piece.method, True, say)
    ]


def _concept_files(adapters: Any, base: Base) -> dict[str, bytes]:
    """The files that the product would load, by name; none where no concept file can hold such a run."""
    files: dict[str, bytes] = {}
    try:
        adapters.mounts()
    except ValueError:
        return files
    with tempfile.TemporaryDirectory() as folder:
        for index, run in enumerate(adapters.runs):
            path = Path(folder) / f"{run.subject.replace(' ', '-')}-{run.seed}.safetensors"
            adapters.concept(base, index).save(path)
            files[path.name] = path.read_bytes()
    return files


def settings_of(settings: Settings) -> dict[str, Any]:
    """For the results file."""
    return asdict(settings)


def estimate(piece: Piece, earlier: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Seconds that a piece will take, from finished ones (key -> {"method", "kind"?, "work", "seconds"}); None if nothing is known."""
    own = [done["seconds"] / done["work"] for done in earlier.values() if done["method"] == piece.method and done["work"]]
    rates = own or [done["seconds"] / done["work"] for done in earlier.values() if done["work"]]
    return max(rates) * piece.work() if rates else None
