"""Errors meant for a user: one line that names the value, what was expected and the way out. Imports nothing."""


class TinyEngramError(ValueError):
    """Base of every error a user can cause; the command line prints it and exits with 2."""


class ConfigError(TinyEngramError):
    """A configuration value or field makes no sense."""


class TokenizerError(TinyEngramError):
    """A tokenizer cannot be read, or is not the one that the configuration was made for."""


class TableError(TinyEngramError):
    """Rows collide, are missing, or do not fit the table."""
