"""Does a mount reach the tensor that the pipeline consumes? Asked at attach with a throw-away concept.

May import the layers below adapter.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tiny_engram.concept import Concept
from tiny_engram.config import SPAN
from tiny_engram.mounts import MountError, SpanMount
from tiny_engram.triggers import compile_trigger

__all__ = ["probe"]

WORD, PROMPT = "cat", "a photo of a cat on a table"


def probe(pipe: Any, family: Any, mounts: Mapping[str, SpanMount]) -> None:
    """Encode one prompt without and with a concept on its word "cat" and compare what the denoiser would get.

    Each role is probed alone. Leaves no trace: stores, call counts, modes and random state are as before.

    Raises:
        MountError: the consumed states do not move at the span, or move elsewhere; names the roles.
    """
    dead: list[str] = []
    for role, mount in mounts.items():
        training, calls, seconds = mount.module.training, mount.calls, mount.seconds
        stores = {other: m.store for other, m in mounts.items()}
        on_fire, mount.on_fire = mount.on_fire, None
        try:
            mount.module.eval()
            for m in mounts.values():
                m.store = m.store.empty()
            with torch.no_grad():
                plain = family.consumed(family.encode(pipe, [PROMPT], None, 1)[0])[role].clone()
                start, length = _add_probe(mount)
                moved = family.consumed(family.encode(pipe, [PROMPT], None, 1)[0])[role]
        finally:
            for other, store in stores.items():
                mounts[other].store = store
            mount.on_fire, mount.calls, mount.seconds = on_fire, calls, seconds
            mount.module.train(training)
        changed = torch.nonzero((plain != moved).flatten(2).any(-1)[0]).flatten().tolist()
        if changed != list(range(start, start + length)):
            dead.append(f"{role} (changed positions {changed}, expected {list(range(start, start + length))})")
    if dead:
        raise MountError(
            f"what {type(pipe).__name__} consumes does not follow the concepts at: {'; '.join(dead)}; "
            "is an encoder wrapped, compiled or replaced? attach to the plain pipeline first"
        )


def _add_probe(mount: SpanMount) -> tuple[int, int]:
    """Put the probe concept into the mount's (empty) store; returns where it must fire."""
    tokenizer = mount.tokenizer
    compiled = compile_trigger(WORD, tokenizer, compressed=mount.store.compressed)
    concept = Concept.new({mount.role: compiled}, widths={mount.role: mount.store.width}, fingerprints={mount.role: ""})
    zero = concept.mount_rows(mount.role)
    pattern = torch.cos(torch.arange(zero.payload.numel(), dtype=torch.float32) * 0.7).reshape(zero.payload.shape)
    rows = concept.with_rows(mount.role, pattern, zero.gain, zero.bias).mount_rows(mount.role)
    mount.store.add("probe", compiled, {SPAN: rows}, concept.config)
    ids = tokenizer([PROMPT], padding="max_length", max_length=tokenizer.model_max_length, truncation=True).input_ids
    matches = mount.store.index.match(ids)
    if len(matches) != 1:
        raise MountError(f"the tokenizer of role {mount.role!r} does not find {WORD!r} in {PROMPT!r}; is it the pipeline's own tokenizer?")
    return int(matches.start[0]), int(matches.length[0])
