"""One concept's side of a run: its pictures, masters, optimiser and files. What it shares with others taught beside it is the loop's.

May import what stands below the loop.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tiny_engram.checkpoints import PREFIX, find_checkpoint, list_checkpoints
from tiny_engram.concept import Concept
from tiny_engram.config import ENCODER_MOUNTS
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable
from tiny_engram.run_setup import accelerator_for, close_trackers, log_sheet, start_trackers
from tiny_engram.together import on_main, told_by_main
from tiny_engram.training import objective
from tiny_engram.training.class_word import start_at_word
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.data import report, scan_for
from tiny_engram.training.metrics import step_metrics
from tiny_engram.training.optimizers import make_optimizer
from tiny_engram.training.prepared import TrainingData, prepare
from tiny_engram.training.role_rows import RoleRows, make_rows
from tiny_engram.training.rows import ConceptRows
from tiny_engram.training.run import Run, resume
from tiny_engram.training.run_files import VALIDATION, RunFiles
from tiny_engram.training.sharded import is_sharded
from tiny_engram.training.validation import Validator, native_size, thumbnail_of
from tiny_engram.training.validation_loss import ValidationLoss

__all__ = ["ConceptTrainer", "TrainResult", "check_place", "masters_of", "untrained"]

logger = logging.getLogger(__name__)

# (data, module, draws) -> loss.
DataLoss = Callable[[TrainingData, Any, list[objective.Draw]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run left: the concept as saved, where, and what it cost."""

    concept: Concept
    path: Path
    steps: int
    seconds: float
    losses: tuple[float, ...]
    skipped: tuple[str, ...]


def untrained(adapter: Any, config: TrainConfig) -> Concept:
    """The concept before its first step, which loads: its trigger is free."""
    start = adapter.new_concept(config.trigger, config.aliases, config.name, config.concept_config)
    name = adapter.load_concept(start, rename=True)
    active = name in adapter.get_active_concepts()
    adapter.unload_concept(name)
    if not active:
        raise TinyEngramError("the concepts of this pipeline are disabled, so none could be validated; call enable_concepts() first")
    return start


def masters_of(adapter: Any, start: Concept, config: TrainConfig) -> ConceptRows | RoleRows:
    """The masters at their first step."""
    word, starts = config.class_word, {}
    for role, held in start.roles.items():
        if word is not None and not held.mounts.keys().isdisjoint(ENCODER_MOUNTS):
            starts[role] = start_at_word(adapter, start, role, word)
    return make_rows(start, {role: adapter.contexts[role].layout for role in start.roles}, starts)


def check_place(config: TrainConfig) -> None:
    """Raises TinyEngramError where the run would end by writing over a concept of another trigger, or over a file that is none."""
    if config.concept_path.exists():
        there = Concept.load(config.concept_path).trigger
        if there != config.trigger:
            what = f"{config.concept_path} holds the concept of {there!r}, not of {config.trigger!r}"
            raise TinyEngramError(f"{what}; choose another output_dir, or move that file away")


