"""The training loop: rows and gates of one concept, through the quantiser that stores them, against a frozen base.

Accelerate carries device, precision, accumulation and trackers. The base's parameters get no gradient and no optimiser
ever sees them. May import everything in tiny_engram but pipelines and cli.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from tiny_engram.adapter import attach, find_adapter, taught_families
from tiny_engram.contexts import ContextMounts
from tiny_engram.errors import TinyEngramError
from tiny_engram.interrupts import interrupts_held
from tiny_engram.maps import GivenMaps
from tiny_engram.run_setup import frozen, recomputed
from tiny_engram.together import lost_process
from tiny_engram.training import objective
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.joint import JointData, JointRows
from tiny_engram.training.prepared import TrainingData, places_of
from tiny_engram.training.progress import Progress
from tiny_engram.training.sharded import check_launch, sharded
from tiny_engram.training.trainer import ConceptTrainer, TrainResult
from tiny_engram.training.updates import average_gradients, clip_gradients, told_losses

__all__ = ["TrainResult", "denoising_loss", "prepare_trainer", "teach", "teaching", "train"]

logger = logging.getLogger(__name__)


def denoising_loss(
    pipe: Any,
    module: Callable[..., Any],
    contexts: ContextMounts | Mapping[str, ContextMounts],
    data: TrainingData | JointData,
    draws: list[objective.Draw],
    config: TrainConfig,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Weighted squared error of one batch, whose every choice is in `draws`: of each of the data's concepts, float32 `[concepts]`.

    `module` is a ConceptRows or a RoleRows, or the JointRows of a JointData; `contexts`, of its only role or by role, whose hooks are held,
    bring its context mounts and its maps to the denoiser. `dtype` is what the denoiser reads; None asks it, which goes through all its
    modules.
    """
    shown, captions = data.batch(draws, config.caption_dropout)
    device, dtype = shown.means.device, dtype or getattr(pipe, data.family.denoiser).dtype
    places = places_of(pipe, data.family, shown.means)
    timesteps = objective.timesteps_for(pipe.scheduler, [drawn.timestep for drawn in draws], config, places)
    at_step = [int(timestep) for timestep in timesteps.tolist()]
    timesteps = timesteps.to(device)
    noise = torch.stack([objective.noise_for(drawn, (2, *shown.means.shape[1:]), config.noise_offset) for drawn in draws]).to(device)
    latents = shown.means + shown.stds * noise[:, 1]
    noisy = objective.add_noise(pipe.scheduler, latents, noise[:, 0], timesteps)
    roles = captions.parts
    alone = next(iter(roles)) if len(roles) == 1 else None
    told = module(roles, at_step, dtype) if alone is None else {alone: module(roles[alone], at_step, dtype)}
    embeds = captions.embeds({role: states for role, (states, *_) in told.items()})
    maps = {role: GivenMaps(roles[role].fired.to(device), factors) for role, (*_, factors) in told.items() if factors}
    with ExitStack() as given:
        mounts = {role: contexts[role] if isinstance(contexts, Mapping) else contexts for role in told}
        for role in maps:
            mounts[role].hold_maps()
        for role, (_, read, _) in told.items():
            given.enter_context(mounts[role].giving(data.family.text_of(embeds), read, maps.get(role)))
        # some denoisers say the noise's variance too, in channels behind
        said = data.family.predicts(pipe, noisy.to(dtype), timesteps, embeds, shown.frames.to(device))
        predicted = said[:, : latents.shape[1]].float()
    error = (predicted - objective.target_of(pipe.scheduler, latents, noise[:, 0], timesteps)).square()
    error = (error if shown.weights is None else error * shown.weights).mean((1, 2, 3))
    return (error * objective.loss_weights(pipe.scheduler, timesteps, config.snr_gamma)).view(data.concepts, -1).mean(1)


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


