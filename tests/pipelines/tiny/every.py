"""All tiny pipelines, and those that are tried at every run of the tests: one of each kind of encoder, denoiser and guidance."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.pipelines.tiny import flux, language, stable_diffusion, t5, videos, wan
from tests.pipelines.tiny.base import TinyPipeline

EVERY = (*stable_diffusion.PIPELINES, *flux.PIPELINES, *t5.PIPELINES, *wan.PIPELINES, *videos.VIDEOS, *language.LANGUAGE)
DEFAULT = ("stable-diffusion-1", "stable-diffusion-xl", "stable-diffusion-3", "flux:dev", "pixart:sigma", "wan:2.1")


def cases(tinies: Iterable[TinyPipeline] = EVERY, default: Collection[str] = DEFAULT) -> list[Any]:
    """Parameters of a test; those that are not in `default` are for `make test-families` alone."""
    return [pytest.param(tiny, id=tiny.name, marks=() if tiny.name in default else pytest.mark.families) for tiny in tinies]
