"""The library: every concept that the Studio keeps, one file each, the drafts, and a trash that gives the last ones back.

May import workspace, cards, respelling and concept. A file is in its place whole or not at all, and every step is one rename, so that an
app killed at any moment has each concept either where it was or where it goes. The date of a concept is its file's.
"""

import contextlib
import os
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import file_name_of, sync_folder
from tiny_engram.studio import respelling
from tiny_engram.studio.cards import (
    MOST_ALIASES,
    MOST_TEXT,
    Card,
    card_of,
    check_texts,
    content_of,
    damaged_card,
    describe,
    iso_date,
    read_concept,
)
from tiny_engram.studio.errors import MOST_FILE, StudioError, without_folder
from tiny_engram.studio.workspace import Workspace, check_id, free_name, new_id, read_json, write_bytes, write_json
from tiny_engram.triggers import clean_spelling

__all__ = ["Card", "Draft", "Library", "file_name_of"]

SUFFIX = ".safetensors"
MOST_IMPORT = MOST_FILE
MOST_TRASH = 20
MOST_DRAFTS = 500


@dataclass(frozen=True, slots=True)
class Draft:
    """A trigger that was registered and not taught yet; `created` is a UTC date (ISO 8601)."""

    id: str
    trigger: str
    aliases: tuple[str, ...]
    class_word: str | None
    created: str


@dataclass(frozen=True, slots=True)
class _Known:
    """A file as it was read last: what `os.stat` said, its card, and a digest of its content (None where it cannot be read)."""

    stamp: tuple[int, int]
    card: Card
    content: str | None


