"""The tray: pictures and texts that wait to be taught, on disk, so that neither a reload nor a restart loses them. Nothing of gradio.

One folder of the workspace, tray/: tray.json and ID.png for each picture. A picture whose entry a kill has lost is found again; an entry
whose picture is gone is dropped. May import uploads, jobs, presets and workspace.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.jobs import MOST_CAPTION, Taught
from tiny_engram.studio.presets import DEFAULT_PRESET, PRESETS
from tiny_engram.studio.uploads import Limits, take_pictures
from tiny_engram.studio.workspace import check_id, read_json, write_json

__all__ = ["Form", "Tray", "TrayPicture", "filled", "unfilled"]

TRIGGER = "{trigger}"
FOUND_AGAIN = "recovered picture"
# A trigger or a list of aliases as a user may paste it; what is too long is told when a job is started.
MOST_TYPED = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrayPicture:
    """One picture: its id, the user's name for it (not escaped), its caption with {trigger} in it ("": the built-in ones), its size as
    kept, and as it was sent (0: not known)."""

    id: str
    name: str
    caption: str
    width: int
    height: int
    sent_width: int = 0
    sent_height: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """The size that its owner knows."""
        return (self.sent_width, self.sent_height) if self.sent_width and self.sent_height else (self.width, self.height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What is typed beside the pictures. `aliases` is the text box's own text; `options` are TrainConfig's fields beyond the preset's."""

    trigger: str = ""
    aliases: str = ""
    class_word: str = ""
    preset: str = DEFAULT_PRESET
    options: dict[str, Any] = field(default_factory=dict)


def filled(caption: str, trigger: str) -> str:
    """A caption as people read it: the trigger in place of {trigger}, where there is one."""
    return caption.replace(TRIGGER, trigger) if trigger else caption


def unfilled(text: str, trigger: str) -> str:
    """The caption that `text` is with this trigger: {trigger} wherever it stands as a word, so that a caption follows another trigger."""
    if not trigger.strip():
        return text
    return re.sub(rf"(?<!\w){re.escape(trigger.strip())}(?!\w)", lambda _: TRIGGER, text, flags=re.IGNORECASE)


