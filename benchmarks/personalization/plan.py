"""What the comparison runs, and in which stages. Imports runs and the registry of methods.

A *stage* is a list of *pieces*; a piece is one method's runs that are trained together, small enough to be done in
minutes and never done twice. All choosing happens on the development subjects; the final ones are taught once, at rates
that the results file already holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.personalization.methods import EXTRA, LABELS, METHODS, RATES, method_of
from benchmarks.personalization.methods.ours_options import Options
from benchmarks.personalization.runs import Run, Shares

__all__ = [
    "FULL",
    "REDUCED",
    "STAGES",
    "Piece",
    "PlanError",
    "Settings",
    "Subjects",
    "base",
    "costs",
    "final",
    "is_control",
    "levers",
    "methods",
    "reduced",
    "sweep",
]

# Raised by hand when a change of the bench, of a judge or of a method changes figures: pieces of another version are run again.
VERSION = 1
# ours: 2 collages of eight, rate 1.4e-2 and maps at 0.4 of it, in place of 1, 1e-2 and 0.3.
METHOD_VERSIONS: dict[str, int] = {"ours": 2}

STAGES = ("base", "sweep", "methods", "levers", "final", "costs")
RATE_FACTORS = (0.1, 0.32, 1.0, 3.2, 10.0, 32.0)
# Rates of one piece of the sweep.
RATES_TOGETHER = 5
OURS = "ours"
# In the final table beside ours and the best LoRA on the development subjects.
FINAL = ("inversion-t", "lora-unet-r8", "after-tiny-engram", "after-v-engram")
REDUCED_METHODS = ("inversion-t", "lora-unet-r8", OURS)
SEEDS = (0, 1, 2)


class PlanError(ValueError):
    """A stage that cannot or may not be run as asked; one line that says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is equal for all methods.

    Attributes:
        steps: of training. main: the step whose pictures the tables are about. checkpoints: where pictures are drawn.
        batch: pictures per training step and run.
        samples: pictures per prompt at `main`; between: at the other checkpoints; pair: per prompt of two subjects.
        choices: subjects among whom identity is judged; among fewer, known ones fill up.
        drawn: pictures of the untouched base that the options prior and collage read (priors.py).
        drawing_steps, guidance: of the pipeline. tf32: whether a CUDA device may round the factors of products.
    """

    steps: int = 400
    main: int = 300
    checkpoints: tuple[int, ...] = (25, 50, 100, 200, 300, 400)
    batch: int = 8
    samples: int = 4
    between: int = 2
    pair: int = 2
    choices: int = 15
    drawn: int = 48
    drawing_steps: int = 25
    guidance: float = 4.0
    tf32: bool = True

    def __post_init__(self) -> None:
        if sorted(set(self.checkpoints)) != list(self.checkpoints) or self.main not in self.checkpoints:
            raise PlanError(f"checkpoints {self.checkpoints}: expected rising steps that hold the main one, {self.main}")
        if self.checkpoints[0] < 1 or self.checkpoints[-1] > self.steps:
            raise PlanError(f"checkpoints {self.checkpoints}: expected steps from 1 to {self.steps}")


FULL = Settings()
REDUCED = Settings(steps=120, main=120, checkpoints=(120,), batch=4, samples=2, between=2, pair=2, choices=6, drawn=12, drawing_steps=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """Names of the subjects of each split, in their order, and which of the known ones have which part."""

    development: tuple[str, ...]
    final: tuple[str, ...]
    known: tuple[str, ...]

    def gallery(self, names: Sequence[str], choices: int) -> tuple[str, ...]:
        """The subjects among which the identity of `names` is judged: they, and known ones up to `choices`."""
        filling = [name for name in self.known if name not in names]
        return (*names, *filling[: max(0, choices - len(names))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One method's runs that are trained and drawn together.

    Attributes:
        kind: "teach"; "known" (the base draws names that it knows) and "untaught" (subjects by their class words), which draw those of
            the gallery; "judges" (their accuracy, ceilings); "costs", alone on the machine; "trigger-free", what changes elsewhere.
        label: the method's name in tables; a lever's own.
        draw_at: checkpoints at which all runs are drawn. between_seeds: the runs that are drawn at checkpoints other than
            the main one, by seed. pairs: whether pairs of the subjects of one seed are drawn at the main step.
        controls: ways to draw ours spoilt, at the main step (methods/controls.py).
        gallery: names among which identity is judged. keep: whether pictures for contact sheets and concept files are kept.
    """

    stage: str
    kind: str
    method: str
    label: str
    runs: tuple[Run, ...]
    settings: Settings
    gallery: tuple[str, ...]
    draw_at: tuple[int, ...] = ()
    between_seeds: tuple[int, ...] = ()
    pairs: bool = False
    controls: tuple[str, ...] = ()
    keep: bool = True

    def described(self) -> dict[str, Any]:
        """Everything that decides the piece's figures, beside the weights and the subjects' pictures; JSON values."""
        decisive: dict[str, Any] = {"version": VERSION, "method_version": METHOD_VERSIONS.get(self.method, 1)}
        preset = getattr(method_of(self.method), "preset", None) if self.runs else None
        if preset is not None:
            # what a run does not name is the method's own choice, which may change
            decisive["all_options"] = asdict(Options.of(self.runs[0], preset))
        return json.loads(json.dumps(asdict(self) | decisive))

    def key(self, inputs: str) -> str:
        """16 hex digits that name the piece's file; `inputs` is the digest of weights and pictures."""
        return hashlib.sha256(json.dumps([self.described(), inputs], sort_keys=True).encode()).hexdigest()[:16]

    def cells(self) -> set[str]:
        """What a later piece of the same stage, method and label replaces: subject, seed, and the rate where several are tried."""
        if not self.runs or self.kind == "trigger-free":
            return {self.kind}
        rated = self.stage in ("sweep", "levers")
        return {f"{run.subject}/{run.seed}" + (f"/{run.learning_rate:g}" if rated else "") for run in self.runs}

    def work(self) -> float:
        """How much there is to do, in rows through the denoiser; a row of training counts three times."""
        from benchmarks.personalization.prompts import CONTEXTS

        s, count = self.settings, len(self.runs)
        if self.kind in ("known", "untaught"):
            pairs = (len(self.gallery) - 1) / 2 * s.pair if self.pairs else 0
            return len(self.gallery) * (len(CONTEXTS) * s.samples + pairs) * s.drawing_steps * 2
        if self.kind == "judges":
            return 30_000
        pictures = 0
        for step in self.draw_at:
            seeds = [run for run in self.runs if step == s.main or run.seed in self.between_seeds]
            pictures += len(seeds) * len(CONTEXTS) * (s.samples if step == s.main else s.between)
        pictures *= 1 + len(self.controls)
        if self.pairs:
            for seed in {run.seed for run in self.runs}:
                same = sum(run.seed == seed for run in self.runs)
                pictures += same * (same - 1) // 2 * s.pair * (1 + len(self.controls))
        trained = count * (50 if self.kind == "costs" else max(self.draw_at, default=s.main)) * s.batch * 3
        return trained + pictures * s.drawing_steps * 2 + (6_000 if self.kind == "trigger-free" else 0)

    def title(self) -> str:
        """For progress lines."""
        runs = f", {len(self.runs)} run{'s' * (len(self.runs) != 1)}" if self.runs else ""
        return f"{self.stage}: {self.label} ({self.kind}{runs})"


