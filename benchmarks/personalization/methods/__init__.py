"""The methods that are compared, by name. A method's module names `Base` in annotations only: base.py imports this package."""

from benchmarks.personalization.methods.method import Adapters, Rows

__all__ = ["LABELS", "METHODS", "RATES", "Adapters", "Rows"]

METHODS: dict[str, type[Adapters]] = {}
# Published default learning rates; the sweep takes 0.1, 0.32, 1, 3.2 and 10 times each.
RATES: dict[str, float] = {}
LABELS: dict[str, str] = {}
