"""What a concept holds at one encoder, as a file stores it: rows and gates of its mounts, and the factors of its maps.

May import config, quantization, triggers, mount_names and kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tiny_engram.config import BLOCK, ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.mount_names import SITES, map_name
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.triggers import RowGroup, Variant

__all__ = ["MapFactors", "MountRows", "RoleRows", "map_start", "untrained_maps"]


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True, slots=True)
class MountRows:
    """What a concept adds at one mount.

    payload float8_e4m3fn `[positions, columns, head_dim]`, scale uint8 `[positions, columns, head_dim / 32]`, gain and bias
    float32 `[positions]` (the gate: sigmoid(gain * ssqrt(dot) + bias)), rho the share of the span's mean norm.
    """

    payload: torch.Tensor
    scale: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor
    rho: float

    @classmethod
    def zeros(cls, positions: int, columns: int, config: ConceptConfig, rho: float) -> "MountRows":
        """Untrained: rows zero, gain 1, bias 0."""
        return cls.quantized(torch.zeros(positions, columns, config.head_dim), torch.ones(positions), torch.zeros(positions), rho)

    @classmethod
    def quantized(cls, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, rho: float) -> "MountRows":
        """From master rows float32 `[positions, columns, head_dim]`, quantised as the file stores them."""
        payload, scale = quantize(rows.detach().float().cpu())
        plain = [x.detach().float().cpu().clone().contiguous() for x in (gain, bias)]
        return cls(payload, scale, plain[0], plain[1], float(rho))

    def rows(self) -> torch.Tensor:
        """float32 `[positions, columns, head_dim]`, dequantised."""
        return dequantize(self.payload, self.scale)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.payload, self.scale, self.gain, self.bias)


@dataclass(frozen=True, slots=True)
class MapFactors:
    """One map: what a concept adds at one layer of the denoiser where the picture looks at the trigger, see `maps`. No rows of a table: it
    has no addresses.

    Payloads float8_e4m3fn `[rank, channels]`, scales uint8 `[rank, channels / 32]`; `channels` are those that the layer reads and gives.
    """

    into_payload: torch.Tensor
    into_scale: torch.Tensor
    out_payload: torch.Tensor
    out_scale: torch.Tensor

    @classmethod
    def quantized(cls, into: torch.Tensor, out: torch.Tensor) -> "MapFactors":
        """From master factors float32 `[rank, channels]` each, quantised as the file stores them."""
        return cls(*quantize(into.detach().float().cpu()), *quantize(out.detach().float().cpu()))

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(into, out), float32 `[rank, channels]` each, dequantised."""
        return dequantize(self.into_payload, self.into_scale), dequantize(self.out_payload, self.out_scale)

    @property
    def rank(self) -> int:
        return self.into_payload.shape[0]

    @property
    def channels(self) -> int:
        return self.into_payload.shape[1]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.into_payload, self.into_scale, self.out_payload, self.out_scale)


@dataclass(frozen=True, slots=True)
class RoleRows:
    """A concept at one encoder: the encoder's width, its tokenizer's fingerprint, the trigger's sequences, rows per mount, and maps.

    `maps` holds what is added at the denoiser's layers, by "attention.{i}" and "feedforward.{i}" for its i-th cross-attention; `widths`, by
    mount, the widths of those that add to states of another width than the encoder's.
    """

    width: int
    fingerprint: str
    groups: tuple[RowGroup, ...]
    variants: tuple[Variant, ...]
    mounts: Mapping[str, MountRows]
    maps: Mapping[str, MapFactors] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)

    def width_at(self, mount: str) -> int:
        """Width of the states that a mount adds to."""
        return self.widths.get(mount, self.width)

    @property
    def positions(self) -> int:
        """Span positions that own rows, over all groups; int, of every mount alike."""
        return sum(len(group.canonical) for group in self.groups)


def map_start(rank: int, channels: int, *, number: int = 0, seed: int = 0) -> torch.Tensor:
    """Where `into` of an untrained map starts: rows number * rank onwards of a fixed orthonormal basis, float32 `[rank, channels]`.

    `number` counts the maps of one cross-attention, so that those of equal rank read other directions; `seed` is that of the concept's
    bases. Equal for all concepts.
    """
    one = torch.zeros(rank, channels)
    one[torch.arange(rank), number * rank + torch.arange(rank)] = 1.0
    return fixed_basis(one, width=channels, seed=2 * seed)


def untrained_maps(shapes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, MapFactors]:
    """Maps that add nothing, by name: `into` at `map_start`, `out` zero. `shapes` holds (rank, channels) by name, `seed` is the bases'.

    Raises:
        TinyEngramError: no name of a map, a rank below 1, or channels that are no multiple of 32 or too few for the ranks.
    """
    sites: dict[int, list[str]] = {}
    named: list[tuple[str, str, int]] = []
    for name in shapes:
        parts = map_name(name)
        if parts is None:
            raise TinyEngramError(f"map {name!r} is unknown; expected {' or '.join(f'{site}.NUMBER' for site in SITES)}")
        site, attention = parts
        sites.setdefault(attention, []).append(site)
        named.append((name, site, attention))
    made: dict[str, MapFactors] = {}
    for name, site, attention in named:
        rank, channels = shapes[name]
        here = sorted(sites[attention], key=SITES.index)
        if channels % BLOCK or not 1 <= rank <= channels // len(here):
            raise TinyEngramError(
                f"map {name!r} has rank {rank} and {channels} channels; expected a multiple of {BLOCK} channels, "
                f"and a rank from 1 to {channels // len(here)}"
            )
        into = map_start(rank, channels, number=here.index(site), seed=seed)
        made[name] = MapFactors.quantized(into, torch.zeros(rank, channels))
    return made
