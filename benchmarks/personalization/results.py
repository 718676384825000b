"""What the bench measured, as estimates: the one place where the report, the plots and the promises read the results file.

Imports statistics only. Scores are means of the judges' figures over pictures; similarities are higher for what is nearer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.personalization.statistics import Estimate, at_step, estimate, pair_estimate, subject_means

if TYPE_CHECKING:
    from benchmarks.personalization.methods.ours_options import Options

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "benchmarks" / "results" / "personalization.json"

FIDELITY = {
    "effnet_best": "EfficientNet, best reference",
    "effnet_all": "EfficientNet, all references",
    "lpips_best": "SqueezeNet, best reference",
    "lpips_all": "SqueezeNet, all references",
}
IDENTITY = {"identity": "EfficientNet", "identity_lpips": "SqueezeNet"}
PROMPT = {"colour": "background", "style": "style", "companion": "companion", "position": "position"}
OURS = "ours"


class NotMeasured(ValueError):
    """The results lack what is asked for; one line that says which stage measures it."""


class Results:
    """The results file, read.

    Args:
        data: its content.

    Attributes:
        data: its content.
        main: the step that the tables are about.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.main: int = data.get("settings", {}).get("main", 300)

    @classmethod
    def load(cls, path: Path = PATH) -> Results:
        """Those of a file; without any measurement where there is no file. Raises ValueError for one that is no JSON object."""
        if not path.exists():
            return cls({})
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path.name}: no JSON ({error}); run python -m benchmarks.personalization report") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path.name}: holds a {type(data).__name__}, expected a JSON object; restore it or run the bench again")
        return cls(data)

    def stage(self, stage: str) -> Sequence[Mapping[str, Any]]:
        """All records of a stage. Raises NotMeasured where there is none."""
        records = self.data.get("stages", {}).get(stage)
        if not records:
            raise NotMeasured(f"stage {stage} has not been run")
        return records

    @cached_property
    def _by_run(self) -> dict[tuple[str, str, int], list[Mapping[str, Any]]]:
        found: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
        for stage, records in self.data.get("stages", {}).items():
            for record in records:
                found.setdefault((stage, record["label"], record["step"]), []).append(record)
        return found

    def methods(self, stage: str) -> dict[str, str]:
        """Label -> method of everything that a stage ran, ours last and the rest as the bench lists them."""
        labels = {record["label"]: record["method"] for record in self.stage(stage)}
        return dict(sorted(labels.items(), key=lambda item: item[1] == OURS))

    def label(self, method: str, stage: str = "final") -> str:
        """How tables call a method. Raises NotMeasured where the stage did not run it."""
        for label, name in self.methods(stage).items():
            if name == method:
                return label
        raise NotMeasured(f"stage {stage} has no records of {method}")

    def records(self, stage: str, label: str, *, step: int | None = None) -> list[Mapping[str, Any]]:
        """Records of one labelled method at a step, the main one unless given. Raises NotMeasured where there are none."""
        self.stage(stage)
        records = self._by_run.get((stage, label, self.main if step is None else step), [])
        if not records:
            raise NotMeasured(f"stage {stage} has no records of {label} at step {self.main if step is None else step}")
        return records

    def score(self, stage: str, label: str, score: str, *, contexts: Sequence[str] | None = None, step: int | None = None) -> Estimate:
        """The mean of a score over subjects. `contexts` None takes all that have it."""
        records = [r for r in self.records(stage, label, step=step) if contexts is None or r["context"] in contexts]
        means = subject_means(records, score)
        if not means:
            raise NotMeasured(f"stage {stage} has no {score} of {label}" + ("" if contexts is None else f" in {', '.join(contexts)}"))
        return estimate(means)

    def relative(self, stage: str, label: str, score: str, context: str) -> Estimate:
        """A score in one context as a share of its mean in the taught one."""
        return self.score(stage, label, score, contexts=[context]) / self.score(stage, label, score, contexts=["taught"])

    def pairs(self, label: str, stage: str = "final", score: str = "both") -> Estimate:
        """Share of pictures of two subjects in which both are right, over pairs."""
        means: dict[tuple[str, str], list[float]] = {}
        for record in self.data.get("pairs", []):
            if (record["stage"], record["label"]) == (stage, label) and record.get("step") in (None, 0, self.main) and score in record:
                one, other = sorted(pair_of(record))
                means.setdefault((one, other), []).append(float(record[score]))
        if not means:
            raise NotMeasured(f"stage {stage} has no pairs of {label}")
        return pair_estimate({pair: sum(values) / len(values) for pair, values in means.items()})

    def known_pairs(self, score: str = "both") -> Estimate:
        """The base's own rate for pairs of names that it knows."""
        for record in self.data.get("pairs", []):
            if record["method"] == "base":
                return self.pairs(record["label"], record["stage"], score)
        raise NotMeasured("stage base has no pairs of known names")

    def cost(self, method: str, name: str) -> float:
        """A figure of the costs of one method. Raises NotMeasured where there is none."""
        value = self.data.get("costs", {}).get(method, {}).get(name)
        if value is None:
            raise NotMeasured(f"stage costs has no {name} of {method}")
        return value

    def step_seconds(self, method: str) -> float:
        """Seconds of a training step: its ratio to the bare denoiser's step, which was timed in turn with it, times the median of the bare
        step over all methods. A machine is not as fast in one minute as in the next. Raises NotMeasured where there is none."""
        ratio = self.cost(method, "step_ratio")
        return ratio * median(found["bare_seconds"] for found in self.data["costs"].values() if "bare_seconds" in found)

    def change(self, method: str) -> dict[str, float]:
        """The largest change on prompts without the trigger: of the states, the denoiser's prediction and the pictures. What the
        bench measured and, for ours, what the shipped pipeline shows, whichever is larger; near misses are among the prompts."""
        found = self.data.get("costs", {}).get(method, {})
        if "trigger_free" not in found:
            raise NotMeasured(f"stage costs has no change without the trigger of {method}")
        seen = [found[name] for name in ("trigger_free", "shipped") if name in found]
        return {kind: max(each[kind]["max"] for each in seen) for kind in ("conditioning", "denoiser", "pictures")}

    def checkpoints(self, stage: str, label: str) -> list[int]:
        """Steps at which a method was drawn."""
        steps = sorted(step for s, name, step in self._by_run if (s, name) == (stage, label))
        if not steps:
            raise NotMeasured(f"stage {stage} has no records of {label}")
        return steps

    def _curves(self, stage: str, label: str, score: str) -> tuple[list[int], dict[str, list[float]]]:
        """Checkpoints, and each subject's score at them, over the seeds that were drawn at all of them."""
        steps = self.checkpoints(stage, label)
        drawn = [self.records(stage, label, step=step) for step in steps]
        seeds = set.intersection(*({record["seed"] for record in records} for records in drawn))
        means = [subject_means([r for r in records if r["seed"] in seeds], score) for records in drawn]
        subjects = set.intersection(*(set(each) for each in means))
        if not subjects:
            raise NotMeasured(f"stage {stage} has no {score} of {label} at every checkpoint")
        return steps, {subject: [each[subject] for each in means] for subject in sorted(subjects)}

    def curve(self, stage: str, label: str, score: str) -> Iterator[tuple[int, Estimate]]:
        """(step, mean over subjects) at each checkpoint."""
        steps, curves = self._curves(stage, label, score)
        for i, step in enumerate(steps):
            yield step, estimate({subject: values[i] for subject, values in curves.items()})

    def at(self, stage: str, label: str, score: str, step: float) -> Estimate:
        """A score after `step` steps, linear between checkpoints subject by subject, and the last one's beyond it."""
        steps, curves = self._curves(stage, label, score)
        return estimate({subject: at_step(steps, values, step) for subject, values in curves.items()})

    @property
    def rates(self) -> Mapping[str, Mapping[str, Any]]:
        """What the sweep chose for each method: see selection.choose. Raises NotMeasured before the sweep."""
        rates = self.data.get("rates")
        if not rates:
            raise NotMeasured("stage sweep has not been run")
        return rates

    @property
    def best_lora(self) -> str:
        """The method that ours is held against: the LoRA with the highest score on the development subjects."""
        best = self.data.get("best_lora")
        if best is None:
            raise NotMeasured("stage sweep has not tried every LoRA at every rate")
        return best

    @cached_property
    def our_layout(self) -> dict[str, Any]:
        """The final runs of ours, for `shapes.concept`."""
        from benchmarks.personalization.methods import METHODS
        from benchmarks.personalization.methods.ours_options import Options
        from benchmarks.personalization.runs import Run

        given: Mapping[str, Any] = self.records("final", self.label(OURS))[0]["options"]
        run = Run(method=OURS, subject="", seed=0, learning_rate=0.0, options=tuple(sorted(given.items())))
        return layout(Options.of(run, getattr(METHODS[OURS], "preset", {})))


def layout(options: Options) -> dict[str, Any]:
    """What of the options of ours decides its size, as keywords of `shapes.concept`."""
    from benchmarks.personalization.methods.maps import ranks_of

    mounts = tuple(kind for kind in options.kinds for _ in range(options.bands if kind in options.context else 1))
    # columns are those of the embedded base, which has four
    held = 1.0 if options.columns is None else options.columns / 4
    return {"mounts": mounts, "share": options.share, "held": held, "gate_shared": options.gate_shared, "ranks": ranks_of(options.maps)}


def pair_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """The two subjects of a pair's record, left one first."""
    one, other = record["subjects"]
    return one, other