def is_control(method: str) -> bool:
    """A variant of ours that shows what a part of it is worth; it is taught at ours' rate."""
    return method.startswith(f"{OURS}-")


def _known(method: str) -> str:
    if method not in METHODS and method not in EXTRA:
        raise PlanError(f"method {method!r} is not known; expected one of {', '.join((*METHODS, *EXTRA))}")
    return method


def _check(stage: str, wanted: Iterable[str], subjects: Subjects) -> tuple[str, ...]:
    """The names, if `stage` may teach them: final subjects are for the final stage alone."""
    names = tuple(wanted)
    allowed = subjects.final if stage == "final" else subjects.development
    for name in names:
        if name not in allowed:
            split = "final" if name in subjects.final else "known" if name in subjects.known else "unknown"
            raise PlanError(f"stage {stage} may not teach {name!r}, a subject of the split {split!r}; it takes {', '.join(allowed)}")
    return names


def _pieces(stage: str, runs: Sequence[Run], names: Sequence[str], subjects: Subjects, settings: Settings, **rest: Any) -> list[Piece]:
    """One piece of all runs; one a run, and no pairs, for methods that hold one at a time: they train the base's own weights."""
    method = runs[0].method
    given: dict[str, Any] = {"kind": "teach", "label": LABELS[method], "gallery": subjects.gallery(names, settings.choices)}
    piece = Piece(stage=stage, method=method, runs=tuple(runs), settings=settings, **given | rest)
    return [piece] if method_of(method).stackable else [replace(piece, runs=(run,), pairs=False) for run in piece.runs]


