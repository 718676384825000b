"""Does a mount reach the tensor that the pipeline consumes? Asked at attach with a throw-away concept.

May import the layers below adapter.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tiny_engram.concept import Concept
from tiny_engram.config import INPUT, SPAN
from tiny_engram.hooks import MountError
from tiny_engram.mounts import EncoderMounts
from tiny_engram.triggers import compile_trigger

__all__ = ["probe"]

WORD, PROMPT = "cat", "a photo of a cat on a table"


def probe(pipe: Any, family: Any, mounts: Mapping[str, EncoderMounts]) -> None:
    """Encode one prompt without and with a concept on its word "cat" and compare what the denoiser would get.

    Each role is probed alone, and each of its mounts at the encoder. Leaves no trace: stores, call counts, modes and random state are
    as before.

    Raises:
        MountError: the consumed states do not move at the span, or move elsewhere; names the roles.
    """
    dead: list[str] = []
    for role, mount in mounts.items():
        training, calls, prompts, seconds = mount.module.training, mount.calls, mount.prompts, mount.seconds
        stores = {other: m.store for other, m in mounts.items()}
        on_fire, mount.on_fire = mount.on_fire, None
        moved: dict[str, tuple[torch.Tensor, int, int]] = {}
        try:
            mount.module.eval()
            for m in mounts.values():
                m.store = m.store.empty()
            with torch.no_grad():
                plain = family.states(pipe, family.embeds(pipe, [PROMPT]))[role].clone()
                for at in (name for name in (SPAN, INPUT) if name in mount.store.mounts):
                    mount.store = mount.store.empty()
                    start, length = _add_probe(mount, at)
                    moved[at] = family.states(pipe, family.embeds(pipe, [PROMPT]))[role], start, length
        finally:
            for other, store in stores.items():
                mounts[other].store = store
            mount.on_fire, mount.calls, mount.prompts, mount.seconds = on_fire, calls, prompts, seconds
            mount.module.train(training)
        for at, (states, start, length) in moved.items():
            changed = torch.nonzero((plain != states).flatten(2).any(-1)[0]).flatten().tolist()
            expected = list(range(start, start + length))
            if changed != expected:
                dead.append(f"{role if at == SPAN else f'{role} {at}'} (changed positions {changed}, expected {expected})")
    if dead:
        raise MountError(
            f"what {type(pipe).__name__} consumes does not follow the concepts at: {'; '.join(dead)}; "
            "is an encoder wrapped, compiled or replaced? attach to the plain pipeline first"
        )


def _add_probe(mount: EncoderMounts, at: str) -> tuple[int, int]:
    """Put the probe concept into the mount's (empty) store, with rows at `at`; returns where it must fire."""
    tokenizer = mount.tokenizer
    compiled = compile_trigger(WORD, tokenizer, compressed=mount.store.compressed)
    role = mount.role
    concept = Concept.new({role: compiled}, widths={role: mount.store.width}, fingerprints={role: ""}, mounts={role: (at,)})
    zero = concept.mount_rows(role, at)
    pattern = torch.cos(torch.arange(zero.payload.numel(), dtype=torch.float32) * 0.7).reshape(zero.payload.shape)
    rows = concept.with_rows(role, pattern, zero.gain, zero.bias, mount=at).mount_rows(role, at)
    mount.store.add("probe", compiled, {at: rows}, concept.config)
    ids = tokenizer([PROMPT], padding="max_length", max_length=tokenizer.model_max_length, truncation=True).input_ids
    matches = mount.store.index.match(ids)
    if len(matches) != 1:
        raise MountError(f"the tokenizer of role {mount.role!r} does not find {WORD!r} in {PROMPT!r}; is it the pipeline's own tokenizer?")
    return int(matches.start[0]), int(matches.length[0])
