"""The training loop: rows and gates of one concept, through the quantiser that stores them, against a frozen base.

Accelerate carries device, precision, accumulation and trackers. The base's parameters get no gradient and no optimiser
ever sees them. May import everything in tiny_engram but pipelines and cli.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from tiny_engram.adapter import attach, find_adapter, taught_families
from tiny_engram.checkpoints import PREFIX, find_checkpoint, list_checkpoints
from tiny_engram.concept import Concept
from tiny_engram.config import ENCODER_MOUNTS
from tiny_engram.contexts import ContextMounts
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable
from tiny_engram.interrupts import interrupts_held
from tiny_engram.maps import GivenMaps
from tiny_engram.run_setup import accelerator_for, frozen, log_sheet, tracked_values
from tiny_engram.stream_contexts import GivenRows
from tiny_engram.together import lost_process, mean_of_all, on_main, told_by_main
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
from tiny_engram.training.validation import Validator, native_size, thumbnail_of
from tiny_engram.training.validation_loss import ValidationLoss

__all__ = ["TrainResult", "denoising_loss", "train"]

logger = logging.getLogger(__name__)

# Of the only role, or by role.
Contexts = ContextMounts | Mapping[str, ContextMounts]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run left: the concept as saved, where, and what it cost."""

    concept: Concept
    path: Path
    steps: int
    seconds: float
    losses: tuple[float, ...]
    skipped: tuple[str, ...]


def _choose(items: list[int], share: float) -> int:
    return items[int(share * len(items))]


def denoising_loss(
    pipe: Any, module: nn.Module, contexts: Contexts, data: TrainingData, draws: list[objective.Draw], config: TrainConfig
) -> torch.Tensor:
    """Weighted squared error (a scalar) of one batch, whose every choice is in `draws`.

    `module` is a ConceptRows, a RoleRows or what Accelerate made of it; `contexts`, of its one role or by role, whose hooks are held, bring
    its context mounts and its maps to the denoiser.
    """
    pictures = [data.picture(drawn) for drawn in draws]
    picks = [
        # a collage's caption names both things: cut down to the trigger, it would be wrong
        _choose(data.bare if picture < data.taught and drawn.drop < config.caption_dropout else data.choices[picture], drawn.caption)
        for drawn, picture in zip(draws, pictures, strict=True)
    ]
    shown = data.latents(draws, pictures)
    denoiser, device = getattr(pipe, data.family.denoiser), shown.means.device
    dtype, size = denoiser.dtype, (shown.means.shape[-2], shown.means.shape[-1])
    patch = data.family.patch or getattr(denoiser.config, "patch_size", None)
    places = size[0] * size[1] // (patch if isinstance(patch, int) else 1) ** 2
    timesteps = objective.timesteps_for(pipe.scheduler, [drawn.timestep for drawn in draws], config, places)
    at_step = [int(timestep) for timestep in timesteps.tolist()]
    timesteps = timesteps.to(device)
    noise = torch.stack([objective.noise_for(drawn, (2, *shown.means.shape[1:]), config.noise_offset) for drawn in draws]).to(device)
    latents = shown.means + shown.stds * noise[:, 1]
    noisy = objective.add_noise(pipe.scheduler, latents, noise[:, 0], timesteps)
    captions = data.captions.batch(picks)
    parts = captions.parts
    if len(parts) == 1:
        ((role, part),) = parts.items()
        told = {role: module(part, at_step, dtype)}
    else:
        told = module(parts, at_step, dtype)
    # under mixed precision Accelerate turns a module's output into float32
    embeds = captions.embeds({role: states.to(dtype) for role, (states, *_) in told.items()})
    first = embeds[next(iter((data.family.given or {"encoder_hidden_states": "prompt_embeds"}).values()))]
    frames = data.framed(pictures, (size[0] * pipe.vae_scale_factor, size[1] * pipe.vae_scale_factor)).to(device)
    own = {role: contexts[role] if isinstance(contexts, Mapping) else contexts for role in told}
    for role, (*_, factors) in told.items():
        if factors:
            own[role].hold_maps()
    with ExitStack() as giving:
        for role, (_, read, factors) in told.items():
            read = read if isinstance(read, GivenRows) else {name: context.to(dtype) for name, context in read.items()}
            maps = GivenMaps(parts[role].fired.to(device), factors) if factors else None
            giving.enter_context(own[role].giving(first[0] if isinstance(first, list) else first, read, maps))
        # some denoisers say the noise's variance too, in channels behind
        predicted = data.family.predicts(pipe, noisy.to(dtype), timesteps, embeds, frames)[:, : latents.shape[1]].float()
    error = (predicted - objective.target_of(pipe.scheduler, latents, noise[:, 0], timesteps)).square()
    error = (error if shown.weights is None else error * shown.weights).mean((1, 2, 3))
    return (error * objective.loss_weights(pipe.scheduler, timesteps, config.snr_gamma)).mean()


