"""Pictures that are being drawn: a thread each, which goes on when the page that asked is closed. Nothing of gradio.

May import the studio. What is finished is in the gallery before anybody is told.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.highlighting import rows_of
from tiny_engram.studio.requests import GenerateRequest
from tiny_engram.studio.studio import Studio

__all__ = ["Drawing", "Drawings", "Fired", "Shown"]

logger = logging.getLogger(__name__)

MOST_REMEMBERED = 12


@dataclass(frozen=True, slots=True)
class Fired:
    """One trigger of a prompt: the concept's name, whether it fired anywhere, the encoders where it did, and why not."""

    name: str
    fired: bool
    roles: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Shown:
    """What came with a picture of the gallery and is not in its file: the base's picture and the difference (None without comparison),
    the share of pixels that differ, what fired, and the seconds it took."""

    plain: Image.Image | None
    difference: Image.Image | None
    changed: float | None
    fired: tuple[Fired, ...]
    seconds: float


class Drawing:
    """One request on its way. `picture` is its id in the gallery once `finished` is set, unless `error` says what went wrong."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.cancel = threading.Event()
        self.finished = threading.Event()
        self.step, self.total = 0, request.steps * (2 if request.compare else 1)
        self.began: float | None = None
        self.picture: str | None = None
        self.error: TinyEngramError | None = None

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the steps so far; None before the second one."""
        if self.began is None or self.step < 2:
            return None
        # the clock starts when the first step is done
        return (time.perf_counter() - self.began) / (self.step - 1) * (self.total - self.step)

    def note(self, step: int, total: int) -> None:
        """A step was done; called by the engine's thread."""
        if self.began is None:
            self.began = time.perf_counter()
        self.step, self.total = step, total


class Drawings:
    """All that pages have asked for, by who asked; each asks for one picture at a time."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._running: dict[str, Drawing] = {}
        self._shown: OrderedDict[str, Shown] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, who: str, request: GenerateRequest) -> Drawing:
        """Begin in a thread of its own. Raises StudioError where `who` has one on its way."""
        drawing = Drawing(request)
        with self._lock:
            if who in self._running:
                raise StudioError("a picture is being drawn for this page already; wait for it, or cancel it")
            self._running[who] = drawing
        threading.Thread(target=self._draw, args=(who, drawing), name="drawing", daemon=True).start()
        return drawing

    def cancel(self, who: str) -> bool:
        """Stop what is drawn for `who` at its next step; False where nothing is."""
        with self._lock:
            drawing = self._running.get(who)
        if drawing is not None:
            drawing.cancel.set()
        return drawing is not None

    def shown(self, picture: str) -> Shown | None:
        """What came with a picture, of the last few that were drawn since the start."""
        with self._lock:
            return self._shown.get(picture)

    def _draw(self, who: str, drawing: Drawing) -> None:
        try:
            result = self._studio.engine.generate(drawing.request, on_step=drawing.note, cancel=drawing.cancel)
            told = _fired(rows_of(result.explanation, self._studio.engine))
            made = self._studio.gallery.add(result.picture, result.settings)
            with self._lock:
                self._shown[made] = Shown(result.plain, result.difference, result.changed, told, result.seconds)
                while len(self._shown) > MOST_REMEMBERED:
                    self._shown.popitem(last=False)
            drawing.picture = made
        except TinyEngramError as error:
            drawing.error = error
        except Exception as error:  # whatever it is, the page must not wait for ever
            logger.exception("a picture was not kept")
            drawing.error = StudioError(f"the picture was not kept ({type(error).__name__}); try again, the Studio's log has more")
        finally:
            with self._lock:
                self._running.pop(who, None)
            drawing.finished.set()


def _fired(explained: Sequence) -> tuple[Fired, ...]:
    """A line for each trigger of the prompt, all encoders together; what does not stand in it is left out."""
    found: dict[tuple[str, bool], list] = {}
    for each in explained:
        for row in each.rows:
            if not each.negative and row.tokens is not None:
                found.setdefault((row.name, row.fired), []).append((each.role, row.reason))
    fired = {name for name, yes in found if yes}
    return tuple(
        Fired(name, yes, tuple(dict.fromkeys(role for role, _ in places)), places[0][1])
        for (name, yes), places in found.items()
        if yes or name not in fired
    )
