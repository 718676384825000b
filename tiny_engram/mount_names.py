"""Names of mounts and maps, and what a choice of them means on a pipeline. Imports config and errors.

"span" is the residual on an encoder's last hidden state, "input" the one on its token embeddings. "context.{i}.key" and
"context.{i}.value" are residuals in what the key and the value projection of the denoiser's i-th cross-attention read, counted in
running order; "context.{block}.key" in what those of all cross-attentions of a block read. Such a name may end in a band,
".1of2": then its rows are read in that share of the scheduler's timesteps alone, of which the first begins at timestep 0.

"deep.{i}" is the residual in what the encoder's i-th layer reads, "pooled" the one on its pooled vector, where that is all that is used.

"attention.{i}" and "feedforward.{i}" are maps at the i-th cross-attention; a map is no mount, it has no rows.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tiny_engram.config import DEEP, INPUT, MOST_BANDS, POOLED, SPAN
from tiny_engram.errors import TinyEngramError

__all__ = [
    "GROUPS",
    "SITES",
    "ContextName",
    "band_at",
    "choose_maps",
    "choose_mounts",
    "context_name",
    "describe_maps",
    "describe_mounts",
    "every_mount",
    "find_mounts",
    "map_name",
    "mounts_in_words",
]

GROUPS = {"context": ("key", "value"), "key": ("key",), "value": ("value",)}
SITES = ("attention", "feedforward")
_CONTEXT = re.compile(r"context\.(0|[1-9]\d*|[a-z]+\d*)\.(key|value)(?:\.([1-9])of([1-9]))?")
_MAP = re.compile(rf"({'|'.join(SITES)})\.(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class ContextName:
    """A context mount's name, taken apart.

    `where` is the number of a cross-attention ("3") or a block ("up1"), `kind` "key" or "value", `band` one of 0..bands-1, counted from
    0 although the name counts from 1.
    """

    where: str
    kind: str
    band: int = 0
    bands: int = 1

    @property
    def shared(self) -> bool:
        """Is it one set of rows for a whole block?"""
        return not self.where.isdigit()

    def __str__(self) -> str:
        return f"context.{self.where}.{self.kind}" + (f".{self.band + 1}of{self.bands}" if self.bands > 1 else "")


def context_name(mount: str) -> ContextName | None:
    """A mount's name taken apart; None for any that is no context mount."""
    found = _CONTEXT.fullmatch(mount)
    if found is None:
        return None
    where, kind, band, bands = found.groups()
    if bands is None:
        return ContextName(where, kind)
    if not 1 <= int(band) <= int(bands) or not 2 <= int(bands) <= MOST_BANDS:
        return None
    return ContextName(where, kind, int(band) - 1, int(bands))


def map_name(name: str) -> tuple[str, int] | None:
    """Site and cross-attention of a map's name, ("attention", 3); None for any other name."""
    found = _MAP.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def band_at(timestep: float, bands: int, timesteps: int) -> int:
    """The band, 0..bands-1, in which a timestep of a scheduler with `timesteps` training steps lies."""
    return max(0, min(int(timestep * bands / timesteps), bands - 1))


def every_mount(contexts: Sequence[str] = (), blocks: Iterable[str] = (), *, layers: int = 0, pooled: bool = False) -> tuple[str, ...]:
    """All mounts of a role, in the order of their addresses: `contexts` are "context.{i}.key|value", `blocks` those they lie in, `layers`
    how many the encoder has, `pooled` whether its pooled vector is all that is used.

    A mount's place is part of where its rows lie, so that new kinds of mounts are appended, never put between.
    """
    shared = [str(ContextName(block, kind)) for block in blocks for kind in GROUPS["context"]]
    # Few bands first: addresses of a later mount take longer to find.
    banded = [
        str(replace(name, band=band, bands=bands))
        for bands in range(2, MOST_BANDS + 1)
        for mount in (*shared, *contexts)
        if (name := context_name(mount)) is not None
        for band in range(bands)
    ]
    return (POOLED if pooled else SPAN, *contexts, INPUT, *shared, *banded, *(f"{DEEP}.{i}" for i in range(layers)))


