"""Many concepts taught in one process: in groups that share their batches, each with the files of a run of its own.

May import everything in tiny_engram that loop may.
"""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiny_engram.checkpoints import delete_checkpoints
from tiny_engram.errors import TinyEngramError, raise_faults
from tiny_engram.interrupts import interrupts_held
from tiny_engram.launched import local_rank
from tiny_engram.library import ConceptLibrary, LibraryError
from tiny_engram.run_setup import accelerator_for
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.faults import BEGIN, RESUME, THERE, faults_of, labels_of, standing, trigger_faults
from tiny_engram.training.groups import TOGETHER, group_concepts
from tiny_engram.training.loop import prepare_trainer, teach, teaching
from tiny_engram.training.progress import Progress
from tiny_engram.training.sharded import sharded
from tiny_engram.training.trainer import ConceptTrainer, TrainResult
from tiny_engram.wording import brief, counted

__all__ = ["Outcome", "add_to_library", "train_concepts"]

logger = logging.getLogger(__name__)

MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one concept.

    Attributes:
        result: of this run; None where the concept was there already, or failed. error: why it failed.
    """

    name: str
    config: TrainConfig
    result: TrainResult | None = None
    error: str | None = None

    @property
    def path(self) -> Path:
        """Where the finished concept is."""
        return self.config.concept_path


def train_concepts(
    pipe: Any,
    configs: Sequence[TrainConfig],
    *,
    concepts_together: int = TOGETHER,
    again: bool = False,
    progress: bool = True,
    on_step: Callable[[str, int, float], None] | None = None,
    loaded: Mapping[str, str | None] | None = None,
) -> list[Outcome]:
    """Teach concepts, several in each batch. Each has the files that `train` would have left, in its own `output_dir`.

    A concept that is there already with the same settings is skipped, one that was begun goes on from its last checkpoint. One that fails
    on the way does not end the others.

    Args:
        configs: of the concepts; `resume_from_checkpoint` says nothing here.
        concepts_together: most concepts of one batch. Those with other settings of the batch are taught one after the other.
        again: concepts that are there with other settings are taught anew.
        on_step: called after each step with (name, steps done, loss). KeyboardInterrupt raised by it stops the run there.
        loaded: as `train` takes it.

    Returns:
        What became of each concept, in their order.

    Raises:
        FaultsError: with all that is wrong, before anything is written.
        KeyboardInterrupt: after a checkpoint of each concept that was being taught.
    """
    if concepts_together < 1:
        raise TinyEngramError(f"concepts_together is {concepts_together}, expected a whole number from 1")
    labels = labels_of(configs)
    raise_faults(faults_of(configs, labels))
    with teaching(pipe, configs) as adapter:
        faults, states = trigger_faults(adapter, configs, labels), []
        for config, label in zip(configs, labels, strict=True):
            try:
                states.append(standing(config, again=again))
            except TinyEngramError as error:
                faults.append(f"{label}: {error}")
        raise_faults(faults)
        if not configs:
            return []
        accelerator = accelerator_for(configs[0], Path(configs[0].output_dir))
        accelerator.wait_for_everyone()  # all processes have looked at the folders before one of them writes
        run = _Many(pipe, adapter, configs, states, on_step, loaded, shared=accelerator.num_processes > 1)
        return run.teach(concepts_together, progress)


class _Many:
    """One run over several concepts; concepts are called by their numbers.

    Args:
        shared: do several processes share it?
    """

    def __init__(
        self,
        pipe: Any,
        adapter: Any,
        configs: Sequence[TrainConfig],
        states: Sequence[str],
        on_step: Callable[[str, int, float], None] | None,
        loaded: Mapping[str, str | None] | None,
        *,
        shared: bool,
    ) -> None:
        self.pipe, self.adapter, self.on_step, self.loaded, self.shared = pipe, adapter, on_step, loaded, shared
        self.configs = [
            replace(config, resume_from_checkpoint="latest" if state == RESUME else None)
            for config, state in zip(configs, states, strict=True)
        ]
        self.names = [config.name or config.trigger for config in configs]
        self.states = states
        self.results: dict[int, TrainResult] = {}
        self.errors: dict[int, str] = {}
        self._counted: set[int] = set()
        self._most = 0

    def teach(self, together: int, progress: bool) -> list[Outcome]:
        self._most = together
        todo = [number for number, state in enumerate(self.states) if state != THERE]
        if there := [self.names[number] for number, state in enumerate(self.states) if state == THERE]:
            logger.info("there already, taught with these settings: %s", _named(there))
        groups = group_concepts([self.configs[number] for number in todo], together)
        steps = sum(self.configs[number].max_train_steps for number in todo)
        with Progress(steps, 0, progress and local_rank() == 0, concepts=len(self.names), finished=len(there)) as bar:
            try:
                for k, group in enumerate(groups, 1):
                    numbers = [todo[number] for number in group.numbers]
                    names, reason = _named([self.names[number] for number in numbers]), f", alone: {group.reason}" if group.reason else ""
                    logger.info("group %d of %d: %s%s", k, len(groups), names, reason)
                    self._teach_group(numbers, bar)
            except KeyboardInterrupt:
                bar.close()
                logger.warning("stopped; the same command goes on with what is not finished")
                raise
        return [
            Outcome(name, config, self.results.get(number), self.errors.get(number))
            for number, (name, config) in enumerate(zip(self.names, self.configs, strict=True))
        ]

    def _teach_group(self, numbers: Sequence[int], bar: Progress) -> None:
        """To the end of each; as many at once as memory has room for."""
        if len(numbers) > self._most:
            for first in range(0, len(numbers), self._most):
                self._teach_group(numbers[first : first + self._most], bar)
            return
        trainers: dict[int, ConceptTrainer] = {}
        try:
            for number in numbers:
                self._prepare(number, trainers, bar)
            if trainers:
                denoiser = getattr(self.pipe, self.adapter.family.denoiser)
                with sharded(denoiser, next(iter(trainers.values())).accelerator):
                    teach(self.pipe, list(trainers.values()), bar, keep_going=True)
        except torch.OutOfMemoryError:
            if self.shared:
                raise  # the other processes have not run out
        finally:
            for number, trainer in trainers.items():
                self._note(number, trainer)
        left = [number for number in numbers if number not in self.results and number not in self.errors]
        if left:
            # here the error holds no tensor any more
            gc.collect()
            torch.cuda.empty_cache()
            self._go_back(left, trainers)
            trainers.clear()
            self._halve(left, bar)

    def _prepare(self, number: int, trainers: dict[int, ConceptTrainer], bar: Progress) -> None:
        config, name = self.configs[number], self.names[number]
        if self.states[number] == BEGIN and number not in self._counted and local_rank() == 0:
            delete_checkpoints(Path(config.output_dir))  # of a run that `again` begins anew
        on_step = None if self.on_step is None else partial(self.on_step, name)
        try:
            trainer = ConceptTrainer(self.pipe, self.adapter, config, loaded=self.loaded, on_step=on_step)
            trainers[number] = trainer
            if number not in self._counted:
                self._counted.add(number)
                bar.passed(trainer.run.step)
            prepare_trainer(trainer, progress=False)
        except TinyEngramError as error:
            trainer = trainers.pop(number, None)
            if trainer is not None:
                trainer.close()
            self._fail(number, error)
            bar.finished(config.max_train_steps - (0 if trainer is None else trainer.run.step))

    def _note(self, number: int, trainer: ConceptTrainer) -> None:
        trainer.close()
        if trainer.result is not None:
            self.results[number] = trainer.result
        elif trainer.error is not None:
            self._fail(number, trainer.error)

    def _fail(self, number: int, error: Exception) -> None:
        self.errors[number] = brief(" ".join(str(error).split()))
        logger.warning("%s is left out: %s", self.names[number], self.errors[number])

    def _go_back(self, numbers: Sequence[int], trainers: Mapping[int, ConceptTrainer]) -> None:
        """Each to its last whole step, from which it goes on."""
        with interrupts_held():
            for number in numbers:
                trainer = trainers.get(number)
                if trainer is not None and trainer.run.step:
                    trainer.stop()
                    trainer.close()
                    self.configs[number] = replace(self.configs[number], resume_from_checkpoint="latest")

    def _halve(self, numbers: Sequence[int], bar: Progress) -> None:
        if len(numbers) == 1:
            self._fail(numbers[0], TinyEngramError("out of memory; lower train_batch_size or resolution"))
            bar.finished(self.configs[numbers[0]].max_train_steps)
            return
        self._most = -(-len(numbers) // 2)
        logger.warning("out of memory with %d concepts at once: going on with %d", len(numbers), self._most)
        self._teach_group(numbers, bar)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{counted(len(names), 'concept')}, {', '.join(names[:MOST_NAMED])}{more}"


def add_to_library(path: Path, outcomes: Sequence[Outcome]) -> int:
    """Put the finished concepts into a library, which is made if it is not there; one of the same name and trigger is replaced. Returns how
    many there are.

    Raises:
        LibraryError: as `ConceptLibrary.add_many` does, or a name is that of another trigger.
    """
    made = [outcome for outcome in outcomes if outcome.error is None]
    path.parent.mkdir(parents=True, exist_ok=True)
    with ConceptLibrary.open(path) if path.exists() else ConceptLibrary.create(path) as library:
        there = [outcome for outcome in made if outcome.name in library]
        for outcome in there:
            before, now = library.entry(outcome.name).trigger, outcome.config.trigger
            if before != now:
                raise LibraryError(f"{path}: {outcome.name!r} is the concept of {before!r} there, not of {now!r}; choose another library")
        same = {outcome.name for outcome in there if library.read(outcome.name) == outcome.path.read_bytes()}
        library.remove(*(outcome.name for outcome in there if outcome.name not in same))
        library.add_many([(outcome.path, outcome.name) for outcome in made if outcome.name not in same])
    return len(made)