@contextmanager
def _alone(adapter: Any):
    """The adapter's other concepts silent: neither cached states nor validation pictures hold them."""
    strengths = {name: adapter.strength(name) for name in adapter.get_active_concepts()}
    try:
        for name in strengths:
            adapter.set_strength(name, 0.0)
        yield
    finally:
        for name, strength in strengths.items():
            adapter.set_strength(name, strength)


def train(
    pipe: Any,
    config: TrainConfig,
    *,
    examples: Iterable[Mapping[str, Any]] | None = None,
    progress: bool = True,
    on_step: Callable[[int, float], None] | None = None,
    loaded: Mapping[str, str | None] | None = None,
) -> TrainResult:
    """Teach one concept and write it to `config.concept_path`.

    Args:
        pipe: a pipeline that `attach` knows; its own adapter is used if it has one. Nothing of it is changed.
        examples: pictures in the place of `config.train_data_dir`: mappings {"image": PIL.Image, "text": caption}, such as a
            `datasets.Dataset` has them; may be "mask" and "repeats".
        loaded: what the pipeline was loaded with (model, dtype, device), for config.yaml; options of `tiny-engram train`.
        on_step: called after each optimiser step with (steps done, loss). KeyboardInterrupt raised by it stops the run there.

    Raises:
        TinyEngramError: bad pictures or captions, a trigger that cannot be registered or is taken, no permission to write.
        KeyboardInterrupt: after a checkpoint of the last whole step was written.
    """
    adapter = find_adapter(pipe)
    borrowed = adapter is not None
    adapter = adapter or attach(pipe)
    try:
        if adapter.family.predicts is None:
            raise TinyEngramError(
                f"{type(pipe).__name__} is of the family {adapter.family.name}, which cannot be taught: {adapter.family.untaught}; expected "
                f"one of {', '.join(taught_families())}; concepts made elsewhere can be loaded"
            )
        still = frozen(getattr(pipe, adapter.family.denoiser), pipe.vae, *(m.module for m in adapter.mounts.values()))
        contexts = adapter.contexts.values()
        if config.at_denoiser and not any(one.names for one in contexts):
            raise TinyEngramError(
                f"mounts {', '.join(map(repr, config.mounts))}, maps of rank {config.attention_rank} and {config.feedforward_rank}: the "
                "pipeline has no cross-attentions that a concept could add to; pass --mounts span --attention_rank 0 --feedforward_rank 0"
            )
        with still, _alone(adapter), ExitStack() as held:
            for one in contexts if config.at_denoiser else ():
                held.enter_context(one.held())
            return _train(pipe, adapter, config, examples, progress, on_step, loaded or {})
    finally:
        if not borrowed:
            adapter.detach()


def _start(adapter: Any, config: TrainConfig) -> Concept:
    """The untrained concept, which loads: its trigger is free."""
    start = adapter.new_concept(config.trigger, config.aliases, config.name, config.concept_config)
    name = adapter.load_concept(start, rename=True)
    active = name in adapter.get_active_concepts()
    adapter.unload_concept(name)
    if not active:
        raise TinyEngramError("the concepts of this pipeline are disabled, so none could be validated; call enable_concepts() first")
    return start


