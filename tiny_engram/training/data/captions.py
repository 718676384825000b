"""What is said of a picture: built-in templates, captions in every spelling, and tags dropped or in another order.

Imports the standard library, numpy and the errors of pictures.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from tiny_engram.training.data.pictures import DataError

__all__ = ["DEFAULT_TEMPLATES", "SUBJECT_TEMPLATES", "VARIANTS", "filled", "varied"]

DEFAULT_TEMPLATES = (
    "a {trigger}",
    "a picture of a {trigger}",
    "a photo of a {trigger}",
    "the {trigger}",
    "a drawing of a {trigger}",
)
# By what is taught. Nothing in them that some pictures of that kind would not show; a person's and a place's name take no article.
SUBJECT_TEMPLATES = {
    "object": DEFAULT_TEMPLATES,
    "style": (
        "a picture in the style of {trigger}",
        "{trigger} style",
        "something drawn in {trigger} style",
        "an image that looks like {trigger}",
        "artwork, {trigger} style",
    ),
    "person": ("{trigger}", "a picture of {trigger}", "a photo of {trigger}", "a portrait of {trigger}", "the person {trigger}"),
    "animal": ("a {trigger}", "a picture of a {trigger}", "a photo of a {trigger}", "the {trigger}", "an animal, a {trigger}"),
    "scene": ("{trigger}", "a picture of {trigger}", "a view of {trigger}", "the scene at {trigger}", "a place, {trigger}"),
}
# Of each caption: enough that every tag of a handful is missing in some and there in others, and few enough that their encoder states,
# which are all held (a quarter of a megabyte each at 77 tokens of width 768), stay small beside the base.
VARIANTS = 8


def filled(text: str, spellings: tuple[str, ...], source: str) -> list[str]:
    """The caption in every spelling if it holds `{trigger}`, else as it is; without spellings nothing is asked of it.

    Raises DataError, which begins with `source`, for one without any trigger: it would teach nothing.
    """
    if not spellings:
        return [text.strip()]
    if "{trigger}" in text:
        return [text.replace("{trigger}", spelling).strip() for spelling in spellings]
    if not _holds(text, spellings):
        raise DataError(
            f"{source}: caption {text!r} holds neither {{trigger}} nor {spellings[0]!r}; put {{trigger}} where the subject is named"
        )
    return [text.strip()]


def _holds(text: str, spellings: tuple[str, ...]) -> bool:
    return any(spelling.lower() in text.lower() for spelling in spellings)


def varied(captions: Sequence[str], spellings: tuple[str, ...], *, seed: int, dropout: float, shuffle: bool) -> tuple[str, ...]:
    """`VARIANTS` of each caption, which may be equal, so that every caption keeps its share of the samples.

    A caption is a list of tags with commas between them. A tag that holds the trigger is never dropped and keeps its place among those
    that are left; a caption in which no single tag holds it stays whole. What is drawn depends on `seed` and the caption alone.

    Args:
        dropout: share of the other tags that are left out. shuffle: the other tags in any order.
    """
    return tuple(_variant(text, spellings, seed, k, dropout, shuffle) for text in captions for k in range(VARIANTS))


def _variant(text: str, spellings: tuple[str, ...], seed: int, number: int, dropout: float, shuffle: bool) -> str:
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    fixed = [_holds(tag, spellings) for tag in tags]
    if not any(fixed):
        return text
    digest = hashlib.blake2b(f"{seed}/{number}/{text}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    left = [at for at, drawn in enumerate(rng.random(len(tags))) if fixed[at] or drawn >= dropout]
    if shuffle:
        others = iter(rng.permutation([at for at in left if not fixed[at]]).tolist())
        left = [at if fixed[at] else next(others) for at in left]
    return ", ".join(tags[at] for at in left)