@contextmanager
def teaching(pipe: Any, configs: Sequence[TrainConfig]) -> Iterator[Any]:
    """The pipeline's adapter, ready to teach these: base frozen, its other concepts silent; all is put back afterwards.

    Raises:
        TinyEngramError: the pipeline cannot be taught, or not at the mounts that a config asks for.
    """
    check_launch()
    adapter = find_adapter(pipe)
    borrowed = adapter is not None
    adapter = adapter or attach(pipe)
    try:
        if adapter.family.predicts is None:
            raise TinyEngramError(
                f"{type(pipe).__name__} is of the family {adapter.family.name}, which cannot be taught: {adapter.family.untaught}; "
                f"expected one of {', '.join(taught_families())}; concepts made elsewhere can be loaded"
            )
        recomputing = any(config.gradient_checkpointing for config in configs)
        if recomputing and adapter.family.no_checkpoints is not None:
            raise TinyEngramError(f"gradient_checkpointing is True, but {adapter.family.no_checkpoints}; leave it out")
        denoiser = getattr(pipe, adapter.family.denoiser)
        still = frozen(denoiser, pipe.vae, *(m.module for m in adapter.mounts.values()))
        # of several concepts that share batches, one that asks for it is enough
        again = recomputed(denoiser) if recomputing else nullcontext()
        config = next((config for config in configs if config.at_denoiser), None)
        if config is not None and not any(contexts.names for contexts in adapter.contexts.values()):
            raise TinyEngramError(
                f"mounts {', '.join(map(repr, config.mounts))}, maps of rank {config.attention_rank} and {config.feedforward_rank}: the "
                "pipeline has no cross-attentions that a concept could add to; pass --mounts span --attention_rank 0 --feedforward_rank 0"
            )
        mapped = next((config for config in configs if config.attention_rank or config.feedforward_rank), None)
        if mapped is not None and not any(mount.store.maps for mount in adapter.mounts.values()):
            raise TinyEngramError(
                f"attention_rank is {mapped.attention_rank} and feedforward_rank {mapped.feedforward_rank}, but no maps can be put into a "
                f"{type(pipe).__name__}, which reads text and picture in one attention; pass --attention_rank 0 --feedforward_rank 0"
            )
        with still, again, _alone(adapter), ExitStack() as held:
            for contexts in adapter.contexts.values() if config is not None else ():
                # maps' hooks too: new ones are probed, which a denoiser in parts cannot be
                held.enter_context(contexts.held(maps=mapped is not None))
            yield adapter
    finally:
        if not borrowed:
            adapter.detach()


