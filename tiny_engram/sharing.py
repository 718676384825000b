"""Concepts as others take them: a folder or a repo of files, a model card and a gallery. Imports concept, concept_card, files; hub to push.

A folder is written whole before anything goes to the Hub, and goes up in one commit. A card that somebody edited is kept.
"""

import base64
import io
import json
import logging
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from PIL import Image

from tiny_engram.concept import Concept
from tiny_engram.concept_card import ConceptCard, Entry, Shown
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import file_name_of, write_atomically
from tiny_engram.model_card import CARD

if TYPE_CHECKING:
    from tiny_engram.hub import CommitInfo

__all__ = ["Picture", "Shared", "ShareOptions", "push_to_hub", "save_pretrained"]

logger = logging.getLogger(__name__)

Shared = Concept | str | PathLike[str]
Picture = str | PathLike[str] | tuple[str | PathLike[str], str]
MOST_CARD = 4 * 2**20
MOST_PROMPT = 1000


class ShareOptions(TypedDict, total=False):
    """What the card says beside what the concepts' files say; what is left out stays as an earlier card of ours has it.

    `base_model` is the Hub's id of the base, `license` an id such as "cc-by-4.0". `pictures` are PNG or WebP files for the gallery,
    each alone or with its prompt (a PNG of `tiny-engram generate` holds its own); without them the concepts' thumbnails are shown.
    `replace_card` writes over a card that was edited; without it such a card is kept, and a warning says so.
    """

    base_model: str | None
    license: str | None
    pictures: Sequence[Picture]
    replace_card: bool


@dataclass(frozen=True, slots=True)
class _Item:
    """A concept, the name of its file in the folder, and the file that it came from, whose bytes are kept."""

    file: str
    concept: Concept
    path: Path | None


@dataclass(slots=True)
class _Batch:
    """What is to be shared, read and checked: concepts, encoded pictures, and the cards and pictures of folders that were given."""

    items: list[_Item]
    shots: list[tuple[str, bytes, str]]
    cards: list[tuple[Path, str]]
    base_model: str | None
    license: str | None
    replace_card: bool

    @property
    def edited(self) -> str | None:
        """The text of a folder's card that its owner wrote or changed: it goes along as it is. Of several folders, none does."""
        return self.cards[0][1] if len(self.cards) == 1 and ConceptCard.read(self.cards[0][1]) is None else None


