"""The Studio's error, and messages without the server's folders. Imports errors only."""

from pathlib import Path

from tiny_engram.errors import TinyEngramError

__all__ = ["MOST_FILE", "StudioError", "without_folder"]

# Bytes of one file that a browser may send, of whatever kind: the page, gradio's own message and the checks behind it say the same.
MOST_FILE = 32 * 2**20


class StudioError(TinyEngramError):
    """Shown to users as it is: one line that names the value, what was expected and the way out, and no path of the server."""


def without_folder(error: BaseException | str, path: Path, shown: str) -> str:
    """What an error says on one line, with `shown` in place of a path of the server, however that is written there."""
    text = " ".join(str(error).split())
    for written in sorted({str(path), str(path.absolute()), str(path.resolve())}, key=len, reverse=True):
        text = text.replace(written, shown)
    return text
