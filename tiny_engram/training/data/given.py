"""Pictures that are no folder: rows given from Python, and saved datasets of Hugging Face, which need the package datasets.

Imports Pillow and the neighbours folder, metadata and pictures; datasets where it is used.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from tiny_engram.training.data.folder import Found
from tiny_engram.training.data.metadata import CAPTION_COLUMNS
from tiny_engram.training.data.pictures import DataError, reason

__all__ = ["find_given", "is_dataset", "load_rows"]

DATASET_FILES = {".parquet": "parquet", ".arrow": "arrow"}
# What Dataset.save_to_disk leaves in a folder, and DatasetDict.save_to_disk.
_SAVED = (("state.json", "dataset_info.json"), ("dataset_dict.json",))


def is_dataset(path: Path) -> bool:
    """Is it a file or a folder that the package datasets wrote?"""
    return (path.suffix.lower() in DATASET_FILES and path.is_file()) or any(
        all((path / name).is_file() for name in names) for names in _SAVED
    )


def load_rows(path: Path) -> Any:
    """The rows of such a file or folder, read by the package datasets; of several splits the one named train.

    Raises DataError: the package is not installed, or cannot read it.
    """
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{path}: a saved dataset, which the package datasets reads and which is not installed; pip install datasets, or give a folder "
            "of pictures"
        ) from error
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(DATASET_FILES[path.suffix.lower()], data_files=str(path), split="train")
    except Exception as error:  # of Arrow, of its files, of builders
        raise DataError(f"{path}: not a dataset that can be read ({reason(error)}); save it again") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(f"{path}: splits {sorted(loaded)}, expected one named train; give the folder of one split")
        loaded = loaded["train"]
    return loaded


def find_given(rows: Iterable[Mapping[str, Any]], where: str = "examples") -> list[Found]:
    """Rows {"image": a Pillow image, "text" or "caption": a caption or several, "mask": one more image, "repeats": a number}.

    All but the image may be left out. Raises DataError naming the row, counted from 0.
    """
    found = []
    for number, row in enumerate(rows):
        name = f"example {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: {name} is of type {type(row).__name__}, expected a mapping with 'image' and 'text'")
        image, mask = row.get("image"), row.get("mask")
        if not isinstance(image, Image.Image):
            columns = f"columns {sorted(map(str, row))}, 'image' of type {type(image).__name__}"
            raise DataError(f"{where}: {name} has {columns}, expected a PIL.Image in 'image' and a caption in 'text' or 'caption'")
        if not isinstance(mask, Image.Image | None):
            raise DataError(f"{where}: {name} has a mask of type {type(mask).__name__}, expected a PIL.Image")
        said = next((row[column] for column in CAPTION_COLUMNS if row.get(column) is not None), ())
        texts = (said,) if isinstance(said, str) else tuple(said) if isinstance(said, list | tuple) else None
        if texts is None or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: {name} has the caption {said!r}, expected text or a list of texts")
        repeats = 1 if row.get("repeats") is None else row["repeats"]
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            raise DataError(f"{where}: {name} has repeats {repeats!r}, expected a whole number from 1")
        texts = tuple(text for text in texts if text.strip())
        found.append(Found(Path(name), name, image, texts, f"{where}: {name}", mask, repeats))
    if not found:
        raise DataError(f"{where} holds no rows; expected mappings with 'image' and 'text'")
    return found