def _module(adapter: Any, start: Concept, config: TrainConfig) -> ConceptRows | RoleRows:
    """The masters at their first step."""
    word = config.class_word
    begun = [role for role, held in start.roles.items() if word is not None and not held.mounts.keys().isdisjoint(ENCODER_MOUNTS)]
    starts = {role: start_at_word(adapter, start, role, word) for role in begun if word is not None}
    return make_rows(start, {role: adapter.contexts[role].layout for role in start.roles}, starts)


def _keep_others(config: TrainConfig) -> None:
    """Raises TinyEngramError where the run would end by writing over a concept of another trigger, or over a file that is none."""
    if config.concept_path.exists():
        there = Concept.load(config.concept_path).trigger
        if there != config.trigger:
            what = f"{config.concept_path} holds the concept of {there!r}, not of {config.trigger!r}"
            raise TinyEngramError(f"{what}; choose another output_dir, or move that file away")


def _train(
    pipe: Any,
    adapter: Any,
    config: TrainConfig,
    given: Iterable[Mapping[str, Any]] | None,
    progress: bool,
    on_step: Callable[[int, float], None] | None,
    loaded: Mapping[str, str | None],
) -> TrainResult:
    start = _start(adapter, config)
    for warning in dict.fromkeys(w for made in adapter.compile(config.trigger, config.aliases).values() for w in made.warnings):
        logger.warning("trigger %r: %s", start.trigger, warning)
    scan = scan_for(config, given, spellings=(start.trigger, *start.aliases))
    examples = scan.examples
    for line in scan.skipped:
        logger.warning("skipped: %s", line)
    if scan.others:
        logger.info("%d other files in %s are left alone", scan.others, config.train_data_dir)
    for line in report(scan, config.resolution or native_size(pipe)).warnings:
        logger.warning("pictures: %s", line)
    output = Path(config.output_dir)
    check_writable(output)
    folder = find_checkpoint(output, config.resume_from_checkpoint) if config.resume_from_checkpoint else None
    if folder is None:
        _keep_others(config)
        if others := list_checkpoints(output):
            logger.warning(
                "%s holds %s of another run, which --resume_from_checkpoint latest means until this one is past it; to go on with that "
                "one stop here and pass it, else choose another --output_dir or delete its checkpoints",
                output,
                others[-1][1].name,
            )
    accelerator = accelerator_for(config, output, gradient_accumulation_steps=config.gradient_accumulation_steps)
    module = _module(adapter, start, config)
    shown = progress and accelerator.is_local_main_process
    optimizer = make_optimizer(module, config)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    module = accelerator.unwrap_model(wrapped)
    run = Run(module, optimizer.optimizer, accelerator.scaler)
    contexts = adapter.contexts
    validator = Validator(adapter, config, output / VALIDATION)
    written: int | None = None
    if folder is not None:
        resume(run, folder, config)
        if folder.resolve() == (output / f"{PREFIX}{run.step}").resolve():
            written = run.step
    started = time.perf_counter()
    # after all that can be refused at once: it may draw for a minute
    data = prepare(pipe, adapter, start, config, examples, shown)
    measure = _measure(pipe, adapter, start, config, contexts, data) if config.validation_loss_steps else None
    files = RunFiles(run, config, start, next(iter(start.roles)), len(examples), loaded, written)
    on_main(accelerator, files.begin)
    if accelerator.is_main_process and config.trackers:
        beside = {"wandb": {"dir": str(output / "logs")}}  # which else writes where the command was called
        accelerator.init_trackers("tiny-engram", config=tracked_values(config), init_kwargs=beside)

    bar = tqdm(total=config.max_train_steps, initial=run.step, desc="teaching", unit="step", disable=not shown)
    processes, rank = accelerator.num_processes, accelerator.process_index
    share = config.train_batch_size
    samples, begun_at = share * processes * config.gradient_accumulation_steps, run.step
    # in buckets the collages are one of them
    others = 0 if config.buckets else config.collages
    first_step = time.perf_counter()
    try:
        while run.step < config.max_train_steps and not run.settled(config.early_stop_patience):
            for group, rate in zip(run.optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * config.rate(run.step)
            total, norm = 0.0, None
            for part in range(config.gradient_accumulation_steps):
                first = (part * processes + rank) * share
                draws = [objective.draw(config.seed, run.step, first + i, samples, others=others) for i in range(share)]
                with accelerator.accumulate(wrapped):
                    with accelerator.autocast():
                        loss = denoising_loss(pipe, wrapped, contexts, data, draws, config) + module.nothing()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                total += mean_of_all(accelerator, loss) / config.gradient_accumulation_steps
            run.follow(config.ema_decay)
            run.step, run.losses, run.norms = run.step + 1, (*run.losses, total), (*run.norms, None if norm is None else float(norm))
            best = False
            if measure is not None and run.step % config.validation_loss_steps == 0:
                with accelerator.autocast():
                    measured = measure(run)
                best = run.measure(told_by_main(accelerator, measured))
            run.keep()
            recent = run.losses[-25:]
            bar.update()
            bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", refresh=False)
            if accelerator.is_main_process:
                files.step_done()
                if best:
                    files.keep_best()
            if config.trackers:
                accelerator.log(step_metrics(run, config, run.step), step=run.step)
            if config.checkpointing_steps and run.step % config.checkpointing_steps == 0 and run.step < config.max_train_steps:
                on_main(accelerator, files.checkpoint)
            if config.validation_steps and run.step % config.validation_steps == 0 and accelerator.is_main_process:
                sheet = validator.draw(files.concept(), run.step)
                if sheet is not None:
                    log_sheet(accelerator, sheet, run.step)
            if on_step is not None:
                on_step(run.step, total)
    except KeyboardInterrupt:
        bar.close()
        with interrupts_held():  # a second one shall not spoil what is written
            run.back()
            if accelerator.is_main_process:
                files.stopped()
                logger.warning("stopped at step %d; go on with --resume_from_checkpoint latest", run.step)
        raise
    except RuntimeError as error:
        if not lost_process(accelerator, error):
            raise
        bar.close()
        run.back()
        if accelerator.is_main_process:
            files.stopped()
        raise TinyEngramError(
            f"another process of this run has ended ({' '.join(str(error).split())[:120]}); the run stands at step {run.step}: go on with "
            "--resume_from_checkpoint latest"
        ) from error
    finally:
        bar.close()
        files.close()
        if config.trackers:
            accelerator.end_training()
    if run.step < config.max_train_steps and run.lowest is not None:
        said = "stopped at step %d: the last %d validation losses were no new best; best/ holds step %d (%.4f)"
        logger.info(said, run.step, config.early_stop_patience, *run.lowest)
    seconds, teaching = time.perf_counter() - started, time.perf_counter() - first_step
    made = files.concept().with_details(thumbnail=thumbnail_of(examples[0]))
    on_main(accelerator, lambda: files.finish(adapter, made, (seconds, teaching), run.step - begun_at))
    return TrainResult(made, config.concept_path, run.step, seconds, run.losses, scan.skipped)


def _measure(pipe: Any, adapter: Any, start: Concept, config: TrainConfig, contexts: Contexts, data: TrainingData) -> ValidationLoss:
    """On pictures of their own folder, or those that are taught; collages and mirror images are none of them."""
    held = replace(data, collages=0, share=0.0, mirrored=(), choices=data.choices[: data.taught])
    if config.validation_data_dir is not None:
        own = replace(config, train_data_dir=config.validation_data_dir, collages=0, random_flip=False)
        others = scan_for(own, spellings=(start.trigger, *start.aliases))
        held = prepare(pipe, adapter, start, own, others.examples)
    return ValidationLoss(lambda module, draws: denoising_loss(pipe, module, contexts, held, draws, config), config)
