"""Libraries of which every trigger fires: a concept is read when its token ids stand in a prompt. May import library, watch,
schedule_run, sources, loaded and what is below."""

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.library import ConceptLibrary, LibraryEntry, LibraryError
from tiny_engram.library.entry import Kind
from tiny_engram.loaded import LoadedConcepts
from tiny_engram.matching import TriggerIndex
from tiny_engram.mounts import EncoderMounts
from tiny_engram.schedule_run import ScheduleRun
from tiny_engram.sources import Source
from tiny_engram.store import checked_strength
from tiny_engram.triggers import CompiledTrigger
from tiny_engram.watch import DenoiserWatch
from tiny_engram.wording import shown

__all__ = ["Libraries", "OpenLibraries"]

logger = logging.getLogger(__name__)
MOST_SHOWN = 4


@dataclass(slots=True)
class _Open:
    """A library, the concepts of it that may fire (None: all that fit), their strength, and those that were read: name here -> concept.

    `silenced`: (role, name) of those that were called while the libraries were quiet -> trigger, None where the concept cannot be read;
    `told`: those of which it was said.
    """

    library: ConceptLibrary
    names: frozenset[str] | None
    strength: float
    fits: Mapping[Kind, bool]
    read: dict[str, Concept] = field(default_factory=dict)
    silenced: dict[tuple[str, str], CompiledTrigger | None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


class OpenLibraries:
    """The open libraries of an adapter, by path.

    Attributes:
        quiet: nothing is loaded: the user has said which concepts are active. What a prompt calls all the same is said.
    """

    def __init__(self, mounts: Mapping[str, EncoderMounts], optional: Collection[str], load: Callable[[Concept, str, float], str]) -> None:
        self.quiet = False
        self._thread = threading.local()
        self._mounts, self._optional, self._load = mounts, optional, load
        self._open: dict[str, _Open] = {}
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    @property
    def finding(self) -> bool:
        """Does this thread load a concept because a prompt calls it? Prompts that were encoded before do not hold its trigger."""
        return getattr(self._thread, "finding", False)

    def add(self, library: ConceptLibrary, names: Iterable[str] | None, strength: float) -> None:
        """Have its triggers fire. Raises TinyEngramError: open already, an unknown name, or nothing in it was made for this pipeline."""
        path = str(library.path)
        if path in self._open:
            raise TinyEngramError(f"{path}: this library is open already; close_library closes it")
        fits = {kind: self._fits(kind) for kind in library.kinds}
        chosen = None if names is None else frozenset(names)
        for name in chosen or ():
            if not fits[library.entry(name).kind]:
                raise TinyEngramError(f"{path}: concept {shown(name)} {self._unfit(library.entry(name).kind)}")
        if len(library) and not any(fits.values()):
            raise TinyEngramError(f"{path}: none of its concepts fits: the first {self._unfit(next(iter(library)).kind)}")
        with self._lock:
            self._open[path] = _Open(library, chosen, checked_strength(strength), fits)
            self.quiet = False
            self._follow()

    def remove(self, paths: Sequence[str]) -> list[tuple[str, Concept]]:
        """Close these; names and concepts of what was read from them. Raises TinyEngramError for a path that is not open."""
        with self._lock:
            for path in paths:
                if path not in self._open:
                    raise TinyEngramError(f"no open library {path!r}; open are: {', '.join(self._open) or 'none'}")
            closed = [self._open.pop(path) for path in paths]
            self._follow()
        return [pair for each in closed for pair in each.read.items()]

    def bring(self, names: Iterable[str]) -> None:
        """Load these, all or none. Raises TinyEngramError for one that no open library holds; without an open one nothing is done."""
        with self._lock:
            found: list[tuple[_Open, LibraryEntry]] = []
            for name in names if self._open else ():
                held = ((at, at.library.entry(name)) for at in self._open.values() if name in at.library)
                place = next((pair for pair in held if self._may(*pair)), None)
                if place is None:
                    raise TinyEngramError(
                        f"no concept {shown(name)} is loaded or in an open library; get_list_concepts and ConceptLibrary.list() know them"
                    )
                found.append(place)
            for at, entry in found:
                self._read(at, entry)

    def owners(self, compiled: Mapping[str, CompiledTrigger]) -> list[tuple[str, str]]:
        """Concepts that may fire and have one of a trigger's token sequences: (name, path of the library)."""
        found: dict[tuple[str, str], None] = {}
        for path, at in self._open.items():
            for role, trigger in compiled.items():
                print_ = self._mounts[role].store.compressed.fingerprint
                for ids in (variant.ids for variant in trigger.variants):
                    spoken = at.library.spoken(role, print_, np.array([ids], dtype=np.int64))
                    found |= {(entry.name, path): None for entry, sequence in spoken if sequence == ids and self._may(at, entry)}
        return [*found]

    def seek(self, role: str, ids: torch.Tensor) -> Mapping[str, CompiledTrigger]:
        """Load what stands in ids that an encoder is about to be given, int64 `[batch, time]`, and is not loaded.

        Edges of words are looked at when it is matched like every loaded concept. A trigger that a loaded concept has is that one's.

        Returns the triggers of concepts that stay silent because the libraries are quiet, by name; the first time each is called, a warning
        says so.
        """
        store, array = self._mounts[role].store, ids.detach().cpu().numpy().astype(np.int64, copy=False)
        silent: dict[str, CompiledTrigger] = {}
        with self._lock:
            for at in self._open.values():
                for entry, sequence in at.library.spoken(role, store.compressed.fingerprint, array):
                    if not self._may(at, entry) or store.index.owner(sequence) is not None:
                        continue
                    if not self.quiet:
                        self._read(at, entry)
                    elif (trigger := self._silenced(at, entry, role)) is not None:
                        silent[entry.name] = trigger
                        self._tell(at, entry, role, trigger, array)
        return silent

    @staticmethod
    def _silenced(at: _Open, entry: LibraryEntry, role: str) -> CompiledTrigger | None:
        key = role, entry.name
        if key not in at.silenced:
            try:
                concept = at.library.get(entry.name)
            except LibraryError:
                at.silenced[key] = None  # a damaged one is an error when it is to fire, not before
            else:
                place = concept.roles[role]
                at.silenced[key] = CompiledTrigger(concept.trigger, concept.aliases, place.variants, place.groups)
        return at.silenced[key]

    def _tell(self, at: _Open, entry: LibraryEntry, role: str, trigger: CompiledTrigger, ids: np.ndarray) -> None:
        if entry.name in at.told:
            return
        index = TriggerIndex(self._mounts[role].store.index.edges)
        index.add(entry.name, trigger)
        if len(index.match(ids)):
            at.told.add(entry.name)
            said = "concept %r of the open library %s was called and stays silent: set_concepts said which are active; name it there, or "
            logger.warning(said + "call set_concepts(None) to have all fire again", entry.name, at.library.path)

    def _may(self, at: _Open, entry: LibraryEntry) -> bool:
        return at.fits.get(entry.kind, False) and (at.names is None or entry.name in at.names)

    def _read(self, at: _Open, entry: LibraryEntry) -> None:
        # Drawing runs in inference mode, whose tensors could not be changed by anybody outside it.
        with torch.inference_mode(False), torch.no_grad():
            concept = at.library.get(entry.name)
            self._thread.finding = True
            try:
                at.read[self._load(concept, entry.name, at.strength)] = concept
            finally:
                self._thread.finding = False
        logger.info("concept %r was read from %s: %d bytes", entry.name, at.library.path, entry.nbytes)

    def _fits(self, kind: Kind) -> bool:
        return not self._unfit(kind)

    def _unfit(self, kind: Kind) -> str:
        """Why concepts of this kind cannot be loaded here, in words; empty if they can."""
        roles = {role: (width, fingerprint) for role, width, fingerprint in kind.roles}
        here = {role: (mount.store.width, mount.store.compressed.fingerprint) for role, mount in self._mounts.items()}
        if not roles.keys() <= here.keys() or set(here) - set(roles) - set(self._optional):
            return f"is for encoders {sorted(roles)}, this pipeline has {sorted(here)}; open a library made for this base"
        for role, (width, fingerprint) in roles.items():
            if width != here[role][0]:
                return f"has width {width} at {role}, expected {here[role][0]}; open a library made for this base"
            if fingerprint != here[role][1]:
                return f"has tokenizer {fingerprint[:12]} at {role}, expected {here[role][1][:12]}; open a library made for this base"
        return ""

    def _follow(self) -> None:
        denoiser = any(kind.denoiser for at in self._open.values() for kind, fits in at.fits.items() if fits)
        for role, mount in self._mounts.items():
            mount.notes_all = denoiser
            mount.seek = (lambda ids, role=role: self.seek(role, ids)) if self._open else None


class Libraries(ABC):
    """Part of EngramAdapter: its verbs about libraries."""

    _libraries: OpenLibraries
    _loaded: LoadedConcepts
    _schedules: ScheduleRun
    _watch: DenoiserWatch

    def open_library(
        self, library: str | os.PathLike[str] | ConceptLibrary, names: Iterable[str] | None = None, strength: float = 1.0
    ) -> ConceptLibrary:
        """Have all triggers of a library fire; returns it.

        Nothing of its concepts is read before one is called: a concept is loaded when its token ids stand in a prompt that is encoded or
        explained, under its name in the library, and stays loaded until it is unloaded; the next prompt with it loads it again. A trigger
        of a concept that was loaded otherwise stays that one's. The library is seen as it is now.

        Args:
            library: a path, or an open library.
            names: the only concepts of it that may fire; None takes all that were made for such encoders.
            strength: of its concepts.

        Raises:
            TinyEngramError: no sound library, open already, unknown names, or no concept in it fits this pipeline.
        """
        self._check_attached()
        if isinstance(names, str):
            raise TinyEngramError(f"names is the text {names!r}, expected a list of names; write [{names!r}]")
        opened = ConceptLibrary.open(library.path if isinstance(library, ConceptLibrary) else library)
        self._libraries.add(opened, names, strength)
        self._changed()
        return opened

    def close_library(self, library: str | os.PathLike[str] | ConceptLibrary | None = None) -> None:
        """Close one library, or all, and unload what was loaded because a prompt called it. Raises TinyEngramError if it is not open."""
        given = library.path if isinstance(library, ConceptLibrary) else library
        paths = [*self._libraries] if given is None else [os.path.realpath(given)]
        for name, concept in self._libraries.remove(paths):
            if name in self._loaded and self._loaded[name].concept is concept:
                self.unload_concept(name)
        self._changed()

    def get_list_libraries(self) -> list[str]:
        """Paths of the open libraries."""
        return [*self._libraries]

    def _load_found(self, concept: Concept, name: str, strength: float) -> str:
        return self.load_concept(concept, name, strength, rename=True)

    def _changed(self) -> None:
        """Concepts or their switches were changed: prompts that were encoded before do not hold them as they are now."""
        if self._libraries.finding:
            self._watch.found()
        else:
            self._schedules.changed()
            self._watch.changed()

    @abstractmethod
    def load_concept(self, source: Source, name: str | None = None, strength: float = 1.0, *, rename: bool = False) -> str:
        """Load one concept."""

    @abstractmethod
    def unload_concept(self, name: str | None = None) -> None:
        """Remove one concept."""

    @abstractmethod
    def _check_attached(self) -> None:
        """Raises TinyEngramError if the adapter was detached."""
