"""Hashes of token sequences, equal for a trigger in an index and for the window of a prompt that holds it. Imports numpy."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["hash_sequences", "hash_windows", "salt_of"]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.uint64(0xBF58476D1CE4E5B9)


def salt_of(role: str, fingerprint: str) -> np.uint64:
    """Where the hash of a sequence of this encoder's tokenizer starts."""
    name = f"{role}\0{fingerprint}".encode(errors="backslashreplace")
    return np.uint64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))


def _mixed(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    x = (ids.astype(np.uint64) + np.uint64(1)) * _SPREAD
    return x ^ (x >> np.uint64(31))


def _longer(hashes: NDArray[np.uint64], mixed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One token more, on the right."""
    x = (hashes ^ mixed) * _FACTOR
    return x ^ (x >> np.uint64(29))


def hash_windows(ids: NDArray[np.int64], lengths: Iterable[int], salt: np.uint64) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """(length, uint64 `[batch, time - length + 1]`) for each of these lengths that fits: the hash of the window that starts there."""
    mixed, wanted = _mixed(ids), {length for length in lengths if 0 < length <= ids.shape[1]}
    hashes = np.full(ids.shape, salt, dtype=np.uint64)
    for length in range(1, max(wanted, default=0) + 1):
        count = ids.shape[1] - length + 1
        hashes = _longer(hashes[:, :count], mixed[:, length - 1 :])
        if length in wanted:
            yield length, hashes


def hash_sequences(sequences: Sequence[tuple[int, ...]], salts: Sequence[np.uint64]) -> NDArray[np.uint64]:
    """uint64 `[sequences]`, each from its salt."""
    out = np.zeros(len(sequences), dtype=np.uint64)
    by_length: dict[int, list[int]] = {}
    for k, ids in enumerate(sequences):
        by_length.setdefault(len(ids), []).append(k)
    for members in by_length.values():
        mixed = _mixed(np.array([sequences[k] for k in members], dtype=np.int64))
        hashes = np.array([salts[k] for k in members], dtype=np.uint64)
        for column in mixed.T:
            hashes = _longer(hashes, column)
        out[members] = hashes
    return out
