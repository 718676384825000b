"""Suffix n-grams -> table rows (multiplicative-XOR hash, one prime per head). Imports torch only."""

import torch

from ..backend import implementation_for
from .reference import ngram_hash_reference

__all__ = ["ngram_hash"]

ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def ngram_hash(
    canonical: torch.Tensor,
    *,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    pad_id: int,
    blocked: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    history_blocked: torch.Tensor | None = None,
    salt: torch.Tensor | None = None,
) -> torch.Tensor:
    """Absolute row ids of the suffix n-grams (sizes 2..n) that end at each position.

    Args:
        canonical: ``[..., T]`` canonical token ids of any integer type, signed or uint8; T may be 0 or below n.
        multipliers: int64 ``[n]``, odd, so small that ``id * multiplier`` stays below 2**63.
        primes: int64 ``[n - 1, heads]``, one modulus in [2, 2**62) per (n-gram size, head).
        pad_id: canonical id that stands for everything that cannot be looked at.
        blocked: bool ``[..., T]``; a blocked position and all older ones are pad, for itself and for later positions.
        history: ``[..., n - 1]`` canonical ids before the sequence, oldest first, of any such type; without it they are blocked.
        history_blocked: bool ``[..., n - 1]``; needs ``history``.
        salt: int64 ``[..., T]`` in [0, 2**63), start of the running XOR; None and 0 are the published rule.

    Returns:
        int64 ``[..., T, (n - 1) * heads]``, columns ordered by (n-gram size, head), column offset added.

    Raises:
        ValueError: a shape, a type or a device does not fit.

    Source: Engram (arXiv 2601.07372), hashing of suffix n-grams; the blocking rule is that of DeepSeek V4.1.
    """
    order = multipliers.shape[0]
    if multipliers.ndim != 1 or order < 2 or primes.ndim != 2 or primes.shape[0] != order - 1:
        raise ValueError(f"multipliers {list(multipliers.shape)} and primes {list(primes.shape)}: expected [n] and [n - 1, heads], n >= 2")
    if history_blocked is not None and history is None:
        raise ValueError("history_blocked was given without history: pass both, or neither")
    if history is not None and history.shape[-1] != order - 1:
        raise ValueError(f"history holds {history.shape[-1]} ids: expected n - 1 = {order - 1}")
    for name, tensor in {"canonical": canonical, "history": history}.items():
        if tensor is not None and tensor.dtype not in ID_TYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}: expected an integer type, torch.int64 to torch.uint8")
    for name, tensor in {"multipliers": multipliers, "primes": primes, "salt": salt}.items():
        if tensor is not None and tensor.dtype != torch.int64:
            raise ValueError(f"{name} has dtype {tensor.dtype}: expected torch.int64")
    for name, tensor in {"blocked": blocked, "history_blocked": history_blocked}.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise ValueError(f"{name} has dtype {tensor.dtype}: expected torch.bool")
    for tensor in (multipliers, primes, blocked, history, history_blocked, salt):
        if tensor is not None and tensor.device != canonical.device:
            raise ValueError(f"canonical is on {canonical.device}, another argument on {tensor.device}: expected one device")
    direct = type(canonical) is torch.Tensor and not canonical.is_meta and not torch.compiler.is_compiling()
    return (_rows if direct else _op)(canonical, multipliers, primes, pad_id, blocked, history, history_blocked, salt)


def _rows(
    canonical: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    pad_id: int,
    blocked: torch.Tensor | None,
    history: torch.Tensor | None,
    history_blocked: torch.Tensor | None,
    salt: torch.Tensor | None,
) -> torch.Tensor:
    """The rows, by the implementation for these ids."""
    if implementation_for(canonical) == "reference":
        return ngram_hash_reference(canonical, multipliers, primes, pad_id, blocked, history, history_blocked, salt)
    from .fused import launch

    out = torch.empty((*canonical.shape, primes.numel()), dtype=torch.int64, device=canonical.device)
    launch(canonical, multipliers, primes, pad_id, blocked, history, history_blocked, salt, out)
    return out


_op = torch.library.custom_op("tiny_engram::ngram_hash", _rows, mutates_args=())


@_op.register_fake
def _(canonical, multipliers, primes, pad_id, blocked, history, history_blocked, salt):
    return canonical.new_empty((*canonical.shape, primes.numel()), dtype=torch.int64)