def mounts_in_words(known: Sequence[str]) -> str:
    """The mounts that a pipeline has, for one line: the first and the last of those that differ by a number; bands are said, not listed."""
    names = {m: context_name(m) for m in known}
    banded = [m for m, name in names.items() if name is not None and name.bands > 1]
    plain = [m for m in known if m not in set(banded)]
    runs = [list(run) for _, run in groupby(plain, lambda m: re.sub(r"\d+|key$|value$", "", m))]
    shown = [" to ".join(dict.fromkeys((run[0], run[-1]))) for run in runs]
    return ", ".join(shown) + (f", and each context in bands such as {banded[-1]}" if banded else "")


def choose_mounts(asked: Sequence[str], known: Sequence[str], *, role: str, share: str = "none", bands: int = 1) -> tuple[str, ...]:
    """The mounts that a choice of names and groups means, each once, in the order of `known` (all that the pipeline has at a role).

    Args:
        share, bands: what groups mean, as in `ConceptConfig`; names mean themselves.

    Raises:
        TinyEngramError: a name or a group that the pipeline has nothing for.
    """
    chosen: set[str] = set()
    for one in asked:
        found = find_mounts(one, known, share=share, bands=bands)
        if not found:
            raise TinyEngramError(
                f"mount {one!r} is unknown at {role}; expected a group ({', '.join((*GROUPS, DEEP))}) or one of: {mounts_in_words(known)}"
            )
        chosen |= found
    return tuple(m for m in known if m in chosen)


def find_mounts(one: str, known: Sequence[str], *, share: str = "none", bands: int = 1) -> set[str]:
    """The mounts that one name or group means; none if the pipeline has nothing for it. Arguments as in `choose_mounts`."""
    names = {mount: name for mount in known if (name := context_name(mount)) is not None} if one in GROUPS else {}
    found = {m for m, n in names.items() if n.kind in GROUPS[one] and n.shared == (share == "block") and n.bands == bands}
    return found | ({one} & set(known)) | (set(_early(known)) if one == DEEP else set())


def _early(known: Sequence[str]) -> list[str]:
    """The mount that "deep" means: a sixth of the way into the encoder, but behind its first layer where it has several."""
    inside = [m for m in known if m.partition(".")[0] == DEEP]
    return inside[max(1, len(inside) // 6) :][:1] or inside[:1]


def choose_maps(known: dict[str, int], *, attention: int, feedforward: int, role: str) -> dict[str, tuple[int, int]]:
    """(rank, channels) of each map that ranks mean, by name: `known` holds the channels of all maps that the pipeline has at a role.

    Raises:
        TinyEngramError: the pipeline has no such maps there, or too few channels for the ranks.
    """
    ranks = {site: rank for site, rank in zip(SITES, (attention, feedforward), strict=True) if rank}
    found: dict[str, tuple[int, int]] = {}
    for site, rank in ranks.items():
        mine = {name: channels for name, channels in known.items() if (parts := map_name(name)) is not None and parts[0] == site}
        if not mine:
            raise TinyEngramError(f"{site}_rank is {rank}, but this pipeline has no {site} maps at {role}; expected 0")
        for name, channels in mine.items():
            if rank * len(ranks) > channels:
                raise TinyEngramError(
                    f"{site}_rank is {rank}, but {name} of {role} has {channels} channels; expected at most {channels // len(ranks)}"
                )
            found[name] = (rank, channels)
    return {name: found[name] for name in known if name in found}


def describe_mounts(mounts: Sequence[str]) -> str:
    """In words, for one line: "span, 7 keys, 7 values", "input, 3 shared values in 2 bands"."""
    counts: dict[tuple[str, bool, int], set[str]] = {}
    for mount in mounts:
        name = context_name(mount)
        key = (mount, False, 1) if name is None else (name.kind, name.shared, name.bands)
        counts.setdefault(key, set()).add(mount if name is None else name.where)
    parts = []
    for (kind, shared, bands), places in counts.items():
        if kind not in GROUPS:
            parts.append(kind)
            continue
        words = f"{len(places)} {'shared ' if shared else ''}{kind}{'s' if len(places) > 1 else ''}"
        parts.append(words + (f" in {bands} bands" if bands > 1 else ""))
    return ", ".join(parts)


def describe_maps(maps: Sequence[str]) -> str:
    """In words, for one line: "7 attention maps, 7 feedforward maps"."""
    sites = [parts[0] for name in maps if (parts := map_name(name)) is not None]
    counts = {site: sites.count(site) for site in dict.fromkeys(sites)}
    return ", ".join(f"{n} {site} map{'s' if n > 1 else ''}" for site, n in counts.items())
