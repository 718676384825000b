"""One concept: its trigger, the quantised rows and gates per encoder role and mount, and where they came from.

May import config, quantization, triggers and concept_file (which holds the file format). A concept knows no addresses: rows are kept in
(variant group, position, n, head) order and get their addresses when they are loaded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tiny_engram import concept_file
from tiny_engram.concept_file import ConceptFileError
from tiny_engram.config import FORMAT_VERSION, SPAN, ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.triggers import CompiledTrigger, RowGroup, Variant

__all__ = ["Concept", "ConceptFileError", "MountRows", "RoleRows"]

MOST_RHO = 1e6  # any larger bound could overflow a float32 state


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
        return sum(t.numel() * t.element_size() for t in (self.payload, self.scale, self.gain, self.bias))


@dataclass(frozen=True, slots=True)
class RoleRows:
    """A concept at one encoder: the encoder's width, its tokenizer's fingerprint, the trigger's sequences, rows per mount."""

    width: int
    fingerprint: str
    groups: tuple[RowGroup, ...]
    variants: tuple[Variant, ...]
    mounts: Mapping[str, MountRows]

    @property
    def positions(self) -> int:
        """Span positions that own rows, over all groups."""
        return sum(len(group.canonical) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Concept:
    """One concept, complete and immutable; `save` and `Concept.load` keep every field.

    `roles` maps "clip_l", "t5", ... to its rows; `untrained` lists spellings added after training; `recipe` is free JSON about how it
    was trained; `thumbnail` a data URI (PNG or WebP) or None.
    """

    name: str
    trigger: str
    aliases: tuple[str, ...]
    config: ConceptConfig
    base: str
    roles: Mapping[str, RoleRows]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    thumbnail: str | None = None

    @classmethod
    def new(
        cls,
        compiled: Mapping[str, CompiledTrigger],
        *,
        widths: Mapping[str, int],
        fingerprints: Mapping[str, str],
        mounts: Mapping[str, Sequence[str]] | None = None,
        name: str | None = None,
        config: ConceptConfig | None = None,
        base: str = "",
    ) -> "Concept":
        """An untrained concept (rows zero): compiled trigger, width, tokenizer fingerprint and names of mounts per role.

        Without `mounts`, "span" alone, whatever the config asks for: what its groups mean is the pipeline's to say.
        """
        if not compiled:
            raise TinyEngramError("a concept needs at least one encoder role, got none; attach to a pipeline with a text encoder")
        config = config or ConceptConfig()
        roles: dict[str, RoleRows] = {}
        for role, trigger in compiled.items():
            columns = (config.max_ngram - 1) * config.heads_at(widths[role])
            names = (SPAN,) if mounts is None else mounts[role]
            rows = {mount: MountRows.zeros(trigger.positions, columns, config, config.rho_at(mount)) for mount in names}
            roles[role] = RoleRows(widths[role], fingerprints[role], trigger.groups, trigger.variants, rows)
        first = next(iter(compiled.values()))
        return cls(name or first.text, first.text, first.aliases, config, base, roles)

    def with_rows(
        self, role: str, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, *, mount: str = SPAN, rho: float | None = None
    ) -> "Concept":
        """A copy whose rows at one mount are these masters, quantised.

        rows float32 `[positions, columns, head_dim]`, gain and bias float32 `[positions]`; rho None keeps the present one.
        Raises TinyEngramError for another shape, an unknown role or mount, or values that are not finite.
        """
        old = self.mount_rows(role, mount)
        expected = {"rows": list(old.payload.shape), "gain": list(old.gain.shape), "bias": list(old.bias.shape)}
        for what, tensor in {"rows": rows, "gain": gain, "bias": bias}.items():
            if list(tensor.shape) != expected[what]:
                raise TinyEngramError(f"{what} of {self.name!r} have shape {list(tensor.shape)}, expected {expected[what]}")
            if not bool(torch.isfinite(tensor).all()):
                raise TinyEngramError(f"{what} of {self.name!r} hold NaN or infinity, expected finite numbers; lower the learning rate")
        new = MountRows.quantized(rows, gain, bias, old.rho if rho is None else rho)
        place = self.roles[role]
        return dataclasses.replace(self, roles={**self.roles, role: dataclasses.replace(place, mounts={**place.mounts, mount: new})})

    def with_details(self, **changes: Any) -> "Concept":
        """A copy with other `name`, `recipe`, `thumbnail`, `base` or `untrained`."""
        return dataclasses.replace(self, **changes)

    def mount_rows(self, role: str, mount: str = SPAN) -> MountRows:
        """The rows at one mount; an unknown role or mount raises and lists the known ones."""
        if role not in self.roles:
            raise TinyEngramError(f"concept {self.name!r} has no role {role!r}; known: {sorted(self.roles)}")
        mounts = self.roles[role].mounts
        if mount not in mounts:
            raise TinyEngramError(f"concept {self.name!r} has no mount {mount!r} at role {role!r}; known: {sorted(mounts)}")
        return mounts[mount]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, scales and gates."""
        return sum(rows.nbytes for role in self.roles.values() for rows in role.mounts.values())

    @property
    def metadata(self) -> dict[str, str]:
        """What the file's header says, str -> str."""
        return concept_file.pack_metadata(self.describe(), self.thumbnail)

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors and the thumbnail, as JSON types."""
        roles = {
            role: {
                "width": place.width,
                "tokenizer": place.fingerprint,
                "groups": [{"text": g.text, "canonical": list(g.canonical)} for g in place.groups],
                "variants": [{"text": v.text, "ids": list(v.ids), "group": v.group} for v in place.variants],
                "rho": {mount: rows.rho for mount, rows in place.mounts.items()},
            }
            for role, place in self.roles.items()
        }
        return {
            "format": FORMAT_VERSION,
            "name": self.name,
            "trigger": self.trigger,
            "aliases": list(self.aliases),
            "untrained": list(self.untrained),
            "base": self.base,
            "config": self.config.to_dict(),
            "roles": roles,
            "recipe": dict(self.recipe),
        }

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, atomically; returns its path. Raises ConceptFileError (disk full, no permission, ...)."""
        tensors = {
            f"{role}.{mount}.{what}": getattr(rows, what).contiguous()
            for role, place in self.roles.items()
            for mount, rows in place.mounts.items()
            for what in ("payload", "scale", "gain", "bias")
        }
        return concept_file.write(Path(path), tensors, self.metadata)

    @classmethod
    def load(cls, path: str | Path) -> "Concept":
        """Read a file; every size, type and shape is checked. Raises ConceptFileError in one line for anything else."""
        tensors, described, thumbnail = concept_file.read(Path(path))
        try:
            return cls._assemble(tensors, described, thumbnail)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
            detail = error if isinstance(error, TinyEngramError) else f"{type(error).__name__} {error}"
            raise ConceptFileError(
                f"{path}: the header does not describe a concept ({detail}); expected a file saved by tiny-engram"
            ) from error

    @classmethod
    def _assemble(cls, tensors: dict[str, torch.Tensor], described: dict[str, Any], thumbnail: str | None) -> "Concept":
        config = ConceptConfig.from_dict(described["config"])
        left = dict(tensors)
        roles: dict[str, RoleRows] = {}
        for role, about in described["roles"].items():
            width = about["width"]
            if not isinstance(width, int) or not 1 <= width <= 65_536:
                raise TinyEngramError(f"width of role {role!r} is {width!r}, expected 1..65536")
            groups: list[RowGroup] = []
            for group in about["groups"]:
                offset = sum(len(g.canonical) for g in groups)
                groups.append(RowGroup(str(group["text"]), tuple(int(c) for c in group["canonical"]), offset))
            variants = tuple(Variant(tuple(int(i) for i in v["ids"]), str(v["text"]), int(v["group"])) for v in about["variants"])
            if (
                not groups
                or not variants
                or not all(0 <= v.group < len(groups) and len(v.ids) == len(groups[v.group].canonical) for v in variants)
            ):
                raise TinyEngramError(f"token sequences of role {role!r} do not fit together")
            positions = sum(len(g.canonical) for g in groups)
            columns = (config.max_ngram - 1) * config.heads_at(width)
            shapes = {
                "payload": (torch.float8_e4m3fn, [positions, columns, config.head_dim]),
                "scale": (torch.uint8, [positions, columns, config.head_dim // 32]),
                "gain": (torch.float32, [positions]),
                "bias": (torch.float32, [positions]),
            }
            mounts: dict[str, MountRows] = {}
            for mount, rho in about["rho"].items():
                parts: dict[str, torch.Tensor] = {}
                for what, (dtype, shape) in shapes.items():
                    tensor = left.pop(f"{role}.{mount}.{what}", None)
                    if tensor is None:
                        raise TinyEngramError(f"tensor {role}.{mount}.{what} is missing")
                    if tensor.dtype != dtype or list(tensor.shape) != shape:
                        raise TinyEngramError(f"{role}.{mount}.{what} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {shape}")
                    if tensor.dtype == torch.float32 and not bool(torch.isfinite(tensor).all()):
                        raise TinyEngramError(f"{role}.{mount}.{what} holds NaN or infinity, expected finite numbers")
                    parts[what] = tensor
                if isinstance(rho, bool) or not isinstance(rho, int | float) or not 0 < rho <= MOST_RHO:
                    raise TinyEngramError(f"rho of {role}.{mount} is {rho!r}, expected a number above 0, at most {MOST_RHO:g}")
                rows = MountRows(**parts, rho=float(rho))
                if not bool(torch.isfinite(rows.rows()).all()):
                    raise TinyEngramError(f"{role}.{mount}.payload holds NaN or infinity, expected finite numbers")
                mounts[mount] = rows
            roles[role] = RoleRows(width, str(about["tokenizer"]), tuple(groups), variants, mounts)
        if left:
            raise TinyEngramError(f"unexpected tensors {sorted(left)[:4]}")
        if not roles:
            raise TinyEngramError("no encoder role")
        return cls(
            name=str(described["name"]),
            trigger=str(described["trigger"]),
            aliases=tuple(str(a) for a in described["aliases"]),
            config=config,
            base=str(described["base"]),
            roles=roles,
            recipe=dict(described["recipe"]),
            untrained=tuple(str(u) for u in described.get("untrained", ())),
            thumbnail=thumbnail,
        )
