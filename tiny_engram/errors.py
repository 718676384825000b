"""Errors meant for a user: one line that names the value, what was expected and the way out. Imports collections.abc."""

from collections.abc import Sequence


class TinyEngramError(ValueError):
    """Base of every error a user can cause; the command line prints it and exits with 2."""


class ConfigError(TinyEngramError):
    """A configuration value or field makes no sense."""


class TokenizerError(TinyEngramError):
    """A tokenizer cannot be read, or is not the one that the configuration was made for."""


class TableError(TinyEngramError):
    """Rows collide, are missing, or do not fit the table."""


class FaultsError(TinyEngramError):
    """Several things are wrong, and nothing was begun; `faults` has a line for each."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        count = f"{len(faults)} faults, " if len(faults) > 1 else ""
        super().__init__(f"{count}nothing was begun: " + "; ".join(faults))


def raise_faults(faults: Sequence[str]) -> None:
    """Raises FaultsError if there are any."""
    if faults:
        raise FaultsError(list(dict.fromkeys(faults)))
