"""How a table lies in a pool: keys, the manifest, and rows that carry a check of their own. Imports torch and tiny_engram.errors.

A table is cut into objects of ``rows_per_object`` rows (the last is shorter), key ``NAME/DIGEST16/part-000123``, DIGEST16 being the
first 16 hex digits of the digest. ``NAME/DIGEST16/manifest`` is written after all of them, ``NAME/current`` (the digest) after that.
A stored row is the record (264 bytes for 256 values), zeros up to a multiple of 8, and a 64-bit check: a sum, modulo 2^64, of the row's
words and its id, each times an odd number drawn from the table's digest. The engine reads by address, and a reader may hold one that its
store has since given to something else; the check tells such bytes from the row that was asked for, also another version's row of
that id and the zeros of fresh memory.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Self

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import BLOCK

__all__ = ["OBJECT_BYTES", "Manifest", "RowCheck", "check_name", "current_key"]

FORMAT_VERSION = 1
OBJECT_BYTES = 16 << 20  # small enough to spread over stores, large enough that a table of 94 GiB is 6,200 objects
_WORD = 8


def check_name(name: str) -> str:
    """A table's name, as it stands in keys. Raises TableError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise TableError(f"pool name {name!r}: expected 1 to 100 letters, digits, '.', '_' or '-', a letter or digit first")
    return name


def current_key(name: str) -> str:
    """Where the digest of the version that new readers attach to stands."""
    return f"{name}/current"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published table is."""

    name: str
    rows: int
    head_dim: int
    rows_per_object: int
    digest: str  # of the table, as `tiny-engram table inspect` prints it
    row_bytes: int  # as stored, the check included
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check_name(self.name)
        numbers = (self.rows, self.head_dim, self.rows_per_object, self.row_bytes, self.version)
        if any(type(number) is not int for number in numbers):
            raise TableError(f"pool manifest {asdict(self)}: expected whole numbers; publish the table again")
        if self.version != FORMAT_VERSION:
            raise TableError(f"pool manifest of version {self.version}: expected {FORMAT_VERSION}; publish with this release")
        right = self.rows > 0 and self.rows_per_object > 0 and self.head_dim > 0 and self.head_dim % BLOCK == 0
        if not right or self.row_bytes != stored_row_bytes(self.head_dim) or not re.fullmatch("[0-9a-f]{64}", str(self.digest)):
            raise TableError(f"pool manifest {asdict(self)} makes no sense; publish the table again")

    @classmethod
    def of(cls, name: str, rows: int, head_dim: int, digest: str, object_bytes: int = OBJECT_BYTES) -> Self:
        """The manifest of a table that is about to be published."""
        row_bytes = stored_row_bytes(head_dim)
        per_object = max(1, object_bytes // row_bytes)
        return cls(name=name, rows=rows, head_dim=head_dim, rows_per_object=per_object, digest=digest, row_bytes=row_bytes)

    @classmethod
    def decode(cls, blob: bytes) -> Self:
        """Read what :meth:`encode` made; raises TableError."""
        try:
            return cls(**json.loads(blob))
        except (ValueError, TypeError) as error:
            if isinstance(error, TableError):
                raise
            raise TableError(f"pool manifest cannot be read ({error}): publish the table again") from error

    def encode(self) -> bytes:
        """JSON, always the same bytes."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def prefix(self) -> str:
        """What the keys of this version begin with."""
        return f"{self.name}/{self.digest[:16]}"

    @property
    def key(self) -> str:
        """The manifest's own key."""
        return f"{self.prefix}/manifest"

    @property
    def objects(self) -> int:
        """How many objects hold rows."""
        return -(-self.rows // self.rows_per_object)

    def object_rows(self, index: int) -> int:
        """Rows in one object."""
        return min(self.rows_per_object, self.rows - index * self.rows_per_object)


def stored_row_bytes(head_dim: int) -> int:
    """Record, padding and check."""
    return -(-(head_dim + head_dim // BLOCK) // _WORD) * _WORD + _WORD


class RowCheck:
    """Makes stored rows of one version of a table, and tells whether bytes are the rows asked for."""

    def __init__(self, digest: str, head_dim: int):
        self._head_dim = head_dim
        self._row_bytes = stored_row_bytes(head_dim)
        words = self._row_bytes // _WORD
        drawn = (hashlib.sha256(f"{digest} {word}".encode()).digest()[:_WORD] for word in range(words))
        # Odd: then a change of any one word changes the sum.
        factors = [int.from_bytes(number, "little", signed=True) | 1 for number in drawn]
        self._factors = torch.tensor(factors[:-1], dtype=torch.int64)
        self._id_factor = factors[-1]

    def store(self, first_row: int, payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """uint8 ``[count, row_bytes]`` on the CPU, for payload e4m3 ``[count, D]``, scale uint8 ``[count, D / 32]``."""
        count = payload.shape[0]
        stored = torch.zeros((count, self._row_bytes), dtype=torch.uint8)
        stored[:, : self._head_dim] = payload.view(torch.uint8).cpu()
        stored[:, self._head_dim : self._head_dim + scale.shape[1]] = scale.cpu()
        words = stored.view(torch.int64)
        words[:, -1] = self._sums(words, torch.arange(first_row, first_row + count))
        return stored

    def wrong(self, stored: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
        """bool ``[count]``: which of these bytes (uint8 ``[count, row_bytes]``) are not the row of that id (int64 ``[count]``)."""
        words = stored.view(torch.int64)
        return words[:, -1] != self._sums(words, row_ids)

    def views(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload e4m3 ``[count, D]`` and scale uint8 ``[count, D / 32]`` in place."""
        width = self._head_dim
        return stored[:, :width].view(torch.float8_e4m3fn), stored[:, width : width + width // BLOCK]

    def _sums(self, words: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
        # Plus one, so that zeros are not a row of any id.
        return (words[:, :-1] * self._factors).sum(-1) + (row_ids + 1) * self._id_factor
