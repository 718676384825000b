"""A concept's file as the Studio reads and shows it: bounds beyond the format's own, its card, its numbers. Loads torch.

May import concept and workspace. Files come from strangers: what is read here is bounded, and thumbnails are pictures a browser may show.
"""

import base64
import hashlib
import io
import json
import re
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import StudioError, without_folder

__all__ = ["Card", "card_of", "check_texts", "content_of", "damaged_card", "describe", "iso_date", "read_concept", "safe_thumbnail"]

MOST_TEXT = 200  # characters of a name, a trigger or an alias
MOST_BASE = 255  # as a folder's name may have
MOST_ALIASES = 64
MOST_RECIPE = 64 * 1024  # characters, as JSON
MOST_THUMBNAIL = 512 * 1024  # characters of its data URI
MOST_THUMBNAIL_SIDE = 1024
_THUMBNAIL = re.compile(r"data:image/(png|webp|jpeg);base64,([A-Za-z0-9+/]+={0,2})")


@dataclass(frozen=True, slots=True)
class Card:
    """What the library shows of one concept or draft.

    `bytes` is the size of its file, `created` a UTC date (ISO 8601), `thumbnail` a data URI that is safe to show, `steps` how long it was
    taught. Where the file cannot be read `error` says so in a line, and the other fields are empty.
    """

    id: str
    name: str
    trigger: str
    aliases: tuple[str, ...]
    bytes: int
    base: str
    created: str
    thumbnail: str | None
    steps: int | None
    draft: bool
    error: str | None = None


def iso_date(seconds: float) -> str:
    """Seconds since 1970 as "2026-01-31T12:00:00Z"."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def safe_thumbnail(uri: object) -> str | None:
    """The data URI, if it holds a small PNG, WebP or JPEG of at most 1,024 pixels a side; None otherwise."""
    if not isinstance(uri, str) or len(uri) > MOST_THUMBNAIL:
        return None
    found = _THUMBNAIL.fullmatch(uri)
    if found is None:
        return None
    try:
        blob = base64.b64decode(found[2], validate=True)
        Image.init()  # or formats that nobody opened before are not known
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(blob), formats=[found[1].upper()]) as picture:
            return uri if max(picture.size) <= MOST_THUMBNAIL_SIDE else None
    except Exception:  # a stranger's bytes make decoders raise anything
        return None


def read_concept(path: Path, shown: str) -> Concept:
    """A concept's file, every check of `Concept.load` made and its texts found short; a thumbnail that is none is left out.

    Raises StudioError, which calls the file `shown`.
    """
    try:
        concept = Concept.load(path)
    except TinyEngramError as error:
        raise StudioError(without_folder(error, path, shown)) from error
    check_texts(concept, shown)
    return concept if safe_thumbnail(concept.thumbnail) else concept.with_details(thumbnail=None)


def check_texts(concept: Concept, shown: str) -> None:
    """Are its texts and its recipe such as the Studio keeps? Raises StudioError, which calls the concept `shown`."""
    aliases = [("alias", alias) for alias in concept.aliases]
    for what, text in (("name", concept.name), ("trigger", concept.trigger), *aliases):
        if len(text) > MOST_TEXT or not text.strip():
            raise StudioError(f"{shown}: its {what} has {len(text)} characters, expected 1 to {MOST_TEXT}; this is no concept to share")
    if len(concept.base) > MOST_BASE:
        raise StudioError(
            f"{shown}: its base has {len(concept.base)} characters, expected at most {MOST_BASE}; this is no concept to share"
        )
    if len(concept.aliases) > MOST_ALIASES:
        raise StudioError(f"{shown}: {len(concept.aliases)} aliases, expected at most {MOST_ALIASES}; this is no concept to share")
    try:
        length = len(json.dumps(concept.recipe, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise StudioError(f"{shown}: its recipe is no plain JSON; save the concept again") from error
    if length > MOST_RECIPE:
        raise StudioError(f"{shown}: its recipe has {length} characters, expected at most {MOST_RECIPE}; save it with a shorter one")


def content_of(concept: Concept) -> str:
    """A digest (hex) of all that a concept does and says, but its name and thumbnail: equal however the file was written."""
    told = {key: value for key, value in concept.describe().items() if key != "name"}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for place in concept.roles.values():
        for rows in (*place.mounts.values(), *place.maps.values()):
            for name in rows.__slots__:
                if isinstance(tensor := getattr(rows, name), torch.Tensor):
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _steps_of(concept: Concept) -> int | None:
    steps = concept.recipe.get("step")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0 else None


def card_of(id: str, concept: Concept, size: int, seconds: float) -> Card:
    """The card of a concept whose file takes `size` bytes and is of `seconds` since 1970."""
    date = iso_date(seconds)
    told = (id, concept.name, concept.trigger, concept.aliases, size, concept.base, date, concept.thumbnail, _steps_of(concept))
    return Card(*told, draft=False)


def damaged_card(id: str, size: int, seconds: float, error: str, *, draft: bool) -> Card:
    """The card of a file that cannot be read."""
    what = "draft" if draft else "concept"
    return Card(id, f"damaged {what} {id[:6]}", "", (), size, "", iso_date(seconds), None, None, draft, error)


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.double().tolist()]


def describe(concept: Concept) -> dict[str, Any]:
    """A concept's numbers as JSON types.

    By role: its width, tokenizer, spellings with their token ids, the positions that own rows, and per mount (gain, bias and `size`, the
    root mean square of its rows, a number a position) and per map (`size`, the root mean square of the change it makes).
    """
    roles: dict[str, Any] = {}
    for role, place in concept.roles.items():
        mounts = []
        for name, rows in place.mounts.items():
            count = rows.payload.shape[0] * rows.payload.shape[1]
            sizes = _rounded(rows.rows().double().square().mean((1, 2)).sqrt())
            told = {"mount": name, "rho": rows.rho, "rows": count, "bytes": rows.nbytes}
            mounts.append(told | {"size": sizes, "gain": _rounded(rows.gain), "bias": _rounded(rows.bias)})
        maps = []
        for name, factors in place.maps.items():
            into, out = (factor.double() for factor in factors.factors())
            # |out^T into|_F without the product: through the small Gram matrices
            norm = ((into @ into.T) * (out @ out.T)).sum().clamp(min=0).sqrt() / factors.channels
            told = {"map": name, "rank": factors.rank, "channels": factors.channels, "bytes": factors.nbytes}
            maps.append(told | {"size": _rounded(norm[None])[0]})
        roles[role] = {
            "width": place.width,
            "tokenizer": place.fingerprint,
            "spellings": [{"text": v.text, "ids": list(v.ids)} for v in place.variants],
            "positions": [{"spelling": g.text, "position": p} for g in place.groups for p in range(len(g.canonical))],
            "rows": sum(mount["rows"] for mount in mounts),
            "mounts": mounts,
            "maps": maps,
        }
    return {
        "name": concept.name,
        "trigger": concept.trigger,
        "aliases": list(concept.aliases),
        "untrained": list(concept.untrained),
        "base": concept.base,
        "steps": _steps_of(concept),
        "table_bytes": concept.nbytes,
        "config": concept.config.to_dict(),
        "roles": roles,
        "recipe": dict(concept.recipe),
    }
