"""What a concept's file says of one encoder, and its tensors: from `RoleRows` and back, with every size, type and shape checked.

May import config, concept_rows, triggers and mount_names. Tensors are "{role}.{mount}.{part}" and "{role}.map.{map}.{part}".
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from tiny_engram.concept_rows import MapRows, MountRows, RoleRows
from tiny_engram.config import BLOCK, FORMAT_VERSION, SPAN, ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.mount_names import context_name, map_name
from tiny_engram.triggers import RowGroup, Variant

__all__ = ["describe_config", "describe_role", "format_of", "read_role", "tensors_of"]

MOST_RHO = 1e6  # any larger bound could overflow a float32 state
MOST_WIDTH = 65_536
# What readers of format 1 do not know.
NEW_FIELDS = ("share", "bands", "attention_rank", "feedforward_rank")
MOUNT_PARTS = tuple(f.name for f in fields(MountRows) if f.name != "rho")
MAP_PARTS = tuple(f.name for f in fields(MapRows))


def _is_first_format(mount: str) -> bool:
    name = context_name(mount)
    return mount == SPAN if name is None else not name.shared and name.bands == 1


def format_of(config: ConceptConfig, roles: Mapping[str, RoleRows]) -> int:
    """The lowest format that holds this concept: 1 where rows at "span" and "context.{i}.key|value" are all, which old readers read."""
    plain = ConceptConfig()
    old = all(getattr(config, name) == getattr(plain, name) for name in NEW_FIELDS)
    old = old and not any(place.maps for place in roles.values())
    old = old and all(_is_first_format(mount) for place in roles.values() for mount in place.mounts)
    return 1 if old else FORMAT_VERSION


def describe_config(config: ConceptConfig, version: int) -> dict[str, Any]:
    """The config as JSON types, without fields that readers of this format refuse."""
    return {name: value for name, value in config.to_dict().items() if version > 1 or name not in NEW_FIELDS}


def describe_role(place: RoleRows) -> dict[str, Any]:
    """Everything but the tensors, as JSON types."""
    described: dict[str, Any] = {
        "width": place.width,
        "tokenizer": place.fingerprint,
        "groups": [{"text": g.text, "canonical": list(g.canonical)} for g in place.groups],
        "variants": [{"text": v.text, "ids": list(v.ids), "group": v.group} for v in place.variants],
        "rho": {mount: rows.rho for mount, rows in place.mounts.items()},
    }
    if place.maps:
        described["maps"] = {name: [rows.rank, rows.channels] for name, rows in place.maps.items()}
    return described


def tensors_of(role: str, place: RoleRows) -> dict[str, torch.Tensor]:
    """The tensors of one role, by their names in the file."""
    mounts = {f"{role}.{m}.{part}": getattr(rows, part).contiguous() for m, rows in place.mounts.items() for part in MOUNT_PARTS}
    maps = {f"{role}.map.{name}.{part}": getattr(rows, part).contiguous() for name, rows in place.maps.items() for part in MAP_PARTS}
    return mounts | maps


def read_role(role: str, about: dict[str, Any], config: ConceptConfig, left: dict[str, torch.Tensor]) -> RoleRows:
    """What `describe_role` and `tensors_of` said; its tensors are taken out of `left`.

    Raises:
        TinyEngramError: a size, type or shape that does not fit, or values that are not finite; and KeyError, TypeError and the like
            for a description that is none.
    """
    width = about["width"]
    if not isinstance(width, int) or not 1 <= width <= MOST_WIDTH:
        raise TinyEngramError(f"width of role {role!r} is {width!r}, expected 1..{MOST_WIDTH}")
    groups: list[RowGroup] = []
    for group in about["groups"]:
        offset = sum(len(g.canonical) for g in groups)
        groups.append(RowGroup(str(group["text"]), tuple(int(c) for c in group["canonical"]), offset))
    variants = tuple(Variant(tuple(int(i) for i in v["ids"]), str(v["text"]), int(v["group"])) for v in about["variants"])
    if not groups or not variants or not all(0 <= v.group < len(groups) and len(v.ids) == len(groups[v.group].canonical) for v in variants):
        raise TinyEngramError(f"token sequences of role {role!r} do not fit together")
    positions = sum(len(g.canonical) for g in groups)
    columns = (config.max_ngram - 1) * config.heads_at(width)
    mounts = {mount: _read_mount(f"{role}.{mount}", rho, positions, columns, config, left) for mount, rho in about["rho"].items()}
    maps = {name: _read_map(role, name, shape, left) for name, shape in about.get("maps", {}).items()}
    return RoleRows(width, str(about["tokenizer"]), tuple(groups), variants, mounts, maps)


def _read_mount(where: str, rho: Any, positions: int, columns: int, config: ConceptConfig, left: dict[str, torch.Tensor]) -> MountRows:
    payload = _take(left, f"{where}.payload", torch.float8_e4m3fn, [positions, columns, config.head_dim])
    scale = _take(left, f"{where}.scale", torch.uint8, [positions, columns, config.head_dim // BLOCK])
    gain, bias = (_take(left, f"{where}.{part}", torch.float32, [positions]) for part in ("gain", "bias"))
    if isinstance(rho, bool) or not isinstance(rho, int | float) or not 0 < rho <= MOST_RHO:
        raise TinyEngramError(f"rho of {where} is {rho!r}, expected a number above 0, at most {MOST_RHO:g}")
    rows = MountRows(payload, scale, gain, bias, float(rho))
    if not bool(torch.isfinite(rows.rows()).all()):
        raise TinyEngramError(f"{where}.payload holds NaN or infinity, expected finite numbers")
    return rows


def _read_map(role: str, name: str, shape: Any, left: dict[str, torch.Tensor]) -> MapRows:
    if map_name(name) is None:
        raise TinyEngramError(f"map {name!r} of role {role!r} is unknown, expected attention.NUMBER or feedforward.NUMBER")
    rank, channels = shape
    sizes = all(isinstance(side, int) and not isinstance(side, bool) for side in shape)
    if not sizes or not 1 <= rank <= channels <= MOST_WIDTH or channels % BLOCK:
        raise TinyEngramError(f"map {name!r} of role {role!r} is {shape!r}, expected [rank, channels], channels a multiple of {BLOCK}")
    where, parts = f"{role}.map.{name}", []
    for side in ("into", "out"):
        parts.append(_take(left, f"{where}.{side}_payload", torch.float8_e4m3fn, [rank, channels]))
        parts.append(_take(left, f"{where}.{side}_scale", torch.uint8, [rank, channels // BLOCK]))
    rows = MapRows(*parts)
    if not all(bool(torch.isfinite(factor).all()) for factor in rows.factors()):
        raise TinyEngramError(f"{where} holds NaN or infinity, expected finite numbers")
    return rows


def _take(left: dict[str, torch.Tensor], name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    tensor = left.pop(name, None)
    if tensor is None:
        raise TinyEngramError(f"tensor {name} is missing")
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise TinyEngramError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {shape}")
    if tensor.dtype == torch.float32 and not bool(torch.isfinite(tensor).all()):
        raise TinyEngramError(f"{name} holds NaN or infinity, expected finite numbers")
    return tensor
