"""What is trained: a run is one method on one subject, with a seed and a learning rate. Imports the standard library only."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run. `options` are the method's own, (name, JSON value) pairs in the order of their names."""

    method: str
    subject: str
    seed: int
    learning_rate: float
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        if list(self.options) != sorted(self.options):
            raise ValueError(f"options {self.options!r} of {self.method}: expected them in the order of their names")

    @property
    def key(self) -> str:
        """16 hex digits that name this run in file names."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)
