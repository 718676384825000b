"""The published hash in plain torch: the value every other implementation must equal.

Source: Engram (arXiv 2601.07372), section on multi-head hashing of suffix n-grams; imports torch only.
"""

import torch


def ngram_hash_reference(
    canonical: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    pad_id: int,
    blocked: torch.Tensor | None,
    history: torch.Tensor | None,
    history_blocked: torch.Tensor | None,
    salt: torch.Tensor | None,
) -> torch.Tensor:
    """Hash every suffix n-gram; arguments and result as in :func:`ngram_hash`."""
    order = multipliers.shape[0]
    canonical = canonical.to(torch.int64)
    length = canonical.shape[-1]
    past_shape = (*canonical.shape[:-1], order - 1)
    past = canonical.new_full(past_shape, pad_id) if history is None else history.to(torch.int64).expand(past_shape)
    if history_blocked is not None:
        past_blocked = history_blocked.expand(past_shape)
    else:
        # Without a history the positions before the sequence do not exist, which is the same as blocked.
        past_blocked = torch.full(past_shape, history is None, dtype=torch.bool, device=canonical.device)
    now_blocked = torch.zeros_like(canonical, dtype=torch.bool) if blocked is None else blocked.expand_as(canonical)
    ids = torch.cat((past, canonical), dim=-1)
    stops = torch.cat((past_blocked, now_blocked), dim=-1)

    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
    running = torch.zeros_like(canonical) if salt is None else salt.expand_as(canonical)
    dead = torch.zeros_like(canonical, dtype=torch.bool)
    columns = []
    for back in range(order):
        start = order - 1 - back
        # Once one look-back is blocked every older one is pad too: an n-gram never reaches across a gap.
        dead = dead | stops[..., start : start + length]
        look_back = ids[..., start : start + length].masked_fill(dead, pad_id)
        running = running ^ (look_back * multipliers[back])
        if back:
            columns.append(running.unsqueeze(-1) % primes[back - 1] + offsets[back - 1])
    return torch.cat(columns, dim=-1)
