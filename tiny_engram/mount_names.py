"""Names of mounts, and what a choice of them means on a pipeline. Imports config and errors.

"span" is the residual on an encoder's last hidden state. "context.{i}.key" and "context.{i}.value" are residuals in what the key
and the value projection of the denoiser's i-th cross-attention read, counted in running order.
"""

from collections.abc import Sequence

from tiny_engram.config import SPAN
from tiny_engram.errors import TinyEngramError

__all__ = ["GROUPS", "choose_mounts", "describe_mounts"]

GROUPS = {"context": ("key", "value"), "key": ("key",), "value": ("value",)}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def choose_mounts(asked: Sequence[str], known: Sequence[str], *, role: str) -> tuple[str, ...]:
    """The mounts that a choice of names and groups means, each once, in the order of `known` (all that the pipeline has at a role).

    Raises:
        TinyEngramError: a name or a group that the pipeline has nothing for.
    """
    chosen: set[str] = set()
    for name in asked:
        found = {m for m in known if m == name or (m != SPAN and _last(m) in GROUPS.get(name, ()))}
        if not found:
            raise TinyEngramError(
                f"mount {name!r} is unknown at {role}; expected a group ({', '.join(GROUPS)}) or one of: {', '.join(known)}"
            )
        chosen |= found
    return tuple(m for m in known if m in chosen)


def describe_mounts(mounts: Sequence[str]) -> str:
    """In words, for one line: "span, 7 keys, 7 values"."""
    kinds = [m if m == SPAN else _last(m) for m in mounts]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(kind if kind == SPAN else f"{n} {kind}s" if n > 1 else f"1 {kind}" for kind, n in counts.items())
