"""What is wrong with the concepts of one run, all of it, before anything is written or taught; and which of them are there already.

May import what stands below the loop.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.config_file import read_config_file
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable
from tiny_engram.training.checkpoint import CONFIG
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.data import scan_for
from tiny_engram.training.report import REPORT
from tiny_engram.training.run import changed_settings, refuse_resume
from tiny_engram.training.trainer import check_place, untrained

__all__ = ["BEGIN", "RESUME", "THERE", "faults_of", "labels_of", "standing", "trigger_faults"]

BEGIN, RESUME, THERE = "begin", "resume", "there"


def labels_of(configs: Sequence[TrainConfig]) -> list[str]:
    """What lines call them."""
    return [f"concept {number} ({config.name or config.trigger!r})" for number, config in enumerate(configs, 1)]


def faults_of(configs: Sequence[TrainConfig], labels: Sequence[str]) -> list[str]:
    """What can be seen without a pipeline: pictures, folders, names and spellings that two have.

    Args:
        labels: what a line calls each of them.
    """
    found: list[str] = []
    found += _twice("output_dir", [Path(config.output_dir).resolve() for config in configs], labels)
    found += _twice("name", [config.name or config.trigger for config in configs], labels)
    spelt = [[" ".join(re.findall(r"\w+|[^\w\s]", text.casefold())) for text in (config.trigger, *config.aliases)] for config in configs]
    found += _clashes([[tuple(text.split()) for text in texts] for texts in spelt], configs, labels)
    for config, label in zip(configs, labels, strict=True):
        for check in (scan_for, _scan_validation, _check_output, check_place):
            try:
                check(config)
            except TinyEngramError as error:
                found.append(f"{label}: {error}")
    return found


def _scan_validation(config: TrainConfig) -> None:
    if config.validation_data_dir is not None:
        scan_for(replace(config, train_data_dir=config.validation_data_dir))


def _check_output(config: TrainConfig) -> None:
    check_writable(Path(config.output_dir))


def _twice(what: str, values: Sequence[object], labels: Sequence[str]) -> Iterator[str]:
    first: dict[object, str] = {}
    for value, label in zip(values, labels, strict=True):
        if value in first:
            yield f"{label}: its {what} {str(value)!r} is that of {first[value]}; give it another"
        first.setdefault(value, label)


def _clashes(sequences: Sequence[Sequence[tuple[Any, ...]]], configs: Sequence[TrainConfig], labels: Sequence[str]) -> Iterator[str]:
    """Where a spelling of one concept is, or holds, one of another: a prompt would mean the other too."""
    owners: dict[tuple[Any, ...], int] = {}
    for number, each in enumerate(sequences):
        for sequence in each:
            owners.setdefault(sequence, number)
    told: set[tuple[int, int]] = set()
    for number, each in enumerate(sequences):
        for sequence in each:
            inside = {sequence[a:b] for a in range(len(sequence)) for b in range(a + 1, len(sequence) + 1)}
            for other in sorted({owners[part] for part in inside if part in owners} - {number}):
                pair = (min(number, other), max(number, other))
                if pair not in told:
                    told.add(pair)
                    word = "is" if sequence in {*sequences[other]} else "holds"
                    mine, theirs = configs[number].trigger, configs[other].trigger
                    yield f"{labels[number]}: its trigger {mine!r} {word} that of {labels[other]}, {theirs!r}; give it another"


def trigger_faults(adapter: Any, configs: Sequence[TrainConfig], labels: Sequence[str]) -> list[str]:
    """What the pipeline's tokenizers say of the triggers: such as cannot be registered, are taken, or that ids cannot tell apart."""
    found: list[str] = []
    compiled: list[Mapping[str, Any]] = []
    for config, label in zip(configs, labels, strict=True):
        try:
            compiled.append(adapter.compile(config.trigger, config.aliases))
            untrained(adapter, config)
        except TinyEngramError as error:
            compiled.append({})
            found.append(f"{label}: {error}")
    for role in adapter.mounts:
        ids = [[variant.ids for variant in one[role].variants] if role in one else [] for one in compiled]
        found += _clashes([[tuple(sequence) for sequence in each] for each in ids], configs, labels)
    return found


def standing(config: TrainConfig, *, again: bool = False) -> str:
    """What is to be done for a concept whose folder may be there: "begin", "resume" from its last checkpoint, or nothing, as it is "there".

    Args:
        again: one that is there with other settings begins anew, instead of being refused; and so does one that cannot be gone on with.

    Raises:
        TinyEngramError: it is there, or was begun, with other settings that matter.
    """
    output = Path(config.output_dir)
    checkpoints = list_checkpoints(output)
    step, before, measured = _last(output, checkpoints)
    if before is None:
        return BEGIN
    concept = Concept.load(config.concept_path) if config.concept_path.exists() else None
    whole = concept is not None and (output / REPORT).is_file() and concept.recipe.get("step") == step
    if whole and (step == before.get("max_train_steps") or _settled(measured, before.get("early_stop_patience"))):
        changed = changed_settings(before, config)
        if not changed:
            return THERE
        if again:
            return BEGIN
        longer = changed == ["max_train_steps"] and config.max_train_steps > step and bool(checkpoints)
        if not longer:
            raise TinyEngramError(
                f"{output} holds it finished with another {', '.join(changed)}; choose another output_dir, or pass --again to teach it anew"
            )
    if not checkpoints:
        return BEGIN
    try:
        refuse_resume(checkpoints[-1][1], step, before, config)
    except TinyEngramError as error:
        if again:
            return BEGIN
        raise TinyEngramError(f"{error}, or pass --again to teach it anew") from error
    return RESUME


def _last(output: Path, checkpoints: Sequence[tuple[int, Path]]) -> tuple[int, dict[str, Any] | None, list[tuple[int, float]]]:
    """Step, config and measurements of the last checkpoint; of a finished run whose checkpoints were deleted, what else says so."""
    if checkpoints:
        _, state = load_checkpoint(checkpoints[-1][1])
        return state["step"], state["config"], [(at, loss) for at, loss in state.get("measured", ())]
    told = output / CONFIG
    if not told.is_file() or not (output / REPORT).is_file():
        return 0, None, []
    read = read_config_file(told, TrainConfig, ("model", "dtype", "device"))
    before: dict[str, Any] = {key: list(value) if isinstance(value, tuple) else value for key, value in read.items()}
    return int(before.get("max_train_steps", 0)), before, []


def _settled(measured: Sequence[tuple[int, float]], patience: int | None) -> bool:
    """As `Run.settled`."""
    if patience is None or not measured:
        return False
    best = min(measured, key=lambda each: each[1])
    return sum(1 for step, _ in measured if step > best[0]) >= patience
