"""How far teaching is, in one line. Imports tqdm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from tiny_engram.training.trainer import ConceptTrainer

__all__ = ["Progress"]

RECENT = 25


class Progress:
    """A bar over the steps of one concept, or of all of several.

    Args:
        steps: of all. done: of these, before this session.
        concepts: how many are taught; told where they are several. finished: of these, before this session.
    """

    def __init__(self, steps: int, done: int, shown: bool, *, concepts: int = 1, finished: int = 0) -> None:
        self._concepts, self._finished = concepts, finished
        self._loss = ""
        self._bar = tqdm(total=steps, initial=done, desc="teaching", unit="step", disable=not shown or not steps)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, trainers: Sequence["ConceptTrainer"]) -> None:
        """After a step of each of these."""
        recent = [trainer.run.losses[-RECENT:] for trainer in trainers]
        losses = [loss for each in recent for loss in each]
        self._loss = f"{sum(losses) / len(losses):.3f}" if losses else ""
        self._bar.update(len(recent))
        self._tell()

    def finished(self, unused: int) -> None:
        """A concept is done with, with so many of its steps left over."""
        self._finished += 1
        self._bar.update(unused)
        self._tell()

    def _tell(self) -> None:
        told = {"concepts": f"{self._finished}/{self._concepts}"} if self._concepts > 1 else {}
        self._bar.set_postfix(told | ({"loss": self._loss} if self._loss else {}), refresh=False)

    def passed(self, steps: int) -> None:
        """So many were done in an earlier session."""
        self._bar.update(steps)

    def close(self) -> None:
        self._bar.close()
