"""What becomes of row ids that no table has: refused by name, counted, or said in a warning. Imports torch only."""

import warnings
from typing import Literal, get_args

import torch

Bounds = Literal["fatal", "warn", "ignore"]
MODES: tuple[str, ...] = get_args(Bounds)


def checked_mode(bounds: Bounds, error: type[ValueError] = ValueError) -> Bounds:
    """The mode that was given; raises ``error`` for what is none."""
    if bounds not in MODES:
        raise error(f"bounds {bounds!r}: expected one of {', '.join(MODES)}")
    return bounds


def outside(row_ids: torch.Tensor, rows_total: int) -> torch.Tensor:
    """bool like ``row_ids``: neither a row nor -1, which stands for "no row"."""
    return (row_ids < -1) | (row_ids >= rows_total)


def describe(row_ids: torch.Tensor, rows_total: int) -> str | None:
    """One clause on the ids outside the table, or None when there are none. Waits for the device."""
    flat = row_ids.reshape(-1)
    if flat.numel() == 0:
        return None
    low, high = torch.aminmax(flat)
    if int(low) >= -1 and int(high) < rows_total:
        return None
    bad = flat[outside(flat, rows_total)]
    return f"row id {int(bad[0])} is outside [0, {rows_total}), the first of {bad.numel()} such among {flat.numel()} ids"


def refuse(row_ids: torch.Tensor, rows_total: int) -> None:
    """Raises IndexError when an id is outside the table."""
    found = describe(row_ids, rows_total)
    if found is not None:
        raise IndexError(f"{found} (-1 is no row): mend the ids, or read zeros there by bounds='warn' or bounds='ignore'")


def warn(row_ids: torch.Tensor, rows_total: int) -> None:
    """Says in a RuntimeWarning which ids are outside the table."""
    found = describe(row_ids, rows_total)
    if found is not None:
        warnings.warn(f"{found} (-1 is no row): zeros were read there", RuntimeWarning, stacklevel=3)


def count(row_ids: torch.Tensor, rows_total: int, violations: torch.Tensor) -> None:
    """Adds to ``violations`` (how many, the first one) without waiting for the device."""
    flat = row_ids.reshape(-1)
    if flat.numel() == 0:
        return
    bad = outside(flat, rows_total)
    number = bad.sum()
    first = flat.index_select(0, bad.to(torch.uint8).argmax().unsqueeze(0)).squeeze(0)
    violations[1] = torch.where((violations[0] == 0) & (number > 0), first, violations[1])
    violations[0] += number
