"""The Hugging Face Hub: concept files are read from its repos, folders are written to them. Imports huggingface_hub and errors.

The only module that talks to the Hub, imported where a source is no local path. Every failure is one line that names the repo.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from tiny_engram import __version__
from tiny_engram.errors import TinyEngramError

__all__ = ["CommitInfo", "HubError", "Place", "commit_files", "fetch", "list_files", "open_repo", "read_text", "split_address"]

_ADDRESS = re.compile(r"hf://(?:models/)?([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.+))?")
LOGIN = "log in by `hf auth login` or give token="


class HubError(TinyEngramError):
    """Something on the Hub is not there, is not open to us, or cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A repo at one revision, and how to get at it; names as in diffusers.

    Attributes:
        token: True takes the one that `hf auth login` stored, None that one if there is any, False none.
        local_files_only: read the cache alone, as HF_HUB_OFFLINE=1 does for everything.
    """

    repo_id: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise HubError(f"{self.repo_id!r} is no repo id of the Hub ({' '.join(str(error).split())}); expected 'user/repo'") from error
        if self.repo_id.count("/") != 1:
            raise HubError(f"{self.repo_id!r} is no repo id of the Hub, expected 'user/repo'")

    def address(self, file: str = "") -> str:
        """How the place, or a file in it, is written: "hf://user/repo@revision/file"."""
        revision = self.revision or ""
        at = "" if not revision else f"@{revision if revision.startswith('refs/') else quote(revision, safe='')}"
        return f"hf://{self.repo_id}{at}" + (f"/{file}" if file else "")

    @property
    def offline(self) -> bool:
        """Is the cache all that may be read?"""
        return self.local_files_only or constants.HF_HUB_OFFLINE


def split_address(address: str) -> tuple[str, str | None, str | None]:
    """Repo, revision and path of "hf://user/repo[@revision][/path]". Raises HubError for anything else."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise HubError(f"{address!r} is no address of a model on the Hub, expected hf://user/repo[@revision][/file.safetensors]")
    repo, revision, path = found.groups()
    return repo, unquote(revision) if revision else None, path


def _api(token: str | bool | None) -> HfApi:
    return HfApi(token=token, library_name="tiny-engram", library_version=__version__)


R = TypeVar("R")


def _asked(place: Place, what: str, ask: Callable[[], R]) -> R:
    """The answer of the Hub; whatever goes wrong is a HubError in one line. `what` is the address that was asked for."""
    try:
        return ask()
    except Exception as error:  # of the client, of the HTTP library below it, of the system
        raise HubError(f"{what}: {_reason(error, place)}") from error


def _reason(error: Exception, place: Place) -> str:
    repo, revision = place.repo_id, place.revision or constants.DEFAULT_REVISION
    status = _status(error)
    if isinstance(error, GatedRepoError):
        return f"the repo is gated; ask for access at {constants.ENDPOINT}/{repo}, then {LOGIN} of the account that was let in"
    if isinstance(error, RepositoryNotFoundError):
        return f"no such repo on the Hub; check the name, or, if it is private, {LOGIN}"
    if isinstance(error, RevisionNotFoundError):
        return f"the repo has no revision {revision!r}; expected a branch, a tag or a commit of {constants.ENDPOINT}/{repo}"
    if _has_no_such_file(error):
        return f"the repo has no such file at revision {revision!r}; see {constants.ENDPOINT}/{repo}/tree/{revision}"
    if place.offline and isinstance(error, (EntryNotFoundError, OfflineModeIsEnabled)):
        switch = "local_files_only=True" if place.local_files_only else "HF_HUB_OFFLINE=1"
        return f"not in the cache, which {switch} keeps to; get it once without that, or by `hf download {repo}`"
    if status == 401:
        return f"the Hub does not take the token, or wants one; {LOGIN}"
    if status == 403:
        return f"the token's account may not do that; use a token that can write to {repo}, or another repo"
    if status == 412:
        return "somebody wrote to the repo at the same time; push again"
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return f"not in the cache, and the Hub cannot be reached ({_short(error)}); check the connection to {constants.ENDPOINT}"
    return f"the Hub at {constants.ENDPOINT} did not answer as expected ({_short(error)}); try again"


def _status(error: object) -> int | None:
    """The Hub's answer as a number; None where it gave none. Before huggingface_hub 1.0 what the cache lacks is an HTTP error too."""
    return getattr(getattr(error, "response", None), "status_code", None) if isinstance(error, HfHubHTTPError) else None