class Tray:
    """The one tray of a workspace. Threads may share it; every change is on disk when its verb returns. Errors are StudioErrors."""

    def __init__(self, workspace: Any, limits: Limits | None = None) -> None:
        """workspace: a Workspace that is open. Finds again what an earlier app left."""
        self.folder = Path(workspace.root) / "tray"
        self.limits = limits or Limits()
        self.version = 0
        self._lock = threading.RLock()
        self._pictures: tuple[TrayPicture, ...] = ()
        self._form = Form()
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StudioError(f"the tray cannot be kept ({error.strerror}); free space in the Studio's folder") from error
        self._take_up()

    # -- looking -------------------------------------------------------------------------------------------------------------

    @property
    def pictures(self) -> tuple[TrayPicture, ...]:
        """In the order in which they came."""
        return self._pictures

    @property
    def form(self) -> Form:
        """What was typed last."""
        return self._form

    def path(self, id: str) -> Path:
        """The PNG of a picture. Raises StudioError: no such picture."""
        if check_id("picture", id) not in {picture.id for picture in self._pictures}:
            raise StudioError(f"no picture {id!r}; it was removed, reload the page")
        return self.folder / f"{id}.png"

    def taught(self) -> list[Taught]:
        """What a job is made of."""
        return [Taught(path=self.folder / f"{picture.id}.png", caption=picture.caption) for picture in self._pictures]

    # -- changing ------------------------------------------------------------------------------------------------------------

    def add(self, files: Iterable[Any]) -> tuple[int, tuple[tuple[str, str], ...]]:
        """Take pictures in, as `take_pictures` takes them: how many came, and (name, one-line reason) of each that did not."""
        files = list(files)
        with self._lock:
            room = max(0, self.limits.files - len(self._pictures))
            taken = take_pictures(files, self.folder, dataclasses.replace(self.limits, files=room))
            made = [
                TrayPicture(id=p.id, name=p.name, caption="", width=p.width, height=p.height, sent_width=p.sent[0], sent_height=p.sent[1])
                for p in taken.pictures
            ]
            # the bound of one call, room, is not the one that a person knows
            ours, theirs = f"more than {room} pictures", f"more than {self.limits.files} pictures"
            told = tuple((name, why.replace(ours, theirs)) for name, why in taken.refused)
            if made:
                self._write(pictures=(*self._pictures, *made))
        return len(made), told

    def remove(self, id: str) -> None:
        """Take a picture out; one that is not there any more is no error, since two pages may ask for it."""
        check_id("picture", id)
        with self._lock:
            # first the picture: a kill in between leaves an entry without one, which is dropped, and none that comes back
            with contextlib.suppress(OSError):
                (self.folder / f"{id}.png").unlink()
            self._write(pictures=tuple(picture for picture in self._pictures if picture.id != id))

    def clear(self) -> None:
        """Take all pictures out; what is typed stays."""
        with self._lock:
            for picture in self._pictures:
                with contextlib.suppress(OSError):
                    (self.folder / f"{picture.id}.png").unlink()
            self._write(pictures=())

    def caption(self, texts: Mapping[str, Any], trigger: str = "") -> None:
        """New captions by picture, as typed with `trigger` filled in; those of pictures that are gone are passed over."""
        with self._lock:
            made = list(self._pictures)
            for at, picture in enumerate(made):
                text = texts.get(picture.id)
                if not isinstance(text, str):
                    continue
                caption = unfilled(" ".join(text.split()), trigger)
                if len(caption) > MOST_CAPTION:
                    raise StudioError(
                        f"the caption of {picture.name!r} has {len(caption):,} characters, expected at most {MOST_CAPTION:,}; cut it"
                    )
                made[at] = dataclasses.replace(picture, caption=caption)
            if tuple(made) != self._pictures:
                self._write(pictures=tuple(made))

    def keep(self, **changes: Any) -> Form:
        """Keep what is typed: any of Form's fields."""
        for name, value in changes.items():
            if isinstance(value, str) and len(value) > MOST_TYPED:
                what = name.replace("_", " ")
                raise StudioError(f"the {what} has {len(value):,} characters, expected at most {MOST_TYPED:,}; shorten it")
        with self._lock:
            form = dataclasses.replace(self._form, **changes)
            if form != self._form:
                self._write(form=form)
            return form

    # -- disk ----------------------------------------------------------------------------------------------------------------

    def _write(self, *, pictures: tuple[TrayPicture, ...] | None = None, form: Form | None = None) -> None:
        pictures, form = self._pictures if pictures is None else pictures, form or self._form
        told = {"pictures": [dataclasses.asdict(p) for p in pictures], "form": dataclasses.asdict(form)}
        write_json(self.folder / "tray.json", told)
        self._pictures, self._form = pictures, form
        self.version += 1

    def _take_up(self) -> None:
        for left in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                left.unlink()
        about = self.folder / "tray.json"
        told: Any = {}
        if about.exists():
            try:
                told = read_json(about)
            except StudioError:  # the pictures are still there, and it is kept for whoever can read it
                with contextlib.suppress(OSError):
                    about.replace(self.folder / "tray.damaged.json")
        told = told if isinstance(told, dict) else {}
        self._form = _form_of(told.get("form"))
        listed = told.get("pictures")
        found = [picture for entry in (listed if isinstance(listed, list) else []) if (picture := self._entry(entry)) is not None]
        known = {picture.id for picture in found}
        lost = (path for path in self.folder.glob("*.png") if path.stem not in known)
        for path in sorted(lost, key=lambda p: (p.stat().st_mtime_ns, p.name)):
            picture = self._entry({"id": path.stem, "name": FOUND_AGAIN, "caption": ""})
            found += [] if picture is None else [picture]
        self._pictures = tuple(found)

    def _entry(self, told: Any) -> TrayPicture | None:
        """A picture by what tray.json says of it, if it is there."""
        try:
            id = check_id("picture", told["id"])
            with Image.open(self.folder / f"{id}.png", formats=["PNG"]) as opened:
                width, height = opened.size
            name, caption, sent = str(told["name"]), str(told["caption"]), (told.get("sent_width"), told.get("sent_height"))
            sent = tuple(side if isinstance(side, int) and side > 0 else 0 for side in sent)
            return TrayPicture(id=id, name=name, caption=caption, width=width, height=height, sent_width=sent[0], sent_height=sent[1])
        except (StudioError, OSError, KeyError, TypeError, ValueError, SyntaxError):
            return None


def _form_of(told: Any) -> Form:
    told = told if isinstance(told, dict) else {}
    texts = {name: told[name] for name in ("trigger", "aliases", "class_word") if isinstance(told.get(name), str)}
    preset = told.get("preset") if told.get("preset") in PRESETS else DEFAULT_PRESET
    options = told.get("options") if isinstance(told.get("options"), dict) else {}
    return Form(**texts, preset=str(preset), options=dict(options or {}))
