"""Where a concept comes from: a Concept, a file, a folder with one file, a library, or a repo of the Hub. Imports concept; hub or library
when one is asked.

A path that exists is read, whatever it could mean elsewhere. Files are safetensors; nothing is unpickled.
"""

import re
from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypedDict, Unpack

from tiny_engram.concept import Concept, ConceptFileError
from tiny_engram.concept_file import MAX_FILE, read_bytes
from tiny_engram.errors import TinyEngramError

if TYPE_CHECKING:
    from tiny_engram.library import ConceptLibrary

__all__ = ["Source", "SourceOptions", "load_source", "source_bytes", "source_file"]

SUFFIX = ".safetensors"
Source = Concept | str | PathLike[str]
# ids of the Hub, and no paths: one slash, each side begins with a letter, a digit or "_"
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
MOST_NAMED = 8


class HubOptions(TypedDict, total=False):
    """How the Hub is asked; names as in diffusers' `load_lora_weights`. Of no meaning for a path.

    `revision` is a branch, a tag or a commit; `token` a token, True for the stored one, False for none; `local_files_only` reads the
    cache alone; `force_download` fetches again what the cache holds.
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


class SourceOptions(HubOptions, total=False):
    """The same, and which file it is, in a folder or a repo."""

    weight_name: str | None
    subfolder: str | None


def load_source(source: Source, **options: Unpack[SourceOptions]) -> Concept:
    """The concept of any source; see `source_file` for paths and ids, and "library#name" is a concept of a library.

    Raises TinyEngramError in one line: not there, not open to us, not one file, not a concept file.
    """
    if isinstance(source, Concept):
        if given := [name for name, value in options.items() if value]:
            raise TinyEngramError(f"{', '.join(given)} given with a Concept, expected with a path or a Hub id; leave it out")
        return source
    if (held := _held(source)) is not None and not any(options.values()):
        return held[0].get(held[1])
    path, address = source_file(source, **options)
    try:
        return Concept.load(path)
    except ConceptFileError as error:
        _refuse_library(path)
        if address is None:
            raise
        raise ConceptFileError(f"{address}: {error}; force_download=True fetches it again") from error


def source_bytes(source: str | PathLike[str]) -> tuple[bytes, str]:
    """A concept's file and where it is, of a source that is no Concept. Raises as `load_source` does."""
    if (held := _held(source)) is not None:
        return held[0].read(held[1]), fspath(source)
    path, address = source_file(source)
    _refuse_library(path)
    return read_bytes(path), address or str(path)


def _held(source: object) -> "tuple[ConceptLibrary, str] | None":
    """The library and the name in it, of "library#name" with a library that is there; a name may hold more of "#"."""
    if not isinstance(source, (str, PathLike)) or "#" not in fspath(source) or Path(source).exists():
        return None
    from tiny_engram.library import ConceptLibrary, is_library

    text = str(fspath(source))
    parts = ((text[:at], text[at + 1 :]) for at, sign in enumerate(text) if sign == "#")
    return next(((ConceptLibrary.open(path), name) for path, name in parts if is_library(path)), None)


def _refuse_library(path: Path) -> None:
    """Say so where a library was given in the place of one of its concepts."""
    from tiny_engram.library import is_library

    if is_library(path):
        raise TinyEngramError(
            f"{path}: is a library of concepts, expected one of them; write '{path}#NAME', or have all fire by open_library"
        )