def train(
    pipe: Any,
    config: TrainConfig,
    *,
    examples: Iterable[Mapping[str, Any]] | None = None,
    progress: bool = True,
    on_step: Callable[[int, float], None] | None = None,
    loaded: Mapping[str, str | None] | None = None,
) -> TrainResult:
    """Teach one concept and write it to `config.concept_path`; `train_concepts` teaches several at once.

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
    with teaching(pipe, [config]) as adapter:
        trainer = ConceptTrainer(pipe, adapter, config, examples=examples, loaded=loaded, on_step=on_step)
        shown = progress and trainer.accelerator.is_local_main_process
        prepare_trainer(trainer, shown)
        shards = sharded(getattr(pipe, adapter.family.denoiser), trainer.accelerator)
        with Progress(config.max_train_steps, trainer.run.step, shown) as bar, shards:
            teach(pipe, [trainer], bar)
    assert trainer.result is not None
    return trainer.result


def prepare_trainer(trainer: ConceptTrainer, progress: bool) -> None:
    """What a trainer needs before its first step. Raises TinyEngramError, such as DataError."""
    contexts = trainer.adapter.contexts
    trainer.prepare(lambda data, module, draws: denoising_loss(trainer.pipe, module, contexts, data, draws, trainer.config), progress)
    trainer.begin()


def teach(pipe: Any, trainers: Sequence[ConceptTrainer], bar: Progress, *, keep_going: bool = False) -> None:
    """Teach prepared concepts that `groups.group_concepts` puts together, all in one batch, each to its own end: those that are over leave
    it, with a result.

    Args:
        keep_going: a concept with an error leaves the batch, its `error` set, and the others go on. Otherwise the error is raised.

    Raises:
        KeyboardInterrupt: after a checkpoint of each concept's last whole step was written.
    """
    active = list(trainers)

    def leave(trainer: ConceptTrainer) -> None:
        active.remove(trainer)
        bar.finished(max(0, trainer.config.max_train_steps - trainer.run.step))

    def each(act: Callable[[ConceptTrainer], object], *, alike: bool = True) -> None:
        for trainer in tuple(active):
            try:
                act(trainer)
            except TinyEngramError as error:
                # a process that fails alone may not go on: others would wait for it
                if not keep_going or (trainer.accelerator.num_processes > 1 and not alike):
                    raise
                trainer.error = error
                leave(trainer)
                trainer.close()

    def settle(trainer: ConceptTrainer) -> None:
        if trainer.over:
            trainer.finish()
            leave(trainer)

    try:
        each(settle)
        while active:
            batch = _Batch(pipe, active)
            together = len(active)
            while len(active) == together:
                batch.step()
                if keep_going:
                    each(_check_loss)
                each(ConceptTrainer.record, alike=False)
                bar.step(active)
                each(settle)
    except KeyboardInterrupt:
        bar.close()
        with interrupts_held():  # a second one shall not spoil what is written
            _stop(active)
            if not keep_going and active and active[0].accelerator.is_main_process:
                logger.warning("stopped at step %d; go on with --resume_from_checkpoint latest", active[0].run.step)
        raise
    except RuntimeError as error:
        if not active or not lost_process(active[0].accelerator, error):
            raise
        bar.close()
        _stop(active)
        stands = f"the run stands at step {active[0].run.step}: go on with --resume_from_checkpoint latest"
        raise TinyEngramError(
            f"another process of this run has ended ({' '.join(str(error).split())[:120]}); "
            f"{'each concept has a checkpoint of its last step: the same command goes on' if keep_going else stands}"
        ) from error
    finally:
        for trainer in active:
            trainer.close()


def _stop(trainers: Sequence[ConceptTrainer]) -> None:
    """Write the last whole step of each. Raises the first error, such as a full disk, after all have been tried."""
    errors: list[TinyEngramError] = []
    for trainer in trainers:
        try:
            trainer.stop()
        except TinyEngramError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _check_loss(trainer: ConceptTrainer) -> None:
    """A scaler passes over what is not finite, and goes on."""
    loss = trainer.run.losses[-1]
    if trainer.accelerator.scaler is None and not math.isfinite(loss):
        raise TinyEngramError(f"the loss of step {trainer.run.step} is {loss}, expected a number; lower learning_rate")


class _Batch:
    """Concepts as they are taught side by side, until one of them leaves."""

    def __init__(self, pipe: Any, trainers: Sequence[ConceptTrainer]) -> None:
        first = trainers[0]
        self.pipe, self.trainers, self.config, self.accelerator = pipe, tuple(trainers), first.config, first.accelerator
        self.contexts, self.dtype = first.adapter.contexts, getattr(pipe, first.adapter.family.denoiser).dtype
        self.modules = [trainer.module for trainer in trainers]
        self.rows = JointRows(self.modules)
        self.data = JointData([trainer.data for trainer in trainers if trainer.data is not None], [m.positions for m in self.modules])

    def step(self) -> None:
        """One step of every concept."""
        losses: list[torch.Tensor] = []
        for part in range(self.config.gradient_accumulation_steps):
            draws = [drawn for trainer in self.trainers for drawn in trainer.draws(part)]
            with self.accelerator.autocast():
                loss = denoising_loss(self.pipe, self.rows, self.contexts, self.data, draws, self.config, self.dtype)
            if loss.requires_grad:  # samples may read no row at all, where rows are those of one band alone
                self.accelerator.backward(loss.sum())
            losses.append(loss.detach())
        average_gradients(self.accelerator, self.modules)
        for trainer in self.trainers:
            trainer.accelerator.unscale_gradients(trainer.optimizer)
        norms = clip_gradients(self.modules, [trainer.config.max_grad_norm for trainer in self.trainers])
        for trainer in self.trainers:
            trainer.update()
            trainer.module.zero_grad()
        told = told_losses(self.accelerator, losses, norms)
        for trainer, (loss, norm) in zip(self.trainers, told, strict=True):
            trainer.done(loss, norm)
