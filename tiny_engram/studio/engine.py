"""The engine: one pipeline, one thread that touches it. Every request is served alone and in turn, so that a picture is what it would be
if nobody else were there. May import errors, cards, requests, shelf, trigger_book, training and the adapter; nothing of gradio.
"""

import inspect
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from PIL import Image

from tiny_engram.adapter import attach, find_adapter
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig
from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.explanation import Explanation
from tiny_engram.registration import RegistrationReport
from tiny_engram.studio.cards import content_of
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.requests import GenerateRequest, GenerateResult, checked_text, difference_of
from tiny_engram.studio.shelf import Shelf
from tiny_engram.studio.trigger_book import TriggerBook
from tiny_engram.training.validation import native_size
from tiny_engram.triggers import CompiledTrigger

__all__ = ["Cancelled", "Engine", "GenerateRequest", "GenerateResult", "Loaded"]

logger = logging.getLogger(__name__)

MOST_WAITING = 64
MOST_KEPT = 32  # concepts that stay in the pipeline between requests
POLL_SECONDS = 0.1

R = TypeVar("R")


class Cancelled(StudioError):
    """The request was cancelled before it was done."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A concept on the shelf: what the Create tab shows as a chip."""

    id: str
    name: str
    trigger: str
    aliases: tuple[str, ...]


