"""What a pipeline gives its denoiser, and where it differs from what another gives: told by bits and by decoding, not by our spans."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch

from tiny_engram.pipelines.family import Family

# Positions that these cut off in front of the states; all others give a state for each position of the ids.
CROPPED = {("qwen-image", "llm"): 34, ("hunyuan-video", "llm"): 95}


@torch.no_grad()
def embeds_of(family: Family, pipe: Any, prompt: Any, negative: Any = None, images: int = 1) -> dict[str, Any]:
    """All that encode_prompt gives, by name."""
    texts, negatives = (text if text is None or isinstance(text, list) else [text] for text in (prompt, negative))
    return dict(family.embeds(pipe, texts, negatives, images))


def negatives(embeds: Mapping[str, Any]) -> dict[str, Any]:
    """The negative half of embeds, under the names of the others."""
    return {name.removeprefix("negative_"): value for name, value in embeds.items() if name.startswith("negative_")}


def states_of(family: Family, pipe: Any, embeds: Mapping[str, Any], row: int = 0) -> dict[str, torch.Tensor]:
    """Each role's states `[time, width]` of one row, or vector `[width]`."""
    present = {spec.role for spec in family.encoders if getattr(pipe, spec.encoder, None) is not None}
    return {role: value[row] for role, value in family.states(pipe, embeds).items() if role in present}


def same(one: Any, other: Any) -> bool:
    """Bit equality of tensors, lists of them, and mappings."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other or one == other


def moved(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Positions whose bits differ."""
    assert one.shape == other.shape
    return (one != other).any(-1).nonzero().flatten().tolist()


@contextmanager
def heard(family: Family, pipe: Any) -> Iterator[dict[str, list[list[int]]]]:
    """Inside, the ids that each encoder is called with, row by row, by role."""
    found: dict[str, list[list[int]]] = {}

    def listen(role: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            found.setdefault(role, []).extend(ids.tolist())

        return hook

    encoders = {spec.role: getattr(pipe, spec.encoder) for spec in family.encoders}
    handles = [e.register_forward_pre_hook(listen(role), with_kwargs=True) for role, e in encoders.items() if e is not None]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def texts_at(family: Family, role: str, tokenizer: Any, ids: Sequence[int], states: torch.Tensor, positions: Sequence[int]) -> list[str]:
    """What the tokens at these positions of the states say: one text for each run of adjoining ones, in lower case."""
    if family.name == "sana":
        # the begin token, then the last ones
        cut = len(ids) - len(states)
        at = [p + cut if p else 0 for p in positions]
    else:
        at = [p + CROPPED.get((family.name, role), 0) for p in positions]
    runs: list[list[int]] = []
    for k in at:
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    # older releases leave CLIP's mark of a word's end where special tokens are kept apart
    return [tokenizer.decode([ids[k] for k in run]).replace("</w>", " ").strip().lower() for run in runs]


@contextmanager
def given(family: Family, denoisers: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
    """Inside, what each call of the denoisers is given of the text: embeds' name -> tensor, or list of them."""
    calls: list[dict[str, Any]] = []
    names = family.given or {"encoder_hidden_states": "prompt_embeds"}

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature(module.forward).bind(*args, **kwargs).arguments
        calls.append({embeds: bound[parameter] for parameter, embeds in names.items()})

    handles = [denoiser.register_forward_pre_hook(hook, with_kwargs=True) for denoiser in denoisers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