class Library:
    """All verbs may be called from any thread. `version` grows with every change, for whoever caches what it holds."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.version = 0
        self._lock = threading.RLock()
        self._known: dict[str, _Known] = {}

    # -- looking -------------------------------------------------------------------------------------------------------------

    def cards(self, search: str = "") -> list[Card]:
        """Concepts and drafts whose name, trigger, aliases or base hold every word of `search`, newest first. Never raises for a file."""
        words = search.casefold().split()
        with self._lock:
            found = [(known.stamp[0], known.card) for known in self._concepts().values()]
            found += [(stamp, card) for stamp, _, card in self._drafts()]
        texts = [" ".join((c.name, c.trigger, *c.aliases, c.base)).casefold() for _, c in found]
        chosen = [(stamp, c) for (stamp, c), text in zip(found, texts, strict=True) if all(word in text for word in words)]
        return [c for _, c in sorted(chosen, key=lambda one: (one[0], one[1].id), reverse=True)]

    def get(self, id: str) -> Concept:
        """The concept itself. Raises StudioError: no such concept, or a damaged file."""
        with self._lock:
            return read_concept(self._path(id), f"concept {id[:6]}")

    def inspect(self, id: str) -> dict[str, Any]:
        """A concept's numbers as JSON types (`cards.describe`, and id, file_bytes, created). Raises StudioError as `get` does."""
        with self._lock:
            about = self._path(id).stat()
            told = describe(self.get(id))
        return {"id": id, **told, "file_bytes": about.st_size, "created": iso_date(about.st_mtime)}

    def drafts(self) -> list[Draft]:
        """Those that can be read, newest first."""
        with self._lock:
            found = [(stamp, draft) for stamp, draft, _ in self._drafts() if draft is not None]
        return [draft for _, draft in sorted(found, key=lambda one: (one[0], one[1].id), reverse=True)]

    # -- concepts come in ----------------------------------------------------------------------------------------------------

    def add(self, concept: Concept, *, id: str | None = None) -> str:
        """Keep a concept, under a free name; returns its id.

        With `id` (of the job that taught it) this happens once: a concept of that id that is there, or in the trash, stays as it is. A
        draft of its trigger then goes to the trash.
        Raises StudioError: texts that the library does not keep, or it cannot be written.
        """
        with self._lock:
            made = new_id() if id is None else check_id("concept", id)
            path = self.workspace.concepts / f"{made}{SUFFIX}"
            if path.exists() or (id is not None and any(self.workspace.trash.glob(f"*.{made}{SUFFIX}"))):
                return made
            concept = concept.with_details(name=_one_line(concept.name)[:MOST_TEXT] or concept.trigger)
            check_texts(concept, f"concept {concept.name!r}")
            self._save(path, self._freely_named(concept, made))
            if id is not None:
                # what a draft waited for is done
                for draft in self.drafts():
                    if draft.trigger.casefold() == concept.trigger.casefold():
                        self.delete(draft.id)
            return made

    def import_file(self, path: str | Path, shown: str | None = None) -> str:
        """Keep a copy of a concept's file, under a free name; returns its id. `shown` is what errors call it (None: its own name).

        Raises StudioError: more than 32 MiB, no sound concept file, texts beyond bounds, or a concept that is in the library already.
        """
        path = Path(path)
        shown = (shown or path.name)[:MOST_TEXT]
        place = self.workspace.temporary()
        try:
            copy = place / f"import{SUFFIX}"
            blob = _read_bounded(path, shown)
            write_bytes(copy, blob)
            sent = read_concept(copy, shown)
            concept = sent.with_details(name=_one_line(sent.name) or "unnamed")
            content = content_of(concept)
            kept_as_it_is = Concept.load(copy).thumbnail == sent.thumbnail
            with self._lock:
                there = next((k.card.name for k in self._concepts().values() if k.content == content), None)
                if there is not None:
                    raise StudioError(f"{shown}: this concept is in the library already, as {there!r}; nothing was imported")
                made = new_id()
                named = self._freely_named(concept, made)
                target = self.workspace.concepts / f"{made}{SUFFIX}"
                if named.name == sent.name and kept_as_it_is:
                    write_bytes(target, blob)
                    self.version += 1
                else:
                    self._save(target, named)
                return made
        finally:
            shutil.rmtree(place, ignore_errors=True)

    # -- concepts change -----------------------------------------------------------------------------------------------------

    def rename(self, id: str, name: str) -> str:
        """Another shown name; returns the name it got, which is a free one. Raises StudioError."""
        clean = _one_line(str(name))
        if not 1 <= len(clean) <= MOST_TEXT:
            raise StudioError(f"name {clean[:40]!r} has {len(clean)} characters, expected 1 to {MOST_TEXT}; type another one")
        with self._lock:
            return self._change(id, lambda concept: self._freely_named(concept.with_details(name=clean), id)).name

    def add_alias(self, id: str, alias: str, adapter: Any) -> None:
        """One more spelling, which reads copies of the trigger's rows and is marked untrained.

        `adapter`: an EngramAdapter of the concept's base; call from the thread that owns it. Raises StudioError, or TriggerError for a
        spelling that cannot fire.
        """
        clean = _spelling(alias, "alias")
        with self._lock:
            if len(self.get(id).aliases) >= MOST_ALIASES:
                raise StudioError(f"alias {clean!r} is one more than {MOST_ALIASES}; remove another one first")
            self._change(id, lambda concept: adapter.add_alias(concept, clean))

    def remove_alias(self, id: str, alias: str, adapter: Any) -> None:
        """One spelling fewer. As `add_alias`."""
        self._change(id, lambda concept: respelling.without_alias(concept, alias, adapter))

    def rename_alias(self, id: str, old: str, new: str, adapter: Any) -> None:
        """Another spelling in place of an alias; see `respelling.renamed_alias`. As `add_alias`."""
        clean = _spelling(new, "alias")
        self._change(id, lambda concept: respelling.renamed_alias(concept, old, clean, adapter))

    # -- concepts go ---------------------------------------------------------------------------------------------------------

    def export(self, id: str) -> Path:
        """A copy of the one file in tmp/, under a file name made of the concept's name. Raises StudioError as `get` does."""
        with self._lock:
            source = self._path(id)
            target = self.workspace.temporary() / file_name_of(self.get(id).name)
            try:
                shutil.copyfile(source, target)
            except OSError as error:
                raise StudioError(f"cannot export ({error.strerror}); free space in the Studio's folder") from error
        return target

    def delete(self, id: str) -> str:
        """Put a concept or a draft in the trash, which keeps the last 20; returns the token that `undo` takes. Raises StudioError."""
        check_id("concept", id)
        with self._lock:
            path = next((p for p in (self._at(id), self._at(id, draft=True)) if p.exists()), None)
            if path is None:
                raise StudioError(f"no concept or draft {id!r}; it was deleted, reload the page")
            token = f"{time.time_ns():016x}{new_id()[:8]}"
            self._move(path, self.workspace.trash / f"{token}.{path.name}")
            for old in sorted(self.workspace.trash.iterdir(), reverse=True)[MOST_TRASH:]:
                with contextlib.suppress(OSError):
                    old.unlink()
        return token

    def undo(self, token: str) -> str:
        """Take what was deleted back, under a free name; returns its id. Raises StudioError: no such token, or it is gone for good."""
        check_id("deleted concept", token)
        with self._lock:
            kept = next(iter(self.workspace.trash.glob(f"{token}.*")), None)
            if kept is None:
                raise StudioError(f"the trash keeps the last {MOST_TRASH} and no longer holds this one; import its file if you exported it")
            name = kept.name.removeprefix(f"{token}.")
            id = name.partition(".")[0]
            path = self._at(id, draft=not name.endswith(SUFFIX))
            if path.exists():
                raise StudioError(f"{id!r} is in the library already; reload the page")
            self._move(kept, path)
            if name.endswith(SUFFIX) and self._concepts()[id].content is not None:
                concept = self.get(id)
                if self._freely_named(concept, id).name != concept.name:
                    self.rename(id, concept.name)
        return id

    # -- drafts --------------------------------------------------------------------------------------------------------------

    def save_draft(self, trigger: str, aliases: Sequence[str] = (), class_word: str | None = None) -> str:
        """Keep a trigger for later, in place of an earlier draft of the same trigger; returns its id.

        Raises StudioError for texts beyond bounds or too many drafts, TriggerError for a spelling that no prompt could hold.
        """
        clean = _spelling(trigger, "trigger")
        spellings = tuple(dict.fromkeys(s for s in (_spelling(a, "alias") for a in aliases) if s != clean))
        if len(spellings) > MOST_ALIASES:
            raise StudioError(f"{len(spellings)} aliases, expected at most {MOST_ALIASES}; leave some out")
        word = _spelling(class_word, "class word") if class_word and class_word.strip() else None
        with self._lock:
            drafts = self.drafts()
            before = next((d for d in drafts if d.trigger.casefold() == clean.casefold()), None)
            if before is None and len(drafts) >= MOST_DRAFTS:
                raise StudioError(f"{len(drafts)} drafts, expected at most {MOST_DRAFTS}; delete some in the library")
            made = new_id() if before is None else before.id
            write_json(self._at(made, draft=True), {"trigger": clean, "aliases": list(spellings), "class_word": word})
            self.version += 1
        return made

    # -- files ---------------------------------------------------------------------------------------------------------------

    def _at(self, id: str, *, draft: bool = False) -> Path:
        return self.workspace.drafts / f"{id}.json" if draft else self.workspace.concepts / f"{id}{SUFFIX}"

    def _path(self, id: str) -> Path:
        path = self._at(check_id("concept", id))
        if not path.is_file():
            raise StudioError(f"no concept {id!r} in the library; it was deleted, reload the page")
        return path

    def _concepts(self) -> dict[str, _Known]:
        """Every file that is there, read again where it changed."""
        known: dict[str, _Known] = {}
        for path in self.workspace.concepts.glob(f"[0-9a-f]*{SUFFIX}"):
            id = path.name.removesuffix(SUFFIX)
            try:
                check_id("concept", id)
                about = path.stat()
            except (StudioError, OSError):
                continue
            stamp = (about.st_mtime_ns, about.st_size)
            old = self._known.get(id)
            known[id] = old if old is not None and old.stamp == stamp else _read(id, path, about)
        self._known = known
        return known

    def _drafts(self) -> list[tuple[int, Draft | None, Card]]:
        """(nanoseconds of its date, the draft if it can be read, its card) of every file that is there."""
        found: list[tuple[int, Draft | None, Card]] = []
        for path in self.workspace.drafts.glob("[0-9a-f]*.json"):
            id = path.stem
            try:
                about = path.stat()
            except OSError:
                continue
            try:
                told = read_json(path)
                word = None if told["class_word"] is None else str(told["class_word"])
                draft = Draft(id, str(told["trigger"]), tuple(map(str, told["aliases"])), word, iso_date(about.st_mtime))
                card = Card(id, draft.trigger, draft.trigger, draft.aliases, about.st_size, "", draft.created, None, None, draft=True)
            except (StudioError, KeyError, TypeError) as error:
                line = str(error) if isinstance(error, StudioError) else "damaged, expected a draft of the Studio; delete it"
                draft, card = None, damaged_card(id, about.st_size, about.st_mtime, line, draft=True)
            found.append((about.st_mtime_ns, draft, card))
        return found

    def _freely_named(self, concept: Concept, id: str) -> Concept:
        taken = {known.card.name.casefold() for other, known in self._concepts().items() if other != id}
        name = free_name(concept.name, taken)
        return concept if name == concept.name else concept.with_details(name=name)

    def _save(self, path: Path, concept: Concept) -> None:
        try:
            concept.save(path)
        except TinyEngramError as error:
            raise StudioError(without_folder(error, path, f"concept {concept.name!r}")) from error
        self.version += 1

    def _change(self, id: str, change: Callable[[Concept], Concept]) -> Concept:
        """Write the changed concept over its file, which keeps its date."""
        with self._lock:
            path = self._path(id)
            before = path.stat().st_mtime_ns
            made = change(self.get(id))
            self._save(path, made)
            with contextlib.suppress(OSError):
                os.utime(path, ns=(before, before))
            self._known.pop(id, None)
            return made

    def _move(self, path: Path, target: Path) -> None:
        try:
            os.rename(path, target)
        except OSError as error:
            raise StudioError(f"cannot move it ({error.strerror}); look at the permissions of the Studio's folder") from error
        sync_folder(target.parent)
        sync_folder(path.parent)
        self.version += 1