def one_line(error: BaseException) -> str:
    """What went wrong, on one line of at most 300 characters, without folders of the server."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(?<![\w.:/])(?:/[^\s/'\":,;()]+)+/([^\s/'\":,;()]+)", r"\1", text)[:300]


class Engine:
    """One pipeline and its adapter, behind one thread and a queue.

    The shelf (`load`, `unload`, `loaded`) is what users put there, and is there again after a restart; which concepts act in a picture,
    and how strongly, the request alone says. Concepts of past requests stay in the pipeline, silent, up to a bound.

    Attributes:
        base: short id of the base model.
        book: the library's triggers, for what must answer while a picture is drawn.
    """

    def __init__(self, pipe: Any, library: Any, *, most_waiting: int = MOST_WAITING) -> None:
        """Attaches to the pipeline (or takes the adapter that is there). `close` when done.

        Raises TinyEngramError: a kind of pipeline that concepts cannot be attached to.
        """
        self.library = library
        self._pipe = pipe
        present = find_adapter(pipe)
        self._adapter: EngramAdapter = attach(pipe) if present is None else present
        self._attached = present is None
        self._options = set(inspect.signature(type(pipe).__call__).parameters)
        pipe.set_progress_bar_config(disable=True)
        self.base = self._adapter.base
        self.book = TriggerBook(self._adapter.mounts, library)
        self._shelf = Shelf(library.workspace.root / "shelf.json", self.base)
        self._inside: dict[str, Concept] = {}  # least recently used first; touched by the thread alone
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._waiting = 0
        self._most_waiting = most_waiting
        self._ident: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def close(self) -> None:
        """Refuse what waits, stop what is drawn at its next step, and leave the pipeline without the engine's concepts."""
        self._stop.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._attached:
            self._adapter.detach()
        else:
            self._adapter.delete_concept(list(self._inside))
        self._inside.clear()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Requests that are served or wait to be."""
        return self._waiting

    @property
    def native_size(self) -> tuple[int, int] | None:
        """(width, height) in pixels of the pictures that the base was made for; None if it does not say."""
        side = native_size(self._pipe)
        return None if side is None else (side, side)

    def cleaning(self, text: str) -> str:
        """What the pipeline's own cleaning of captions makes of a text; the text itself where the pipeline has none."""
        clean = getattr(self._pipe, "_text_preprocessing", None)
        if clean is None:
            return text
        cleaned = clean(text, clean_caption=True) if "clean_caption" in inspect.signature(clean).parameters else clean(text)
        return cleaned if isinstance(cleaned, str) else str(cleaned[0])

    @property
    def _factor(self) -> int:
        return getattr(self._pipe, "vae_scale_factor", 8)

    # -- the thread ----------------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[EngramAdapter], R], *, cancel: threading.Event | None = None) -> R:
        """Do something with the adapter when its turn comes, and return what it gives; for whatever else must touch the pipeline.

        Raises:
            Cancelled: `cancel` was set before it began, or the engine was closed.
            StudioError: too many requests wait, or what the work raised, on one line.
        """
        if threading.get_ident() == self._ident:
            raise RuntimeError("the engine was asked from its own thread, which would wait for itself for ever; use the adapter it gave")
        with self._lock:
            if self._stop.is_set():
                raise Cancelled("the Studio is closing; start it again")
            if self._waiting >= self._most_waiting:
                raise StudioError(f"{self._waiting} requests wait already, expected at most {self._most_waiting}; try again in a moment")
            self._waiting += 1
            future: Future[R] = self._thread.submit(self._serve, work, cancel)
        future.add_done_callback(self._served)  # not under the lock, which it takes: of work that is done already it is called here
        while True:
            try:
                return future.result(POLL_SECONDS if cancel is not None else None)
            except NotYet:
                if cancel is not None and cancel.is_set():
                    future.cancel()  # one that runs stops by itself at its next step
            except CancelledError:
                closing = self._stop.is_set()
                raise Cancelled("the Studio is closing; start it again" if closing else "cancelled before it began") from None

    def _served(self, _: Future[Any]) -> None:
        with self._lock:
            self._waiting -= 1

    def _serve(self, work: Callable[[EngramAdapter], R], cancel: threading.Event | None) -> R:
        self._ident = threading.get_ident()
        if self._stop.is_set() or (cancel is not None and cancel.is_set()):
            raise Cancelled("the Studio is closing; start it again" if self._stop.is_set() else "cancelled before it began")
        try:
            return work(self._adapter)
        except StudioError:
            raise
        except TinyEngramError as error:
            raise StudioError(one_line(error)) from error
        except Exception as error:
            logger.exception("a request failed")
            raise StudioError(f"this did not work ({type(error).__name__}: {one_line(error)}); the Studio's log has more") from error

    # -- concepts ------------------------------------------------------------------------------------------------------------

    def load(self, id: str) -> Loaded:
        """Put a concept of the library on the shelf; it is tried in the pipeline first.

        Raises StudioError: no such concept, one for another base, or a trigger that another one on the shelf has.
        """
        return self.run(lambda adapter: self._load(id, adapter))

    def _load(self, id: str, adapter: EngramAdapter) -> Loaded:
        others = {each.id: each.name for each in self.loaded() if each.id != id}
        concept = self._bring(id, adapter, wanted=(id,))
        taken = self.book.owners(self.book.compile(concept.trigger, concept.aliases))
        clash = next((other for other in others if other in taken), None)
        if clash is not None:
            raise StudioError(
                f"trigger {taken[clash]!r} of {concept.name!r} is taken by {others[clash]!r}, which is in use; put that one away first"
            )
        loaded = Loaded(id, concept.name, concept.trigger, concept.aliases)
        self._shelf.put(id)
        return loaded

    def unload(self, id: str) -> None:
        """Take a concept off the shelf, also one that the library no longer has; one that is not there is no error.

        Its rows leave the pipeline when the thread comes to it.
        """
        self._shelf.take(id)
        with self._lock:
            if not self._stop.is_set():
                self._thread.submit(self._drop, id)

    def _drop(self, id: str) -> None:
        if id in self._inside and id not in self._shelf:
            self._adapter.unload_concept(id)
            del self._inside[id]

    def loaded(self) -> tuple[Loaded, ...]:
        """The shelf, in the order of loading, with the names that the library has now; what it no longer has is left out."""
        shelf = self._shelf.ids
        if not shelf:
            return ()
        known = self.book.known()
        return tuple(Loaded(id, known[id].name, known[id].trigger, known[id].aliases) for id in shelf if id in known)

    def _bring(self, id: str, adapter: EngramAdapter, *, wanted: Sequence[str]) -> Concept:
        """Have a concept in the pipeline as the library has it now; others with its trigger that are not wanted make room."""
        concept = self.library.get(id)
        held = self._inside.pop(id, None)
        if held is not None and content_of(held) == content_of(concept):
            self._inside[id] = concept
            return concept
        if held is not None:
            adapter.unload_concept(id)
        rivals = {owner for role, mount in adapter.mounts.items() for owner in self._conflicts(concept, role, mount)}
        for rival in rivals & self._inside.keys():
            if rival in wanted:
                raise StudioError(
                    f"{concept.name!r} and {self._inside[rival].name!r} have the trigger {concept.trigger!r} both; use one of them"
                )
            adapter.unload_concept(rival)
            del self._inside[rival]
        adapter.load_concept(concept, id, 0.0)
        self._inside[id] = concept
        for old in list(self._inside):
            if len(self._inside) <= max(MOST_KEPT, len(wanted)):
                break
            if old not in wanted:
                adapter.unload_concept(old)
                del self._inside[old]
        return concept

    @staticmethod
    def _conflicts(concept: Concept, role: str, mount: Any) -> list[str]:
        place = concept.roles.get(role)
        if place is None:
            return []
        return list(mount.store.index.conflicts(CompiledTrigger(concept.trigger, concept.aliases, place.variants, place.groups)))

    def _set(self, strengths: Mapping[str, float], adapter: EngramAdapter) -> dict[str, Concept]:
        """Exactly these concepts at exactly these strengths."""
        wanted = tuple(strengths)
        concepts = {id: self._bring(id, adapter, wanted=wanted) for id in wanted}
        adapter.set_concepts(list(wanted), list(strengths.values()))
        return concepts

    # -- what can be asked ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        request: GenerateRequest,
        *,
        on_step: Callable[[int, int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerateResult:
        """Draw one picture, and with `compare` the base's from the same seed. Blocks until it is done.

        Args:
            request: what to draw, checked.
            on_step: called on the engine's thread with (steps done, steps in all, of both pictures together).
            cancel: set it to stop, waiting or at the next step.

        Raises:
            Cancelled: it was.
            StudioError: unknown concept, two concepts with one trigger, a size the base cannot draw, too many waiting, ...
        """
        return self.run(lambda adapter: self._generate(request, adapter, on_step, cancel), cancel=cancel)

    def _generate(
        self,
        request: GenerateRequest,
        adapter: EngramAdapter,
        on_step: Callable[[int, int], None] | None,
        cancel: threading.Event | None,
    ) -> GenerateResult:
        began = time.perf_counter()
        size = self._size(request)
        concepts = self._set(request.strengths, adapter)
        explanation = adapter.explain(request.prompt, request.negative_prompt or None)
        # a prompt in which nothing fires draws the base's picture, bit for bit: no need to draw it twice
        twice = request.compare and bool(explanation.fired)
        total = request.steps * (2 if twice else 1)

        def draw(done_before: int) -> Image.Image:
            return self._draw(request, size, lambda step: on_step and on_step(done_before + step, total), cancel)

        picture = draw(0)
        plain = None
        if twice:
            adapter.set_concepts([])
            plain = draw(request.steps)
        elif request.compare:
            plain = picture.copy()
        difference, changed = difference_of(picture, plain) if plain is not None else (None, None)
        settings = {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "seed": request.seed,
            "steps": request.steps,
            "guidance": request.guidance,
            "width": picture.width,
            "height": picture.height,
            "base": self.base,
            "concepts": [
                {"id": id, "name": concept.name, "trigger": concept.trigger, "strength": request.strengths[id]}
                for id, concept in concepts.items()
            ],
        }
        return GenerateResult(picture, plain, difference, changed, explanation, settings, time.perf_counter() - began)

    def _size(self, request: GenerateRequest) -> dict[str, int]:
        native, factor = self.native_size, self._factor
        width, height = request.width, request.height
        if width is None and height is None:
            return {} if native is None else {"width": native[0], "height": native[1]}
        width, height = (width or height or 0), (height or width or 0)
        denoiser = getattr(self._pipe, self._adapter.family.denoiser).config
        # a UNet halves its pictures at all scales but the last; a transformer cuts them into patches
        grain = factor * 2 ** (len(getattr(denoiser, "block_out_channels", (0,))) - 1) * getattr(denoiser, "patch_size", 1)
        for what, value in (("width", width), ("height", height)):
            if value % grain:
                raise StudioError(f"{what} is {value}, expected a multiple of {grain} pixels, such as {max(grain, value // grain * grain)}")
        return {"width": width, "height": height}

    def _draw(
        self, request: GenerateRequest, size: Mapping[str, int], on_step: Callable[[int], Any], cancel: threading.Event | None
    ) -> Image.Image:
        def after_step(_pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if self._stop.is_set() or (cancel is not None and cancel.is_set()):
                raise Cancelled(f"cancelled at step {step + 1} of {request.steps}")
            on_step(step + 1)
            return tensors

        options: dict[str, Any] = {
            "num_inference_steps": request.steps,
            "guidance_scale": request.guidance,
            "generator": torch.Generator("cpu").manual_seed(request.seed),
            "callback_on_step_end": after_step,
            **({"negative_prompt": request.negative_prompt} if request.negative_prompt else {}),
            **size,
            **self._adapter.family.call,
        }
        known = {name: value for name, value in options.items() if name in self._options}
        return self._pipe(request.prompt, **known).images[0].convert("RGB")

    def explain(self, prompt: str, negative_prompt: str = "", strengths: Mapping[str, float] | None = None) -> Explanation:
        """The adapter's explanation, in turn; names are ids of the library. strengths None: all on the shelf, at 1.

        For an answer while a picture is drawn: `highlighting`.
        """
        prompt, negative_prompt = checked_text("prompt", prompt), checked_text("negative prompt", negative_prompt)
        chosen = {each.id: 1.0 for each in self.loaded()} if strengths is None else dict(strengths)

        def work(adapter: EngramAdapter) -> Explanation:
            self._set(chosen, adapter)
            return adapter.explain(prompt, negative_prompt or None)

        return self.run(work)

    def register(self, trigger: str, aliases: Sequence[str] = (), config: ConceptConfig | None = None) -> RegistrationReport:
        """The adapter's report of a trigger, in turn: rows, bytes, collisions of addresses. For one while typing: `registering`."""
        return self.run(lambda adapter: adapter.register(trigger, aliases, config=config))

    def new_concept(self, trigger: str, aliases: Sequence[str] = (), config: ConceptConfig | None = None) -> Concept:
        """An untrained concept for this base; it is neither loaded nor in the library."""
        return self.run(lambda adapter: adapter.new_concept(trigger, aliases, config=config))

    def warm(self) -> None:
        """Compile the library's triggers, so that the first answer while typing is not the slow one."""
        with suppress(TinyEngramError):
            self.book.known()