def save_pretrained(concepts: Shared | Sequence[Shared], folder: str | PathLike[str], **options: Unpack[ShareOptions]) -> Path:
    """Write concept files, README.md and images/ into a folder, made if need be, beside the concepts that are in it; returns its path.

    Args:
        concepts: one or several, each a Concept, its file, or a folder that was written so. A file is named after its concept; those of
            a folder keep their names.
        options: see ShareOptions.

    Raises TinyEngramError: no concept file, two of one name, no PNG or WebP picture, disk full or no permission.
    """
    batch = _batch(concepts, **options)
    target = Path(folder)
    there = _card_in(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TinyEngramError(f"{target}: cannot write there ({error.strerror or error}); choose another folder") from error
    present = {path.relative_to(target).as_posix() for path in (*target.glob("*.safetensors"), *target.glob("images/*"))}
    _write(batch, target, there, present, where="THIS_FOLDER", prefix="THIS_FOLDER/")
    return target


def push_to_hub(
    concepts: Shared | Sequence[Shared],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    **options: Unpack[ShareOptions],
) -> "CommitInfo":
    """Write what `save_pretrained` writes to a repo of the Hub, in one commit, beside the concepts that are in it.

    Args:
        concepts: one or several, each a Concept, its file, or a folder of `save_pretrained` (its concepts, card and pictures alone).
        repo_id: "user/repo"; made if it is not there.
        private: of a repo that is made; None leaves it to the account's setting.
        token: one that may write; None takes the one that `hf auth login` stored.
        revision: a branch, made if it is not there; None is "main". `create_pr` opens a pull request against it instead.
        options: see ShareOptions.

    Returns huggingface_hub's CommitInfo: `commit_url`, `oid`, and `pr_url` of a pull request.

    Raises TinyEngramError: what `save_pretrained` raises, before the Hub is asked for anything; HubError if it refuses.
    """
    from tiny_engram import hub

    place = hub.Place(repo_id=repo_id, revision=revision, token=token)
    batch = _batch(concepts, **options)
    with tempfile.TemporaryDirectory(prefix="tiny-engram-") as made:
        stage = Path(made) / "folder"
        stage.mkdir()
        parent = hub.open_repo(place, private=private)
        head = replace(place, revision=parent, cache_dir=Path(made) / "cache")
        present = {*hub.list_files(head), *(f"images/{name}" for name in hub.list_files(head, "images"))}
        there = hub.read_text(head, CARD, most_bytes=MOST_CARD) if CARD in present else None
        where = place.address() if revision else repo_id
        files = _write(batch, stage, there, present, where=where, prefix=place.address() + "/")
        names = ", ".join(item.concept.name for item in batch.items[:4])
        message = commit_message or f"{'Concept' if len(batch.items) == 1 else 'Concepts'} {names}"
        return hub.commit_files(place, stage, files, message=message, parent=parent, create_pr=create_pr)


# -- what is given ---------------------------------------------------------------------------------------------------------------


def _batch(
    concepts: Shared | Sequence[Shared],
    *,
    base_model: str | None = None,
    license: str | None = None,
    pictures: Sequence[Picture] = (),
    replace_card: bool = False,
) -> _Batch:
    if not isinstance(concepts, (Concept, str, PathLike, Sequence)):
        raise TinyEngramError(f"concepts is {str(concepts)[:60]}, expected one or a list of them: a Concept, a file or a folder")
    if isinstance(pictures, (str, PathLike)) or not isinstance(pictures, Sequence):
        raise TinyEngramError(f"pictures is {str(pictures)!r}, expected a list of files, or of (file, prompt)")
    given = [concepts] if isinstance(concepts, (Concept, str, PathLike)) else list(concepts)
    items = [item for each in given for item in _items(each)]
    if not items:
        raise TinyEngramError("no concept was given, expected at least one")
    for at, item in enumerate(items):
        for other in items[:at]:
            if item.file.casefold() == other.file.casefold():
                raise TinyEngramError(f"two concepts would be {item.file!r}; give one another name by with_details(name=...)")
    folders = [Path(each) for each in given if not isinstance(each, Concept) and Path(each).is_dir()]
    cards = [(folder, text) for folder in folders if (text := _card_in(folder)) is not None]
    stem = items[0].file.removesuffix(".safetensors")
    shots = [_shot(each, f"images/{stem}-{k}", items[0].concept.trigger) for k, each in enumerate(pictures)]
    return _Batch(items, shots, cards, base_model, license, replace_card)


def _card_in(folder: Path) -> str | None:
    try:
        return (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).is_file() else None
    except OSError as error:
        raise TinyEngramError(f"{folder / CARD}: cannot read the file ({error.strerror or error})") from error


def _items(source: Shared) -> list[_Item]:
    if isinstance(source, Concept):
        return [_Item(file_name_of(source.name), source, None)]
    path = Path(source)
    if not path.is_dir():
        concept = Concept.load(path)
        return [_Item(file_name_of(concept.name), concept, path)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise TinyEngramError(f"{path}: holds no .safetensors file, expected concepts")
    return [_Item(each.name, Concept.load(each), each) for each in found]


def _shot(picture: Picture, url: str, trigger: str) -> tuple[str, bytes, str]:
    """A picture's name in the folder, its pixels encoded anew (metadata may tell more than its owner means to), and its prompt."""
    path, prompt = picture if isinstance(picture, tuple) else (picture, None)
    try:
        with Image.open(path, formats=("PNG", "WEBP")) as image:
            kind = str(image.format)
            prompt = prompt or _prompt_in(image) or trigger
            pixels = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TinyEngramError(f"{path}: no picture that can be read ({' '.join(str(error).split())}); expected PNG or WebP") from error
    buffer = io.BytesIO()
    pixels.save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {"optimize": True}))
    return f"{url}.{kind.lower()}", buffer.getvalue(), " ".join(prompt.split())[:MOST_PROMPT]


def _prompt_in(image: Image.Image) -> str | None:
    """The prompt that programs of this kind write into a PNG: as JSON, or as the first lines of a text."""
    told = image.info.get("parameters")
    if not isinstance(told, str):
        return None
    try:
        held = json.loads(told)
    except (ValueError, RecursionError):
        return re.split(r"\n(?:Negative prompt|Steps): ", told, maxsplit=1)[0]
    return held["prompt"] if isinstance(held, dict) and isinstance(held.get("prompt"), str) else None


