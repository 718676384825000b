"""What a LoRA of rank 8 and a concept weigh on bigger models, worked out from their published configurations.

Nothing is loaded: the layers that both touch follow from a handful of numbers in each model's config.json. Tests hold the
counts against the real modules, built on the meta device and given to peft. Imports the standard library only.

Taken to be so:
- LoRA, as diffusers' DreamBooth scripts target it: to_q, to_k, to_v and to_out.0 of every attention of a UNet; the same
  four and their context counterparts (add_q_proj, add_k_proj, add_v_proj, to_add_out) of every joint attention of SD3.5.
- A concept: a mount at the token embeddings or the output of each text encoder, and mounts where each attention reads the text's keys
  and values, for a trigger of four tokens in every tokenizer. Rows as tiny_engram/config.py sizes them: e4m3 values, one scale
  byte for 32, gain and bias in float32 for each position and mount. Maps have two factors a rank and place, of the width that
  the attention or the feed-forward layer reads, in the same form.
- SDXL joins both CLIP states by width, so a position there has two rows. SD3.5's blocks read one stream in which T5's
  tokens stand behind CLIP's, so a trigger has eight positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROW_VALUES = 64  # values in a head's rows: two n-gram sizes of 32
GATE_BYTES = 8  # gain and bias of one position at one mount
SPREAD = 7  # places that V-Engram takes in a transformer, first and last among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model as far as the two methods touch it.

    Attributes:
        linears: (inputs, outputs) of every layer that LoRA is put on.
        places: how often the denoiser's attentions read the text.
        sets: how many sets of rows a kind of context mount has where places share them: "none" one a place, "stack" one a
            transformer stack of a UNet and seven in SD3.5, "block" one for each block of a UNet with attentions and seven in
            SD3.5, "stage" down, middle and up, "width" one for each width of attention, "all" one.
        channels: that the attention reads of the picture, of each place.
        encoders: widths of the text encoders' outputs, which their span mounts see.
        read: widths of the rows that a trigger has at one place, over all its positions' encoders.
    """

    name: str
    source: str
    linears: tuple[tuple[int, int], ...]
    places: int
    channels: tuple[int, ...]
    sets: Mapping[str, int]
    encoders: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Payload:
    """Trainable numbers of one concept and its bytes as shipped, without headers."""

    values: int
    nbytes: int


def lora(shape: Shape, rank: int = 8) -> Payload:
    """Two factors a layer, in fp16."""
    values = sum(rank * (inputs + outputs) for inputs, outputs in shape.linears)
    return Payload(values, 2 * values)


def concept(
    shape: Shape,
    *,
    mounts: Sequence[str] = ("key", "value"),
    positions: int = 4,
    share: str = "none",
    held: float = 1.0,
    gate_shared: bool = False,
    ranks: Mapping[str, int] | None = None,
) -> Payload:
    """Rows, scales and gates of a concept.

    Args:
        mounts: "key" and "value" are at every place where the denoiser reads the text; any other ("span", "input", "layer-k") is
            one at each text encoder. Named twice, it has two sets of rows, for two bands of timesteps.
        positions: tokens of the trigger in each tokenizer.
        share: which places have rows in common, a name of the shape's `sets`.
        held: share of the rows that a width takes which are held; the rest are zero.
        gate_shared: one gate for all mounts of a position.
        ranks: of the maps at each place, by site.
    """
    widths: list[int] = []
    for mount in mounts:
        widths += shape.read * shape.sets[share] if mount in ("key", "value") else shape.encoders
    values = positions * sum(ROW_VALUES // 2 * round(2 * held * -(-width // ROW_VALUES)) for width in widths)
    gates = positions * (len(shape.read) if gate_shared else len(widths))
    values += 2 * sum((ranks or {}).values()) * sum(shape.channels)
    return Payload(values + 2 * gates, values + values // 32 + GATE_BYTES * gates)


def _stacks(config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """(width, transformer blocks) of each transformer stack of a UNet, in the order in which they run."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    depths = config["transformer_layers_per_block"]
    depths = [depths] * len(widths) if isinstance(depths, int) else list(depths)
    down, up = config["down_block_types"], config["up_block_types"]
    for kind, width, depth in zip(down, widths, depths, strict=True):
        yield from [(width, depth)] * (layers if kind.startswith("CrossAttn") else 0)
    yield widths[-1], depths[-1]
    for kind, width, depth in zip(up, reversed(widths), reversed(depths), strict=True):
        yield from [(width, depth)] * (layers + 1 if kind.startswith("CrossAttn") else 0)


def unet_shape(name: str, source: str, config: Mapping[str, Any], encoders: Sequence[int]) -> Shape:
    """The shape of a UNet2DConditionModel with this configuration, between text encoders of these widths."""
    text, stacks = config["cross_attention_dim"], list(_stacks(config))
    if sum(encoders) != text:
        raise ValueError(f"{name}: encoders of widths {list(encoders)} do not make the {text} that cross-attention reads")
    blocks = 1 + sum(kind.startswith("CrossAttn") for side in ("down", "up") for kind in config[f"{side}_block_types"])
    linears: list[tuple[int, int]] = []
    for width, depth in stacks:
        linears += ([(width, width)] * 6 + [(text, width)] * 2) * depth
    return Shape(
        name=name,
        source=source,
        linears=tuple(linears),
        places=(places := sum(depth for _, depth in stacks)),
        channels=tuple(width for width, depth in stacks for _ in range(depth)),
        sets={"none": places, "stack": len(stacks), "block": blocks, "stage": 3, "width": len({width for width, _ in stacks}), "all": 1},
        encoders=tuple(encoders),
        read=tuple(encoders),
    )


def sd3_shape(name: str, source: str, config: Mapping[str, Any], encoders: Sequence[int]) -> Shape:
    """The shape of an SD3Transformer2DModel with this configuration; its last block has no output for the text."""
    width, blocks = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    return Shape(
        name=name,
        source=source,
        linears=((width, width),) * (8 * blocks - 1),
        places=blocks,
        channels=(width,) * blocks,
        sets={"none": blocks, "stack": min(SPREAD, blocks), "block": min(SPREAD, blocks), "stage": 3, "width": 1, "all": 1},
        encoders=tuple(encoders),
        read=(width, width),  # one row for CLIP's position, one for T5's
    )


SD15 = {
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}
SDXL = {
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}
_SD35 = {"attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "in_channels": 16, "qk_norm": "rms_norm"}
_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "dual_attention_layers": tuple(range(13))}
_LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "dual_attention_layers": ()}
SD35_MEDIUM, SD35_LARGE = _SD35 | _MEDIUM, _SD35 | _LARGE
EMBEDDED = {
    "block_out_channels": (96, 192),
    "layers_per_block": 1,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 128,
    "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
}

SHAPES = (
    unet_shape("embedded base", "assets/bases/emoji-sd/unet/config.json", EMBEDDED, (128,)),
    unet_shape("SD1.5", "stable-diffusion-v1-5/stable-diffusion-v1-5, unet/config.json", SD15, (768,)),
    unet_shape("SDXL", "stabilityai/stable-diffusion-xl-base-1.0, unet/config.json", SDXL, (768, 1280)),
    sd3_shape("SD3.5 medium", "stabilityai/stable-diffusion-3.5-medium, transformer/config.json", SD35_MEDIUM, (768, 1280, 4096)),
    sd3_shape("SD3.5 large", "stabilityai/stable-diffusion-3.5-large, transformer/config.json", SD35_LARGE, (768, 1280, 4096)),
)
