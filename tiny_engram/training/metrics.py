"""metrics.jsonl: one JSON object for each step of a run, in order, none twice. Imports the standard library and files.

What it holds follows from the run alone, no clock: a run that was stopped and taken up again ends with the same bytes.
"""

import json
import math
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically

if TYPE_CHECKING:
    from tiny_engram.training.config import TrainConfig
    from tiny_engram.training.run import Run

__all__ = ["METRICS", "MetricsFile", "losses_of", "step_metrics"]

METRICS = "metrics.jsonl"


def step_metrics(run: "Run", config: "TrainConfig", step: int) -> dict[str, float]:
    """What is known of a step from 1: loss, learning rate of the rows, norm of the gradients, validation loss where it was measured.
    Numbers alone, none that is not finite."""
    told: dict[str, float | None] = {"loss": run.losses[step - 1], "lr": config.learning_rate * config.rate(step - 1)}
    told["grad_norm"] = run.norms[step - 1]
    told["validation_loss"] = dict(run.measured).get(step)
    return {name: value for name, value in told.items() if value is not None and math.isfinite(value)}


def losses_of(folder: Path) -> list[float]:
    """Losses that a run left in its folder, step by step; none where its metrics are not there or cannot be read."""
    try:
        return [float(json.loads(line).get("loss", math.nan)) for line in (folder / METRICS).read_text().splitlines()]
    except (OSError, ValueError):
        return []


class MetricsFile:
    """The file of a run, which begins with what the run has done so far, whatever stood there.

    Raises:
        TinyEngramError: it cannot be written.
    """

    def __init__(self, folder: Path, run: "Run", config: "TrainConfig") -> None:
        self.path, self.run, self.config = folder / METRICS, run, config
        self.file: IO[str] | None = None
        self.rewrite()

    def rewrite(self) -> None:
        """The steps of the run as it is now; an interrupt may have led it back."""
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, "".join(self._line(step) for step in range(1, self.run.step + 1)).encode())
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._cannot(error) from error

    def add(self) -> None:
        """One line for the step that was just done, for readers to see at once."""
        assert self.file is not None
        try:
            self.file.write(self._line(self.run.step))
            self.file.flush()
        except OSError as error:
            raise self._cannot(error) from error

    def close(self) -> None:
        if self.file is not None:
            file, self.file = self.file, None
            try:
                file.close()
            except OSError:  # what was not flushed was told when it was written
                return

    def _line(self, step: int) -> str:
        return json.dumps({"step": step} | step_metrics(self.run, self.config, step)) + "\n"

    def _cannot(self, error: OSError) -> TinyEngramError:
        return TinyEngramError(
            f"{self.path}: cannot write it ({error.strerror or error}) after step {self.run.step}; free space or choose another "
            "--output_dir, and go on with --resume_from_checkpoint latest"
        )
