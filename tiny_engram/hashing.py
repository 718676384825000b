"""Primes, multipliers and the hasher of one layer or mount; the history that decoding keeps.

Imports numpy, torch, kernels and tiny_engram.{config,errors}. Source: Engram (arXiv 2601.07372), hashing of n-grams.
"""

from functools import lru_cache

import numpy as np
import torch

from tiny_engram.config import HashConfig
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.kernels.ngram_hash import ngram_hash

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_LAYER_STRIDE = 10007


def _is_prime(number: int) -> bool:
    """Miller-Rabin with witnesses that decide every number below 3.3e24."""
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=1 << 16)  # a large base asks for 10,000, in order: any fewer would all be found anew
def _next_prime(start: int) -> int:
    candidate = start
    while not _is_prime(candidate):
        candidate += 1
    return candidate


@lru_cache(maxsize=256)
def next_primes(start: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes that are ``start`` or more, ascending."""
    # One by one through a cache: each mount of a concept asks for the primes of the mounts before it too.
    found: list[int] = []
    candidate = max(start, 2)
    while len(found) < count:
        found.append(_next_prime(candidate))
        candidate = found[-1] + 1
    return tuple(found)


def layer_multipliers(seed: int, layer_id: int, n: int, compressed_vocab: int) -> torch.Tensor:
    """Odd multipliers int64 ``[n]`` of one layer, so small that ``id * multiplier`` stays below 2**63."""
    generator = np.random.default_rng(seed + _LAYER_STRIDE * layer_id)
    bound = max(1, (np.iinfo(np.int64).max // compressed_vocab) // 2)
    drawn = generator.integers(0, bound, size=n, dtype=np.int64)
    return torch.from_numpy(drawn * 2 + 1)


class NgramHasher:
    """Canonical ids -> row ids of one layer (or one mount of a concept).

    Attributes:
        multipliers: int64 ``[n]``; they depend on the layer's id.
        primes: int64 ``[n - 1, heads]``; they depend on the layer's place in ``config.layer_ids``.
        rows_total: rows of a dense table for this layer, the sum of its primes.
    """

    def __init__(self, config: HashConfig, layer_id: int):
        """Raises ConfigError when ``layer_id`` is not one of ``config.layer_ids``."""
        if layer_id not in config.layer_ids:
            raise ConfigError(f"layer_id is {layer_id!r}: expected one of {list(config.layer_ids)}")
        self.config = config
        self.layer_id = layer_id
        place = config.layer_ids.index(layer_id)
        # One ascending sequence over all layers: no two columns of the model share a modulus.
        primes = next_primes(config.vocab, (place + 1) * config.columns)[place * config.columns :]
        self.multipliers = layer_multipliers(config.seed, layer_id, config.max_ngram, config.compressed_vocab)
        self.primes = torch.tensor(primes, dtype=torch.int64).view(config.max_ngram - 1, config.heads)
        self.rows_total = sum(primes)
        self._constants = {self.primes.device: (self.multipliers, self.primes)}

    def rows(
        self,
        canonical: torch.Tensor,
        blocked: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
        history_blocked: torch.Tensor | None = None,
        salt: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Row ids int64 ``[..., T, columns]`` of canonical ids ``[..., T]``; arguments as in ``ngram_hash``."""
        if canonical.device not in self._constants:
            self._constants[canonical.device] = (
                self.multipliers.to(canonical.device),
                self.primes.to(canonical.device),
            )
        multipliers, primes = self._constants[canonical.device]
        return ngram_hash(
            canonical,
            multipliers=multipliers,
            primes=primes,
            pad_id=self.config.pad_id,
            blocked=blocked,
            history=history,
            history_blocked=history_blocked,
            salt=salt,
        )


class HashHistory:
    """The last n - 1 raw ids of each request, oldest first, between two calls of a decoder.

    Prefill commits its whole block, decoding one id at a time; verification of a draft reads ``ids`` and ``blocked``
    without committing, then commits the anchor and the accepted drafts only. A padding row accepts 0.

    Attributes:
        ids: int64 ``[requests, n - 1]``.
        blocked: bool ``[requests, n - 1]``; at first everything, since nothing came before.
    """

    def __init__(self, max_ngram: int, requests: int = 1):
        if max_ngram < 2 or requests < 0:
            raise ConfigError(f"max_ngram {max_ngram}, requests {requests}: expected 2 or more and 0 or more")
        self.ids = torch.zeros((requests, max_ngram - 1), dtype=torch.int64)
        self.blocked = torch.ones((requests, max_ngram - 1), dtype=torch.bool)

    def commit(self, block: torch.Tensor, accepted: torch.Tensor | int | None = None, blocked: torch.Tensor | None = None) -> None:
        """Append each request's first ``accepted`` ids.

        Args:
            block: int64 ``[requests, L]`` raw ids.
            accepted: int64 ``[requests]`` or one number for all, 0..L; None means L.
            blocked: bool ``[requests, L]``, ids that no later n-gram may read (image tokens, padding).

        Raises:
            TinyEngramError: another number of requests, or ``accepted`` outside 0..L; nothing is committed then.
        """
        requests, kept = self.ids.shape
        if block.ndim != 2 or block.shape[0] != requests:
            raise TinyEngramError(f"block is {list(block.shape)}: expected [requests, L] with {requests} requests")
        length = block.shape[1]
        count = torch.as_tensor(length if accepted is None else accepted, dtype=torch.int64).expand(requests)
        if requests and not 0 <= int(count.min()) <= int(count.max()) <= length:
            raise TinyEngramError(f"accepted is {count.tolist()}: expected 0..{length} for each request")
        stops = torch.zeros_like(block, dtype=torch.bool) if blocked is None else blocked
        keep = count.unsqueeze(1) + torch.arange(kept)
        self.ids = torch.cat((self.ids, block.to(torch.int64)), dim=1).gather(1, keep)
        self.blocked = torch.cat((self.blocked, stops), dim=1).gather(1, keep)

    def reset(self, requests: torch.Tensor | list[int]) -> None:
        """Forget what came before in these requests, for a slot that takes a new one."""
        self.blocked[requests] = True
