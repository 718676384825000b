"""Every picture opened once, every caption filled in, before training starts: one bad file is named now, not met an hour later.

Imports numpy, the neighbours and what says what is asked for, TrainConfig.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiny_engram.training.config import TrainConfig
from tiny_engram.training.data.captions import DEFAULT_TEMPLATES, SUBJECT_TEMPLATES, filled
from tiny_engram.training.data.folder import Found, find_pictures
from tiny_engram.training.data.given import find_given, is_dataset, load_rows
from tiny_engram.training.data.pictures import DataError, Example, open_mask, open_picture

__all__ = ["Scan", "Seen", "scan_examples", "scan_folder", "scan_for"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found in looking at a picture.

    Attributes:
        size: width and height, upright. digest: of its pixels and its transparency.
        opacity: mean of its alpha, 0 to 1. captioned, masked: has it captions of its own, a mask?
    """

    name: str
    size: tuple[int, int]
    digest: str
    opacity: float
    captioned: bool
    masked: bool


@dataclass(frozen=True, slots=True)
class Scan:
    """What a folder holds: examples in the order of their file names, a line for each bad picture left out, a count of other files.
    `seen` tells of each example."""

    examples: tuple[Example, ...]
    skipped: tuple[str, ...]
    others: int
    seen: tuple[Seen, ...] = ()


def _look(found: Found, alpha_mask: bool) -> Seen:
    opened = open_picture(found.source, str(found.path))
    alpha = opened.alpha
    digest = hashlib.blake2b(repr(opened.picture.size).encode() + opened.picture.tobytes(), digest_size=16)
    digest.update(b"" if alpha is None else alpha.tobytes())
    opacity = 1.0 if alpha is None else float(np.mean(alpha)) / 255
    return Seen(
        found.name,
        opened.picture.size,
        digest.hexdigest(),
        opacity,
        bool(found.texts),
        found.mask is not None or (alpha_mask and alpha is not None),
    )


def _checked(
    found: Sequence[Found],
    where: str,
    others: int,
    spellings: tuple[str, ...],
    templates: tuple[str, ...],
    skip_bad: bool,
    alpha_mask: bool,
) -> Scan:
    examples: list[Example] = []
    seen: list[Seen] = []
    bad: dict[str, str] = {}
    for one in found:
        try:
            seen.append(_look(one, alpha_mask))
        except DataError as error:
            bad[one.name] = str(error)
            continue
        captions = tuple(dict.fromkeys(c for text in one.texts or templates for c in filled(text, spellings, one.told)))
        given = None if isinstance(one.source, Path) else one.source
        example = Example(one.path, captions, given, one.mask, alpha_mask and one.mask is None, one.repeats)
        open_mask(example)
        examples.append(example)
    if bad and not examples:
        raise DataError(f"{where}: none of its {len(bad)} pictures can be read: {', '.join(bad)}")
    if bad and not skip_bad:
        first, *rest = bad
        more = f" (also {', '.join(rest)})" if rest else ""
        raise DataError(f"{bad[first]}, or pass --skip_bad_pictures{more}")
    return Scan(tuple(examples), tuple(bad.values()), others, tuple(seen))


def scan_folder(
    folder: str | Path,
    spellings: tuple[str, ...],
    *,
    templates: tuple[str, ...] = (),
    skip_bad: bool = False,
    alpha_mask: bool = False,
    recursive: bool = False,
    folder_repeats: bool = False,
) -> Scan:
    """All pictures of a folder, each opened once, with their captions in every spelling.

    Captions come from metadata.jsonl or metadata.csv (file_name and text, may be mask and repeats), else from a .txt or .caption beside
    the picture (one caption a line), else from `templates`, else from built-in ones. `{trigger}` stands for the trigger; without
    `spellings` captions are not asked for one. Masks are NAME.mask.png, masks/NAME.png or named by the metadata.

    Args:
        skip_bad: leave out pictures that cannot be read. alpha_mask: the transparency of one without a mask is its mask.
        recursive: the pictures of the folders in it too. folder_repeats: those in a folder named as 10_words are drawn ten times as often.

    Raises DataError: no folder, no pictures, unreadable ones (all are named) unless `skip_bad`, none left, a caption without trigger, a
    mask of another size than its picture, an empty one, or one of no picture.
    """
    found, others = find_pictures(Path(folder), recursive=recursive, folder_repeats=folder_repeats)
    return _checked(found, str(folder), others, spellings, templates or DEFAULT_TEMPLATES, skip_bad, alpha_mask)


def scan_examples(
    rows: Iterable[Mapping[str, Any]],
    spellings: tuple[str, ...],
    *,
    templates: tuple[str, ...] = (),
    skip_bad: bool = False,
    alpha_mask: bool = False,
    where: str = "examples",
) -> Scan:
    """The same of rows such as a `datasets.Dataset` has them: see `given.find_given`. Errors begin with `where`."""
    return _checked(find_given(rows, where), where, 0, spellings, templates or DEFAULT_TEMPLATES, skip_bad, alpha_mask)


def scan_for(config: TrainConfig, examples: Iterable[Mapping[str, Any]] | None = None, *, spellings: tuple[str, ...] | None = None) -> Scan:
    """What a run would be taught from: `examples`, else the folder or saved dataset `config.train_data_dir`.

    Args:
        spellings: of the trigger; None takes the config's, and of none captions are not asked for one.

    Raises DataError as the two above, and where the package datasets is needed and not there.
    """
    spellings = (config.trigger, *config.aliases) if spellings is None else spellings
    wanted: dict[str, Any] = {
        "templates": config.caption_template or SUBJECT_TEMPLATES[config.subject_type],
        "skip_bad": config.skip_bad_pictures,
        "alpha_mask": config.alpha_mask,
    }
    if examples is None and not config.train_data_dir.strip():
        raise DataError(f"train_data_dir is {config.train_data_dir!r}, expected a folder of training pictures")
    folder = Path(config.train_data_dir)
    if examples is None and is_dataset(folder):
        return scan_examples(load_rows(folder), spellings, where=str(folder), **wanted)
    if examples is not None:
        return scan_examples(examples, spellings, **wanted)
    return scan_folder(folder, spellings, recursive=config.recursive, folder_repeats=config.folder_repeats, **wanted)
