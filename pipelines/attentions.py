"""The attentions of transformer denoisers that read text states, in running order: one function (denoiser, role) for each way of building
them. They are the same for every role of a pipeline.

Transformers have no blocks of layers that differ, as a UNet's scales do: equal layers are counted in four parts, "part0" to "part3" for
cross-attentions, "joint0" and so on for those of text and picture with projections of their own, "single0" and so on for those over one
sequence of both.
"""

from collections.abc import Sequence
from typing import Any

from tiny_engram.pipelines.family import Attention

__all__ = [
    "auraflow",
    "cogvideox",
    "flux",
    "hunyuan_dit",
    "hunyuan_video",
    "joint_blocks",
    "lumina",
    "masked_across_transformer_blocks",
    "sana",
    "wan",
    "z_image",
]

PARTS = 4
PADDED = 32  # Z-Image fills texts up to a multiple of it


def _named(kind: str, layers: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each layer with the name of its part."""
    return [(f"{kind}{i * PARTS // len(layers)}", layer) for i, layer in enumerate(layers)]


def _across(layers: Sequence[Any], **options: Any) -> tuple[Attention, ...]:
    """Cross-attentions that lie beside the picture's own ones."""
    return tuple(Attention(layer.attn2, part, layer, **options) for part, layer in _named("part", layers))


def _joint(layers: Sequence[Any], **options: Any) -> tuple[Attention, ...]:
    """Joint attentions with projections of their own for text."""
    return tuple(
        Attention(layer.attn, part, key="add_k_proj", value="add_v_proj", joint=True, **options) for part, layer in _named("joint", layers)
    )


def _single(layers: Sequence[Any], attribute: str = "attn", **options: Any) -> tuple[Attention, ...]:
    """Attentions over text and picture in one sequence."""
    return tuple(Attention(getattr(layer, attribute), part, joint=True, **options) for part, layer in _named("single", layers))


def masked_across_transformer_blocks(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """PixArt and LTX: what lies behind the text is masked out."""
    return _across(denoiser.transformer_blocks, masked=True)


def sana(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """Its feed-forward layers are convolutions over the picture."""
    return _across([layer for layer in denoiser.transformer_blocks if layer.attn2 is not None], masked=True, feed=None)


def wan(denoiser: Any, role: str) -> tuple[Attention, ...]:
    return _across(denoiser.blocks, feed="ffn")


def hunyuan_dit(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """Its queries are turned by their places behind the norm, so there are no maps."""
    return _across(denoiser.blocks, mapped=False)


def joint_blocks(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """Stable Diffusion 3, Qwen-Image, and FLUX.2, whose single blocks have one projection for all."""
    return _joint(denoiser.transformer_blocks)


def flux(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """FLUX.1 and Chroma: the text comes first in single blocks."""
    return (*_joint(denoiser.transformer_blocks), *_single(denoiser.single_transformer_blocks))


def auraflow(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """Learned registers stand in front of the text."""
    ahead = denoiser.register_tokens.shape[1]
    joint, single = denoiser.joint_transformer_blocks, denoiser.single_transformer_blocks
    return (*_joint(joint, offset=ahead), *_single(single, offset=ahead))


def hunyuan_video(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """The text comes last in single blocks."""
    return (*_joint(denoiser.transformer_blocks), *_single(denoiser.single_transformer_blocks, tail=max))


def cogvideox(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """The text comes first."""
    return _single(denoiser.transformer_blocks, "attn1")


def _padded(lengths: Sequence[int]) -> int:
    return -(-max(lengths) // PADDED) * PADDED


def z_image(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """Layers that read the text alone, then those in which it stands behind the picture."""
    refiner = tuple(Attention(layer.attention, "refiner", joint=True) for layer in denoiser.context_refiner)
    return (*refiner, *_single(denoiser.layers, "attention", tail=_padded))


def lumina(denoiser: Any, role: str) -> tuple[Attention, ...]:
    """Layers that read the text alone, then those in which it stands in front of the picture."""
    refiner = tuple(Attention(layer.attn, "refiner", joint=True) for layer in denoiser.context_refiner)
    return (*refiner, *_single(denoiser.layers))