class ConceptTrainer:
    """Everything of one concept that can be refused at once; `prepare` and `begin` come before its first step.

    Args:
        examples, loaded, on_step: as `train` takes them.

    Attributes:
        steps: that this session has done.
        result: once it is finished. error: why it was left out, if it was.

    Raises:
        TinyEngramError: bad pictures or captions, a trigger that cannot be registered or is taken, no permission to write.
    """

    def __init__(
        self,
        pipe: Any,
        adapter: Any,
        config: TrainConfig,
        *,
        examples: Iterable[Mapping[str, Any]] | None = None,
        loaded: Mapping[str, str | None] | None = None,
        on_step: Callable[[int, float], None] | None = None,
    ) -> None:
        self.pipe, self.adapter, self.config, self.on_step = pipe, adapter, config, on_step
        self.start = start = untrained(adapter, config)
        self.role = next(iter(start.roles))
        for warning in dict.fromkeys(w for made in adapter.compile(config.trigger, config.aliases).values() for w in made.warnings):
            logger.warning("trigger %r: %s", start.trigger, warning)
        self.scan = scan = scan_for(config, examples, spellings=(start.trigger, *start.aliases))
        for line in scan.skipped:
            logger.warning("skipped: %s", line)
        if scan.others:
            logger.info("%d other files in %s are left alone", scan.others, config.train_data_dir)
        for line in report(scan, config.resolution or native_size(pipe)).warnings:
            logger.warning("pictures: %s", line)
        self.output = output = Path(config.output_dir)
        check_writable(output)
        folder = find_checkpoint(output, config.resume_from_checkpoint) if config.resume_from_checkpoint else None
        if folder is None:
            check_place(config)
            if others := list_checkpoints(output):
                logger.warning(
                    "%s holds %s of another run, which --resume_from_checkpoint latest means until this one is past it; to go on with that "
                    "one stop here and pass it, else choose another --output_dir or delete its checkpoints",
                    output,
                    others[-1][1].name,
                )
        self.accelerator = accelerator_for(config, output, gradient_accumulation_steps=config.gradient_accumulation_steps)
        self.module = masters_of(adapter, start, config).to(self.accelerator.device)
        optimizer = make_optimizer(self.module, config)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.run = Run(self.module, optimizer, self.accelerator.scaler)
        self.validator = Validator(adapter, config, output / VALIDATION)
        written: int | None = None
        if folder is not None:
            resume(self.run, folder, config)
            if folder.resolve() == (output / f"{PREFIX}{self.run.step}").resolve():
                written = self.run.step
        self.files = RunFiles(self.run, config, start, self.role, len(scan.examples), loaded or {}, written)
        # in buckets the collages are one of them
        self._others = 0 if config.buckets else config.collages
        self._measure: ValidationLoss | None = None
        self._best = False
        self.data: TrainingData | None = None
        self.result: TrainResult | None = None
        self.error: TinyEngramError | None = None
        self.began, self.begun_at, self._first_step = time.perf_counter(), self.run.step, 0.0

    @property
    def steps(self) -> int:
        return self.run.step - self.begun_at

    @property
    def over(self) -> bool:
        """Is no step left to do?"""
        return self.run.step >= self.config.max_train_steps or self.run.settled(self.config.early_stop_patience)

    def prepare(self, loss: DataLoss, progress: bool) -> None:
        """Latents and caption states: it may draw for a minute, after all that can be refused at once."""
        config, start = self.config, self.start
        self.data = data = prepare(self.pipe, self.adapter, start, config, self.scan.examples, progress)
        if not config.validation_loss_steps:
            return
        # On pictures of their own folder, or those that are taught; collages and mirror images are none of them.
        held = replace(data, collages=0, share=0.0, mirrored=(), choices=data.choices[: data.taught])
        if config.validation_data_dir is not None:
            own = replace(config, train_data_dir=config.validation_data_dir, collages=0, random_flip=False)
            others = scan_for(own, spellings=(start.trigger, *start.aliases))
            held = prepare(self.pipe, self.adapter, start, own, others.examples)
        self._measure = ValidationLoss(lambda module, draws: loss(held, module, draws), config)

    def begin(self) -> None:
        """Files and trackers."""
        on_main(self.accelerator, self.files.begin)
        on_main(self.accelerator, lambda: start_trackers(self.accelerator, self.config, self.output))
        self._first_step = time.perf_counter()

    def draws(self, part: int) -> list[objective.Draw]:
        """Of this process' samples in one of a step's passes."""
        config, step, accelerator = self.config, self.run.step, self.accelerator
        processes, share = accelerator.num_processes, config.train_batch_size
        samples, first = share * processes * config.gradient_accumulation_steps, (part * processes + accelerator.process_index) * share
        return [objective.draw(config.seed, step, first + i, samples, others=self._others) for i in range(share)]

    def update(self) -> None:
        """One step of the optimiser, by the gradients that are there."""
        rate = self.config.rate(self.run.step)
        for group, base in zip(self.run.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = base * rate
        # Accelerate's own steps the scaler too, and looks for packages at every step
        (self.run.optimizer if self.accelerator.scaler is None else self.optimizer).step()
        self.run.follow(self.config.ema_decay)

    def done(self, loss: float, norm: float) -> None:
        """After an update: the step becomes a whole one."""
        run, config = self.run, self.config
        run.step, run.losses, run.norms = run.step + 1, (*run.losses, loss), (*run.norms, norm)
        self._best = False
        if self._measure is not None and run.step % config.validation_loss_steps == 0:
            with self.accelerator.autocast():
                measured = self._measure(run)
            self._best = run.measure(told_by_main(self.accelerator, measured))
        run.keep()

    def record(self) -> None:
        """What a whole step leaves in files and trackers."""
        run, config, accelerator, files = self.run, self.config, self.accelerator, self.files
        if accelerator.is_main_process:
            files.step_done()
            if self._best:
                files.keep_best()
        if config.trackers:
            accelerator.log(step_metrics(run, config, run.step), step=run.step)
        if config.checkpointing_steps and run.step % config.checkpointing_steps == 0 and run.step < config.max_train_steps:
            on_main(accelerator, files.checkpoint)
        main = accelerator.is_main_process
        # a denoiser in parts needs all processes to draw
        drawing = main or is_sharded(getattr(self.pipe, self.adapter.family.denoiser))
        if config.validation_steps and run.step % config.validation_steps == 0 and drawing:
            sheet = self.validator.draw(files.concept(), run.step, keep=main)
            if sheet is not None and main:
                log_sheet(accelerator, sheet, run.step)
        if self.on_step is not None:
            self.on_step(run.step, run.losses[-1])

    def stop(self) -> None:
        """Back to the last whole step, and write it."""
        self.run.back()
        if self.accelerator.is_main_process:
            self.files.stopped()

    def close(self) -> None:
        self.files.close()
        close_trackers(self.accelerator)

    def finish(self) -> None:
        """After the last step: the concept and its report."""
        run, config = self.run, self.config
        self.close()
        if run.step < config.max_train_steps and run.lowest is not None:
            said = "stopped at step %d: the last %d validation losses were no new best; best/ holds step %d (%.4f)"
            logger.info(said, run.step, config.early_stop_patience, *run.lowest)
        now = time.perf_counter()
        seconds = now - self.began
        made = self.files.concept().with_details(thumbnail=thumbnail_of(self.scan.examples[0]))
        on_main(self.accelerator, lambda: self.files.finish(self.adapter, made, (seconds, now - self._first_step), self.steps))
        self.result = TrainResult(made, config.concept_path, run.step, seconds, run.losses, self.scan.skipped)
