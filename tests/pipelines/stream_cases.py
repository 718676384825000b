"""What the tests of context mounts in transformer denoisers share: where each family's text stands, told without the code under test."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.pipelines.tiny.base import TinyPipeline
from tests.pipelines.tiny.every import EVERY
from tiny_engram.residual import Spans, apply_concept

# SD 1.x and 2.x have tests of their own; Kontext is FLUX with a picture.
STREAMS = {e.name: e for e in EVERY if e.family not in ("stable-diffusion-1", "stable-diffusion-2", "stable-diffusion-xl")}
TRIGGER, PROMPT, PLAIN = "vortex cat", "a photo of a vortex cat on a table", "a photo of an old cat on a table"

# Position in what a place reads of the state that the encoder gave at p. `x` is what it reads; `single`: one sequence of text and picture.
Place = Callable[[str, int, torch.Tensor, bool], int]


def _z_image(role: str, p: int, x: torch.Tensor, single: bool) -> int:
    return x.shape[1] - 32 + p if single else p  # a text of up to 32 tokens, behind the picture


PLACES: dict[str, Place] = {
    "stable-diffusion-3": lambda role, p, x, single: p + 77 if role == "t5" else p,
    "auraflow": lambda role, p, x, single: p + 8,
    "hunyuandit": lambda role, p, x, single: p + 77 if role == "t5" else p,
    "sana": lambda role, p, x, single: p,  # the encoder's position counts from the crop, see `noted`
    "qwen-image": lambda role, p, x, single: p - 34,
    "hunyuan-video": lambda role, p, x, single: p - 95 + (x.shape[1] - 256 if single else 0),
    "z-image": _z_image,
}
# Guidance of these is a call of its own, after the one with the prompt; of Z-Image's one call the prompt is the first row.
TWO_CALLS = ("flux", "chroma", "wan", "qwen-image", "hunyuan-video", "flux-2", "flux-2-klein", "lumina-2")
TRUE_GUIDANCE = {"flux": 2.0, "qwen-image": 2.0, "hunyuan-video": 2.0}


def place_of(tiny: TinyPipeline) -> Place:
    return PLACES.get(tiny.family, lambda role, p, x, single: p)


@contextmanager
def reads(adapter: Any):
    """What each projection reads, before all hooks and after them: name of the hook -> [(before, after), ...], call by call."""
    hooks = {name: hook for name, hook in next(iter(adapter.contexts.values())).hooks.items() if "context." in name}
    seen: dict[str, list[Any]] = {name: [] for name in hooks}
    handles = []
    for name, hook in hooks.items():
        handles += [
            hook.module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append([args[0].clone()]), prepend=True),
            hook.module.register_forward_pre_hook(lambda _, args, name=name: seen[name][-1].append(args[0].clone())),
        ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def spans_of(adapter: Any, concept: Any, prompt: str, tiny: TinyPipeline) -> dict[str, list[tuple[int, int, int]]]:
    """(start, length, offset) of the trigger in the ids that each role's encoder is given for a prompt."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    handles, ids = [], {}

    def keep(role: str):
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids.setdefault(role, kwargs.get("input_ids", args[0] if args else None))

        return hook

    for role, mount in adapter.mounts.items():
        if role in concept.roles:
            handles.append(mount.module.register_forward_pre_hook(keep(role), with_kwargs=True))
    adapter.embeds(prompt)
    for handle in handles:
        handle.remove()
    for role, each in ids.items():
        spans = adapter.spans(concept, each.reshape(-1, each.shape[-1])[:1], role)
        found[role] = list(zip(spans.start.tolist(), spans.length.tolist(), spans.offset.tolist(), strict=True))
        if tiny.family == "sana":
            crop = each.shape[-1] - 300
            found[role] = [(start - crop, size, offset) for start, size, offset in found[role]]
    return found


def expected(
    adapter: Any, concept: Any, name: str, before: torch.Tensor, row: int, spans: Any, where: Place, strength: float = 1.0, band: str = ""
) -> torch.Tensor:
    """What a place should read: the rows of each role that has some there, at the trigger, in the order of the roles. With a band such as
    ".1of4" those that its block shares in it."""
    place = name.rpartition("/")[2]
    block = _block_of(adapter, place)
    single, after = "single" in block, before
    mount = f"context.{block}.{place.rpartition('.')[2]}{band}" if band else place
    for role, found in spans.items():
        mounts = concept.roles[role].mounts
        if mount in mounts:
            rows = mounts[mount]
            at = Spans.of((row, where(role, start, before, single), size, offset) for start, size, offset in found)
            after = apply_concept(after, at, rows.rows(), rows.gain, rows.bias, rho=rows.rho, strength=strength)
    return after


def _block_of(adapter: Any, place: str) -> str:
    denoiser = next(iter(adapter.family.present(adapter.pipe).values()))
    return adapter.family.attentions(denoiser, "")[int(place.split(".")[1])].block
