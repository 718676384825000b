"""Sizes of about equal area, so that a picture keeps its shape, and which size each picture takes. Imports the standard library."""

import math
from collections.abc import Sequence

__all__ = ["MOST_ASPECT", "bucket_of", "bucket_sizes"]

# Pictures that are longer than this lose their ends: bases were taught with none.
MOST_ASPECT = 3.0


def bucket_sizes(resolution: int, step: int) -> tuple[tuple[int, int], ...]:
    """(width, height) of every bucket, narrow to wide: both in whole `step`s, about `resolution` squared pixels, at most 3 to 1."""
    area = resolution * resolution
    square = max(1, round(resolution / step)) * step
    sizes = {(square, square)}
    for short in range(step, square + 1, step):
        long = max(1, round(area / short / step)) * step
        if max(short, long) <= MOST_ASPECT * min(short, long):
            sizes |= {(short, long), (long, short)}
    return tuple(sorted(sizes, key=lambda size: (size[0] / size[1], size)))


def bucket_of(size: tuple[int, int], sizes: Sequence[tuple[int, int]], *, step: int, upscale: bool = True) -> tuple[int, int]:
    """The bucket whose shape is nearest to a picture of `size` (width, height).

    Without `upscale` a picture that does not cover its bucket takes one of its own size, rounded down to whole steps, one at least.
    """
    width, height = size
    best = min(sizes, key=lambda each: (abs(math.log(each[0] / each[1] * height / width)), each))
    if upscale or (width >= best[0] and height >= best[1]):
        return best
    # no more of it than the bucket holds: one side may be longer
    return min(best[0], max(1, width // step) * step), min(best[1], max(1, height // step) * step)