# -- what is written -------------------------------------------------------------------------------------------------------------


def _write(batch: _Batch, folder: Path, there: str | None, present: set[str], *, where: str, prefix: str) -> list[str]:
    """Write everything, the card last; returns the names of what was written.

    `there` is the card of the place that the folder is or will become, `present` the names of the files there.
    """
    blobs = {name: blob for name, blob, _ in batch.shots}
    before = [card for text in (there, *(text for _, text in batch.cards)) if (card := ConceptCard.read(text)) is not None]
    gallery = {shown.url: shown for card in before for shown in card.gallery}
    written = []
    try:
        for source, text in batch.cards:
            # what an edited card shows is its owner's to say, so all pictures go along
            names = gallery if ConceptCard.read(text) else [f"images/{path.name}" for path in sorted(source.glob("images/*"))]
            blobs |= {url: (source / url).read_bytes() for url in names if url not in blobs and (source / url).is_file()}
        gallery = _gallery(batch, {url: shown for url, shown in gallery.items() if url in present or url in blobs}, blobs)
        (folder / "images").mkdir(exist_ok=True)
        for item in batch.items:
            if item.path is None:
                item.concept.save(folder / item.file)
            elif item.path.resolve() != (folder / item.file).resolve():
                write_atomically(folder / item.file, item.path.read_bytes())
            written.append(item.file)
        for url, blob in blobs.items():
            write_atomically(folder / url, blob)
            written.append(url)
        card = _card(batch, before, folder, gallery.values(), present)
        text = _kept_or_new(batch, there, card.render(where, prefix), where)
        if text is not None:
            write_atomically(folder / CARD, text.encode("utf-8", "replace"))
            written.append(CARD)
    except OSError as error:
        raise TinyEngramError(f"{folder}: cannot write there ({error.strerror or error}); free space or choose another folder") from error
    return written


def _gallery(batch: _Batch, before: dict[str, Shown], blobs: dict[str, bytes]) -> dict[str, Shown]:
    """Pictures by name: those given take the place of the first concept's earlier ones; a concept without any shows its thumbnail."""
    stems = [re.escape(item.file.removesuffix(".safetensors")) for item in batch.items]
    if batch.shots:
        shown = {url: each for url, each in before.items() if not re.fullmatch(rf"images/{stems[0]}-(?:\d+|taught)\.\w+", url)}
        return shown | {name: Shown(name, prompt) for name, _, prompt in batch.shots}
    shown = dict(before)
    for item, stem in zip(batch.items, stems, strict=True) if batch.edited is None else ():
        thumbnail = re.fullmatch(r"data:image/(png|webp);base64,([A-Za-z0-9+/=\s]+)", item.concept.thumbnail or "")
        if thumbnail and not any(re.fullmatch(rf"images/{stem}-(?:\d+|taught)\.\w+", url) for url in shown):
            url = f"images/{item.file.removesuffix('.safetensors')}-taught.{thumbnail[1]}"
            try:
                blobs[url] = base64.b64decode(thumbnail[2])
            except ValueError:
                continue
            shown[url] = Shown(url, item.concept.trigger, taught=True)
    return shown


def _card(batch: _Batch, before: Sequence[ConceptCard], folder: Path, gallery: Iterable[Shown], present: set[str]) -> ConceptCard:
    """What an earlier card says of files that are still there, and what this batch adds."""
    entries = {entry.file: entry for card in before for entry in card.entries if entry.file in present}
    for item in batch.items:
        concept = item.concept
        entries[item.file] = Entry(
            item.file,
            (folder / item.file).stat().st_size,
            concept.name,
            concept.trigger,
            list(concept.aliases),
            concept.base,
            dict(concept.recipe),
        )

    def last(given: str | None, told: Iterable[str | None]) -> str | None:
        return given or next((value for value in reversed(list(told)) if value), None)

    base_model = last(batch.base_model, (card.base_model for card in before))
    return ConceptCard(list(entries.values()), list(gallery), base_model, last(batch.license, (card.license for card in before)))


def _kept_or_new(batch: _Batch, there: str | None, new: str, where: str) -> str | None:
    """The text of the card, or None to keep the one that is there."""
    if there is not None and ConceptCard.read(there) is None and there != batch.edited and not batch.replace_card:
        logger.warning("%s: its %s was written or edited by somebody, so it is kept; replace_card=True writes a new one", where, CARD)
        return None
    return batch.edited or new