def sweep(subjects: Subjects, settings: Settings, *, only: Sequence[str] = (), teach: Sequence[str] = ()) -> list[Piece]:
    """Every method at six learning rates on the development subjects, one seed, drawn at the main step."""
    names = _check("sweep", teach or subjects.development, subjects)
    pieces = []
    for method in [_known(m) for m in only or METHODS if not is_control(m)]:
        rates = [float(f"{factor * RATES[method]:.6g}") for factor in RATE_FACTORS]
        for first in range(0, len(rates), RATES_TOGETHER):
            part = rates[first : first + RATES_TOGETHER]
            runs = [Run(method=method, subject=name, seed=SEEDS[0], learning_rate=rate) for rate in part for name in names]
            pieces += _pieces("sweep", runs, names, subjects, settings, draw_at=(settings.main,), keep=False)
    return pieces


def _rate(method: str, rates: Mapping[str, float], stage: str) -> float:
    source = OURS if is_control(method) else method
    if source not in rates:
        raise PlanError(f"stage {stage}: no learning rate was chosen for {source}; run the stage sweep, and merge its pieces, first")
    return rates[source]


def methods(
    subjects: Subjects,
    settings: Settings,
    rates: Mapping[str, float],
    *,
    only: Sequence[str] = (),
    teach: Sequence[str] = (),
    drawn_controls: Sequence[str] = (),
) -> list[Piece]:
    """Every method and every control at its best rate on the development subjects, one seed, drawn at all checkpoints."""
    names = _check("methods", teach or subjects.development, subjects)
    pieces = []
    for method in [_known(m) for m in only or METHODS]:
        rate = _rate(method, rates, "methods")
        runs = [Run(method=method, subject=name, seed=SEEDS[0], learning_rate=rate) for name in names]
        at = (settings.main,) if is_control(method) else settings.checkpoints
        controls = tuple(drawn_controls) if method == OURS else ()
        pieces += _pieces("methods", runs, names, subjects, settings, draw_at=at, between_seeds=(SEEDS[0],), pairs=True, controls=controls)
    return pieces