def _read(id: str, path: Path, about: os.stat_result) -> _Known:
    stamp = (about.st_mtime_ns, about.st_size)
    try:
        concept = read_concept(path, f"concept {id[:6]}")
    except StudioError as error:
        return _Known(stamp, damaged_card(id, about.st_size, about.st_mtime, str(error), draft=False), None)
    return _Known(stamp, card_of(id, concept, about.st_size, about.st_mtime), content_of(concept))


def _read_bounded(path: Path, shown: str) -> bytes:
    """At most 32 MiB of a regular file."""
    try:
        if not path.is_file():
            raise StudioError(f"{shown}: no such file, expected a concept ({SUFFIX}); choose it again")
        with path.open("rb") as file:
            blob = file.read(MOST_IMPORT + 1)
    except OSError as error:
        raise StudioError(f"{shown}: cannot be read ({error.strerror}); choose it again") from error
    if len(blob) > MOST_IMPORT:
        raise StudioError(f"{shown}: more than {MOST_IMPORT // 2**20} MiB, expected a concept of some kilobytes; this is another model")
    return blob


def _one_line(name: str) -> str:
    """Without control and direction characters, which would make one name look like another."""
    return " ".join("".join(" " if unicodedata.category(c) in ("Cc", "Cf") else c for c in name).split())


def _spelling(text: object, what: str) -> str:
    clean = clean_spelling(text, what)
    if len(clean) > MOST_TEXT:
        raise StudioError(f"{what} {clean[:40] + '...'!r} has {len(clean)} characters, expected at most {MOST_TEXT}; use a shorter one")
    return clean
