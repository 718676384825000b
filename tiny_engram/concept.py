"""One concept: its trigger, the quantised rows and gates per encoder role and mount, its maps, and where they came from.

May import config, triggers, mount_names, concept_rows (which holds rows and maps), concept_layout and concept_file (which hold the file
format). A concept knows no addresses: rows are kept in (variant group, position, n, head) order and get theirs when they are loaded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from tiny_engram import concept_file
from tiny_engram.concept_file import ConceptFileError
from tiny_engram.concept_layout import describe_config, describe_role, format_of, read_role, tensors_of
from tiny_engram.concept_rows import MapFactors, MountRows, RoleRows, untrained_maps
from tiny_engram.config import SPAN, ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.mount_names import describe_mounts
from tiny_engram.triggers import CompiledTrigger

if TYPE_CHECKING:
    from tiny_engram.hub import CommitInfo
    from tiny_engram.sharing import ShareOptions

__all__ = ["Concept", "ConceptFileError", "MapFactors", "MountRows", "RoleRows"]


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

    def __repr__(self) -> str:
        """One line: what it fires on and where it has rows, without their values."""
        places = "; ".join(f"{role}: {describe_mounts(tuple(place.mounts)) or 'maps'}" for role, place in self.roles.items())
        also = f", aliases={list(self.aliases)}" if self.aliases else ""
        return f"Concept({self.name!r}, trigger={self.trigger!r}{also}, base={self.base!r}, rows at {places}, {self.nbytes:,} bytes)"

    @classmethod
    def new(
        cls,
        compiled: Mapping[str, CompiledTrigger],
        *,
        widths: Mapping[str, int],
        fingerprints: Mapping[str, str],
        mounts: Mapping[str, Sequence[str]] | None = None,
        maps: Mapping[str, Mapping[str, tuple[int, int]]] | None = None,
        mount_widths: Mapping[str, Mapping[str, int]] | None = None,
        name: str | None = None,
        config: ConceptConfig | None = None,
        base: str = "",
    ) -> "Concept":
        """An untrained concept, which adds nothing: compiled trigger, width, tokenizer fingerprint and names of mounts per role.

        Without `mounts`, "span" alone, whatever the config asks for: what its groups mean is the pipeline's to say. `maps` holds
        (rank, channels) of each map by role and name, "attention.{i}" or "feedforward.{i}"; without it there are none. `mount_widths`
        holds, by role and mount, the width of what a mount adds to where it is not the encoder's.
        """
        if not compiled:
            raise TinyEngramError("a concept needs at least one encoder role, got none; attach to a pipeline with a text encoder")
        config = config or ConceptConfig()
        roles: dict[str, RoleRows] = {}
        for role, trigger in compiled.items():
            names = (SPAN,) if mounts is None else mounts[role]
            others = (mount_widths or {}).get(role, {})
            others = {mount: others[mount] for mount in names if others.get(mount, widths[role]) != widths[role]}
            rows = {
                mount: MountRows.zeros(trigger.positions, config.columns_at(others.get(mount, widths[role])), config, config.rho_at(mount))
                for mount in names
            }
            roles[role] = RoleRows(
                widths[role],
                fingerprints[role],
                trigger.groups,
                trigger.variants,
                rows,
                untrained_maps((maps or {}).get(role, {}), config.basis_seed),
                others,
            )
        first = next(iter(compiled.values()))
        return cls(name or first.text, first.text, first.aliases, config, base, roles)

    def with_rows(
        self, role: str, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, *, mount: str = SPAN, rho: float | None = None
    ) -> "Concept":
        """A copy whose rows at one mount are these masters, quantised.

        rows float32 `[positions, columns, head_dim]`, gain and bias float32 `[positions]`; rho None keeps the present one.
        Raises TinyEngramError for no tensor, another shape, an unknown role or mount, or values that are not finite.
        """
        old = self.mount_rows(role, mount)
        expected = {"rows": list(old.payload.shape), "gain": list(old.gain.shape), "bias": list(old.bias.shape)}
        for what, tensor in {"rows": rows, "gain": gain, "bias": bias}.items():
            if not isinstance(tensor, torch.Tensor):
                raise TinyEngramError(f"{what} of {self.name!r} is a {type(tensor).__name__}, expected a tensor {expected[what]}")
            if list(tensor.shape) != expected[what]:
                raise TinyEngramError(f"{what} of {self.name!r} have shape {list(tensor.shape)}, expected {expected[what]}")
            if not bool(torch.isfinite(tensor).all()):
                raise TinyEngramError(f"{what} of {self.name!r} hold NaN or infinity, expected finite numbers; lower the learning rate")
        new = MountRows.quantized(rows, gain, bias, old.rho if rho is None else rho)
        place = self.roles[role]
        return dataclasses.replace(self, roles={**self.roles, role: dataclasses.replace(place, mounts={**place.mounts, mount: new})})

    def with_map(self, role: str, name: str, into: torch.Tensor, out: torch.Tensor) -> "Concept":
        """A copy whose map of this name has these masters, quantised: into and out float32 `[rank, channels]`.

        Raises TinyEngramError for another shape, an unknown role or map, or values that are not finite.
        """
        old = self.map_factors(role, name)
        for what, tensor in {"into": into, "out": out}.items():
            if list(tensor.shape) != list(old.into_payload.shape):
                raise TinyEngramError(
                    f"{what} of map {name!r} of {self.name!r} has shape {list(tensor.shape)}, expected {list(old.into_payload.shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise TinyEngramError(
                    f"{what} of map {name!r} of {self.name!r} holds NaN or infinity, expected finite numbers; lower the learning rate"
                )
        place = self.roles[role]
        changed = dataclasses.replace(place, maps={**place.maps, name: MapFactors.quantized(into, out)})
        return dataclasses.replace(self, roles={**self.roles, role: changed})

    def with_details(self, **changes: Any) -> "Concept":
        """A copy with other `name`, `recipe`, `thumbnail`, `base` or `untrained`."""
        return dataclasses.replace(self, **changes)

    def mount_rows(self, role: str, mount: str = SPAN) -> MountRows:
        """The rows at one mount; an unknown role or mount raises and lists the known ones."""
        mounts = self._role(role).mounts
        if mount not in mounts:
            raise TinyEngramError(f"concept {self.name!r} has no mount {mount!r} at role {role!r}; known: {sorted(mounts)}")
        return mounts[mount]

    def map_factors(self, role: str, name: str) -> MapFactors:
        """One map; an unknown role or name raises and lists the known ones."""
        maps = self._role(role).maps
        if name not in maps:
            raise TinyEngramError(f"concept {self.name!r} has no map {name!r} at role {role!r}; known: {sorted(maps) or 'none'}")
        return maps[name]

    def _role(self, role: str) -> RoleRows:
        if role not in self.roles:
            raise TinyEngramError(f"concept {self.name!r} has no role {role!r}; known: {sorted(self.roles)}")
        return self.roles[role]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, scales, gates and maps."""
        return sum(rows.nbytes for role in self.roles.values() for rows in (*role.mounts.values(), *role.maps.values()))

    @property
    def metadata(self) -> dict[str, str]:
        """What the file's header says, str -> str."""
        return concept_file.pack_metadata(self.describe(), self.thumbnail)

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors and the thumbnail, as JSON types."""
        version = format_of(self.config, self.roles)
        return {
            "format": version,
            "name": self.name,
            "trigger": self.trigger,
            "aliases": list(self.aliases),
            "untrained": list(self.untrained),
            "base": self.base,
            "config": describe_config(self.config, version),
            "roles": {role: describe_role(place) for role, place in self.roles.items()},
            "recipe": dict(self.recipe),
        }

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, atomically; returns its path. Raises ConceptFileError (disk full, no permission, ...)."""
        return concept_file.write(Path(path), self._tensors(), self.metadata)

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        return concept_file.pack(self._tensors(), self.metadata, f"concept {self.name!r}")

    def _tensors(self) -> dict[str, torch.Tensor]:
        version = format_of(self.config, self.roles)
        return {name: tensor for role, place in self.roles.items() for name, tensor in tensors_of(role, place, version).items()}

    def save_pretrained(self, folder: str | Path, **options: "Unpack[ShareOptions]") -> Path:
        """Write the file, a model card and a gallery into a folder: `tiny_engram.save_pretrained` of this concept."""
        from tiny_engram import sharing

        return sharing.save_pretrained(self, folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> "CommitInfo":
        """Write the same to a repo of the Hub: `tiny_engram.push_to_hub` of this concept, with its options."""
        from tiny_engram import sharing

        return sharing.push_to_hub(self, repo_id, **options)

    @classmethod
    def load(cls, path: str | Path) -> "Concept":
        """Read a file; every size, type and shape is checked. Raises ConceptFileError in one line for anything else."""
        return cls.from_bytes(concept_file.read_bytes(Path(path)), path)

    @classmethod
    def from_bytes(cls, blob: bytes, path: str | Path = "concept") -> "Concept":
        """The concept of a file's bytes, checked as `load` does; `path` is where they are from, for errors."""
        tensors, described, thumbnail = concept_file.parse(blob, path)
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
        roles = {role: read_role(role, about, config, left, described["format"]) for role, about in described["roles"].items()}
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