def levers(
    subjects: Subjects,
    settings: Settings,
    rates: Mapping[str, float],
    variants: Sequence[Mapping[str, Any]],
    *,
    teach: Sequence[str] = (),
) -> list[Piece]:
    """Variants of ours on the development subjects, each at ours' chosen rate unless it names its own.

    A variant is {"label": str, "options": {...}} and may hold "learning_rates": [...] or "factors": [...] of the published
    default, and "method" where it is not ours that varies.
    """
    names = _check("levers", teach or subjects.development, subjects)
    pieces, seen = [], set()
    for variant in variants:
        unknown = set(variant) - {"label", "options", "learning_rates", "factors", "method"}
        label = variant.get("label")
        if unknown or not isinstance(label, str) or not label or "/" in label or label in seen:
            raise PlanError(
                f"variant {dict(variant)!r}: expected a label of its own without a slash, options, and if wanted "
                "method, learning_rates or factors"
            )
        seen.add(label)
        method = _known(variant.get("method", OURS))
        tried = list(variant.get("learning_rates", ())) + [float(f"{f * RATES[method]:.6g}") for f in variant.get("factors", ())]
        options = tuple(sorted((name, _frozen(value)) for name, value in variant.get("options", {}).items()))
        if not hasattr(method_of(method), "preset") and (bad := {name for name, _ in options} - {f.name for f in fields(Shares)}):
            raise PlanError(f"variant {label!r}: {method} has no option {', '.join(sorted(bad))}; expected prior or collage")
        runs = [
            Run(method=method, subject=name, seed=SEEDS[0], learning_rate=float(rate), options=options)
            for rate in tried or [_rate(method, rates, "levers")]
            for name in names
        ]
        pieces += _pieces("levers", runs, names, subjects, settings, label=label, draw_at=(settings.main,), pairs=len(tried) < 2)
    return pieces


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down: options are part of a run, which is hashable."""
    if isinstance(value, Mapping):
        return tuple((name, _frozen(entry)) for name, entry in sorted(value.items()))
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list | tuple) else value


def final(
    subjects: Subjects,
    settings: Settings,
    rates: Mapping[str, float],
    lora: str | None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[Piece]:
    """The methods of the final table on the final subjects, three seeds, all pairs; `lora` is the best one on the development subjects.

    `only` may name other methods too. With `seeds`, which are three or fewer, a piece holds one seed: pieces take a third of the time.
    """
    names = _check("final", subjects.final, subjects)
    if lora is None:
        raise PlanError("stage final: the best LoRA is not known; run the stage sweep for the methods lora-*, and merge its pieces, first")
    if wrong := set(seeds) - set(SEEDS):
        raise PlanError(f"stage final: seed {min(wrong)} is not one of {', '.join(map(str, SEEDS))}")
    pieces = []
    # all methods at one seed before any at the next: when time runs out, methods have the same seeds
    for together in [(seed,) for seed in seeds] or [SEEDS]:
        for method in [_known(m) for m in only or dict.fromkeys((*FINAL, lora, OURS))]:
            rate = _rate(method, rates, "final")
            runs = [Run(method=method, subject=name, seed=seed, learning_rate=rate) for seed in together for name in names]
            pieces += _pieces("final", runs, names, subjects, settings, draw_at=settings.checkpoints, between_seeds=(SEEDS[0],), pairs=True)
    return pieces


def reduced(
    subjects: Subjects, settings: Settings, rates: Mapping[str, float], *, only: Sequence[str] = (), teach: Sequence[str] = ()
) -> list[Piece]:
    """The stage `methods` for a CPU: three methods on two development subjects, one piece a method."""
    names = tuple(teach or subjects.development[:2])
    return methods(subjects, settings, rates, only=only or REDUCED_METHODS, teach=names)


def base(subjects: Subjects, settings: Settings) -> list[Piece]:
    """What the base and the judges can do at all: names the base knows, alone and in pairs, and real pictures."""
    common: dict[str, Any] = {"stage": "base", "method": "base", "runs": (), "settings": settings}
    development = subjects.gallery(subjects.development, settings.choices)
    return [
        Piece(kind="judges", label="judges", gallery=subjects.known, keep=False, **common),
        Piece(kind="known", label="Base, known names", gallery=subjects.known, pairs=True, **common),
        # a floor: what a user has who teaches nothing
        Piece(kind="untaught", label="Base, class word", gallery=subjects.final, keep=False, **common),
        Piece(kind="untaught", label="Base, class word (development)", gallery=development, keep=False, **common),
    ]


def costs(subjects: Subjects, settings: Settings, rates: Mapping[str, float], *, only: Sequence[str] = ()) -> list[Piece]:
    """Every method alone on the machine, then what each changes elsewhere: one run of the first development subject."""
    pieces = []
    for kind in ("costs", "trigger-free"):
        for method in [_known(m) for m in only or METHODS if only or not is_control(m)]:
            run = Run(method=method, subject=subjects.development[0], seed=SEEDS[0], learning_rate=_rate(method, rates, "costs"))
            pieces += _pieces("costs", [run], subjects.development, subjects, settings, kind=kind, keep=False)
    return pieces