def source_file(
    source: str | PathLike[str],
    *,
    weight_name: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> tuple[Path, str | None]:
    """The file of a source, and its address if it lies on the Hub ("hf://user/repo/name.safetensors"), else None.

    Args:
        source: a file; a folder; "user/repo"; or "hf://user/repo[@revision][/file.safetensors]", which says it all in one text.
        weight_name, subfolder: the file in a folder or a repo. Without a name there must be one .safetensors file.
        revision, token, cache_dir, local_files_only, force_download: see HubOptions.

    Raises TinyEngramError: no path and no text, nothing there, several files to choose from, a name that is no .safetensors file or
    leaves the folder.
    """
    if not isinstance(source, (str, PathLike)) or not fspath(source):
        raise TinyEngramError(f"a concept's source is {str(source)[:60]!r}, expected a Concept, a file, a folder or a Hub id 'user/repo'")
    for what, name in (("weight_name", weight_name), ("subfolder", subfolder)):
        if name is not None and ("\\" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts):
            raise TinyEngramError(f"{what} {name!r} leaves the folder, expected a name in it")
    if weight_name is not None and not weight_name.endswith(SUFFIX):
        raise TinyEngramError(f"weight_name {weight_name!r}: expected a {SUFFIX} file; concepts are read from no other")
    path, text = Path(source), fspath(source)
    if path.is_dir():
        folder = path / (subfolder or "")
        names = [weight_name] if weight_name else [each.name for each in folder.glob(f"*{SUFFIX}")] if folder.is_dir() else []
        return folder / _only(names, str(folder)), None
    if path.exists() or isinstance(source, PathLike):
        if weight_name or subfolder:
            raise TinyEngramError(f"{text}: weight_name and subfolder choose in a folder or a repo, and this is neither; leave them out")
        return path, None
    options: HubOptions = {
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }
    if text.startswith("hf://"):
        return _on_the_hub(*_split(text, weight_name, subfolder, revision), options)
    if _ID.fullmatch(text) and not text.endswith(SUFFIX):
        try:
            return _on_the_hub(text, revision, weight_name, subfolder, options)
        except TinyEngramError as error:
            raise type(error)(f"{text}: no such path here; {error}") from error
    raise ConceptFileError(f"{text}: does not exist; expected a concept file, a folder that holds one, or a Hub id 'user/repo'")


def _split(
    text: str, weight_name: str | None, subfolder: str | None, revision: str | None
) -> tuple[str, str | None, str | None, str | None]:
    """Repo, revision, weight name and subfolder of an address and of what was given beside it; nothing may be said twice."""
    from tiny_engram import hub

    repo, at, path = hub.split_address(text)
    if (at and revision) or (path and (weight_name or subfolder)):
        raise TinyEngramError(f"{text!r} says already what revision, weight_name or subfolder say again; give one of them")
    if path is None:
        return repo, at or revision, weight_name, subfolder
    inside = PurePosixPath(path)
    if ".." in inside.parts or inside.suffix != SUFFIX:
        raise TinyEngramError(f"{text!r} names no {SUFFIX} file of a repo; concepts are read from no other")
    parent = str(inside.parent)
    return repo, at or revision, inside.name, None if parent == "." else parent


def _on_the_hub(repo: str, revision: str | None, weight_name: str | None, subfolder: str | None, options: HubOptions) -> tuple[Path, str]:
    from tiny_engram import hub

    place = hub.Place(**{**options, "repo_id": repo, "revision": revision})
    if weight_name is None:
        names = [name for name in hub.list_files(place, subfolder) if name.endswith(SUFFIX)]
        weight_name = _only(names, place.address(subfolder or ""))
    file = f"{subfolder.rstrip('/')}/{weight_name}" if subfolder else weight_name
    return hub.fetch(place, file, most_bytes=MAX_FILE), place.address(file)


def _only(names: Iterable[str], where: str) -> str:
    """The one name. Raises TinyEngramError for none, and lists several."""
    known = sorted(names)
    if len(known) == 1:
        return known[0]
    if not known:
        raise ConceptFileError(f"{where}: holds no {SUFFIX} file, expected one with a concept; name a folder in it by subfolder=")
    shown = ", ".join(known[:MOST_NAMED]) + (", ..." if len(known) > MOST_NAMED else "")
    raise TinyEngramError(f"{where}: holds {len(known)} files to choose from ({shown}); name one by weight_name=, or by its own path")
