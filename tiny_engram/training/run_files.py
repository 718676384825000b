"""What a run leaves in its output folder: config.yaml, metrics.jsonl, checkpoint-N/, best/, and at its end the concept and its report.

Written by the main process alone. May import what stands below the loop.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_engram.checkpoints import sweep
from tiny_engram.concept import Concept
from tiny_engram.concept_card import ConceptCard, Entry, Shown
from tiny_engram.config_file import config_text
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically
from tiny_engram.model_card import CARD
from tiny_engram.training.checkpoint import CONFIG, save_checkpoint
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.costs import peak_device_memory, peak_memory
from tiny_engram.training.gallery import clear_gallery, write_gallery
from tiny_engram.training.metrics import METRICS, MetricsFile
from tiny_engram.training.report import REPORT, Report
from tiny_engram.training.role_rows import each_role
from tiny_engram.training.run import Run

__all__ = ["BEST", "VALIDATION", "RunFiles"]

logger = logging.getLogger(__name__)

BEST, VALIDATION = "best", "validation"
_STEM = "concept"
CONCEPT = f"{_STEM}.safetensors"


class RunFiles:
    """The files of one run.

    Args:
        start: the concept before its first step. role: the one that it has.
        pictures: how many are taught.
        loaded: what the pipeline was loaded with, for config.yaml.
        written: the step whose checkpoint is there already.
    """

    def __init__(
        self, run: Run, config: TrainConfig, start: Concept, role: str, pictures: int, loaded: Mapping[str, Any], written: int | None
    ) -> None:
        self.run, self.config, self.start, self.role, self.written = run, config, start, role, written
        self.output, self.pictures = Path(config.output_dir), pictures
        self.told = config_text(config, loaded)
        self.metrics: MetricsFile | None = None

    def begin(self) -> None:
        """Before the first step: what a killed run left half written is deleted, and what says how far this one is begins anew."""
        self._mkdir(self.output)
        sweep(self.output, (CONCEPT, CONFIG, METRICS, CARD, REPORT))
        # the report is written last: while it is there, what config.yaml says is finished
        self._write(self.output / CONFIG, self.told, gone=self.output / REPORT)
        self.metrics = MetricsFile(self.output, self.run, self.config)
        if self.run.best:
            self.keep_best()
        else:
            (self.output / BEST / CONCEPT).unlink(missing_ok=True)  # of another run

    def step_done(self) -> None:
        if self.metrics is not None:
            self.metrics.add()

    def stopped(self) -> None:
        """After the run went back to its last whole step."""
        if self.metrics is not None:
            self.metrics.rewrite()
        self.checkpoint()

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def concept(self) -> Concept:
        """As it is now: what is validated, and saved."""
        return self.run.concept(self.start, self.role, self._recipe(self.run.step))

    def checkpoint(self) -> None:
        """One that is there holds the same: writing it again would take it away for a moment, and a kill in it would lose the run."""
        run = self.run
        if run.step != self.written:
            tensors, state = run.whole
            held = state | {"config": self.config.to_dict()}
            limit = self.config.checkpoints_total_limit
            save_checkpoint(self.output, run.step, tensors, held, self.concept(), self.told, limit=limit)
            self.written = run.step

    def keep_best(self) -> None:
        """Write the concept of the lowest validation loss; its recipe says which step that was. The checkpoints' limit leaves it alone."""
        lowest = self.run.lowest
        assert lowest is not None
        step, loss = lowest
        recipe = self._recipe(step) | {"validation_loss": loss}
        self._mkdir(self.output / BEST)
        self.run.concept(self.start, self.role, recipe, self.run.best).save(self.output / BEST / CONCEPT)

    def finish(self, adapter: Any, made: Concept, seconds: tuple[float, float], steps: int) -> None:
        """After the last step: its checkpoint, the concept, README.md and report.html.

        Args:
            made: the concept as it is now.
            seconds: of this process' part of the run, and of its `steps` steps alone.
        """
        self.checkpoint()
        config = self.config
        made.save(config.concept_path)
        size = config.concept_path.stat().st_size
        self._write_card(made, size)
        costs = {
            "concept": f"{size:,} bytes",
            "steps": f"{self.run.step}, of these {steps} in this session",
            "time": f"{seconds[0]:,.0f} s in this session, {seconds[1]:,.0f} s of it in steps",
            "speed": f"{steps / max(seconds[1], 1e-9):.2f} steps/s, with validation and checkpoints",
            "peak memory": f"{peak_memory() / 2**30:.2f} GiB",
        }
        if (device := peak_device_memory()) is not None:
            costs["peak memory of the device"] = f"{device / 2**30:.2f} GiB"
        registered = adapter.register(config.trigger, config.aliases, config.name, config.concept_config)
        report = Report(
            made.trigger,
            self.run.losses,
            self.run.measured,
            config.prompts_with(made.trigger),
            self.output / VALIDATION,
            str(registered),
            costs,
            self.told,
        )
        self._write(self.output / REPORT, report.render())

    def _write_card(self, made: Concept, size: int) -> None:
        """README.md, unless one is there that somebody wrote or edited."""
        path = self.output / CARD
        there = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        if there is not None and ConceptCard.read(there) is None:
            logger.warning("%s was written or edited by somebody, so it is kept", path)
            return
        entry = Entry(CONCEPT, size, made.name, made.trigger, list(made.aliases), made.base, dict(made.recipe))
        shown = self._gallery(made.trigger)
        self._write(path, ConceptCard([entry], shown).render("THIS_FOLDER", "THIS_FOLDER/"))
        clear_gallery(self.output, ConceptCard.read(there), shown, _STEM)

    def _gallery(self, trigger: str) -> list[Shown]:
        """Of the last sheet that this run drew."""
        config, every = self.config, self.config.validation_steps
        last = self.run.step - self.run.step % every if every else 0
        if not last or not config.validation_prompts:
            return []
        sheet = self.output / VALIDATION / f"step-{last}.png"
        return write_gallery(self.output, sheet, config.prompts_with(trigger), config.validation_seeds, last, _STEM)

    def _recipe(self, step: int) -> dict[str, Any]:
        config = self.config
        kept = ["max_train_steps", "train_batch_size", "learning_rate", "snr_gamma", "ema_decay", "seed", "collages"]
        kept += ["map_learning_rate"] if any(one.maps is not None for one in each_role(self.run.module)) else []
        kept += [name for name, plain in _WHERE_OTHER.items() if getattr(config, name) != plain]
        return {"mounts": list(config.mounts), "step": step, "pictures": self.pictures} | {k: getattr(config, k) for k in kept}

    def _mkdir(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot(folder, error) from error

    def _write(self, path: Path, text: str, gone: Path | None = None) -> None:
        try:
            write_atomically(path, text.encode(), gone=gone)
        except OSError as error:
            raise self._cannot(path, error) from error

    @staticmethod
    def _cannot(path: Path, error: OSError) -> TinyEngramError:
        return TinyEngramError(f"{path}: cannot write it ({error.strerror or error}); free space or choose another --output_dir")


# Settings that a recipe names where they are not these.
_WHERE_OTHER = {"class_word": None, "optimizer": "adam", "timestep_sampling": "uniform", "timestep_shift": None, "noise_offset": 0.0}
