"""What a concept's file says of one encoder, and its tensors: from `RoleRows` and back, with every size, type and shape checked.

May import config, concept_rows, triggers and mount_names. In format 1 tensors are "{role}.{mount}.{part}". In format 2 a role has
"{role}.rows.{part}", all mounts stacked in the order of the description, and "{role}.maps.payload" and "{role}.maps.scale", the maps'
factors one behind the other: a header names every tensor, and would be longer than what it is about. Format 3 is format 2 where some mounts
add to states of another width than the encoder's: those of width 1152 are in "{role}.rows.1152.{part}".
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from tiny_engram.concept_rows import MapFactors, MountRows, RoleRows
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
MAP_PARTS = tuple(f.name for f in fields(MapFactors))


def _is_first_format(mount: str) -> bool:
    name = context_name(mount)
    return mount == SPAN if name is None else not name.shared and name.bands == 1


def format_of(config: ConceptConfig, roles: Mapping[str, RoleRows]) -> int:
    """The lowest format that holds this concept, which old readers read: 1 where rows at "span" and "context.{i}.key|value" are all, 3
    where mounts have widths of their own."""
    plain = ConceptConfig()
    old = all(getattr(config, name) == getattr(plain, name) for name in NEW_FIELDS)
    old = old and not any(place.maps for place in roles.values())
    old = old and all(_is_first_format(mount) for place in roles.values() for mount in place.mounts)
    if any(place.widths for place in roles.values()):
        return FORMAT_VERSION
    return 1 if old else 2


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
    if place.widths:
        described["widths"] = dict(place.widths)
    if place.maps:
        described["maps"] = {name: [rows.rank, rows.channels] for name, rows in place.maps.items()}
    return described


def tensors_of(role: str, place: RoleRows, version: int) -> dict[str, torch.Tensor]:
    """The tensors of one role, by their names in a file of this format."""
    if version == 1:
        return {f"{role}.{mount}.{part}": getattr(rows, part).contiguous() for mount, rows in place.mounts.items() for part in MOUNT_PARTS}
    found = {
        f"{stack}.{part}": _stacked([getattr(place.mounts[mount], part) for mount in mounts])
        for stack, mounts in _stacks(role, tuple(place.mounts), place.widths).items()
        for part in MOUNT_PARTS
    }
    for part in ("payload", "scale"):
        factors = [getattr(rows, f"{side}_{part}").flatten() for rows in place.maps.values() for side in ("into", "out")]
        found |= {f"{role}.maps.{part}": _joined(factors)} if factors else {}
    return found


def _stacks(role: str, mounts: Sequence[str], widths: Mapping[str, int]) -> dict[str, list[str]]:
    """Which mounts lie in one stack of tensors, in their order, by the stack's name."""
    stacks: dict[str, list[str]] = {}
    for mount in mounts:
        stacks.setdefault(f"{role}.rows" + (f".{widths[mount]}" if mount in widths else ""), []).append(mount)
    return stacks


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return _joined([tensor[None] for tensor in tensors])


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Along the first dimension; by bytes, since torch joins no float8 on some devices."""
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


def _taken_apart(role: str, about: dict[str, Any], left: dict[str, torch.Tensor]) -> None:
    """Put the tensors of a role in format 2 into `left` one by one, as those of format 1 are."""
    for stack, mounts in _stacks(role, tuple(about["rho"]), about.get("widths", {})).items():
        for part in MOUNT_PARTS:
            stacked = left.pop(f"{stack}.{part}", None)
            if stacked is None:
                raise TinyEngramError(f"tensor {stack}.{part} is missing")
            if stacked.ndim == 0 or len(stacked) != len(mounts):
                raise TinyEngramError(f"{stack}.{part} is {list(stacked.shape)}, expected {len(mounts)} mounts first")
            _put(left, {f"{role}.{mount}.{part}": rows.clone() for mount, rows in zip(mounts, stacked, strict=True)})
    shapes = about.get("maps", {})
    sizes = {"payload": [rank * channels for rank, channels in shapes.values()]}
    sizes["scale"] = [size // BLOCK for size in sizes["payload"]]
    for part, each in sizes.items() if shapes else ():
        joined = left.pop(f"{role}.maps.{part}", None)
        if joined is None:
            raise TinyEngramError(f"tensor {role}.maps.{part} is missing")
        if list(joined.shape) != [2 * sum(each)]:
            raise TinyEngramError(f"{role}.maps.{part} is {list(joined.shape)}, expected [{2 * sum(each)}]")
        split = iter(joined.split([size for size in each for _ in range(2)]))
        for name, (rank, _) in shapes.items():
            _put(left, {f"{role}.map.{name}.{side}_{part}": next(split).reshape(rank, -1).clone() for side in ("into", "out")})


def _put(left: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    if both := sorted(tensors.keys() & left.keys()):
        raise TinyEngramError(f"unexpected tensors {both[:4]}")
    left |= tensors


def read_role(role: str, about: dict[str, Any], config: ConceptConfig, left: dict[str, torch.Tensor], version: int) -> RoleRows:
    """What `describe_role` and `tensors_of` said in a file of this format; its tensors are taken out of `left`.

    Raises:
        TinyEngramError: a size, type or shape that does not fit, or values that are not finite; and KeyError, TypeError and the like
            for a description that is none.
    """
    width = _checked_width(f"role {role!r}", about["width"])
    widths = {str(mount): _checked_width(f"mount {mount!r} of {role!r}", of) for mount, of in about.get("widths", {}).items()}
    if widths and (version < 3 or not widths.keys() <= about["rho"].keys() or width in widths.values()):
        raise TinyEngramError(f"widths of role {role!r} are {widths!r}, expected those of its mounts that have not its own, in format 3")
    groups: list[RowGroup] = []
    for group in about["groups"]:
        offset = sum(len(g.canonical) for g in groups)
        groups.append(RowGroup(str(group["text"]), tuple(int(c) for c in group["canonical"]), offset))
    variants = tuple(Variant(tuple(int(i) for i in v["ids"]), str(v["text"]), int(v["group"])) for v in about["variants"])
    if not groups or not variants or not all(0 <= v.group < len(groups) and len(v.ids) == len(groups[v.group].canonical) for v in variants):
        raise TinyEngramError(f"token sequences of role {role!r} do not fit together")
    positions = sum(len(g.canonical) for g in groups)
    for name, shape in about.get("maps", {}).items():
        _check_shape(role, name, shape)
    if version > 1:
        _taken_apart(role, about, left)
    mounts = {
        mount: _read_mount(f"{role}.{mount}", rho, positions, config.columns_at(widths.get(mount, width)), config, left)
        for mount, rho in about["rho"].items()
    }
    maps = {name: _read_map(role, name, shape, left) for name, shape in about.get("maps", {}).items()}
    return RoleRows(width, str(about["tokenizer"]), tuple(groups), variants, mounts, maps, widths)


def _checked_width(what: str, width: Any) -> int:
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MOST_WIDTH:
        raise TinyEngramError(f"width of {what} is {width!r}, expected 1..{MOST_WIDTH}")
    return width


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


def _check_shape(role: str, name: str, shape: Any) -> None:
    if map_name(name) is None:
        raise TinyEngramError(f"map {name!r} of role {role!r} is unknown, expected attention.NUMBER or feedforward.NUMBER")
    rank, channels = shape
    sizes = all(isinstance(side, int) and not isinstance(side, bool) for side in shape)
    if not sizes or not 1 <= rank <= channels <= MOST_WIDTH or channels % BLOCK:
        raise TinyEngramError(f"map {name!r} of role {role!r} is {shape!r}, expected [rank, channels], channels a multiple of {BLOCK}")


def _read_map(role: str, name: str, shape: list[int], left: dict[str, torch.Tensor]) -> MapFactors:
    (rank, channels), where, parts = shape, f"{role}.map.{name}", []
    for side in ("into", "out"):
        parts.append(_take(left, f"{where}.{side}_payload", torch.float8_e4m3fn, [rank, channels]))
        parts.append(_take(left, f"{where}.{side}_scale", torch.uint8, [rank, channels // BLOCK]))
    rows = MapFactors(*parts)
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