def _has_no_such_file(error: object) -> bool:
    """Did the Hub say that the repo has no such file?"""
    return isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def list_files(place: Place, subfolder: str | None = None) -> list[str]:
    """Names of the files in the repo, or in one folder of it, not of those in folders below.

    If the Hub is off or cannot be reached, what the cache holds of that revision. Raises HubError.
    """
    what = place.address(subfolder or "")
    folder = PurePosixPath(subfolder or "")
    if place.offline:
        cached = _asked(place, what, lambda: _cached_folder(place))
    else:
        api = _api(place.token)
        try:
            found = _asked(place, what, lambda: api.model_info(place.repo_id, revision=place.revision)).siblings or []
            paths = [PurePosixPath(each.rfilename) for each in found]
            return [path.name for path in paths if path.parent == folder]
        except HubError as error:
            if _answered(error):
                raise
            try:
                cached = _cached_folder(place)
            except LocalEntryNotFoundError:
                raise error from error.__cause__
    inside = cached / folder
    return [path.name for path in inside.iterdir() if path.is_file()] if inside.is_dir() else []


def _answered(error: HubError) -> bool:
    """Did the Hub say no, rather than nothing, or that it is ill?"""
    status = _status(error.__cause__)
    return status is not None and status < 500


def _cached_folder(place: Place) -> Path:
    """Where the cache keeps the files of this revision, those that were asked for before. Raises LocalEntryNotFoundError."""
    api = _api(place.token)
    try:
        return Path(api.snapshot_download(place.repo_id, revision=place.revision, cache_dir=place.cache_dir, local_files_only=True))
    except LocalEntryNotFoundError as error:
        incomplete = getattr(error, "snapshot_path", None)  # a concept needs its own file alone
        if incomplete is None:
            raise
        return Path(incomplete)


def fetch(place: Place, file: str, *, most_bytes: int) -> Path:
    """A file of the repo, from the cache if the Hub's is the same or cannot be had; its size is asked for before it is downloaded.

    Raises HubError: no such repo, revision or file, no access, no connection and no copy in the cache, more than `most_bytes`.
    """
    try:
        return _fetch(place, file, most_bytes)
    except HubError as error:
        if place.offline or place.force_download or _answered(error):
            raise
        try:
            return _fetch(replace(place, local_files_only=True), file, most_bytes)
        except HubError:
            raise error from error.__cause__


def _fetch(place: Place, file: str, most_bytes: int) -> Path:
    what, api = place.address(file), _api(place.token)
    options = {"revision": place.revision, "cache_dir": place.cache_dir, "local_files_only": place.local_files_only}
    options["force_download"] = place.force_download and not place.offline
    size = _asked(place, what, lambda: _size_of(api, place, file, options))
    if size is not None and size > most_bytes:
        raise HubError(f"{what}: {size:,} bytes, expected at most {most_bytes:,}; choose another file")
    return Path(_asked(place, what, lambda: api.hf_hub_download(place.repo_id, file, **options)))


def _size_of(api: Any, place: Place, file: str, options: Mapping[str, Any]) -> int | None:
    """Bytes of a file as the Hub tells them; None where that is not known."""
    if "dry_run" in signature(api.hf_hub_download).parameters:
        return api.hf_hub_download(place.repo_id, file, dry_run=True, **options).file_size
    if place.local_files_only or place.offline:
        return None
    # releases before 1.0
    url = hf_hub_url(place.repo_id, file, revision=place.revision, endpoint=api.endpoint)
    return api.get_hf_file_metadata(url=url, token=api.token).size


def open_repo(place: Place, *, private: bool | None = None) -> str:
    """Make the repo, and the branch, if they are not there; returns the commit that a push will follow. Raises HubError."""
    what, api = place.address(), _api(place.token)
    if place.offline:
        raise HubError(f"{what}: HF_HUB_OFFLINE=1 keeps this process off the Hub; push without it")
    _asked(place, what, lambda: api.create_repo(place.repo_id, private=private, exist_ok=True))
    if place.revision is not None and not place.revision.startswith("refs/"):
        branch = place.revision
        _asked(place, what, lambda: api.create_branch(place.repo_id, branch=branch, exist_ok=True))
    head = _asked(place, what, lambda: api.repo_info(place.repo_id, revision=place.revision)).sha
    if head is None:
        raise HubError(f"{what}: the Hub names no commit of the repo; try again")
    return head


def read_text(place: Place, file: str, *, most_bytes: int) -> str | None:
    """A text file of the repo, None if there is none. Raises HubError."""
    try:
        return fetch(place, file, most_bytes=most_bytes).read_text(encoding="utf-8", errors="replace")
    except HubError as error:
        if _has_no_such_file(error.__cause__):
            return None
        raise


def commit_files(place: Place, folder: Path, files: Sequence[str], *, message: str, parent: str, create_pr: bool = False) -> CommitInfo:
    """Write these files of a local folder to the repo in one commit on top of `parent`. Raises HubError; nothing is written then."""
    adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files]
    return _asked(
        place,
        place.address(),
        lambda: _api(place.token).create_commit(
            place.repo_id, adds, commit_message=message, revision=place.revision, parent_commit=parent, create_pr=create_pr
        ),
    )
