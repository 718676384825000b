"""What a library's index says of one concept. Imports concept, config and errors."""

from dataclasses import dataclass

from tiny_engram.concept import Concept
from tiny_engram.config import at_encoder
from tiny_engram.errors import TinyEngramError

__all__ = ["Kind", "LibraryEntry", "LibraryError", "Record"]


class LibraryError(TinyEngramError):
    """A file that is no sound library, or a change that it cannot take; one line with its path."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a concept was made for: the base's short id; by role the width and the tokenizer's fingerprint; has it rows or maps at the
    denoiser?"""

    base: str
    roles: tuple[tuple[str, int, str], ...]
    denoiser: bool

    @classmethod
    def of(cls, concept: Concept) -> "Kind":
        """That of a concept."""
        places = concept.roles.items()
        roles = sorted((role, place.width, place.fingerprint) for role, place in places)
        inside = any(place.maps or not all(map(at_encoder, place.mounts)) for _, place in places)
        return cls(concept.base, tuple(roles), inside)


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """One concept of a library.

    `name` is its name there, `nbytes` the length of its file, `offset` where in the library that begins, `digest` the SHA-256 of it.
    """

    name: str
    trigger: str
    kind: Kind
    nbytes: int
    offset: int
    digest: bytes

    @property
    def base(self) -> str:
        """Short id of the base that it was made on; empty where the file names none."""
        return self.kind.base


@dataclass(frozen=True, slots=True)
class Record:
    """An entry that is to be added, and its token sequences: (role, tokenizer's fingerprint, ids) each."""

    entry: LibraryEntry
    sequences: tuple[tuple[str, str, tuple[int, ...]], ...]
