"""The loop of train-lm: rows and projections of Engram layers, through the quantiser that stores the rows, in a frozen causal LM.

Accelerate carries device, precision, processes and trackers. The base's parameters get no gradient and no optimiser ever sees them. May
import everything in tiny_engram but pipelines, studio and cli.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tqdm.auto import tqdm

from tiny_engram.checkpoints import PREFIX, delete_checkpoints, find_checkpoint, list_checkpoints, write_checkpoint
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable, write_atomically
from tiny_engram.interrupts import interrupts_held
from tiny_engram.llm import EngramLayers
from tiny_engram.llm.decoders import decoder_of
from tiny_engram.llm.engram_layers import CONFIG_FILE
from tiny_engram.llm.memory import memory_for
from tiny_engram.run_setup import accelerator_for, frozen, start_trackers
from tiny_engram.together import on_main

from .card import model_card
from .config import LMTrainConfig
from .gradients import coalesce, reduce_gradients
from .run import Run, resume
from .validation import Measured, summed_loss, validate
from .windows import Windows, end_token, places_of, tokenize

__all__ = ["LMTrainResult", "train_lm"]

logger = logging.getLogger(__name__)

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class LMTrainResult:
    """A finished run.

    Attributes:
        path: the adapter's folder, for EngramLayers.from_pretrained.
        steps: optimiser steps done, those before a resume too.
        losses: mean loss of each step, in nats per token.
        measured: validation at the beginning, every `validation_steps` and at the end; empty without validation text.
        tokens: of the text that was taught.
    """

    path: Path
    steps: int
    seconds: float
    losses: tuple[float, ...]
    measured: tuple[Measured, ...]
    tokens: int


@torch.inference_mode(False)
@torch.enable_grad()
def train_lm(
    model: Any, tokenizer: Any, config: LMTrainConfig, *, progress: bool = True, on_step: Callable[[int, float], None] | None = None
) -> LMTrainResult:
    """Teach Engram layers from text and write them to `config.output_dir`. Nothing of the model is changed; nothing stays attached.

    Args:
        model: a transformers causal LM of a type in tiny_engram.llm.ARCHITECTURES, in the type that it will be used in.
        tokenizer: the model's, with a fast backend and an end token.
        on_step: called after each optimiser step with (steps done, loss). KeyboardInterrupt raised by it stops the run there.

    Raises:
        TinyEngramError: no text, a model or tokenizer without a place for Engram, numbers that are not finite, no permission to write.
        KeyboardInterrupt: after a checkpoint of the last whole step was written.
    """
    decoder = decoder_of(model)
    longest = getattr(decoder.config, "max_position_embeddings", None)
    if longest is not None and config.block_size > longest:
        raise TinyEngramError(f"block_size is {config.block_size}: expected at most {longest}, the positions that this model has")
    output = Path(config.output_dir)
    if (output / CARD).exists() and not (output / CONFIG_FILE).exists():
        raise TinyEngramError(f"{output / CARD}: would be overwritten, and is not of Engram layers; choose another --output_dir")
    check_writable(output)
    folder = find_checkpoint(output, config.resume_from_checkpoint) if config.resume_from_checkpoint else None
    if folder is None and not config.overwrite_output_dir:
        _refuse_used(output)
    device = next(model.parameters()).device
    accelerator = _accelerator(config, output, device)
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise TinyEngramError(f"accelerate is set up for {kind.value}: expected one process, or several with the whole model on each")
    if accelerator.num_processes > 1 and device != accelerator.device:
        model.to(accelerator.device)
    recomputed = _recomputed(model, decoder.layers) if config.gradient_checkpointing else nullcontext()
    with frozen(model), recomputed:
        with torch.random.fork_rng(devices=()):  # modules draw their first values before their own are drawn by the config's seed
            engrams = EngramLayers.attach(model, config.engram_config(end_token(tokenizer)), tokenizer)
        what = f"{config.train_batch_size} windows of {config.block_size} tokens at a time"
        way_out = (
            "lower --train_batch_size and raise --gradient_accumulation_steps, or pass --gradient_checkpointing or --mixed_precision bf16"
        )
        try:
            with memory_for(what, way_out):
                return _Loop(model, tokenizer, engrams, config, accelerator, output, folder).run(progress, on_step)
        finally:
            engrams.detach()


def _refuse_used(output: Path) -> None:
    """A new run does not begin where another's files lie: "latest" would mean either's, and its adapter would be written over."""
    held = [path.name for _, path in list_checkpoints(output)][-1:] or [CONFIG_FILE] * (output / CONFIG_FILE).exists()
    if held:
        raise TinyEngramError(
            f"{output} holds {held[0]} of another run; go on from a checkpoint with --resume_from_checkpoint latest, choose another "
            "--output_dir, or pass --overwrite_output_dir, which deletes its checkpoints"
        )


def _accelerator(config: LMTrainConfig, output: Path, device: torch.device) -> Accelerator:
    if config.mixed_precision == "fp16" and device.type == "cpu":  # whose small gradients nothing would scale
        raise TinyEngramError("mixed_precision 'fp16' cannot be used here: the model is on a CPU; pass bf16 or no, or --device cuda")
    # Passes of a step are added up here: what each is divided by depends on the tokens of all of them.
    return accelerator_for(config, output, cpu=device.type == "cpu")


@contextmanager
def _recomputed(model: Any, layers: Any) -> Iterator[None]:
    """A frozen model's layers are computed again in the backward pass; `frozen` around it puts the layers' modes back."""
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    try:
        _switch(model, "enable", {"use_reentrant": False})
        for layer in layers:
            layer.training = True  # of itself alone, which is what it asks; what drops out is in its parts
        yield
    finally:
        if not checkpointed:
            _switch(model, "disable")


def _switch(model: Any, how: str, *arguments: Any) -> None:
    """transformers calls it "activation" in newer releases, "gradient" in older ones."""
    newer = getattr(model, f"activation_checkpointing_{how}", None)
    (newer or getattr(model, f"gradient_checkpointing_{how}"))(*arguments)


class _Loop:
    """One run: its data, its state and its files."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        engrams: EngramLayers,
        config: LMTrainConfig,
        accelerator: Accelerator,
        output: Path,
        folder: Path | None,
    ) -> None:
        """folder: of the checkpoint that the run goes on from."""
        self.model, self.engrams, self.config, self.accelerator, self.output = model, engrams, config, accelerator, output
        self.device = next(model.parameters()).device
        self.train, self.validation, digest = self._windows(tokenizer)
        self.state = Run(engrams, config, accelerator.scaler)
        known = engrams.config.to_dict()
        self.identity = {"text": digest} | {name: known[name] for name in ("fingerprint", "hidden")}
        if folder is not None:
            resume(self.state, folder, self.identity)
            if folder.resolve() == (output / f"{PREFIX}{self.state.step}").resolve():
                self.state.written = self.state.step
            later = [path.name for step, path in list_checkpoints(output) if step > self.state.step]
            if later and accelerator.is_main_process:
                logger.warning("%s holds %s too, which 'latest' means until this run is past it", output, later[-1])
        else:
            on_main(accelerator, lambda: delete_checkpoints(output))

    def _windows(self, tokenizer: Any) -> tuple[Windows, Windows | None, str]:
        """What is taught, what is measured, and the digest of the texts."""
        config, cache = self.config, self.output / "cache"
        groups = [paths for paths in (config.train_file, config.validation_file) if paths]
        on_main(self.accelerator, lambda: [tokenize(paths, tokenizer, cache) for paths in groups])
        found = [tokenize(paths, tokenizer, cache) for paths in groups]
        pad = end_token(tokenizer)
        windows = [Windows.of(tokens, config.block_size, pad) for tokens, _ in found]
        for paths, each in zip(groups, windows, strict=True):
            if not len(each):
                raise TinyEngramError(f"{', '.join(paths)}: one token of text; expected two or more, so that one can be predicted")
        train, held = (windows[0], windows[1]) if config.validation_file else windows[0].split(config.validation_split_percentage)
        return train, held.some(config.max_validation_samples) if len(held) else None, " ".join(digest for _, digest in found)

    # -- the run -------------------------------------------------------------------------------------------------------------

    def run(self, progress: bool, on_step: Callable[[int, float], None] | None) -> LMTrainResult:
        config, state, accelerator = self.config, self.state, self.accelerator
        tracking = config.report_to != "none"
        on_main(accelerator, lambda: start_trackers(accelerator, config, self.output))
        shown = progress and accelerator.is_local_main_process
        bar = tqdm(total=config.max_train_steps, initial=state.step, desc="teaching", unit="step", disable=not shown)
        started = time.perf_counter()
        try:
            if not state.measured:
                self._measure(tracking)
            while state.step < config.max_train_steps:
                state.set_rates()
                loss = self._step()
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if tracking:
                    accelerator.log({"loss": loss, "lr": state.optimizers[0].param_groups[0]["lr"]}, step=state.step)
                last = state.step == config.max_train_steps
                if last or (config.validation_steps and state.step % config.validation_steps == 0):
                    self._measure(tracking)
                if not last and config.checkpointing_steps and state.step % config.checkpointing_steps == 0:
                    self._checkpoint()
                if on_step is not None:
                    on_step(state.step, loss)
        except KeyboardInterrupt:
            bar.close()
            if accelerator.is_main_process:
                self._write_checkpoint()
                logger.warning("stopped at step %d; go on with --resume_from_checkpoint latest", state.step)
            raise
        finally:
            bar.close()
            if tracking:
                accelerator.end_training()
        self._checkpoint()
        on_main(accelerator, lambda: self._write(self.output))
        return LMTrainResult(
            self.output, state.step, time.perf_counter() - started, tuple(state.losses), tuple(state.measured), len(self.train.tokens)
        )

    def _step(self) -> float:
        """One optimiser step; its loss, the mean over the tokens of all processes and passes."""
        config, state, accelerator = self.config, self.state, self.accelerator
        ranks, rank, batch = accelerator.num_processes, accelerator.process_index, config.train_batch_size
        count = batch * ranks * config.gradient_accumulation_steps
        places = places_of(config.seed, state.samples, count, len(self.train))
        targets = self.train.targets(places)
        total = torch.zeros((), device=self.device)
        for part in range(config.gradient_accumulation_steps):
            first = (part * ranks + rank) * batch
            ids, mask = self.train.batch(places[first : first + batch])
            with accelerator.autocast():
                loss = summed_loss(self.model, ids.to(self.device), None if mask is None else mask.to(self.device)) / targets
            (loss if accelerator.scaler is None else accelerator.scaler.scale(loss)).backward()
            coalesce(list(state.tables.values()))
            total += loss.detach()
        loss = float(reduce_gradients(list(state.dense.values()), list(state.tables.values()), total))
        if not math.isfinite(loss):
            state.forget_gradients()
            raise TinyEngramError(f"the loss of step {state.step + 1} is {loss}; {state.way_out()}")
        with interrupts_held():
            if not state.update():
                logger.info("step %d overflowed in float16 and is left out", state.step + 1)
            state.step, state.samples = state.step + 1, state.samples + count
            state.losses.append(loss)
        return loss

    def _measure(self, tracking: bool) -> None:
        state, accelerator = self.state, self.accelerator
        if self.validation is None or (state.measured and state.measured[-1].step == state.step):
            return
        where = {"rank": accelerator.process_index, "ranks": accelerator.num_processes}
        found = validate(self.model, self.validation, self.config.train_batch_size, step=state.step, **where)
        state.measured.append(found)
        logger.info("step %d: validation loss %.4f, perplexity %.2f", found.step, found.loss, found.perplexity)
        if tracking:
            accelerator.log({"validation_loss": found.loss, "perplexity": found.perplexity}, step=state.step)

    # -- files ---------------------------------------------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        on_main(self.accelerator, self._write_checkpoint)
        self.state.written = self.state.step  # of all: they say the same in an error

    def _write_checkpoint(self) -> None:
        """One that is there holds the same: writing it again would take it away for a moment, and a kill in it would lose the run."""
        state = self.state
        if state.step != state.written:
            held = state.state() | {"identity": self.identity}
            limit = self.config.checkpoints_total_limit
            write_checkpoint(self.output, state.step, state.tensors(), held, self._write, limit=limit)
            state.written = state.step

    def _write(self, folder: Path) -> None:
        """The adapter as it is, and its card."""
        base = self.engrams.config.base_model_name_or_path
        rows = sum(len(table) for table in self.state.tables.values())
        sizes = {
            "rows": rows,
            "bytes": rows * (self.config.head_dim + self.config.head_dim // 32),
            "dense": sum(p.numel() for p in self.state.dense.values()),
        }
        try:
            self.engrams.save_pretrained(folder)
            card = model_card(self.config, base, self.state.step, len(self.train.tokens), self.state.measured, sizes)
            write_atomically(folder / CARD, card.encode())
        except OSError as error:
            reason = error.strerror or error
            raise TinyEngramError(f"{folder}: cannot write the adapter ({reason}); free space or choose another --output_dir") from error
