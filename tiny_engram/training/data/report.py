"""What a scan found, in numbers and in words, and what is probably a mistake. Imports the neighbours scan and buckets, and wording."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tiny_engram.training.data.buckets import bucket_of, bucket_sizes
from tiny_engram.training.data.scan import Scan
from tiny_engram.wording import counted

__all__ = ["ScanReport", "report"]

# Of the resolution: a picture whose shorter side is less is drawn up to more than twice its size, which blurs it.
SMALL = 0.5
# Mean opacity of a picture of which a person sees next to nothing.
CLEAR = 0.02
MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReport:
    """Of one scan; sizes and buckets are "WIDTHxHEIGHT" with how many pictures each.

    Attributes:
        pictures: that can be used. samples: the same, each as often as its repeats say. captions: distinct ones. captioned: pictures with
            captions of their own. masked: with a mask.
        bad: a line for each that was left out. ignored: files that are neither pictures nor say something of one.
        buckets: empty where no resolution was given. small: names of pictures much smaller than the resolution.
        clear: names of those that are transparent nearly everywhere. duplicates: names of pictures with equal pixels, a group each.
    """

    pictures: int
    samples: int
    captions: int
    captioned: int
    masked: int
    bad: tuple[str, ...]
    ignored: int
    sizes: dict[str, int]
    buckets: dict[str, int]
    small: tuple[str, ...]
    clear: tuple[str, ...]
    duplicates: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Of JSON's types."""
        return dataclasses.asdict(self)

    @property
    def warnings(self) -> list[str]:
        """A line for each thing that is probably a mistake."""
        lines = []
        if self.small:
            lines.append(f"much smaller than the resolution, so that they will be blurred: {_named(self.small)}")
        if self.clear:
            lines.append(f"transparent nearly everywhere, so that hardly more than white is seen: {_named(self.clear)}")
        for names in self.duplicates:
            lines.append(f"the same picture {len(names)} times: {_named(names)}")
        return lines

    def __str__(self) -> str:
        first = [counted(self.pictures, "picture"), f"{self.captioned} with captions of their own", f"{self.masked} with masks"]
        first += [counted(self.samples, "sample") + " with repeats"] if self.samples != self.pictures else []
        lines = [", ".join(first), f"{counted(self.captions, 'distinct caption')}, {counted(self.ignored, 'other file')} left alone"]
        lines += [f"sizes {_listed(self.sizes)}"]
        lines += [f"buckets {_listed(self.buckets)}"] if self.buckets else []
        return "\n".join([*lines, *(f"left out: {line}" for line in self.bad), *(f"warning: {line}" for line in self.warnings)])


def _named(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size}: {count}" for size, count in sizes.items())


def _counts(sizes: list[tuple[int, int]]) -> dict[str, int]:
    return {f"{width}x{height}": count for (width, height), count in sorted(Counter(sizes).items())}


def report(scan: Scan, resolution: int | None = None, *, bucket_step: int | None = None, upscale: bool = True) -> ScanReport:
    """What a scan says of its pictures.

    Args:
        resolution: in pixels; None leaves out what depends on it. bucket_step: in pixels; None for squares of that side.
        upscale: may a picture be drawn up to its bucket's size?
    """
    sizes = [one.size for one in scan.seen]
    buckets: list[tuple[int, int]] = []
    if resolution is not None and bucket_step is not None:
        every = bucket_sizes(resolution, bucket_step)
        buckets = [bucket_of(size, every, step=bucket_step, upscale=upscale) for size in sizes]
    elif resolution is not None:
        buckets = [(resolution, resolution)] * len(sizes)
    same: dict[str, list[str]] = {}
    for one in scan.seen:
        same.setdefault(one.digest, []).append(one.name)
    return ScanReport(
        pictures=len(scan.examples),
        samples=sum(example.repeats for example in scan.examples),
        captions=len({caption for example in scan.examples for caption in example.captions}),
        captioned=sum(one.captioned for one in scan.seen),
        masked=sum(one.masked for one in scan.seen),
        bad=scan.skipped,
        ignored=scan.others,
        sizes=_counts(sizes),
        buckets=_counts(buckets),
        small=tuple(one.name for one in scan.seen if resolution is not None and min(one.size) < SMALL * resolution),
        clear=tuple(one.name for one in scan.seen if one.opacity < CLEAR),
        duplicates=tuple(tuple(names) for names in same.values() if len(names) > 1),
    )
